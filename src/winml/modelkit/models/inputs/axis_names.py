"""Names of the dynamic axes of inputs.

Collects names from all options and refuses names that contradict each other, do not exist, or name an axis that cannot
vary. Chooses no sizes (``sizes.py``).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.models.inputs.decision import InputDecision, forward_keywords
from winml.modelkit.models.inputs.modalities.pipeline import SHAPE_KEYS
from winml.modelkit.models.inputs.nested_arguments import NestedArguments
from winml.modelkit.models.inputs.shape_run import run_on_shapes
from winml.modelkit.models.inputs.sizes import SizeBounds
from winml.modelkit.onnx.specs import (
    OPEN_SIZE,
    UNNAMED,
    DynamicRequest,
    InputTensorSpec,
    OpenSize,
    OutputAxis,
    is_open,
)

Axis = tuple[str, int]
"""Input and position."""


@dataclass(frozen=True)
class AxisKeys:
    """The key of ``--shape-config`` of each axis of the inputs."""

    decision: InputDecision

    def key_of(self, axis: Axis) -> str | None:
        """Return the key of an axis; `None` if the architecture decides the size."""
        keys = self.decision.meanings.keys.get(axis[0], ())
        return keys[axis[1]] if axis[1] < len(keys) else None

    def axes_of(self, key: str) -> Iterator[Axis]:
        """Yield the axes of a key, in the order of the inputs."""
        return ((spec.name, axis) for spec in self.decision.inputs for axis in range(len(spec.shape))
                if self.key_of((spec.name, axis)) == key)  # fmt: skip

    def bounds_of(self, key: str | None) -> SizeBounds:
        """Return the bounds of a key's size."""
        return self.decision.meanings.bounds.get(key or "", SizeBounds())

    def first_axes(self) -> list[Axis]:
        """Return the first axis of every input of unknown meaning if all these axes have one size, else `[]`."""
        inputs = [spec for spec in self.decision.inputs if spec.shape and spec.name not in self.decision.meanings.keys]
        if len({spec.shape[0] for spec in inputs}) != 1:
            return []
        return [(spec.name, 0) for spec in inputs]

    def keys_opened_by(self, meaning: str) -> list[str]:
        """Return the keys that an option makes dynamic; the frames of a video are not a sequence in this sense."""
        keys = [key.name for key in SHAPE_KEYS.values() if key.opened_by == meaning]
        if meaning != "sequence":
            return keys
        images = {name for name, axis_keys in self.decision.meanings.keys.items() if "height" in axis_keys}
        return [key for key in keys if not any(name in images for name, _ in self.axes_of(key))]


_OPTIONS_BY_MEANING = {"batch": "dynamic_batch", "sequence": "dynamic_seq_len", "image_size": "dynamic_image_size"}
"""Meaning of an axis → option that makes it dynamic."""


def openable_sizes(decision: InputDecision) -> dict[str, dict[str, int]]:
    """Return option → key of ``--shape-config`` → fixed size, for fixed sizes that an option makes dynamic."""
    axis_keys, shapes = AxisKeys(decision), {spec.name: spec.shape for spec in decision.inputs}
    openable: dict[str, dict[str, int]] = {}
    for meaning, option in _OPTIONS_BY_MEANING.items():
        axes = [(key, axis) for key in axis_keys.keys_opened_by(meaning) for axis in axis_keys.axes_of(key)]
        if not axes and meaning == "batch":
            axes = [("batch_size", axis) for axis in axis_keys.first_axes()]
        if any(axis_keys.bounds_of(key).fixed for key, _ in axes):
            continue  # the option would be refused
        values = ((key, shapes[name][axis]) for key, (name, axis) in axes)
        sizes = {key: size for key, size in values if isinstance(size, int) and size != OPEN_SIZE}
        openable |= {option: sizes} if sizes else {}
    return openable


