"""Equality of the values of a graph and of the parts cut out of it."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_ir as ir
from hypothesis import event, given, settings
from hypothesis import strategies as st

from graphs import run_onnx
from winml.modelkit.metadata_keys import TREE_KEY
from winml.modelkit.onnx.cutting import Cut, Cutter, ModuleParts, cut_model
from winml.modelkit.tags.tagging import NodeTag, read_tag, write_tag

UNARY = ("Relu", "Neg", "Tanh", "Identity")
BINARY = ("Add", "Mul", "Sub")
SHAPE = (2, 20)
TAGS = ("/M", "/M/A", "/M/A/B", "/M/C")


def _value(name: str) -> ir.Value:
    return ir.val(name, ir.DataType.FLOAT, ir.Shape(SHAPE))


@st.composite
def tagged_models(draw: st.DrawFn) -> ir.Model:
    """Random graphs with shared weights, branches that capture values, and nodes of random modules in runs."""
    inputs = [_value("x"), _value("y")]
    weights = [
        ir.val(f"w{number}", const_value=ir.tensor(np.full(SHAPE, number + 0.5, np.float32), name=f"w{number}"))
        for number in range(2)
    ]
    condition = ir.val("p", ir.DataType.BOOL, ir.Shape([]))
    values = [*inputs, *weights]
    nodes: list[ir.Node] = []
    while len(nodes) < 12:
        tag = draw(st.sampled_from(TAGS))
        for _ in range(draw(st.integers(1, 4))):
            output = _value(f"v{len(nodes)}")
            kind = draw(st.sampled_from(("unary", "binary", "binary", "if")))
            node = (
                _if_node(draw, condition, values, output)
                if kind == "if"
                else ir.node(
                    draw(st.sampled_from(UNARY if kind == "unary" else BINARY)),
                    [draw(st.sampled_from(values[-6:])) for _ in range(1 if kind == "unary" else 2)],
                    outputs=[output],
                )
            )
            node.name = f"n{len(nodes)}"
            for each in (node, *(inner for inner in _inner(node))):
                write_tag(each, NodeTag(tag, tag[3:].replace("/", "."), "direct"))
            nodes.append(node)
            values.append(output)
    outputs = [value for node in nodes for value in node.outputs if not value.uses()]
    graph = ir.Graph([*inputs, condition], outputs, nodes=nodes, initializers=weights, name="g", opset_imports={"": 17})
    return ir.Model(graph, ir_version=10)


def _if_node(draw: st.DrawFn, condition: ir.Value, values: list[ir.Value], output: ir.Value) -> ir.Node:
    node = ir.node("If", [condition], outputs=[output])
    for side in ("then_branch", "else_branch"):
        inner = ir.node(
            draw(st.sampled_from(UNARY)), [draw(st.sampled_from(values[-6:]))], name=f"{output.name}/{side}"
        )
        inner.outputs[0].name = f"{output.name}_{side}"
        inner.outputs[0].type, inner.outputs[0].shape = output.type, output.shape
        node.attributes[side] = ir.AttrGraph(side, ir.Graph([], inner.outputs, nodes=[inner], name=side))
    return node


def _inner(node: ir.Node) -> list[ir.Node]:
    return [inner for attribute in node.attributes.values() for inner in attribute.as_graph()]


def _check(model: ir.Model, cuts: list[Cut]) -> None:
    """Check that every cut is a valid model, and that it reproduces the outputs of the whole model from its values."""
    graph = model.graph
    wanted = dict.fromkeys(value for cut in cuts for value in (*cut.inputs, *cut.outputs) if value.producer())
    graph.outputs.extend(value for value in wanted if not value.is_graph_output())
    generator = np.random.default_rng(0)
    feeds = {str(value.name): generator.standard_normal(SHAPE).astype(np.float32) for value in graph.inputs[:2]}
    feeds["p"] = np.array(True)
    whole = {**feeds, **run_onnx(ir.to_proto(model).SerializeToString(), feeds, optimize=False)}
    for cut in cuts:
        proto = ir.to_proto(cut_model(model, cut))
        onnx.checker.check_model(proto, full_check=True)
        fed = {str(value.name): whole[str(value.name)] for value in cut.inputs}
        answers = run_onnx(proto.SerializeToString(), fed, optimize=False)
        assert {value.name for value in cut.outputs} == set(answers)
        assert all(np.array_equal(whole[name], answer, equal_nan=True) for name, answer in answers.items())


@settings(max_examples=60)
@given(tagged_models(), st.sampled_from([None, 1, 2]))
def test_every_cut_module_reproduces_its_activations(model: ir.Model, calls: int | None) -> None:
    """A module with random tags is cut with equal outputs, or it is refused."""
    if calls is not None:
        records = [{"tag": tag, "calls": 1 if tag == "/M" else calls} for tag in TAGS]
        model.metadata_props[TREE_KEY] = json.dumps(records)
    parts = ModuleParts(model)
    found = [call.result for tag in TAGS for call in parts.cut(tag)]
    cuts = [result for result in found if isinstance(result, Cut)]
    event(f"{len(cuts)} cut, {len(found) - len(cuts)} refused")
    _check(model, cuts)


@settings(max_examples=60)
@given(tagged_models(), st.data())
def test_every_run_of_nodes_can_be_cut_out(model: ir.Model, data: st.DataObject) -> None:
    """Consecutive nodes never have a node between them, so they are cut unless all nodes are constants.

    The cut contains each node of the run that is not constant.
    """
    nodes = list(model.graph)
    first = data.draw(st.integers(0, len(nodes) - 1))
    own = nodes[first : data.draw(st.integers(first, len(nodes) - 1)) + 1]
    cutter = Cutter(model)
    result = cutter.cut(own)
    changing = [node for node in own if not cutter.is_constant(node)]
    assert isinstance(result, Cut) == bool(changing)
    if isinstance(result, Cut):
        assert set(changing) <= set(result.nodes)
        assert all(cutter.is_constant(node) for node in set(result.nodes) - set(own))
        assert () == result.drawn_in == result.left_out
        _check(model, [result])


@settings(max_examples=30)
@given(tagged_models())
def test_cutting_leaves_the_whole_alone(model: ir.Model) -> None:
    """Cutting changes nothing in the whole model."""
    before = ir.to_proto(model).SerializeToString()
    for call in ModuleParts(model).cut("/M/A"):
        if isinstance(call.result, Cut):
            assert all(read_tag(node) is not None for node in cut_model(model, call.result).graph)
    assert before == ir.to_proto(model).SerializeToString()
