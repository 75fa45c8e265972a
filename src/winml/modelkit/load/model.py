"""How does a request become a model that can be exported?

Puts the steps of this room in order: where it is, what it is for, its weights, its inputs. Each step decides on its
own; nothing is decided here but the order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from winml.modelkit.errors import CheckpointError, UsageError
from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.load.checkpoint import load_checkpoint
from winml.modelkit.load.config import CheckpointConfig, load_config, own_class
from winml.modelkit.load.hub import snapshot_folder
from winml.modelkit.load.input_options import INPUT_SPECS_OPTION
from winml.modelkit.load.inputs import InputDecision, check_input_specs, decide_inputs, forward_keywords
from winml.modelkit.load.library_messages import quiet_libraries
from winml.modelkit.load.random_weights import build_random_model, calibrate_batch_norms
from winml.modelkit.load.records import LoadedModel, ModelInfo
from winml.modelkit.load.script import EXAMPLE_INPUTS, load_script
from winml.modelkit.load.source import CONFIG_NAME, ModelRequest, Source, check_folder, resolve_source
from winml.modelkit.load.task import TaskDecision, resolve_custom_task, resolve_task
from winml.modelkit.runtime.feeds import make_feeds

__all__ = ["load_model"]

Progress = Callable[[str], None]


def load_model(request: ModelRequest, progress: Progress | None = None) -> LoadedModel:
    """Load what was asked for.

    Args:
        request: What the user asked for.
        progress: Told in words which step is being done.

    Raises:
        UsageError: the request is wrong, or asks for a size or task this model does not have.
        InputError: files, the Hub, or the user's code did not deliver.
    """
    tell = progress or _say_nothing
    source = resolve_source(request)
    if source.kind == "script":
        return _from_script(source, request, tell)
    with quiet_libraries():
        return _from_config(_on_disk(source, request, progress), request, tell)


def _say_nothing(_words: str) -> None:
    pass


def _on_disk(source: Source, request: ModelRequest, progress: Progress | None) -> Source:
    """Return a source whose path is on this disk."""
    if source.kind != "hub":
        return source
    needs_weights = not request.random_weights
    folder = snapshot_folder(
        source.name,
        request.revision,
        needs_weights=needs_weights,
        needs_code=request.trust_remote_code,
        progress=progress,
    )
    return dataclasses.replace(source, path=folder, weights=check_folder(folder, needs_weights=needs_weights))


def _from_config(source: Source, request: ModelRequest, tell: Progress) -> LoadedModel:
    assert source.path is not None  # _on_disk saw to it
    tell("reading the config")
    config_path = source.path if source.kind == "config" else source.path / CONFIG_NAME
    checkpoint = load_config(config_path, source.name, trust_remote_code=request.trust_remote_code)
    decision = _decide_task(checkpoint, request.task)
    model_class = _model_class(checkpoint, decision)
    if request.random_weights:
        tell(f"building {model_class.__name__} with random weights")
        model, notes = build_random_model(model_class, checkpoint.config, request.seed), _random_notes(source)
    else:
        assert source.weights is not None  # checked with the folder
        tell(f"loading {model_class.__name__}")
        model, notes = load_checkpoint(
            model_class, checkpoint.config, source.path, source.weights, trust_remote_code=request.trust_remote_code
        )
    _plain_outputs(model)
    inputs = _inputs(model, checkpoint, decision.task, request)
    keywords = forward_keywords(model)
    if request.random_weights:
        calibrate_batch_norms(model, _tensors(inputs.inputs, request.seed), keywords)
    return LoadedModel(
        model=model,
        inputs=inputs.inputs,
        info=_info(model, source, request, decision, checkpoint.config.model_type),
        forward_kwargs=keywords,
        notes=(*checkpoint.notes, *notes, *_dtype_notes(model), *inputs.notes),
    )


def _decide_task(checkpoint: CheckpointConfig, task: str | None) -> TaskDecision:
    if checkpoint.custom_models:
        return resolve_custom_task(checkpoint.custom_models, tuple(checkpoint.config.architectures or ()), task)
    return resolve_task(checkpoint.config, task)


def _model_class(checkpoint: CheckpointConfig, decision: TaskDecision) -> Any:
    """Import the class a task decision names."""
    if checkpoint.custom_models:
        return own_class(decision.model_class_name, checkpoint.root)
    import transformers

    model_class = getattr(transformers, decision.model_class_name, None)
    if not isinstance(model_class, type):
        raise CheckpointError(
            f"{decision.model_class_name}: not available in transformers {transformers.__version__} as installed",
            hint="Install the packages this model needs.",
        )
    return model_class


def _plain_outputs(model: torch.nn.Module) -> None:
    """Set, in place, that forward returns named outputs and no cache, for classes that ask their config only."""
    config: Any = model.config
    config.return_dict = True
    if getattr(config, "use_cache", None):
        config.use_cache = False


def _inputs(model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest) -> InputDecision:
    if request.input_specs is None:
        return decide_inputs(
            model,
            checkpoint.config,
            checkpoint.root,
            task=task,
            shape=request.shape_config,
            batch_size=request.batch_size,
        )
    check_input_specs(model, request.input_specs)
    return InputDecision(request.input_specs, _overruled(request))


def _overruled(request: ModelRequest) -> tuple[str, ...]:
    given = {"--shape-config": request.shape_config, "--batch-size": request.batch_size}
    names = [name for name, value in given.items() if value is not None]
    return (f"{INPUT_SPECS_OPTION} decides the inputs; {' and '.join(names)} not used",) if names else ()


def _from_script(source: Source, request: ModelRequest, tell: Progress) -> LoadedModel:
    tell(f"calling {source.name}")
    script = load_script(source, wants_example=request.input_specs is None)
    inputs = request.input_specs or script.inputs
    if inputs is None:
        raise UsageError(
            f"{source.name}: nothing says what inputs {type(script.model).__name__} takes",
            hint=f"Add a function {EXAMPLE_INPUTS}() beside the factory that returns tensors, or {INPUT_SPECS_OPTION}.",
        )
    origin = INPUT_SPECS_OPTION if request.input_specs else f"{EXAMPLE_INPUTS}() of {source.name}"
    check_input_specs(script.model, inputs, origin)
    info = ModelInfo(
        name_or_path=source.name,
        class_name=type(script.model).__name__,
        library="torch",
        library_version=str(torch.__version__),
        source_kind=source.kind,
    )
    return LoadedModel(
        model=script.model,
        inputs=inputs,
        info=info,
        forward_kwargs=forward_keywords(script.model),
        example=script.example,
        notes=_overruled(request) if request.input_specs else (),
    )


def _info(
    model: torch.nn.Module, source: Source, request: ModelRequest, decision: TaskDecision, model_type: str
) -> ModelInfo:
    import transformers

    return ModelInfo(
        name_or_path=source.name,
        class_name=type(model).__name__,
        source_kind=source.kind,
        library="transformers",
        library_version=transformers.__version__,
        task=decision.task,
        task_rule=decision.rule,
        model_type=model_type,
        revision=request.revision,
        random_weights=request.random_weights,
    )


def _random_notes(source: Source) -> tuple[str, ...]:
    unused = " instead of those in the checkpoint" if source.kind != "config" else ""
    return (f"the weights are random{unused}: outputs mean nothing",)


def _dtype_notes(model: torch.nn.Module) -> tuple[str, ...]:
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()})
    return (
        () if dtypes in ([], ["float32"]) else (f"the weights are {' and '.join(dtypes)}, as the checkpoint has them",)
    )


def _tensors(inputs: tuple[InputTensorSpec, ...], seed: int) -> dict[str, torch.Tensor]:
    """Draw tensors for the inputs; numpy has no bfloat16 that torch reads, so those go by way of float32."""
    tensors = {}
    for spec, values in zip(inputs, make_feeds(inputs, seed).values(), strict=True):
        dtype = getattr(torch, spec.dtype)
        tensors[spec.name] = torch.from_numpy(values.astype("float32") if dtype == torch.bfloat16 else values).to(dtype)
    return tensors
