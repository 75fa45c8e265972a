"""Work queues for cells, and the queue of this machine: several processes in parallel, each with bounds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from winml.modelkit.builds.plan import is_onnx_path
from winml.modelkit.errors import StageError, opt
from winml.modelkit.onnx.files.moving import remove_folder
from winml.modelkit.ort.host import available_cores
from winml.modelkit.progress import Tell
from winml.modelkit.registries import Registry
from winml.modelkit.sweep.bounded_processes import Bounds, Call, Ending, run_bounded
from winml.modelkit.sweep.cell_work import PRELOAD, PRELOAD_DYNAMO, CellOrder, joined, run_cell
from winml.modelkit.sweep.cells import Cell, SweepFolder
from winml.modelkit.sweep.plan import StepName
from winml.modelkit.sweep.records import CellResult

_MEMORY_SHARE = 0.9
"""Chosen: memory that the machine needs itself stays free."""
_KILLED = -9
"""Exit code of a killed process. Specified: the negative number of the signal, as in ``subprocess``."""
_STEP_MODULES: Mapping[StepName, Sequence[str]] = {
    "export": ("winml.modelkit.sweep.architecture_export",),
    "build": (
        "winml.modelkit.builds.build",
        "winml.modelkit.optimize.file_optimization",
        "winml.modelkit.quantize.file_quantization",
    ),
    "perf": ("winml.modelkit.profile.perf",),
    "eval": ("winml.modelkit.evaluate.evaluation",),
    "compare": ("winml.modelkit.compare.comparing",),
}
"""Step → modules it imports."""


class SweepStoppedError(StageError):
    """A sweep cannot continue, for a reason other than the models; finished cells are kept."""


@dataclass(frozen=True)
class SweepListener:
    """Callbacks for the progress of a sweep."""

    on_start: Callable[[Cell], None] = lambda _cell: None
    on_step: Callable[[CellResult], None] = lambda _so_far: None
    """A cell starts a step; not called for cells on other machines."""
    on_end: Callable[[CellResult], None] = lambda _result: None
    tell: Tell = lambda _words: None
    """Message on a retry of a cell."""


@dataclass(frozen=True)
class Place:
    """Target of the files of cells."""

    folder: SweepFolder
    artifacts: str | None = None
    """Folder or URL; None: the files stay in the folder of the sweep."""
    keeps_files: bool = True
    directory: Path = field(default_factory=Path.cwd)
    """Working directory of the caller, also on other machines."""

    def order(self, cell: Cell, threads: int) -> CellOrder:
        """Return a cell with its working folder: in the folder of the sweep, or a temporary folder for uploads."""
        folder, shared = self.folder.cell_folder(cell.cell_id), self.folder.shared
        if self.artifacts is not None:
            folder = Path(tempfile.mkdtemp(prefix="winml-sweep-"))
            shared = folder / "shared"
        target = None if self.artifacts is None else joined(self.artifacts, cell.cell_id)
        return CellOrder(cell, folder, shared, threads, target, self.keeps_files, self.directory)


class WorkQueue(Protocol):
    """Runs cells, on this machine or on a cluster."""

    @property
    def jobs(self) -> int:
        """Number of parallel processes."""

    @property
    def limits(self) -> Mapping[str, float]:
        """Limits of one cell: ``seconds`` and ``memory_bytes``, if known on this machine."""

    @property
    def conditions(self) -> Mapping[str, Any]:
        """Conditions of a latency: ``threads`` of each process, and ``jobs``."""

    def results(self, cells: Sequence[Cell], place: Place, listener: SweepListener) -> Generator[CellResult]:
        """Yield the result of every cell, in the order of completion."""


@dataclass(frozen=True)
class QueueKind:
    """A kind of work queue that spreads cells over machines."""

    refuse: Callable[[str], None]
    """Takes an address; raises UsageError if the address is invalid."""
    open: Callable[[str, float, int | None, int | None], WorkQueue]
    """Takes the address, the limits of a cell in seconds and bytes of memory, and the number of parallel cells; None:
    the resources of the machines."""


QUEUES: Registry[QueueKind] = Registry(
    "queues", "work queue", {"ray": "winml.modelkit.sweep.ray_queue:RAY"}, lambda: QueueKind
)
"""Name → kind of work queue; :class:`LocalQueue` runs cells on this machine only."""


@dataclass(frozen=True)
class LocalQueue:
    """Processes on this machine."""

    bounds: Bounds
    jobs: int

    @property
    def limits(self) -> Mapping[str, float]:
        """Limits of one cell."""
        return {"seconds": self.bounds.seconds, "memory_bytes": self.bounds.resident_bytes}

    @property
    def threads(self) -> int:
        """Threads of each process, so that all processes together use each core once."""
        return max(1, available_cores() // self.jobs)

    @property
    def conditions(self) -> Mapping[str, Any]:
        """Conditions of a latency."""
        return {"threads": self.threads, "jobs": self.jobs}

    def results(self, cells: Sequence[Cell], place: Place, listener: SweepListener) -> Generator[CellResult]:
        """Yield the result of every cell, in the order of completion; running cells are killed if the caller stops."""

        def start_calls() -> Iterator[Call]:
            for cell in cells:
                listener.on_start(cell)
                yield Call(run_cell, place.order(cell, self.threads))

        endings = run_bounded(
            start_calls(), self.bounds, self.jobs, preloaded(cells), lambda _call, so_far: listener.on_step(so_far)
        )
        with closing(endings):
            for ending in endings:
                yield _finish_cell(ending, self.bounds)


def do_cell(
    cell: Cell, place: Place, *, seconds: float, resident_bytes: int | None = None, threads: int = 1
) -> CellResult:
    """Run one cell on this machine in a process with bounds; called by a worker of a queue.

    Args:
        cell: The cell.
        place: Target of its files.
        seconds: Time limit.
        resident_bytes: Memory limit of the process; None: the share of one core in the memory of this machine.
        threads: Threads of the process.
    """
    share = int(_MEMORY_SHARE * psutil.virtual_memory().total / (os.cpu_count() or 1))
    bounds = Bounds(seconds, resident_bytes or share)
    (ending,) = run_bounded([Call(run_cell, place.order(cell, threads))], bounds, 1, preloaded([cell]))
    return _finish_cell(ending, bounds)


def preloaded(cells: Iterable[Cell]) -> tuple[str, ...]:
    """Return the modules to import before the first cell."""
    cells = tuple(cells)
    steps = tuple(dict.fromkeys(name for cell in cells for step in cell.do for name in _STEP_MODULES[step]))
    if all(is_onnx_path(cell.model) for cell in cells):
        return ("onnxruntime", *steps)
    exports = [cell.work.build.export for cell in cells]
    has_dynamo = any(export is not None and export.exporter == "dynamo" for export in exports)
    return (*PRELOAD, *(PRELOAD_DYNAMO if has_dynamo else ()), *steps)


def _finish_cell(ending: Ending, bounds: Bounds) -> CellResult:
    """Return the result of a cell after its process returned, died or was killed; remove its leftovers."""
    order: CellOrder = ending.call.argument
    remove_folder(order.folder / "tmp")
    if order.artifacts is not None:
        remove_folder(order.folder)
    seconds = round(ending.seconds, 3)
    if ending.reason == "returned":
        result: CellResult = ending.result
        return replace(result, seconds=seconds, peak_bytes=ending.peak_bytes)
    problem = {
        "time": f"took more than {bounds.seconds:g} s",
        "memory": f"took more than {bounds.resident_bytes / 1e9:.1f} GB of memory; raise the limit with {opt.memory}, "
        f"or run fewer in parallel with {opt.jobs}",
        "died": "the process died",
    }[ending.reason]
    last_result: CellResult = ending.last_message or order.cell.result("failed")
    return replace(
        last_result,
        problem=problem,
        exit_code=_KILLED,
        seconds=seconds,
        peak_bytes=ending.peak_bytes,
        artifacts=str(order.folder) if order.keeps_files and order.artifacts is None else "",
    )
