"""Reading of kernel durations from a profile written by ONNX Runtime or by the provider of a device.

Times are exclusive: kernels inside a control-flow kernel (``If``, ``Loop``) are charged to themselves, so the times add
up. Does not open sessions (``sessions``) and is independent of modules.
"""

from __future__ import annotations

import csv
import errno
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from winml.modelkit.errors import MeasureError, opt
from winml.modelkit.onnx.files.output_files import write_error

_KERNEL_SUFFIX = "_kernel_time"
"""Specified: the suffix of a node's name in the event of its kernel."""
RUN_EVENT = "model_run"
"""Specified: the event that spans one call of ``InferenceSession.run``."""
_BARE_NAME = re.compile(r'(?<="ph" : "X","name" :)"(.*?)"(?=,"args" : \{)', re.DOTALL)
"""Measured: how an event of ONNX Runtime 1.23 names a node, with no quote, backslash or line end escaped."""


@dataclass(frozen=True)
class KernelTime:
    """One kernel in one run."""

    node: str
    """Name of the node in the optimized graph; for a node without a name, its operator and number."""
    op_type: str
    run: int
    """Position of the run, from 0."""
    start_us: float
    """Since the profile began."""
    duration_us: float
    """Duration from start to end, including inner kernels."""
    self_us: float
    """Without the kernels inside."""
    output_bytes: int | None
    """Size of its outputs; None if not in the profile."""
    parameter_bytes: int | None
    """Size of the weights it read; None if not in the profile."""
    provider: str


@dataclass(frozen=True)
class RunProfile:
    """The kernels of several runs of one graph.

    If ``unit`` is ``cycles``, durations are clock cycles of the device instead of microseconds.
    """

    kernels: tuple[KernelTime, ...]
    """In the order of their start."""
    run_us: tuple[float, ...]
    """Duration of each run, the time between kernels included."""
    unit: Literal["us", "cycles"] = "us"


def read_profile(path: Path, *, counted_runs: int | None = None) -> RunProfile:
    """Read a profile file.

    Args:
        path: JSON written by ONNX Runtime with ``SessionOptions.enable_profiling``.
        counted_runs: Number of runs at the end to count; earlier runs are the warm-up. None: all.

    Raises:
        MeasureError: the profile contains no kernel, because the execution provider records none; or is no JSON.
        WriteError: the profile is truncated, as on a full disk.
    """
    events = [event for event in read_events(path) if event.get("ph") == "X"]
    runs = sorted((event for event in events if event["name"] == RUN_EVENT), key=_start_us)
    kernels = list(filter(is_kernel, events))
    if not runs or not kernels:
        raise MeasureError(
            "the ONNX Runtime profile contains no kernels: the execution provider does not record them",
            hint=f"Profile on a different one: {opt.ep} cpu.",
        )
    skipped_runs = 0 if counted_runs is None else len(runs) - counted_runs
    inner_us = _inner_times(kernels)
    starts = [_start_us(event) for event in runs]
    kernel_times = []
    for position, event in sorted(enumerate(kernels), key=lambda indexed_event: _start_us(indexed_event[1])):
        run = bisect_right(starts, _start_us(event)) - 1 - skipped_runs
        if run >= 0:
            kernel_times.append(_parse_kernel(event, run, inner_us[position]))
    return RunProfile(tuple(kernel_times), tuple(float(event["dur"]) for event in runs[skipped_runs:]))


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the events; names that make the file invalid JSON are escaped first.

    Raises:
        WriteError: ONNX Runtime wrote only a part of the file.
        MeasureError: the file is not valid JSON.
    """
    text = path.read_bytes().decode("utf-8")  # with the line ends that are in names
    try:
        events: list[dict[str, Any]] = json.loads(text)
    except json.JSONDecodeError:
        try:
            events = json.loads(_BARE_NAME.sub(lambda match: json.dumps(match[1]), text))
        except json.JSONDecodeError as error:
            if not text.rstrip().endswith("]"):
                raise write_error(path, OSError(errno.ENOSPC, "ONNX Runtime wrote only a part of it")) from error
            raise MeasureError(
                f"the ONNX Runtime profile is not valid JSON: {error}",
                hint="Node names may be the cause: newer versions of ONNX Runtime escape them.",
            ) from error
    return events


def is_kernel(event: Mapping[str, Any]) -> bool:
    """Return True for the event of a kernel."""
    return event.get("cat") == "Node" and str(event["name"]).endswith(_KERNEL_SUFFIX)


def kernel_node(event: Mapping[str, Any]) -> str:
    """Return the name of the node of a kernel event."""
    return str(event["name"]).removesuffix(_KERNEL_SUFFIX)


def _start_us(event: Mapping[str, Any]) -> float:
    return float(event["ts"])


def _inner_times(kernels: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return for each event the time in µs of the events directly inside it, on the same thread."""
    inner = [0.0] * len(kernels)
    threads: dict[Any, list[int]] = defaultdict(list)
    for position, event in enumerate(kernels):
        threads[event.get("tid")].append(position)
    for positions in threads.values():
        # A kernel that encloses another starts no later and, with equal start, lasts longer.
        positions.sort(key=lambda position: (_start_us(kernels[position]), -kernels[position]["dur"]))
        for position, outer in _enclosing_pairs(positions, kernels):
            inner[outer] += kernels[position]["dur"]
    return inner


