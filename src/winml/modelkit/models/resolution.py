"""Resolution of a model before any weight is read.

Runs the decisions of this package in order: location, task, class, inputs. The class is built without storage, or made
by the factory of a user's script, so sizes are known and an invalid config is reported at once. Loading (``model.py``),
inspection and the config command start here, so their results agree.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.export import ExportedProgram

from winml.modelkit.errors import (
    CheckpointError,
    InputError,
    ModelPathError,
    UsageError,
    WinMLError,
    failed_import,
    opt,
    place_of,
    spell,
)
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME
from winml.modelkit.models import live_module
from winml.modelkit.models.checkpoints.adapters import Adapter, read_adapters
from winml.modelkit.models.checkpoints.companion_files import companion_files
from winml.modelkit.models.checkpoints.config import (
    CheckpointConfig,
    build_error,
    card_task,
    default_config,
    load_config,
    model_type_of_class,
    own_class,
    refuse_foreign_weights,
    with_config_of_class,
)
from winml.modelkit.models.checkpoints.hub import snapshot_folder
from winml.modelkit.models.checkpoints.pipeline_files import PipelineFiles, read_pipeline_files
from winml.modelkit.models.checkpoints.quantized.formats import CodedCheckpoint, read_coded_checkpoint
from winml.modelkit.models.checkpoints.task import TaskDecision, resolve_custom_task, resolve_task
from winml.modelkit.models.checkpoints.weight_files import find_weights, stored_entries, stored_sizes
from winml.modelkit.models.families.diffusion import diffusion_parts
from winml.modelkit.models.families.family import unused_size_notes
from winml.modelkit.models.families.input_decisions import decide_parts, refuse_unknown_parts
from winml.modelkit.models.inputs.axis_names import accepts_shapes
from winml.modelkit.models.inputs.decision import InputDecision, check_input_specs, patched_inputs
from winml.modelkit.models.inputs.dynamic_axes import open_axes
from winml.modelkit.models.inputs.nested_arguments import NestedArguments, arguments_of_names
from winml.modelkit.models.inputs.shape_run import REFUSALS
from winml.modelkit.models.inputs.sizes import SEPARATOR
from winml.modelkit.models.load_options import Dtype
from winml.modelkit.models.parts import ModelInfo, ModelPart
from winml.modelkit.models.pipelines import build_modules, diffusers_version, has_fractional_timesteps
from winml.modelkit.models.programs import load_program, open_program
from winml.modelkit.models.request import ModelRequest, ModelSource, check_folder, resolve_source
from winml.modelkit.onnx.files.named_paths import restored_working_directory
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.options import suggest
from winml.modelkit.ort.foreign_libraries import local_libraries, quiet_libraries
from winml.modelkit.ort.library_imports import import_losses
from winml.modelkit.ort.shared_settings import attributes_replaced
from winml.modelkit.progress import Tell
from winml.modelkit.tags.torch_modules import unwrap_compiled

_MOST_PARAMETERS = 10**14
"""Chosen: a hundred times the largest models known."""

DTYPES: Mapping[Dtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_BUILD_ERRORS = (*REFUSALS, MemoryError, OSError)
"""Exceptions of a model class for an invalid config."""


@dataclass(frozen=True)
class ResolvedModel:
    """All decisions on a model, without its weights."""

    source: ModelSource
    """Location of the model, on this disk unless there is no checkpoint."""
    parts: tuple[ModelPart, ...]
    """Parts, one graph each, in the order in which they run. Their model is in evaluation mode.

    For a checkpoint: the class built from the config on the ``meta`` device, without storage. For a factory: its
    result.
    """
    checkpoint: CheckpointConfig | None = None
    """`None` for a factory or a diffusers pipeline."""
    decision: TaskDecision | None = None
    """`None` for a factory or a diffusers pipeline."""
    model_class: Any = None
    """The transformers class; `None` for a factory or a diffusers pipeline."""
    dtype: torch.dtype | None = None
    """Type of loaded floating point weights; `None` if unknown until the weights are read."""
    model_notes: tuple[str, ...] = ()
    """Sentences for the user about the whole model."""

    is_widened: bool = False
    """True if 16-bit floating point weights are to be read as float32."""

    coded: CodedCheckpoint | None = None
    """Its quantized weights; `None` for a float checkpoint, or if random weights replace all weights."""

    adapters: tuple[Adapter, ...] = ()
    """Adapters that fit the model, in the order of the request."""

    pipeline: PipelineFiles | None = None
    """The diffusers pipeline whose modules are the model; `None` for any other model."""

    @property
    def notes_on_codes(self) -> tuple[str, ...]:
        """Sentences about the quantized weights."""
        return () if self.coded is None else self.coded.notes

    @property
    def swappable(self) -> tuple[Adapter, ...]:
        """The adapters that are switched at run time."""
        return tuple(adapter for adapter in self.adapters if adapter.name is not None)

    @property
    def model(self) -> torch.nn.Module:
        """The whole model, the same in every part."""
        return self.parts[0].model

    @property
    def notes(self) -> tuple[str, ...]:
        """All sentences for the user."""
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
    progress: Tell | None = None,
) -> ResolvedModel:
    """Make all decisions on a model that do not need its weights.

    Fetches only the small files of a Hub id, unless ``needs_weights``.

    Args:
        request: Request of the user.
        needs_weights: Whether weight files are required.
        widens_halves: Whether to read 16-bit weights as float32 if the request names no type.
        model_type: transformers' model type, in place of ``request.model``: its default config is used. Without model
            and type, the type of the requested class is used.
        progress: Receives a text for each step.

    Raises:
        UsageError: the request is wrong, or asks for a size or task this model does not have.
        InputError: config files, the Hub, or the user's code failed.
    """
    report = progress or (lambda _text: None)
    source = _find_source(request, model_type, needs_weights)
    if source.kind == "script":
        return _resolve_script(source, request, report)
    if source.kind == "pipeline":
        return _resolve_pipeline(source, request)
    with quiet_libraries():
        source = _fetch_source(source, request, needs_weights, progress)
    with local_libraries():
        report("reading the config")
        checkpoint = _read_config(source, request)
        decision = _decide_task_and_class(checkpoint, request)
        model_class = _import_model_class(checkpoint, decision)
        checkpoint = with_config_of_class(checkpoint, model_class)
        has_weights = source.kind in ("folder", "hub") and not request.random_weights
        folder = source.path if has_weights else None
        if folder is not None:
            refuse_foreign_weights(checkpoint.config, folder)
        coded = _find_codes(checkpoint, folder, source)
        dtype = _find_dtype(checkpoint.config, folder, requested_dtype(request))
        # Dequantized values are exact only in float32.
        widens_halves = request.dtype is None and (widens_halves or coded is not None)
        is_widened = widens_halves and dtype in (torch.float16, torch.bfloat16)
        if is_widened:
            dtype = torch.float32
        model = _build_without_storage(model_class, checkpoint.config, dtype)
        adapters = read_adapters(request.adapter)
        if adapters:
            from winml.modelkit.models.checkpoints.merging import check_adapters

            check_adapters(model, adapters)
        unknown_dtype = dtype is None and folder is not None
        parts = decide_parts(model, checkpoint, decision.task, request)
        _refuse_swapping_in_parts(adapters, parts)
    notes = ["the config states no dtype: float32 is assumed until the weights are read"] if unknown_dtype else []
    return ResolvedModel(
        source=source,
        parts=parts,
        checkpoint=checkpoint,
        decision=decision,
        model_class=model_class,
        dtype=None if unknown_dtype else dtype or torch.float32,
        model_notes=(*checkpoint.notes, *(coded.notes if coded is not None else ()), *notes),
        is_widened=is_widened,
        coded=coded,
        adapters=adapters,
    )


def model_info(resolved: ResolvedModel, request: ModelRequest) -> ModelInfo:
    """Return the properties of a model besides its weights.

    Raises:
        CheckpointError: a file of the folder is a link that leads out of the folder, or no regular file.
    """
    source, decision = resolved.source, resolved.decision
    class_name = type(resolved.model).__name__
    if resolved.pipeline is not None:
        return ModelInfo(
            name_or_path=source.name,
            class_name=class_name,
            source_kind=source.kind,
            library="diffusers",
            library_version=diffusers_version(),
            companions=resolved.pipeline.companions(),
        )
    if resolved.checkpoint is None or decision is None:
        return ModelInfo(
            source.name, class_name, "torch", str(torch.__version__), source_kind=source.kind, seed=request.seed
        )
    import transformers

    return ModelInfo(
        name_or_path=source.name,
        class_name=class_name,
        source_kind=source.kind,
        library="transformers",
        library_version=transformers.__version__,
        task=decision.task,
        task_rule=decision.rule,
        model_type=resolved.checkpoint.config.model_type,
        source_format=None if resolved.coded is None else resolved.coded.format.name,
        revision=request.revision,
        random_weights=request.random_weights,
        seed=request.seed,
        adapters=request.adapter,
        companions=companion_files(source.path) if source.path is not None else {},
    )


def _resolve_pipeline(source: ModelSource, request: ModelRequest) -> ResolvedModel:
    """Build the modules of a diffusers pipeline without storage, and decide the inputs of its parts.

    Raises:
        CheckpointError: a file is damaged, or a component is not supported.
        InputError: diffusers is not installed.
        UsageError: a size does not apply.
    """
    assert source.path is not None  # a folder
    files = read_pipeline_files(source.path)
    dtype = requested_dtype(request) or torch.float32
    model = build_modules(files, dtype)
    parts = diffusion_parts(model, files, request, has_fractions=has_fractional_timesteps(files))
    refuse_unknown_parts(request.submodel, parts, source.name)
    return ResolvedModel(source=source, parts=parts, dtype=dtype, model_notes=files.notes, pipeline=files)


def _refuse_swapping_in_parts(adapters: Sequence[Adapter], parts: Sequence[ModelPart]) -> None:
    """Refuse swappable adapters for a model of several graphs, each of which has only some of the modules.

    Raises:
        CheckpointError: names the adapter and the parts.
    """
    swappable = next((adapter for adapter in adapters if adapter.name is not None), None)
    if swappable is not None and len(parts) > 1:
        raise swappable.error(
            f"the model is exported as several graphs ({', '.join(part.name for part in parts)}), and adapters are "
            "selected at run time in one graph only",
            f"Merge it: {opt.adapter} {swappable.requested.folder}.",
        )


def requested_dtype(request: ModelRequest) -> torch.dtype | None:
    """Return the requested type of floating point weights; `None` without a request."""
    return None if request.dtype is None else DTYPES[request.dtype]


def resolve_checkpoint(request: ModelRequest, *, model_type: str | None = None) -> CheckpointConfig | None:
    """Return the config alone, without a decision on the task; `None` for a factory or a diffusers pipeline.

    Raises:
        UsageError: the request is wrong.
        InputError: config files or the Hub failed.
    """
    source = _find_source(request, model_type, needs_weights=False)
    if source.kind in ("script", "pipeline"):
        return None
    with quiet_libraries():
        source = _fetch_source(source, request, False, None)
    with local_libraries():
        return _read_config(source, request)


def with_plain_outputs(model: torch.nn.Module) -> torch.nn.Module:
    """Configure a model, in place, to return named outputs and no cache, for classes that only read their config."""
    config: Any = model.config
    config.return_dict = True
    if getattr(config, "use_cache", None):
        config.use_cache = False
    return model


def _find_source(request: ModelRequest, model_type: str | None, needs_weights: bool) -> ModelSource:
    """Return the source, or the type given by ``--model-class``."""
    if model_type is None and not request.model and request.model_class is not None:
        model_type = model_type_of_class(request.model_class)
    return (
        ModelSource("type", model_type)
        if model_type is not None
        else resolve_source(request, needs_weights=needs_weights)
    )


def _fetch_source(
    source: ModelSource, request: ModelRequest, needs_weights: bool, progress: Tell | None
) -> ModelSource:
    """Return a source with a path on this disk; download a Hub checkpoint if needed."""
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
    assert source.path is not None  # guaranteed by _fetch_source
    path = source.path if source.kind == "config" else source.path / CHECKPOINT_CONFIG_NAME
    return load_config(path, source.name, trust_remote_code=request.trust_remote_code)


def _decide_task_and_class(checkpoint: CheckpointConfig, request: ModelRequest) -> TaskDecision:
    task, model_class = request.task, request.model_class
    if checkpoint.custom_models:
        architectures = tuple(checkpoint.config.architectures or ())
        return resolve_custom_task(checkpoint.custom_models, architectures, task, model_class=model_class)
    return resolve_task(checkpoint.config, task, model_class=model_class, card_task=card_task(checkpoint.root))


def _import_model_class(checkpoint: CheckpointConfig, decision: TaskDecision) -> Any:
    """Import the class named in a task decision.

    Raises:
        CheckpointError: the installed transformers does not have the class.
        RemoteCodeError: the checkpoint's own code cannot be imported.
    """
    import_losses()
    if checkpoint.custom_models:
        return own_class(decision.model_class_name, checkpoint.root or Path())
    import transformers

    model_class = getattr(transformers, decision.model_class_name, None)
    if not isinstance(model_class, type):
        raise CheckpointError(
            f"{decision.model_class_name}: not available in the installed transformers {transformers.__version__}",
            hint="Install the packages this model needs.",
        )
    return model_class


def _find_codes(checkpoint: CheckpointConfig, folder: Path | None, source: ModelSource) -> CodedCheckpoint | None:
    """Find the quantized weights of a checkpoint if its config declares a quantization; else `None`.

    Raises:
        CheckpointError: their format is not supported, or they are damaged.
    """
    weights = source.stored_weights if folder is not None else None
    if folder is None or weights is None:
        return None
    if weights.format == "gguf":
        record = checkpoint.quantization or {"quant_method": "gguf"}
        return read_coded_checkpoint(record, {}, folder, weights.files)
    if checkpoint.quantization is None:
        return None
    if weights.format != "safetensors":
        raise CheckpointError(
            f"{weights.files[0]}: its config.json has a quantization_config, and quantized weights are read "
            "from safetensors only",
            hint="Save the checkpoint as safetensors.",
        )
    return read_coded_checkpoint(checkpoint.quantization, stored_entries(weights.files), folder, weights.files)


def _find_dtype(config: object, folder: Path | None, requested: torch.dtype | None) -> torch.dtype | None:
    """Return the requested type, else the config's, else the first floating point type in the weight files' headers.

    `None` if all are missing, or the headers cannot be read, which is reported when the weights are loaded.
    """
    if requested is not None:
        return requested
    if isinstance(config_dtype := getattr(config, "dtype", None), torch.dtype):
        return config_dtype
    try:
        weights = find_weights(folder) if folder is not None else None
        sizes = stored_sizes(weights.files) if weights is not None and weights.format == "safetensors" else ()
    except CheckpointError:
        return None  # reported when the weights are loaded
    dtypes = (getattr(torch, entry.dtype, None) for entry in sizes)
    return next((dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point), None)


def _build_without_storage(model_class: Any, config: Any, dtype: torch.dtype | None) -> torch.nn.Module:
    """Build the class on the ``meta`` device.

    Raises:
        CheckpointError: the config has values the class refuses, or the class needs a missing package.
    """
    config = copy.deepcopy(config)
    if getattr(config, "_experts_implementation", None) is None:
        # The default implementations of experts read values, which do not exist here; the modules are the same.
        config._experts_implementation = "batched_mm"
    try:
        # torch's modules initialize their parameters when they are made, which have no values here.
        initial = [(nn.init, name, _keep_tensor) for name in vars(nn.init) if name.endswith("_") and name[0] != "_"]
        with torch.device("meta"), attributes_replaced(*initial), warnings.catch_warnings():
            # The warnings concern tensors without elements; the forward refuses such a config with a clearer error.
            warnings.simplefilter("ignore")
            model: torch.nn.Module = model_class._from_config(config, dtype=dtype)
    except _BUILD_ERRORS as error:
        raise build_error(model_class, error) from error
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > _MOST_PARAMETERS:
        raise CheckpointError(
            f"{model_class.__name__} of this config would have {count:.0e} parameters, more than any known model",
            hint="Correct the sizes in the config.",
        )
    return with_plain_outputs(model.eval())


def _keep_tensor(tensor: torch.Tensor, *_arguments: object, **_keywords: object) -> torch.Tensor:
    """Initialize nothing."""
    return tensor


def _resolve_script(source: ModelSource, request: ModelRequest, report: Tell) -> ResolvedModel:
    """Call a factory, and decide the inputs of its model by the manifest of the user or by its example.

    Raises:
        UsageError: the inputs are unknown, or the request contradicts the factory.
        InputError: the user's code failed.
    """
    report(f"calling {source.name}")
    script = _load_script(source, request.seed, is_example_needed=request.input_specs is None)
    if request.model_class not in (None, type(script.model).__name__):
        raise UsageError(
            f"{opt.model_class} {request.model_class}: {source.name} returns a {type(script.model).__name__}",
            hint=f"Remove {opt.model_class}: a factory determines the class.",
        )
    example = script.example
    if request.input_specs is not None:
        specs, arguments, notes = _manifest_inputs(script, request.input_specs, request)
    elif example is not None:
        check_input_specs(script.model, example.specs, script.example_origin, example.argument_names)
        specs, arguments, notes = example.specs, example.arguments, example.notes
    else:
        own_name = f"{_EXAMPLE_INPUTS}_{source.factory}()"
        raise UsageError(
            f"{source.name}: the inputs of {type(script.model).__name__} are unknown",
            hint=f"Add a function {_EXAMPLE_INPUTS}() or {own_name} beside the factory that returns tensors, or "
            f"{opt.input_specs}.",
        )
    decision = open_axes(
        InputDecision(specs, notes, requested_by=spell(request.specs_origin)),
        request.dynamic,
        are_sizes_firm=True,
        accepts=accepts_shapes(script.model, arguments),
    )
    part = live_module.live_part(script.model, decision, arguments, example if request.input_specs is None else None)
    refuse_unknown_parts(request.submodel, (part,), source.name)
    return ResolvedModel(source=source, parts=(part,))


def _manifest_inputs(
    script: _ScriptModel, specs: tuple[InputTensorSpec, ...], request: ModelRequest
) -> tuple[tuple[InputTensorSpec, ...], NestedArguments | None, tuple[str, ...]]:
    """Return the inputs of a manifest, their conversion into arguments, and notes.

    The example determines containers and constants of the forward; with other input names, the names do.
    """
    example = script.example
    if request.patches_inputs:
        own = InputDecision(() if example is None else example.specs)
        specs = patched_inputs(own, specs, request.specs_origin)
    names = [spec.name for spec in specs]
    arguments = example.arguments if example is not None else None
    constants = {} if arguments is None else arguments.constants
    if example is None or set(names) != set(example.tensors):
        constants = {name: value for name, value in constants.items() if SEPARATOR not in name and name not in names}
        arguments = arguments_of_names(script.model, names, spell(request.specs_origin), constants)
    check_input_specs(script.model, specs, spell(request.specs_origin), () if arguments is None else arguments.names)
    constant_notes = () if arguments is None else arguments.notes
    return specs, arguments, (*script.notes, *unused_size_notes(request), *constant_notes)


_EXAMPLE_INPUTS = "example_inputs"
_MAX_LISTED_FUNCTIONS = 8
"""Functions of a script named in a message. Chosen: they fit on one line."""

_SAVED_IN_TRAINING_MODE = (
    "was saved in training mode: exported in evaluation mode, except for operators that torch.jit.trace recorded in "
    "training mode."
)
"""Of a TorchScript file. An exported program has no mode."""

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True)
class _ScriptModel:
    """Model and example inputs of a factory."""

    model: torch.nn.Module
    """The model, in evaluation mode."""
    example: live_module.NamedExample | None
    """The example inputs; `None` without an example."""
    example_origin: str
    """Origin of the example, for messages."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""


