"""Cost of a whole process, as measured by the operating system; shared by the benchmarks."""

from __future__ import annotations

import compileall
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Cost:
    """One finished process."""

    wall_s: float
    peak_bytes: int
    cpu_s: float
    """Computing, in the process and in the system for it; a busy machine lengthens the wall time only."""


@cache
def _compile_package() -> None:
    """Compile the package's modules, as installing it from a wheel does.

    Where ``PYTHONDONTWRITEBYTECODE`` is set, each process would compile a checkout's modules anew (measured: 0.4 s).
    """
    compileall.compile_dir(Path(__file__).parents[1] / "src", quiet=1)


def run(command: list[str], on_start: Callable[[int], None] | None = None) -> Cost:
    """Run a process to its end and measure its cost; ``on_start`` is called with its id."""
    _compile_package()
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    if on_start is not None:
        on_start(process.pid)
    errors = process.stderr.read().decode(errors="replace")
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    if status:
        raise SystemExit(f"{' '.join(command)} failed with status {status}:\n{errors}")
    # ru_maxrss is in kilobytes on Linux and in bytes on macOS.
    return Cost(wall, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024), usage.ru_utime + usage.ru_stime)


def spread(values: list[float]) -> dict[str, float]:
    """Return median, smallest and largest."""
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}
