"""Where are finished results kept, and by which key are they found again?

A key is a digest of everything a result depends on: options, contents, versions of the libraries that make it. A file's
content is hashed once; its size and time of change say whether that hash still holds. Resuming a stopped search asks
the same: is what was found still valid? Imports no model library.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

import platformdirs

from winml.modelkit.builds.plan import is_onnx_path
from winml.modelkit.errors import WinMLError, WriteError
from winml.modelkit.graph.files.content_digest import hash_file
from winml.modelkit.graph.files.resumable_results import write_atomically
from winml.modelkit.graph.files.touched_files import unrecorded
from winml.modelkit.options import read_json_file
from winml.modelkit.version import __version__

__all__ = [
    "CACHE_VARIABLE",
    "cache_root",
    "digest",
    "file_digest",
    "hash_file",
    "library_versions",
    "only_looking",
    "place_state",
    "read_digest",
    "resume_identity",
    "tool_versions",
]

CACHE_VARIABLE = "WINML_CACHE"
"""Environment variable that names another folder for the cache."""

_SETTLED_SECONDS = 2.0
"""Files changed less than this ago are hashed each time: within one tick of a clock (2 s on FAT, specified) a file may
change again without a new time."""


_IS_LOOKING = contextvars.ContextVar("only looking", default=False)
_READ: dict[tuple[int, ...], str] = {}
"""Digests of files that this process has read: device and state → digest."""


@contextlib.contextmanager
def only_looking() -> Iterator[None]:
    """Write no note about a file inside the block: who makes a plan changes nothing."""
    token = _IS_LOOKING.set(True)
    try:
        yield
    finally:
        _IS_LOOKING.reset(token)


def cache_root() -> Path:
    """Return the folder of the cache: ``WINML_CACHE``, else the platform's place for caches. It need not exist."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_cache_path("winml", appauthor=False)


def digest(record: object) -> str:
    """Return the SHA-256 of a JSON value, the same whatever the order of its keys.

    >>> digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    True
    """
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content.

    It is remembered in the cache beside the file's size and time of change, so that a checkpoint is read once.

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
    # A cache that cannot be written to only costs time.
    if is_settled and not _IS_LOOKING.get():
        with contextlib.suppress(WriteError, OSError), unrecorded():
            write_atomically(note, json.dumps({"path": str(path), "state": state, "sha256": content_digest}))
    return content_digest


def read_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content; what this process has read and nobody changed since is read once.

    So a build does not read again what was read for its plan.

    Raises:
        OSError: the file cannot be read.
    """
    state = _file_state(path)
    known = (path.stat().st_dev, *state)
    content_digest = _READ.get(known) or hash_file(path)
    if _file_state(path) == state and _is_settled(path):
        _READ[known] = content_digest
    return content_digest


def _is_settled(path: Path) -> bool:
    return abs(time.time_ns() - path.stat().st_mtime_ns) > _SETTLED_SECONDS * 1e9


def _file_state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def library_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the installed versions of distributions, without importing them; those not installed are left out."""
    versions = {name: _installed_version(name) for name in names}
    return {name: version for name, version in versions.items() if version is not None}


@functools.cache
def _installed_version(name: str) -> str | None:
    """Read once: each stage of a build records the same distributions, and reading their metadata is slow."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


_LIBRARIES = ("torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime")


def resume_identity(requested: Mapping[str, object], files: object) -> dict[str, object]:
    """Return all that kept results depend on, JSON-ready: equal where they may be used again.

    Args:
        requested: What is measured, and on what machine.
        files: What the files are that it is measured with: digests of their content, or :func:`place_state`.
    """
    return {**requested, "files": files, "versions": tool_versions()}


def tool_versions() -> dict[str, str]:
    """Return the versions of winml and of the libraries that results depend on."""
    return {"winml-modelkit": __version__, **_installed()}


@functools.cache
def _installed() -> dict[str, str]:
    return library_versions(_LIBRARIES)


def place_state(name: str, is_left_out: Callable[[Path], bool] = lambda _folder: False) -> str | None:
    """Return a digest of the names, sizes and times of change of files; None where there is nothing at that path.

    Nothing of their content is read: it serves where there are too many for that. Of a folder, those in its folders
    count too, hidden ones excepted; of an ONNX file, its data files.

    Args:
        name: Path of a file or folder.
        is_left_out: Whether a folder does not count.
    """
    path = Path(name)
    try:
        files = sorted(_files_below(path, is_left_out)) if path.is_dir() else [path, *_data_files(path)]
        states = [(file, file.stat()) for file in files]
    except OSError:
        return None
    return digest([[file.as_posix(), state.st_size, state.st_mtime_ns] for file, state in states])


def _files_below(folder: Path, is_left_out: Callable[[Path], bool]) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = [name for name in folders if name[0] != "." and not is_left_out(here / name)]
        yield from (here / name for name in names if (here / name).is_file())


def _data_files(path: Path) -> tuple[Path, ...]:
    """Return the files that hold the weights of an ONNX file; none of a damaged one."""
    from winml.modelkit.graph.files.placing import external_files

    try:
        return external_files(path) if is_onnx_path(str(path)) and path.is_file() else ()
    except WinMLError:
        return ()