@dataclass
class AxisNames:
    """Axis names collected so far, with their options; each ``take`` adds names, in the order of calls."""

    axis_keys: AxisKeys
    names: dict[Axis, str] = field(default_factory=dict)
    origins: dict[Axis, str] = field(default_factory=dict)
    unnamed: dict[Axis, str] = field(default_factory=dict)
    """Dynamic axes without a name → the option; :func:`name_the_unnamed` names these axes."""

    @property
    def decision(self) -> InputDecision:
        """The inputs of the named axes."""
        return self.axis_keys.decision

    def take_names_in_shapes(self) -> None:
        """Take the names already in the shapes."""
        for spec in self.decision.inputs:
            for axis, size in enumerate(spec.shape):
                if isinstance(size, str):
                    self.set_name((spec.name, axis), size, self.decision.requested_by)
                elif size == OPEN_SIZE:
                    self.unnamed[spec.name, axis] = self.decision.requested_by

    def take_axes(self, request: DynamicRequest) -> tuple[OutputAxis, ...]:
        """Take names given by position; return the named axes of unknown inputs, which must belong to outputs.

        Raises:
            UsageError: there is no such axis, or it has another name already.
        """
        ranks = {spec.name: len(spec.shape) for spec in self.decision.inputs}
        inputs = ", ".join(f"{name} ({rank} axes)" for name, rank in ranks.items())
        output_axes = []
        for name, symbols in request.axes.items():
            for axis, symbol in symbols.items():
                option = request.origin_of("dynamic_axes", (name, axis))
                if name not in ranks:
                    output_axes.append(OutputAxis(name, axis, symbol, option))
                    continue
                if axis >= ranks[name]:
                    raise UsageError(
                        f"{option}: {name} has no axis {axis}; it has {ranks[name]}, counted from 0",
                        hint=f"Its inputs: {inputs}.",
                    )
                if symbol == UNNAMED:
                    self.unnamed[name, axis] = option
                else:
                    self.set_name((name, axis), symbol, option)
        return tuple(output_axes)

    def take_keys(self, left_open: Mapping[str, OpenSize]) -> None:
        """Take names given by key of ``--shape-config``.

        Raises:
            UsageError: the key does not apply to this model, or cannot vary.
        """
        for key, size in left_open.items():
            axes = list(self.axis_keys.axes_of(key))
            if not axes:
                raise UsageError(
                    f"{opt.shape_config}: {key} cannot be dynamic: it does not apply to this model",
                    hint=f"Sizes of its inputs: {', '.join(self.decision.meanings.sizes) or 'not known'}.",
                )
            for axis in axes:
                if size.name is not None:
                    self.set_name(axis, size.name, opt.shape_config)
                elif axis not in self.names:
                    self.set_name(axis, self.name_of_key(key), opt.shape_config)

    def take_meanings(self, request: DynamicRequest) -> None:
        """Name the axes requested by meaning, unless they have a name already.

        Raises:
            UsageError: the model has no such dimension, or cannot vary it.
        """
        if request.batch:
            self._take_meaning(request.origin_of("dynamic_batch"), "batch", "first axis that all inputs share")
        if request.sequence:
            self._take_meaning(request.origin_of("dynamic_sequence"), "sequence", "sequence")
        if request.image_size:
            self._take_meaning(request.origin_of("dynamic_image_size"), "image_size", "image")

    def _take_meaning(self, option: str, meaning: str, description: str) -> None:
        """Name the axes with a meaning, such as the batch, unless the axes have a name already.

        Args:
            option: The option that requests it, for messages.
            meaning: Key of the meaning.
            description: The meaning in words, for messages.

        Raises:
            UsageError: no input has such an axis, or its size cannot vary.
        """
        keys = self.axis_keys.keys_opened_by(meaning)
        axes = [(key, axis) for key in keys for axis in self.axis_keys.axes_of(key)]
        if not axes and meaning == "batch":
            axes = [("batch_size", axis) for axis in self.axis_keys.first_axes()]
        # Stated inputs of a decoder have names in their shapes, and no meanings.
        if not axes and not {*keys}.isdisjoint(self.names.values()):
            return
        if not axes:
            inputs = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in self.decision.inputs)
            raise UsageError(
                f"{option}: the inputs of this model have no {description}: {inputs}",
                hint=f"Remove it, or name the axes with {opt.dynamic_axes}.",
            )
        self._refuse_fixed(option, axes)
        for key, axis in axes:
            if axis not in self.names:
                self.set_name(axis, self.name_of_key(key), option)

    def _refuse_fixed(self, option: str, axes: Sequence[tuple[str, Axis]]) -> None:
        """Refuse an option that includes a fixed size, with a hint on the axes that can be dynamic.

        Raises:
            UsageError: names the axis with the fixed size.
        """
        fixed = next((key for key, _ in axes if self.axis_keys.bounds_of(key).fixed), None)
        if fixed is None:
            return
        free = [
            f"{name}:{axis}={self.name_of_key(key)}"
            for key, (name, axis) in axes
            if not self.axis_keys.bounds_of(key).fixed
        ]
        raise UsageError(
            f"{option}: {fixed} cannot be dynamic: {self.axis_keys.bounds_of(fixed).fixed}",
            hint=f"Use {opt.dynamic_axes} '{' '.join(free)}' for the axes that can." if free else "Remove it.",
        )

    def bring_along(self) -> list[str]:
        """Name the other axes with the same key as a named axis; return notes on the added axes.

        Raises:
            UsageError: axes of one key have two names, or the rows of the inputs share a name with another size.
        """
        _refuse_contradictions(self)
        notes = []
        names_by_key = {key: name for axis, name in self.names.items() if (key := self.axis_keys.key_of(axis))}
        for key, name in names_by_key.items():
            new_axes = [axis for axis in self.axis_keys.axes_of(key) if axis not in self.names]
            for axis in new_axes:
                self.set_name(axis, name, "")
            if new_axes:
                axis_list = " and ".join(f"axis {position} of {input_name}" for input_name, position in new_axes)
                notes.append(f"Also {name}, which has the same {key}: {axis_list}.")
        return notes

    def set_name(self, axis: Axis, name: str, origin: str) -> None:
        """Name one axis.

        Args:
            axis: Input and number of the axis.
            name: The name.
            origin: The option that names it, for messages.

        Raises:
            UsageError: the axis has another name already, or cannot vary.
        """
        first_name = self.names.setdefault(axis, name)
        if first_name != name:
            raise UsageError(
                f"axis {axis[1]} of {axis[0]} is named {first_name!r} by {self.origins[axis]} and {name!r} by {origin}",
                hint="Use one name.",
            )
        self.origins.setdefault(axis, origin)
        key = self.axis_keys.key_of(axis)
        bounds = self.axis_keys.bounds_of(key)
        if bounds.fixed:
            raise UsageError(f"{origin}: {key} cannot be dynamic: {bounds.fixed}", hint="Remove it.")

    def name_of_key(self, key: str) -> str:
        """Return the existing name of axes with this key, else the key itself."""
        names = (name for axis, name in self.names.items() if self.axis_keys.key_of(axis) == key)
        return next(names, key)

    def symbols(self) -> list[str]:
        """Return the names in the order of the inputs."""
        order = [spec.name for spec in self.decision.inputs]
        named_axes = sorted(self.names, key=lambda axis: (order.index(axis[0]), axis[1]))
        return list(dict.fromkeys(self.names[named_axis] for named_axis in named_axes))

    def axes_named(self, name: str) -> list[Axis]:
        """Return the axes with a name."""
        return [axis for axis, axis_name in self.names.items() if axis_name == name]

    def keys_named(self, name: str) -> list[str]:
        """Return the keys of ``--shape-config`` of the axes with a name."""
        return list(dict.fromkeys(key for axis in self.axes_named(name) if (key := self.axis_keys.key_of(axis))))

    def sizes_named(self, name: str) -> set[int]:
        """Return the numbers in the original shapes at the axes with a name."""
        shapes = {spec.name: spec.shape for spec in self.decision.inputs}
        sizes = (shapes[input_name][axis] for input_name, axis in self.axes_named(name))
        return {size for size in sizes if isinstance(size, int) and size != OPEN_SIZE}

    def sizes_beside(self, name: str) -> frozenset[int]:
        """Return the sizes that stay fixed in the inputs with a named axis of this name."""
        input_names = {input_name for input_name, _ in self.axes_named(name)}
        return frozenset(
            size
            for spec in self.decision.inputs
            for axis, size in enumerate(spec.shape)
            if spec.name in input_names and isinstance(size, int) and (spec.name, axis) not in self.names
        )

    def named_inputs(self) -> tuple[InputTensorSpec, ...]:
        """Return the inputs with the names in their shapes."""

        def with_names(spec: InputTensorSpec) -> InputTensorSpec:
            shape = tuple(self.names.get((spec.name, axis), size) for axis, size in enumerate(spec.shape))
            return spec.model_copy(update={"shape": shape})

        return tuple(map(with_names, self.decision.inputs))


