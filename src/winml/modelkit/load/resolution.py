"""What will be loaded, before any weight is read?

Puts the deciding steps of this room in order: where it is, what it is for, its class, its inputs. The class is built
without storage, so sizes are known and a config it refuses is told at once. Loading (``model.py``), inspecting and
writing a config all begin here, so they cannot disagree.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from winml.modelkit.errors import CheckpointError, UsageError
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME
from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.load.checkpoints.config import (
    CheckpointConfig,
    build_error,
    card_task,
    default_config,
    load_config,
    model_type_of_class,
    own_class,
    with_config_of_class,
)
from winml.modelkit.load.checkpoints.foreign_references import refuse_foreign_weights
from winml.modelkit.load.checkpoints.hub import snapshot_folder
from winml.modelkit.load.checkpoints.task import TaskDecision, resolve_custom_task, resolve_task
from winml.modelkit.load.checkpoints.weight_files import find_weights, stored_sizes
from winml.modelkit.load.families.family import unused_size_notes
from winml.modelkit.load.families.input_decisions import decide_parts, refuse_unknown_parts
from winml.modelkit.load.inputs.axis_names import accepts_shapes
from winml.modelkit.load.inputs.decision import InputDecision, check_input_specs, forward_keywords
from winml.modelkit.load.inputs.dynamic_axes import fitting_example, open_axes
from winml.modelkit.load.inputs.names import SEPARATOR
from winml.modelkit.load.inputs.nested_arguments import NestedArguments, arguments_of_names
from winml.modelkit.load.inputs.options import INPUT_SPECS_OPTION
from winml.modelkit.load.library_access import local_libraries, quiet_libraries
from winml.modelkit.load.load_options import Dtype
from winml.modelkit.load.parts import ModelPart
from winml.modelkit.load.request import ModelRequest, ModelSource, check_folder, resolve_source
from winml.modelkit.load.script import EXAMPLE_INPUTS, ScriptModel, load_script

__all__ = [
    "ResolvedModel",
    "requested_dtype",
    "resolve_checkpoint",
    "resolve_model",
    "with_plain_outputs",
]

Progress = Callable[[str], None]

_MOST_PARAMETERS = 10**14
"""Chosen: a hundred times the largest models known."""

_DTYPES: Mapping[Dtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_BUILD_ERRORS = (
    ImportError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, AssertionError,
    MemoryError, OSError,
)  # fmt: skip
"""What a model class raises when its config makes no sense."""


@dataclass(frozen=True)
class ResolvedModel:
    """Everything that is decided about a model, and none of its weights."""

    source: ModelSource
    """Where it is; on this disk, unless it has no checkpoint at all."""
    parts: tuple[ModelPart, ...]
    """What becomes one graph each, in the order in which they run. Their model is in evaluation mode. Of a checkpoint:
    the class built from the config on the ``meta`` device, without storage. Of a factory: what it returned."""
    checkpoint: CheckpointConfig | None = None
    """None for a factory."""
    decision: TaskDecision | None = None
    """None for a factory."""
    model_class: Any = None
    """The transformers class; None for a factory."""
    dtype: torch.dtype | None = None
    """What floating point weights are loaded in; None where only the weights themselves say it."""
    model_notes: tuple[str, ...] = ()
    """Sentences about the whole model that the user should hear."""

    is_widened: bool = False
    """Whether its floating point weights have 16 bits and are to be read as float32."""

    @property
    def model(self) -> torch.nn.Module:
        """The whole model, the same in every part."""
        return self.parts[0].model

    @property
    def notes(self) -> tuple[str, ...]:
        """All sentences that the user should hear."""
        return (*self.model_notes, *(note for part in self.parts for note in part.notes))

    def parts_with(self, model: torch.nn.Module, **fields: Any) -> tuple[ModelPart, ...]:
        """Return the parts of another instance of the model, which holds weights.

        Args:
            model: The instance.
            **fields: Other fields that are the same in all parts.
        """
        return tuple(dataclasses.replace(part, model=model, **fields) for part in self.parts)


def resolve_model(
    request: ModelRequest,
    *,
    needs_weights: bool = False,
    widens_halves: bool = False,
    model_type: str | None = None,
    progress: Progress | None = None,
) -> ResolvedModel:
    """Decide everything about a model that can be decided without its weights.

    Of a Hub id only the small files are fetched, unless ``needs_weights``.

    Args:
        request: What the user asked for.
        needs_weights: Whether something without weight files will not do.
        widens_halves: Whether weights of 16 bits are to be read as float32, where the request names no type.
        model_type: transformers' model type, in place of ``request.model``: its default config is taken. Without model
            and type, that of the class asked for is taken.
        progress: Told in words which step is being done.

    Raises:
        UsageError: the request is wrong, or asks for a size or task this model does not have.
        InputError: config files, the Hub, or the user's code did not deliver.
    """
    tell = progress or (lambda _words: None)
    source = _source_of(request, model_type, needs_weights)
    if source.kind == "script":
        return _resolve_script(source, request, tell)
    with quiet_libraries():
        source = _on_disk(source, request, needs_weights, progress)
    with local_libraries():
        tell("reading the config")
        checkpoint = _read_config(source, request)
        decision = _decide_task_and_class(checkpoint, request)
        model_class = _model_class(checkpoint, decision)
        checkpoint = with_config_of_class(checkpoint, model_class)
        folder = _folder_of_weights(source, request, checkpoint.config)
        dtype, is_widened = _read_dtype(checkpoint.config, folder, request, widens_halves=widens_halves)
        model = _build_without_storage(model_class, checkpoint.config, dtype)
        unknown_dtype = dtype is None and folder is not None
        parts = decide_parts(model, checkpoint, decision.task, request)
    notes = ["the config names no dtype: taken as float32 until the weights say otherwise"] if unknown_dtype else []
    return ResolvedModel(
        source=source,
        parts=parts,
        checkpoint=checkpoint,
        decision=decision,
        model_class=model_class,
        dtype=None if unknown_dtype else dtype or torch.float32,
        model_notes=(*checkpoint.notes, *notes),
        is_widened=is_widened,
    )


def requested_dtype(request: ModelRequest) -> torch.dtype | None:
    """Return the type of floating point weights that was asked for, if one was."""
    return None if request.dtype is None else _DTYPES[request.dtype]


def resolve_checkpoint(request: ModelRequest, *, model_type: str | None = None) -> CheckpointConfig | None:
    """Return the config alone, for questions that need no task; None for a factory.

    Raises:
        UsageError: the request is wrong.
        InputError: config files or the Hub did not deliver.
    """
    source = _source_of(request, model_type, needs_weights=False)
    if source.kind == "script":
        return None
    with quiet_libraries():
        source = _on_disk(source, request, False, None)
    with local_libraries():
        return _read_config(source, request)


def with_plain_outputs(model: torch.nn.Module) -> torch.nn.Module:
    """Set, in place, that forward returns named outputs and no cache, for classes that ask their config only."""
    config: Any = model.config
    config.return_dict = True
    if getattr(config, "use_cache", None):
        config.use_cache = False
    return model


def _source_of(request: ModelRequest, model_type: str | None, needs_weights: bool) -> ModelSource:
    """Return where the model is; where there is none, a class says its type."""
    if model_type is None and not request.model and request.model_class is not None:
        model_type = model_type_of_class(request.model_class)
    return (
        ModelSource("type", model_type)
        if model_type is not None
        else resolve_source(request, needs_weights=needs_weights)
    )


def _on_disk(source: ModelSource, request: ModelRequest, needs_weights: bool, progress: Progress | None) -> ModelSource:
    """Return a source whose path is on this disk."""
    if source.kind != "hub":
        return source
    folder = snapshot_folder(
        source.name,
        request.revision,
        needs_weights=needs_weights,
        needs_code=request.trust_remote_code,
        progress=progress,
    )
    return dataclasses.replace(source, path=folder, weights=check_folder(folder, needs_weights=needs_weights))


def _read_config(source: ModelSource, request: ModelRequest) -> CheckpointConfig:
    if source.kind == "type":
        return default_config(source.name)
    assert source.path is not None  # _on_disk saw to it
    path = source.path if source.kind == "config" else source.path / CHECKPOINT_CONFIG_NAME
    return load_config(path, source.name, trust_remote_code=request.trust_remote_code)


def _decide_task_and_class(checkpoint: CheckpointConfig, request: ModelRequest) -> TaskDecision:
    task, model_class = request.task, request.model_class
    if checkpoint.custom_models:
        architectures = tuple(checkpoint.config.architectures or ())
        return resolve_custom_task(checkpoint.custom_models, architectures, task, model_class=model_class)
    return resolve_task(checkpoint.config, task, model_class=model_class, card_task=card_task(checkpoint.root))


def _model_class(checkpoint: CheckpointConfig, decision: TaskDecision) -> Any:
    """Import the class a task decision names."""
    if checkpoint.custom_models:
        return own_class(decision.model_class_name, checkpoint.root or Path())
    import transformers

    model_class = getattr(transformers, decision.model_class_name, None)
    if not isinstance(model_class, type):
        raise CheckpointError(
            f"{decision.model_class_name}: not available in transformers {transformers.__version__} as installed",
            hint="Install the packages this model needs.",
        )
    return model_class


def _folder_of_weights(source: ModelSource, request: ModelRequest, config: object) -> Path | None:
    """Return the folder whose weights are read; None where there are none."""
    if source.kind not in ("folder", "hub") or request.random_weights or source.path is None:
        return None
    refuse_foreign_weights(config, source.path)
    return source.path


def _read_dtype(
    config: object, folder: Path | None, request: ModelRequest, *, widens_halves: bool
) -> tuple[torch.dtype | None, bool]:
    """Return the type that weights are read in, and whether it is float32 in place of 16 bits."""
    dtype = _floating_dtype(config, folder, requested_dtype(request))
    is_widened = widens_halves and request.dtype is None and dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if is_widened else dtype, is_widened


def _floating_dtype(config: object, folder: Path | None, requested: torch.dtype | None) -> torch.dtype | None:
    """Return what was asked for, else what the config declares, else the first floating point type in the headers of
    the weight files.
    """
    if requested is not None:
        return requested
    if isinstance(declared := getattr(config, "dtype", None), torch.dtype):
        return declared
    try:
        weights = find_weights(folder) if folder is not None else None
        stored = stored_sizes(weights.files) if weights is not None and weights.format == "safetensors" else ()
    except CheckpointError:
        return None  # told by whoever needs the weights
    dtypes = (getattr(torch, entry.dtype, None) for entry in stored)
    return next((dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point), None)


def _build_without_storage(model_class: Any, config: Any, dtype: torch.dtype | None) -> torch.nn.Module:
    """Build the class on the ``meta`` device.

    Raises:
        CheckpointError: the config holds values the class refuses, or the class needs a missing package.
    """
    config = copy.deepcopy(config)
    if getattr(config, "_experts_implementation", None) is None:
        # The usual ways to multiply experts look at values, of which there are none; the modules are the same.
        config._experts_implementation = "batched_mm"
    try:
        with torch.device("meta"), warnings.catch_warnings():
            # About tensors without elements; such a config is refused by the forward, in words of ours.
            warnings.simplefilter("ignore")
            model: torch.nn.Module = model_class._from_config(config, dtype=dtype)
    except _BUILD_ERRORS as error:
        raise build_error(model_class, error) from error
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > _MOST_PARAMETERS:
        raise CheckpointError(
            f"{model_class.__name__} of this config would have {count:.0e} parameters, more than any model has",
            hint="Mend the sizes in the config.",
        )
    return with_plain_outputs(model.eval())


def _resolve_script(source: ModelSource, request: ModelRequest, tell: Progress) -> ResolvedModel:
    tell(f"calling {source.name}")
    script = load_script(source, is_example_needed=request.input_specs is None)
    if request.model_class not in (None, type(script.model).__name__):
        raise UsageError(
            f"--model-class {request.model_class}: {source.name} makes a {type(script.model).__name__}",
            hint="Leave --model-class out: a factory decides what it returns.",
        )
    example = script.example
    if request.input_specs is not None:
        specs, arguments, notes = _described_script_inputs(script, request.input_specs, request)
    elif example is not None:
        check_input_specs(script.model, example.specs, script.example_origin, example.argument_names)
        specs, arguments, notes = example.specs, example.arguments, example.notes
    else:
        own_name = f"{EXAMPLE_INPUTS}_{source.factory}()"
        raise UsageError(
            f"{source.name}: nothing says what inputs {type(script.model).__name__} takes",
            hint=f"Add a function {EXAMPLE_INPUTS}() or {own_name} beside the factory that returns tensors, or "
            f"{INPUT_SPECS_OPTION}.",
        )
    decision = open_axes(
        InputDecision(specs, notes, requested_by=request.specs_origin),
        request.dynamic,
        are_sizes_firm=True,
        accepts=accepts_shapes(script.model, arguments),
    )
    is_example_used = example is not None and request.input_specs is None
    part = ModelPart(
        model=script.model,
        inputs=decision.inputs,
        forward_kwargs=forward_keywords(script.model),
        are_ranges_examples=request.input_specs is None,
        arguments=arguments,
        example=fitting_example(example.tensors, decision) if example is not None and is_example_used else None,
        notes=decision.notes,
        dimensions=decision.dimensions,
        output_axes=decision.output_axes,
    )
    refuse_unknown_parts(request.submodel, (part,), source.name)
    return ResolvedModel(source=source, parts=(part,))


def _described_script_inputs(
    script: ScriptModel, specs: tuple[InputTensorSpec, ...], request: ModelRequest
) -> tuple[tuple[InputTensorSpec, ...], NestedArguments | None, tuple[str, ...]]:
    """Return the inputs of a manifest, how they become arguments, and notes.

    The example says which containers the forward takes and which constants; of another shape, the names do.
    """
    example = script.example
    names = [spec.name for spec in specs]
    arguments = example.arguments if example is not None else None
    constants = {} if arguments is None else arguments.constants
    if example is None or set(names) != set(example.tensors):
        constants = {name: value for name, value in constants.items() if SEPARATOR not in name and name not in names}
        arguments = arguments_of_names(script.model, names, request.specs_origin, constants)
    check_input_specs(script.model, specs, request.specs_origin, () if arguments is None else arguments.names)
    constant_notes = () if arguments is None else arguments.notes
    return specs, arguments, (*script.notes, *unused_size_notes(request), *constant_notes)
