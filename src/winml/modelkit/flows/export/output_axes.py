"""Gives axes of outputs the names they were asked to have, as far as they are open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from winml.modelkit.errors import UsageError
from winml.modelkit.export.output_shapes import with_named_sums
from winml.modelkit.graph.dimensions import UNNAMED, OutputAxis
from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.options import nearest
from winml.modelkit.verify.other_sizes import DynamicProof

__all__ = ["name_output_axes", "name_sums"]

_Shape = tuple[int | str, ...]


def name_output_axes(
    proof: DynamicProof, requested: Sequence[OutputAxis], inputs: Sequence[str], dimensions: Sequence[str]
) -> DynamicProof:
    """Return the proof with the requested names in the shapes of the outputs.

    Open sizes of the inputs decide which axes of the outputs are open; what was asked for beyond that is noted. A name
    of an open size stays where the outputs follow it by an expression (``sequence//2``), unless the axis is asked to
    bear a name of its own.

    Args:
        proof: The shapes of the outputs, as they were observed.
        requested: Axes and their names.
        inputs: Names of the inputs, for messages.
        dimensions: Names of the open sizes of the inputs.

    Raises:
        UsageError: there is no such output, or it has no such axis.
    """
    shapes = dict(proof.output_shapes or {})
    notes = []
    for item in requested:
        _refuse_unknown(item, shapes, inputs)
        size = shapes[item.output][item.axis]
        place = f"{item.given_by}: axis {item.axis} of {item.output}"
        if isinstance(size, int):
            notes.append(f"{place} is always {size}: no open size of the inputs changes it.")
        elif item.name in (UNNAMED, size):
            continue
        elif item.name in dimensions or size in dimensions:
            notes.append(f"{place} is {size}, and is called so instead of {item.name}.")
        else:
            shapes[item.output] = _with_name(shapes[item.output], item.axis, item.name)
    return replace(proof, output_shapes=shapes or None, notes=(*proof.notes, *notes))


def name_sums(proof: DynamicProof, inputs: Sequence[InputTensorSpec]) -> DynamicProof:
    """Return the proof with the names that sums of sizes bear in the inputs."""
    return (
        proof
        if proof.output_shapes is None
        else replace(proof, output_shapes=with_named_sums(proof.output_shapes, inputs))
    )


def _with_name(shape: _Shape, axis: int, name: str) -> _Shape:
    return (*shape[:axis], name, *shape[axis + 1 :])


def _refuse_unknown(item: OutputAxis, shapes: Mapping[str, _Shape], inputs: Sequence[str]) -> None:
    if item.output not in shapes:
        guess = nearest(item.output, [*inputs, *shapes])
        raise UsageError(
            f"{item.given_by}: the model has no input and no output {item.output!r}",
            hint=f"{f'Did you mean {guess!r}? ' if guess else ''}Its inputs: {', '.join(inputs)}. "
            f"Its outputs: {', '.join(shapes)}.",
        )
    rank = len(shapes[item.output])
    if item.axis >= rank:
        raise UsageError(
            f"{item.given_by}: output {item.output} has no axis {item.axis}; it has {rank}, counted from 0",
            hint=f"Its shape: [{', '.join(map(str, shapes[item.output]))}].",
        )
