"""Stops a block of Python after a time limit.

torch computes open sizes by symbolic algebra, whose expressions can grow without bound. The block is stopped as by
Ctrl-C; a call into compiled code ends first.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["TimeIsUpError", "time_limit"]


class TimeIsUpError(BaseException):
    """The time limit is exceeded. Not an ``Exception``: libraries catch those and continue."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise :class:`TimeIsUpError` in the block when it takes longer than ``seconds``; None: no limit."""
    if seconds is None:
        yield
        return
    thread = ctypes.c_ulong(threading.get_ident())
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    lock = threading.Lock()
    is_over = False

    def stop() -> None:
        with lock:
            if not is_over:
                raise_in(thread, ctypes.py_object(TimeIsUpError))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            is_over = True
        # Cancel an error that was set and not raised yet: it must not be raised outside the block.
        raise_in(thread, None)
