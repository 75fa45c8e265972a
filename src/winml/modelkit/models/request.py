"""Identification of the model in a request.

Decides from the text of ``-m`` and from the files on disk whether the text names a checkpoint folder, a
``config.json``, a factory in a script or package, or a Hub id. All errors in the path or the files around it are
reported here, before torch or transformers is imported. No network access: see ``checkpoints/hub.py``.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PureWindowsPath
from typing import Literal

from winml.modelkit.errors import CheckpointError, ModelPathError, UsageError, WinMLError, opt, spell
from winml.modelkit.fields import RECORDED
from winml.modelkit.file_names import (
    BUILD_MANIFEST_NAME,
    CHECKPOINT_CONFIG_NAME,
    MODEL_SUFFIX,
    files_folder,
    is_pipeline_folder,
)
from winml.modelkit.models.checkpoints import weight_files
from winml.modelkit.models.checkpoints.adapters import ADAPTER_CONFIG_NAME, named_adapter, read_adapters
from winml.modelkit.models.checkpoints.hub import cached_snapshot, snapshot_folder
from winml.modelkit.models.checkpoints.quantized.formats import folder_format
from winml.modelkit.models.checkpoints.task import WITH_PAST, canonical_task, canonical_word
from winml.modelkit.models.inputs.options import ShapeConfig
from winml.modelkit.models.load_options import LARGEST_SEED, LoadOptions
from winml.modelkit.onnx.files.foreign_files import check_library_files
from winml.modelkit.onnx.files.named_paths import named_path
from winml.modelkit.onnx.specs import DynamicRequest, InputTensorSpec, OpenSize, is_open
from winml.modelkit.options import nearest

SourceKind = Literal["folder", "config", "script", "hub", "type", "pipeline"]
"""``type`` is a model type alone: no checkpoint at all. ``pipeline`` is the folder of a diffusers pipeline."""

CHECKPOINT_KINDS = frozenset({"folder", "config", "hub", "type", "pipeline"})
"""Kinds of sources with modules of library classes; a script may return any module."""

# As validated by huggingface_hub: "name" or "owner/name" of letters, digits, '_', '-' and '.', with neither '-' nor '.'
# at the end.
_HUB_ID = re.compile(r"^(\w([\w.-]*\w)?/)?\w([\w.-]{0,94}\w)?$", re.ASCII)
_NEVER_IN_HUB_IDS = ("--", "..")
_REVISION = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
"""Branch, tag or commit, part of a path in the Hub cache: relative, and without upward steps."""
_DOTTED_NAME = re.compile(r"^[^\W\d]\w*(\.[^\W\d]\w*)*$")
_DRIVE = re.compile(r"^[A-Za-z]:[\\/]")

_FOREIGN_WEIGHTS = ("tf_model.h5", "flax_model.msgpack", "*.gguf", "*.ckpt", "*.pth", "*.pt")
_PROGRAM_SUFFIXES = {".pt", ".pth", ".pt2", ".ts", ".torchscript", ".jit", ".ptl"}
"""Usual suffixes of files of ``torch.jit.save`` and ``torch.export.save``; some are also those of weights."""
_PROGRAM_ENTRIES = ("/constants.pkl", "archive_format", "serialized_exported_program.json")
"""Specified by torch: files that only such an archive contains, not one of ``torch.save``."""
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".gguf"}


@dataclass(frozen=True)
class ModelRequest(LoadOptions):
    """Request for a model; :class:`LoadOptions` declares the options of loading."""

    model: str
    """Hub id, checkpoint folder, ``config.json``, ``file.py:function`` or ``package.module:function``."""
    input_specs: tuple[InputTensorSpec, ...] | None = None
    """Descriptions of inputs; win over ``shape_config`` and ``batch_size``."""
    patches_inputs: Literal[True] | None = None
    """True if inputs that ``input_specs`` does not describe stay as the model has them; `None`: it describes all."""
    specs_origin: str = "input_specs"
    """Option or config key that states ``input_specs``, for messages."""
    shape_config: ShapeConfig | None = None
    """Sizes that differ from the model's own."""
    batch_size: int | None = None
    """Rows of every input; `None` is 1."""
    dynamic: DynamicRequest = field(default_factory=DynamicRequest)
    """Dynamic dimensions, besides those named in ``input_specs`` and ``shape_config``."""
    cross_keys: Literal["decoder"] | None = None
    """Part of an encoder-decoder that computes the cross-attention keys and values; `None`: the encoder."""
    embedding_of: Literal["tokens", "features"] | None = None
    """Inputs of the embedding of a vision-language model: tokens alone, and whoever runs it inserts the image
    features; or tokens and image features with one row per image token; `None`: tokens and image features in the
    model's own shape, and the decoder takes token types."""

    def __post_init__(self) -> None:
        """Convert a path to text.

        Raises:
            UsageError: the model is neither text nor a path.
        """
        if not isinstance(self.model, (str, os.PathLike)):
            raise UsageError(
                f"model: expected a name or a path, got {self.model!r} ({type(self.model).__name__})",
                hint="Pass a checkpoint folder, a Hub id or file.py:function.",
            )
        object.__setattr__(self, "model", os.fsdecode(self.model))

    @property
    def fixed_sizes(self) -> dict[str, int]:
        """Sizes that are set to a number, by key of ``--shape-config``."""
        sizes = {} if self.shape_config is None else self.shape_config.fixed()
        return {**sizes, "batch_size": self.batch_size} if self.batch_size else sizes

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Numbers of tokens of the prompt graphs, the shortest first; ``()`` without prompt graphs."""
        lengths = self.prompt_length or ()
        return tuple(sorted({lengths} if isinstance(lengths, int) else {*lengths}))

    @property
    def left_open(self) -> dict[str, OpenSize]:
        """Sizes that are left open, by key of ``--shape-config``; `{}` without the option."""
        return {} if self.shape_config is None else self.shape_config.left_open()

    def with_sizes(self, sizes: Mapping[str, int]) -> ModelRequest:
        """Return the request with these fixed sizes, by key of ``--shape-config``."""
        if not sizes:
            return self
        shape = self.shape_config or ShapeConfig()
        return replace(self, shape_config=shape.model_copy(update=dict(sizes)))

    @property
    def is_dynamic(self) -> bool:
        """True if a dynamic dimension is requested."""
        has_open_specs = any(is_open(size) for spec in self.input_specs or () for size in spec.shape)
        has_open_sizes = self.input_specs is None and bool(self.left_open)
        return has_open_specs or has_open_sizes or not self.dynamic.is_empty


@dataclass(frozen=True)
class ModelSource:
    """Location of a model."""

    kind: SourceKind
    name: str
    """Name or path as passed by the user."""
    path: Path | None = None
    """The checkpoint folder, the config file, or the script file; `None` for a Hub id and for a package module."""
    module: str | None = None
    """Dotted module of a factory in a package."""
    factory: str | None = None
    """Name of the factory in the script or module."""
    weights: weight_files.WeightFiles | None = None
    """Weight files of a checkpoint folder; `None` with random weights."""

    @property
    def stored_weights(self) -> weight_files.WeightFiles | None:
        """The weight files, even if the request needs none; the weights of a GGUF file are in another folder.

        Raises:
            CheckpointError: an index is malformed, or names a shard that is missing.
        """
        if self.weights is not None and self.weights.format == "gguf":
            return self.weights
        return weight_files.find_weights(self.path) if self.path is not None else None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files at the path: the config, the script, or all files of the checkpoint folder; `()` without a path."""
        if self.path is None:
            return ()
        return tuple(sorted(self.path.iterdir())) if self.path.is_dir() else (self.path,)


