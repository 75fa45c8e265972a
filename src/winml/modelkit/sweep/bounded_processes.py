"""Runs calls in processes of their own, with bounds on time and memory.

A call that exceeds a bound is killed with all that it started (Windows: alone); its last progress message says how far
it came. Processes are forked from a server that has imported the heavy libraries once (Windows: each process starts
from nothing), and end with the process that asked for them. Does not know what the calls do.

The server runs nothing but imports. They start no threads but those of NumPy's OpenBLAS, which ends its own in a fork.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Literal

import psutil

from winml.modelkit.ort.processes import process_context, resident_bytes_of, start_process


@contextmanager
def _stopping_together(groups: Callable[[], Iterable[int]], on_continue: Callable[[float], None]) -> Iterator[None]:
    """Stop and continue other processes with this one for the time of the block: Ctrl-Z, and ``fg`` or ``bg``.

    Processes in groups of their own are not reached by what a terminal sends. Does nothing where the system has no such
    signal, where somebody else handles it, and outside of the main thread, which alone may handle signals.

    Args:
        groups: Returns the groups of processes that stop with this one.
        on_continue: Called with the seconds for which all of them stood still.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        started = time.monotonic()
        for group in groups():
            _signal_group(group, signal.SIGSTOP)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # returns once this process goes on
        signal.signal(number, stop)
        for group in groups():
            _signal_group(group, signal.SIGCONT)
        on_continue(time.monotonic() - started)

    signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def _signal_group(pid: int, number: int) -> None:
    """Send a signal to a process and those it started; nothing where the system has no groups."""
    if sys.platform != "win32":
        # No such process: all have ended, or it has not made its group yet. macOS denies it where all are dead.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


_CHECK_SECONDS = 0.2
"""Time between two checks of memory and duration. Chosen."""
_SERVER_END_SECONDS = 20.0
"""Time that a server may take to end after a failed import. Chosen: it unloads torch, a second or two."""
_LOOK_SECONDS = 1.0
"""Time between two looks at what calls have started. Chosen: for a look the system lists all of its processes."""
_EXIT_SECONDS = 5.0
"""Time a process has to exit after it has sent its result. Chosen."""

ReportProgress = Callable[[Any], None]
EndReason = Literal["returned", "time", "memory", "died"]


@dataclass(frozen=True)
class Bounds:
    """Limits of one process."""

    seconds: float
    resident_bytes: int
    """Of the process and all that it started."""


@dataclass(frozen=True)
class Call:
    """A function to call in a process of its own. It is importable; its argument and result are picklable."""

    function: Callable[[Any, ReportProgress], Any]
    """Its second argument reports progress: it is called with any picklable message."""
    argument: Any


@dataclass(frozen=True)
class Ending:
    """How one call ended."""

    call: Call
    reason: EndReason
    result: Any
    """The returned value; None unless ``reason`` is ``returned``."""
    last_message: Any
    """The last progress message; None without one."""
    seconds: float
    peak_bytes: int
    """Largest resident memory at any check, of the process and all that it started."""


@dataclass
class _RunningCall:
    """One call whose process has not ended."""

    call: Call
    process: BaseProcess
    messages: Connection
    started: float = field(default_factory=time.monotonic)
    last_message: Any = None
    peak_bytes: int = 0
    looked_at: float = -math.inf
    """Time of the last look at what the process has started."""

    def ending(self, reason: EndReason, result: object = None) -> Ending:
        return Ending(self.call, reason, result, self.last_message, time.monotonic() - self.started, self.peak_bytes)


def run_bounded(
    calls: Iterable[Call],
    bounds: Bounds,
    jobs: int,
    preload: Iterable[str] = (),
    on_message: Callable[[Call, Any], None] = lambda _call, _message: None,
) -> Generator[Ending]:
    """Run calls, ``jobs`` at a time, and yield how each ended, in the order they end.

    Processes that still run are killed when the caller closes the iterator early. Where a terminal stops this process
    (Ctrl-Z), they stop with it, which does not count as their time.

    Args:
        calls: Calls to run; read one by one as processes become free.
        bounds: Limits of each process.
        jobs: Processes at a time.
        preload: Modules that are imported before a process starts its call.
        on_message: Called with each progress message.
    """
    context = process_context(preload)
    pending_calls = iter(calls)
    running: list[_RunningCall] = []

    def go_on(seconds: float) -> None:
        for running_call in running:
            running_call.started += seconds

    try:
        with _stopping_together(lambda: [item.process.pid for item in running if item.process.pid], go_on):
            while True:
                while len(running) < jobs and (call := next(pending_calls, None)) is not None:
                    running.append(_start_call(context, call))
                if not running:
                    return
                wait([running_call.messages for running_call in running], timeout=_CHECK_SECONDS)
                for running_call in list(running):
                    if ending := _check_call(running_call, bounds, on_message):
                        running.remove(running_call)
                        _end_process(running_call, may_finish=ending.reason == "returned")
                        yield ending
    finally:
        for running_call in running:
            _end_process(running_call)


