"""Opens models that may crash ONNX Runtime in a process of its own first.

A crash of ONNX Runtime ends the process that opens the model, without an exception. ONNX Runtime 1.31 crashes in graph
optimization of some float16 graphs on the CPU provider, so models with 16-bit floats are opened in a second process
before this one opens them. Other models are not: they would be loaded twice for nothing. The second process starts with
the first such model and serves all later ones. Why: docs/decisions/0028-crash-check.md.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort

from winml.modelkit.errors import StageError
from winml.modelkit.ort.ort_values import to_array, to_ort_value
from winml.modelkit.ort.plug_ins import ORT_ERRORS
from winml.modelkit.ort.processes import start_python
from winml.modelkit.ort.session_settings import SessionSettings

_WINDOWS_CRASH = 0xC0000000
"""Specified: exit codes of a Windows process from this value on are exceptions of the processor or the system."""


def refuse_crashing_model(
    model: str | bytes, settings: SessionSettings, name: str, weights: Mapping[str, ort.OrtValue] = {}
) -> None:
    """Refuse a model whose opening on the CPU provider crashes ONNX Runtime.

    Nothing is checked if no process can be started.

    Args:
        model: Path of an ONNX file, or its bytes.
        settings: Settings of the session.
        name: The model, for messages.
        weights: Values of initializers of a model in memory; the check uses zeros of their types and shapes.

    Raises:
        StageError: ONNX Runtime crashes.
    """
    question: dict[str, object] = {
        "settings": asdict(settings),
        "weights": {key: _type_and_shape(value) for key, value in weights.items()},
    }
    if isinstance(model, bytes):
        status = _PROCESS.ask({**question, "size": len(model)}, model)
    else:
        file = Path(model).stat()
        key = (os.path.realpath(model), file.st_size, file.st_mtime_ns, json.dumps(question))
        if key in _CHECKED:
            return
        status = _PROCESS.ask({**question, "model": os.path.abspath(model)})  # noqa: PTH100 - keeps ".." as it is
        if status is None:
            _CHECKED.add(key)
    if status is not None:
        raise StageError(
            f"ONNX Runtime {ort.__version__} crashes while it opens {name} ({_crash_words(status)})",
            hint="Use the float32 model instead, or a different version of ONNX Runtime.",
        )


_CHECKED: set[tuple[object, ...]] = set()
"""Files that were opened without a crash: path, size, time of modification and settings."""


def _crash_words(status: int) -> str:
    if status < 0:
        try:
            return signal.Signals(-status).name
        except ValueError:
            return f"signal {-status}"
    return f"exit code {status:#x}" if status >= _WINDOWS_CRASH else f"exit code {status}"


def _type_and_shape(value: ort.OrtValue) -> tuple[str, list[int]]:
    array = to_array(value)
    return array.dtype.name, list(array.shape)


class _OpeningProcess:
    """The process that opens models first; started on demand, and again after a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def ask(self, question: Mapping[str, object], content: bytes = b"") -> int | None:
        """Open a model in the process.

        Args:
            question: JSON values.
            content: Bytes of a model in memory.

        Returns:
            Exit status of the process if it crashed; None otherwise.
        """
        with self._lock:
            try:
                process = self._running()
            except OSError:
                return None  # No process can be started: there is no check.
            assert process.stdin is not None  # both are pipes
            assert process.stdout is not None
            has_answered = False
            try:
                process.stdin.write(json.dumps(question).encode("ascii") + b"\n" + content)
                process.stdin.flush()
                has_answered = bool(process.stdout.readline())
            except OSError:
                pass  # It ended before it read all of the question.
            finally:
                # Also after an interruption: the next question would get the answer to this one.
                if not has_answered:
                    status = self._end()
            return None if has_answered else status

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        # A forked process has the pipes of its parent.
        if self._process is None or self._owner != os.getpid():
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process, self._owner = start_python(__name__, **streams), os.getpid()
        return self._process

    def _end(self) -> int:
        """End the process; return its exit status, that of the crash if there was one."""
        assert self._process is not None
        process, self._process = self._process, None
        for stream in (process.stdin, process.stdout):
            assert stream is not None  # both are pipes
            with contextlib.suppress(OSError):  # unsent bytes of a question
                stream.close()
        try:
            return process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


_END_SECONDS = 10.0
"""Time in which the process ends by itself: a crash may write a core file first. Chosen."""

_PROCESS = _OpeningProcess()
atexit.register(_PROCESS.close)


def main() -> None:
    """Open one model after another, as standard input requests, and write a line for each that did not crash."""
    # Both processes get Ctrl-C, and the first ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
    questions = sys.stdin.buffer
    for line in questions:
        question = json.loads(line)
        model = questions.read(question["size"]) if "size" in question else question["model"]
        _open(model, SessionSettings(**question["settings"]), question["weights"])
        answers.write(b"\n")
        answers.flush()


def _open(model: str | bytes, settings: SessionSettings, weights: Mapping[str, Any]) -> None:
    options = settings.options()
    values = [to_ort_value(np.zeros(shape, getattr(ml_dtypes, dtype, dtype))) for dtype, shape in weights.values()]
    if values:
        options.add_external_initializers(list(weights), values)
    # The first process states the reason of an error.
    with contextlib.suppress(*ORT_ERRORS, MemoryError):
        ort.InferenceSession(model, sess_options=options, providers=["CPUExecutionProvider"], enable_fallback=0)


if __name__ == "__main__":
    main()