def resolve_source(request: ModelRequest, *, needs_weights: bool | None = None) -> ModelSource:
    """Identify ``request.model`` and run all checks that do not need the libraries.

    Args:
        request: Request of the user.
        needs_weights: Whether weight files are required; `None`: required unless weights are random.

    Raises:
        ModelPathError: there is no usable file or folder at the path.
        UsageError: the name, or a flag beside it, does not specify a model.
        TaskError: the task is unknown (support by the architecture is checked later).
        CheckpointError: weight files are truncated, or an index names missing shards.
    """
    name = request.model.strip()
    if not name:
        raise UsageError("-m: empty model name", hint="Pass a checkpoint folder, a Hub id or file.py:function.")
    needs_weights = not request.random_weights if needs_weights is None else needs_weights
    source = _factory_source(name) or _path_source(name, needs_weights) or _hub_source(name)
    _check_flags(source, request)
    return _make_absolute(source)


def _make_absolute(source: ModelSource) -> ModelSource:
    """Return the source with absolute paths, because the model's own code may change the working directory."""
    if source.path is None:
        return source
    weights = source.weights
    if weights is not None:
        files = tuple(file.absolute() for file in weights.files)
        weights = replace(weights, folder=weights.folder.absolute(), files=files)
    return replace(source, path=source.path.absolute(), weights=weights)


