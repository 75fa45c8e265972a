"""Which part of a model leaves open what the user asked for by the name of an input, by meaning, or bounded by name?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from winml.modelkit.errors import UsageError
from winml.modelkit.graph.dimensions import DynamicRequest
from winml.modelkit.load.inputs.axis_names import AxisKeys
from winml.modelkit.load.inputs.decision import InputDecision
from winml.modelkit.options import nearest

__all__ = ["PartAxes", "divided_axes"]


@dataclass(frozen=True)
class PartAxes:
    """The inputs of one part, and how sizes of them are left open."""

    decision: InputDecision
    """With sizes that are not left open yet."""
    open: Callable[[InputDecision, DynamicRequest], InputDecision]
    renamed: Mapping[str, str]
    """Name of an input of the whole model → its name in this part, where it has another."""
    outputs: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()
    """Names of inputs of this part that are those of another input in the whole model."""

    @property
    def names(self) -> dict[str, str]:
        """The user's name → the part's."""
        own = {*(spec.name for spec in self.decision.inputs), *self.outputs} - self.hidden
        return {**{name: name for name in own}, **self.renamed}

    def axes_of(self, request: DynamicRequest) -> DynamicRequest:
        """Return what is asked of this part, without bounds."""
        names = self.names
        keys = AxisKeys(self.decision)
        return DynamicRequest(
            batch=request.batch,
            sequence=request.sequence and _has(keys, "sequence"),
            image_size=request.image_size and _has(keys, "image_size"),
            axes={names[name]: axes for name, axes in request.axes.items() if name in names},
            origins=request.origins,
        )


def _has(keys: AxisKeys, meaning: str) -> bool:
    return any(list(keys.axes_of(key)) for key in keys.keys_opened_by(meaning))


def divided_axes(parts: Sequence[PartAxes], request: DynamicRequest) -> list[InputDecision]:
    """Return the inputs of each part, left open as far as it has what was asked for.

    Args:
        parts: The parts; what is the name of no input is taken for an output of the last.
        request: What the user asked for, of the whole model.

    Raises:
        UsageError: no part has an axis of that name or meaning, or sizes do not fit.
    """
    asked = [part.axes_of(request) for part in parts]
    for meaning in ("sequence", "image_size"):
        if getattr(request, meaning) and not any(getattr(item, meaning) for item in asked):
            # It says what there is instead.
            asked[0] = asked[0].model_copy(update={meaning: True})
    taken = {name for part in parts for name in part.names}
    others = {name: axes for name, axes in request.axes.items() if name not in taken}
    asked[-1] = asked[-1].model_copy(update={"axes": {**asked[-1].axes, **others}})
    names = [
        [item.name for item in part.open(part.decision, wish).dimensions]
        for part, wish in zip(parts, asked, strict=True)
    ]
    known = list(dict.fromkeys(name for own in names for name in own))
    for bound in request.dimensions:
        if bound.name not in known:
            guess = nearest(bound.name, known)
            hint = f"Did you mean {guess!r}?" if guess else f"Names: {', '.join(known)}."
            raise UsageError(f"dynamic_dimensions: no axis is named {bound.name!r}", hint=hint)
    return [
        part.open(
            part.decision,
            wish.model_copy(update={"dimensions": tuple(item for item in request.dimensions if item.name in own)}),
        )
        for part, wish, own in zip(parts, asked, names, strict=True)
    ]
