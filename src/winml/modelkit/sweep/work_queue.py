"""How do cells get done on this machine? Some at a time, each in a process of its own with bounds."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from winml.modelkit.builds.plan import is_onnx_path
from winml.modelkit.errors import StageError, opt
from winml.modelkit.ort.host import available_cores
from winml.modelkit.registries import Registry
from winml.modelkit.sweep.bounded_processes import Bounds, Call, Ending, run_bounded
from winml.modelkit.sweep.cell_work import PRELOAD, PRELOAD_DYNAMO, CellOrder, joined, run_cell
from winml.modelkit.sweep.cells import Cell, SweepFolder
from winml.modelkit.sweep.plan import StepName
from winml.modelkit.sweep.records import CellResult

_MEMORY_SHARE = 0.9
"""Chosen: what the machine itself needs stays free."""
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
"""What each step imports."""


class SweepStoppedError(StageError):
    """A sweep cannot go on, for a reason that no model has; what is finished stays."""


@dataclass(frozen=True)
class SweepListener:
    """Who is told how a sweep goes on."""

    on_start: Callable[[Cell], None] = lambda _cell: None
    on_step: Callable[[CellResult], None] = lambda _so_far: None
    """A cell begins a step; not told of cells on other machines."""
    on_end: Callable[[CellResult], None] = lambda _result: None
    tell: Callable[[str], None] = lambda _words: None
    """Something is tried again, or counts once."""


@dataclass(frozen=True)
class Place:
    """Where the files of cells go."""

    folder: SweepFolder
    artifacts: str | None = None
    """Folder or URL; None: they stay in the folder of the sweep."""
    keeps_files: bool = True
    directory: Path = field(default_factory=Path.cwd)
    """Working directory of who asks, also on other machines."""

    def order(self, cell: Cell, threads: int) -> CellOrder:
        """Return a cell with the folder it is done in: that of the sweep, or a temporary one to upload from."""
        folder, shared = self.folder.cell_folder(cell.cell_id), self.folder.shared
        if self.artifacts is not None:
            folder = Path(tempfile.mkdtemp(prefix="winml-sweep-"))
            shared = folder / "shared"
        target = None if self.artifacts is None else joined(self.artifacts, cell.cell_id)
        return CellOrder(cell, folder, shared, threads, target, self.keeps_files, self.directory)


class WorkQueue(Protocol):
    """Does cells, here or on other machines."""

    @property
    def jobs(self) -> int:
        """Processes at a time."""

    @property
    def limits(self) -> Mapping[str, float]:
        """What one cell may take: ``seconds`` and ``memory_bytes``, where that is known here."""

    @property
    def conditions(self) -> Mapping[str, Any]:
        """What a latency depends on: ``threads`` of each process, and ``jobs``."""

    def results(self, cells: Sequence[Cell], place: Place, listener: SweepListener) -> Generator[CellResult]:
        """Yield the result of every cell, in the order they end."""


@dataclass(frozen=True)
class QueueKind:
    """A way to spread cells over machines."""

    refuse: Callable[[str], None]
    """Takes an address; raises UsageError where nothing can be there."""
    open: Callable[[str, float, int | None, int | None], WorkQueue]
    """Takes the address, the seconds and the bytes of memory that a cell may take, and how many cells run at a time;
    None: what the machines have."""


QUEUES: Registry[QueueKind] = Registry(
    "queues", "work queue", {"ray": "winml.modelkit.sweep.ray_queue:RAY"}, lambda: QueueKind
)
"""Name → how cells are spread; what runs on this machine alone is :class:`LocalQueue`."""


@dataclass(frozen=True)
class LocalQueue:
    """Processes on this machine."""

    bounds: Bounds
    jobs: int

    @property
    def limits(self) -> Mapping[str, float]:
        """What one cell may take."""
        return {"seconds": self.bounds.seconds, "memory_bytes": self.bounds.resident_bytes}

    @property
    def threads(self) -> int:
        """Threads of each process, so that all together use the machine once."""
        return max(1, available_cores() // self.jobs)

    @property
    def conditions(self) -> Mapping[str, Any]:
        """What a latency depends on."""
        return {"threads": self.threads, "jobs": self.jobs}

    def results(self, cells: Sequence[Cell], place: Place, listener: SweepListener) -> Generator[CellResult]:
        """Yield the result of every cell, in the order they end; what still runs is killed when the caller stops."""

        def calls() -> Iterator[Call]:
            for cell in cells:
                listener.on_start(cell)
                yield Call(run_cell, place.order(cell, self.threads))

        endings = run_bounded(
            calls(), self.bounds, self.jobs, preloaded(cells), lambda _call, so_far: listener.on_step(so_far)
        )
        with closing(endings):
            for ending in endings:
                yield _finished_cell(ending, self.bounds)


def do_cell(
    cell: Cell, place: Place, *, seconds: float, resident_bytes: int | None = None, threads: int = 1
) -> CellResult:
    """Do one cell on this machine, in a process with bounds: what a worker of a queue calls.

    Args:
        cell: The cell.
        place: Where its files go.
        seconds: What it may take.
        resident_bytes: Most memory of the process; None: the share of one core in the memory of this machine.
        threads: Threads of the process.
    """
    share = int(_MEMORY_SHARE * psutil.virtual_memory().total / (os.cpu_count() or 1))
    bounds = Bounds(seconds, resident_bytes or share)
    (ending,) = run_bounded([Call(run_cell, place.order(cell, threads))], bounds, 1, preloaded([cell]))
    return _finished_cell(ending, bounds)


def preloaded(cells: Iterable[Cell]) -> tuple[str, ...]:
    """Return the modules that are worth importing before the first of these cells."""
    cells = tuple(cells)
    steps = tuple(dict.fromkeys(name for cell in cells for step in cell.do for name in _STEP_MODULES[step]))
    if all(is_onnx_path(cell.model) for cell in cells):
        return ("onnxruntime", *steps)
    exports = [cell.work.build.export for cell in cells]
    has_dynamo = any(export is not None and export.exporter == "dynamo" for export in exports)
    return (*PRELOAD, *(PRELOAD_DYNAMO if has_dynamo else ()), *steps)


def _finished_cell(ending: Ending, bounds: Bounds) -> CellResult:
    """Return the result of a cell whose process ended, also where it was killed or died; its leftovers are removed."""
    order: CellOrder = ending.call.argument
    shutil.rmtree(order.folder / "tmp", ignore_errors=True)
    if order.artifacts is not None:
        shutil.rmtree(order.folder, ignore_errors=True)
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
    so_far: CellResult = ending.last_message or order.cell.result("failed")
    return replace(
        so_far,
        problem=problem,
        exit_code=_KILLED,
        seconds=seconds,
        peak_bytes=ending.peak_bytes,
        artifacts=str(order.folder) if order.keeps_files and order.artifacts is None else "",
    )
