"""Verification that the written file depends on its input values like PyTorch, one input at a time.

A trace turns a value that Python reads (``range(int(n))``, ``if flag``) into a constant of the graph; random
inputs detect the constant only by chance. Numbers, flags and rows of integers are therefore replaced by neighbouring
values. If Python reads values, numbers also get distant values, and floats both signs. Values refused
by PyTorch prove nothing and are reported. Independent of the capture of the graph.

Random floats have magnitudes up to about 4. The ONNX form of some operators, such as the logarithm of a
sigmoid, overflows or loses precision far from 0. A graph with such operators is compared on an additional sample of
floats far from 0. Outputs that are NaN or infinite in PyTorch are not compared. Models that convert input floats
to integers are not compared either, since the integers may be sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir
import torch

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.outputs import ROUNDING_FACTOR, TEXT_KINDS, CheckedValue, OutputComparison, compare_outputs
from winml.modelkit.compare.verification.file_run import WrittenFile
from winml.modelkit.compare.verification.input_draws import InputDraws
from winml.modelkit.compare.verification.python_reads import ValueReads, run_watched
from winml.modelkit.compare.verification.reference_run import PreparedPart, run_in_float64, run_reference, with_values
from winml.modelkit.compare.verification.rounding import is_decided_by_rounding, is_decided_by_ties
from winml.modelkit.compare.verification.sizes import Draw, WrittenGraph, axes_of, run_draw
from winml.modelkit.errors import ExportError, StageError, VerificationError, first_line, opt
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.onnx.assumptions import Assumption, assume_branch, assume_size, assume_values
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.feeds import FeedRules, holds_lengths, is_mask
from winml.modelkit.tags.tagging import read_tag


def settled_assumptions(written: WrittenGraph, reads: ValueReads) -> Iterator[Assumption]:
    """Yield the assumptions, completed with the source lines that read values, their inputs and values.

    A line that reads only weights assumes nothing about inputs; nor does a line that reads sizes, if all sizes are
    static.

    Args:
        written: The file, and the assumptions of its trace.
        reads: Values that PyTorch reads at the traced inputs.
    """
    assumed_places = {fact.place for fact in written.assumed}
    unseen = (
        (assume_values if read.takes_all else assume_branch)(place)
        for place, read in reads.lines.items()
        if read.is_unseen and read.inputs
    )
    for fact in (*written.assumed, *(fact for fact in unseen if fact.place not in assumed_places)):
        is_read = fact.kind in ("branch", "value") and reads.has_run
        if not is_read or fact.file is None or fact.line is None:
            yield fact
            continue
        place = (fact.file, fact.line)
        read = reads.lines.get(place)
        if read is not None and read.inputs:
            yield replace(fact, input=", ".join(sorted(read.inputs)), value=fact.value or read.value or None)
        elif read is None and fact.value is None and fact.kind == "branch":
            sizes = {size for axes in axes_of(written.inputs).values() for size in axes.values()}
            yield from [assume_size(place, sizes=sizes)] if sizes else []
        elif read is None:
            yield fact


Tensors = Mapping[str, torch.Tensor]

_SMALL = 16
"""Chosen: tensors with so few elements may hold sizes or counts, whatever their shape."""
_LARGEST_COUNT = 1000
"""Chosen: an integer may be a count or a size, whose run time grows with its value."""
_REACH, _FACTOR = 8, 4
"""Chosen: bounds are tried up to the larger of 8 and four times the traced value, since a forward may count up to
them."""
_MAX_LISTED_VALUES = 8
_MAX_LISTED_NAMES = 3
_MAX_LISTED_REFUSALS = 2
"""Maximum number of reported values that PyTorch refuses for the same reason."""
_LARGE_FACTOR = 100
"""Chosen: random floats have magnitudes up to about 4, thresholds in a forward may be 50."""
_FAR_FACTORS = (10.0, 100.0)
"""Chosen: random values become about 20, where a float32 added to 1.0 is lost, up to a few hundred, whose exponential
overflows."""
_FAR_DTYPES = (torch.float32, torch.float64)
"""Types that hold results computed from such values; 16-bit floats overflow in both PyTorch and ONNX Runtime."""
_SENSITIVE = frozenset(
    {
        "Acosh", "Asinh", "Atanh", "Cosh", "Exp", "Floor", "Log", "LogSoftmax", "Mod", "ReduceLogSum",
        "ReduceLogSumExp", "ReduceProd", "Round", "Sinh", "Softplus",
    }
)  # fmt: skip
"""Chosen: operators that overflow, cancel or jump far from 0. Graphs without them are as accurate there as near 0 and
are not run."""
_ZEROS, _ONES, _EQUAL = "only zeros", "only ones", "equal values"
_DECIDING: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "no negative values": torch.abs,
    "no positive values": lambda values: -values.abs(),
    _ZEROS: torch.zeros_like,
    _ONES: torch.ones_like,
    f"{_LARGE_FACTOR} times the values": lambda values: _LARGE_FACTOR * values,
}
"""Chosen: changes of floats that cross likely thresholds of a forward."""


@dataclass(frozen=True)
class Varied:
    """Reference outputs with one or more inputs varied."""

    names: tuple[str, ...]
    words: str
    """Description of the values."""
    draw: Draw

    @property
    def inputs_words(self) -> str:
        """Names of the inputs for messages."""
        return " and ".join(self.names if len(self.names) <= _MAX_LISTED_NAMES else [self.names[0], "more inputs"])

    @property
    def are_ties(self) -> bool:
        """Return True if all values are equal: positions alone decide the ranking."""
        return self.words in (_ZEROS, _ONES)


@dataclass(frozen=True)
class VariedValues:
    """Reference outputs with single inputs varied."""

    varied: tuple[Varied, ...] = ()
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Input → values that PyTorch refuses, each with the reason."""
    reads: ValueReads = field(default_factory=ValueReads)
    """Values that the forward reads in Python."""
    far: Varied | None = None
    """Sample of floats far from 0, for all inputs together."""


