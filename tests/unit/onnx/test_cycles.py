"""Detection of cycles in every graph of a file."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from graphs import parse
from winml.modelkit.errors import OptimizeError
from winml.modelkit.onnx.validity import cycle_words, find_loop
from winml.modelkit.optimize.pipeline import order_nodes

_FLOATS = onnx.TensorProto.FLOAT


def _model(nodes: list[onnx.NodeProto], functions: tuple[onnx.FunctionProto, ...] = ()) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info("x", _FLOATS, [2]),
        helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []),
    ]
    graph = helper.make_graph(nodes, "graph", inputs, [helper.make_tensor_value_info("y", _FLOATS, [2])])
    return helper.make_model(graph, functions=list(functions))


def _node(operator: str, reads: str, makes: str, **settings: object) -> onnx.NodeProto:
    return helper.make_node(operator, reads.split(), [makes], name=f"make_{makes}", **settings)


def _choice(*nodes: onnx.NodeProto, reads: str = "c", makes: str = "y") -> onnx.NodeProto:
    output = helper.make_tensor_value_info("inner", _FLOATS, [2])
    branch = helper.make_graph(list(nodes), "branch", [], [output])
    other = helper.make_graph([_node("Neg", "x", "inner")], "other", [], [output])
    return _node("If", reads, makes, then_branch=branch, else_branch=other)


def _function(name: str, *nodes: onnx.NodeProto) -> onnx.FunctionProto:
    return helper.make_function("own", name, ["x"], ["y"], list(nodes), [helper.make_opsetid("", 17)])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (_model([_node("Add", "x y", "y")]), "make_y (Add)"),
        (
            _model([_node("Add", "x b", "a"), _node("Relu", "a", "b"), _node("Neg", "b", "y")]),
            "make_a (Add), make_b (Relu)",
        ),
        (
            _model([_choice(_node("Add", "x b", "a"), _node("Neg", "a", "b"), _node("Neg", "b", "inner"))]),
            "make_a (Add)",
        ),
        (_model([_choice(_node("Neg", "z", "inner")), _node("Relu", "y", "z")]), "make_y (If), make_z (Relu)"),
        (_model([_node("F", "x", "y", domain="own")], (_function("F", _node("Add", "x y", "y")),)), "make_y (Add)"),
        (_model([], (_function("F", _node("F", "x", "y", domain="own")),)), "own::F"),
    ],
    ids=["itself", "two nodes", "in a subgraph", "through a subgraph", "in a function", "function"],
)
def test_cycle_is_named(model: onnx.ModelProto, words: str) -> None:
    """The message names the nodes of the cycle and their operators."""
    found = cycle_words(model)
    assert found is not None
    assert words in found


def test_cycle_names_the_modules_of_its_nodes() -> None:
    """The message has the module if the file has one."""
    node = _node("Add", "x y", "y")
    node.metadata_props.add(key="winml.hierarchy.module", value="encoder.layer.0")
    assert "encoder.layer.0)" in str(cycle_words(_model([node])))


@pytest.mark.parametrize(
    "nodes",
    [
        [_node("Neg", "a", "y"), _node("Relu", "x", "a")],
        [_node("Relu", "x", "z"), _choice(_node("Neg", "z", "inner"))],
        # The branch makes a value of the name that the node around it makes.
        [_choice(_node("Neg", "x", "y"), _node("Relu", "y", "inner"))],
        [_node("Add", "a a", "y"), _node("Add", "b b", "a"), _node("Add", "x x", "b")],
    ],
    ids=["any order", "from outside", "hidden name", "diamonds"],
)
def test_graph_without_a_cycle_is_accepted(nodes: list[onnx.NodeProto]) -> None:
    """The order of the nodes does not matter."""
    assert cycle_words(_model(nodes)) is None


def test_loop_is_detected_beyond_the_recursion_limit() -> None:
    """The loop is at the far end."""
    last = 100_000
    assert [last, last - 1] == find_loop(
        range(last + 1), lambda item: iter([min(item + 1, last) if item < last else last - 1])
    )[::-1]


def test_ordering_a_cycle_ends_with_an_error_that_names_a_node() -> None:
    """An engine that damages a graph does not make the optimizer run for ever."""
    model = parse("g (float[2] x) => (float[2] y) { a = Relu(x)  b = Add(a, x)  y = Neg(b) }")
    first, second, _ = model.graph
    first.replace_input_with(0, second.outputs[0])
    with pytest.raises(OptimizeError, match=r"/(add/Add|relu/Relu)_\d .* its own output"):
        order_nodes(model)
    assert isinstance(first, ir.Node)
