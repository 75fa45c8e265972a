"""Reading of the memory of kernels: the profile of a session, and its table of memory by node.

ONNX Runtime allocates the first run value by value. From the second run on, it allocates all values of a run in one
block, as planned in the first run, so the first run shows the memory of each kernel and later runs the block.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.ort.devices import ChosenProvider
from winml.modelkit.ort.kernel_times import RUN_EVENT, is_kernel, kernel_node, read_events
from winml.modelkit.ort.sessions import CPU, is_onnxruntime_at_least, onnxruntime_version

RECORDING_VERSION = "1.28"
"""Measured: the first version whose profile has the memory of kernels; 1.27 has not."""

_IN_USE = "mem_bytes_requested_in_use"
_ALLOCATED = "mem_requested_in_use_delta"
_HELD_IN_USE = "mem_bytes_in_use"
_HELD_DELTA = "mem_in_use_delta"
_ARENA = "mem_arena_held"


@dataclass(frozen=True)
class KernelMemory:
    """Memory of the CPU arena around one kernel in the first run."""

    node: str
    op_type: str
    in_use_bytes: int
    """Memory in use when the kernel ended, beyond the memory in use before the run."""
    allocated_bytes: int
    """Memory that the kernel allocated for its outputs; 0 if they use the memory of other values."""
    output_bytes: tuple[int, ...]
    """Size of each output."""
    output_shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """(type as ONNX Runtime writes it, shape) of each output."""
    scratch_bytes: int
    """Temporary memory of the kernel."""


@dataclass(frozen=True)
class RunMemory:
    """Memory of the CPU arena of one session."""

    kernels: tuple[KernelMemory, ...]
    """Kernels of the first run, in the order of their end."""
    before_bytes: int
    """Memory in use before the first run: weights in the layout of kernels."""
    rounded_bytes: int
    """Most memory in use in the first run beyond that, as the arena rounds it, scratch included."""
    block_bytes: int
    """Memory that the arena added after the first run for the block of values; 0 if the block reuses freed memory."""


def refuse_unrecorded_memory(provider: ChosenProvider) -> None:
    """Refuse a provider or a version of ONNX Runtime that does not record the memory of kernels.

    Raises:
        UsageError: names both and the remedy.
    """
    if provider.provider.name not in CPU:
        raise UsageError(
            f"{opt.memory}: {provider.provider.name} allocates memory that ONNX Runtime does not record by node",
            hint=f"Measure the memory on the CPU: {opt.ep} cpu.",
        )
    if not is_onnxruntime_at_least(RECORDING_VERSION):
        raise UsageError(
            f"{opt.memory}: ONNX Runtime {onnxruntime_version()} does not record the memory of nodes",
            hint=f"Install version {RECORDING_VERSION} or newer: pip install -U onnxruntime.",
        )


def read_memory(profile_path: Path, table_path: Path) -> RunMemory:
    """Read the memory of a profiled session of the CPU provider.

    Args:
        profile_path: The profile, from the first run on.
        table_path: The table that the session wrote with ``memory_path``.
    """
    events = [event for event in read_events(profile_path) if event.get("ph") == "X"]
    events.sort(key=lambda event: float(event["ts"]) + float(event["dur"]))  # by their ends
    starts = sorted(float(event["ts"]) for event in events if event["name"] == RUN_EVENT)
    runs: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in filter(is_kernel, events):
        runs[bisect_right(starts, float(event["ts"]))].append(event)
    first, last = runs[1], runs[len(starts)]
    scratch = _read_scratch(table_path)
    before = _before(first, _IN_USE, _ALLOCATED)
    kernels = tuple(_parse_kernel(event, before, scratch) for event in first)
    rounded = max(
        int(event["args"][_HELD_IN_USE]) + kernel.scratch_bytes for event, kernel in zip(first, kernels, strict=True)
    )
    arena_grew = int(last[-1]["args"][_ARENA]) > int(first[-1]["args"][_ARENA])
    # Of the block as the arena rounds it, only the planned part is touched.
    block = _before(last, _IN_USE, _ALLOCATED) - int(first[-1]["args"][_IN_USE])
    return RunMemory(
        kernels, before, rounded - _before(first, _HELD_IN_USE, _HELD_DELTA), max(block, 0) if arena_grew else 0
    )


def _before(run: list[Mapping[str, Any]], in_use: str, allocated: str) -> int:
    """Memory in use before the first kernel of a run."""
    return int(run[0]["args"][in_use]) - int(run[0]["args"][allocated])


def _parse_kernel(event: Mapping[str, Any], before: int, scratch: Mapping[str, int]) -> KernelMemory:
    details, node = event["args"], kernel_node(event)
    shapes = tuple(
        (dtype, tuple(map(int, shape))) for output in details["output_type_shape"] for dtype, shape in output.items()
    )
    # The profile has the sum over the outputs, which are of one type where there are several.
    elements = [prod(shape) for _, shape in shapes]
    total = int(details["output_size"])
    return KernelMemory(
        node=node,
        op_type=str(details["op_name"]),
        in_use_bytes=int(details[_IN_USE]) - before,
        allocated_bytes=int(details[_ALLOCATED]),
        output_bytes=tuple(total * count // max(sum(elements), 1) for count in elements),
        output_shapes=shapes,
        scratch_bytes=scratch.get(node, 0),
    )


def _read_scratch(path: Path) -> dict[str, int]:
    """Name of a node → largest sum of its temporary allocations in a run; nodes without them are omitted."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        # A node is named with a hash of its inputs and outputs.
        return {
            row["#name"].rpartition("_")[0]: int(row["total_temp_allocations"])
            for row in rows
            if row["total_temp_allocations"] not in (None, "", "0")
        }