def _load_script(source: ModelSource, seed: int, *, is_example_needed: bool) -> _ScriptModel:
    """Call the factory of ``source``, and find its example inputs. The caller's random state is left unchanged.

    Example inputs are the first available of: the second result of the factory, the result of
    ``example_inputs_<factory>()``, the result of ``example_inputs()``.

    Args:
        source: The factory.
        seed: Seed of torch before the user's code runs.
        is_example_needed: Whether the example defines the inputs. If not, a failing example becomes a note.

    Raises:
        ModelPathError: the module or the factory does not exist.
        InputError: the user's code raised (names file and line), or returned an unexpected object.
        UsageError: a tensor of the example is invalid as a graph input.
    """
    folder = source.path.resolve().parent if source.path is not None else Path.cwd()
    with _importable_folder(folder), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, file = None, None
        if source.factory is None:
            assert source.path is not None  # the file of a program
            result: object = load_program(source.path, source.name)
        else:
            module = _import_script(source)
            factory = _find_factory(module, source)
            file = getattr(module, "__file__", None)
            is_model = isinstance(factory, torch.nn.Module)
            result = factory if is_model else _guard_user_code(factory, source.name, file)
        model, inputs = _unpack_model(result, source)
        model, inputs = open_program(model, inputs, source.name)
        model = unwrap_compiled(model)
        live_module.refuse_uninitialized(model, source.name)
        notes = live_module.training_notes(model)
        if source.factory is None and isinstance(result, torch.nn.Module) and model.training:
            notes = (f"{source.name} {_SAVED_IN_TRAINING_MODE}", *notes)
        origin = f"the inputs that {source.name} returns"
        try:
            if inputs is None and module is not None:
                function = _find_example_function(module, source)
                if function is not None:
                    origin = f"{function.name}() of {source.name}"
                    inputs = _guard_user_code(function.call, origin, file)
            example = None if inputs is None else live_module.name_examples(inputs, model, origin)
        except WinMLError as error:
            if is_example_needed:
                raise
            return _ScriptModel(model.eval(), None, origin, (*notes, f"{error.message}; it is not used"))
    return _ScriptModel(model.eval(), example, origin, notes)