def run_at_varied_values(
    prepared: PreparedPart,
    traced: Draw,
    rules: FeedRules,
    *,
    reads_values: bool,
    reads: ValueReads | None = None,
) -> VariedValues:
    """Run PyTorch on other values of each input that random draws may not vary, one input at a time.

    Args:
        prepared: The part, with values.
        traced: The traced sample.
        rules: Known rules of valid input values.
        reads_values: True if a line of the user's Python read values during the trace. Then all inputs are varied like
            inputs read by Python: numbers to distant values, floats to zeros, ones and both signs.
        reads: Values that Python reads from the traced inputs; ``None``: the part is run once more to record them.
    """
    varied: list[Varied] = []
    refused: dict[str, tuple[str, ...]] = {}

    def add(names: Sequence[str], label: str, changed: Tensors) -> bool:
        output = _torch_output_at(prepared, traced, changed)
        if isinstance(output, Draw):
            varied.append(Varied(tuple(names), label, output))
            return True
        reported = refused.get(names[0], ())
        if len(names) == 1 and sum(output in reason for reason in reported) < _MAX_LISTED_REFUSALS:
            refused[names[0]] = (*reported, f"{label} ({output})")
        return False

    reads = reads or run_watched(prepared, traced.inputs)[1]
    floats: list[InputTensorSpec] = []
    for spec in prepared.part.inputs:
        values, is_read = traced.inputs[spec.name], reads_values or spec.name in reads.deciding
        for candidates in _other_values(spec, values, prepared.part, rules, is_read=is_read, reads_values=reads_values):
            add([spec.name], value_words(candidates), {spec.name: candidates})
        low, high = spec.value_range or (-1, 1)
        if is_read and values.is_floating_point() and values.numel() > 1 and low < 0 < high:
            floats.append(spec)
    for label, change in _DECIDING.items():
        changed = {spec.name: _clamp_to_range(change(traced.inputs[spec.name]), spec) for spec in floats}
        changed = {name: values for name, values in changed.items() if not torch.equal(values, traced.inputs[name])}
        if changed and not add([*changed], label, changed) and len(changed) > 1:
            for name, values in changed.items():
                add([name], label, {name: values})
    for name, other_name in itertools.combinations(sorted(reads.deciding), 2):
        source, twin = traced.inputs[name], traced.inputs[other_name]
        if source.shape == twin.shape and source.dtype == twin.dtype and not torch.equal(source, twin):
            add([name, other_name], _EQUAL, {other_name: source})
    # Random inputs vary float tensors anyway; refused signs are not reported.
    refused = {name: reasons for name, reasons in refused.items() if name not in {spec.name for spec in floats}}
    return VariedValues(tuple(varied), refused, reads)


