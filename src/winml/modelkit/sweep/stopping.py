"""Stops processes with the one that started them, and lets them go on with it: Ctrl-Z, and ``fg`` or ``bg`` after it.

Processes in groups of their own are not reached by what a terminal sends. Does nothing where the system has no such
signal, where somebody else handles it, and outside of the main thread, which alone may handle signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["signal_group", "stopping_together"]


@contextmanager
def stopping_together(groups: Callable[[], Iterable[int]], on_continue: Callable[[float], None]) -> Iterator[None]:
    """Hand on that this process is stopped, and goes on, for the time of the block.

    Args:
        groups: Returns the groups of processes that stop with this one.
        on_continue: Called with the seconds for which all of them stood still.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        started = time.monotonic()
        for group in groups():
            signal_group(group, signal.SIGSTOP)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # returns once this process goes on
        signal.signal(number, stop)
        for group in groups():
            signal_group(group, signal.SIGCONT)
        on_continue(time.monotonic() - started)

    signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process and those it started; nothing where the system has no groups."""
    if sys.platform != "win32":
        # No such process: all have ended, or it has not made its group yet. macOS denies it where all are dead.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
