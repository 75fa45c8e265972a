"""Trace of a compilation: of the provider, and in a compiled file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from winml.modelkit.metadata_keys import COMPILE_TRACE_KEY
from winml.modelkit.ort.device_trace import (
    CompilationTrace,
    CompiledNode,
    DeviceTrace,
    ModulePlacement,
    read_compilation_trace,
    read_device_trace,
    take_device_trace,
)

ERF = "Operators of type `Erf` are not supported by QNN EP"
# As onnxruntime-qnn 2.7 writes it, shortened.
TRACE = {
    "schema_version": 2,
    "subgraph_traces": [
        {
            "graph_name": "QNNExecutionProvider_1_0",
            "op_mappings": [
                {
                    "dst_name": "/layer/MatMul_token_4",
                    "dst_qnn_op_type": "FullyConnected",
                    "sources": [
                        {"name": "w_DequantizeLinear", "type": "OP"},
                        {"name": "c", "type": "TENSOR"},
                        {"name": "/layer/MatMul", "type": "OP"},
                    ],
                }
            ],
        }
    ],
    "unsupported_nodes": [
        {
            "node_index": 2,
            "node_name": "/layer/Erf",
            "op_type": "Erf",
            "reason": f"{ERF}.Erf node `/layer/Erf` will not be assigned to QNN EP.",
        }
    ],
}


def test_trace_of_qnn_has_source_nodes_and_reasons(tmp_path: Path) -> None:
    """Tensors among the sources are no nodes, and a reason does not repeat its node."""
    (tmp_path / "qnn_op_trace.json").write_text(json.dumps(TRACE))
    operators = {"/layer/MatMul_token_4": ("w_DequantizeLinear", "/layer/MatMul")}
    assert DeviceTrace(operators, {"/layer/Erf": ERF}) == take_device_trace(tmp_path)
    assert DeviceTrace() == read_device_trace(tmp_path), "the next model writes its own trace"


@pytest.mark.parametrize("text", [None, "no JSON", "[]", '{"subgraph_traces": [{}], "unsupported_nodes": []}'])
def test_missing_or_unknown_trace_is_empty(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "qnn_op_trace.json").write_text(text)
    assert DeviceTrace() == read_device_trace(tmp_path)


def test_trace_in_a_file_counts_the_nodes_of_each_module() -> None:
    """Nodes and operators survive the metadata; an operator with the name of its only node is not written."""
    nodes = (
        CompiledNode("/a/MatMul", "MatMul", "/Net/A"),
        CompiledNode("/a/Erf", "Erf", "/Net/A", ERF),
        CompiledNode("/Add", "Add", "/Net", ""),
        CompiledNode("/Add", "Add", "/Net"),  # of another branch
    )
    written = CompilationTrace(nodes, {"/a/MatMul": ("/a/MatMul",), "x": ("/a/MatMul", "/Add")}).as_metadata()
    trace = read_compilation_trace({COMPILE_TRACE_KEY: written})
    assert CompilationTrace(nodes, {"x": ("/a/MatMul", "/Add")}) == trace
    assert trace is not None
    placement = trace.place_modules({"/Net/A": "a", "/Net": ""})
    assert (ModulePlacement("a", 2, 1, {ERF: 1}), ModulePlacement("", 2, 1, {"": 1})) == placement


@pytest.mark.parametrize(
    "text", [None, "{", "[]", '{"modules": {"a": 1}, "operators": {}}', '{"modules": {"a": [["b"]]}, "operators": {}}']
)
def test_missing_or_damaged_trace_in_a_file_is_none(text: str | None) -> None:
    assert read_compilation_trace({} if text is None else {COMPILE_TRACE_KEY: text}) is None
