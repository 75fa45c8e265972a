"""Which files has this process read, put in place, or completed for a command that was killed?

For whoever has to say what an interruption left behind. Standard library only.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = [
    "committed_files",
    "record_committed",
    "record_read",
    "record_settled",
    "taken_read",
    "taken_settled",
    "unrecorded",
]

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
