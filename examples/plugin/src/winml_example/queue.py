"""A work queue: ``winml sweep --queue executor=2`` gives cells to an executor of Python.

Clients of clusters, such as those of Dask and mpi4py, are executors as well.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from winml.modelkit.extend import Cell, CellResult, Place, QueueKind, SweepListener, UsageError, do_cell


@dataclass(frozen=True)
class ExecutorQueue:
    """The cells of a sweep, some at a time."""

    jobs: int
    seconds: float
    resident_bytes: int | None

    @property
    def limits(self) -> Mapping[str, float]:
        """What one cell may take."""
        return {"seconds": self.seconds}

    @property
    def conditions(self) -> Mapping[str, object]:
        """What a latency depends on."""
        return {"threads": 1, "jobs": self.jobs}

    def results(self, cells: Sequence[Cell], place: Place, listener: SweepListener) -> Generator[CellResult]:
        """Yield the result of every cell, in the order they end."""
        executor = ThreadPoolExecutor(self.jobs)

        def work(cell: Cell) -> CellResult:
            listener.on_start(cell)
            return do_cell(cell, place, seconds=self.seconds, resident_bytes=self.resident_bytes)

        try:
            for done in as_completed([executor.submit(work, cell) for cell in cells]):
                yield done.result()
        finally:
            executor.shutdown(cancel_futures=True)


def _refuse(address: str) -> None:
    if not address.isdecimal() or int(address) < 1:
        raise UsageError(f"--queue executor={address}: expected the number of workers", hint="Such as executor=2.")


def _open(address: str, seconds: float, resident_bytes: int | None, jobs: int | None) -> ExecutorQueue:
    return ExecutorQueue(jobs or int(address), seconds, resident_bytes)


EXECUTOR = QueueKind(_refuse, _open)
