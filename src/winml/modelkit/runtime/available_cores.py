"""Reads how many cores this process may use. Standard library only."""

from __future__ import annotations

import os

__all__ = ["available_cores"]


def available_cores() -> int:
    """Return the cores this process may use: those of the machine, unless the system gives it fewer."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return usable or 1
