"""Start of Python processes that do not search the working directory for modules.

``python -m`` and ``python -c`` search the working directory before the standard library, and :mod:`multiprocessing`
starts its servers in the same manner: a ``json.py`` in a downloaded folder would run. Independent of the work of the
processes.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
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
from typing import IO, Any

import psutil

from winml.modelkit.errors import InputError
from winml.modelkit.ort.shared_settings import shared_by_threads
from winml.modelkit.registries import search_path

_SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
"""Specified: with this variable, Python 3.11 or later searches neither its working directory nor the folder of its
script. Child processes inherit it.
"""

_RUN = "import sys; sys.path[:] = {path}; import runpy; runpy.run_module({module!r}, None, '__main__', True)"
"""Program of a started process. The path is set before the first import of a file; ``sys`` is built in."""


def module_path() -> list[str]:
    """Return the module search path of this process, without the working directory that Python itself added.

    Entries are absolute, so that they are valid in another working directory. The folder of this package is appended if
    missing.
    """
    entries = [str(Path(entry).absolute()) for entry in search_path()]
    return list(dict.fromkeys((*entries, str(Path(__file__).absolute().parents[3]))))


def start_python(module: str, *arguments: str, **settings: Any) -> subprocess.Popen[Any]:
    """Run a module in a separate process, with the module search path of this process.

    Args:
        module: Dotted name.
        *arguments: Arguments in ``sys.argv``.
        **settings: As for :class:`subprocess.Popen`; the environment is inherited.

    Raises:
        OSError: no process can be started.
    """
    program = _RUN.format(path=ascii(module_path()), module=module)
    environment = {**os.environ, _SAFE_PATH_VARIABLE: "1"}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], env=environment, **settings)  # noqa: S603 - ours


_SOCKET_PATH_BYTES = 103
"""Specified: the longest name of a socket on macOS; Linux allows 107."""


def process_context(preload: Iterable[str]) -> BaseContext:
    """Return a context for processes that are forked from a server.

    On Windows, and if the path of the temporary folder is too long for a socket, processes are spawned instead.

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
    """Call a function in a separate process that ends with this process; start the server if none runs.

    Args:
        context: Context of :func:`process_context`.
        function: An importable function.
        *arguments: Picklable arguments.

    Raises:
        EOFError, ConnectionError: the server ended while importing the preloaded modules.
    """
    process: BaseProcess = context.Process(target=function, args=arguments, daemon=True)  # type: ignore[attr-defined]
    with _exclude_working_directory():
        process.start()
    return process


