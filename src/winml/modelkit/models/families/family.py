"""Contract of a model family: a function from a model to parts, or to the reason against this family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from winml.modelkit.errors import UsageError, opt, spell
from winml.modelkit.models.checkpoints.config import CheckpointConfig
from winml.modelkit.models.inputs.axis_names import AxisKeys, openable_sizes
from winml.modelkit.models.inputs.decision import (
    InputDecision,
    check_input_specs,
    decide_inputs,
    forward_keywords,
    known_meanings,
    patched_inputs,
)
from winml.modelkit.models.inputs.dynamic_axes import open_axes, refuse_unknown_dimensions
from winml.modelkit.models.inputs.nested_arguments import NestedArguments, arguments_of_names
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.onnx.specs import DynamicRequest, OpenSize

if TYPE_CHECKING:
    from winml.modelkit.models.request import ModelRequest


@dataclass(frozen=True)
class FoundParts:
    """Parts found by a family, or why none."""

    parts: tuple[ModelPart, ...] = ()
    """Parts in the order in which they run; `()` if the model is not of this family."""
    notes: tuple[str, ...] = ()
    """Reasons for the user why there are no parts."""


Family: TypeAlias = "Callable[[torch.nn.Module, CheckpointConfig, str, ModelRequest], FoundParts]"
"""(model, with parameters possibly on the ``meta`` device; its config and files; canonical task; request) → parts.

Raises a UsageError for a request that no graph of this family can satisfy.
"""


def part_of_decision(
    model: torch.nn.Module,
    decision: InputDecision,
    forward_kwargs: Mapping[str, Any],
    arguments: NestedArguments | None,
    **fields: Any,
) -> ModelPart:
    """Return a part with its decided inputs.

    Args:
        model: The whole model.
        decision: Inputs of the part.
        forward_kwargs: Fixed keywords of every call.
        arguments: Conversion of inputs into arguments of the forward; `None` if each input is one argument.
        **fields: Further fields of the part, such as ``name`` and ``feeds``.
    """
    return ModelPart(
        model=model,
        inputs=decision.inputs,
        forward_kwargs=forward_kwargs,
        arguments=arguments,
        dimensions=decision.dimensions,
        open_by_default=decision.open_by_default,
        openable_sizes=openable_sizes(decision),
        output_axes=decision.output_axes,
        notes=decision.notes,
        **fields,
    )


@dataclass(frozen=True)
class PartAxes:
    """The inputs of one part, and the function that makes sizes dynamic."""

    decision: InputDecision
    """The inputs before sizes become dynamic."""
    open: Callable[[InputDecision, DynamicRequest], InputDecision]
    renamed: Mapping[str, str]
    """Input of the whole model → its name in this part, if different."""
    outputs: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()
    """Inputs of this part with the name of another input of the whole model."""

    @property
    def names(self) -> dict[str, str]:
        """Name in the user's request → name in the part."""
        own_names = {*(spec.name for spec in self.decision.inputs), *self.outputs} - self.hidden
        return {**{name: name for name in own_names}, **self.renamed}

    def axes_of(self, request: DynamicRequest) -> DynamicRequest:
        """Return the part's share of a request, without bounds."""
        names = self.names
        keys = AxisKeys(self.decision)
        return DynamicRequest(
            batch=request.batch,
            sequence=request.sequence and _has_axes(keys, "sequence"),
            image_size=request.image_size and _has_axes(keys, "image_size"),
            axes={names[name]: axes for name, axes in request.axes.items() if name in names},
            origins=request.origins,
        )


def _has_axes(keys: AxisKeys, meaning: str) -> bool:
    return any(list(keys.axes_of(key)) for key in keys.keys_opened_by(meaning))


def divided_axes(parts: Sequence[PartAxes], request: DynamicRequest) -> list[InputDecision]:
    """Return the inputs of each part, dynamic as far as the part has the requested axes.

    Args:
        parts: The parts; a name that is no input is taken as an output of the last part.
        request: Request for the whole model.

    Raises:
        UsageError: no part has an axis of a requested name or meaning, or sizes do not fit.
    """
    shares = [part.axes_of(request) for part in parts]
    for meaning in ("sequence", "image_size"):
        if getattr(request, meaning) and not any(getattr(share, meaning) for share in shares):
            # The error of the first part lists the available axes.
            shares[0] = shares[0].model_copy(update={meaning: True})
    part_names = {name for part in parts for name in part.names}
    other_axes = {name: axes for name, axes in request.axes.items() if name not in part_names}
    shares[-1] = shares[-1].model_copy(update={"axes": {**shares[-1].axes, **other_axes}})
    names = [
        [dimension.name for dimension in part.open(part.decision, wish).dimensions]
        for part, wish in zip(parts, shares, strict=True)
    ]
    all_names = list(dict.fromkeys(name for used in names for name in used))
    refuse_unknown_dimensions([bound.name for bound in request.dimensions], all_names)
    return [
        part.open(
            part.decision,
            wish.model_copy(update={"dimensions": tuple(bound for bound in request.dimensions if bound.name in used)}),
        )
        for part, wish, used in zip(parts, shares, names, strict=True)
    ]


