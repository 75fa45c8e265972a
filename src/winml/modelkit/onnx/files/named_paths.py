"""Converts text of the user into a path, and refuses text that no file system accepts.

Too long, with a zero byte, of an unknown user, behind a folder that may not be looked into: pathlib raises a different
error for each, at the first question about the path. Does not ask whether something is there. Also records which files
this process read, put in place, or completed for a killed command.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import platformdirs

from winml.modelkit.errors import ModelPathError, UsageError, opt

_DISPLAYED_CHARACTERS = 80
"""Chosen: enough of a name to find it in a command."""


CACHE_VARIABLE = "WINML_CACHE"
"""Environment variable that names another folder for the cache."""
COPIES_FOLDER = "copies"
"""Folder of the cache with copies of models whose data files are links, as in the Hub cache."""


def named_path(text: str | os.PathLike[str]) -> Path:
    """Return the path a text names, with ``~`` resolved.

    Raises:
        ModelPathError: nothing can be there, whatever the file system holds; names the reason.
    """
    try:
        path = Path(text).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
        record_read(path)
        return path
    except (OSError, RuntimeError, ValueError) as error:
        displayed = os.fspath(text)
        displayed = displayed if len(displayed) <= _DISPLAYED_CHARACTERS else f"{displayed[:_DISPLAYED_CHARACTERS]}…"
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ModelPathError(
            f"{displayed}: cannot be a path: {reason}", hint="Pass the path of a file or folder."
        ) from None


def cache_root() -> Path:
    """Return the folder of the cache: ``WINML_CACHE``, else the platform's place for caches. It need not exist."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_cache_path("winml", appauthor=False)


@contextlib.contextmanager
def restored_working_directory() -> Iterator[None]:
    """Return to the present working directory after the block, unless it is gone by then."""
    try:
        folder = Path.cwd()
    except OSError:
        yield  # it is gone already
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.chdir(folder)


_committed: dict[Path, None] = {}
_settled: dict[str, None] = {}
_read: dict[Path, None] = {}
_is_recorded: contextvars.ContextVar[bool] = contextvars.ContextVar("is_recorded", default=True)


def record_committed(paths: Iterable[Path]) -> None:
    """Note files that are in place for good."""
    if _is_recorded.get():
        _committed.update(dict.fromkeys(paths))


def record_settled(words: str) -> None:
    """Note what was done with the files of a command that was killed."""
    if _is_recorded.get():
        _settled[words] = None


def record_read(path: Path) -> None:
    """Note a file or folder that is read: the user is told of what a killed command left unfinished beside it."""
    if _is_recorded.get():
        _read[path] = None


def drop_read(folder: Path) -> None:
    """Drop a folder and its files from those that were read: this command reports itself what it leaves there."""
    own = folder.absolute()
    for path in [path for path in _read if own in (path.absolute(), path.absolute().parent)]:
        del _read[path]


def taken_read() -> tuple[Path, ...]:
    """Return the files and folders that were read, each once."""
    paths = tuple(_read)
    _read.clear()
    return paths


def taken_settled() -> tuple[str, ...]:
    """Return what was done with the files of commands that were killed; each sentence once."""
    words = tuple(_settled)
    _settled.clear()
    return words


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Note nothing of the block: what it writes is kept for later runs, and nobody asked for it."""
    token = _is_recorded.set(False)
    try:
        yield
    finally:
        _is_recorded.reset(token)


def committed_files() -> tuple[Path, ...]:
    """Return the files that are in place for good, in the order they were put there."""
    return tuple(_committed)


def refuse_missing_values(path: Path | None) -> None:
    """Refuse values for the inputs of a graph where there is no such file.

    Raises:
        UsageError: names it.
    """
    if path is not None and not path.exists():
        raise UsageError(f"{opt.input_data} {path}: no such file", hint="Pass a file of numpy.savez.")
