"""What does a graph answer to these values?

The one place that opens ONNX Runtime sessions. Takes and gives numpy arrays, ``ml_dtypes.bfloat16`` included, which
ONNX Runtime's own numpy interface does not know. Compares nothing.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from winml.modelkit.errors import StageError, UsageError, first_line

__all__ = ["Session", "run_onnx"]

# What the environment variable set beside this module does not reach: traces of older versions on Windows.
ort.disable_telemetry_events()

Array = NDArray[Any]

CPU = ("CPUExecutionProvider",)

_ONNX_BFLOAT16 = 16
"""Specified: ``TensorProto.BFLOAT16``."""
_SEVERITY_FATAL = 4
"""ONNX Runtime's warnings are for people who tune it; errors come back as exceptions."""

_ORT_ERRORS: tuple[type[Exception], ...] = (
    # They share no base class; the binding itself raises RuntimeError and ValueError.
    *(value for value in vars(ort_errors).values() if isinstance(value, type) and issubclass(value, Exception)),
    RuntimeError,
    ValueError,
)


class Session:
    """A graph that is ready to answer, any number of times."""

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes,
        *,
        providers: Sequence[str] = CPU,
        optimize: bool = True,
    ) -> None:
        """Load a graph.

        Args:
            model: Path of an ``.onnx`` file, or its bytes.
            providers: Execution providers, the preferred one first.
            optimize: Let ONNX Runtime rewrite the graph first; False runs it as written, node by node.

        Raises:
            UsageError: a provider is not part of the installed ONNX Runtime.
            StageError: ONNX Runtime cannot load the graph; names the file and its reason.
        """
        self.name = "the model in memory" if isinstance(model, bytes) else os.fspath(model)
        if unknown := [name for name in providers if name not in ort.get_available_providers()]:
            raise UsageError(
                f"execution provider {unknown[0]} is not part of the installed ONNX Runtime",
                hint=f"Available: {', '.join(ort.get_available_providers())}.",
            )
        options = ort.SessionOptions()
        options.log_severity_level = _SEVERITY_FATAL
        level = ort.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
        try:
            source = model if isinstance(model, bytes) else os.fspath(model)
            self._session = ort.InferenceSession(source, sess_options=options, providers=list(providers))
        except _ORT_ERRORS as error:
            raise StageError(f"ONNX Runtime cannot load {self.name}: {_reason(error)}") from error
        self.inputs: dict[str, str] = {value.name: value.type for value in self._session.get_inputs()}
        """Input names, in order, and their types in ONNX Runtime's words (``tensor(float)``)."""
        self.outputs: tuple[str, ...] = tuple(value.name for value in self._session.get_outputs())
        """Output names, in order."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Answer one set of values.

        Args:
            feeds: One array per graph input, of its shape and dtype.

        Returns:
            One array per graph output, in their order.

        Raises:
            UsageError: the names are not those of the graph's inputs.
            StageError: ONNX Runtime refuses the values, or fails; gives its reason.
        """
        if set(feeds) != set(self.inputs):
            raise UsageError(
                f"{self.name} takes {', '.join(self.inputs) or 'no inputs'}; got {', '.join(feeds) or 'none'}"
            )
        try:
            values = {name: _to_ort(array) for name, array in feeds.items()}
            answers = self._session.run_with_ort_values(None, values)
            return {name: _to_numpy(answer) for name, answer in zip(self.outputs, answers, strict=True)}
        except _ORT_ERRORS as error:
            raise StageError(f"ONNX Runtime cannot run {self.name}: {_reason(error)}") from error


def run_onnx(
    model: str | os.PathLike[str] | bytes,
    feeds: Mapping[str, Array],
    *,
    providers: Sequence[str] = CPU,
    optimize: bool = True,
) -> dict[str, Array]:
    """Load a graph and answer one set of values; see :class:`Session` for arguments and errors."""
    return Session(model, providers=providers, optimize=optimize).run(feeds)


def _to_ort(array: Array) -> ort.OrtValue:
    # ONNX Runtime reads the buffer as it lies, and takes a scalar only as an array of rank 0.
    array = np.asarray(array, order="C")
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _ONNX_BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def _to_numpy(value: ort.OrtValue) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        array: Array = value.numpy()
        return array
    shape = value.shape()
    # Copied, since the memory goes with the value.
    data = bytearray(ctypes.string_at(value.data_ptr(), math.prod(shape) * 2))
    return np.frombuffer(data, dtype=ml_dtypes.bfloat16).reshape(shape)


def _reason(error: Exception) -> str:
    # "[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Load model from ... failed": the first three parts are for programs.
    return first_line(error).rpartition("[ONNXRuntimeError] : ")[2].split(" : ", 2)[-1]