def _factory_source(name: str) -> ModelSource | None:
    """Return the source of ``file.py:function`` or ``package.module:function``; `None` for other names.

    Raises:
        ModelPathError: the script does not exist.
    """
    location, colon, factory = name.rpartition(":")
    if not colon or not _DOTTED_NAME.match(factory):
        return None
    if location.lower().endswith(".py"):
        path = named_path(location)
        if not path.is_file():
            raise ModelPathError(f"{location}: no such file", hint="Pass an existing script as file.py:function.")
        return ModelSource("script", name, path=path, factory=factory)
    if _DOTTED_NAME.match(location) and not named_path(name).exists():
        return ModelSource("script", name, module=location, factory=factory)
    return None


def _path_source(name: str, needs_weights: bool) -> ModelSource | None:
    """Return the source of an existing file or folder; `None` if the name may be a Hub id.

    Raises:
        UsageError: an ONNX file.
        ModelPathError: a path that does not exist.
    """
    path = named_path(name)
    if path.is_dir() and is_pipeline_folder(path):
        return ModelSource("pipeline", name, path=path)
    if path.is_dir():
        return ModelSource("folder", name, path=path, weights=check_folder(path, needs_weights=needs_weights))
    if path.suffix.lower() == ".onnx":
        raise UsageError(
            f"{name}: is an ONNX file; this command exports PyTorch models",
            hint="Pass its source: a checkpoint folder, config.json, Hub id or file.py:function. Of an ONNX file, "
            f"winml export only fixes dynamic dimensions: {opt.shape_config} '{{\"batch_size\": 1}}'.",
        )
    if path.is_file():
        return _file_source(name, path, needs_weights)
    if path.exists():
        raise ModelPathError(
            f"{name}: is neither a file nor a folder", hint="Pass a checkpoint folder, config.json or file.py:function."
        )
    if _looks_like_path(name):
        raise ModelPathError(f"{name}: no such file or folder", hint=_missing_path_hint(path))
    return None


def _file_source(name: str, path: Path, needs_weights: bool) -> ModelSource:
    """Return the source of a config or a GGUF file.

    Raises:
        UsageError: a config without weights, or a script without a factory.
        ModelPathError: the file defines no model.
    """
    suffix = path.suffix.lower()  # Windows: FILE.PY is file.py
    if suffix == ".json":
        if needs_weights:
            raise UsageError(
                f"{name}: is a config without weights",
                hint=f"{f'Add {opt.random_weights}, or pass' if opt.random_weights else 'Pass'} the checkpoint folder.",
            )
        return ModelSource("config", name, path=path)
    if suffix == ".py":
        raise UsageError(
            f"{name}: is a script, and a function in it makes the model", hint=f"Pass {name}:NAME_OF_THE_FUNCTION."
        )
    if suffix == ".gguf":
        from winml.modelkit.models.checkpoints.quantized.gguf import gguf_folder  # only for GGUF files

        folder = gguf_folder(path)
        return ModelSource("folder", name, path=folder, weights=weight_files.WeightFiles("gguf", folder, (path,)))
    if suffix in _PROGRAM_SUFFIXES and _is_program(path):
        return ModelSource("script", name, path=path)
    if suffix in _WEIGHT_SUFFIXES:
        hint = f"Pass the folder with weights and {CHECKPOINT_CONFIG_NAME}: {path.parent}"
        raise ModelPathError(f"{name}: is a weights file, which does not define a model", hint=hint)
    raise ModelPathError(
        f"{name}: is not a model file",
        hint=f"Pass an ONNX file, a folder with {CHECKPOINT_CONFIG_NAME}, or file.py:function.",
    )


