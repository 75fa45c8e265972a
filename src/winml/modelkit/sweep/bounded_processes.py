"""Runs calls in separate processes, with bounds on time and memory.

A call beyond a bound is killed with its child processes; the last progress message states the progress. Processes are
forked from a server that has imported the heavy libraries once (Windows: each process starts from scratch), and end
with their parent process. Independent of the work of the calls.

The server only imports modules. The imports start no threads except for NumPy's OpenBLAS, whose threads end in a fork.
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
def _stop_together(groups: Callable[[], Iterable[int]], on_continue: Callable[[float], None]) -> Iterator[None]:
    """Stop and continue process groups with the current process inside the block: Ctrl-Z, and ``fg`` or ``bg``.

    Signals of a terminal do not reach processes in separate groups. No effect on systems without the signal, with
    another handler of the signal, and outside of the main thread, since only the main thread can handle signals.

    Args:
        groups: Returns the process groups that stop with this process.
        on_continue: Called with the number of seconds during which all processes were stopped.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        yield
        return

    def stop_all(number: int, _frame: FrameType | None) -> None:
        start = time.monotonic()
        for group in groups():
            _signal_group(group, signal.SIGSTOP)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # returns when this process continues
        signal.signal(number, stop_all)
        for group in groups():
            _signal_group(group, signal.SIGCONT)
        on_continue(time.monotonic() - start)

    signal.signal(signal.SIGTSTP, stop_all)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def _signal_group(pid: int, number: int) -> None:
    """Send a signal to a process and its group; no effect on systems without process groups."""
    if sys.platform != "win32":
        # Missing process: the group has ended, or does not exist yet. macOS denies signals to dead processes.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


_CHECK_SECONDS = 0.2
"""Seconds between two checks of memory and duration. Chosen."""
_SERVER_END_SECONDS = 20.0
"""Seconds until a server ends after a failed import. Chosen: unloading torch takes a second or two."""
_LOOK_SECONDS = 1.0
"""Seconds between two searches for child processes. Chosen: a search lists all processes of the system."""
_EXIT_SECONDS = 5.0
"""Seconds until a process exits after it has sent its result. Chosen."""

ReportProgress = Callable[[Any], None]
EndReason = Literal["returned", "time", "memory", "died"]


@dataclass(frozen=True)
class Bounds:
    """Limits of one process."""

    seconds: float
    resident_bytes: int
    """Resident memory of the process and its child processes."""


@dataclass(frozen=True)
class Call:
    """A function to call in a separate process. It is importable; its argument and result are picklable."""

    function: Callable[[Any, ReportProgress], Any]
    """The second argument reports progress: a function that takes any picklable message."""
    argument: Any


@dataclass(frozen=True)
class Ending:
    """Ending of one call."""

    call: Call
    reason: EndReason
    result: Any
    """The returned value; None unless ``reason`` is ``returned``."""
    last_message: Any
    """The last progress message; None if no message was sent."""
    seconds: float
    peak_bytes: int
    """Largest resident memory of the process and its child processes at any check."""


@dataclass
class _RunningCall:
    """One call with a running process."""

    call: Call
    process: BaseProcess
    messages: Connection
    started: float = field(default_factory=time.monotonic)
    last_message: Any = None
    peak_bytes: int = 0
    looked_at: float = -math.inf
    """Time when the memory of the child processes was last measured."""
    started_bytes: int = 0
    """Memory of the child processes at that time."""

    def ending(self, reason: EndReason, result: object = None) -> Ending:
        return Ending(self.call, reason, result, self.last_message, time.monotonic() - self.started, self.peak_bytes)


def run_bounded(
    calls: Iterable[Call],
    bounds: Bounds,
    jobs: int,
    preload: Iterable[str] = (),
    on_message: Callable[[Call, Any], None] = lambda _call, _message: None,
) -> Generator[Ending]:
    """Run calls, ``jobs`` at a time, and yield their endings in the order of completion.

    Running processes are killed when the caller closes the iterator early. If a terminal stops this process (Ctrl-Z),
    all processes stop, and the pause does not count as running time.

    Args:
        calls: Calls to run; read one by one as processes become free.
        bounds: Limits of each process.
        jobs: Number of parallel processes.
        preload: Modules that are imported before a process starts its call.
        on_message: Called with each progress message.
    """
    context = process_context(preload)
    pending_calls = iter(calls)
    running: list[_RunningCall] = []

    def extend_limits(seconds: float) -> None:
        for running_call in running:
            running_call.started += seconds

    try:
        with _stop_together(lambda: [call.process.pid for call in running if call.process.pid], extend_limits):
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
    """Start the process of a call, with a new server if the server ended during its preload."""
    receiver, sender = context.Pipe(duplex=False)
    try:
        process = start_process(context, _run_call, sender, call)
    except (EOFError, ConnectionError):
        # The server ended during its preload; a new server imports nothing, and the call reports the error.
        context.set_forkserver_preload([])
        process = _start_with_new_server(context, sender, call)
    sender.close()
    return _RunningCall(call, process, receiver)


