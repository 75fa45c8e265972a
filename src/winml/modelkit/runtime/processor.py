"""Tells whether the processor multiplies 8-bit integers with instructions of their own.

ONNX Runtime's integer kernels are fast with them. On x86 without them, they add pairs of products of unsigned and
signed bytes in 16 bits, where large sums saturate. Asks the operating system; knows no kernel.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

__all__ = [
    "available_cores",
    "flags_have_dot_products",
    "has_integer_dot_products",
    "instruction_sets",
    "is_x86",
    "saturates_integer_sums",
]


WIDE_FLAGS = ("avx512f", "avx2", "avx", "asimd")
"""Specified: how Linux calls instructions whose registers decide the layouts of ONNX Runtime's CPU kernels."""

DOT_PRODUCT_FLAGS = frozenset({"avx512_vnni", "avx_vnni", "asimddp"})
"""Specified: how Linux calls VNNI of AVX-512 and of AVX2, and the dot product of Arm, in ``/proc/cpuinfo``."""


def has_integer_dot_products() -> bool | None:
    """Say whether there are instructions for sums of 8-bit products (VNNI, Arm dot product); None: unknown."""
    system = platform.system()
    if system == "Linux":
        return flags_have_dot_products(_text_of(Path("/proc/cpuinfo")))
    if system == "Darwin":
        return True if platform.machine() == "arm64" else None  # every processor of Apple's own has them
    return None  # Windows has no public name for VNNI


def flags_have_dot_products(cpuinfo: str) -> bool | None:
    """Return what the text of ``/proc/cpuinfo`` says of them; None where it lists no flags."""
    flags = _flags(cpuinfo)
    return None if flags is None else not DOT_PRODUCT_FLAGS.isdisjoint(flags)


def _flags(cpuinfo: str) -> frozenset[str] | None:
    """Return the flags of the first processor; None where none are listed."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = next((value for key, _, value in lines if key.strip() in ("flags", "Features")), None)
    return None if flags is None else frozenset(flags.split())


def instruction_sets() -> str:
    """Return the architecture and, where the system tells, the widest vector instructions: ``x86_64 avx512f``."""
    flags = _flags(_text_of(Path("/proc/cpuinfo"))) if platform.system() == "Linux" else None
    widest = next((flag for flag in WIDE_FLAGS if flags is not None and flag in flags), "")
    return f"{platform.machine()} {widest}".strip()


def is_x86() -> bool:
    """Say whether the processor is one of Intel's or AMD's kind."""
    return platform.machine().lower() in ("x86_64", "amd64", "i386", "i686", "x86")


@functools.cache
def saturates_integer_sums() -> bool:
    """Say whether sums of unsigned times signed bytes saturate in ONNX Runtime's kernels on this processor."""
    return is_x86() and has_integer_dot_products() is False


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# --- Reads how many cores this process may use. Standard library only.


def available_cores() -> int:
    """Return the cores this process may use: those of the machine, unless the system gives it fewer."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return usable or 1
