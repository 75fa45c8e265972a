"""Verifies that every dynamic dimension is dynamic in the written file.

Before the export, the model itself is run at other sizes: this tells how the outputs follow, and which sizes the model
accepts. Afterwards the written file must answer the same at each of them, which shows a size the trace took for a
constant. Does not know how a graph is captured or how outputs are compared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import onnx_ir as ir
import torch

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.outputs import OutputComparison
from winml.modelkit.compare.verification.python_reads import ValueReads
from winml.modelkit.compare.verification.reference_run import PreparedPart, run_reference
from winml.modelkit.errors import ExportError, StageError, UsageError, VerificationError, opt
from winml.modelkit.models.output_shapes import Observation, explain_output_shapes
from winml.modelkit.models.tensors import to_numpy
from winml.modelkit.onnx.assumptions import Assumption, places_of
from winml.modelkit.onnx.specs import DynamicDimension, InputTensorSpec
from winml.modelkit.tags.tagging import all_nodes, read_tag
from winml.modelkit.words import shape_words

Sizes = Mapping[str, int]
Bounds = tuple[int, int]
"""Smallest and largest size of a dimension."""

_LARGER_SHARE = 8
"""Chosen: an eighth above the traced size; enough to leave a table that was cut to it, little enough to be quick."""
_FAR_FACTOR, _FAR_MOST = 8, 4096
"""Chosen: a forward that cuts its input into pieces of a fixed size may be traced as one piece, and answers rightly
until there is a second one. Attention over more tokens than this takes gigabytes."""
_FAR_WORK = 5e10
"""Parameters times the product of all dynamic sizes, up to which a far size is tried. Chosen: a second or two on two
cores, and 450 tokens of bert-base."""
_DISPLAYED_OUTPUTS = 4
"""Outputs named in a message; more would bury the rest of it."""
_PLACE_IN_SOURCE = re.compile(r"/onnxruntime_src/\S+ .*?\) (?=\S)")
"""File, line and signature of the C++ function that failed."""


@dataclass(frozen=True)
class Draw:
    """One set of inputs and what PyTorch makes of it."""

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
        """Whether some mask among the inputs hides something."""
        masks = (mask for name, mask in self.inputs.items() if name.endswith("mask") and not mask.is_floating_point())
        return any(bool((mask == 0).any()) for mask in masks)


def run_draw(prepared: PreparedPart, draw: Draw) -> Draw:
    """Return a draw with the outputs of PyTorch for its inputs.

    Raises:
        ExportError: the module refuses the inputs; names the module in which it failed.
    """
    return replace(draw, reference=run_reference(prepared, draw.inputs))


@dataclass(frozen=True)
class DynamicProof:
    """What the model does at other sizes than the traced ones."""

    draws: tuple[Draw, ...] = ()
    """Each dimension by itself at two other sizes where the model accepts two, then all of them together."""
    far_draws: tuple[Draw, ...] = ()
    """Each dimension by itself far beyond the traced size, where that takes little time, or at the bound found."""
    output_shapes: Mapping[str, tuple[int | str, ...]] | None = None
    """Output → its shape in terms of the inputs'; None where nothing is left open."""
    notes: tuple[str, ...] = ()
    """Sizes the model refuses."""

    def other_sizes(self, traced: Sizes) -> dict[str, tuple[int, ...]]:
        """Return, per dimension, the sizes other than the traced one at which the model was run."""
        draws = (*self.draws, *self.far_draws)
        return {name: tuple(sorted({draw.sizes[name] for draw in draws} - {size})) for name, size in traced.items()}


@dataclass(frozen=True)
class WrittenGraph:
    """A file that was just written, and what it was traced with."""

    path: Path
    model: ir.Model
    """The graph in the file, tags included."""
    inputs: tuple[InputTensorSpec, ...]
    """Names in their shapes are dynamic dimensions."""
    draw: Draw
    """Traced inputs and reference outputs."""
    proof: DynamicProof
    assumed: tuple[Assumption, ...] = ()
    """What was taken for granted while it was traced."""
    reads: ValueReads | None = None
    """Values of the traced inputs read by Python; None if not recorded."""

    @property
    def choices(self) -> tuple[str, ...]:
        """Lines of the user's Python that read a tensor's value."""
        return places_of(self.assumed)


