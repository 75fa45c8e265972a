"""What the tests of bounded processes run: functions a new process can import, each with its own kind of end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any


def double(number: int, tell: Callable[[Any], None]) -> int:
    """Say the number and return twice as much."""
    tell(number)
    return 2 * number


def oversleep(stage: str, tell: Callable[[Any], None]) -> None:
    """Say how far it has come, and go no further."""
    tell(stage)
    time.sleep(60)


def hoard(size_bytes: int, tell: Callable[[Any], None]) -> int:
    """Fill memory and hold it."""
    tell("hoarding")
    held = b"\x01" * size_bytes
    time.sleep(60)
    return len(held)


def vanish(stage: str, tell: Callable[[Any], None]) -> None:
    """End without a word, as a crash in a library does."""
    tell(stage)
    os._exit(7)
