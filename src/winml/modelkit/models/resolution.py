"""What will be loaded, before any weight is read?

Puts the deciding steps of this room in order: where it is, what it is for, its class, its inputs. The class is built
without storage, or made by the factory of a user's script, so sizes are known and a config it refuses is told at once.
Loading (``model.py``), inspecting and writing a config all begin here, so they cannot disagree.
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
from winml.modelkit.models.checkpoints.merging import check_adapters
from winml.modelkit.models.checkpoints.quantized.formats import CodedCheckpoint, read_coded_checkpoint
from winml.modelkit.models.checkpoints.task import TaskDecision, resolve_custom_task, resolve_task
from winml.modelkit.models.checkpoints.weight_files import find_weights, stored_entries, stored_sizes
from winml.modelkit.models.families.family import unused_size_notes
from winml.modelkit.models.families.input_decisions import decide_parts, refuse_unknown_parts
from winml.modelkit.models.inputs.axis_names import accepts_shapes
from winml.modelkit.models.inputs.decision import InputDecision, check_input_specs
from winml.modelkit.models.inputs.dynamic_axes import open_axes
from winml.modelkit.models.inputs.nested_arguments import NestedArguments, arguments_of_names
from winml.modelkit.models.inputs.shape_run import REFUSALS
from winml.modelkit.models.inputs.sizes import SEPARATOR
from winml.modelkit.models.library_access import import_losses
from winml.modelkit.models.load_options import Dtype
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.request import ModelRequest, ModelSource, check_folder, resolve_source
from winml.modelkit.onnx.files.named_paths import restored_working_directory
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.options import nearest
from winml.modelkit.ort.foreign_libraries import local_libraries, quiet_libraries
from winml.modelkit.tags.torch_modules import uncompiled

Progress = Callable[[str], None]

_MOST_PARAMETERS = 10**14
"""Chosen: a hundred times the largest models known."""

_DTYPES: Mapping[Dtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_BUILD_ERRORS = (*REFUSALS, MemoryError, OSError)
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

    coded: CodedCheckpoint | None = None
    """Its weights in few bits; None where it has none, or random weights stand in for all."""

    adapters: tuple[Adapter, ...] = ()
    """Adapters that fit the model, in the order in which they were named."""

    @property
    def notes_on_codes(self) -> tuple[str, ...]:
        """Sentences about the weights in few bits."""
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
        has_weights = source.kind in ("folder", "hub") and not request.random_weights
        folder = source.path if has_weights else None
        if folder is not None:
            refuse_foreign_weights(checkpoint.config, folder)
        coded = _coded_weights(checkpoint, folder, source)
        dtype = _floating_dtype(checkpoint.config, folder, requested_dtype(request))
        # What codes stand for is exact in float32 alone.
        widens_halves = request.dtype is None and (widens_halves or coded is not None)
        is_widened = widens_halves and dtype in (torch.float16, torch.bfloat16)
        if is_widened:
            dtype = torch.float32
        model = _build_without_storage(model_class, checkpoint.config, dtype)
        adapters = read_adapters(request.adapter)
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


def _refuse_swapping_in_parts(adapters: Sequence[Adapter], parts: Sequence[ModelPart]) -> None:
    """Refuse adapters that are switched at run time for a model of several graphs, each of which has some modules.

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


