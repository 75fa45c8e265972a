"""Proves that every dimension that was left open is open in the written file.

Before the export, the model itself is run at other sizes: this tells how the outputs follow, and which sizes the model
accepts. Afterwards the written file must answer the same at each of them, which shows a size the trace took for a
constant. Does not know how a graph is captured or how outputs are compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir
import torch
from torch import nn

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare.outputs import OutputComparison, compare_outputs
from winml.modelkit.errors import ExportError, StageError, UsageError, VerificationError
from winml.modelkit.export.output_shapes import Observation, explain_output_shapes
from winml.modelkit.export.state_restoration import restored_tensor_values
from winml.modelkit.export.tensors import to_numpy
from winml.modelkit.graph.specs import DynamicDimension, InputTensorSpec
from winml.modelkit.hierarchy.tagging import all_nodes, read_tag
from winml.modelkit.words import shape_words

__all__ = [
    "Draw",
    "DynamicProof",
    "WrittenGraph",
    "axes_of",
    "compare_at_varied_sizes",
    "declare_output_shapes",
    "run_at_varied_sizes",
    "unchanged_attributes",
]

Sizes = Mapping[str, int]

_LARGER_SHARE = 8
"""Chosen: an eighth above the traced size; enough to leave a table that was cut to it, little enough to be quick."""
_SIMPLE = (bool, int, float, str, tuple, type(None), torch.Tensor)
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
    """Size of every open dimension."""

    @property
    def has_padding(self) -> bool:
        """Whether some mask among the inputs hides something."""
        masks = (mask for name, mask in self.inputs.items() if name.endswith("mask") and not mask.is_floating_point())
        return any(bool((mask == 0).any()) for mask in masks)


@dataclass(frozen=True)
class DynamicProof:
    """What the model does at other sizes than the traced ones."""

    draws: tuple[Draw, ...] = ()
    """Each dimension by itself at two other sizes where the model accepts two, then all of them together."""
    output_shapes: Mapping[str, tuple[int | str, ...]] | None = None
    """Output → its shape in terms of the inputs'; None where nothing is left open."""
    notes: tuple[str, ...] = ()
    """Sizes the model refuses."""

    def other_sizes(self, traced: Sizes) -> dict[str, tuple[int, ...]]:
        """Return, per dimension, the sizes other than the traced one at which the model was run."""
        return {
            name: tuple(sorted({draw.sizes[name] for draw in self.draws} - {size})) for name, size in traced.items()
        }


@dataclass(frozen=True)
class WrittenGraph:
    """A file that was just written, and what it was traced with."""

    path: Path
    model: ir.Model
    """The graph in the file, tags included."""
    inputs: tuple[InputTensorSpec, ...]
    """Names in their shapes are open dimensions."""
    draw: Draw
    """What was traced."""
    proof: DynamicProof
    choices: tuple[str, ...] = ()
    """Lines of the user's Python that read a tensor's value while it was traced."""


@contextmanager
def unchanged_attributes(model: nn.Module) -> Iterator[None]:
    """Put back, in place and at the end, the numbers, buffers and submodules that a forward keeps on its modules.

    Some forwards write down the size they saw (a window cut to a small image), count in a buffer, or replace a module
    by one for short texts (for: BigBird, BigBird-Pegasus), and go on with it.
    """
    before = {module: {**vars(module), **module._buffers} for module in model.modules()}
    children = {module: dict(module.named_children()) for module in before}
    try:
        with restored_tensor_values(model.buffers()):
            yield
    finally:
        for module, attributes in before.items():
            for name, value in attributes.items():
                if name in module._buffers:
                    module._buffers[name] = value
                elif isinstance(value, _SIMPLE) and vars(module).get(name) is not value:
                    vars(module)[name] = value
            for name, child in children[module].items():
                setattr(module, name, child)


def axes_of(inputs: Sequence[InputTensorSpec]) -> dict[str, dict[int, str]]:
    """Return input → axis → name, of the sizes that are left open."""
    named = {
        spec.name: {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str)} for spec in inputs
    }
    return {name: axes for name, axes in named.items() if axes}


def run_at_varied_sizes(
    traced: Draw, dimensions: Sequence[DynamicDimension], run: Callable[[Sizes], Draw]
) -> DynamicProof:
    """Run the model at other sizes and explain the shapes of its outputs.

    Args:
        traced: The draw that is traced.
        dimensions: What is left open.
        run: Draws inputs of these sizes and runs the model; raises ExportError where it refuses them.

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
                f"{dimension.name} cannot be left open: at other sizes than {dimension.example} {refusal}",
                hint="Fix its size with --shape-config or --input-specs, or let the model accept others.",
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
        draws += [draw for sizes in together if (draw := _run_or_reason(run, sizes)[0]) is not None]
        _refuse_other_outputs(traced, draws)

    def ask(sizes: Sizes) -> Observation | None:
        draw = _run_or_reason(run, sizes)[0]
        # Where other outputs come out, there is nothing to learn about these.
        return (
            None
            if draw is None or _output_ranks(draw) != _output_ranks(traced)
            else Observation(draw.sizes, _output_shapes(draw))
        )

    observations = [Observation(draw.sizes, _output_shapes(draw)) for draw in (traced, *draws)]
    # Far from the traced sizes, where a product no longer looks like one of its factors.
    if far := ask(
        {item.name: min(2 * (item.example or 1), item.max or 2 * (item.example or 1)) for item in dimensions}
    ):
        observations.append(far)
    return DynamicProof(tuple(draws), explain_output_shapes(observations, ask), tuple(notes))


def _accepted_draws(traced: Sizes, dimension: DynamicDimension, run: Callable[[Sizes], Draw]) -> tuple[list[Draw], str]:
    """Return the model's answers at the smallest and at a larger size it accepts, and why it refused one."""
    refusals: list[str] = []

    def answer(size: int) -> Draw | None:
        draw, reason = _run_or_reason(run, {**traced, dimension.name: size})
        refusals.extend([reason] if reason else [])
        return draw

    smallest = _smallest_accepted(dimension, answer)
    larger = next((draw for size in _larger_sizes(dimension) if (draw := answer(size)) is not None), None)
    return [draw for draw in (smallest, larger) if draw is not None], next(iter(refusals), "")


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
            f"{' and '.join(moved)} cannot be left open: other sizes give other outputs, and a graph always gives the "
            f"same ones ({outputs})",
            hint="Fix the size (leave the dynamic option out, or give a number in --shape-config), bound it to sizes "
            "where they are the same, or let the forward return one tensor (torch.stack; squeeze with a named axis).",
        )
        error.frozen = tuple(moved)
        raise error