def _torch_output_at(prepared: PreparedPart, traced: Draw, changed: Tensors) -> Draw | str:
    """Run PyTorch on the traced inputs with some changed; return the reason if its outputs cannot be compared.

    Args:
        prepared: The part, with weights.
        traced: The traced sample.
        changed: New values, by input.
    """
    tensors = {**traced.inputs, **changed}
    try:
        reference = run_reference(prepared, tensors)
    except ExportError as error:
        return f"{type(error.__cause__).__name__}: {first_line(error.__cause__ or error)}"[:120]
    if not _are_finite(reference.values()) and _are_finite(traced.reference.values()):
        return "it returns NaN or infinity"
    if any(value.size == 0 for value in reference.values()):
        return "it returns an empty tensor"
    return Draw(tensors, reference, traced.sizes)


def _are_finite(arrays: Iterable[Array]) -> bool:
    return all(bool(np.isfinite(value).all()) for value in arrays if value.dtype.kind not in TEXT_KINDS)


def _other_values(
    spec: InputTensorSpec,
    traced: torch.Tensor,
    part: ModelPart,
    rules: FeedRules,
    *,
    is_read: bool,
    reads_values: bool,
) -> list[torch.Tensor]:
    """List values near the traced values and at the bounds of their range, excluding the traced values.

    Empty for tensors that random inputs vary anyway: floats with several values, and many integers. Inputs read by
    Python get more values; negative ones if Python read values during the trace.

    Args:
        spec: The input.
        traced: Its traced values.
        part: The part of the model.
        rules: Learned rules: masks and lengths.
        is_read: True if Python reads values of this input, or may read them.
        reads_values: True if a line of the user's Python read values during the trace.
    """
    is_of_lengths = spec.value_range is None and holds_lengths(spec, rules)
    if traced.numel() == 0 or spec.ascending:
        return []
    if spec.values:
        stated = (torch.full_like(traced, value) for value in spec.values[:_SMALL] if not isinstance(value, str))
        return [values for values in stated if not torch.equal(values, traced)]
    if spec.grid is not None:
        # Images with as many patches, in rows of another length.
        turned = torch.cat([traced[:, :1], traced[:, 1:].flip(1)], dim=1)
        return [] if torch.equal(turned, traced) else [turned]
    low, high = (1, float(traced.max())) if is_of_lengths else _bounds(spec, traced, part, reads_values=reads_values)
    if not part.are_ranges_examples and is_mask(spec, rules) and traced.dim() > 1:
        # Random inputs contain both values; a mask that hides all positions proves nothing.
        return []
    if low >= high or not _may_be_constant(traced, part, reads_values=is_read):
        return []
    if traced.dtype == torch.bool:
        candidates = [~traced, *_single_flips(traced)]
    elif traced.is_floating_point():
        numbers = (-traced, torch.zeros_like(traced), traced + 1, *(_distant_values(traced) if is_read else ()))
        candidates = [_clamp(value, low, high) for value in numbers]
    else:
        candidates = [_clamp(values, low, high) for values in _neighbours(traced.long())]
        if is_read and traced.numel() <= _SMALL:
            candidates += [_clamp(values, low, high) for values in _distant_values(traced.long())]
        if not part.are_ranges_examples and not is_of_lengths:
            reach = max(_REACH, _FACTOR * int(traced.long().abs().max()))
            bounds = (max(low, -reach), min(high, reach))
            candidates += [_clamp(torch.full_like(traced.long(), int(bound)), low, high) for bound in bounds]
    distinct: list[torch.Tensor] = []
    for values in (values.to(traced.dtype) for values in candidates):
        if not any(torch.equal(values, earlier) for earlier in (traced, *distinct)):
            distinct.append(values)
    return distinct