def _coded_weights(checkpoint: CheckpointConfig, folder: Path | None, source: ModelSource) -> CodedCheckpoint | None:
    """Find the weights of few bits, where a checkpoint says that it has some.

    Raises:
        CheckpointError: their format is not read, or they are damaged.
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
            f"{model_class.__name__} of this config would have {count:.0e} parameters, more than any known model",
            hint="Correct the sizes in the config.",
        )
    return with_plain_outputs(model.eval())


def _resolve_script(source: ModelSource, request: ModelRequest, tell: Progress) -> ResolvedModel:
    tell(f"calling {source.name}")
    script = _load_script(source, request.seed, is_example_needed=request.input_specs is None)
    if request.model_class not in (None, type(script.model).__name__):
        raise UsageError(
            f"{opt.model_class} {request.model_class}: {source.name} returns a {type(script.model).__name__}",
            hint=f"Remove {opt.model_class}: a factory determines the class.",
        )
    example = script.example
    if request.input_specs is not None:
        specs, arguments, notes = _described_script_inputs(script, request.input_specs, request)
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


def _described_script_inputs(
    script: _ScriptModel, specs: tuple[InputTensorSpec, ...], request: ModelRequest
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
        arguments = arguments_of_names(script.model, names, spell(request.specs_origin), constants)
    check_input_specs(script.model, specs, spell(request.specs_origin), () if arguments is None else arguments.names)
    constant_notes = () if arguments is None else arguments.notes
    return specs, arguments, (*script.notes, *unused_size_notes(request), *constant_notes)


_EXAMPLE_INPUTS = "example_inputs"
_DISPLAYED_FUNCTIONS = 8
"""Functions of a script that a message names. Chosen: they fit on one line."""

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True)
class _ScriptModel:
    """What a factory returned."""

    model: torch.nn.Module
    """In evaluation mode."""
    example: live_module.NamedExample | None
    """The example inputs; None if nothing gives any."""
    example_origin: str
    """What gave them, for messages."""
    notes: tuple[str, ...] = ()
    """What the user should hear."""


def _load_script(source: ModelSource, seed: int, *, is_example_needed: bool) -> _ScriptModel:
    """Call the factory that ``source`` names, and find its example inputs. The caller's random state is left as it was.

    They are, the first that there is: what the factory returns beside the model, what ``example_inputs_<factory>()``
    returns, what ``example_inputs()`` returns.

    Args:
        source: The factory.
        seed: Seed of torch before the user's code runs.
        is_example_needed: Whether the example says what the inputs are. If not, one that cannot be made is a note.

    Raises:
        ModelPathError: the module or the factory does not exist.
        InputError: the user's code raised (names file and line), or returned something else than asked for.
        UsageError: a tensor of the example cannot be a graph input.
    """
    folder = source.path.resolve().parent if source.path is not None else Path.cwd()
    with _importable_folder(folder), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _import_script(source)
        factory = _find_factory(module, source)
        file = getattr(module, "__file__", None)
        is_model = isinstance(factory, torch.nn.Module)
        returned = factory if is_model else _guard_user_code(factory, source.name, file)
        model, inputs = _model_and_inputs(returned, source)
        live_module.refuse_programs(model, source.name)
        model = uncompiled(model)
        live_module.refuse_uninitialized(model, source.name)
        notes = live_module.training_notes(model)
        origin = f"the inputs that {source.name} returns"
        try:
            if inputs is None and (function := _example_function(module, source)) is not None:
                origin = f"{function.name}() of {source.name}"
                inputs = _guard_user_code(function.call, origin, file)
            example = None if inputs is None else live_module.name_examples(inputs, model, origin)
        except WinMLError as error:
            if is_example_needed:
                raise
            return _ScriptModel(model.eval(), None, origin, (*notes, f"{error.message}; it is not used"))
    return _ScriptModel(model.eval(), example, origin, notes)


def _model_and_inputs(returned: object, source: ModelSource) -> tuple[torch.nn.Module, Any]:
    """Return the model, and the example inputs where the factory returned both.

    Raises:
        InputError: it returned something else.
    """
    if isinstance(returned, torch.nn.Module):
        return returned, None
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], torch.nn.Module):
        return returned
    kinds = ", ".join(type(item).__name__ for item in returned) if isinstance(returned, tuple) else ""
    raise InputError(
        f"{source.name}: returned {type(returned).__name__}{f' of {kinds}' if kinds else ''}, "
        "expected a torch.nn.Module",
        hint="Return the model, or (model, inputs); for an exported program, the nn.Module that it was made from.",
    )


@dataclass(frozen=True)
class _ExampleFunction:
    """A function of the script that returns example inputs."""

    name: str
    call: Callable[[], Any]


def _example_function(module: ModuleType, source: ModelSource) -> _ExampleFunction | None:
    """Return the function that gives the inputs of this factory, else the one that gives those of every factory.

    Raises:
        InputError: what has its name is no function.
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
    """Let modules beside the script be imported, as ``python file.py`` would."""
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


