"""Check of models that may crash ONNX Runtime, in a separate process.

A crash of ONNX Runtime ends the process that opens the model, without an exception. ONNX Runtime 1.31 crashes in graph
optimization of some float16 graphs on the CPU provider, so models with 16-bit floats are opened in a second process
first. Other models are not checked, because a second load has no benefit. The second process starts with the
first checked model, and serves all later models. Why: docs/decisions/0028-crash-check.md.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
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
from winml.modelkit.ort.processes import AnsweringProcess, ProcessEndedError, answer_questions
from winml.modelkit.ort.session_settings import SessionSettings

_WINDOWS_CRASH = 0xC0000000
"""Specified: exit codes of a Windows process from this value on are exceptions of the processor or the system."""


def refuse_crashing_model(
    model: str | bytes, settings: SessionSettings, name: str, weights: Mapping[str, ort.OrtValue] = {}
) -> None:
    """Refuse a model whose opening on the CPU provider crashes ONNX Runtime.

    No check is made if no process can be started.

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
        status = _crash_status(question, model)
    else:
        file = Path(model).stat()
        key = (os.path.realpath(model), file.st_size, file.st_mtime_ns, json.dumps(question))
        if key in _CHECKED:
            return
        status = _crash_status({**question, "model": os.path.abspath(model)})  # noqa: PTH100 - keeps ".." as it is
        if status is None:
            _CHECKED.add(key)
    if status is not None:
        raise StageError(
            f"ONNX Runtime {ort.__version__} crashes while it opens {name} ({_crash_words(status)})",
            hint="Use the float32 model instead, or a different version of ONNX Runtime.",
        )


_CHECKED: set[tuple[object, ...]] = set()
"""Files that were opened without a crash: path, size, time of modification and settings."""


def _crash_status(question: Mapping[str, object], content: bytes = b"") -> int | None:
    """Open a model in the separate process; return the exit status of a crash, `None` without a crash."""
    try:
        _PROCESS.ask(question, content)
    except ProcessEndedError as error:
        return error.status
    except OSError:
        pass  # No process can be started: there is no check.
    return None


def _crash_words(status: int) -> str:
    """Name the signal or exit code of a crash."""
    if status < 0:
        try:
            return signal.Signals(-status).name
        except ValueError:
            return f"signal {-status}"
    return f"exit code {status:#x}" if status >= _WINDOWS_CRASH else f"exit code {status}"


def _type_and_shape(value: ort.OrtValue) -> tuple[str, list[int]]:
    array = to_array(value)
    return array.dtype.name, list(array.shape)


_PROCESS = AnsweringProcess(__name__)
"""Opens models first, in a separate process."""
atexit.register(_PROCESS.close)


def _open_model(question: Mapping[str, Any], content: bytes) -> None:
    """Open a model; runs in the separate process."""
    options, weights = SessionSettings(**question["settings"]).options(), question["weights"]
    values = [to_ort_value(np.zeros(shape, getattr(ml_dtypes, dtype, dtype))) for dtype, shape in weights.values()]
    if values:
        options.add_external_initializers(list(weights), values)
    # The first process states the reason of an error.
    with contextlib.suppress(*ORT_ERRORS, MemoryError):
        ort.InferenceSession(
            content or question["model"], sess_options=options, providers=["CPUExecutionProvider"], enable_fallback=0
        )


if __name__ == "__main__":
    answer_questions(_open_model)