def _refuse_contradictions(naming: AxisNames) -> None:
    """Refuse two names for a key, and a name shared by the batch and another key.

    Raises:
        UsageError: names the names or the keys.
    """
    meanings: dict[str, set[str]] = {}
    for axis, name in naming.names.items():
        if key := naming.axis_keys.key_of(axis):
            meanings.setdefault(key, set()).add(name)
    for key, names in meanings.items():
        if len(names) > 1:
            raise UsageError(f"{' and '.join(sorted(names))} both name the same {key}", hint="Use one name everywhere.")
    for key, names in meanings.items():
        if key != "batch_size" and names & meanings.get("batch_size", set()):
            raise UsageError(
                f"{names.pop()} names both batch_size and {key}, which vary separately",
                hint="Use a separate name for each.",
            )


AcceptsShapes = Callable[[Sequence[InputTensorSpec]], bool]
"""(inputs of fixed shapes) → True if the forward runs."""

_NON_WORD = re.compile(r"\W")


def name_the_unnamed(naming: AxisNames) -> None:
    """Name, in place, the dynamic axes without a name: by key, else like axes of the same position and size.

    Raises:
        UsageError: an axis cannot vary.
    """
    for axis, origin in naming.unnamed.items():
        if axis in naming.names:
            continue
        key = naming.axis_keys.key_of(axis)
        name = naming.name_of_key(key) if key else _find_like_name(naming, axis) or _make_free_name(naming, axis)
        naming.set_name(axis, name, origin)