def _unpack_model(result: object, source: ModelSource) -> tuple[torch.nn.Module | ExportedProgram, Any]:
    """Return the model or program, and the example inputs if the factory returned both.

    Raises:
        InputError: the factory returned another object.
    """
    if isinstance(result, torch.nn.Module | ExportedProgram):
        return result, None
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.nn.Module | ExportedProgram):
        return result
    kinds = ", ".join(type(element).__name__ for element in result) if isinstance(result, tuple) else ""
    raise InputError(
        f"{source.name}: returned {type(result).__name__}{f' of {kinds}' if kinds else ''}, expected a torch.nn.Module",
        hint="Return the model, or (model, inputs).",
    )


@dataclass(frozen=True)
class _ExampleFunction:
    """A function of the script that returns example inputs."""

    name: str
    call: Callable[[], Any]


def _find_example_function(module: ModuleType, source: ModelSource) -> _ExampleFunction | None:
    """Return the example function of this factory, else the example function of all factories; `None` without both.

    Raises:
        InputError: the object of this name is no function.
    """
    own_name = f"{_EXAMPLE_INPUTS}_{str(source.factory).replace('.', '_')}"
    for name in (own_name, _EXAMPLE_INPUTS):
        function = getattr(module, name, None)
        if callable(function):
            return _ExampleFunction(name, function)
        if function is not None:
            raise InputError(
                f"{source.name}: {name} is a {type(function).__name__}, not a function",
                hint=f"Return it from a function: def {name}(): return ...",
            )
    return None


