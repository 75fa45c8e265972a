"""What will a build of this model do? Fills a build config from the model, reading no weights.

Task, class and inputs are decided by ``models/resolution.py``, where an export begins too.
"""

from __future__ import annotations

import dataclasses

from winml.modelkit.builds.config import WinMLBuildConfig, loader_section
from winml.modelkit.builds.stages import without_idle_stages
from winml.modelkit.errors import opt
from winml.modelkit.export.config import first_choice
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.models.resolution import ResolvedModel, resolve_model


def resolve_build_config(
    config: WinMLBuildConfig, request: ModelRequest, *, model_type: str | None = None
) -> tuple[WinMLBuildConfig, tuple[str, ...]]:
    """Return the config with everything that the model decides written into it, and null for stages that will not run.

    Args:
        config: What is known already; its ``loader`` is replaced, and inputs in its ``export`` are completed.
        request: The model, as the user asked for it.
        model_type: transformers' model type, in place of a model; the config then names none.

    Returns:
        The config, and sentences for the user.

    Raises:
        UsageError: the request is wrong, or asks for a size or task this model does not have.
        InputError: config files, the Hub, or the user's code did not deliver.
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
        export = export.model_copy(update={"opset_version": export.opset_for(exporter), **_inputs_of(resolved)})
    notes = list(resolved.notes)
    if resolved.source.kind == "config" and not request.random_weights:
        notes.append(
            f"{request.model} has no weights: to export, add {opt.random_weights} or pass the checkpoint folder"
        )
    axes = [item for part in resolved.parts for item in part.output_axes]
    origins = {item.output: item.requested_by for item in axes}
    notes += [
        f"{origin}: {name} is not an input; axes of outputs are not written to the config"
        for name, origin in origins.items()
    ]
    config, idle = without_idle_stages(config.model_copy(update={"loader": loader, "export": export}))
    return config, (*notes, *idle)


def _inputs_of(resolved: ResolvedModel) -> dict[str, object]:
    """Return the keys that describe the inputs of one graph; those of several parts have no place in a config."""
    if len(resolved.parts) > 1:
        return {}
    (part,) = resolved.parts
    return {"input_tensors": part.inputs, "dynamic_dimensions": part.dimensions}