@shared_by_threads
def _exclude_working_directory() -> Iterator[None]:
    """Make :mod:`multiprocessing` start its servers and processes without the working directory on their path.

    A new process gets the path of this process. Threads share the change.
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
    """Set the variable of the safe path; `None` removes the variable."""
    if value is None:
        os.environ.pop(_SAFE_PATH_VARIABLE, None)
    else:
        os.environ[_SAFE_PATH_VARIABLE] = value


_CHECK_SECONDS = 0.01
"""Time between two checks of memory. Chosen: in it, a process fills some 50 MB."""
_INTERRUPTION_SECONDS = 0.2
"""Time until an interruption is noticed where no memory is checked. Chosen."""
_READY = b"winml: ready\n"
"""First line of a process that has imported all modules."""
_START_SECONDS = 120.0
"""Time for the imports of the module. Chosen: a hundred times the time on an idle machine."""
_END_SECONDS = 10.0
"""Time in which a process ends by itself: a crash may write a core file first. Chosen."""


class ProcessEndedError(Exception):
    """A process ended without an answer."""

    def __init__(self, status: int) -> None:
        """Keep the exit status of the process."""
        super().__init__(status)
        self.status = status


class AnsweringProcess:
    """A separate process that answers questions, one after another; it starts with the first question.

    Its module calls :func:`answer_questions`. Questions and answers are JSON values, so that no foreign object is
    executed here. After an error, the next question starts another process.
    """

    def __init__(
        self, module: str, *, errors: IO[bytes] | int = subprocess.DEVNULL, folder: Path | None = None
    ) -> None:
        """Store the settings; no process starts yet.

        Args:
            module: Dotted name of the module.
            errors: File for the output of the process, as for :class:`subprocess.Popen`.
            folder: Working directory of the process; None: that of this process.
        """
        self._module = module
        self._settings: dict[str, Any] = {"stderr": errors, "cwd": folder}
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def ask(
        self,
        question: object,
        content: bytes = b"",
        *,
        seconds: float = threading.TIMEOUT_MAX,
        resident_bytes: int | None = None,
    ) -> Any:
        """Return the answer to a question; the first question, also after a fork, starts the process.

        Args:
            question: JSON values.
            content: Bytes that the question is about.
            seconds: Time after which the process is ended, its imports not counted.
            resident_bytes: Memory at which the process is ended.

        Raises:
            OSError: no process can be started.
            TimeoutError: it took more time; the text is the limit that it exceeded.
            MemoryError: it took more memory.
            ProcessEndedError: it ended without an answer.
        """
        with self._lock:
            # A forked process has the pipes of its parent.
            if self._process is None or self._owner != os.getpid():
                streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                self._process, self._owner = start_python(self._module, **streams, **self._settings), os.getpid()
                self._send_and_receive(b"", _START_SECONDS, None)
            line = json.dumps([question, len(content)]).encode("ascii")
            return self._send_and_receive(line + b"\n" + content, seconds, resident_bytes)

    def _send_and_receive(self, sent: bytes, seconds: float, resident_bytes: int | None) -> Any:
        """Send a question, and wait for its answer; on any error, the process is ended.

        Args:
            sent: The question; empty: wait for the start of the process.
            seconds: Limit of time.
            resident_bytes: Limit of memory.

        Raises:
            TimeoutError, MemoryError: a limit was exceeded.
            ProcessEndedError: the process ended without an answer.
        """
        assert self._process is not None  # started by the caller
        process, answers, is_start = self._process, list[Any](), not sent

        def exchange() -> None:
            assert process.stdin is not None  # both are pipes
            assert process.stdout is not None
            # It ended before it read all of the question, or what it wrote is no answer.
            with contextlib.suppress(OSError, ValueError):
                process.stdin.write(sent)
                process.stdin.flush()
                # Imported libraries may print until the answers have a stream of their own.
                if is_start and not any(line.endswith(_READY) for line in process.stdout):
                    return
                answers.append(None if is_start else json.loads(process.stdout.readline()))

        exchanging, end = threading.Thread(target=exchange, daemon=True), time.monotonic() + seconds
        exchanging.start()
        try:
            while exchanging.is_alive():
                remaining = end - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError(f"{seconds:g} s")
                if resident_bytes is not None and resident_bytes_of(process.pid) > resident_bytes:
                    raise MemoryError
                # On Windows, Ctrl-C does not interrupt a wait.
                exchanging.join(min(remaining, _INTERRUPTION_SECONDS if resident_bytes is None else _CHECK_SECONDS))
        except BaseException:
            # Also after an interruption: otherwise the next question would get this answer.
            self._end_process(0)
            raise
        if not answers:
            raise ProcessEndedError(self._end_process(_END_SECONDS))
        return answers[0]

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                self._end_process(_END_SECONDS)

    def _end_process(self, seconds: float) -> int:
        """End the process, by force after ``seconds``; return the exit status, which shows an earlier crash."""
        assert self._process is not None
        process, self._process = self._process, None
        try:
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # unsent bytes of a question
                process.stdin.close()
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            assert process.stdout is not None
            process.stdout.close()


def resident_bytes_of(pid: int) -> int:
    """Return the memory of a process; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def answer_questions(answer: Callable[[Any, bytes], object]) -> None:
    """Answer the questions of an :class:`AnsweringProcess` in its process, until its input ends.

    Args:
        answer: Given a question and its bytes, returns JSON values.
    """
    # Both processes get Ctrl-C, and the first ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="ascii", newline="\n")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
    answers.write(_READY.decode("ascii"))
    questions = sys.stdin.buffer
    for line in questions:
        question, size = json.loads(line)
        answers.write(f"{json.dumps(answer(question, questions.read(size)))}\n")


def ask_limited(module: str, question: object, who: str, *, seconds: float, resident_bytes: int) -> Any:
    """Run a module with limits in a separate process; return its answer.

    For foreign text run by Python, such as a template: limits inside a process do not stop all code.

    Args:
        module: Dotted name of the module; see :class:`AnsweringProcess`.
        question: JSON values.
        who: Subject of the messages.
        seconds: Time limit, without the imports.
        resident_bytes: Memory limit.

    Raises:
        InputError: the process exceeded a limit, or ended without an answer.
    """
    process = AnsweringProcess(module)
    try:
        with contextlib.closing(process):
            return process.ask(question, seconds=seconds, resident_bytes=resident_bytes)
    except TimeoutError as error:
        raise InputError(f"{who} took more than {error} and was terminated") from None
    except MemoryError:
        raise InputError(f"{who} used more than {resident_bytes / 1e9:g} GB of memory and was terminated") from None
    except ProcessEndedError:
        raise InputError(f"{who} terminated its process without a result") from None
