"""Reads the resident memory of this process: its present value, and the largest since the process started."""

from __future__ import annotations

import sys

import psutil

__all__ = ["peak_bytes", "resident_bytes"]


def resident_bytes() -> int:
    """Return the resident memory of the process in bytes."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """Return the largest resident memory since the process started, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    # Specified by the systems: kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
