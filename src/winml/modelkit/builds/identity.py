"""Identifies a model by digests of everything an export reads from disk.

Reads files only: no model library is imported, no weight becomes a tensor. Files do not determine the model of a user's
factory, so models of factories are never considered equal.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from winml.modelkit.builds.cache import file_digest, read_digest
from winml.modelkit.builds.manifest_records import FileRecord
from winml.modelkit.errors import InputError
from winml.modelkit.file_names import files_folder
from winml.modelkit.models.checkpoints.adapters import adapter_files, read_adapters
from winml.modelkit.models.checkpoints.companion_files import card_files, companion_files
from winml.modelkit.models.checkpoints.pipeline_files import read_pipeline_files
from winml.modelkit.models.request import ModelRequest, ModelSource, checkpoint_path, resolve_source
from winml.modelkit.onnx.files.foreign_names import ForeignNameError, file_below
from winml.modelkit.onnx.files.placing import external_files

_READ_SUFFIXES = (".json", ".txt")
"""Suffixes of config, tokenizer and processor files, which determine class, sizes and inputs."""


class ModelIdentity:
    """Identity of a model by the digests of its files.

    A background thread reads the files from :meth:`start` on: a first export need not wait for the digests.

    Attributes:
        is_repeatable: True if equal records mean equal models; a factory may return another model each time.
        places: Files and folders on this disk that no output may replace.
        companions: Config, tokenizer and processor files beside the model: name beside the result → file.
        card: Card and licence: name beside the result → file.
    """

    def __init__(
        self,
        find: Callable[[], dict[str, Any]],
        *,
        is_repeatable: bool,
        places: tuple[Path, ...],
        companions: Mapping[str, Path] = MappingProxyType({}),
        card: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        """Store the function that computes the record."""
        self._find, self._lock, self._is_started = find, threading.Lock(), False
        self.card = card
        self.is_repeatable = is_repeatable
        self.places = places
        self.companions = companions
        self._record: Future[dict[str, Any]] = Future()

    def start(self) -> None:
        """Start to read the files in the background, once."""
        with self._lock:
            if self._is_started:
                return
            self._is_started = True
        run = contextvars.copy_context().run
        # A daemon: an interrupted build does not wait until gigabytes are read.
        threading.Thread(target=run, args=(self._compute_record,), name="model identity", daemon=True).start()

    @property
    def record(self) -> dict[str, object]:
        """JSON-ready digests of the model's files; equal for equal models. Waits until the files are read.

        Raises:
            InputError: a file cannot be read.
        """
        self.start()
        return self._record.result()

    def _compute_record(self) -> None:
        """Compute the record or store its error; the body of the thread."""
        try:
            self._record.set_result(self._find())
        except Exception as error:
            self._record.set_exception(error)


def identify_model(request: ModelRequest) -> ModelIdentity:
    """Return the identity of a requested model at this moment; missing files of a Hub id are fetched.

    Raises:
        UsageError: the request is wrong.
        InputError: a file cannot be read, or the Hub failed.
    """
    source = resolve_source(request)
    if source.kind == "script":
        places = (source.path,) if source.path else ()
        return ModelIdentity(lambda: {"factory": source.name}, is_repeatable=False, places=places)
    folder = checkpoint_path(source, request)
    hub_record = {"hub_id": source.name, "commit": folder.name} if source.kind == "hub" else {}
    files = (
        read_pipeline_files(folder).read_files()
        if source.kind == "pipeline"
        else {path.name: path for path in _checkpoint_files(source, folder, request)}
    )
    adapters = read_adapters(request.adapter)
    merged = adapter_files(adapters)
    return ModelIdentity(
        lambda: {
            **hub_record,
            "files": file_digests(files),
            **({"adapters": file_digests(merged)} if merged else {}),
        },
        is_repeatable=True,
        places=(folder,),
        companions=companion_files(folder),
        card=card_files(folder),
    )


def identify_onnx(path: Path, companions: Mapping[str, Path] | None = None) -> ModelIdentity:
    """Return the identity of an ONNX file with its current data files.

    Args:
        path: The file.
        companions: Its config, tokenizer and processor files; None: those beside it.

    Raises:
        ModelPathError: there is no such file.
        InputError: the file is no ONNX file, a data file is missing or cannot be read, or a file beside the model is a
            link that leads out of the folder.
    """
    files = (path, *external_files(path))
    return ModelIdentity(
        lambda: {"files": file_digests(files)},
        is_repeatable=True,
        places=files,
        companions=companion_files(files_folder(path)) if companions is None else companions,
    )


def file_digests(files: Iterable[Path] | Mapping[str, Path]) -> dict[str, str]:
    """Return name → SHA-256 of files; the names are the keys of a mapping, else the file names.

    Raises:
        InputError: a file cannot be read.
    """
    path_by_name = files if isinstance(files, Mapping) else {path.name: path for path in files}
    digests = {}
    for name, path in path_by_name.items():
        try:
            digests[name] = file_digest(path)
        except OSError as error:  # noqa: PERF203 - one of a few files
            raise InputError(f"{path}: cannot be read: {error.strerror}", hint="Correct its permissions.") from error
    return digests


def _checkpoint_files(source: ModelSource, folder: Path, request: ModelRequest) -> Iterator[Path]:
    """Yield the files that an export reads: config, tokenizer and weights, with trusted code also Python files."""
    if source.kind == "config":
        yield folder
        return
    suffixes = (*_READ_SUFFIXES, ".py") if request.trust_remote_code else _READ_SUFFIXES
    yield from (path for path in sorted(folder.iterdir()) if path.suffix in suffixes and path.is_file())
    weights = None if request.random_weights else replace(source, path=folder).stored_weights
    yield from weights.files if weights is not None else ()


class FileRecords:
    """Compares the files of one folder with their records by digest; each file is read once."""

    def __init__(self, folder: Path) -> None:
        """Set the folder; no file is read yet."""
        self._folder = folder
        self._digests: dict[tuple[int, int, int, int], str] = {}

    def of(self, paths: Iterable[Path]) -> tuple[FileRecord, ...]:
        """Return the records of files in the folder, by their current content.

        Raises:
            OSError: a file cannot be read.
        """
        return tuple(
            FileRecord(
                name=path.relative_to(self._folder).as_posix(),
                size_bytes=path.stat().st_size,
                sha256=self._read_digest(path),
            )
            for path in paths
        )

    def first_changed(self, records: Sequence[FileRecord]) -> str:
        """Return the name of the first file that is missing, changed or outside of the folder, or ``""``."""
        for record in records:
            try:
                path = file_below(self._folder, record.name)
                is_same = path.stat().st_size == record.size_bytes and self._read_digest(path) == record.sha256
            except (OSError, ForeignNameError):
                is_same = False
            if not is_same:
                return record.name
        return ""

    def _read_digest(self, path: Path) -> str:
        """Return the digest of a file, read once for all its hard links."""
        # A file with several names, by hard links, is read once.
        status = path.stat()
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if identity not in self._digests:
            self._digests[identity] = read_digest(path)
        return self._digests[identity]
