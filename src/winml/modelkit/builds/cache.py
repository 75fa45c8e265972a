"""The cache of builds: keys of results, digests of files, list and removal of builds.

A key is a digest of everything that a result depends on: options, file contents and library versions. The content of a
file is hashed once; the hash is valid while size and modification time are unchanged. Keys of interrupted searches are
made in the same way. Imports no model library.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import filelock

from winml.modelkit.builds.config import WinMLBuildConfig
from winml.modelkit.builds.plan import is_onnx_path, plan_build
from winml.modelkit.errors import WinMLError, WriteError, first_line, spell_options
from winml.modelkit.file_names import BUILD_LOCK_NAME, BUILD_MANIFEST_NAME
from winml.modelkit.models.request import ModelRequest, resolve_source
from winml.modelkit.onnx.files.content_digest import hash_file
from winml.modelkit.onnx.files.moving import remove_file, remove_folder
from winml.modelkit.onnx.files.named_paths import (
    CACHE_VARIABLE,
    COPIES_FOLDER,
    FORMATS_FOLDER,
    cache_root,
    pause_recording,
)
from winml.modelkit.onnx.files.output_files import refuse_existing
from winml.modelkit.onnx.files.resumable_results import write_atomically
from winml.modelkit.options import read_json_file
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.report.plan import Plan, PlannedFile, PlannedStep
from winml.modelkit.version import __version__, library_versions

CACHE_SPELLING = {"another_output": f"another folder for the cache ({CACHE_VARIABLE})"}
"""Spelling of the cache in messages about an output."""

_SETTLED_SECONDS = 2.0
"""Seconds after a change during which a file is hashed each time: within one clock tick (2 s on FAT, specified) a file
may change again without a new modification time."""


_IS_LOOKING = contextvars.ContextVar("only looking", default=False)
_READ: dict[tuple[int, ...], str] = {}
"""Digests of files that this process has read: device and state → digest."""


@contextlib.contextmanager
def only_looking() -> Iterator[None]:
    """Write no notes about files inside the block, since a plan changes nothing."""
    token = _IS_LOOKING.set(True)
    try:
        yield
    finally:
        _IS_LOOKING.reset(token)


def digest(record: object) -> str:
    """Return the SHA-256 of a JSON value, independent of the order of its keys.

    >>> digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    True
    """
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content.

    The digest is stored in the cache with the size and modification time of the file, so a checkpoint is read once.

    Raises:
        OSError: the file cannot be read.
    """
    path = path.resolve()
    state = _file_state(path)
    note = cache_root() / "digests" / f"{digest(str(path))}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        remembered = read_json_file(note)
        if remembered["state"] == state:
            return str(remembered["sha256"])
    content_digest = read_digest(path)
    is_settled = _file_state(path) == state and _is_settled(path)
    # A read-only cache only costs time.
    if is_settled and not _IS_LOOKING.get():
        with contextlib.suppress(WriteError, OSError), pause_recording():
            write_atomically(note, json.dumps({"path": str(path), "state": state, "sha256": content_digest}))
    return content_digest


def read_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content; this process reads an unchanged file once.

    A build therefore does not read the files of its plan again.

    Raises:
        OSError: the file cannot be read.
    """
    state = _file_state(path)
    identity = (path.stat().st_dev, *state)
    content_digest = _READ.get(identity) or hash_file(path)
    if _file_state(path) == state and _is_settled(path):
        _READ[identity] = content_digest
    return content_digest


def _is_settled(path: Path) -> bool:
    """Return True if the last change of a file is old enough for its modification time to reveal a new change."""
    return abs(time.time_ns() - path.stat().st_mtime_ns) > _SETTLED_SECONDS * 1e9


def _file_state(path: Path) -> list[int]:
    """Return size, modification time and inode, which change with the content."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


_LIBRARIES = ("torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime")


def resume_identity(requested: Mapping[str, object], files: object) -> dict[str, object]:
    """Return the JSON-ready identity of stored results; results with an equal identity are reusable.

    Args:
        requested: Request of the measurement, and the machine.
        files: Digests of the contents of the measured files, or :func:`place_state`.
    """
    return {**requested, "files": files, "versions": tool_versions()}


def tool_versions() -> dict[str, str]:
    """Return the versions of winml and of the libraries that affect results."""
    return {"winml-modelkit": __version__, **library_versions(_LIBRARIES)}


