"""Verification that every dynamic dimension is dynamic in the written file.

Before the export, the model runs at other sizes to determine the output shapes and the supported sizes. Afterwards the
outputs of the written file must be equal at each size, which detects sizes turned into constants by the trace.
Independent of the capture of the graph and of the comparison of outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

import onnx_ir as ir
import torch

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.outputs import OutputComparison
from winml.modelkit.compare.verification.python_reads import ValueReads
from winml.modelkit.compare.verification.reference_run import PreparedPart, run_reference
from winml.modelkit.errors import ExportError, StageError, UsageError, VerificationError, opt
from winml.modelkit.models.output_shapes import Observation, explain_output_shapes, find_simple_shapes
from winml.modelkit.models.tensors import to_numpy
from winml.modelkit.onnx.assumptions import Assumption, places_of
from winml.modelkit.onnx.specs import DynamicDimension, InputTensorSpec
from winml.modelkit.tags.tagging import all_nodes, read_tag
from winml.modelkit.words import shape_words

Sizes = Mapping[str, int]
Bounds = tuple[int, int]
"""Smallest and largest size of a dimension."""
_SizesOrSample = TypeVar("_SizesOrSample")

_LARGER_SHARE = 8
"""Chosen: an eighth above the traced size; enough to exceed a table of the traced size, and quick to run."""
_FAR_FACTOR, _FAR_MOST = 8, 4096
"""Chosen: a forward that splits its input into pieces of a fixed size may be traced as one piece, and is correct until
there is a second piece. Attention over more tokens takes gigabytes."""
_FAR_WORK = 5e10
"""Maximum of parameters times the product of all dynamic sizes for a far size. Chosen: a second or two on two cores,
and 450 tokens of bert-base."""
_MAX_LISTED_OUTPUTS = 4
"""Maximum number of outputs in a message; more would hide the rest of the message."""
_PLACE_IN_SOURCE = re.compile(r"/onnxruntime_src/\S+ .*?\) (?=\S)")
"""File, line and signature of a failed C++ function."""


@dataclass(frozen=True)
class Draw:
    """One sample of inputs with its reference outputs."""

    inputs: Mapping[str, torch.Tensor]
    reference: Arrays
    sizes: Sizes
    """Size of every dynamic dimension."""

    @property
    def arrays(self) -> dict[str, Array]:
        """The inputs as arrays."""
        return {name: to_numpy(value) for name, value in self.inputs.items()}

    @property
    def has_padding(self) -> bool:
        """True if a mask among the inputs hides a position."""
        masks = (mask for name, mask in self.inputs.items() if name.endswith("mask") and not mask.is_floating_point())
        return any(bool((mask == 0).any()) for mask in masks)


def run_draw(prepared: PreparedPart, draw: Draw) -> Draw:
    """Return a sample with the outputs of PyTorch.

    Raises:
        ExportError: the model refuses the inputs; names the failing module.
    """
    return replace(draw, reference=run_reference(prepared, draw.inputs))


@dataclass(frozen=True)
class DynamicProof:
    """Reference outputs at sizes other than the traced ones."""

    draws: tuple[Draw, ...] = ()
    """Samples with each dimension at two other sizes if the model supports two, then with all dimensions varied
    together."""
    far_draws: tuple[Draw, ...] = ()
    """Samples with one dimension far beyond the traced size, if quick to run, or at the bound found."""
    output_shapes: Mapping[str, tuple[int | str, ...]] | None = None
    """Output → shape in terms of input dimensions; ``None`` without dynamic dimensions."""
    notes: tuple[str, ...] = ()
    """Notes on sizes that the model refuses."""

    def other_sizes(self, traced: Sizes) -> dict[str, tuple[int, ...]]:
        """Dimension → sizes other than the traced size at which the model ran."""
        draws = (*self.draws, *self.far_draws)
        return {name: tuple(sorted({draw.sizes[name] for draw in draws} - {size})) for name, size in traced.items()}


@dataclass(frozen=True)
class WrittenGraph:
    """A newly written file, and its traced sample."""

    path: Path
    model: ir.Model
    """The graph in the file, tags included."""
    inputs: tuple[InputTensorSpec, ...]
    """Input specs; names in their shapes are dynamic dimensions."""
    draw: Draw
    """Traced inputs and reference outputs."""
    proof: DynamicProof
    assumed: tuple[Assumption, ...] = ()
    """Assumptions of the trace."""
    reads: ValueReads | None = None
    """Values of the traced inputs read by Python; None if not recorded."""

    @property
    def choices(self) -> tuple[str, ...]:
        """Lines of the user's Python that read a tensor's value."""
        return places_of(self.assumed)


class VerifiedFile(Protocol):
    """A written file that runs in comparison with PyTorch."""

    written: WrittenGraph

    def compare(self, draw: Draw) -> tuple[OutputComparison, ...]:
        """Compare the outputs of the file with PyTorch; raises StageError if the file cannot run."""


def axes_of(inputs: Sequence[InputTensorSpec]) -> dict[str, dict[int, str]]:
    """Input → axis → name, for the dynamic sizes."""
    by_input = {
        spec.name: {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str)} for spec in inputs
    }
    return {name: axes for name, axes in by_input.items() if axes}


def run_at_varied_sizes(
    traced: Draw, dimensions: Sequence[DynamicDimension], run: Callable[[Sizes], Draw], parameters: int | None = 0
) -> DynamicProof:
    """Run the model at other sizes and explain the shapes of its outputs.

    Args:
        traced: The traced sample.
        dimensions: The dynamic dimensions.
        run: Creates inputs of these sizes and runs the model; raises ExportError if the model refuses them.
        parameters: Number of parameters; far sizes are not tried for large models, nor for ``None``.

    Raises:
        UsageError: the model supports no other size of a dimension, or its outputs differ in number or rank at a size.
    """
    if not dimensions:
        return DynamicProof()
    draws: list[Draw] = []
    notes: list[str] = []
    together: list[dict[str, int]] = [{}, {}]
    for dimension in dimensions:
        accepted, refusal = _accepted_draws(traced.sizes, dimension, run)
        if not accepted:
            error = UsageError(
                f"{dimension.name} cannot be dynamic: at sizes other than {dimension.example}, {refusal}",
                hint=f"Fix its size with {opt.shape_config} or {opt.input_specs}, or make the model accept more sizes.",
            )
            error.frozen = (dimension.name,)
            raise error
        _refuse_other_outputs(traced, accepted)
        smallest = accepted[0].sizes[dimension.name]
        notes += _dimension_notes(dimension, smallest, len(accepted))
        draws += accepted
        together[0][dimension.name] = accepted[-1].sizes[dimension.name]
        together[1][dimension.name] = smallest
    if len(dimensions) > 1:
        draws += _run_accepted(run, together)
        _refuse_other_outputs(traced, draws)

    def ask(sizes: Sizes) -> Observation | None:
        draw = _run_if_accepted(run, sizes)
        # Different outputs provide no information on these shapes.
        return None if draw is None or _output_ranks(draw) != _output_ranks(traced) else _observe_shapes(draw)

    far_draws = [
        draw
        for dimension in dimensions
        if parameters is not None and (draw := _far_draw(traced, dimension, draws, run, parameters)) is not None
    ]
    if len(far_draws) > 1:
        far_draws += _run_together(traced.sizes, far_draws, run, parameters or 0)
    same_outputs = (draw for draw in far_draws if _output_ranks(draw) == _output_ranks(traced))
    observations = [_observe_shapes(draw) for draw in (traced, *draws, *same_outputs)]
    # Far from the traced sizes, where a product is distinguishable from its factors.
    twice = {dim.name: min(2 * (dim.example or 1), dim.max or 2 * (dim.example or 1)) for dim in dimensions}
    if len(far_draws) < len(dimensions) and (far := ask(twice)):
        observations.append(far)
    shapes = explain_output_shapes(observations, ask)
    return DynamicProof(tuple(draws), tuple(far_draws), shapes, tuple(notes))


def run_at_two_sizes(
    traced: Draw, dimensions: Sequence[DynamicDimension], run: Callable[[Sizes], Draw]
) -> DynamicProof | None:
    """Run the model with all dimensions larger, and with all as small as possible; explain the shapes of its outputs.

    Enough for a graph whose outputs are not compared: :func:`run_at_varied_sizes` varies each dimension alone as well.

    Args:
        traced: The traced sample.
        dimensions: The dynamic dimensions.
        run: As for :func:`run_at_varied_sizes`.

    Returns:
        The samples; ``None`` if the model refuses one, or if a shape is no number, dimension or sum of two.
    """
    draws: list[Draw] = []

    def outputs_at(sizes: Sizes) -> Arrays | None:
        draws.extend(_run_accepted(run, [sizes]))
        return draws[-1].reference if draws else None

    shapes = find_simple_shapes(traced.reference, dimensions, outputs_at)
    smallest = {dimension.name: size for dimension in dimensions for size in islice(_smaller_sizes(dimension), 1)}
    if not dimensions or shapes is None or len(smallest) < len(dimensions):
        return None
    draws += _run_accepted(run, [smallest])
    is_same = len(draws) == 2 and _output_ranks(draws[1]) == _output_ranks(traced)
    return DynamicProof(tuple(draws), (), shapes) if is_same else None


def _accepted_draws(traced: Sizes, dimension: DynamicDimension, run: Callable[[Sizes], Draw]) -> tuple[list[Draw], str]:
    """Run the model at the smallest and at a larger supported size; also return the reason of a refusal, or ``""``.

    Args:
        traced: The traced sizes.
        dimension: The dimension to vary.
        run: Runs the model at sizes.
    """
    refusals: list[str] = []

    def answer(size: int) -> Draw | None:
        try:
            return run({**traced, dimension.name: size})
        except ExportError as error:
            refusals.append(error.message)
            return None

    smallest = _smallest_accepted(dimension, answer)
    larger = next((draw for size in _larger_sizes(dimension) if (draw := answer(size)) is not None), None)
    return [draw for draw in (smallest, larger) if draw is not None], next(iter(refusals), "")


def _far_draw(
    traced: Draw, dimension: DynamicDimension, draws: Sequence[Draw], run: Callable[[Sizes], Draw], parameters: int
) -> Draw | None:
    """Run the model far beyond the traced size; ``None`` if refused or too slow.

    Args:
        traced: The traced sample.
        dimension: The dimension to vary.
        draws: Samples at sizes already run.
        run: Runs the model at sizes.
        parameters: Number of parameters, which limits the time.
    """
    example = dimension.example or 1
    limit = min(dimension.max or _FAR_MOST, _most_affordable(traced.sizes, dimension.name, parameters))
    tried = max(example, *(draw.sizes[dimension.name] for draw in draws))
    # Odd if supported, else a multiple of the traced size, which has the same divisors.
    for size in dict.fromkeys((min(_FAR_FACTOR * example + 1, limit), min(_FAR_FACTOR, limit // example) * example)):
        if size > tried and (draw := _run_if_accepted(run, {**traced.sizes, dimension.name: size})) is not None:
            return draw
    return None


def _most_affordable(traced: Sizes, name: str, parameters: int) -> int:
    """Largest affordable size of a dimension, with the other dimensions as traced."""
    product = math.prod(size for key, size in traced.items() if key != name)
    return min(_FAR_MOST, int(_FAR_WORK / max(1, parameters * product)))


def bounded_proof(
    proof: DynamicProof,
    traced: Sizes,
    bounds: Mapping[str, Bounds],
    run: Callable[[Sizes], Draw],
    parameters: int | None,
) -> DynamicProof:
    """Drop samples outside the bounds, and run one at each upper bound and two below the traced size.

    New samples are run only if quick.

    Args:
        proof: The samples so far.
        traced: The traced sizes.
        bounds: Dimension → smallest and largest size.
        run: Runs the model at sizes.
        parameters: Number of parameters, which limits the time; `None`: run no new samples.
    """

    def inside(draws: Sequence[Draw]) -> list[Draw]:
        return [draw for draw in draws if all(low <= draw.sizes[name] <= high for name, (low, high) in bounds.items())]

    draws, far_draws = inside(proof.draws), inside(proof.far_draws)
    if bounds and parameters is not None:
        for name, (low, high) in bounds.items():
            # A forward that counts up to a size may be correct at the smallest size and beyond the traced size by
            # chance.
            below = dict.fromkeys((traced[name] // 2, traced[name] - 1))
            between = [size for size in below if max(low, 2) <= size < traced[name]]
            is_known = any(draw.sizes == {**traced, name: high} for draw in far_draws)
            is_new = not is_known and traced[name] < high <= _most_affordable(traced, name, parameters)
            at_bound = [high] if is_new else []
            draws += _run_accepted(run, [{**traced, name: size} for size in between])
            far_draws += _run_accepted(run, [{**traced, name: size} for size in at_bound])
        far_draws += _run_together(traced, far_draws, run, parameters)
    return replace(proof, draws=tuple(draws), far_draws=tuple(far_draws))


def limited_by_tables(
    proof: DynamicProof, traced: Sizes, limits: Mapping[str, int], run: Callable[[Sizes], Draw], parameters: int
) -> tuple[DynamicProof, dict[str, Bounds]]:
    """Determine the bounds set by tables of a graph; return them with the proof, extended beyond other tables.

    The model is run with the next larger size. If it refuses that size, the largest accepted one is the bound: the rows
    of the table, or of a shorter table that is not in the graph. If a run would take too long, the rows are the bound.

    Args:
        proof: Samples at sizes other than the traced ones.
        traced: Size of every dynamic dimension.
        limits: Dimension → rows of the table that limits the size.
        run: Creates inputs of these sizes and runs the model; raises ExportError if the model refuses them.
        parameters: Number of parameters of the model.
    """
    bounds: dict[str, Bounds] = {}
    beyond = []
    for name, rows in limits.items():
        if name not in traced:
            continue
        accepted = [traced[name], *(draw.sizes[name] for draw in (*proof.draws, *proof.far_draws))]
        if max(accepted) > rows:
            continue
        step = math.gcd(*accepted)
        size = (rows // step + 1) * step
        is_affordable = size <= _most_affordable(traced, name, parameters)
        draw = _run_if_accepted(run, {**traced, name: size}) if is_affordable else None
        if draw is None:
            bounds[name] = (min(accepted), rows)
        if draw is None and is_affordable:
            low, high = max(accepted) // step, size // step
            middle = rows // step  # the rows of the table, in most models
            while high - low > 1:
                tried = _run_if_accepted(run, {**traced, name: middle * step})
                low, high, draw = (low, middle, draw) if tried is None else (middle, high, tried)
                middle = (low + high) // 2
            if low < rows // step:
                bounds[name] = (min(accepted), low * step)
        if draw is not None:
            beyond.append(draw)
    return replace(proof, far_draws=(*proof.far_draws, *beyond)), bounds


def with_reference_outputs(proof: DynamicProof, traced: Sizes, run: Callable[[Draw], Draw]) -> DynamicProof:
    """Add the outputs of the model with weights to the samples of a model that was traced without weights.

    Samples far from the traced sizes, or of several other sizes together, are dropped if the model refuses them:
    indices beyond the rows of a table fail only with values.

    Args:
        proof: The samples.
        traced: The traced sizes.
        run: Runs the model on a sample.

    Raises:
        ExportError: the model refuses another sample.
    """
    draws: list[Draw] = []
    for draw in proof.draws:
        is_single = sum(size != traced[name] for name, size in draw.sizes.items()) == 1
        draws += [run(draw)] if is_single else _run_accepted(run, [draw])
    return replace(proof, draws=tuple(draws), far_draws=tuple(_run_accepted(run, proof.far_draws)))


def _run_together(traced: Sizes, draws: Sequence[Draw], run: Callable[[Sizes], Draw], parameters: int) -> list[Draw]:
    """Run a sample with every dimension at its largest size among these samples, if quick.

    `[]` if slow, refused, or one of these samples already.
    """
    if not draws:
        return []
    sizes = {name: max(draw.sizes[name] for draw in draws) for name in traced}
    is_known = any(draw.sizes == sizes for draw in draws)
    return [] if is_known or parameters * math.prod(sizes.values()) > _FAR_WORK else _run_accepted(run, [sizes])


def _smallest_accepted(dimension: DynamicDimension, output: Callable[[int], Draw | None]) -> Draw | None:
    """Find the smallest supported size below the traced size; return its sample, `None` if no smaller size works.

    Args:
        dimension: The dynamic dimension.
        output: Size → sample, `None` if the size is not supported.
    """
    refused = 0
    for size in _smaller_sizes(dimension):
        accepted = output(size)
        if accepted is None:
            refused = max(refused, size)
            continue
        # Bisect between the last refused and the first supported size, assuming that all larger sizes are supported.
        while size - refused > 1 and refused:
            middle = (size + refused) // 2
            draw = output(middle)
            size, accepted, refused = (size, accepted, middle) if draw is None else (middle, draw, refused)
        return accepted
    return None


def _refuse_other_outputs(traced: Draw, draws: Sequence[Draw]) -> None:
    """Refuse sizes that change the number or rank of the outputs, which are fixed in a graph.

    Raises:
        UsageError: names the dimensions, two sizes, and the outputs at each.
    """
    for draw in draws:
        if _output_ranks(draw) == _output_ranks(traced):
            continue
        moved = [name for name, size in draw.sizes.items() if size != traced.sizes[name]]
        outputs = "; ".join(
            f"at {' and '.join(f'{name} {sample.sizes[name]}' for name in moved)}: {_output_words(sample)}"
            for sample in (traced, draw)
        )
        error = UsageError(
            f"{' and '.join(moved)} cannot be dynamic: the set of outputs depends on the size, and a graph has fixed "
            f"outputs ({outputs})",
            hint=f"Fix the size (remove the dynamic option, or set a number in {opt.shape_config}), bound it to sizes "
            "with the same outputs, or return one tensor (torch.stack; squeeze with a named axis).",
        )
        error.frozen = tuple(moved)
        raise error


def _output_ranks(draw: Draw) -> dict[str, int]:
    """Return output → number of axes."""
    return {name: value.ndim for name, value in draw.reference.items()}


def _output_words(draw: Draw) -> str:
    texts = [f"{name} {shape_words(str(value.dtype), value.shape)}" for name, value in draw.reference.items()]
    rest = f" and {len(texts) - _MAX_LISTED_OUTPUTS} more" if len(texts) > _MAX_LISTED_OUTPUTS else ""
    return f"{', '.join(texts[:_MAX_LISTED_OUTPUTS])}{rest}"


def _dimension_notes(dimension: DynamicDimension, smallest: int, accepted: int) -> Iterator[str]:
    """Note unexpected limits of a dimension."""
    lowest, highest = sorted((smallest, dimension.example or smallest))
    if accepted == 1:
        yield f"{dimension.name}: of the sizes tried, the model accepts {lowest} and {highest} only."
    elif lowest > dimension.min:
        yield f"{dimension.name}: the model rejects size {dimension.min}; {lowest} is the smallest size tried."


def _run_accepted(run: Callable[[_SizesOrSample], Draw], several: Iterable[_SizesOrSample]) -> list[Draw]:
    """Return the samples that the model supports, of several sizes or samples."""
    draws = (_run_if_accepted(run, tried) for tried in several)
    return [draw for draw in draws if draw is not None]


def _run_if_accepted(run: Callable[[_SizesOrSample], Draw], tried: _SizesOrSample) -> Draw | None:
    """Run a sample, or one of these sizes; ``None`` if the model refuses it."""
    try:
        return run(tried)
    except ExportError:
        return None


def _smaller_sizes(dimension: DynamicDimension) -> Iterator[int]:
    """Yield sizes below the traced size, in ascending order."""
    traced = dimension.example or 1
    size = dimension.min
    while size < traced:
        yield size
        size = max(size + 1, size * 2)
    # If only the traced size divides well: half of it, a multiple of the same factors.
    if traced // 2 >= dimension.min:
        yield traced // 2


def _larger_sizes(dimension: DynamicDimension) -> Iterator[int]:
    """Yield sizes above the traced size, then one below."""
    traced = dimension.example or 1
    # Odd, so that it is rarely a multiple of a stride, and rounding is visible.
    odd = (traced + max(1, traced // _LARGER_SHARE)) | 1
    candidates = (odd, traced + 1, traced + 32, traced + traced // 2, traced * 2, traced - 1)
    for size in dict.fromkeys(candidates):
        if size != traced and dimension.min < size <= (dimension.max or size):
            yield size


def _observe_shapes(draw: Draw) -> Observation:
    """Return the sizes of a sample with the shapes of its outputs."""
    return Observation(draw.sizes, {name: value.shape for name, value in draw.reference.items()})


def declare_output_shapes(graph: ir.Graph, proof: DynamicProof) -> None:
    """Set the observed shapes of the outputs, in place."""
    shapes = proof.output_shapes or {}
    for value in graph.outputs:
        if value.name is not None and value.name in shapes:
            value.shape = ir.Shape(list(shapes[value.name]))


def _frozen_axis_error(draw: Draw, written: WrittenGraph, reason: str) -> VerificationError:
    """Create the error for a file that fails at a size that PyTorch supports.

    Args:
        draw: The sample on which the file failed.
        written: The file.
        reason: Error of ONNX Runtime, or difference of the outputs.
    """
    traced = written.draw.sizes
    moved = [name for name, size in draw.sizes.items() if size != traced[name]]
    places = [
        f"axis {axis} of {spec.name}"
        for spec in written.inputs
        for axis, size in enumerate(spec.shape)
        if size in moved
    ]
    sizes = " and ".join(f"{name} {draw.sizes[name]}" for name in moved)
    traced_sizes = " and ".join(str(traced[name]) for name in moved)
    lost = _module_of_failure(written.model, reason)
    where = f" The size is fixed in module {lost}." if lost else ""
    failure = "differs" if reason.startswith("Output ") else "fails"
    error = VerificationError(
        f"the export froze {' and '.join(moved)} ({', '.join(places)}): traced with {traced_sizes}, the file "
        f"{failure} at {sizes}, where PyTorch succeeds.{where} {reason}",
        hint=(
            f"Fix the size (remove the dynamic option, or set a number in {opt.shape_config}), bound it "
            'there ({"min": …, "max": …, "example": …}), or read sizes in that module from its tensors (x.shape, '
            "x.new_zeros), not from stored Python numbers."
        ),
        is_graph_wrong=True,
    )
    error.frozen = tuple(moved)
    return error


def _module_of_failure(model: ir.Model, reason: str) -> str:
    """Return module and name of the node in ONNX Runtime's error, as words; the name alone without a tag.

    Empty if the error names no node.
    """
    from winml.modelkit.ort.plug_ins import failed_node  # loads ONNX Runtime

    failed = failed_node(reason)
    for node in all_nodes(model) if failed else ():
        if node.name == failed:
            tag = read_tag(node)
            return f"{tag.module or '(the root)'} ({node.name})" if tag else node.name or ""
    return failed


def compare_at_varied_sizes(file: VerifiedFile, run: Callable[[Sizes], Draw]) -> tuple[OutputComparison, ...]:
    """Compare the written file with PyTorch's outputs at other sizes.

    Args:
        file: The file.
        run: Creates inputs of these sizes and runs PyTorch; raises ExportError if PyTorch refuses them.

    Returns:
        One comparison per output and sample; sample numbers continue after the two samples at the traced sizes.

    Raises:
        VerificationError: the file fails or differs at a size: names dimension, inputs and, if known, the module. If
            only far from the traced size, ``most`` is the largest correct size.
    """
    comparisons: list[OutputComparison] = []
    traced, proof = file.written.draw.sizes, file.written.proof
    for number, draw in enumerate((*proof.draws, *proof.far_draws), start=3):
        comparison = _compare_or_explain(file, draw)
        if not isinstance(comparison, str):
            comparisons += (replace(entry, draw=number) for entry in comparison)
            continue
        error = _frozen_axis_error(draw, file.written, comparison)
        if comparison.startswith("Output "):
            error.inputs = draw.inputs
        is_far = number >= 3 + len(proof.draws)
        if is_far and sum(size != traced[name] for name, size in draw.sizes.items()) == 1:

            def holds(sizes: Sizes) -> bool:
                tried = _run_if_accepted(run, sizes)
                # Sizes refused by PyTorch are never used.
                return tried is None or not isinstance(_compare_or_explain(file, tried), str)

            error.most = _largest_that_holds(file.written, draw, holds)
        raise error
    return tuple(comparisons)


def _largest_that_holds(written: WrittenGraph, failed: Draw, holds: Callable[[Sizes], bool]) -> dict[str, int]:
    """Find, by bisection, the largest correct size of the only dimension in which ``failed`` differs from the trace.

    Args:
        written: The written graph, with the traced and further correct samples.
        failed: The sample with unequal outputs.
        holds: Compares the file at sizes; True if equal.
    """
    traced = written.draw.sizes
    (name,) = (name for name, size in failed.sizes.items() if size != traced[name])
    accepted = [draw.sizes[name] for draw in (written.draw, *written.proof.draws, failed)]
    # For a model that supports multiples of a size only, other sizes provide no information.
    step = math.gcd(*accepted)
    low, high = max(size for size in accepted if size < failed.sizes[name]) // step, failed.sizes[name] // step
    while high - low > 1:
        middle = (low + high) // 2
        # Odd or even sizes may be correct by chance.
        is_right = all(holds({**traced, name: size * step}) for size in {max(low, middle - 1), middle})
        low, high = (middle, high) if is_right else (low, middle)
    return {name: low * step}


def _compare_or_explain(file: VerifiedFile, draw: Draw) -> Sequence[OutputComparison] | str:
    """Compare the file with PyTorch on a sample; return the reason if it fails or differs."""
    if _output_ranks(draw) != _output_ranks(file.written.draw):
        return f"PyTorch returns different outputs: {_output_words(draw)}."
    try:
        comparisons = file.compare(draw)
    except StageError as error:
        reason = _unoptimized_reason(file.written.path, draw) or error.message
        return _PLACE_IN_SOURCE.sub("", reason.replace(str(file.written.path), "the file"))
    for entry in comparisons:
        if not entry.is_equal:
            return f"Output {entry.name!r}: {entry.problem or f'relative difference {entry.relative_diff:.1e}'}."
    return comparisons


def _unoptimized_reason(model_path: Path, draw: Draw) -> str:
    """Run the unoptimized file and return ONNX Runtime's error, which names nodes of the file; ``""`` if it runs."""
    from winml.modelkit.ort.sessions import Session

    try:
        Session(model_path, optimize=False).run(draw.arrays)
    except StageError as error:
        return error.message
    return ""