def _start_call(context: BaseContext, call: Call) -> _RunningCall:
    receiver, sender = context.Pipe(duplex=False)
    try:
        process = start_process(context, _run_call, sender, call)
    except (EOFError, ConnectionError):
        # The server ended while it imported what is preloaded; a new one imports nothing, and the call tells why.
        context.set_forkserver_preload([])
        process = _start_with_new_server(context, sender, call)
    sender.close()
    return _RunningCall(call, process, receiver)


def _start_with_new_server(context: BaseContext, sender: Connection, call: Call) -> BaseProcess:
    """Start a call once the server that refuses connections has ended: only then another one is started."""
    deadline = time.monotonic() + _SERVER_END_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(EOFError, ConnectionError):
            return start_process(context, _run_call, sender, call)
        time.sleep(_CHECK_SECONDS)
    return start_process(context, _run_call, sender, call)


def _run_call(messages: Connection, call: Call) -> None:
    """Call the function inside the process; send its progress messages and its result."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # What the call starts is killed with it.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    result = call.function(call.argument, lambda message: messages.send(("progress", message)))
    messages.send(("result", result))


def _end_with_parent() -> None:
    """End this process when the one that started it was killed, and could not end it itself."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        _kill_started(os.getpid())
        psutil.Process().kill()


def _kill_started(pid: int) -> None:
    """Kill what a process started; in a system with groups, also what ended processes left, and the process itself."""
    if sys.platform == "win32":
        for process in _processes_below(pid):
            with contextlib.suppress(psutil.Error):
                process.kill()
    else:
        _signal_group(pid, signal.SIGKILL)


def _check_call(running_call: _RunningCall, bounds: Bounds, on_message: Callable[[Call, Any], None]) -> Ending | None:
    """Read the messages and the memory of a process; return how the call ended, or None while it may go on."""
    try:
        while running_call.messages.poll():
            kind, value = running_call.messages.recv()
            if kind == "result":
                return running_call.ending("returned", value)
            running_call.last_message = value
            on_message(running_call.call, value)
    except (EOFError, OSError):  # OSError: the process died while it sent a message
        return running_call.ending("died")
    running_call.peak_bytes = max(running_call.peak_bytes, _bytes_of_all(running_call))
    if running_call.peak_bytes > bounds.resident_bytes:
        return running_call.ending("memory")
    if time.monotonic() - running_call.started > bounds.seconds:
        return running_call.ending("time")
    return None


def _bytes_of_all(running_call: _RunningCall) -> int:
    """Return the memory of a process, now and then with that of the processes that it started."""
    pid = running_call.process.pid
    assert pid is not None  # it was started
    found = resident_bytes_of(pid)
    if time.monotonic() - running_call.looked_at >= _LOOK_SECONDS:
        running_call.looked_at = time.monotonic()
        found += sum(map(_own_bytes, _processes_below(pid)))
    return found


def _processes_below(pid: int) -> list[psutil.Process]:
    """Return all that a process started; none where it has just ended, or the system does not say it."""
    try:
        below: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return below


def _own_bytes(process: psutil.Process) -> int:
    """Return the memory that a started process adds; 0 where it has just ended."""
    try:
        if sys.platform == "linux":
            with contextlib.suppress(psutil.AccessDenied):
                # Pages that others have mapped as well count in parts.
                return int(process.memory_full_info().pss)
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _end_process(running_call: _RunningCall, *, may_finish: bool = False) -> None:
    if may_finish:
        running_call.process.join(_EXIT_SECONDS)
    if running_call.process.pid is not None:
        _kill_started(running_call.process.pid)
    running_call.process.kill()
    running_call.process.join()
    running_call.messages.close()
