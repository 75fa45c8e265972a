"""Work queue on a Ray cluster. Each cell is a task of one CPU; the worker of the task starts the bounded process.

A cell is retried elsewhere if its worker is lost. Ray is installed with the extra ``ray``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import socket
import time
import uuid
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from winml.modelkit.builds.cache import tool_versions
from winml.modelkit.errors import StageError, UsageError, first_line, opt
from winml.modelkit.onnx.files.moving import remove_file
from winml.modelkit.sweep.cells import Cell
from winml.modelkit.sweep.records import CellResult
from winml.modelkit.sweep.work_queue import Place, QueueKind, SweepListener, SweepStoppedError, do_cell
from winml.modelkit.version import install_command

_AUTO = "auto"
_ADDRESS = re.compile(r"([\w.-]+|\[[0-9a-fA-F:]+\]):(\d{1,5})")
_CONNECT_SECONDS = 5.0
"""Chosen: longer than the latency of every network that is usable for a cluster; Ray itself waits for minutes."""
_WAIT_SECONDS = 1.0
_CPU_SECONDS = 30.0
"""Chosen: enough time for a machine to join or rejoin a cluster; without a CPU no task would ever run."""
_MOST_TRIES = 3
"""Chosen: if a model loses three workers, the model is the cause."""
_THREADS = 1
"""Threads of each process: a task has one CPU."""
_MARKER = ".winml-sweep-marker"


def _refuse_missing_ray(address: str) -> None:
    """Refuse a cluster if Ray is not installed or the address is invalid.

    Raises:
        UsageError: its hint states the correction.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError(f"{opt.ray} {address}: Ray is not installed", hint=f"Install it: {install_command('ray')}")
    if address != _AUTO and not _ADDRESS.fullmatch(address):
        raise UsageError(
            f"{opt.ray} {address}: expected {_AUTO} or HOST:PORT", hint="ray status shows the address of a cluster."
        )


@dataclass(frozen=True)
class RayQueue:
    """Tasks of a Ray cluster."""

    address: str
    seconds: float
    resident_bytes: int | None
    """Memory limit of one process; None: its share of the memory of its machine."""
    max_jobs: int | None
    """Maximum number of parallel tasks; None: the number of CPUs of the cluster."""

    @property
    def jobs(self) -> int:
        """Maximum number of parallel processes; 0: unknown here."""
        return self.max_jobs or 0

    @property
    def limits(self) -> Mapping[str, float]:
        """Limits of one cell; without a memory limit, memory is its share on each machine."""
        memory = {} if self.resident_bytes is None else {"memory_bytes": self.resident_bytes}
        return {"seconds": self.seconds, **memory}

    @property
    def conditions(self) -> Mapping[str, Any]:
        """Conditions of a latency; other cells may run on the same machine at the same time."""
        return {"threads": _THREADS, "jobs": self.jobs, "on": "ray"}

    def results(self, cells: Sequence[Cell], place: Place, listener: SweepListener) -> Generator[CellResult]:
        """Yield the result of every cell, in the order of completion.

        Raises:
            StageError: the cluster cannot be reached.
            SweepStoppedError: the cluster has no CPU.
        """
        if not cells:
            return
        with _connect_to_cluster(self.address) as ray, _create_marker(place) as marker:
            yield from _Tasks(ray, self, place, listener, marker).results(cells)