class _ScriptLoader(SourceFileLoader):
    """Writes no bytecode beside the script, as ``python file.py`` does not."""

    def set_data(self, path: str, data: object, *, _mode: int = 0o666) -> None:
        """Drop the bytecode."""


def _import_script(source: ModelSource) -> ModuleType:
    if source.path is None:
        return _import_module(str(source.module), source.name)
    name = f"_winml_script_{source.path.stem}"
    path = str(source.path.resolve())
    spec = importlib.util.spec_from_file_location(name, path, loader=_ScriptLoader(name, path))
    assert spec is not None  # it has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up while it is executed
    loader = spec.loader
    _guard_user_code(lambda: loader.exec_module(module), source.name, path)
    return module


def _import_module(name: str, displayed: str) -> ModuleType:
    try:
        return _guard_user_code(lambda: importlib.import_module(name), displayed, None)
    except InputError as error:
        cause = error.__cause__
        # A package missing inside the user's module is a fault of that code; the module itself missing is a wrong name.
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}."):
            raise ModelPathError(
                f"{displayed}: no module {name!r}",
                hint="Install the package, run in the folder that holds it, or pass file.py:factory.",
            ) from cause
        raise


def _find_factory(module: ModuleType, source: ModelSource) -> Any:
    factory: Any = module
    for name in str(source.factory).split("."):
        if not hasattr(factory, name):
            raise ModelPathError(
                f"{source.name}: {source.path or source.module} has no {name!r}",
                hint=_hint_of_functions(name, factory),
            )
        factory = getattr(factory, name)
    if not callable(factory):
        raise ModelPathError(
            f"{source.name}: {source.factory!r} is a {type(factory).__name__}, not a function",
            hint="Pass a function without parameters that returns the model.",
        )
    return factory


def _hint_of_functions(name: str, holder: object) -> str:
    """Return what to write in place of a name that a module or a class lacks."""
    public = {key: value for key, value in vars(holder).items() if callable(value) and not key.startswith("_")}
    if guess := nearest(name, public):
        return f"Did you mean {guess!r}?"
    home = getattr(holder, "__name__", None)
    own = [key for key, value in public.items() if getattr(value, "__module__", None) == home]
    own = [key for key in own if not key.startswith(_EXAMPLE_INPUTS)]
    found = f" It has: {', '.join(own[:_DISPLAYED_FUNCTIONS])}." if own else ""
    return f"Pass a function in it that returns the model.{found}"


def _guard_user_code(function: Callable[[], _ResultT], displayed: str, file: str | None) -> _ResultT:
    """Run code of the user. Anything may go wrong in it, and nothing of that is a fault of ours."""
    try:
        with restored_working_directory():
            return function()
    except BaseException as error:
        if type(error) is KeyboardInterrupt:
            raise  # most likely of whoever sits at the keyboard
        raise _user_error(error, displayed, file) from error


def _user_error(error: BaseException, displayed: str, file: str | None) -> InputError:
    text = " ".join(str(error).split())
    package = failed_import(error)
    if displayed.startswith((f"{package}:", f"{package}.")):
        package = ""  # the user's own, whose line is told
    what = f"{package} cannot be imported: " if package else ""
    return InputError(
        f"{displayed}: {_place_of_error(error, file)}{what}{type(error).__name__}{f': {text}' if text else ''}",
        hint=f"Reinstall {package}." if package else "Correct the code there.",
    )


def _place_of_error(error: BaseException, file: str | None) -> str:
    """Return ``file:line: `` of the innermost line in the user's file, else of the innermost of the user's at all."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: "
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else place_of(error)
