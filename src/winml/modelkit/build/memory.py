"""Is there room in memory?

Reads what the operating system says is available, without a library; where it says nothing, there is room.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from winml.modelkit.errors import ExportError
from winml.modelkit.graph.writing import INLINE_LIMIT_BYTES
from winml.modelkit.report.words import size_words

__all__ = ["available_bytes", "refuse_verification_beyond_memory"]

INSIDE_FACTOR = 2.25
"""Measured on 1.92 GB of weights inside the file: ONNX Runtime holds the file and the weights as its kernels want them,
4.2 GB with all else. PyTorch's copy is gone by then."""
OUTSIDE_FACTOR = 1.25
"""Measured on 4.40 GB in a file of their own, which is mapped: 5.4 GB with all else, in PyTorch and in ONNX Runtime."""


def refuse_verification_beyond_memory(weight_bytes: int, available: int | None) -> None:
    """Refuse to compare with PyTorch a model whose weights memory cannot hold.

    Args:
        weight_bytes: Size of the parameters in memory.
        available: Bytes of memory to be had; None where nobody knows.

    Raises:
        ExportError: they do not fit.
    """
    needed = int(weight_bytes * (INSIDE_FACTOR if weight_bytes < INLINE_LIMIT_BYTES else OUTSIDE_FACTOR))
    if available is not None and needed > available:
        raise ExportError(
            f"comparing with PyTorch takes about {size_words(needed)} of memory ({size_words(weight_bytes)} of "
            f"weights, in PyTorch and then in ONNX Runtime), and {size_words(available)} are available",
            hint="Use --no-verify: the export itself needs no memory for weights.",
        )


def available_bytes() -> int | None:
    """Return how much memory a process may still take, or None where the system does not say.

    On macOS, which counts nothing as available that it can free, it is all the memory there is.
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
    found = [line.split()[1] for line in text.splitlines() if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _container_available(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return what a container may still take; files it has read count as free."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    cached = next((int(line.split()[1]) for line in lines if line.startswith("file ")), 0)
    return max(0, int(limit) - used + cached)


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