@contextmanager
def _importable_folder(folder: Path) -> Iterator[None]:
    """Make modules in the folder of the script importable, as ``python file.py`` would."""
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


class _ScriptLoader(SourceFileLoader):
    """Write no bytecode beside the script, as ``python file.py`` does not."""

    def set_data(self, path: str, data: object, *, _mode: int = 0o666) -> None:
        """Drop the bytecode."""


def _import_script(source: ModelSource) -> ModuleType:
    if source.path is None:
        return _import_module(str(source.module), source.name)
    name = f"_winml_script_{source.path.stem}"
    path = str(source.path.resolve())
    spec = importlib.util.spec_from_file_location(name, path, loader=_ScriptLoader(name, path))
    assert spec is not None  # the loader is given
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up while it is executed
    loader = spec.loader
    _guard_user_code(lambda: loader.exec_module(module), source.name, path)
    return module


def _import_module(name: str, source_name: str) -> ModuleType:
    """Import a module of a package.

    Raises:
        ModelPathError: there is no such module.
        InputError: the module fails.
    """
    try:
        return _guard_user_code(lambda: importlib.import_module(name), source_name, None)
    except InputError as error:
        cause = error.__cause__
        # A missing package inside the user's module is an error of this code; a missing module itself is a wrong name.
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}."):
            raise ModelPathError(
                f"{source_name}: no module {name!r}",
                hint="Install the package, run in the folder that holds it, or pass file.py:function.",
            ) from cause
        raise


