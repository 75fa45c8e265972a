"""Starts every Python process of ours, so that none searches the working directory for modules.

``python -m`` and ``python -c`` search it first, before the standard library, and :mod:`multiprocessing` starts its
servers that way: a ``json.py`` in a downloaded folder would run. Does not know what the processes do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import util
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from winml.modelkit.runtime.shared_settings import shared_by_threads

__all__ = ["SAFE_PATH_VARIABLE", "module_path", "process_context", "start_process", "start_python"]

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
"""Specified: a process of Python 3.11 or later that has it searches neither its working directory nor the folder of its
script. It is handed on to all that such a process starts."""

_RUN = "import sys; sys.path[:] = {path}; import runpy; runpy.run_module({module!r}, None, '__main__', True)"
"""Program of a started process. The first import of a file comes after the path is set; ``sys`` is none."""


def module_path() -> list[str]:
    """Return where this process searches for modules, without the working directory that Python itself put there.

    Entries are absolute, so that they mean the same in another working directory. Last comes where this package was
    found, should that be nowhere else.
    """
    found = [str(Path(entry).absolute()) for entry in sys.path if entry not in ("", os.curdir)]
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
    environment = {**os.environ, SAFE_PATH_VARIABLE: "1"}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], env=environment, **settings)  # noqa: S603 - ours


def process_context(preload: Iterable[str]) -> BaseContext:
    """Return what makes processes that are forked from a server (Windows: started from nothing).

    Args:
        preload: Modules that the server imports.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def start_process(context: BaseContext, function: Callable[..., None], *arguments: Any) -> BaseProcess:
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
        put_back.callback(_set_variable, os.environ.get(SAFE_PATH_VARIABLE))
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
        os.environ.pop(SAFE_PATH_VARIABLE, None)
    else:
        os.environ[SAFE_PATH_VARIABLE] = value
