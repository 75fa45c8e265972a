"""What will a build of this model do? Fills a build config from the model, reading no weights.

Task, class and inputs are decided by ``load/resolution.py``, where an export begins too.
"""

from __future__ import annotations

from winml.modelkit.builds.config import WinMLBuildConfig, loader_section
from winml.modelkit.load.request import ModelRequest
from winml.modelkit.load.resolution import resolve_model

__all__ = ["resolve_build_config"]


def resolve_build_config(config: WinMLBuildConfig, request: ModelRequest) -> tuple[WinMLBuildConfig, tuple[str, ...]]:
    """Return the config with everything that the model decides written into it.

    Args:
        config: What is known already; its ``loader`` and the inputs of its ``export`` are replaced.
        request: The model, as the user asked for it.

    Returns:
        The config, and sentences for the user.

    Raises:
        UsageError: the request is wrong, or asks for a size or task this model does not have.
        InputError: config files, the Hub, or the user's code did not deliver.
    """
    resolved = resolve_model(request)
    task = resolved.decision.task if resolved.decision else None
    loader = loader_section(request, task=task, model_class=type(resolved.model).__name__)
    decided = {"input_tensors": resolved.inputs, "dynamic_dimensions": resolved.dimensions}
    export = config.export and config.export.model_copy(update=decided)
    notes = list(resolved.notes)
    if resolved.source.kind == "config" and not request.random_weights:
        notes.append(f"{request.model} holds no weights: an export needs --random-weights, or the checkpoint folder")
    origins = {item.output: item.given_by for item in resolved.output_axes}
    notes += [f"{origin}: {name} is no input; axes of outputs are not written" for name, origin in origins.items()]
    return config.model_copy(update={"loader": loader, "export": export}), tuple(notes)
