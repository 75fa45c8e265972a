"""Sensitivity of a fingerprint to structure, and to nothing else."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
from hypothesis import given
from hypothesis import strategies as st

from winml.modelkit.onnx.files.writing import write_model
from winml.modelkit.onnx.fingerprint import fingerprint
from winml.modelkit.onnx.stage import all_nodes

UNARY = ("Relu", "Neg", "Abs", "Tanh")
BINARY = ("Add", "Mul", "Sub")


@st.composite
def models(draw: st.DrawFn) -> ir.Model:
    """Random graphs of element-wise operators, weights, attributes, a branch and a function."""
    size = draw(st.integers(1, 5))
    x = ir.val("x", ir.DataType.FLOAT, ir.Shape(["batch", size]))
    weights = [
        ir.val(f"w{number}", const_value=ir.tensor(np.full((1, size), number, np.float32), name=f"w{number}"))
        for number in range(draw(st.integers(1, 3)))
    ]
    values = [x, *weights]
    nodes: list[ir.Node] = []

    def add(op_type: str, count: int, domain: str = "", **attributes: object) -> None:
        inputs = [draw(st.sampled_from(values)) for _ in range(count)]
        output = ir.val(f"v{len(nodes)}", ir.DataType.FLOAT, ir.Shape(["batch", size]))
        node = ir.node(op_type, inputs, attributes=attributes, domain=domain, outputs=[output], name=f"n{len(nodes)}")
        nodes.append(node)
        values.append(output)

    for _ in range(draw(st.integers(1, 5))):
        add(draw(st.sampled_from(UNARY)), 1)
        add(draw(st.sampled_from(BINARY)), 2)
    add("LeakyRelu", 1, alpha=draw(st.floats(0.1, 0.9)))
    add("Twice", 1, domain="ours")
    condition = ir.val("c", ir.DataType.BOOL, ir.Shape([]))
    add("If", 0)
    nodes[-1].resize_inputs(1)
    nodes[-1].replace_input_with(0, condition)
    for side in ("then_branch", "else_branch"):
        inner = ir.node(draw(st.sampled_from(UNARY)), [draw(st.sampled_from(values[:-1]))], name=f"{side}/n")
        inner.outputs[0].name = f"{side}/v"
        graph = ir.Graph([], inner.outputs, nodes=[inner], name=side)
        nodes[-1].attributes[side] = ir.AttrGraph(side, graph)
    graph = ir.Graph(
        [x, condition], [values[-1]], nodes=nodes, initializers=weights, name="g", opset_imports={"": 17, "ours": 1}
    )
    a = ir.val("a")
    body = ir.node("Add", [a, a])
    body.outputs[0].name = "b"
    inner_graph = ir.Graph([a], body.outputs, nodes=[body], opset_imports={"": 17})
    twice = ir.Function("ours", "Twice", graph=inner_graph, attributes=[])
    return ir.Model(graph, ir_version=10, functions=[twice])


@given(models(), st.randoms(use_true_random=False))
def test_fingerprint_ignores_names_weights_metadata_and_order_of_initializers(model: ir.Model, random: object) -> None:
    """Names of inner values and nodes, weights, metadata and the order of weights do not change the fingerprint."""
    before = fingerprint(model)
    for number, node in enumerate(all_nodes(model)):
        node.name = f"renamed {number}"
        node.doc_string = "words"
        node.metadata_props["winml.hierarchy.tag"] = f"/M{number}"
        for value in node.outputs:
            if not value.is_graph_output():
                value.name = f"value {number}"
    initializers = list(model.graph.initializers.values())
    for value in initializers:
        value.name = f"{value.name} renamed"
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy() + 1, name=value.name)
    model.graph.initializers.clear()
    for value in reversed(initializers):
        model.graph.register_initializer(value)
    model.metadata_props["winml.model"] = "other"
    assert before == fingerprint(model)


@given(models())
def test_fingerprint_survives_a_save(model: ir.Model) -> None:
    """A model has the same fingerprint after it is written and read."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(model, Path(folder) / "model.onnx")
        assert fingerprint(model) == fingerprint(ir.load(Path(folder) / "model.onnx"))


def _operator(node: ir.Node) -> None:
    node.op_type = "Sigmoid"


def _attribute(node: ir.Node) -> None:
    node.attributes["extra"] = ir.AttrInt64("extra", 1)


def _edge(node: ir.Node) -> None:
    node.replace_input_with(0, ir.val("elsewhere", ir.DataType.FLOAT, ir.Shape([7])))


def _shape(node: ir.Node) -> None:
    node.outputs[0].shape = ir.Shape([9, 9])


def _type(node: ir.Node) -> None:
    node.outputs[0].dtype = ir.DataType.DOUBLE


CHANGES: tuple[Callable[[ir.Node], None], ...] = (_operator, _attribute, _edge, _shape, _type)


@given(models(), st.sampled_from(CHANGES), st.data())
def test_fingerprint_sees_every_change_of_a_node(
    model: ir.Model, change: Callable[[ir.Node], None], data: st.DataObject
) -> None:
    """Operator, attribute, edge, shape and type count, in branches and functions too."""
    before = fingerprint(model)
    change(data.draw(st.sampled_from(list(all_nodes(model)))))
    assert before != fingerprint(model)


@given(models())
def test_fingerprint_sees_names_of_outputs_opsets_and_operands(model: ir.Model) -> None:
    """Output names, opset versions and constant operands change the fingerprint."""
    seen = {fingerprint(model)}
    model.graph.outputs[0].name = "other"
    seen.add(fingerprint(model))
    model.graph.opset_imports[""] = 18
    seen.add(fingerprint(model))
    first = model.graph[0]
    for operand in (0, 1):
        axes = ir.val("axes", const_value=ir.tensor(np.array([operand]), name="axes"))
        first.replace_input_with(0, axes)
        seen.add(fingerprint(model))
    assert 5 == len(seen)