def _neighbours(traced: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield values near the traced ones, as numbers, modes, masks and lengths."""
    yield traced + 1
    yield traced - 1
    if traced.numel() == 1:
        # A flag may be a mode: 0 and 1 equivalent, 2 and 3 not.
        yield traced + 2
        yield traced + 3
    if traced.dim() > 1 and traced.shape[-1] > 1:
        # A mask may be an integer tensor: rows that end earlier.
        yield torch.cat([traced[..., :-1], traced[..., -1:] - 1], dim=-1)
    if traced.numel() > 1 and (traced.dim() == 1 or traced.numel() <= _SMALL):
        # Lengths may have to fill the row, and sizes may have to differ.
        is_largest = torch.arange(traced.numel(), device=traced.device).reshape(traced.shape) == traced.argmax()
        yield torch.where(is_largest, traced, traced - 1)
        yield traced + (~is_largest).long()


def _single_flips(traced: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield copies with one flag inverted, for tensors with few flags."""
    for index in range(traced.numel() if 1 < traced.numel() <= _SMALL else 0):
        flipped = traced.clone().flatten()
        flipped[index] = ~flipped[index]
        yield flipped.reshape(traced.shape)


def _distant_values(traced: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield distant values, on both sides of zero and of likely thresholds of a forward."""
    yield torch.zeros_like(traced)
    yield torch.ones_like(traced)
    yield -traced
    yield 2 * traced
    for factor in (10, 100):
        if traced.numel() == 1 and (traced.is_floating_point() or factor * int(traced.abs().max()) <= _LARGEST_COUNT):
            yield factor * traced


def _may_be_constant(traced: torch.Tensor, part: ModelPart, *, reads_values: bool) -> bool:
    """Return True if random inputs may miss values on which the model depends."""
    if traced.numel() == 1:
        return True
    if traced.is_floating_point():
        return False
    if traced.dim() <= 1:
        return True
    is_constant = bool((traced == traced.flatten()[0]).all())
    if traced.numel() <= _SMALL:
        return part.are_ranges_examples or reads_values
    return part.are_ranges_examples and traced.dtype != torch.bool and is_constant


def _bounds(spec: InputTensorSpec, traced: torch.Tensor, part: ModelPart, *, reads_values: bool) -> tuple[float, float]:
    """Smallest and largest value to try."""
    if traced.is_floating_point():
        return spec.value_range or (-torch.inf, torch.inf)
    # On devices other than the CPU, a value out of range ends the process instead of the call.
    if traced.dtype == torch.bool or not part.are_ranges_examples or traced.device.type != "cpu":
        return spec.value_range or (0, 1)
    limits = torch.iinfo(traced.dtype)
    # Counts and indices are natural numbers: without negative example values, none are tried, unless a line may test
    # the sign.
    return (0 if int(traced.min()) >= 0 and not (reads_values and traced.numel() == 1) else limits.min, limits.max)


def _clamp(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Limit values to a range, exactly for integers."""
    # As integers, since floats are not exact from 2**53 on.
    bounds = (low, high) if values.is_floating_point() else (int(low), int(high))
    return values.clamp(*bounds)


def _clamp_to_range(values: torch.Tensor, spec: InputTensorSpec) -> torch.Tensor:
    return values if spec.value_range is None else values.clamp(*spec.value_range)


def compare_at_varied_values(file: WrittenFile, values: VariedValues) -> tuple[Varied, ...]:
    """Compare the written file with PyTorch's outputs at other values.

    Returns:
        The varied inputs that were compared.

    Raises:
        VerificationError: the outputs differ: names the inputs, the values and lines that read values. Or the graph
            does not read an input whose value Python reads.
    """
    compared = []
    for varied in values.varied:
        difference = _find_difference(file, varied.draw)
        if difference is not None and difference.is_nan and _hides_rows(varied):
            # For a fully masked row, softmax returns NaN, and PyTorch's own kernels zeros.
            continue
        if difference is None:
            compared.append(varied)
        elif not difference.outputs or not _is_rounding(file, varied, difference.outputs):
            error = _frozen_error(varied, file.written, difference.words)
            error.inputs = varied.draw.inputs if difference.outputs else None
            raise error
    if values.far is not None:
        _refuse_wrong_far_values(file, values.far)
    _refuse_unread_values(file.written, values)
    return tuple(compared)


def _is_rounding(file: WrittenFile, varied: Varied, outputs: Collection[str]) -> bool:
    """Return True if rounding, or the order of equal values, determines these outputs; may run both models again."""
    if is_decided_by_rounding(file.prepared, varied.draw, outputs, file.rounding):
        return True
    traced = file.written.draw
    return varied.are_ties and is_decided_by_ties(file.prepared, varied.draw, traced, outputs, file.run(varied.draw))


@dataclass(frozen=True)
class _Difference:
    """Difference between the outputs of the file and of PyTorch."""

    words: str
    outputs: tuple[str, ...] = ()
    """Outputs with numeric differences only; ``()`` for other differences."""
    is_nan: bool = False
    """True if the file returns NaN where PyTorch does not."""


def _find_difference(file: WrittenFile, draw: Draw) -> _Difference | None:
    """Run the file on a sample; return the difference of its outputs from PyTorch's, ``None`` if equal."""
    try:
        output = file.run(draw)
    except VerificationError as error:
        return _Difference(f"the file fails where PyTorch succeeds: {error.message}")
    if set(output) != set(draw.reference):
        return _Difference(f"PyTorch returns different outputs ({', '.join(draw.reference)})")
    comparisons = compare_outputs([draw.reference], [output], rounding=file.rounding).comparisons
    unequal = [entry for entry in comparisons if not entry.is_equal]
    if not unequal:
        return None
    worst = max(unequal, key=lambda entry: bool(entry.problem))
    text = (
        f"{worst.problem} (output {worst.name!r})"
        if worst.problem
        else f"output {worst.name!r} differs from PyTorch (relative difference {worst.relative_diff:.1e})"
    )
    names = () if worst.problem else tuple(entry.name for entry in unequal)
    is_nan = any(np.isnan(output[entry.name]).sum() > np.isnan(draw.reference[entry.name]).sum() for entry in unequal)
    return _Difference(text, names, is_nan)


def _hides_rows(varied: Varied) -> bool:
    """Return True if a boolean or integer mask was varied, and one of its rows has equal values."""
    tensors = (varied.draw.inputs[name] for name in varied.names)
    return any(
        not value.is_floating_point() and value.dim() > 1 and bool((value == value[..., :1]).all(-1).any())
        for value in tensors
    )


def _refuse_unread_values(written: WrittenGraph, values: VariedValues) -> None:
    """Refuse a file that ignores an input whose value Python reads and may vary in PyTorch.

    Equal outputs at the compared values do not cover other values.

    Raises:
        VerificationError: names the input and the lines that read values.
    """
    outputs = set(written.model.graph.outputs)
    for value in written.model.graph.inputs:
        name = value.name or ""
        runs = [varied for varied in values.varied if varied.names == (name,)]
        is_read = bool(written.choices) and name in values.reads.inputs
        if is_read and runs and not value.uses() and value not in outputs:
            raise _frozen_error(runs[0], written, "Python reads it, but no node of the graph does")


def _frozen_error(varied: Varied, written: WrittenGraph, difference: str) -> VerificationError:
    """Create the error for an input whose traced value is fixed in the file."""
    names = varied.inputs_words
    lines = f"; {places_words(written.choices)}" if written.choices else ""
    if varied.words in (*_DECIDING, _EQUAL):
        return VerificationError(
            f"the trace fixed a branch that depends on {names}: with {varied.words}, {difference}{lines}",
            hint=f"Compute both branches and select with torch.where instead of an if on a value. {opt.no_verify} "
            "writes the file anyway.",
            is_graph_wrong=True,
        )
    traced = value_words(written.draw.inputs[varied.names[0]])
    # A list of several values cannot be declared.
    declared = (
        f" If it is always {traced}, declare that: value_range [{traced}, {traced}] in {opt.input_specs} "
        "(input_tensors in Python)."
    )
    return VerificationError(
        f"the trace fixed {names} to {traced}: at {varied.words}, {difference}{lines}",
        hint=f"Use {names} as a tensor in the forward: compare, index or mask with it instead of int(), range() or "
        f"if.{'' if traced.startswith('[') else declared} {opt.no_verify} writes the file anyway.",
        is_graph_wrong=True,
    )


def places_words(choices: Sequence[str]) -> str:
    """Describe the lines that read values, for a message."""
    places = " and ".join(place or "a scripted module" for place in choices)
    return f"{places} {'reads' if len(choices) == 1 else 'read'} the value of a tensor"


def value_words(values: torch.Tensor) -> str:
    """Format the values of a tensor, shortened if the tensor is large.

    >>> value_words(torch.tensor([3, 5])), value_words(torch.ones(2, 9)), value_words(torch.tensor(0.5))
    ('[3, 5]', '1', '0.5')
    """
    flat = values.detach().cpu().flatten()
    texts = [f"{value:g}" if isinstance(value, float) else str(value) for value in flat[:_MAX_LISTED_VALUES].tolist()]
    if texts and bool((flat == flat[0]).all()):
        return texts[0]
    return f"[{', '.join(texts)}{', …' if len(flat) > _MAX_LISTED_VALUES else ''}]"


def checked_values(
    written: WrittenGraph, draws: Sequence[Draw], values: VariedValues, compared: Sequence[Varied]
) -> Iterator[CheckedValue]:
    """Yield the inputs that were varied alone, and the inputs with one value in all comparisons.

    Args:
        written: The file, and the traced sample.
        draws: All other compared samples.
        values: Outputs of PyTorch at other values.
        compared: The compared part of these values.
    """
    for spec in written.inputs:
        traced = written.draw.inputs[spec.name]
        labels = tuple(varied.words for varied in compared if varied.names == (spec.name,))
        refused = values.refused.get(spec.name, ())
        is_varied = any(spec.name in varied.names for varied in compared)
        is_fixed = not is_varied and not any(_have_other_values(traced, draw.inputs[spec.name]) for draw in draws)
        if traced.numel() and (is_fixed or refused or (labels and labels[0] not in _DECIDING)):
            yield CheckedValue(spec.name, value_words(traced), labels, refused, is_fixed)


def _have_other_values(traced: torch.Tensor, sample: torch.Tensor) -> bool:
    """Return True if another sample has other values, not just a different number of equal values."""
    if traced.shape == sample.shape:
        return not torch.equal(traced, sample)
    return bool((traced != traced.flatten()[0]).any() or (sample != traced.flatten()[0]).any())


def deciding_inputs(file: WrittenFile, sample: Draw) -> list[str]:
    """Find the inputs that alone, with the values of another sample, make the file differ from PyTorch.

    Args:
        file: A file that agrees with PyTorch on the traced sample.
        sample: A sample of the same shapes on which it differs.
    """
    traced = file.written.draw
    names = [name for name, values in traced.inputs.items() if _have_other_values(values, sample.inputs[name])]
    if len(names) < 2:
        return names
    deciding = []
    with with_values(file.prepared) as weighted:
        for name in names:
            try:
                draw = run_draw(weighted, replace(traced, inputs={**traced.inputs, name: sample.inputs[name]}))
            except ExportError:
                continue
            if _find_difference(file, draw):
                deciding.append(name)
    return deciding


def run_at_far_values(prepared: PreparedPart, written: WrittenGraph, inputs: InputDraws) -> Varied | None:
    """Run PyTorch on floats 10 to 100 times as large as those of the smallest sample.

    Args:
        prepared: The part, with values.
        written: The file, and the traced sample.
        inputs: Known rules of valid input values.

    Returns:
        The sample and the outputs of PyTorch; `None` if no input can be larger, the graph has no sensitive operator, or
        PyTorch returns no finite output.
    """
    smallest = min(
        (written.draw, *written.proof.draws), key=lambda draw: sum(value.numel() for value in draw.inputs.values())
    )
    as_traced = inputs.learned.kept | inputs.learned.as_traced
    generator = torch.Generator().manual_seed(inputs.seed)
    far = {}
    for spec in prepared.part.inputs:
        values = smallest.inputs[spec.name]
        # A cache contains values computed by the model.
        is_free = spec.cache is None and not spec.values and spec.name not in as_traced
        if is_free and values.dtype in _FAR_DTYPES and values.device.type == "cpu":
            enlarged = _enlarge(values, spec, generator)
            if not torch.equal(enlarged, values):
                far[spec.name] = enlarged
    if not far or not _is_sensitive(written.model, far):
        return None
    tensors = {**smallest.inputs, **far}
    try:
        reference = run_reference(prepared, tensors)
    except ExportError:
        return None
    if not any(np.isfinite(value).any() for value in reference.values() if value.dtype.kind == "f"):
        return None
    return Varied(tuple(far), "large values", Draw(tensors, reference, smallest.sizes))


def _enlarge(values: torch.Tensor, spec: InputTensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Multiply values by random factors from 10 to 100, limited to the range of the input."""
    low, high = map(math.log, _FAR_FACTORS)
    factors = torch.exp(low + (high - low) * torch.rand(values.shape, generator=generator))
    enlarged = values * factors.to(values.dtype)
    return enlarged if spec.value_range is None else enlarged.clamp(*spec.value_range)


def _is_sensitive(model: ir.Model, names: Collection[str]) -> bool:
    """Return True if a sensitive operator reads values of these inputs, and no float is cast to an integer."""
    reached = {value for value in model.graph.inputs if value.name in names}
    has_sensitive = False
    for node in model.graph.all_nodes():
        if node.op_type in ("Shape", "Size") or reached.isdisjoint(node.inputs):
            continue
        is_cast = node.op_type == "Cast" and _is_float(node.inputs[0])
        if is_cast and ir.DataType(node.attributes["to"].as_int()).is_integer():
            return False
        has_sensitive = has_sensitive or node.op_type in _SENSITIVE
        reached.update(node.outputs)
    return has_sensitive


def _is_float(value: ir.Value | None) -> bool:
    return value is None or value.dtype is None or value.dtype.is_floating_point()


def _refuse_wrong_far_values(file: WrittenFile, far: Varied) -> None:
    """Compare the written file with PyTorch at far values.

    Raises:
        VerificationError: an output differs; names the operator if one returns NaN or infinity.
    """
    answers = file.run(far.draw)
    if answers.keys() != far.draw.reference.keys():
        return
    expected, actual = _mask_non_finite(far.draw.reference, answers)
    comparisons = compare_outputs([expected], [actual], rounding=file.rounding).comparisons
    wrong = [entry for entry in comparisons if _is_wrong(entry)]
    names = [entry.name for entry in wrong]
    if wrong and not (_is_rounded_in_pytorch(file, far.draw, names) or _is_rounding(file, far, names)):
        raise _far_error(file.written, far, wrong)


def _is_rounded_in_pytorch(file: WrittenFile, draw: Draw, outputs: Collection[str]) -> bool:
    """Return True if PyTorch's outputs in float64 and float32 differ beyond the tolerance.

    Then float32 is no valid reference: `1 - sigmoid(20)` is rounding only.
    """
    with with_values(file.prepared) as weighted:
        precise = run_in_float64(weighted, draw.inputs)
    if precise is None:
        return False
    narrowed = {name: precise[name].astype(value.dtype) for name, value in draw.reference.items()}
    comparisons = compare_outputs([draw.reference], [narrowed], rounding=file.rounding).comparisons
    return {*outputs} <= {entry.name for entry in comparisons if not entry.is_equal}


def _mask_non_finite(reference: Arrays, answers: Arrays) -> tuple[Arrays, Arrays]:
    """Replace the values of both sides by 0 where the reference is NaN or infinite."""
    expected, actual = dict(reference), dict(answers)
    for name, value in reference.items():
        if value.dtype.kind == "f" and value.shape == answers[name].shape and not np.isfinite(value).all():
            expected[name], actual[name] = (np.where(np.isfinite(value), array, 0) for array in (value, answers[name]))
    return expected, actual


def _is_wrong(entry: OutputComparison) -> bool:
    """Return True if a difference exceeds the threshold by more than rounding."""
    # For values of very different size, rounding loses more than for similar ones.
    return not entry.is_equal and (bool(entry.problem) or entry.relative_diff > ROUNDING_FACTOR * entry.threshold)


def _far_error(written: WrittenGraph, far: Varied, wrong: Sequence[OutputComparison]) -> VerificationError:
    """Create the error for outputs that differ for large values only.

    Runs the file once more, to find the first operator with infinite values.

    Args:
        written: The written graph, with the traced sample.
        far: The sample with large values.
        wrong: The unequal outputs.
    """
    worst = max(wrong, key=lambda entry: (bool(entry.problem), entry.relative_diff))
    difference = worst.problem or f"relative difference {worst.relative_diff:.1e}, tolerance {worst.threshold:.0e}"
    low, high = _find_range([far.draw.inputs[name] for name in far.names])
    near_low, near_high = _find_range([written.draw.inputs[name] for name in far.names])
    operator = _first_infinite(written, far.draw)
    return VerificationError(
        f"the file differs from PyTorch for large values only: with {far.inputs_words} from {low:.3g} to {high:.3g}, "
        f"output {worst.name!r}: {difference}{operator}",
        hint=f"From {near_low:.3g} to {near_high:.3g} the outputs are equal. Compute it in a form that does not "
        "overflow (logsigmoid in place of log(sigmoid), logaddexp, log_softmax), or declare the range of the inputs: "
        f"value_range in {opt.input_specs} (input_tensors in Python). {opt.no_verify} writes the file anyway.",
        is_graph_wrong=True,
        inputs=far.draw.inputs,
    )


def _find_range(tensors: Sequence[torch.Tensor]) -> tuple[float, float]:
    return min(float(value.min()) for value in tensors), max(float(value.max()) for value in tensors)


def _first_infinite(written: WrittenGraph, draw: Draw) -> str:
    """Describe the first operator that returns NaN or infinity for finite inputs; ``""`` without such an operator."""
    from winml.modelkit.ort.graph_sessions import session_of_graph

    tapped = written.model.clone()
    nodes = [node for node in tapped.graph if node.outputs and node.outputs[0].name]
    tapped.graph.outputs[:] = list(dict.fromkeys(value for node in nodes for value in node.outputs if value.name))
    try:
        values = {**draw.arrays, **session_of_graph(tapped, written.path).run(draw.arrays)}
    except StageError:
        return ""
    for node in nodes:
        inputs = [values[value.name] for value in node.inputs if value is not None and value.name in values]
        produced = [values[value.name] for value in node.outputs if value.name in values]
        if _are_finite(inputs) and not _are_finite(produced):
            tag, ends = read_tag(node), [end for value in inputs for end in _value_ends(value)]
            module = f" of module {tag.module}" if tag is not None and tag.module else ""
            range_words = f", of values from {min(ends):.3g} to {max(ends):.3g}" if ends else ""
            return f"; the first NaN or infinity is that of {node.op_type}{module} (node {node.name}){range_words}"
    return ""


def _value_ends(value: Array) -> tuple[float, ...]:
    """Return smallest and largest value of a float array; ``()`` for other arrays."""
    return (float(value.min()), float(value.max())) if value.dtype.kind == "f" and value.size else ()
