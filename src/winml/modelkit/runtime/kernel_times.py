"""How long did each kernel of a profiled run take? Reads the profile ONNX Runtime wrote.

Times are exclusive: what runs inside a control-flow kernel (``If``, ``Loop``) is charged to the kernels in it, so they
add up. Does not open sessions (``sessions.py``) and knows nothing of modules.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.errors import MeasureError

__all__ = ["KernelTime", "RunProfile", "read_profile"]

KERNEL_SUFFIX = "_kernel_time"
"""Specified: what ONNX Runtime appends to a node's name in the event of its kernel."""
RUN_EVENT = "model_run"
"""Specified: the event that spans one call of ``InferenceSession.run``."""


@dataclass(frozen=True)
class KernelTime:
    """One kernel in one run."""

    node: str
    """Name of the node of the optimized graph; of a node without a name, its operator and number."""
    op_type: str
    run: int
    """Position of the run, from 0."""
    start_us: float
    """Since the profile began."""
    duration_us: float
    """From start to end, with what ran inside."""
    self_us: float
    """Without what ran inside."""
    output_bytes: int | None
    """Size of what it made, where the profile says."""
    parameter_bytes: int | None
    """Size of the weights it read, where the profile says."""
    provider: str


@dataclass(frozen=True)
class RunProfile:
    """The kernels of several runs of one graph."""

    kernels: tuple[KernelTime, ...]
    """In the order they started."""
    run_us: tuple[float, ...]
    """Duration of each run, kernels and everything between them."""

    @property
    def kernel_us(self) -> float:
        """Sum over all kernels of all runs."""
        return sum(kernel.self_us for kernel in self.kernels)

    @property
    def outside_us(self) -> float:
        """Time of the runs in which no kernel ran; 0 where kernels ran side by side."""
        return max(sum(self.run_us) - self.kernel_us, 0.0)


def read_profile(path: Path, *, counted_runs: int | None = None) -> RunProfile:
    """Read a profile file.

    Args:
        path: JSON that ONNX Runtime wrote with ``SessionOptions.enable_profiling``.
        counted_runs: How many of the last runs count; those before are the warm-up. None: all.

    Raises:
        MeasureError: it holds no kernel: the execution provider records none.
    """
    events = [event for event in json.loads(path.read_text(encoding="utf-8")) if event.get("ph") == "X"]
    runs = sorted((event for event in events if event["name"] == RUN_EVENT), key=_start)
    kernels = [event for event in events if event.get("cat") == "Node" and event["name"].endswith(KERNEL_SUFFIX)]
    if not runs or not kernels:
        raise MeasureError(
            "the profile of ONNX Runtime names no kernel: the execution provider does not record them",
            hint="Profile on another one: --ep cpu.",
        )
    skipped_runs = 0 if counted_runs is None else len(runs) - counted_runs
    inner_us = _inner_times(kernels)
    starts = [_start(event) for event in runs]
    found = []
    for position, event in sorted(enumerate(kernels), key=lambda item: _start(item[1])):
        run = bisect_right(starts, _start(event)) - 1 - skipped_runs
        if run >= 0:
            found.append(_kernel(event, run, inner_us[position]))
    return RunProfile(tuple(found), tuple(float(event["dur"]) for event in runs[skipped_runs:]))


def _start(event: Mapping[str, Any]) -> float:
    return float(event["ts"])


def _inner_times(kernels: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return for each event how much of its time belongs to events directly inside it, on the same thread."""
    inner = [0.0] * len(kernels)
    threads: dict[Any, list[int]] = defaultdict(list)
    for position, event in enumerate(kernels):
        threads[event.get("tid")].append(position)
    for positions in threads.values():
        # A kernel that encloses another starts no later and, where they start together, lasts longer.
        positions.sort(key=lambda position: (_start(kernels[position]), -kernels[position]["dur"]))
        for position, outer in _enclosing(positions, kernels):
            inner[outer] += kernels[position]["dur"]
    return inner


def _enclosing(positions: Iterable[int], kernels: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    running: list[int] = []
    for position in positions:
        event = kernels[position]
        while running and _start(event) + event["dur"] > _end(kernels[running[-1]]):
            running.pop()
        # Kernels of no measurable length at the end of another are its successors, not its parts.
        if running and event["dur"] and _start(event) < _end(kernels[running[-1]]):
            pairs.append((position, running[-1]))
        running.append(position)
    return pairs


def _end(event: Mapping[str, Any]) -> float:
    return _start(event) + float(event["dur"])


def _kernel(event: Mapping[str, Any], run: int, inner_us: float) -> KernelTime:
    details = event.get("args", {})
    return KernelTime(
        node=event["name"].removesuffix(KERNEL_SUFFIX),
        op_type=str(details.get("op_name", "")),
        run=run,
        start_us=_start(event),
        duration_us=float(event["dur"]),
        self_us=max(event["dur"] - inner_us, 0.0),
        output_bytes=_size(details.get("output_size")),
        parameter_bytes=_size(details.get("parameter_size")),
        provider=str(details.get("provider", "")),
    )


def _size(text: Any) -> int | None:
    return int(text) if str(text).isdecimal() else None
