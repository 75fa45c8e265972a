"""Endings of calls in separate processes: returned, too slow, too large, or dead."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from bounded_calls import double, hoard, hoard_in_child, leave_child, oversleep, vanish
from winml.modelkit.sweep.bounded_processes import Bounds, Call, Ending, run_bounded

MEBIBYTE = 2**20


def run(*calls: Call, seconds: float = 30.0, mebibytes: int = 1000, jobs: int = 2) -> dict[object, Ending]:
    """Run calls and return their endings by argument."""
    endings = run_bounded(calls, Bounds(seconds, mebibytes * MEBIBYTE), jobs)
    return {ending.call.argument: ending for ending in endings}


def test_bounded_calls_return_their_results_and_last_messages() -> None:
    """Each call has its own result, even with more calls than jobs."""
    endings = run(*(Call(double, number) for number in range(5)))
    assert [("returned", 2 * number, number) for number in range(5)] == [
        (ending.reason, ending.result, ending.last_message) for _, ending in sorted(endings.items(), key=str)
    ]


def test_bounded_call_that_takes_too_long_is_killed() -> None:
    """The ending has the last progress message; other calls end as usual."""
    started = time.monotonic()
    endings = run(Call(oversleep, "half-way"), Call(double, 4), seconds=2.0)
    assert time.monotonic() - started < 20
    assert ("time", "half-way", None) == (endings["half-way"].reason, endings["half-way"].last_message, None)
    assert endings["half-way"].seconds >= 2.0
    assert 8 == endings[4].result


def test_bounded_call_that_takes_too_much_memory_is_killed() -> None:
    """The ending has the largest memory of the process."""
    ending = run(Call(hoard, 600 * MEBIBYTE), mebibytes=400)[600 * MEBIBYTE]
    assert ("memory", "hoarding") == (ending.reason, ending.last_message)
    assert ending.peak_bytes > 400 * MEBIBYTE


def test_memory_of_child_processes_counts() -> None:
    """The memory bound holds for all processes of a call together."""
    ending = run(Call(hoard_in_child, 400 * MEBIBYTE), mebibytes=300)[400 * MEBIBYTE]
    assert ("memory", "hoarding elsewhere") == (ending.reason, ending.last_message)


def test_crashed_bounded_call_is_reported() -> None:
    """A crash ends its own call only."""
    endings = run(Call(vanish, "deep inside"), Call(double, 1))
    assert ("died", "deep inside") == (endings["deep inside"].reason, endings["deep inside"].last_message)
    assert "returned" == endings[1].reason


def test_bounded_calls_are_killed_when_the_iterator_is_closed() -> None:
    """A caller that stops early leaves no process."""
    endings = run_bounded([Call(double, 1), Call(oversleep, "left")], Bounds(60.0, 1000 * MEBIBYTE), jobs=2)
    assert 2 == next(endings).result
    started = time.monotonic()
    endings.close()
    assert time.monotonic() - started < 10


class _StartedError(Exception):
    """Raised when a call has sent its first message."""


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="this system has no groups of processes")
@pytest.mark.parametrize("wish", ["sleep", "return"])
def test_child_processes_end_with_the_call(wish: str) -> None:
    """The processes of a call end whether it is killed or has returned."""
    children: list[int] = []

    def stop(call: Call, message: int) -> None:
        children.append(message)
        if call.argument == "sleep":
            raise _StartedError

    with contextlib.suppress(_StartedError):
        list(run_bounded([Call(leave_child, wish)], Bounds(60.0, 1000 * MEBIBYTE), 1, on_message=stop))
    await_true(lambda: not is_alive(children[0]))


AWAITING = """
import os, sys
from bounded_calls import await_file
from winml.modelkit.sweep.bounded_processes import Bounds, Call, run_bounded
os.setpgid(0, 0)  # as a shell does with what it starts
tell = lambda _call, message: print(message, flush=True)
(ending,) = run_bounded([Call(await_file, sys.argv[1])], Bounds(60.0, 2**30), 1, on_message=tell)
print(ending.reason)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no signal that stops a process")
def test_calls_stop_and_continue_with_their_process(tmp_path: Path) -> None:
    """Each call has a process group of its own, which the signal of a terminal does not reach."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", AWAITING, str(tmp_path / "go")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as caller:
        assert caller.stdout is not None
        try:
            both = [psutil.Process(pid) for pid in (caller.pid, int(caller.stdout.readline()))]
            for number, is_stopped in ((signal.SIGTSTP, True), (signal.SIGCONT, False)):
                os.kill(caller.pid, number)
                await_true(partial(are_stopped, both, is_stopped))
            (tmp_path / "go").touch()
            assert "returned" == caller.stdout.read().strip()
        finally:
            # A stopped process would never end by itself.
            caller.kill()


def are_stopped(processes: list[psutil.Process], expected: bool) -> bool:
    """Return True if the processes are all stopped, or all not stopped, as expected."""
    return all((item.status() == psutil.STATUS_STOPPED) == expected for item in processes)


def await_true(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Return True if a process runs; a zombie does not run."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
