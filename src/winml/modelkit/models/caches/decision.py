"""Decision whether a graph gets a cache, and the arguments of a forward with a cache."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from winml.modelkit.errors import UsageError, opt, spell
from winml.modelkit.models.caches import inputs
from winml.modelkit.models.caches.finding import find_cache, is_of_tokens, no_cache_hint
from winml.modelkit.models.caches.layout import CacheLayout
from winml.modelkit.models.checkpoints.config import CheckpointConfig
from winml.modelkit.models.inputs.decision import (
    AxisMeanings,
    InputDecision,
    decide_inputs,
    forward_keywords,
    forward_parameters,
    patched_inputs,
)
from winml.modelkit.models.inputs.dynamic_axes import open_axes

if TYPE_CHECKING:
    from winml.modelkit.models.request import ModelRequest

CACHED_TASKS = ("text-generation",)
"""Tasks with a cache in the graph, if the model keeps a cache."""


def no_cache_note() -> str:
    """Return the note on a request without a cache."""
    return f"The graph has no cache ({opt.no_cache}): every run reads all tokens."


_LOGITS_ARGUMENT = "logits_to_keep"
"""Parameter of a forward: number of last tokens for which logits are computed."""


def decision_with_cache(
    model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest
) -> InputDecision:
    """Decide the inputs of a graph with a cache; without a cache, the decision has only a note with the reason.

    Args:
        model: The model; its parameters may be on the ``meta`` device.
        checkpoint: Its config and files.
        task: Canonical task.
        request: Request of the user.

    Raises:
        UsageError: no graph can take this kind of cache, or sizes do not fit the cache.
    """
    described_specs = request.input_specs
    if task not in CACHED_TASKS:
        _refuse_last_logits(request, f"{task} computes no logits of next tokens")
        return InputDecision(())
    if not request.cache or (described_specs is not None and not any(spec.cache for spec in described_specs)):
        _refuse_last_logits(request, "the graph has no cache")
        undescribed_note = (
            f"The graph has no cache, {spell(request.specs_origin)} describes none: every run reads all tokens."
        )
        return InputDecision((), (undescribed_note if request.cache else no_cache_note(),))
    base = decide_plain_inputs(model, checkpoint, task, request)
    if request.task is not None:
        base = _drop_media(base, forward_parameters(model))
    layout = find_cache(model, base.inputs, cached_keywords(model, request))
    if isinstance(layout, str):
        _refuse_last_logits(request, "the graph has no cache")
        return InputDecision((), (f"The graph has no cache, since {layout}: every run reads all tokens.",))
    return open_cached_inputs(base, layout, model, checkpoint.config, request)


def decide_plain_inputs(
    model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest
) -> InputDecision:
    """Decide the inputs of a forward without a cache.

    Args:
        model: The model; its parameters may be on the ``meta`` device.
        checkpoint: Its config and files.
        task: Canonical task.
        request: Request of the user; the size of the cache is ignored.

    Raises:
        UsageError: the model refuses a size, or the forward needs an input that no modality knows.
    """
    shape = request.shape_config and request.shape_config.model_copy(update={inputs.PAST_KEY: None})
    return decide_inputs(
        model, checkpoint.config, checkpoint.root, task=task, shape=shape, batch_size=request.batch_size
    )


def _drop_media(base: InputDecision, parameters: Mapping[str, inspect.Parameter]) -> InputDecision:
    """Remove images and recordings from the decision if the forward runs without them.

    A model of several modalities has the same decoder for text alone, and the name of the task requests text.
    """
    media_names = [spec.name for spec in base.inputs if not is_of_tokens(spec)]
    if not media_names or any(parameters[name].default is inspect.Parameter.empty for name in media_names):
        return base
    dropped_names = (*media_names, *(spec.name for spec in base.inputs if spec.first_values))
    notes = (note for note in base.notes if not note.startswith(tuple(f"{name}:" for name in dropped_names)))
    specs = (spec.model_copy(update={"first_values": ()}) for spec in base.inputs if is_of_tokens(spec))
    note = f"The graph takes text only, as its task requires: not {' and '.join(media_names)}."
    return dataclasses.replace(base, inputs=tuple(specs), notes=(*notes, note))


def cached_keywords(model: torch.nn.Module, request: ModelRequest) -> dict[str, Any]:
    """Return the fixed keywords of a forward that takes and returns a cache.

    Raises:
        UsageError: logits of the last token are requested, but the forward always computes the logits of all tokens.
    """
    keywords: dict[str, Any] = forward_keywords(model)
    parameters = forward_parameters(model).values()
    if "use_cache" in keywords or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        # Some heads pass it to the decoder among further keywords.
        keywords["use_cache"] = True
    if request.logits == "last":
        if _LOGITS_ARGUMENT not in forward_parameters(model):
            raise UsageError(
                f"{opt.logits} last: {type(model).__name__} computes the logits of all tokens",
                hint=f"Remove {opt.logits}, and use the last logits of the output.",
            )
        keywords[_LOGITS_ARGUMENT] = 1
    return keywords


def open_cached_inputs(
    base: InputDecision, layout: CacheLayout, model: torch.nn.Module, config: object, request: ModelRequest
) -> InputDecision:
    """Return the inputs with the cache, with dynamic sizes.

    Args:
        base: The inputs without a cache.
        layout: The cache.
        model: Model; its forward takes the inputs.
        config: Config of the model; states the number of positions.
        request: Request of the user.

    Raises:
        UsageError: sizes do not fit, the model mixes the requested rows, or described inputs differ from the model's.
    """
    left_open = request.left_open
    fixed, notes = inputs.fixed_sizes_of(request.fixed_sizes, left_open, layout)
    decision = inputs.with_cache_inputs(base, layout, forward_parameters(model), config, fixed)
    if request.input_specs is not None:
        decision = _apply_description(decision, request)
        opened = open_axes(decision, request.dynamic, are_sizes_firm=True)
    else:
        requested_keys = left_open.keys()
        left_open = inputs.open_by_default(left_open, fixed, layout, decision.meanings)
        by_default = left_open.keys() - requested_keys
        opened = open_axes(decision, request.dynamic, left_open, by_default=by_default, firm_keys=frozenset(fixed))
    inputs.refuse_several_rows(opened.inputs, layout)
    return dataclasses.replace(inputs.with_sums(opened), cache=layout, notes=(*opened.notes, *notes))


def _apply_description(decision: InputDecision, request: ModelRequest) -> InputDecision:
    """Replace the inputs of a decision by the user's description.

    Raises:
        UsageError: the described inputs are not the inputs of this model.
    """
    assert request.input_specs is not None
    described = request.input_specs
    if request.patches_inputs:
        described = patched_inputs(
            dataclasses.replace(decision, meanings=AxisMeanings()), described, request.specs_origin
        )
    names, described_names = ([spec.name for spec in specs] for specs in (decision.inputs, described))
    if sorted(names) != sorted(described_names):
        differing = sorted({*names} ^ {*described_names})
        raise UsageError(
            f"{spell(request.specs_origin)}: {differing[0]}: the graph with a cache takes {', '.join(names)}",
            hint=no_cache_hint(),
        )
    by_name = {spec.name: spec for spec in described}
    return dataclasses.replace(
        decision,
        inputs=tuple(by_name[name] for name in names),
        meanings=AxisMeanings(),
        requested_by=spell(request.specs_origin),
    )


def _refuse_last_logits(request: ModelRequest, reason: str) -> None:
    if request.logits == "last":
        raise UsageError(f"{opt.logits} last: {reason}", hint=f"Remove {opt.logits}.")
