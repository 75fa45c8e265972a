"""Which files has this process put in place, and which of a command that was killed? Where has it read?

For whoever has to say what an interruption left behind. Standard library only.
"""

from __future__ import annotations

import contextlib
import contextvars
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "committed_files",
    "interruptions_held",
    "record_committed",
    "record_read",
    "record_settled",
    "taken_read",
    "taken_settled",
    "unrecorded",
]

_HELD = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

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


@contextlib.contextmanager
def interruptions_held() -> Iterator[None]:
    """Let Ctrl-C and requests to end wait until the block is done. Other threads than the main one get none anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def note(number: int, _frame: Any) -> None:
        received.append(number)

    # Those set from outside Python (None), or to be ignored, stay as they are.
    handlers = {number: signal.getsignal(number) for number in _HELD}
    held = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    for number in held:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(received):
            signal.raise_signal(number)