def _find_like_name(naming: AxisNames, axis: Axis) -> str | None:
    """Return the name of an axis of the same position and, if both have a number, the same size; else `None`."""
    shapes = {spec.name: spec.shape for spec in naming.decision.inputs}

    def position_and_size(candidate: Axis) -> tuple[int, int, int | str]:
        shape = shapes[candidate[0]]
        # The rank of the input matters only beyond the first axis: rows are rows in any input.
        return candidate[1], len(shape) if candidate[1] else 0, shape[candidate[1]]

    *position, size = position_and_size(axis)
    for other_axis, name in naming.names.items():
        *other_position, other_size = position_and_size(other_axis)
        if position == other_position and (is_open(size) or is_open(other_size) or size == other_size):
            return name
    return None


def _make_free_name(naming: AxisNames, axis: Axis) -> str:
    """Return an unused name for an axis of unknown meaning."""
    stem = f"{_NON_WORD.sub('_', axis[0])}_dim_{axis[1]}"
    used_names = set(naming.names.values())
    name = f"dim_{axis[1]}" if axis[1] else "batch_size"
    while name in used_names:
        name, stem = stem, f"{stem}_"
    return name


def bring_along_by_size(naming: AxisNames, accepts: AcceptsShapes | None) -> list[str]:
    """Name, in place, the axes that must vary together with named axes; return notes on the added axes.

    An example is the mask beside the tokens, in a model with inputs of no known modality. Candidates are axes of
    unknown inputs: all axes named in an input of the same shape, and first axes of the same size. Candidates are named
    if the model runs with them and fails without, or if a candidate has size 1 and would be broadcast.

    Args:
        naming: The names so far.
        accepts: Runs the model on shapes; `None`: no axis is added.

    Raises:
        UsageError: an axis would have two names, or cannot vary.
    """
    candidates = _find_candidates(naming)
    if accepts is None or not candidates:
        return []
    shapes = {spec.name: spec.shape for spec in naming.decision.inputs}
    is_broadcast = any(shapes[name][position] == 1 for name, position in candidates)
    if not accepts(_double_sizes(naming, {**naming.names, **candidates})):
        return []
    if not is_broadcast and accepts(_double_sizes(naming, naming.names)):
        return []
    notes = []
    for name in dict.fromkeys(candidates.values()):
        new_axes = [axis for axis, candidate in candidates.items() if candidate == name]
        for axis in new_axes:
            naming.set_name(axis, name, "")
        axis_list = " and ".join(f"axis {position} of {input_name}" for input_name, position in new_axes)
        notes.append(f"Also {name}, which has the same size: {axis_list}.")
    return notes


