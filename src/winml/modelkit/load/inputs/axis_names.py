"""Which axis of which input has which name?

Collects names from every option that may give them and refuses those that contradict each other, do not exist, or name
an axis that cannot vary. Chooses no sizes (``trace_sizes.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from winml.modelkit.errors import UsageError
from winml.modelkit.graph.dimensions import (
    DYNAMIC_AXES_OPTION,
    UNNAMED,
    DynamicRequest,
    OpenSize,
    OutputAxis,
)
from winml.modelkit.graph.specs import OPEN_SIZE, InputTensorSpec
from winml.modelkit.load.inputs.decision import InputDecision
from winml.modelkit.load.inputs.modalities.pipeline import SHAPE_KEYS
from winml.modelkit.load.inputs.option_names import SHAPE_CONFIG_OPTION
from winml.modelkit.load.inputs.sizes import SizeBounds

__all__ = ["AxisKeys", "AxisNames"]

Axis = tuple[str, int]
"""Input and position."""


@dataclass(frozen=True)
class AxisKeys:
    """Which key of ``--shape-config`` each axis of the inputs is."""

    decision: InputDecision

    def key_of(self, axis: Axis) -> str | None:
        """Return the key of an axis; None where the architecture decides its size."""
        keys = self.decision.meanings.keys.get(axis[0], ())
        return keys[axis[1]] if axis[1] < len(keys) else None

    def axes_of(self, key: str) -> Iterator[Axis]:
        """Yield the axes of a key, in the order of the inputs."""
        return ((spec.name, axis) for spec in self.decision.inputs for axis in range(len(spec.shape))
                if self.key_of((spec.name, axis)) == key)  # fmt: skip

    def bounds_of(self, key: str | None) -> SizeBounds:
        """Return between which sizes a key may vary."""
        return self.decision.meanings.bounds.get(key or "", SizeBounds())

    def first_axes(self) -> list[Axis]:
        """Return the first axis of every input, where nothing says what it is and all of them are of one size."""
        inputs = [spec for spec in self.decision.inputs if spec.shape and spec.name not in self.decision.meanings.keys]
        if len({spec.shape[0] for spec in inputs}) != 1:
            return []
        return [(spec.name, 0) for spec in inputs]

    def keys_opened_by(self, meaning: str) -> list[str]:
        """Return the keys an option leaves open; frames of pictures are no sequence that a model reads."""
        keys = [key.name for key in SHAPE_KEYS.values() if key.opened_by == meaning]
        return [key for key in keys if meaning != "sequence" or not self._is_of_images(key)]

    def _is_of_images(self, key: str) -> bool:
        keys = self.decision.meanings.keys
        return any("height" in keys.get(name, ()) for name, _ in self.axes_of(key))

    def described_inputs(self) -> str:
        """Return the inputs and their shapes, for people."""
        return ", ".join(f"{spec.name} {list(spec.shape)}" for spec in self.decision.inputs)

    def described_keys(self) -> str:
        """Return the keys the inputs have, for people."""
        return ", ".join(self.decision.meanings.sizes) or "not known"


@dataclass
class AxisNames:
    """The names given so far, and by which option; each ``take`` adds names, in the order of calls."""

    axis_keys: AxisKeys
    names: dict[Axis, str] = field(default_factory=dict)
    origins: dict[Axis, str] = field(default_factory=dict)
    unnamed: dict[Axis, str] = field(default_factory=dict)
    """Axes that are left open without a name, and by which option; ``alike_axes.py`` names them."""

    @property
    def decision(self) -> InputDecision:
        """The inputs whose axes are named."""
        return self.axis_keys.decision

    def take_names_in_shapes(self) -> None:
        """Take the names that stand in the shapes already."""
        for spec in self.decision.inputs:
            for axis, size in enumerate(spec.shape):
                if isinstance(size, str):
                    self.set_name((spec.name, axis), size, self.decision.given_by)
                elif size == OPEN_SIZE:
                    self.unnamed[spec.name, axis] = self.decision.given_by

    def take_axes(self, request: DynamicRequest) -> tuple[OutputAxis, ...]:
        """Take names given by place; return those of axes of no input, which must be of outputs.

        Raises:
            UsageError: there is no such axis, or it bears another name already.
        """
        ranks = {spec.name: len(spec.shape) for spec in self.decision.inputs}
        inputs = ", ".join(f"{name} ({rank} axes)" for name, rank in ranks.items())
        output_axes = []
        for name, named in request.axes.items():
            for axis, symbol in named.items():
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
            UsageError: the key means nothing for this model, or cannot vary.
        """
        for key, size in left_open.items():
            axes = list(self.axis_keys.axes_of(key))
            if not axes:
                raise UsageError(
                    f"{SHAPE_CONFIG_OPTION}: {key} cannot be left open: it means nothing for this model",
                    hint=f"Sizes of its inputs: {self.axis_keys.described_keys()}.",
                )
            for axis in axes:
                if size.name is not None:
                    self.set_name(axis, size.name, SHAPE_CONFIG_OPTION)
                elif axis not in self.names:
                    self.set_name(axis, self.name_of_key(key), SHAPE_CONFIG_OPTION)

    def take_meanings(self, request: DynamicRequest) -> None:
        """Name what is asked for by meaning, unless it bears a name already.

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
        keys = self.axis_keys.keys_opened_by(meaning)
        axes = [(key, axis) for key in keys for axis in self.axis_keys.axes_of(key)]
        if not axes and meaning == "batch":
            axes = [("batch_size", axis) for axis in self.axis_keys.first_axes()]
        if not axes:
            raise UsageError(
                f"{option}: the inputs of this model have no {description}: {self.axis_keys.described_inputs()}",
                hint=f"Leave it out, or name the axes with {DYNAMIC_AXES_OPTION}.",
            )
        self._refuse_fixed(option, axes)
        for key, axis in axes:
            if axis not in self.names:
                self.set_name(axis, self.name_of_key(key), option)

    def _refuse_fixed(self, option: str, axes: Sequence[tuple[str, Axis]]) -> None:
        """Refuse an option that would leave open what cannot vary, and tell how to leave open the rest of it."""
        fixed = next((key for key, _ in axes if self.axis_keys.bounds_of(key).fixed), None)
        if fixed is None:
            return
        free = [
            f"{name}:{axis}={self.name_of_key(key)}"
            for key, (name, axis) in axes
            if not self.axis_keys.bounds_of(key).fixed
        ]
        raise UsageError(
            f"{option}: {fixed} cannot be left open: {self.axis_keys.bounds_of(fixed).fixed}",
            hint=f"{DYNAMIC_AXES_OPTION} '{' '.join(free)}' leaves open what can be." if free else "Leave it out.",
        )

    def bring_along(self) -> list[str]:
        """Name the axes that mean the same as a named one; return notes that say which.

        Raises:
            UsageError: axes of one meaning bear two names, or the rows of the inputs share a name with another size.
        """
        _refuse_contradictions(self)
        notes = []
        names_by_key = {key: name for axis, name in self.names.items() if (key := self.axis_keys.key_of(axis))}
        for key, name in names_by_key.items():
            added = [axis for axis in self.axis_keys.axes_of(key) if axis not in self.names]
            for axis in added:
                self.set_name(axis, name, "")
            if added:
                places = " and ".join(f"axis {position} of {input_name}" for input_name, position in added)
                notes.append(f"Also {name}, being the same {key}: {places}.")
        return notes

    def set_name(self, axis: Axis, name: str, origin: str) -> None:
        """Name one axis.

        Raises:
            UsageError: it bears another name already, or cannot vary.
        """
        first_name = self.names.setdefault(axis, name)
        if first_name != name:
            raise UsageError(
                f"axis {axis[1]} of {axis[0]} is named {first_name!r} by {self.origins[axis]} and {name!r} by {origin}",
                hint="Give it one name.",
            )
        self.origins.setdefault(axis, origin)
        key = self.axis_keys.key_of(axis)
        bounds = self.axis_keys.bounds_of(key)
        if bounds.fixed:
            raise UsageError(f"{origin}: {key} cannot be left open: {bounds.fixed}", hint="Leave it as it is.")

    def name_of_key(self, key: str) -> str:
        """Return the name axes of this key bear already, else the key itself."""
        given = (name for axis, name in self.names.items() if self.axis_keys.key_of(axis) == key)
        return next(given, key)

    def symbols(self) -> list[str]:
        """Return the names in the order of the inputs."""
        order = [spec.name for spec in self.decision.inputs]
        places = sorted(self.names, key=lambda axis: (order.index(axis[0]), axis[1]))
        return list(dict.fromkeys(self.names[place] for place in places))

    def axes_named(self, name: str) -> list[Axis]:
        """Return the axes that bear a name."""
        return [axis for axis, given_name in self.names.items() if given_name == name]

    def keys_named(self, name: str) -> list[str]:
        """Return what the axes of a name are, as keys of ``--shape-config``."""
        return list(dict.fromkeys(key for axis in self.axes_named(name) if (key := self.axis_keys.key_of(axis))))

    def sizes_named(self, name: str) -> set[int]:
        """Return the numbers that stood where the name stands now."""
        shapes = {spec.name: spec.shape for spec in self.decision.inputs}
        sizes = (shapes[input_name][axis] for input_name, axis in self.axes_named(name))
        return {size for size in sizes if isinstance(size, int) and size != OPEN_SIZE}

    def sizes_beside(self, name: str) -> frozenset[int]:
        """Return the sizes that stay fixed in the inputs the name stands in."""
        own_inputs = {input_name for input_name, _ in self.axes_named(name)}
        return frozenset(
            size
            for spec in self.decision.inputs
            for axis, size in enumerate(spec.shape)
            if spec.name in own_inputs and isinstance(size, int) and (spec.name, axis) not in self.names
        )

    def named_inputs(self) -> tuple[InputTensorSpec, ...]:
        """Return the inputs with the names in their shapes."""

        def with_names(spec: InputTensorSpec) -> InputTensorSpec:
            shape = tuple(self.names.get((spec.name, axis), size) for axis, size in enumerate(spec.shape))
            return spec.model_copy(update={"shape": shape})

        return tuple(map(with_names, self.decision.inputs))


def _refuse_contradictions(naming: AxisNames) -> None:
    """Refuse two names of one meaning, and one name of two."""
    meanings: dict[str, set[str]] = {}
    for axis, name in naming.names.items():
        if key := naming.axis_keys.key_of(axis):
            meanings.setdefault(key, set()).add(name)
    for key, names in meanings.items():
        if len(names) > 1:
            raise UsageError(
                f"{' and '.join(sorted(names))} both name the same {key}", hint="Give it one name everywhere."
            )
    for key, names in meanings.items():
        if key != "batch_size" and names & meanings.get("batch_size", set()):
            raise UsageError(
                f"{names.pop()} names both batch_size and {key}, which vary apart", hint="Give each its own name."
            )
