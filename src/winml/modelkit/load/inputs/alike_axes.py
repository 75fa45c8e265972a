"""Which axes vary together, where place and size are all that is known of them?

Names axes that were left open without a name, and finds the axes that have to be open beside those that were asked for
(the mask beside the tokens) for inputs of which no modality knows anything.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence

import torch

from winml.modelkit.graph.specs import InputTensorSpec, is_open
from winml.modelkit.load.inputs.axis_names import Axis, AxisNames
from winml.modelkit.load.inputs.decision import forward_keywords
from winml.modelkit.load.inputs.nested_arguments import NestedArguments
from winml.modelkit.load.inputs.shape_run import run_on_shapes

__all__ = ["AcceptsShapes", "accepts_shapes", "bring_along_by_size", "name_the_unnamed"]

AcceptsShapes = Callable[[Sequence[InputTensorSpec]], bool]
"""Says whether a forward runs on inputs of these fixed shapes."""

_NOT_OF_NAMES = re.compile(r"\W")


def name_the_unnamed(naming: AxisNames) -> None:
    """Name, in place, what was left open without a name: after its meaning, else alike where place and size are alike.

    Raises:
        UsageError: one of them cannot vary.
    """
    for axis, origin in naming.unnamed.items():
        if axis in naming.names:
            continue
        key = naming.axis_keys.key_of(axis)
        name = naming.name_of_key(key) if key else _name_of_alike(naming, axis) or _free_name(naming, axis)
        naming.set_name(axis, name, origin)


def _name_of_alike(naming: AxisNames, axis: Axis) -> str | None:
    """Return the name of an axis of the same place and, where both have one, the same size."""
    shapes = {spec.name: spec.shape for spec in naming.decision.inputs}

    def place_and_size(item: Axis) -> tuple[int, int, int | str]:
        shape = shapes[item[0]]
        # Rows are rows, however many axes follow.
        return item[1], len(shape) if item[1] else 0, shape[item[1]]

    *place, size = place_and_size(axis)
    for other, name in naming.names.items():
        *other_place, other_size = place_and_size(other)
        if place == other_place and (is_open(size) or is_open(other_size) or size == other_size):
            return name
    return None


def _free_name(naming: AxisNames, axis: Axis) -> str:
    stem = f"{_NOT_OF_NAMES.sub('_', axis[0])}_dim_{axis[1]}"
    taken = set(naming.names.values())
    name = f"dim_{axis[1]}" if axis[1] else "batch_size"
    while name in taken:
        name, stem = stem, f"{stem}_"
    return name


def bring_along_by_size(naming: AxisNames, accepts: AcceptsShapes | None) -> list[str]:
    """Name, in place, the axes without which the model does not take other sizes; return notes that say which.

    Candidates are axes in inputs that nothing is known of: all those named in an input of the same shape, and first
    axes of the same size. They are brought along where the model runs with them and not without them, or where they
    are of size 1 and would only be broadcast.

    Args:
        naming: The names so far.
        accepts: Runs the model on shapes; None: nothing is brought along.
    """
    candidates = _candidates(naming)
    if accepts is None or not candidates:
        return []
    shapes = {spec.name: spec.shape for spec in naming.decision.inputs}
    is_broadcast = any(shapes[name][position] == 1 for name, position in candidates)
    if not accepts(_doubled(naming, {**naming.names, **candidates})):
        return []
    if not is_broadcast and accepts(_doubled(naming, naming.names)):
        return []
    notes = []
    for name in dict.fromkeys(candidates.values()):
        added = [axis for axis, candidate in candidates.items() if candidate == name]
        for axis in added:
            naming.set_name(axis, name, "")
        places = " and ".join(f"axis {position} of {input_name}" for input_name, position in added)
        notes.append(f"Also {name}, being of the same size: {places}.")
    return notes


def _candidates(naming: AxisNames) -> dict[Axis, str]:
    """Return the axes that may have to be open, each with the name it would get."""
    specs = naming.decision.inputs
    unknown = [spec for spec in specs if spec.name not in naming.decision.meanings.keys]
    candidates: dict[Axis, str] = {}
    for spec in unknown:
        for other in unknown:
            for position in range(len(other.shape)):
                name = naming.names.get((other.name, position))
                is_alike = other.shape == spec.shape or (position == 0 and other.shape[:1] == spec.shape[:1])
                if name is not None and is_alike and (spec.name, position) not in naming.names:
                    candidates.setdefault((spec.name, position), name)
    return candidates


def _doubled(naming: AxisNames, names: Mapping[Axis, str]) -> list[InputTensorSpec]:
    """Return the inputs at twice the size of every named axis, which what divides the size divides as well."""

    def size_at(axis: Axis, size: int | str) -> int:
        known = 2 if is_open(size) else int(size)
        return 2 * known if axis in names else known

    return [
        spec.model_copy(
            update={"shape": tuple(size_at((spec.name, axis), size) for axis, size in enumerate(spec.shape))}
        )
        for spec in naming.decision.inputs
    ]


def accepts_shapes(model: torch.nn.Module, arguments: NestedArguments | None) -> AcceptsShapes:
    """Return what runs a module on shapes alone; the module stays as it is.

    Args:
        model: A live module.
        arguments: How its inputs become the arguments of the forward; None where each is one.
    """
    keywords = forward_keywords(model)

    def call(**tensors: torch.Tensor) -> object:
        named = tensors if arguments is None else arguments.build(tensors)
        try:
            return _copy_without_values(model)(**{**keywords, **named})
        except (Exception, SystemExit) as error:  # code of the user: whatever it raises, it does not run
            raise RuntimeError("the forward does not run on shapes") from error

    return lambda specs: run_on_shapes(call, {spec.name: spec for spec in specs}) is not None


def _copy_without_values(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy that keeps to itself what a forward writes down; its weights take no memory."""
    stand_ins: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        copied = tensor.detach().to("meta") if tensor.is_floating_point() else tensor.detach().clone()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        stand_ins[id(tensor)] = torch.nn.Parameter(copied, requires_grad=False) if is_parameter else copied
    return copy.deepcopy(model, stand_ins)