def _find_candidates(naming: AxisNames) -> dict[Axis, str]:
    """Return the axes that may have to be dynamic: axis → name."""
    specs = naming.decision.inputs
    unknown = [spec for spec in specs if spec.name not in naming.decision.meanings.keys]
    candidates: dict[Axis, str] = {}
    for spec in unknown:
        for other_spec in unknown:
            for position in range(len(other_spec.shape)):
                name = naming.names.get((other_spec.name, position))
                is_alike = other_spec.shape == spec.shape or (position == 0 and other_spec.shape[:1] == spec.shape[:1])
                if name is not None and is_alike and (spec.name, position) not in naming.names:
                    candidates.setdefault((spec.name, position), name)
    return candidates


def _double_sizes(naming: AxisNames, names: Mapping[Axis, str]) -> list[InputTensorSpec]:
    """Return the inputs with the size of every named axis doubled, which keeps the size divisible."""

    def size_at(axis: Axis, size: int | str) -> int:
        number = 2 if is_open(size) else int(size)
        return 2 * number if axis in names else number

    return [
        spec.model_copy(
            update={"shape": tuple(size_at((spec.name, axis), size) for axis, size in enumerate(spec.shape))}
        )
        for spec in naming.decision.inputs
    ]


def accepts_shapes(model: torch.nn.Module, arguments: NestedArguments | None) -> AcceptsShapes:
    """Return a function that runs a module on shapes alone; the module stays unchanged.

    Args:
        model: A live module.
        arguments: Conversion of its inputs into arguments of the forward; `None` if each input is one argument.
    """
    keywords = forward_keywords(model)

    def call(**tensors: torch.Tensor) -> object:
        values = tensors if arguments is None else arguments.build(tensors)
        try:
            return _copy_without_values(model)(**{**keywords, **values})
        except (Exception, SystemExit) as error:  # code of the user: any exception is a failure
            raise RuntimeError("the forward fails on shapes") from error

    return lambda specs: run_on_shapes(call, {spec.name: spec for spec in specs}) is not None


def _copy_without_values(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy that isolates state written by a forward; its weights take no memory."""
    stand_ins: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        stand_in = tensor.detach().to("meta") if tensor.is_floating_point() else tensor.detach().clone()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        stand_ins[id(tensor)] = torch.nn.Parameter(stand_in, requires_grad=False) if is_parameter else stand_in
    return copy.deepcopy(model, stand_ins)
