"""Finds the newest ONNX IR version that the installed ONNX Runtime loads, and lowers newer files to it.

onnx raises the IR version for every new tensor type. ONNX Runtime refuses files with a newer version than it knows,
whether or not they use the new types.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnxruntime as ort

from winml.modelkit.onnx.files.reading import read_referring, read_structure
from winml.modelkit.onnx.files.wire_format import varint
from winml.modelkit.ort.host import saturates_integer_sums
from winml.modelkit.ort.plug_ins import ORT_ERRORS
from winml.modelkit.ort.session_settings import SEVERITY_FATAL
from winml.modelkit.ort.sessions import CPU, Session

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


def open_with_outputs(
    path: Path, names: Sequence[str], providers: Sequence[str] = CPU, provider_options: Mapping[str, str] = {}
) -> Session:
    """Open a file with more outputs than it has, to be run node by node as it is written.

    The file is not changed, and weights are mapped wherever they lie.

    Args:
        path: An ONNX file, its data beside it.
        names: Values of the main graph that are not outputs already.
        providers: Execution providers, the preferred one first.
        provider_options: Options of the preferred one.

    Raises:
        ModelPathError: the file cannot be read.
        InputError: it, or a data file it names, is damaged or missing.
        StageError: ONNX Runtime cannot load the graph.
    """
    file = path.resolve()  # data lies beside the file that a link leads to
    model = read_referring(file)
    model.ir_version = min(model.ir_version, newest_ir_version())
    for name in names:
        # ONNX Runtime infers the type.
        model.graph.output.add().name = name
    # Integer products saturate on some processors, unless the graph is optimized.
    optimize = saturates_integer_sums() and any("Integer" in node.op_type for node in model.graph.node)
    return Session(
        model.SerializeToString(),
        name=str(path),
        source=file,
        optimize=optimize,
        data_folder=file.parent,
        providers=providers,
        provider_options=provider_options,
    )
