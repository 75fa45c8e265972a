"""Starts every Python process of ours, so that none searches the working directory for modules.

``python -m`` and ``python -c`` search it first, before the standard library, and :mod:`multiprocessing` starts its
servers that way: a ``json.py`` in a downloaded folder would run. Does not know what the processes do.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import util
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from winml.modelkit.errors import InputError
from winml.modelkit.ort.shared_settings import shared_by_threads
from winml.modelkit.registries import search_path

_SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
"""Specified: a process of Python 3.11 or later that has it searches neither its working directory nor the folder of its
script. It is handed on to all that such a process starts."""

_RUN = "import sys; sys.path[:] = {path}; import runpy; runpy.run_module({module!r}, None, '__main__', True)"
"""Program of a started process. The first import of a file comes after the path is set; ``sys`` is none."""


def module_path() -> list[str]:
    """Return where this process searches for modules, without the working directory that Python itself added.

    Entries are absolute, so that they mean the same in another working directory. Last comes where this package was
    found, should that be nowhere else.
    """
    found = [str(Path(entry).absolute()) for entry in search_path()]
    return list(dict.fromkeys((*found, str(Path(__file__).absolute().parents[3]))))


def start_python(module: str, *arguments: str, **settings: Any) -> subprocess.Popen[Any]:
    """Run a module in a process of its own, with the packages that this process finds.

    Args:
        module: Dotted name.
        *arguments: What it finds in ``sys.argv``.
        **settings: As for :class:`subprocess.Popen`; the environment is this process's.

    Raises:
        OSError: no process can be started.
    """
    program = _RUN.format(path=ascii(module_path()), module=module)
    environment = {**os.environ, _SAFE_PATH_VARIABLE: "1"}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], env=environment, **settings)  # noqa: S603 - ours


_SOCKET_PATH_BYTES = 103
"""Specified: the longest name of a socket on macOS; Linux allows 107."""


def process_context(preload: Iterable[str]) -> BaseContext:
    """Return what makes processes that are forked from a server.

    On Windows, and where the name of the temporary folder is too long for a socket in it, they start from nothing.

    Args:
        preload: Modules that the server imports.
    """
    socket = Path(tempfile.gettempdir(), "pymp-12345678", "listener-12345678")
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    if not has_server or len(os.fsencode(socket)) > _SOCKET_PATH_BYTES:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def start_process(context: BaseContext, function: Callable[..., None], *arguments: object) -> BaseProcess:
    """Call a function in a process of its own, which ends with this one; starts the server where none runs.

    Args:
        context: Of :func:`process_context`.
        function: Importable.
        *arguments: Picklable.

    Raises:
        EOFError, ConnectionError: the server ended while it imported what is preloaded.
    """
    process: BaseProcess = context.Process(target=function, args=arguments, daemon=True)  # type: ignore[attr-defined]
    with _working_directory_left_out():
        process.start()
    return process


@shared_by_threads
def _working_directory_left_out() -> Iterator[None]:
    """Let :mod:`multiprocessing` start its servers and processes without the working directory on their path.

    The path of this process is what a new one gets. Threads share the change.
    """
    with contextlib.ExitStack() as put_back:
        put_back.callback(_set_variable, os.environ.get(_SAFE_PATH_VARIABLE))
        _set_variable("1")
        if (path := module_path()) != sys.path:
            put_back.callback(setattr, sys, "path", sys.path)
            sys.path = path
        if sys.version_info < (3, 11):
            # No variable does that there. -I ignores PYTHONPATH as well; processes of the server get the path.
            flags = util._args_from_interpreter_flags  # type: ignore[attr-defined]
            put_back.callback(setattr, util, "_args_from_interpreter_flags", flags)
            util._args_from_interpreter_flags = lambda: [*flags(), "-I"]  # type: ignore[attr-defined]
        yield


def _set_variable(value: str | None) -> None:
    if value is None:
        os.environ.pop(_SAFE_PATH_VARIABLE, None)
    else:
        os.environ[_SAFE_PATH_VARIABLE] = value


_CHECK_SECONDS = 0.01
"""Time between two checks. Chosen: in it, a process fills some 50 MB."""
_START_SECONDS = 120.0
"""Time for the imports of the module. Chosen: a hundred times what a free machine needs."""


def ask_limited(module: str, question: object, who: str, *, seconds: float, resident_bytes: int) -> Any:
    """Return the answer of a module that runs in a separate process.

    For what foreign text makes Python do, such as a template: no limit inside a process holds against all of it. The
    module reads the question from stdin as JSON, writes an empty line once its imports are done, and then its answer as
    JSON.

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


def _answer(process: subprocess.Popen[bytes], question: object, who: str, seconds: float, resident_bytes: int) -> Any:
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
            raise InputError(f"{who} took more than {taken:g} s and was terminated")
        if _resident_bytes(process.pid) > resident_bytes:
            raise InputError(f"{who} used more than {resident_bytes / 1e9:g} GB of memory and was terminated")
        exchanging.join(_CHECK_SECONDS)
    try:
        return json.loads(lines[0])
    except (IndexError, ValueError):
        raise InputError(f"{who} terminated its process without a result") from None


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0  # It has just ended.
