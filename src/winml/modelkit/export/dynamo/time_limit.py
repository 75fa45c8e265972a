"""How long may a library work on something that may have no end?

torch works out open sizes by symbolic algebra, whose expressions can grow without bound. Stops a block of Python from
outside, as Ctrl-C does; a single call into compiled code is waited for.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["TimeIsUpError", "time_limit"]


class TimeIsUpError(BaseException):
    """The time is up. No ``Exception``: libraries catch those and go on another way."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise :class:`TimeIsUpError` in the block when it has taken longer; None lets it take as long as it wants."""
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
        # What was raised and has not arrived yet must not arrive outside of the block.
        raise_in(thread, None)
