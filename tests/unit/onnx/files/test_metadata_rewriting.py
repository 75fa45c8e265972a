"""Replacement of metadata without other changes of a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import graphs
from winml.modelkit.errors import InternalError
from winml.modelkit.onnx.files.writing import rewrite_metadata, write_model

TEXT = """agraph (float[2] x, bool c) => (float[2] z) <float[2] w = {1, 2}> {
    y = If (c) <
        then_branch = g () => (float[2] p) { u = Relu(x)  p = Neg(u) },
        else_branch = h () => (float[2] q) { q = Abs(x) }
    >
    f = mine.Block(y)
    z = Add(f, w)
}"""
FUNCTION = """<domain: "mine", opset_import: ["" : 17]>
Block (v) => (s) { t = Relu(v)  s = Neg(t) }"""
NODES = ("If", "Relu", "Neg", "Abs", "Block", "Add")
FUNCTION_NODES = ("Relu", "Neg")


def small_model() -> ir.Model:
    """Build a model with branches and a function."""
    model = graphs.parse(TEXT, functions=FUNCTION, domains=', "mine" : 1')
    model.metadata_props["old"] = "1"
    return model


def entries(kind: str, op_types: tuple[str, ...]) -> list[dict[str, str]]:
    """Return metadata with the operator of its node."""
    return [{"for": f"{kind} {op_type}"} for op_type in op_types]


def stripped(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model without metadata on model and nodes."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    copy.ClearField("metadata_props")
    waiting = [*copy.graph.node, *(node for function in copy.functions for node in function.node)]
    while waiting:
        node = waiting.pop()
        node.ClearField("metadata_props")
        waiting += [inner for attribute in node.attribute for inner in attribute.g.node]
    return copy


@pytest.mark.parametrize("writer", ["ours", "protobuf"])
def test_rewrite_metadata_reaches_every_node_only(writer: str, tmp_path: Path) -> None:
    """Nodes of branches and of functions get theirs, however the fields of the file are ordered."""
    source, target = tmp_path / "source.onnx", tmp_path / "target.onnx"
    if writer == "ours":
        write_model(small_model(), source)
    else:
        source.write_bytes(ir.to_proto(small_model()).SerializeToString())
    rewrite_metadata(source, target, {"new": "2"}, entries("node", NODES), entries("function", FUNCTION_NODES))
    rewritten = onnx.load(target)
    assert [("new", "2")] == [(entry.key, entry.value) for entry in rewritten.metadata_props]
    model = ir.load(target)
    assert [f"node {op_type}" for op_type in NODES] == [node.metadata_props["for"] for node in model.graph.all_nodes()]
    (function,) = model.functions.values()
    assert [f"function {op_type}" for op_type in FUNCTION_NODES] == [node.metadata_props["for"] for node in function]
    assert stripped(onnx.load(source)) == stripped(rewritten)


def test_rewrite_metadata_copies_unknown_fields(tmp_path: Path) -> None:
    """Fields of a later version of the format, at any level, and large values are copied byte by byte."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [5000]) for name in "xy")
    weight = numpy_helper.from_array(np.arange(5000, dtype=np.float32), "w")
    node = helper.make_node("Add", ["x", "w"], ["y"])
    unknown = bytes([*b"\xc2\x3e", 3]) + b"new"  # field 1000, three bytes
    node = onnx.NodeProto.FromString(node.SerializeToString() + unknown)
    model = helper.make_model(helper.make_graph([node], "graph", [x], [y], [weight]))
    source, target = tmp_path / "source.onnx", tmp_path / "target.onnx"
    source.write_bytes(model.SerializeToString() + unknown)
    rewrite_metadata(source, target, {}, [{}])
    assert source.read_bytes() == target.read_bytes()


@pytest.mark.parametrize("given", [1, 7])
def test_rewrite_metadata_of_another_number_of_nodes_is_our_mistake(given: int, tmp_path: Path) -> None:
    """Too few or too many entries never end up on the wrong nodes."""
    source = tmp_path / "source.onnx"
    write_model(small_model(), source)
    with pytest.raises(InternalError, match="than metadata"):
        rewrite_metadata(source, tmp_path / "target.onnx", {}, [{}] * given, [{}, {}])