def place_state(name: str, is_left_out: Callable[[Path], bool] = lambda _folder: False) -> str | None:
    """Return a digest of the names, sizes and modification times of files; ``None`` if the path does not exist.

    File contents are not read, since there may be too many files. A folder includes its subfolders except hidden ones;
    an ONNX file includes its data files.

    Args:
        name: Path of a file or folder.
        is_left_out: Returns True for a folder to ignore.
    """
    path = Path(name)
    try:
        files = sorted(_list_files_below(path, is_left_out)) if path.is_dir() else [path, *_data_files(path)]
        states = [(file, file.stat()) for file in files]
    except OSError:
        return None
    return digest([[file.as_posix(), state.st_size, state.st_mtime_ns] for file, state in states])


def _list_files_below(folder: Path, is_left_out: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders, without hidden and left-out subfolders."""
    for root, folders, names in os.walk(folder):
        current = Path(root)
        folders[:] = [name for name in folders if name[0] != "." and not is_left_out(current / name)]
        yield from (current / name for name in names if (current / name).is_file())


def _data_files(path: Path) -> tuple[Path, ...]:
    """Return the data files of an ONNX file; ``()`` if it is damaged."""
    from winml.modelkit.onnx.files.placing import external_files

    try:
        return external_files(path) if is_onnx_path(str(path)) and path.is_file() else ()
    except WinMLError:
        return ()


def plan_cached_export(request: ModelRequest) -> Plan:
    """Return the plan of an export into the cache. Imports no model library, writes and fetches nothing.

    Raises:
        UsageError: the request is wrong.
        InputError: no model exists at the path, or its weights are damaged.
        WriteError: the cache cannot be written to.
    """
    source = resolve_source(plan_build(WinMLBuildConfig(), request).request)
    with spell_options(CACHE_SPELLING):
        refuse_existing([cache_root() / _BUILDS_FOLDER / "*"], overwrite=True)
    condition = "the cache does not hold the export"
    return Plan(
        verb="export",
        reads=tuple(path for path in source.files if path.is_file()),
        writes=(PlannedFile(cache_root() / "*", only_if=condition),),
        steps=(PlannedStep("exporting", f"{request.model}, if {condition}"),),
    )


class CachedBuild(Record):
    """One build in the cache."""

    folder: Path
    model: str | None
    """Name of the model in the request; None if the manifest lacks it."""
    is_finished: bool
    size_bytes: int
    """Bytes that a removal frees; a file with several names counts once."""
    written: datetime
    """Time of the last change, in local time."""


class CacheContents(Record):
    """Builds in the cache, or builds removed from the cache."""

    root: Path
    builds: tuple[CachedBuild, ...]
    """Builds, latest first."""
    other_bytes: int = field(metadata=entry(before="builds"))
    """Bytes of notes about results and digests."""
    in_use: tuple[CachedBuild, ...] = ()
    """Builds that were not removed, since another process holds them."""

    @property
    @recorded(entry(before="other_bytes"))
    def size_bytes(self) -> int:
        """Bytes of builds and notes."""
        return sum(build.size_bytes for build in self.builds) + self.other_bytes


_BUILDS_FOLDER = "builds"
_NOTE_FOLDERS = ("stages", "digests", "open_sizes", "statistics", FORMATS_FOLDER)
"""Folders of small files: locations of results, file digests, dynamic sizes of models, statistics of activations, and
formats of execution providers."""


_BUILD_NAME = re.compile(r"[\w.-]+-[0-9a-f]{16}")
"""Folder name of a build in the cache: name of the model and start of a digest."""
_NOTE_NAME = re.compile(r"[0-9a-f]{64}\.json")


def list_cache(older_than: timedelta | None = None) -> CacheContents:
    """Return the contents of the cache.

    Args:
        older_than: Minimum age of the last change; None: all builds.
    """
    root = cache_root()
    builds = [_describe_build(folder) for folder in _build_folders(root)]
    now = datetime.now().astimezone()
    chosen = [build for build in builds if older_than is None or now - build.written > older_than]
    chosen.sort(key=lambda build: build.written, reverse=True)
    notes = (path for name in _NOTE_FOLDERS for path in _list_note_files(root / name))
    copies = (root / COPIES_FOLDER).rglob("*")
    return CacheContents(root, tuple(chosen), 0 if older_than is not None else stored_bytes((*notes, *copies)))


def remove_builds(contents: CacheContents) -> CacheContents:
    """Remove builds and the notes about them; return the removed builds.

    A build locked by another process stays. Digests of files are removed with the last build.

    Raises:
        WriteError: a folder cannot be removed.
    """
    removed: list[CachedBuild] = []
    in_use: list[CachedBuild] = []
    for build in contents.builds:
        (removed if _remove_folder(build.folder) else in_use).append(build)
    root = contents.root
    is_empty = not any(_build_folders(root))
    dead_notes = [
        path
        for name in _NOTE_FOLDERS
        for path in _list_note_files(root / name)
        if is_empty or (name == "stages" and not _has_result(path))
    ]
    copies = [*(root / COPIES_FOLDER).rglob("*")] if is_empty else []
    freed = stored_bytes((*dead_notes, *copies))
    if is_empty:
        remove_folder(root / COPIES_FOLDER)
    for path in dead_notes:
        with _removal_errors(path):
            remove_file(path)
    for name in (*_NOTE_FOLDERS, _BUILDS_FOLDER):
        with contextlib.suppress(OSError):
            (root / name).rmdir()  # if it is empty
    return CacheContents(root, tuple(removed), freed, tuple(in_use))


def _build_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of builds in the cache, recognized by name and by manifest or lock file."""
    for path in _list_entries(root / _BUILDS_FOLDER, Path.is_dir):
        if _BUILD_NAME.fullmatch(path.name) and any(
            (path / name).is_file() for name in (BUILD_MANIFEST_NAME, BUILD_LOCK_NAME)
        ):
            yield path


def _list_note_files(parent: Path) -> list[Path]:
    """Return the note files of a folder: JSON files named by a digest."""
    return [path for path in _list_entries(parent, Path.is_file) if _NOTE_NAME.fullmatch(path.name)]


def _list_entries(parent: Path, is_kind: Callable[[Path], bool]) -> list[Path]:
    """Return the entries of a kind in a real folder, without links; ``[]`` if the folder cannot be read."""
    with contextlib.suppress(OSError):
        if not parent.is_symlink():
            return sorted(path for path in parent.iterdir() if not path.is_symlink() and is_kind(path))
    return []


def _describe_build(folder: Path) -> CachedBuild:
    """Return model, state, size and age of a build in the cache; a damaged manifest counts as missing."""
    manifest: Any = {}
    with contextlib.suppress(OSError, ValueError):
        manifest = read_json_file(folder / BUILD_MANIFEST_NAME)
    manifest = manifest if isinstance(manifest, dict) else {}
    source = manifest.get("input")
    model = source.get("model") if isinstance(source, dict) else None
    files = [path for path in folder.rglob("*") if path.is_file()]
    newest = max((state.st_mtime for state in _read_states((folder, *files))), default=0.0)
    return CachedBuild(
        folder=folder,
        model=model if isinstance(model, str) else None,
        is_finished=manifest.get("status") == "done",
        size_bytes=stored_bytes(files),
        written=datetime.fromtimestamp(newest).astimezone(),
    )


def stored_bytes(files: Iterable[Path]) -> int:
    """Return the total bytes of files; a file with several names counts once."""
    return sum({(state.st_dev, state.st_ino): state.st_size for state in _read_states(files)}.values())


def _read_states(files: Iterable[Path]) -> Iterator[os.stat_result]:
    """Yield the states of files; files that a build replaced meanwhile are omitted."""
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            yield path.stat()


def _has_result(note: Path) -> bool:
    """Return True if the folder that a note names exists; False for a damaged note."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return Path(read_json_file(note)["folder"]).is_dir()
    return False


def _remove_folder(folder: Path) -> bool:
    """Remove the folder of a build; False if locked by another process."""
    lock = filelock.FileLock(folder / BUILD_LOCK_NAME)
    try:
        with _removal_errors(folder):
            lock.acquire(timeout=0)
    except filelock.Timeout:
        return False
    try:
        with _removal_errors(folder):
            # Without a manifest, the remaining files are no result if the removal is interrupted.
            remove_file(folder / BUILD_MANIFEST_NAME)
            if sys.platform == "win32":
                lock.release(force=True)  # Windows cannot remove an open file
            remove_folder(folder, ignore_errors=False)
    finally:
        lock.release(force=True)
    return True


@contextlib.contextmanager
def _removal_errors(path: Path) -> Iterator[None]:
    """Convert an OSError inside the block to a WriteError; the timeout of a lock passes through.

    Raises:
        WriteError: a file could not be removed.
    """
    try:
        yield
    except filelock.Timeout:
        raise
    except (OSError, NotImplementedError) as error:
        file = error.filename if isinstance(error, OSError) and error.filename else path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        hint = "Correct its permissions, or close it."
        raise WriteError(f"cannot remove {file}: {reason}", hint=hint) from error
