"""Importable functions for the tests of bounded processes; each ends differently."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


def double(number: int, report: Callable[[Any], None]) -> int:
    """Report the number and return twice as much."""
    report(number)
    return 2 * number


def oversleep(message: str, report: Callable[[Any], None]) -> None:
    """Report the message and sleep for longer than the time limit."""
    report(message)
    time.sleep(60)


def hoard(size_bytes: int, report: Callable[[Any], None]) -> int:
    """Allocate memory and hold it."""
    report("hoarding")
    held = b"\x01" * size_bytes
    time.sleep(60)
    return len(held)


def vanish(message: str, report: Callable[[Any], None]) -> None:
    """End without a result, as a crash in a library does."""
    report(message)
    os._exit(7)


def leave_child(message: str, report: Callable[[Any], None]) -> None:
    """Start a child process that outlives the parent and report its id; sleep if the message is ``sleep``."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    report(child.pid)
    if message == "sleep":
        time.sleep(60)


def hoard_in_child(size_bytes: int, report: Callable[[Any], None]) -> None:
    """Start a process that allocates memory, and sleep."""
    code = f"import time; held = b'1' * {size_bytes}; time.sleep(60)"
    subprocess.Popen([sys.executable, "-S", "-c", code])
    report("hoarding elsewhere")
    time.sleep(60)


def await_file(path: str, report: Callable[[Any], None]) -> None:
    """Report the process id, and return once the file exists."""
    report(os.getpid())
    while not os.path.exists(path):  # noqa: PTH110  # imports as little as it can
        time.sleep(0.02)
