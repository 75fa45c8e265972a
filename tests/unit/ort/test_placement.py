"""Nodes that a provider runs, by a session and by the log of QNN's provider."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from winml.modelkit.errors import StageError
from winml.modelkit.ort.devices import choose_provider
from winml.modelkit.ort.kernels import (
    NO_KERNEL,
    SIZES_ON_CPU,
    AssignedNode,
    CopiedValue,
    ask_onnxruntime,
    copies_in_log,
    find_assignment,
    read_placement,
    reasons_in_log,
    reports_placement,
)

LOG = """[W:onnxruntime:, qnn_execution_provider.cc:900 GetSupportedNodes] Validation FAILED for 2 nodes:
\tOperator type: Erf Node name: /act/Erf Node index: 4 Input shape: [2,3]
\tOperator type: Mul Node name: /act/Mul Node index: 5
\tREASON : QNN does not support this data type
another line
\tOperator type: Add Node name: /add Node index: 6
something in between
\tREASON : of nothing
"""


@pytest.mark.skipif(not reports_placement(), reason="ONNX Runtime before 1.24 does not tell which provider gets a node")
def test_cpu_session_assigns_each_node(tmp_path: Path) -> None:
    """Names, operators and domain are those of the file.

    A graph that cannot be opened is a problem in the session's words.
    """
    for operator in ("Erf", "Tanh"):
        nodes = [
            helper.make_node("Relu", ["x"], ["h"], name="/first"),
            helper.make_node(operator, ["h"], ["y"], name="/second"),
        ]
        dtype = TensorProto.FLOAT if operator == "Tanh" else TensorProto.DOUBLE
        values = [helper.make_tensor_value_info(name, dtype, [2]) for name in "xy"]
        graph = helper.make_graph(nodes, "net", values[:1], values[1:])
        opsets = [helper.make_opsetid("", 17)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / f"{operator}.onnx")
    cpu = choose_provider("cpu", None, {})
    found = find_assignment(tmp_path / "Tanh.onnx", cpu)
    assert {("/first", "Relu", True), ("/second", "Tanh", True)} == {
        (node.name, node.op_type, node.is_assigned) for node in found.nodes
    }
    failed = find_assignment(tmp_path / "Erf.onnx", cpu)
    assert ((), True) == (failed.nodes, "Erf" in failed.problem)


def test_assignment_and_log_are_read_by_provider_and_node() -> None:
    """A reason applies to the nodes named just above it; a line in between ends the group."""
    told = {"assigned": [["QNNExecutionProvider", "/add", "Add", ""], ["CPUExecutionProvider", "/act/Erf", "Erf", ""]]}
    read = read_placement("QNNExecutionProvider", told, reasons_in_log(LOG.splitlines(keepends=True)))
    assert (AssignedNode("/add", "Add", "", True), AssignedNode("/act/Erf", "Erf", "", False)) == read.nodes
    assert dict.fromkeys(("/act/Erf", "/act/Mul"), "QNN does not support this data type") == read.reasons
    assert "no device" == read_placement("QNNExecutionProvider", {"problem": "no device"}, {}).problem


KERNEL_LOG = """[I:onnxruntime:, ep.cc:91 GetCapabilityImpl] webgpu kernel not found in registries for Op type: Cast node name: /a/Cast
[I] EP optimization: Force fallback to CPU execution for node /a/Mul because the CPU execution path is deemed faster than
[I:onnxruntime:, transformer_memcpy.cc:393 AddCopyNode] Add MemcpyFromHost after /a/row for WebGpuExecutionProvider
[I:onnxruntime:, transformer_memcpy.cc:393 AddCopyNode] Add MemcpyToHost before /a/count for WebGpuExecutionProvider
"""  # noqa: E501 - as ONNX Runtime writes it


def test_log_of_a_provider_with_kernels_states_reasons_and_copies() -> None:
    lines = KERNEL_LOG.splitlines(keepends=True)
    assert {"/a/Cast": NO_KERNEL, "/a/Mul": SIZES_ON_CPU} == reasons_in_log(lines)
    read = read_placement("WebGpuExecutionProvider", {"assigned": [], "copies": copies_in_log(lines)}, {})
    assert (CopiedValue("/a/row", to_device=True), CopiedValue("/a/count", to_device=False)) == read.copies


def test_ended_or_hanging_process_is_reported() -> None:
    """Without an answer the kernels are unknown, which is not the same as no kernels."""
    with pytest.raises(StageError, match="terminated its") as caught:
        ask_onnxruntime({}, "Someone", 60)
    assert "KeyError" in caught.value.hint
    question = {"kernels_of": "CPUExecutionProvider"}
    with pytest.raises(StageError, match=r"0.01 s"):
        ask_onnxruntime(question, "Someone", 0.01)
