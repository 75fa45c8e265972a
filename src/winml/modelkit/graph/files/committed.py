"""Which files has this process put in place?

For whoever has to say what an interruption left behind. Standard library only.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["committed_files", "interruptions_held", "record_committed"]

_HELD = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

_committed: dict[Path, None] = {}


def record_committed(paths: Iterable[Path]) -> None:
    """Note files that are in place for good."""
    _committed.update(dict.fromkeys(paths))


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