@contextlib.contextmanager
def _connect_to_cluster(address: str) -> Iterator[Any]:
    """Connect to a cluster for the duration of the block.

    Raises:
        StageError: there is no cluster at the address.
    """
    # Ray sends usage statistics to its maker unless they are disabled.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    hint = f"Start one with ray start --head, or omit {opt.ray} to run on this machine."
    if match := _ADDRESS.fullmatch(address):
        try:
            socket.create_connection((match[1].strip("[]"), int(match[2])), _CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise StageError(f"{opt.ray} {address}: no response: {first_line(error)}", hint=hint) from error
    import ray

    try:
        ray.init(address=address, logging_level=logging.CRITICAL, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise StageError(f"{opt.ray} {address}: cannot be reached: {first_line(error)}", hint=hint) from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _create_marker(place: Place) -> Iterator[Path | None]:
    """Create a file in the folder of the sweep, by which a machine detects access to the folder.

    None if files are uploaded: no machine needs the folder then.
    """
    if place.artifacts is not None:
        yield None
        return
    marker = place.folder.path / f"{_MARKER}-{uuid.uuid4().hex}"
    marker.touch()
    try:
        yield marker
    finally:
        remove_file(marker)


@dataclass
class _Tasks:
    """The running tasks in a cluster."""

    ray: Any
    queue: RayQueue
    place: Place
    listener: SweepListener
    marker: Path | None

    def results(self, cells: Sequence[Cell]) -> Iterator[CellResult]:
        """Yield the result of every cell.

        Raises:
            SweepStoppedError: the cluster has no CPU.
        """
        # A lost task is retried here and not by Ray, so that the retry is reported and counted.
        worker = self.ray.remote(num_cpus=1, max_retries=0)(_run_in_worker)
        waiting = deque((cell, 1) for cell in cells)
        running: dict[Any, tuple[Cell, int]] = {}
        ready_time = time.monotonic()
        try:
            while waiting or running:
                max_tasks = self._max_tasks()
                if max_tasks:
                    ready_time = time.monotonic()
                elif time.monotonic() - ready_time > _CPU_SECONDS:
                    raise SweepStoppedError(
                        f"{opt.ray} {self.queue.address}: the cluster had no free CPU for {_CPU_SECONDS:g} s",
                        hint="Add a machine with ray start --address, and run the same command again.",
                    )
                while waiting and len(running) < max_tasks:
                    cell, tries = waiting.popleft()
                    self.listener.on_start(cell)
                    task = worker.remote(cell, self.place, self.queue, (self.marker, tool_versions()))
                    running[task] = cell, tries
                if not running:
                    time.sleep(_WAIT_SECONDS)
                    continue
                ended, _ = self.ray.wait(list(running), num_returns=1, timeout=_WAIT_SECONDS)
                for task in ended:
                    cell, tries = running.pop(task)
                    result = self._read_result(task, cell, tries)
                    if result is None:
                        waiting.append((cell, tries + 1))
                    else:
                        yield replace(result, tries=tries)
        finally:
            for task in running:
                self.ray.cancel(task, force=True)

    def _max_tasks(self) -> int:
        """Return the current maximum of running tasks; 0 if no machine has a CPU."""
        cpus = int(self.ray.cluster_resources().get("CPU", 0))
        return min(cpus, self.queue.max_jobs or cpus)

    def _read_result(self, task: object, cell: Cell, tries: int) -> CellResult | None:
        """Return the result of an ended task; None if the worker was lost and the task is to be retried."""
        try:
            result: CellResult = self.ray.get(task)
            return result
        except self.ray.exceptions.RayTaskError as error:
            # Errors of a model are results: this error is caused by the machine.
            problem = (
                f"the machine {getattr(error, 'ip', None) or 'of the cluster'} cannot run it: "
                f"{first_line(error.cause or error)}; every machine needs {_requirement_words(tool_versions())}"
            )
            return cell.result("stopped", problem)
        except self.ray.exceptions.RayError as error:
            if tries < _MOST_TRIES:
                self.listener.tell(f"{cell.model}: its worker was lost ({type(error).__name__}); retried")
                return None
            problem = f"{_MOST_TRIES} workers were lost, the last one by {type(error).__name__}"
        return replace(cell.result("failed", problem), exit_code=1)


def _requirement_words(versions: Mapping[str, str]) -> str:
    """Format versions as pip requirements."""
    return " ".join(f"{name}=={version}" for name, version in versions.items())


def _run_in_worker(
    cell: Cell, place: Place, queue: RayQueue, requirements: tuple[Path | None, Mapping[str, str]]
) -> CellResult:
    """Run a cell in a worker of the cluster.

    Args:
        cell: The cell.
        place: Target of its files.
        queue: The queue with the limits of the cell.
        requirements: A file that this machine must be able to access, and the required versions.
    """
    marker, versions = requirements
    own_tools = tool_versions()
    if differing := {name: version for name, version in versions.items() if own_tools.get(name) != version}:
        name = next(iter(differing))
        return cell.result(
            "stopped",
            f"the machine {socket.gethostname()} has {name} {own_tools.get(name, 'not installed')}, but this one has "
            f"{differing[name]}: install {_requirement_words(differing)} there",
        )
    if marker is not None and not marker.is_file():
        # Checked before a folder with this name is created.
        return cell.result(
            "stopped",
            f"the machine {socket.gethostname()} cannot access {marker.parent}: share it, or pass a URL with "
            f"{opt.artifacts}",
        )
    result = do_cell(cell, place, seconds=queue.seconds, resident_bytes=queue.resident_bytes, threads=_THREADS)
    return replace(result, node=f"{socket.gethostname()}:{_node_id()}")


def _node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())[:8]


RAY = QueueKind(_refuse_missing_ray, RayQueue)
"""A Ray cluster; its address is ``auto`` or ``HOST:PORT``."""
