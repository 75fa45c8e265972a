"""Reads how much more memory this process may take: the limit of the machine or of its container.

Standard library only. What the process holds already is read in ``memory``.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

__all__ = ["available_bytes"]


def available_bytes() -> int | None:
    """Return the bytes this process may still take, or None where the system does not tell.

    On macOS it is the total memory: the system does not count memory that it can free as available.
    """
    if sys.platform == "win32":
        return _windows_available()
    if not sys.platform.startswith("linux"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (_linux_available(), _container_available())
    return min((limit for limit in limits if limit is not None), default=None)


def _linux_available() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    lines = [line.split()[1] for line in text.splitlines() if line.startswith("MemAvailable:")]
    return int(lines[0]) * 1024 if lines else None


def _container_available(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes a container may still take; cached files count as free."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used_bytes = int((folder / "memory.current").read_text(encoding="ascii"))
        statistics = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    cached = next((int(line.split()[1]) for line in statistics if line.startswith("file ")), 0)
    return max(0, int(limit) - used_bytes + cached)


class _MemoryStatus(ctypes.Structure):
    _fields_ = (
        ("length", ctypes.c_ulong),
        ("load_percent", ctypes.c_ulong),
        *((name, ctypes.c_ulonglong) for name in ("total", "available", "total_page", "available_page")),
        *((name, ctypes.c_ulonglong) for name in ("total_virtual", "available_virtual", "available_extended")),
    )


def _windows_available() -> int | None:
    status = _MemoryStatus()
    status.length = ctypes.sizeof(status)
    kernel = ctypes.windll.kernel32  # type: ignore[attr-defined]  # only there on Windows
    if not kernel.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return int(status.available)