def _find_factory(module: ModuleType, source: ModelSource) -> Any:
    """Return the function or class that a source names.

    Raises:
        ModelPathError: the module has no such name, or the object cannot be called.
    """
    factory: Any = module
    for name in str(source.factory).split("."):
        if not hasattr(factory, name):
            raise ModelPathError(
                f"{source.name}: {source.path or source.module} has no {name!r}",
                hint=_functions_hint(name, factory),
            )
        factory = getattr(factory, name)
    if not callable(factory):
        raise ModelPathError(
            f"{source.name}: {source.factory!r} is a {type(factory).__name__}, not a function",
            hint="Pass a function without parameters that returns the model.",
        )
    return factory


def _functions_hint(name: str, holder: object) -> str:
    """Return a hint on the names that exist in place of a missing function."""
    public = {key: value for key, value in vars(holder).items() if callable(value) and not key.startswith("_")}
    if suggestion := suggest(name, public):
        return suggestion
    home = getattr(holder, "__name__", None)
    names = [key for key, value in public.items() if getattr(value, "__module__", None) == home]
    names = [key for key in names if not key.startswith(_EXAMPLE_INPUTS)]
    listing = f" It has: {', '.join(names[:_MAX_LISTED_FUNCTIONS])}." if names else ""
    return f"Pass a function in it that returns the model.{listing}"


def _guard_user_code(function: Callable[[], _ResultT], source_name: str, file: str | None) -> _ResultT:
    """Run code of the user, and convert any exception into an error that locates it."""
    try:
        with restored_working_directory():
            return function()
    except BaseException as error:
        if type(error) is KeyboardInterrupt:
            raise  # most likely pressed by the user
        raise _user_error(error, source_name, file) from error


def _user_error(error: BaseException, source_name: str, file: str | None) -> InputError:
    """Return the error for an exception of user code, with its line, and the package that could not be imported."""
    text = " ".join(str(error).split())
    package = failed_import(error)
    if source_name.startswith((f"{package}:", f"{package}.")):
        package = ""  # the user's own package; the message names the line
    cause = f"{package} cannot be imported: " if package else ""
    return InputError(
        f"{source_name}: {_error_location(error, file)}{cause}{type(error).__name__}{f': {text}' if text else ''}",
        hint=f"Reinstall {package}." if package else "Correct the code there.",
    )


def _error_location(error: BaseException, file: str | None) -> str:
    """Return ``file:line: `` of the innermost line in the user's file, else of the innermost line of any user code."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: "
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else place_of(error)