def _start_with_new_server(context: BaseContext, sender: Connection, call: Call) -> BaseProcess:
    """Start a call after the end of the server that refuses connections: only then a new server is started."""
    deadline = time.monotonic() + _SERVER_END_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(EOFError, ConnectionError):
            return start_process(context, _run_call, sender, call)
        time.sleep(_CHECK_SECONDS)
    return start_process(context, _run_call, sender, call)


def _run_call(messages: Connection, call: Call) -> None:
    """Call the function inside the process; send progress messages and the result."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # Child processes are killed with the call.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    result = call.function(call.argument, lambda message: messages.send(("progress", message)))
    messages.send(("result", result))


def _end_with_parent() -> None:
    """End the current process if its parent was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        _kill_tree(os.getpid())
        psutil.Process().kill()


def _kill_tree(pid: int) -> None:
    """Kill the descendants of a process; on systems with process groups, the whole group, the process included."""
    if sys.platform == "win32":
        for process in _list_descendants(pid):
            with contextlib.suppress(psutil.Error):
                process.kill()
    else:
        _signal_group(pid, signal.SIGKILL)


def _check_call(running_call: _RunningCall, bounds: Bounds, on_message: Callable[[Call, Any], None]) -> Ending | None:
    """Read the messages and memory of a process; return the ending of the call, or None while it runs.

    Args:
        running_call: The call; last message and largest memory are noted in it.
        bounds: Limits of time and memory.
        on_message: Called with the call and each message.
    """
    try:
        while running_call.messages.poll():
            kind, value = running_call.messages.recv()
            if kind == "result":
                return running_call.ending("returned", value)
            running_call.last_message = value
            on_message(running_call.call, value)
    except (EOFError, OSError):  # OSError: the process died while it sent a message
        return running_call.ending("died")
    running_call.peak_bytes = max(running_call.peak_bytes, _total_bytes(running_call))
    if running_call.peak_bytes > bounds.resident_bytes:
        return running_call.ending("memory")
    if time.monotonic() - running_call.started > bounds.seconds:
        return running_call.ending("time")
    return None


def _total_bytes(running_call: _RunningCall) -> int:
    """Return the memory of a process and its descendants.

    Descendants are measured now and then, and at a new peak; their memory is noted in ``running_call``.
    """
    pid = running_call.process.pid
    assert pid is not None  # it was started
    own_bytes = resident_bytes_of(pid)
    is_peak = running_call.started_bytes > 0 and own_bytes + running_call.started_bytes > running_call.peak_bytes
    if is_peak or time.monotonic() - running_call.looked_at >= _LOOK_SECONDS:
        running_call.looked_at = time.monotonic()
        running_call.started_bytes = sum(map(_own_bytes, _list_descendants(pid)))
    return own_bytes + running_call.started_bytes


def _list_descendants(pid: int) -> list[psutil.Process]:
    """Return all descendants of a process; ``[]`` after its end, or if access is denied."""
    try:
        descendants: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return descendants


def _own_bytes(process: psutil.Process) -> int:
    """Return the memory added by a child process; 0 after its end."""
    try:
        if sys.platform == "linux":
            with contextlib.suppress(psutil.AccessDenied):
                # The proportional set size divides shared pages among their processes.
                return int(process.memory_full_info().pss)
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _end_process(running_call: _RunningCall, *, may_finish: bool = False) -> None:
    """Kill a process and its descendants; with ``may_finish``, wait a few seconds for its exit first."""
    if may_finish:
        running_call.process.join(_EXIT_SECONDS)
    if running_call.process.pid is not None:
        _kill_tree(running_call.process.pid)
    running_call.process.kill()
    running_call.process.join()
    running_call.messages.close()