class VerifiedFile(Protocol):
    """A written file that runs beside PyTorch."""

    written: WrittenGraph

    def compare(self, draw: Draw) -> tuple[OutputComparison, ...]:
        """Compare the outputs of the file with those of PyTorch; raises StageError if the file cannot be run."""


def axes_of(inputs: Sequence[InputTensorSpec]) -> dict[str, dict[int, str]]:
    """Return input → axis → name, of the sizes that are left open."""
    named = {
        spec.name: {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str)} for spec in inputs
    }
    return {name: axes for name, axes in named.items() if axes}


def run_at_varied_sizes(
    traced: Draw, dimensions: Sequence[DynamicDimension], run: Callable[[Sizes], Draw], parameters: int | None = 0
) -> DynamicProof:
    """Run the model at other sizes and explain the shapes of its outputs.

    Args:
        traced: The draw that is traced.
        dimensions: What is left open.
        run: Draws inputs of these sizes and runs the model; raises ExportError where it refuses them.
        parameters: How many the model has: with many, no size far from the traced one is tried. None: none is tried.

    Raises:
        UsageError: the model takes no other size of a dimension at all, or returns other outputs at one it takes.
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
        notes += _notes_on(dimension, smallest, len(accepted))
        draws += accepted
        together[0][dimension.name] = accepted[-1].sizes[dimension.name]
        together[1][dimension.name] = smallest
    if len(dimensions) > 1:
        draws += _accepted(run, together)
        _refuse_other_outputs(traced, draws)

    def ask(sizes: Sizes) -> Observation | None:
        draw = _run_if_accepted(run, sizes)
        # Where other outputs come out, there is nothing to learn about these.
        return None if draw is None or _output_ranks(draw) != _output_ranks(traced) else _observation(draw)

    far_draws = [
        draw
        for dimension in dimensions
        if parameters is not None and (draw := _far_draw(traced, dimension, draws, run, parameters)) is not None
    ]
    if len(far_draws) > 1:
        far_draws += _together(traced.sizes, far_draws, run, parameters or 0)
    same_outputs = (draw for draw in far_draws if _output_ranks(draw) == _output_ranks(traced))
    observations = [_observation(draw) for draw in (traced, *draws, *same_outputs)]
    # Far from the traced sizes, where a product no longer looks like one of its factors.
    if far := ask(
        {item.name: min(2 * (item.example or 1), item.max or 2 * (item.example or 1)) for item in dimensions}
    ):
        observations.append(far)
    shapes = explain_output_shapes(observations, ask)
    return DynamicProof(tuple(draws), tuple(far_draws), shapes, tuple(notes))


def _accepted_draws(traced: Sizes, dimension: DynamicDimension, run: Callable[[Sizes], Draw]) -> tuple[list[Draw], str]:
    """Return the model's answers at the smallest and at a larger size it accepts, and why it refused one."""
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
    """Return the model's answer far beyond the traced size; None where it refuses that, or it takes too long."""
    example = dimension.example or 1
    most = min(dimension.max or _FAR_MOST, _most_affordable(traced.sizes, dimension.name, parameters))
    tried = max(example, *(draw.sizes[dimension.name] for draw in draws))
    # Odd where it may be; else a multiple of the traced size, which divides as that does.
    for size in dict.fromkeys((min(_FAR_FACTOR * example + 1, most), min(_FAR_FACTOR, most // example) * example)):
        if size > tried and (draw := _run_if_accepted(run, {**traced.sizes, dimension.name: size})) is not None:
            return draw
    return None


def _most_affordable(traced: Sizes, name: str, parameters: int) -> int:
    """Return the largest size of a dimension that is run, the others as traced."""
    others = math.prod(size for other, size in traced.items() if other != name)
    return min(_FAR_MOST, int(_FAR_WORK / max(1, parameters * others)))


def bounded_proof(
    proof: DynamicProof,
    traced: Sizes,
    bounds: Mapping[str, Bounds],
    run: Callable[[Sizes], Draw],
    parameters: int | None,
) -> DynamicProof:
    """Return the proof without draws outside bounds, and with one at each upper bound and two below the traced size.

    New draws are made where they take little time.
    """

    def inside(draws: Sequence[Draw]) -> list[Draw]:
        return [
            draw for draw in draws if all(least <= draw.sizes[name] <= most for name, (least, most) in bounds.items())
        ]

    draws, far_draws = inside(proof.draws), inside(proof.far_draws)
    if bounds and parameters is not None:
        for name, (least, most) in bounds.items():
            # A forward that counts by a size may be right at the smallest one and beyond the traced one by chance.
            below = dict.fromkeys((traced[name] // 2, traced[name] - 1))
            between = [size for size in below if max(least, 2) <= size < traced[name]]
            at_bound = [most] if traced[name] < most <= _most_affordable(traced, name, parameters) else []
            draws += _accepted(run, [{**traced, name: size} for size in between])
            far_draws += _accepted(run, [{**traced, name: size} for size in at_bound])
        far_draws += _together(traced, far_draws, run, parameters)
    return replace(proof, draws=tuple(draws), far_draws=tuple(far_draws))


def limited_by_tables(
    proof: DynamicProof, traced: Sizes, limits: Mapping[str, int], run: Callable[[Sizes], Draw], parameters: int
) -> tuple[DynamicProof, dict[str, Bounds]]:
    """Return the bounds that tables of a graph set, and the proof with a draw beyond each table that is no bound.

    The model is run with the next larger size. If it refuses that size, or a run would take too long, the rows of the
    table are the largest size.

    Args:
        proof: Draws at other sizes than the traced ones.
        traced: Size of every dynamic dimension.
        limits: Dimension → rows of a table that the graph reads up to this size.
        run: Draws inputs of these sizes and runs the model; raises ExportError where it refuses them.
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
            bounds[name] = (0, rows)
        else:
            beyond.append(draw)
    return replace(proof, far_draws=(*proof.far_draws, *beyond)), bounds


def _together(traced: Sizes, draws: Sequence[Draw], run: Callable[[Sizes], Draw], parameters: int) -> list[Draw]:
    """Return a draw with every dimension at the largest size of these draws, where that takes little time."""
    if not draws:
        return []
    sizes = {name: max(draw.sizes[name] for draw in draws) for name in traced}
    is_known = any(draw.sizes == sizes for draw in draws)
    return [] if is_known or parameters * math.prod(sizes.values()) > _FAR_WORK else _accepted(run, [sizes])


def _smallest_accepted(dimension: DynamicDimension, output: Callable[[int], Draw | None]) -> Draw | None:
    """Return the answer at the smallest size below the traced one that has any."""
    refused = 0
    for size in _smaller_sizes(dimension):
        accepted = output(size)
        if accepted is None:
            refused = max(refused, size)
            continue
        # Between the last refused and the first accepted by halving, as if all sizes above one that does were accepted.
        while size - refused > 1 and refused:
            middle = (size + refused) // 2
            draw = output(middle)
            size, accepted, refused = (size, accepted, middle) if draw is None else (middle, draw, refused)
        return accepted
    return None


def _refuse_other_outputs(traced: Draw, draws: Sequence[Draw]) -> None:
    """Refuse sizes that decide how many outputs there are, or of what rank: a graph has one answer to both.

    Raises:
        UsageError: names the dimensions, two sizes, and the outputs at either.
    """
    for draw in draws:
        if _output_ranks(draw) == _output_ranks(traced):
            continue
        moved = [name for name, size in draw.sizes.items() if size != traced.sizes[name]]
        outputs = "; ".join(
            f"at {' and '.join(f'{name} {item.sizes[name]}' for name in moved)}: {_output_words(item)}"
            for item in (traced, draw)
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
    return {name: value.ndim for name, value in draw.reference.items()}


def _output_words(draw: Draw) -> str:
    displayed = [f"{name} {shape_words(str(value.dtype), value.shape)}" for name, value in draw.reference.items()]
    rest = f" and {len(displayed) - _DISPLAYED_OUTPUTS} more" if len(displayed) > _DISPLAYED_OUTPUTS else ""
    return f"{', '.join(displayed[:_DISPLAYED_OUTPUTS])}{rest}"


def _notes_on(dimension: DynamicDimension, smallest: int, accepted: int) -> list[str]:
    """Return what was found out about a dimension that the user might not expect."""
    notes = []
    if (least := min(smallest, dimension.example or smallest)) > dimension.min:
        notes.append(f"{dimension.name}: the model rejects size {dimension.min}; {least} is the smallest size tried.")
    if accepted == 1:
        notes.append(f"{dimension.name}: the model accepts only one of the sizes tried, {smallest}.")
    return notes


def _accepted(run: Callable[[Sizes], Draw], several: Iterable[Sizes]) -> list[Draw]:
    """Return the draws of the sizes that the model accepts."""
    draws = (_run_if_accepted(run, sizes) for sizes in several)
    return [draw for draw in draws if draw is not None]


def _run_if_accepted(run: Callable[[Sizes], Draw], sizes: Sizes) -> Draw | None:
    try:
        return run(sizes)
    except ExportError:
        return None


def _smaller_sizes(dimension: DynamicDimension) -> Iterator[int]:
    """Yield sizes below the traced one, the smallest first."""
    traced = dimension.example or 1
    size = dimension.min
    while size < traced:
        yield size
        size = max(size + 1, size * 2)
    # Where only the traced size divides well: its half, a multiple of what its parts are.
    if traced // 2 >= dimension.min:
        yield traced // 2


def _larger_sizes(dimension: DynamicDimension) -> Iterator[int]:
    """Yield sizes above the traced one; below it where there are none."""
    traced = dimension.example or 1
    # Odd, so that it is seldom a multiple of a stride, and rounding shows.
    odd = (traced + max(1, traced // _LARGER_SHARE)) | 1
    candidates = (odd, traced + 1, traced + 32, traced + traced // 2, traced * 2, traced - 1)
    for size in dict.fromkeys(candidates):
        if size != traced and dimension.min < size <= (dimension.max or size):
            yield size


def _observation(draw: Draw) -> Observation:
    return Observation(draw.sizes, {name: value.shape for name, value in draw.reference.items()})


def declare_output_shapes(graph: ir.Graph, proof: DynamicProof) -> None:
    """Write the observed shapes on the outputs, in place."""
    shapes = proof.output_shapes or {}
    for value in graph.outputs:
        if value.name is not None and value.name in shapes:
            value.shape = ir.Shape(list(shapes[value.name]))


def _frozen_axis_error(draw: Draw, written: WrittenGraph, advice: str, reason: str) -> VerificationError:
    """Return the error for a file that does not follow a size that PyTorch does.

    Args:
        draw: The sizes at which the file failed.
        written: The file.
        advice: What to try first, if anything.
        reason: What ONNX Runtime said, or how the answers differ.
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
    error = VerificationError(
        f"the export froze {' and '.join(moved)} ({', '.join(places)}): traced with {traced_sizes}, the file "
        f"fails at {sizes}, where PyTorch succeeds.{where} {reason}",
        hint=(
            f"{advice}Fix the size (remove the dynamic option, or set a number in {opt.shape_config}), bound it "
            'there ({"min": …, "max": …, "example": …}), or read sizes in that module from its tensors (x.shape, '
            "x.new_zeros), not from stored Python numbers."
        ),
        is_graph_wrong=True,
    )
    error.frozen = tuple(moved)
    return error


def _module_of_failure(model: ir.Model, reason: str) -> str:
    """Return the module of the node ONNX Runtime names in its reason, or an empty string."""
    from winml.modelkit.ort.plug_ins import failed_node  # loads ONNX Runtime

    failed = failed_node(reason)
    for node in all_nodes(model) if failed else ():
        if node.name == failed:
            tag = read_tag(node)
            return f"{tag.module or '(the root)'} ({node.name})" if tag else node.name or ""
    return failed


def compare_at_varied_sizes(
    file: VerifiedFile, run: Callable[[Sizes], Draw], *, advice: str
) -> tuple[OutputComparison, ...]:
    """Compare the written file with what PyTorch answered at other sizes.

    Args:
        file: The file.
        run: Draws inputs of these sizes and runs PyTorch; raises ExportError where it refuses them.
        advice: What to try first where it fails.

    Returns:
        One comparison per output and draw; draws are counted on from the two at the traced sizes.

    Raises:
        VerificationError: the file fails or differs at one of them: names dimension, inputs and, if known, the module.
            Where it does so far from the traced size only, ``most`` says up to which size it answers rightly.
    """
    comparisons: list[OutputComparison] = []
    traced, proof = file.written.draw.sizes, file.written.proof
    for number, draw in enumerate((*proof.draws, *proof.far_draws), start=3):
        found = _compared_or_reason(file, draw)
        if not isinstance(found, str):
            comparisons += (replace(item, draw=number) for item in found)
            continue
        error = _frozen_axis_error(draw, file.written, advice, found)
        if found.startswith("Output "):
            error.inputs = draw.inputs
        is_far = number >= 3 + len(proof.draws)
        if is_far and sum(size != traced[name] for name, size in draw.sizes.items()) == 1:

            def holds(sizes: Sizes) -> bool:
                tried = _run_if_accepted(run, sizes)
                # What PyTorch refuses, nobody runs.
                return tried is None or not isinstance(_compared_or_reason(file, tried), str)

            error.most = _largest_that_holds(file.written, draw, holds)
        raise error
    return tuple(comparisons)


def _largest_that_holds(written: WrittenGraph, failed: Draw, holds: Callable[[Sizes], bool]) -> dict[str, int]:
    """Return the dimension in which a draw is far, and up to which size the file answers as PyTorch does."""
    traced = written.draw.sizes
    (name,) = (name for name, size in failed.sizes.items() if size != traced[name])
    accepted = [draw.sizes[name] for draw in (written.draw, *written.proof.draws, failed)]
    # Where a model takes multiples of a size only, others say nothing.
    step = math.gcd(*accepted)
    low, high = max(size for size in accepted if size < failed.sizes[name]) // step, failed.sizes[name] // step
    while high - low > 1:
        middle = (low + high) // 2
        # Of odd and even sizes, one kind may be right by chance.
        is_right = all(holds({**traced, name: size * step}) for size in {max(low, middle - 1), middle})
        low, high = (middle, high) if is_right else (low, middle)
    return {name: low * step}


def _compared_or_reason(file: VerifiedFile, draw: Draw) -> Sequence[OutputComparison] | str:
    """Compare the file with PyTorch's answer to a draw; in words, how it fails or differs."""
    if _output_ranks(draw) != _output_ranks(file.written.draw):
        return f"PyTorch returns different outputs: {_output_words(draw)}."
    try:
        comparisons = file.compare(draw)
    except StageError as error:
        reason = _unoptimized_reason(file.written.path, draw) or error.message
        return _PLACE_IN_SOURCE.sub("", reason.replace(str(file.written.path), "the file"))
    for item in comparisons:
        if not item.is_equal:
            return f"Output {item.name!r}: {item.problem or f'relative difference {item.relative_diff:.1e}'}."
    return comparisons


def _unoptimized_reason(model_path: Path, draw: Draw) -> str:
    """Return what ONNX Runtime says when it runs the nodes as they are in the file, so that their names are ours."""
    from winml.modelkit.ort.sessions import Session

    try:
        Session(model_path, optimize=False).run(draw.arrays)
    except StageError as error:
        return error.message
    return ""
