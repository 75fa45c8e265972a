"""Resolves a model name: to an ONNX file, to the files of a build or an export, or to a PyTorch model.

Commands call this once, and then work with paths. Builds nothing: ``builds.build_model`` exports a PyTorch model.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit import file_names
from winml.modelkit.errors import CheckpointError, InputError, ModelPathError, UsageError, opt
from winml.modelkit.models.checkpoints.companion_files import companion_files
from winml.modelkit.models.checkpoints.hub import hub_file
from winml.modelkit.models.checkpoints.weight_files import find_weights
from winml.modelkit.models.request import ModelRequest, resolve_source
from winml.modelkit.onnx.files.foreign_files import library_file
from winml.modelkit.onnx.files.foreign_names import file_within, name_problem
from winml.modelkit.onnx.files.moving import move_file, remove_folder
from winml.modelkit.onnx.files.named_paths import COPIES_FOLDER, cache_root, named_path
from winml.modelkit.options import JsonError, read_json_file
from winml.modelkit.words import message_words, show_paths_as

if TYPE_CHECKING:
    from winml.modelkit.builds.manifest_records import BuildManifest
    from winml.modelkit.export.config import WinMLExportConfig


@dataclass(frozen=True)
class NamedModel:
    """A resolved name, for a command that runs ONNX files."""

    name: str
    """Name or path as passed by the user."""
    path: Path | None = None
    """The ONNX file; None if the model is not exported yet."""
    request: ModelRequest | None = None
    """The PyTorch model; None if the name is an ONNX file."""
    export: WinMLExportConfig | None = None
    """Options of its export; None: the defaults."""

    def files_read(self) -> tuple[Path, ...]:
        """Return the files of the model, which no output may replace.

        Raises:
            WinMLError: the name is no usable model.
        """
        source = self.request or self.path
        assert source is not None
        return source_files(source)


def source_files(source: Path | ModelRequest) -> tuple[Path, ...]:
    """Return the files of an ONNX model or of a PyTorch model.

    Raises:
        WinMLError: there is no such model.
    """
    if isinstance(source, ModelRequest):
        return resolve_source(source).files
    from winml.modelkit.onnx.files.output_files import files_of_model

    return files_of_model(source)


def resolve_side(name: str) -> Path | ModelRequest:
    """Resolve a name to an ONNX file, also in a build folder, or to a PyTorch model.

    Raises:
        UsageError: the name is no usable model.
        CheckpointError: weight files are truncated, or an index names missing shards.
    """
    if (path := onnx_file(name)) is not None:
        return path
    request = ModelRequest(model=name)
    resolve_source(request)
    return request


@dataclass(frozen=True)
class ModelFolder:
    """The folder of a build or export, for commands that transform files."""

    path: Path
    parts: Mapping[str, Path]
    """Name of the part → its file, in the order of execution; only ``model`` for a model of one part."""
    chosen: tuple[str, ...]
    """Names of the selected parts."""
    companions: Mapping[str, Path]
    """Companion files of the models: name in the folder, with ``/`` → file."""
    layout: str | None = None
    """Name of its layout; None: plain."""

    def only_part(self, reason: str) -> Path:
        """Return the file of the only selected part.

        Args:
            reason: Reason why several parts are not supported, for the message.

        Raises:
            UsageError: several parts are selected.
        """
        if len(self.chosen) > 1:
            raise UsageError(
                f"{reason}, and {self.path} contains {', '.join(self.chosen)}",
                hint=f"Select one: {opt.submodel} {self.chosen[-1]}.",
            )
        return self.parts[self.chosen[0]]

    def name_of(self, part: str) -> str:
        """Return the path of the file of a part, relative to the folder, with ``/``."""
        return self.parts[part].relative_to(self.path).as_posix()


def read_model_folder(path: Path, submodel: Sequence[str] = ()) -> ModelFolder:
    """Return the parts and companion files in the folder of a build or of an export.

    Args:
        path: The folder.
        submodel: Names of the selected parts; empty: all.

    Raises:
        ModelPathError: the path is no such folder, is a checkpoint, or lacks its model.
        UsageError: a selected part does not exist.
        InputError: a file in the folder is damaged.
    """
    path = _model_folder(path)
    parts = part_files(str(path))
    if not parts:
        model = onnx_file(str(path))
        if model is None:
            raise ModelPathError(
                f"{path}: is a checkpoint, expected an ONNX model",
                hint=f"Build it first, and pass the build folder: winml build -m {path} -o built",
            )
        parts = {file_names.ONLY_PART: model}
    refuse_unknown_parts(submodel, parts, str(path))
    chosen = tuple(part for part in parts if not submodel or part in submodel)
    manifest = _read_manifest(path)
    if manifest is None or not manifest.deploy:
        return ModelFolder(path, parts, chosen, companion_files(path), None if manifest is None else manifest.layout)
    models = {file.name for part in manifest.parts for file in part.model}
    names = [file.name for file in manifest.deploy if file.name not in models]
    companions = {name: path / name for name in names if name_problem(path, name) is None}
    return ModelFolder(path, parts, chosen, companions, manifest.layout)


def chosen_parts(name: str, submodel: Sequence[str] = (), *, beside_weights: bool = False) -> Mapping[str, Path]:
    """Return part → file of the selected parts if a name is the folder of several parts; else ``{}``.

    Args:
        name: As passed by the user.
        submodel: Names of the selected parts; empty: all.
        beside_weights: See :func:`part_files`.

    Raises:
        UsageError: a selected part does not exist.
    """
    try:
        parts = part_files(name, beside_weights=beside_weights)
    except InputError:  # a file in it is damaged: the error follows where the folder is opened
        return {}
    if parts:
        refuse_unknown_parts(submodel, parts, name)
    return {part: path for part, path in parts.items() if not submodel or part in submodel}


def refuse_unknown_parts(submodel: Iterable[str], parts: Mapping[str, object], name: str) -> None:
    """Refuse names of parts that a folder does not contain.

    Raises:
        UsageError: a part does not exist; names it and the existing parts.
    """
    for part in submodel:
        if part not in parts:
            raise UsageError(f"{opt.submodel} {part}: {name} has no such part", hint=f"It has {', '.join(parts)}.")


def onnx_file(name: str) -> Path | None:
    """Return the ONNX file of a name; ``None`` if the model is not exported yet.

    A file of the Hub (``owner/name/path/model.onnx``) is fetched if the Hub cache does not contain it.

    Raises:
        ModelPathError: there is no such file, a build folder lacks its model, or a folder is neither a build nor a
            checkpoint.
        HubError: the file cannot be fetched.
    """
    path = named_path(name.strip())
    if path.is_dir():
        return _find_built_model(_model_folder(path))
    if path.suffix.lower() != file_names.MODEL_SUFFIX:
        return None
    local_path = readable_file(name.strip())
    if not local_path.is_file():
        problem = "is not a regular file" if path.exists() else "no such file"
        raise ModelPathError(f"{path}: {problem}", hint="Pass the path of an ONNX file.")
    return local_path


def readable_file(name: str | os.PathLike[str]) -> Path:
    """Return the local path of an ONNX file, fetched from the Hub if necessary and without links; it may be missing.

    Raises:
        HubError: the file cannot be fetched.
        InputError: the path is a link, and the file is no ONNX file or a data file is missing.
        WriteError: the cache cannot be written.
    """
    path = named_path(name)
    remote = None if path.exists() else hub_file(name)
    if remote is not None:
        path = remote.local_path()
    return _resolve_links(path) if path.is_file() else path


def _resolve_links(path: Path) -> Path:
    """Return a model file without linked data files: the file itself, or a copy with its data in the cache of winml.

    In the Hub cache every file is a link to a blob. onnx_ir follows no link to data files, symbolic or hard, and ONNX
    Runtime follows no link to another folder. The model's configs and tokenizer are copied as well.

    Raises:
        InputError: the file is no ONNX file, or a data file is missing.
        WriteError: the cache cannot be written.
    """
    if not path.is_symlink():
        return path
    from winml.modelkit.onnx.files.placing import external_files

    data = external_files(path)
    if not any(file.is_symlink() for file in data):
        return path
    root = file_names.files_folder(path)
    files = {file.relative_to(root).as_posix(): file.resolve() for file in (path, *data)}
    files |= {name: file.resolve() for name, file in companion_files(root).items()}
    return _copy_files(files, [str(file) for file in files.values()]) / path.relative_to(root)


def _copy_files(files: Mapping[str, Path], identities: Iterable[str]) -> Path:
    """Return a folder in the cache of winml with copies of files, made once.

    Args:
        files: Name in the folder → file.
        identities: Identity of the content of each file.

    Raises:
        WriteError: the cache cannot be written.
    """
    from winml.modelkit.onnx.files.output_files import write_errors_of
    from winml.modelkit.onnx.files.placing import copy_data

    entries = sorted(f"{name}:{identity}" for name, identity in zip(files, identities, strict=True))
    key = hashlib.sha256("\n".join(entries).encode()).hexdigest()
    folder = cache_root() / COPIES_FOLDER / key[:32]
    if not folder.is_dir():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        with write_errors_of(folder), contextlib.ExitStack() as stack:
            stack.callback(remove_folder, unfinished)
            for name, file in files.items():
                (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
                copy_data(file, unfinished / name)
            with contextlib.suppress(OSError):  # another process was faster
                move_file(unfinished, folder)
    return folder


def onnx_file_in(name: str) -> Path | None:
    """Return the ONNX file in the folder of a build or export; ``None`` for files, checkpoints and Hub ids.

    Raises:
        ModelPathError: the folder does not determine one model file.
    """
    folder = _named_folder(name)
    return _find_built_model(folder) if folder is not None and any(folder.glob(f"*{file_names.MODEL_SUFFIX}")) else None


def _named_folder(name: str) -> Path | None:
    """Return the folder of a name; ``None`` without a folder (the caller reports errors)."""
    try:
        folder = named_path(name.strip())
    except ModelPathError:
        return None
    return _model_folder(folder) if folder.is_dir() else None


def _model_folder(folder: Path) -> Path:
    """Return the folder with the models of a named folder, which is another one for a tuning and for a package.

    Of a tuning it is the build of the winner; of a package a copy of one variant in the cache of winml.

    Raises:
        ModelPathError: a package has no variant for the CPU.
        InputError: a package is damaged.
    """
    winner = folder / file_names.TUNED_NAME
    if (folder / file_names.TUNE_RESULT_NAME).is_file() and winner.is_dir():
        return winner
    names = (folder / file_names.PACKAGE_MANIFEST_NAME, folder.parent / file_names.PACKAGE_COMPONENT_NAME)
    if not any(path.is_file() for path in names):
        return folder
    from winml.modelkit.builds.opened_packages import opened_variant_files

    if not (files := opened_variant_files(folder)):
        return folder
    status = [file.stat() for file in files.values()]
    copy = _copy_files(
        files,
        [
            f"{file.resolve()}:{entry.st_size}:{entry.st_mtime_ns}"
            for file, entry in zip(files.values(), status, strict=True)
        ],
    )
    # A model is opened by the folder of its variant, which knows the shared weights.
    originals = {
        copy / name: file.parent if file.suffix == file_names.MODEL_SUFFIX else file for name, file in files.items()
    }
    show_paths_as({str(path): str(original) for path, original in (*originals.items(), (copy, folder))})
    return copy


def part_files(name: str, *, beside_weights: bool = True) -> Mapping[str, Path]:
    """Return part → file of a model of several parts in the folder of a build or of an export.

    ``{}`` for any other name: a file, a checkpoint, a model of one part, or an unusable name.

    Args:
        name: As passed by the user.
        beside_weights: Include exports in the folder of their checkpoint.

    Raises:
        InputError: a file in the folder is damaged.
        ModelPathError: the folder holds other models beside the parts.
    """
    folder = _named_folder(name)
    if folder is None:
        return {}
    if (folder / file_names.BUILD_MANIFEST_NAME).is_file():
        parts = _built_parts(folder)
        is_complete = len(parts) > 1 and all(path.is_file() for path in parts.values())
        return {part: _check_path(folder, path) for part, path in parts.items()} if is_complete else {}
    files = sorted(folder.glob(f"*{file_names.MODEL_SUFFIX}"))
    if len(files) < 2 or (not beside_weights and _holds_weights(folder)):
        return {}
    from winml.modelkit.onnx.bundle import ModelBundle, read_part_description  # imports onnx

    descriptions = {path: read_part_description(_check_path(folder, path)) for path in files}
    part_paths = [path for path, part in descriptions.items() if part is not None and part.is_one_of_several]
    if len(part_paths) < 2:
        return {}
    if others := [path.name for path in files if path not in part_paths]:
        names = ", ".join(path.name for path in part_paths)
        raise ModelPathError(
            f"{folder}: holds the parts of a model ({names}) and other models: {', '.join(others)}",
            hint="Pass one of the files, or move the parts into a folder of their own.",
        )
    return ModelBundle.read(part_paths).paths


def _read_manifest(folder: Path) -> BuildManifest | None:
    from winml.modelkit.builds.manifest_records import find_manifest  # imports onnx

    return find_manifest(folder)


def _find_built_model(folder: Path) -> Path | None:
    """Return the model file in the folder of a build or export; ``None`` for a checkpoint.

    Raises:
        ModelPathError: a build without a finished model or with several parts, or a folder of none of these kinds.
        InputError: the file is a link to another folder.
    """
    is_built = (folder / file_names.BUILD_MANIFEST_NAME).is_file()
    if not is_built and (component := _exported_component(folder)) is not None:
        return _check_path(folder, component)
    models = sorted(folder.glob(f"*{file_names.MODEL_SUFFIX}"))
    # The user chose the file name of an export.
    model = models[0] if len(models) == 1 and not is_built else folder / file_names.BUILT_MODEL_NAME
    if model.is_file():
        # In a checkpoint with an export beside its weights, the weights are the model.
        return None if not is_built and _holds_weights(folder) else _check_path(folder, model)
    if is_built:
        parts = [*_built_parts(folder).values()]
        if len(parts) == 1 and parts[0].is_file():
            return _check_path(folder, parts[0])  # the layout of the build has another file name
        if len(parts) > 1:
            raise ModelPathError(
                f"{folder}: holds a model of several parts: {', '.join(path.name for path in parts)}",
                hint=f"Pass one of them: {parts[0]}",
            )
        manifest = _read_manifest(folder)
        if manifest is not None and manifest.status == "unfinished":
            if manifest.failed:
                reason = f": {message_words(manifest.reason)}" if manifest.reason else ""
                raise ModelPathError(
                    f"{folder}: its build failed in the stage {manifest.failed}{reason}",
                    hint="Correct that, then run winml build again, which reuses the finished stages.",
                )
            raise ModelPathError(
                f"{folder}: its build is unfinished",
                hint="Repeat its winml build command, which reuses the finished stages.",
            )
        raise ModelPathError(
            f"{folder}: is a build folder without {file_names.BUILT_MODEL_NAME}", hint="Build it again: winml build."
        )
    if not any((folder / pattern).is_file() for pattern in _CHECKPOINT_FILES) and not any(
        folder.glob(f"*/{file_names.CHECKPOINT_CONFIG_NAME}")
    ):
        raise ModelPathError(
            f"{folder}: is neither a checkpoint (no {file_names.CHECKPOINT_CONFIG_NAME}) nor a build "
            f"(no {file_names.BUILD_MANIFEST_NAME})",
            hint=f"Pass one of the files in it: {', '.join(path.name for path in models[:5])}."
            if models
            else "Pass an ONNX file, a build folder or a checkpoint folder.",
        )
    return None


_EXPORTED_PARTS = (file_names.ONLY_PART, "decode")
"""Components of an export by transformers that run a whole model; ``decode`` also reads the prompt."""


def _exported_component(folder: Path) -> Path | None:
    """Return the file of an export by transformers (``ExportedModel``) that runs the model; ``None`` without one.

    Raises:
        ModelPathError: the export is not in ONNX, or no component runs the model alone.
        InputError: the description is damaged, or names a file outside of the folder.
    """
    path = folder / file_names.TRANSFORMERS_EXPORT_NAME
    if not path.is_file():
        return None
    try:
        record = read_json_file(path)
        files = {name: str(entry["file"]) for name, entry in record["components"].items()}
        export_format = str(record["export_format"])
    except (JsonError, KeyError, TypeError, AttributeError):
        return None  # a file of another tool
    if export_format != "onnx":
        raise ModelPathError(
            f"{folder}: is an export in the format {message_words(export_format)}; expected onnx",
            hint="Export it with OnnxExporter of transformers, or pass the checkpoint.",
        )
    paths = {name: file_within(folder, file, f"{path}: component {name!r}") for name, file in files.items()}
    is_whole = len(paths) == 1 or set(paths) == {"prefill", "decode"}
    name = next((name for name in _EXPORTED_PARTS if name in paths), None) if is_whole else None
    if name is None:
        raise ModelPathError(
            f"{folder}: no component runs the model alone: {message_words(', '.join(paths))}",
            hint=f"Pass one of its files: {next(iter(paths.values()), folder)}.",
        )
    return paths[name]


def _check_path(folder: Path, model: Path) -> Path:
    """Return the path of a model in a folder, checked for links.

    Raises:
        InputError: the file is a link to another folder; such a file must be passed by its own path.
    """
    library_file(folder, model.relative_to(folder).as_posix())
    return model


def _holds_weights(folder: Path) -> bool:
    """Return True if a folder has weight files of a checkpoint, intact or damaged."""
    try:
        return find_weights(folder) is not None
    except CheckpointError:
        return True  # damaged weights: loading them reports the error


_CHECKPOINT_FILES = (file_names.CHECKPOINT_CONFIG_NAME, "adapter_config.json")
"""Files that identify a checkpoint folder; missing files are reported by the loader."""


def _built_parts(folder: Path) -> dict[str, Path]:
    """Return part → file in the manifest of a finished build; ``{}`` for any other folder.

    Raises:
        InputError: the manifest names a file outside of the folder.
    """
    manifest = _read_manifest(folder)
    if manifest is None:
        return {}
    return {
        part.name: file_within(
            folder,
            part.model[0].name,
            f"{folder / file_names.BUILD_MANIFEST_NAME}: part {part.name!r}",
            missing_ok=True,
        )
        for part in manifest.parts
        if part.model and manifest.status == "done"
    }
