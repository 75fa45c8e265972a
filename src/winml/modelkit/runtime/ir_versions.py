"""Which version of the ONNX format does ONNX Runtime take?

onnx counts the version up for every new kind of tensor, and ONNX Runtime refuses files with a newer one than it knows
whether they use what is new or not.
"""

from __future__ import annotations

import functools
from pathlib import Path

import onnx
import onnxruntime as ort

from winml.modelkit.graph.files.reading import read_structure
from winml.modelkit.graph.files.wire import varint
from winml.modelkit.runtime.sessions import CPU, ORT_ERRORS, SEVERITY_FATAL

__all__ = ["newest_ir_version", "runnable"]

_IR_VERSION_TAG = bytes([1 << 3])
"""Specified: field 1 of a model, a number."""
_OLDEST = 3
"""Specified: the first with opsets."""


@functools.cache
def newest_ir_version() -> int:
    """Return the newest version of the ONNX format that the installed ONNX Runtime takes, found by asking it."""
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    answer = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "g", [value], [answer])
    opset = onnx.helper.make_opsetid("", 13)
    options = ort.SessionOptions()
    options.log_severity_level = SEVERITY_FATAL
    for version in range(onnx.IR_VERSION, _OLDEST, -1):
        model = onnx.helper.make_model(graph, ir_version=version, opset_imports=[opset])
        try:
            ort.InferenceSession(model.SerializeToString(), sess_options=options, providers=list(CPU))
        except ORT_ERRORS:
            continue
        return version
    return _OLDEST


def runnable(path: Path) -> Path | bytes:
    """Return a file as ONNX Runtime takes it: the file, or its bytes with an older version of the format.

    Raises:
        WinMLError: it cannot be read.
    """
    newest = newest_ir_version()
    if read_structure(path).ir_version <= newest:
        return path
    # Specified: of a number that stands twice, protobuf takes the last.
    return path.read_bytes() + _IR_VERSION_TAG + varint(newest)