def _output_ranks(draw: Draw) -> dict[str, int]:
    return {name: value.ndim for name, value in draw.reference.items()}


def _output_words(draw: Draw) -> str:
    displayed = [f"{name} {shape_words(str(value.dtype), value.shape)}" for name, value in draw.reference.items()]
    rest = f" and {len(displayed) - _DISPLAYED_OUTPUTS} others" if len(displayed) > _DISPLAYED_OUTPUTS else ""
    return f"{', '.join(displayed[:_DISPLAYED_OUTPUTS])}{rest}"


def _notes_on(dimension: DynamicDimension, smallest: int, accepted: int) -> list[str]:
    """Return what was found out about a dimension that the user might not expect."""
    notes = []
    if (least := min(smallest, dimension.example or smallest)) > dimension.min:
        notes.append(f"{dimension.name}: the model itself refuses size {dimension.min}; {least} is the least tried.")
    if accepted == 1:
        notes.append(f"{dimension.name}: the model accepts one other size of those tried, {smallest}.")
    return notes


def _run_or_reason(run: Callable[[Sizes], Draw], sizes: Sizes) -> tuple[Draw | None, str]:
    try:
        return run(sizes), ""
    except ExportError as error:
        return None, error.message


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


def _output_shapes(draw: Draw) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in draw.reference.items()}


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
    where = f" It was lost in module {lost}." if lost else ""
    error = VerificationError(
        f"{' and '.join(moved)} froze in the export ({', '.join(places)}): traced with {traced_sizes}, the file fails "
        f"at {sizes}, where PyTorch answers.{where} {reason}",
        hint=(
            f"{advice}Fix the size (leave the dynamic option out, or give a number in --shape-config), or let that "
            "module take sizes from its tensors (x.shape, x.new_zeros) and not from Python numbers kept elsewhere."
        ),
        is_graph_wrong=True,
    )
    error.frozen = tuple(moved)
    return error


def _module_of_failure(model: ir.Model, reason: str) -> str:
    """Return the module of the node ONNX Runtime names in its reason, or an empty string."""
    from winml.modelkit.runtime.plug_ins import failed_node  # loads ONNX Runtime

    failed = failed_node(reason)
    for node in all_nodes(model) if failed else ():
        if node.name == failed:
            tag = read_tag(node)
            return f"{tag.module or '(the root)'} ({node.name})" if tag else node.name or ""
    return failed


def compare_at_varied_sizes(
    written: WrittenGraph,
    computed_in: Sequence[str],
    run_file: Callable[[Draw], Arrays],
    *,
    advice: str = "",
) -> tuple[OutputComparison, ...]:
    """Compare the written file with what PyTorch answered at other sizes.

    Args:
        written: The file, and what PyTorch answered.
        computed_in: Dtypes the model computes in.
        run_file: Runs the file; raises StageError where it cannot.
        advice: What to try first where it fails.

    Returns:
        One comparison per output and draw; draws are counted on from the two at the traced sizes.

    Raises:
        VerificationError: the file fails or differs at one of them: names dimension, inputs and, if known, the module.
    """
    if not written.proof.draws:
        return ()
    comparisons: list[OutputComparison] = []
    for number, draw in enumerate(written.proof.draws, start=3):
        try:
            output = run_file(draw)
        except StageError as error:
            feeds = {name: to_numpy(value) for name, value in draw.inputs.items()}
            reason = _without_path(_unoptimized_reason(written.path, feeds) or error.message, written.path)
            raise _frozen_axis_error(draw, written, advice, reason) from error
        for item in compare_outputs([draw.reference], [output], computed_in=computed_in).comparisons:
            if not item.is_equal:
                difference = item.problem or f"differs by {item.relative_diff:.1e} of scale"
                frozen = _frozen_axis_error(draw, written, advice, f"Output {item.name!r}: {difference}.")
                frozen.inputs = draw.inputs
                raise frozen
            comparisons.append(replace(item, draw=number))
    return tuple(comparisons)


def _unoptimized_reason(model_path: Path, feeds: Arrays) -> str:
    """Return what ONNX Runtime says when it runs the nodes as they are in the file, so that their names are ours."""
    from winml.modelkit.runtime.sessions import Session

    try:
        Session(model_path, optimize=False).run(feeds)
    except StageError as error:
        return error.message
    return ""


def _without_path(reason: str, model_path: Path) -> str:
    """Return ONNX Runtime's reason without where the file lay and where in its own source it failed."""
    return _PLACE_IN_SOURCE.sub("", reason.replace(str(model_path), "the file"))
