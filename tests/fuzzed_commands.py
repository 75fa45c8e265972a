"""Runs commands in a process with bounds on time and memory, and reports their exit codes.

For the tests that damage files: a crash, a hang or excessive memory ends that process and not the tests.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MEMORY_BYTES = 8 << 30
"""Address space of the process: libraries alone reserve about half of it."""
SECONDS = 60.0
"""Time limit of one command. Chosen far above the usual times, so that a busy machine is no hang."""

EXPECTED_CODES = frozenset({0, 1, 2, 3})


@dataclass(frozen=True)
class Ending:
    """Exit code and error text of a command."""

    code: int | None
    """Exit code; None if the process crashed or was ended for its time."""
    stderr: str

    @property
    def is_foreseen(self) -> bool:
        """True if a damaged file may lead to the exit code, and stderr shows no traceback."""
        return self.code in EXPECTED_CODES and "internal error" not in self.stderr and "Traceback" not in self.stderr


class CommandProcess:
    """A process that runs several commands in sequence."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def run(self, *arguments: str, seconds: float = SECONDS) -> Ending:
        """Run ``winml`` with the arguments and return its exit code and error text."""
        process = self._started()
        assert process.stdin is not None
        process.stdin.write(json.dumps(arguments) + "\n")
        process.stdin.flush()
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            self.close()
            return Ending(None, f"still running after {seconds} seconds")
        if not line:
            code = process.wait()
            self.close()
            return Ending(None, f"crashed: {code}")
        return Ending(**json.loads(line))

    def close(self) -> None:
        """End the process, if one runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
            )
            self._answers = queue.Queue()
            threading.Thread(target=_read_answers, args=(self._process, self._answers), daemon=True).start()
        return self._process


def _read_answers(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    """Forward each line of output, and an empty line when the process has ended."""
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # closed meanwhile
        for line in process.stdout:
            answers.put(line)
    answers.put("")


def _run(arguments: Sequence[str]) -> Ending:
    from winml.modelkit.cli.main import main

    # Streams with a file below them: libraries write to descriptors.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            try:
                main(list(arguments))
                code = 0
            except SystemExit as leave:
                code = leave.code if isinstance(leave.code, int) else 1
        said.seek(0)
        return Ending(code, said.read()[-4000:])


def _serve() -> None:
    with contextlib.suppress(ImportError):  # Windows has no such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Text that a library writes to descriptor 1 is no answer.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.chdir(tempfile.gettempdir())
    for line in sys.stdin:
        ending = _run(json.loads(line))
        answers.write(json.dumps({"code": ending.code, "stderr": ending.stderr}) + "\n")
        answers.flush()


if __name__ == "__main__":
    from resting_threads import rest_where_cores_are_shared

    rest_where_cores_are_shared()
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    _serve()
