"""How does work run in processes of its own that may be slow, huge, or die?

Each call has one process, which is killed when it takes longer or more memory than it may; what it said last tells how
far it came. Processes are forked from a server that has imported the heavy libraries once (Windows: started afresh).
Knows nothing of what the work is.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import psutil

__all__ = ["Bounds", "Call", "Ending", "run_bounded"]

_LOOK_SECONDS = 0.2
"""Chosen: how often memory and time of each process are looked at."""
_FAREWELL_SECONDS = 5.0
"""Chosen: a process that has sent its result only tidies up."""

Tell = Callable[[Any], None]
Reason = Literal["returned", "time", "memory", "died"]


@dataclass(frozen=True)
class Bounds:
    """What one process may take."""

    seconds: float
    resident_bytes: int


@dataclass(frozen=True)
class Call:
    """A function to call in a process of its own: importable, its argument and result picklable."""

    function: Callable[[Any, Tell], Any]
    """Its second argument is called with anything picklable that says how far it has come."""
    argument: Any


@dataclass(frozen=True)
class Ending:
    """How a process ended."""

    call: Call
    reason: Reason
    result: Any
    """What the function returned; None unless ``reason`` is ``returned``."""
    said_last: Any
    """What it said last; None if nothing."""
    seconds: float
    peak_bytes: int
    """Largest resident memory seen."""


@dataclass
class _Running:
    """One process at work."""

    call: Call
    process: BaseProcess
    messages: Connection
    started: float = field(default_factory=time.monotonic)
    said_last: Any = None
    peak_bytes: int = 0

    def ending(self, reason: Reason, result: Any = None) -> Ending:
        return Ending(self.call, reason, result, self.said_last, time.monotonic() - self.started, self.peak_bytes)


def run_bounded(calls: Iterable[Call], bounds: Bounds, jobs: int, preload: Iterable[str] = ()) -> Iterator[Ending]:
    """Run calls, ``jobs`` at a time, and yield how each ended, as they end.

    Whatever still runs is killed when the caller stops early.

    Args:
        calls: What to run; taken one by one as processes become free.
        bounds: What each may take.
        jobs: Processes at a time.
        preload: Modules that every process finds imported.
    """
    context = _context(preload)
    waiting = iter(calls)
    running: list[_Running] = []
    try:
        while True:
            while len(running) < jobs and (call := next(waiting, None)) is not None:
                running.append(_start(context, call))
            if not running:
                return
            wait([item.messages for item in running], timeout=_LOOK_SECONDS)
            for item in list(running):
                if ending := _look(item, bounds):
                    running.remove(item)
                    _end(item, may_finish=ending.reason == "returned")
                    yield ending
    finally:
        for item in running:
            _end(item)


def _context(preload: Iterable[str]) -> BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def _start(context: BaseContext, call: Call) -> _Running:
    ours, theirs = context.Pipe(duplex=False)
    process: BaseProcess = context.Process(target=_work, args=(theirs, call), daemon=True)  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    return _Running(call, process, ours)


def _work(messages: Connection, call: Call) -> None:
    """Run in the process: call the function and send what it says and returns."""
    result = call.function(call.argument, lambda words: messages.send(("said", words)))
    messages.send(("result", result))


def _look(item: _Running, bounds: Bounds) -> Ending | None:
    """Read what a process sent and what it takes; return how it ended, or None while it may go on."""
    try:
        while item.messages.poll():
            kind, value = item.messages.recv()
            if kind == "result":
                return item.ending("returned", value)
            item.said_last = value
    except (EOFError, OSError):  # the latter half-way through a message
        return item.ending("died")
    item.peak_bytes = max(item.peak_bytes, _resident_bytes(item.process.pid))
    if item.peak_bytes > bounds.resident_bytes:
        return item.ending("memory")
    if time.monotonic() - item.started > bounds.seconds:
        return item.ending("time")
    return None


def _resident_bytes(pid: int | None) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0  # it has just ended; its last message says how


def _end(item: _Running, *, may_finish: bool = False) -> None:
    if may_finish:
        item.process.join(_FAREWELL_SECONDS)
    item.process.kill()
    item.process.join()
    item.messages.close()
