"""Finds the newest ONNX IR version that the installed ONNX Runtime loads, and lowers newer files to it.

onnx raises the IR version for every new tensor type. ONNX Runtime refuses files with a newer version than it knows,
whether or not they use the new types.
"""

from __future__ import annotations

import functools
from pathlib import Path

import onnx
import onnxruntime as ort

from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.onnx.files.wire_format import varint
from winml.modelkit.ort.plug_ins import ORT_ERRORS
from winml.modelkit.ort.session_settings import SEVERITY_FATAL
from winml.modelkit.ort.sessions import CPU

_IR_VERSION_TAG = bytes([1 << 3])
"""Specified: tag of field 1 of a model, a varint."""
_OLDEST = 3
"""Specified: the first with opsets."""


@functools.cache
def newest_ir_version() -> int:
    """Return the newest IR version that the installed ONNX Runtime loads, found by loading small models."""
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "g", [value], [output])
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
    """Return what ONNX Runtime can load: the path, or the bytes of the file with a lower IR version.

    Raises:
        WinMLError: the file cannot be read.
    """
    newest = newest_ir_version()
    if read_structure(path).ir_version <= newest:
        return path
    # Specified: where a scalar field occurs twice, protobuf uses the last.
    return path.read_bytes() + _IR_VERSION_TAG + varint(newest)
