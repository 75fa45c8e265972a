"""Asks a module of ours in a process of its own, which is ended when it takes too much time or memory.

For what foreign text makes Python do, such as a template: no limit inside a process holds against all of it. The module
reads the question from stdin as JSON, writes an empty line once its imports are done, and then its answer as JSON.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from typing import Any

import psutil

from winml.modelkit.errors import InputError
from winml.modelkit.runtime.processes import start_python

__all__ = ["ask_limited"]

_CHECK_SECONDS = 0.01
"""Time between two checks. Chosen: in it, a process fills some 50 MB."""
_START_SECONDS = 120.0
"""Time for the imports of the module. Chosen: a hundred times what a free machine needs."""


def ask_limited(module: str, question: Any, who: str, *, seconds: float, resident_bytes: int) -> Any:
    """Return the answer of a module.

    Args:
        module: Dotted name of the module.
        question: JSON values.
        who: What the module does the work of, for messages.
        seconds: After which it is ended, its imports not counted.
        resident_bytes: Memory at which it is ended.

    Raises:
        InputError: it exceeded a limit, or ended without an answer.
    """
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with start_python(module, **streams) as process:
        try:
            return _answer(process, question, who, seconds, resident_bytes)
        finally:
            process.kill()


def _answer(process: subprocess.Popen[bytes], question: Any, who: str, seconds: float, resident_bytes: int) -> Any:
    is_ready, lines = threading.Event(), list[bytes]()

    def exchange() -> None:
        assert process.stdin is not None  # both are pipes
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode("ascii"))
            process.stdin.close()
            process.stdout.readline()
            is_ready.set()
            lines.append(process.stdout.readline())
        except OSError:
            pass  # It ended before it read all of the question: there is no answer.

    exchanging = threading.Thread(target=exchange, daemon=True)
    exchanging.start()
    limit, end = seconds, time.monotonic() + _START_SECONDS
    is_timed = False
    while exchanging.is_alive():
        if is_ready.is_set() and not is_timed:
            is_timed, end = True, time.monotonic() + seconds
        if time.monotonic() > end:
            taken = limit if is_timed else _START_SECONDS
            raise InputError(f"{who} takes more than {taken:g} s, and was ended")
        if _resident_bytes(process.pid) > resident_bytes:
            raise InputError(f"{who} takes more than {resident_bytes / 1e9:g} GB of memory, and was ended")
        exchanging.join(_CHECK_SECONDS)
    try:
        return json.loads(lines[0])
    except (IndexError, ValueError):
        raise InputError(f"{who} ended its process without an answer") from None


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0  # It has just ended.
