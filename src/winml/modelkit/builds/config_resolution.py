"""Completes a build config from the model, without reading weights.

``models/resolution.py`` decides task, class and inputs, as for an export.
"""

from __future__ import annotations

import dataclasses

from winml.modelkit.builds.config import WinMLBuildConfig, loader_section, with_default_level
from winml.modelkit.builds.stages import without_idle_stages
from winml.modelkit.errors import opt
from winml.modelkit.export.config import first_choice
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.models.resolution import ResolvedModel, resolve_model


def resolve_build_config(
    config: WinMLBuildConfig, request: ModelRequest, *, model_type: str | None = None
) -> tuple[WinMLBuildConfig, tuple[str, ...]]:
    """Complete a config with values from the model, and null for idle stages.

    Args:
        config: The incomplete config; its ``loader`` is replaced, and the inputs in its ``export`` are completed.
        request: The model as requested by the user.
        model_type: Model type of transformers in place of a model; the config then names no model.

    Returns:
        The config, and sentences for the user.

    Raises:
        UsageError: the request is wrong, or its size or task does not exist in this model.
        InputError: config files, the Hub or the user's code failed.
    """
    if config.export is not None:
        if request.input_specs is None:
            request = dataclasses.replace(request, input_specs=config.export.input_tensors)
        request = dataclasses.replace(request, dynamic=request.dynamic.joined(config.export.dynamic))
    resolved = resolve_model(request, model_type=model_type)
    decision = resolved.decision
    decided_class = type(resolved.model).__name__ if decision is not None else None
    loader = loader_section(
        request, model=request.model or None, task=decision and decision.task, model_class=decided_class
    )
    export = config.export
    if export is not None:
        exporter = first_choice(export).name
        export = export.model_copy(update={"opset_version": export.opset_for(exporter), **_input_keys(resolved)})
    notes = list(resolved.notes)
    if resolved.source.kind == "config" and not request.random_weights:
        notes.append(
            f"{request.model} has no weights: to export, add {opt.random_weights} or pass the checkpoint folder"
        )
    axes = [axis for part in resolved.parts for axis in part.output_axes]
    origins = {axis.output: axis.requested_by for axis in axes}
    notes += [
        f"{origin}: {name} is not an input; axes of outputs are not written to the config"
        for name, origin in origins.items()
    ]
    optim = config.optim and with_default_level(config.optim)
    config, idle = without_idle_stages(config.model_copy(update={"loader": loader, "export": export, "optim": optim}))
    return config, (*notes, *idle)


def _input_keys(resolved: ResolvedModel) -> dict[str, object]:
    """Return the config keys of the inputs of a single graph; ``{}`` for several parts, which have no keys."""
    if len(resolved.parts) > 1:
        return {}
    (part,) = resolved.parts
    return {"input_tensors": part.inputs, "dynamic_dimensions": part.dimensions}
