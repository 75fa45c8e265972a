"""How much memory does this process hold, and how much did it at most?"""

from __future__ import annotations

import sys

import psutil

__all__ = ["peak_bytes", "resident_bytes"]


def resident_bytes() -> int:
    """Return the memory the process has in RAM now."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """Return the most memory the process had in RAM since it started."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    # Specified by the systems: kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