def single_part_model(
    model: torch.nn.Module,
    checkpoint: CheckpointConfig,
    task: str,
    request: ModelRequest,
    notes: tuple[str, ...] = (),
) -> ModelPart:
    """Return the model as one part, with the inputs of the user's manifest, else decided inputs.

    Args:
        model: The model; its parameters may be on the ``meta`` device.
        checkpoint: Its config and files.
        task: Canonical task.
        request: Request of the user.
        notes: Reasons for the export as one part.

    Raises:
        UsageError: the model refuses a size, or the inputs do not belong to the model.
    """
    decision = decide_model_inputs(model, checkpoint, task, request)
    decision = dataclasses.replace(decision, notes=(*notes, *decision.notes))
    spec_names = [spec.name for spec in decision.inputs] if request.input_specs is not None else []
    arguments = arguments_of_names(model, spec_names, spell(request.specs_origin))
    return part_of_decision(model, decision, forward_keywords(model), arguments)


def decide_model_inputs(
    model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest
) -> InputDecision:
    """Return the inputs of the user's manifest, else decided inputs.

    Raises:
        UsageError: the model refuses a size, or the inputs do not belong to the model.
    """
    if request.input_specs is None:
        decision = _decide_inputs(model, checkpoint, task, request)
        firm_keys = frozenset(request.fixed_sizes)
        return open_axes(decision, request.dynamic, request.left_open, firm_keys=firm_keys)
    specs = request.input_specs
    notes = unused_size_notes(request)
    if request.patches_inputs:
        specs = patched_inputs(_own_inputs(model, checkpoint, task, request), specs, request.specs_origin)
    check_input_specs(model, specs, spell(request.specs_origin))
    meanings = known_meanings(model, checkpoint.config, specs, checkpoint.root, task)
    decision = InputDecision(specs, notes, meanings, requested_by=spell(request.specs_origin))
    return open_axes(decision, request.dynamic, are_sizes_firm=True)


def _decide_inputs(
    model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest
) -> InputDecision:
    shape, rows = request.shape_config, request.batch_size
    return decide_inputs(model, checkpoint.config, checkpoint.root, task=task, shape=shape, batch_size=rows)


def _own_inputs(
    model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest
) -> InputDecision:
    """Return the inputs that the model takes without a description; none if they are not known."""
    try:
        return _decide_inputs(model, checkpoint, task, request)
    except UsageError:
        return InputDecision(())


def open_keys(
    decision: InputDecision,
    dynamic: DynamicRequest,
    by_default: Collection[str],
    fixed: Collection[str],
    left_open: Mapping[str, OpenSize],
) -> InputDecision:
    """Make sizes of a part dynamic: requested ones, and defaults without a number from the user.

    Args:
        decision: The inputs of the part; keys of other inputs are ignored.
        dynamic: The part's share of the request.
        by_default: Keys of ``--shape-config`` that are dynamic by default.
        fixed: Keys with a number from the user.
        left_open: Keys that the user leaves dynamic.

    Raises:
        UsageError: sizes do not fit.
    """
    own_keys = {key for axes in decision.meanings.keys.values() for key in axes}
    requested = {key: size for key, size in left_open.items() if key in own_keys}
    opened = {**{key: OpenSize() for key in by_default if key in own_keys and key not in fixed}, **requested}
    return open_axes(decision, dynamic, opened, by_default=opened.keys() - requested.keys(), firm_keys=frozenset(fixed))


def unused_size_notes(request: ModelRequest) -> tuple[str, ...]:
    """Return a note on sizes that descriptions of the inputs override, if there are any."""
    options = {opt.shape_config: request.shape_config, opt.batch_size: request.batch_size}
    names = [name for name, value in options.items() if value is not None]
    if not names:
        return ()
    origin, sizes = spell(request.specs_origin), " and ".join(names)
    is_patch = request.patches_inputs
    return (
        f"{origin} takes precedence over {sizes}" if is_patch else f"{origin} determines the inputs; {sizes} ignored",
    )
