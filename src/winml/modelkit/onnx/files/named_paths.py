"""Conversion of the user's text to a path, and refusal of text unusable as a path.

A text may be too long, contain a zero byte, name an unknown user, or lead into an unreadable folder: pathlib raises a
different error for each at the first access. Does not check that the path exists. Also records the files that this
process read, committed, or completed for a killed command.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import platformdirs

from winml.modelkit.errors import ModelPathError, UsageError, opt

_MAX_CHARACTERS = 80
"""Chosen: enough of a name to find it in a command."""


CACHE_VARIABLE = "WINML_CACHE"
"""Environment variable that names another folder for the cache."""
COPIES_FOLDER = "copies"
"""Folder of the cache with copies of models whose data files are links, as in the Hub cache."""
FORMATS_FOLDER = "formats"
"""Folder of the cache with the answers of execution providers about quantized operators."""


def named_path(text: str | os.PathLike[str]) -> Path:
    """Convert a text to a path, with ``~`` resolved.

    Raises:
        ModelPathError: no file system can hold such a path; names the reason.
    """
    try:
        path = Path(text).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
        record_read(path)
        return path
    except (OSError, RuntimeError, ValueError) as error:
        shortened = os.fspath(text)
        shortened = shortened if len(shortened) <= _MAX_CHARACTERS else f"{shortened[:_MAX_CHARACTERS]}…"
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ModelPathError(
            f"{shortened}: cannot be a path: {reason}", hint="Pass the path of a file or folder."
        ) from None


def cache_root() -> Path:
    """Return the cache folder: ``WINML_CACHE``, else the platform's cache folder. It need not exist."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_cache_path("winml", appauthor=False)


@contextlib.contextmanager
def restored_working_directory() -> Iterator[None]:
    """Return to the present working directory after the block, unless the directory is gone."""
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
    """Record committed files."""
    if _is_recorded.get():
        _committed.update(dict.fromkeys(paths))


def record_settled(sentence: str) -> None:
    """Record a change made to the files of a killed command."""
    if _is_recorded.get():
        _settled[sentence] = None


def record_read(path: Path) -> None:
    """Record a read file or folder, to report unfinished work of killed commands beside the path."""
    if _is_recorded.get():
        _read[path] = None


def drop_read(folder: Path) -> None:
    """Drop a folder and its files from the recorded reads, because the current command reports remains there itself."""
    absolute_folder = folder.absolute()
    for path in [path for path in _read if absolute_folder in (path.absolute(), path.absolute().parent)]:
        del _read[path]


def take_recorded_reads() -> tuple[Path, ...]:
    """Return and clear the recorded reads, each path once."""
    paths = tuple(_read)
    _read.clear()
    return paths


def take_settled_changes() -> tuple[str, ...]:
    """Return and clear the recorded changes to files of killed commands; each sentence once."""
    sentences = tuple(_settled)
    _settled.clear()
    return sentences


@contextlib.contextmanager
def pause_recording() -> Iterator[None]:
    """Record nothing inside the block, for files not requested by the user."""
    token = _is_recorded.set(False)
    try:
        yield
    finally:
        _is_recorded.reset(token)


def committed_files() -> tuple[Path, ...]:
    """Return the committed files, in the order of commits."""
    return tuple(_committed)


def refuse_missing_values(path: Path | None) -> None:
    """Refuse a missing file of input values.

    Raises:
        UsageError: names the file.
    """
    if path is not None and not path.exists():
        raise UsageError(f"{opt.input_data} {path}: no such file", hint="Pass a file of numpy.savez.")