def _is_program(path: Path) -> bool:
    """Return True for an archive of a TorchScript module or an exported program."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(_PROGRAM_ENTRIES) for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _hub_source(name: str) -> ModelSource:
    if not _HUB_ID.match(name) or any(part in name for part in _NEVER_IN_HUB_IDS) or name.endswith(".git"):
        raise ModelPathError(
            f"{name}: neither an existing path nor a Hub id",
            hint="Pass a checkpoint folder, config.json, owner/name, file.py:function or package.module:function.",
        )
    return ModelSource("hub", name)


def _looks_like_path(name: str) -> bool:
    if name.startswith((".", "/", "~")) or "\\" in name or _DRIVE.match(name):
        return True
    # "owner/name" is ambiguous: with the suffix of a file it is a path, else a Hub id.
    return name.count("/") > 1 or name.lower().endswith(("/", ".json", ".py", *_WEIGHT_SUFFIXES, *_PROGRAM_SUFFIXES))


def _missing_path_hint(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"The folder {parent} does not exist either."
    guess = nearest(path.name, (entry.name for entry in parent.iterdir()))
    return f"Did you mean {parent / guess}?" if guess else f"{parent.absolute()} has no entry of a similar name."


def _check_flags(source: ModelSource, request: ModelRequest) -> None:
    """Refuse options that do not fit the source, or contradict each other.

    Raises:
        UsageError: names the option.
    """
    if request.revision is not None and source.kind != "hub":
        raise UsageError(
            f"{opt.revision} {request.revision}: {source.name} is local and has no revisions",
            hint=f"Remove {opt.revision}, or pass a Hub id.",
        )
    if source.kind == "script":
        _refuse_flags_of_checkpoints(source, request)
    if source.kind == "pipeline":
        _refuse_flags_of_models(source, request)
    read_adapters(request.adapter)
    if request.task is not None:
        canonical_task(request.task)
        if canonical_word(request.task).endswith(WITH_PAST) and not request.cache:
            raise UsageError(f"{opt.no_cache}: {opt.task} {request.task} requires a cache", hint="Remove one of them.")
    batch_size = request.shape_config.fixed().get("batch_size") if request.shape_config else None
    if batch_size is not None and request.batch_size not in (None, batch_size):
        raise UsageError(
            f"{opt.batch_size} {request.batch_size}: {opt.shape_config} sets batch_size {batch_size}",
            hint="Pass one of them.",
        )


def _refuse_flags_of_checkpoints(source: ModelSource, request: ModelRequest) -> None:
    """Refuse options that a factory decides by its code, such as the task.

    Raises:
        UsageError: names the option.
    """
    option, reason, hint = "", "which creates the weights", ""
    if request.random_weights:
        option, hint = opt.random_weights, f"Remove {opt.random_weights}."
    elif request.dtype is not None:
        option, hint = f"{opt.dtype} {request.dtype}", f"Remove {opt.dtype}, and return the model in that type."
    elif request.task is not None:
        option, reason, hint = f"{opt.task} {request.task}", "which determines the model", f"Remove {opt.task}."
    elif request.input_specs is None and (request.shape_config or request.batch_size):
        option = spell("shape_config" if request.shape_config else "batch_size")
        reason = "whose input sizes are fixed by its code"
        hint = f"Describe its inputs with {opt.input_specs}, or change its example_inputs()."
    elif request.adapter:
        option = f"{opt.adapter} {request.adapter[0]}"
        hint = f"Remove {opt.adapter}, and return the model with the adapter merged."
    if option:
        raise UsageError(f"{option}: {source.name} is a factory, {reason}", hint=hint)


def _refuse_flags_of_models(source: ModelSource, request: ModelRequest) -> None:
    """Refuse options that a diffusers pipeline has no use for: its components decide their tasks, classes and inputs.

    Raises:
        UsageError: names the option.
    """
    from winml.modelkit.models.checkpoints.pipeline_files import fused_lora_hint  # only for pipelines

    reason, hint = "whose components determine their own", ""
    if request.adapter:
        option, reason, hint = f"{opt.adapter} {request.adapter[0]}", "which takes no adapter here", fused_lora_hint()
    elif request.random_weights:
        option, reason = opt.random_weights, "which is built with its own weights"
        hint = "Save a pipeline with random weights: diffusers creates modules with from_config()."
    elif request.input_specs is not None or request.dynamic.axes or request.dynamic.dimensions:
        option = opt.input_specs if request.input_specs is not None else opt.dynamic_axes
        reason = "whose sizes are dynamic unless they are fixed"
        hint = f"Fix sizes with {opt.shape_config}: batch_size, height and width of the image, sequence_length."
    elif request.task is not None or request.model_class is not None:
        option = opt.task if request.task is not None else opt.model_class
    else:
        return
    raise UsageError(f"{option}: {source.name} is a diffusers pipeline, {reason}", hint=hint or f"Remove {option}.")


def check_folder(folder: Path, *, needs_weights: bool) -> weight_files.WeightFiles | None:
    """Check that a folder is a checkpoint, and return its weight files; `None` without ``needs_weights``.

    Raises:
        ModelPathError: config or weights are missing; names the files found instead.
        CheckpointError: the weights are truncated, shards are missing, or the quantization format is not supported; or
            a file is a link that leads out of the folder, or no regular file.
    """
    check_library_files(folder, error=CheckpointError)
    if not (folder / CHECKPOINT_CONFIG_NAME).is_file():
        config = folder / CHECKPOINT_CONFIG_NAME
        problem = f"{CHECKPOINT_CONFIG_NAME} is not a regular file" if config.exists() else f"has no {config.name}"
        if (folder / BUILD_MANIFEST_NAME).is_file():
            problem = "holds a build that is unfinished, or whose model was removed"
        raise ModelPathError(f"{folder}: {problem}", hint=_without_config_hint(folder))
    if not needs_weights:
        return None
    folder_format(folder)
    weights = weight_files.find_weights(folder)
    if weights is None:
        readable = " or ".join(single for _, single, _ in weight_files.FORMATS)
        raise ModelPathError(f"{folder}: has no weights ({readable})", hint=_without_weights_hint(folder))
    if weights.format == "safetensors":
        for file in weights.files:
            weight_files.check_safetensors(file)
        weight_files.check_index(folder)
    return weights


def _without_config_hint(folder: Path) -> str:
    """Return the hint for a folder without a config."""
    if (folder / BUILD_MANIFEST_NAME).is_file():
        return f"Finish it (winml build with -o {folder}), or pass the model that it was built from."
    from winml.modelkit.models.checkpoints.pipeline_files import lora_hint  # only in an error

    if hint := lora_hint(folder):
        return hint
    if (folder / ADAPTER_CONFIG_NAME).is_file():
        return f"It holds an adapter: pass its base model with -m, and add {opt.adapter} {folder}."
    checkpoint_folders = sorted(path.parent.name for path in folder.glob(f"*/{CHECKPOINT_CONFIG_NAME}"))
    if checkpoint_folders:
        return f"Did you mean one of the folders inside it: {', '.join(checkpoint_folders[:5])}?"
    return f"Pass the folder that save_pretrained wrote, with {CHECKPOINT_CONFIG_NAME} and weights."


def _without_weights_hint(folder: Path) -> str:
    """Return the hint for a folder without readable weights."""
    foreign_names = sorted({path.name for pattern in _FOREIGN_WEIGHTS for path in folder.glob(pattern)})
    if foreign_names:
        return f"{foreign_names[0]} has an unsupported format: save the model as safetensors."
    if models := sorted(path.name for path in folder.glob(f"*{MODEL_SUFFIX}")):
        return f"It holds ONNX files; pass one of them: {', '.join(models[:5])}."
    if opt.random_weights:
        return f"Add {opt.random_weights} to build the model from its config alone."
    return "Pass the folder that save_pretrained wrote, with the weights."


def checkpoint_path(source: ModelSource, request: ModelRequest) -> Path:
    """Return the folder of a checkpoint, or the file of a lone config.

    Raises:
        HubError: the download failed.
    """
    if source.kind == "hub":
        return snapshot_folder(
            source.name,
            request.revision,
            needs_weights=not request.random_weights,
            needs_code=request.trust_remote_code,
        )
    assert source.path is not None  # a folder or a config file
    return source.path


def cached_checkpoint(source: ModelSource, request: ModelRequest) -> Path | None:
    """Return the folder of a Hub checkpoint that is complete on this disk; `None` for any other source."""
    if source.kind != "hub":
        return None
    needs_weights, needs_code = not request.random_weights, request.trust_remote_code
    return cached_snapshot(source.name, request.revision, needs_weights=needs_weights, needs_code=needs_code)


def processor_folder(model: Path | ModelRequest) -> Path | None:
    """Return the folder of a model's tokenizer or image processor: its checkpoint, or the folder of its ONNX file.

    `None` for a model of a package, or a model specified by its type alone.

    Raises:
        UsageError: the request is wrong.
        HubError: the download failed.
    """
    if isinstance(model, Path):
        return files_folder(model.absolute())
    source = resolve_source(model)
    if source.kind != "hub" and source.path is None:
        return None
    path = checkpoint_path(source, model)
    return path if path.is_dir() else path.absolute().parent


_NETWORK_PREFIX = "\\\\"
"""Prefix of the drive in a path on another machine; Windows would contact this machine."""


def reference_checkpoint(
    metadata: Mapping[str, str], file_label: str, checkpoint_name: str, active: str | None = None
) -> ModelRequest:
    """Return the PyTorch model to compare with an ONNX file, for ``--reference``.

    Args:
        metadata: Metadata of the file.
        file_label: The file, for messages.
        checkpoint_name: The user's checkpoint, or :data:`RECORDED`.
        active: Name of the active adapter of the file; `None` if no adapter is active.

    Raises:
        UsageError: the file does not name a checkpoint on this machine, and neither does the user.
    """
    from winml.modelkit.onnx.bundle import model_record  # only if a file is read

    hint = f"Pass the checkpoint: {opt.reference} CHECKPOINT"
    is_recorded = checkpoint_name == RECORDED
    request = exported_from(metadata, file_label, hint, opt.reference) if is_recorded else ModelRequest(checkpoint_name)
    # Adapters that a model in PyTorch needs to answer as the file does: they are merged.
    adapters = map(named_adapter, map(str, model_record(metadata).get("adapters", ())))
    merged = tuple(str(adapter.folder) for adapter in adapters if adapter.name in (None, active))
    return replace(with_recorded_seed(request, metadata), adapter=merged)


def with_recorded_seed(request: ModelRequest, metadata: Mapping[str, str]) -> ModelRequest:
    """Return the request with the seed recorded in an ONNX file, which determines weights that the checkpoint lacks.

    Args:
        request: The PyTorch model to compare with the file.
        metadata: Metadata of the file.
    """
    from winml.modelkit.onnx.bundle import model_record  # only if a file is read

    seed = model_record(metadata).get("seed")
    return replace(request, seed=seed) if seed is not None and 0 <= seed <= LARGEST_SEED else request


def exported_from(metadata: Mapping[str, str], file_label: str, hint: str = "", option: str = "") -> ModelRequest:
    """Return the checkpoint recorded in the metadata of an exported file.

    The network is never used, and no recorded code is run.

    Args:
        metadata: Metadata of the file.
        file_label: The file, for messages.
        hint: Hint if the checkpoint is missing; empty: pass a baseline.
        option: Option that requires the checkpoint, for messages; empty: the baseline.

    Raises:
        UsageError: no checkpoint is recorded, or the recorded name is no folder, config or snapshot in the Hub cache on
            this machine.
    """
    from winml.modelkit.onnx.bundle import model_record  # only if a file is read

    option = option or f"{opt.baseline} pytorch"
    hint = (
        hint or f"Pass the model: -m with a Hub id, checkpoint folder or file.py:function, and {opt.baseline} pytorch."
    )
    record = model_record(metadata)
    if "name_or_path" not in record:
        raise UsageError(f"{option}: {file_label} does not record the model it was exported from", hint=hint)
    request = ModelRequest(
        model=record["name_or_path"],
        task=record.get("task"),
        revision=record.get("revision"),
        random_weights=record.get("random_weights", False),
        adapter=tuple(map(str, record.get("adapters", ()))),
    )
    try:
        model_names = (request.model, *(text.rpartition("=")[2] for text in request.adapter))
        is_remote = any(PureWindowsPath(name.strip()).drive.startswith(_NETWORK_PREFIX) for name in model_names)
        is_available = not is_remote and _is_on_disk(resolve_source(request), request)
    except WinMLError:
        is_available = False
    if not is_available:
        raise UsageError(
            f"{option}: {file_label} was exported from {request.model}, which is not a checkpoint on this machine",
            hint=hint,
        )
    return with_recorded_seed(request, metadata)


def _is_on_disk(source: ModelSource, request: ModelRequest) -> bool:
    """Return True if a checkpoint is a folder, a config or a complete snapshot in the Hub cache."""
    if source.kind != "hub":
        return source.kind in ("folder", "config", "pipeline")
    revision = request.revision
    if revision is not None and not _REVISION.fullmatch(revision):
        return False
    needs_weights = not request.random_weights
    return cached_snapshot(source.name, revision, needs_weights=needs_weights, needs_code=False) is not None