def _enclosing_pairs(positions: Iterable[int], kernels: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    """Yield (kernel, innermost enclosing kernel) for kernels sorted by start and duration."""
    running: list[int] = []
    for position in positions:
        event = kernels[position]
        while running and _start_us(event) + event["dur"] > _end_us(kernels[running[-1]]):
            running.pop()
        # A kernel of length 0 at the end of another kernel is its successor, not inside it.
        if running and event["dur"] and _start_us(event) < _end_us(kernels[running[-1]]):
            yield (position, running[-1])
        running.append(position)


def _end_us(event: Mapping[str, Any]) -> float:
    return _start_us(event) + float(event["dur"])


def _parse_kernel(event: Mapping[str, Any], run: int, inner_us: float) -> KernelTime:
    """Parse the event of a kernel; ``inner_us`` is the time of kernels directly inside."""
    details = event.get("args", {})
    return KernelTime(
        node=kernel_node(event),
        op_type=str(details.get("op_name", "")),
        run=run,
        start_us=_start_us(event),
        duration_us=float(event["dur"]),
        self_us=max(event["dur"] - inner_us, 0.0),
        output_bytes=_parse_size(details.get("output_size")),
        parameter_bytes=_parse_size(details.get("parameter_size")),
        provider=str(details.get("provider", "")),
    )


def _parse_size(text: Any) -> int | None:
    return int(text) if str(text).isdecimal() else None


_COLUMNS = frozenset({"Message", "Time", "Unit of Measurement", "Event Identifier"})
_EXECUTION = "EXECUTE"
_NODE = "NODE"
_ACCELERATOR = "Accelerator (execute) time"
_IDENTIFIER = re.compile(r"(?:(?P<name>.*):)?(?P<number>[^:]*OpId_\d+)(?: \([^)]*\))?$")
"""Measured, QNN 2.7: ``/encoder/Add:OpId_26 (cycles)``, ``OpId_17 (cycles)``, ``Input OpId_2 (cycles)``."""


def read_device_profile(path: Path, *, counted_runs: int, provider: str) -> RunProfile:
    """Read the profile of the parts that QNN compiled.

    Args:
        path: The table written by QNN with the options of ``ExecutionProvider.node_profile``.
        counted_runs: Number of runs at the end to count; earlier runs are the warm-up.
        provider: Name of the provider, for the kernels.

    Returns:
        The nodes of all parts, with the device's names and without operators; in cycles if the device counts cycles.
        The duration of a run is the sum over its parts.

    Raises:
        MeasureError: the file does not exist, or has no node.
    """
    parts = _read_executed_parts(path)
    if not parts:
        raise MeasureError(
            f"the profile of {provider} contains no node names",
            hint="Measure extracted modules on the device: winml perf MODEL --module SELECTOR with the same --ep.",
        )
    in_cycles = any(row["Unit of Measurement"] == "CYCLES" for runs in parts for run in runs for row in run)
    unit = "CYCLES" if in_cycles else "US"
    kernels: list[KernelTime] = []
    run_times: list[float] = []
    for run in range(-min(counted_runs, *map(len, parts)), 0):
        start = sum(run_times)
        rows = [row for runs in parts for row in runs[run] if row["Unit of Measurement"] == unit]
        for row in rows:
            if row["Message"] == _NODE:
                kernels.append(_parse_device_kernel(row, len(run_times), start, provider))
                start += kernels[-1].self_us
        whole = sum(float(row["Time"]) for row in rows if row["Event Identifier"].startswith(_ACCELERATOR))
        run_times.append(max(whole, start - sum(run_times)))
    return RunProfile(tuple(kernels), tuple(run_times), "cycles" if in_cycles else "us")


def _read_executed_parts(path: Path) -> list[list[list[dict[str, str]]]]:
    """Return the events by compiled part and execution; `[]` for a missing or foreign file.

    The events of one execution end with the event of the execution. A node is named after its node or value in the
    graph.
    """
    parts: dict[frozenset[str], list[list[dict[str, str]]]] = defaultdict(list)
    events: list[dict[str, str]] = []
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            table = csv.DictReader(file)
            if not _COLUMNS.issubset(table.fieldnames or ()):
                return []
            for row in table:
                events.append(row)
                if row["Message"] == _EXECUTION:
                    names = frozenset(row["Event Identifier"] for row in events if row["Message"] == _NODE)
                    if names:
                        parts[names].append(events)
                    events = []
    return list(parts.values())


def _parse_device_kernel(row: Mapping[str, str], run: int, start: float, provider: str) -> KernelTime:
    """Parse a row of the device's table; ``start`` is the time since the first run."""
    match = _IDENTIFIER.match(row["Event Identifier"])
    name = row["Event Identifier"] if match is None else match["name"] or match["number"]
    duration = float(row["Time"])
    return KernelTime(name, "", run, start, duration, duration, None, None, provider)
