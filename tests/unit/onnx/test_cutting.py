"""Cutting of a part of a graph as a model of its own, and refusals with a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_ir.passes import common

import graphs
from graphs import run_onnx
from winml.modelkit.onnx.cutting import Cut, Cutter, Refusal, cut_model


def parse(text: str, **options: str) -> ir.Model:
    """Return the model of a text, with every type that can be inferred."""
    model = graphs.parse(text, **options)
    common.ShapeInferencePass()(model)
    return model


def _nodes_making(model: ir.Model, *values: str) -> list[ir.Node]:
    """Return the nodes of the main graph that make these values, in order."""
    return [node for node in model.graph if node.outputs[0].name in values]


def _cut_out(model: ir.Model, *values: str, **options: Any) -> Cut:
    result = Cutter(model).cut(_nodes_making(model, *values), **options)
    assert isinstance(result, Cut), result
    return result


def _refusal_reason(model: ir.Model, *values: str) -> str:
    result = Cutter(model).cut(_nodes_making(model, *values))
    assert isinstance(result, Refusal)
    return result.reason


def _value_names(values: tuple[ir.Value, ...]) -> list[str | None]:
    return [value.name for value in values]


def _run_checked(model: ir.Model, **feeds: Any) -> dict[str, Any]:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return run_onnx(proto.SerializeToString(), feeds, optimize=False)


CHAIN = """
g (float[2,3] x, float[2,3] y) => (float[2,3] d, float[2,3] e)
<float[3] w1 = {0, 0, 0}, float[3] w2 = {0, 0, 0}>
{
    a = Add(x, w1)
    b = Mul(a, w2)
    c = Add(b, y)
    d = Relu(c)
    e = Mul(a, c)
}
"""


def test_cut_of_chain_has_the_values_that_cross_its_boundary() -> None:
    """Inputs are read from outside, outputs are read outside or are the model's; in order of reading and making."""
    cut = _cut_out(parse(CHAIN), "b", "c")
    assert ["a", "y"] == _value_names(cut.inputs)
    assert ["c"] == _value_names(cut.outputs)
    assert ["w2"] == _value_names(cut.initializers)
    assert ["b", "c"] == [node.outputs[0].name for node in cut.nodes]


def test_exact_cut_has_its_nodes_and_no_other() -> None:
    """Nodes between and constants stay outside; sizes are kept for a part that is put back."""
    model = parse(CHAIN)
    cut = Cutter(model).cut_exactly(_nodes_making(model, "a", "e"))
    assert (["x", "c"], ["a", "e"], ["w1"]) == tuple(map(_value_names, (cut.inputs, cut.outputs, cut.initializers)))
    assert ["a", "e"] == [node.outputs[0].name for node in cut.nodes]
    made = graphs.parse(
        "g (float[n] x) => (float[n] z) { c = Constant <value_float = 2.0> () y = Neg (x) z = Mul (y, c) }"
    )
    made.graph.node(1).outputs[0].shape = ir.Shape(["n - 2"])
    cut = Cutter(made).cut_exactly(_nodes_making(made, "z"))
    assert ["y", "c"] == _value_names(cut.inputs)
    sizes = [cut_model(made, cut, keeps_sizes=keeps).graph.inputs[0].shape for keeps in (True, False)]
    assert ["[n - 2]", "[n_2]"] == [str(shape) for shape in sizes]


def test_cut_model_equals_the_whole() -> None:
    """The part is a valid model that makes the same values of the same inputs."""
    model = parse(CHAIN)
    x, y = np.float32([[1, -2, 3], [4, -5, 6]]), np.float32([[0, 1, 0], [2, 0, 3]])
    whole_outputs = _run_checked(model, x=x, y=y)
    w1 = model.graph.initializers["w1"].const_value
    assert w1 is not None
    part = _run_checked(cut_model(model, _cut_out(model, "b", "c", "d", "e")), a=x + w1.numpy(), y=y)
    assert sorted(whole_outputs) == sorted(part)
    assert all(np.array_equal(whole_outputs[name], part[name]) for name in whole_outputs)


def test_cut_model_shares_weights_and_leaves_the_whole_alone() -> None:
    """Tensors are the same objects, nodes and values are copies with their names and tags."""
    model = parse(CHAIN)
    before = ir.to_proto(model).SerializeToString()
    part = cut_model(model, _cut_out(model, "b"))
    assert part.graph.initializers["w2"].const_value is model.graph.initializers["w2"].const_value
    assert _nodes_making(model, "b")[0].metadata_props == part.graph.node(0).metadata_props
    assert _nodes_making(model, "b")[0].name == part.graph.node(0).name
    assert before == ir.to_proto(model).SerializeToString()


def test_cut_model_types_inner_values_as_the_graph_does() -> None:
    """A value that becomes an input has the type and shape it had inside."""
    model = parse(CHAIN)
    inner = _nodes_making(model, "a")[0].outputs[0]
    inner.type, inner.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", 3])
    value = cut_model(model, _cut_out(model, "b")).graph.inputs[0]
    assert ("a", ir.DataType.FLOAT, "[batch,3]") == (value.name, value.dtype, str(value.shape))


def test_cut_model_names_dimensions_with_expressions() -> None:
    """A size computed inside the whole model is free in the part, so the expression becomes a plain name,
    equal at each use.
    """
    model = parse(CHAIN)
    for node in model.graph:
        node.outputs[0].shape = ir.Shape(["height - 2", None])
    part = cut_model(model, _cut_out(model, "b"))
    assert "[height_2,a_dim_1]" == str(part.graph.inputs[0].shape)
    assert "height_2" == str(part.graph.outputs[0].shape[0])  # type: ignore[index]


def test_cut_includes_constant_computations() -> None:
    """Values independent of the model's inputs cross no boundary, regardless of producer and number of readers."""
    model = parse("""
        g (float[2,3] x) => (float[2,3] b, float[3] s)
        <float[3] w1 = {0, 0, 0}, float[3] w2 = {0, 0, 0}>
        {
            s = Add(w1, w2)
            t = Sqrt(s)
            a = Mul(x, t)
            b = Add(a, s)
        }
    """)
    cut = _cut_out(model, "b")
    assert (["a"], ["b"]) == (_value_names(cut.inputs), _value_names(cut.outputs))
    assert ["s", "b"] == [node.outputs[0].name for node in cut.nodes]
    assert ["w1", "w2"] == sorted(map(str, _value_names(cut.initializers)))
    assert "it depends on no input of the model, so its result is a constant" == _refusal_reason(model, "s", "t")


def test_cut_includes_shape_computations_between_its_nodes() -> None:
    """Nodes that compute sizes for the part come along from other modules."""
    model = parse("""
        g (float[2,6] x, float[2,6] y) => (float[6,2] d)
        <int64[1] last = {-1}, int64[1] first = {0}>
        {
            a = Relu(x)
            shape = Shape(a)
            rows = Gather(shape, first)
            target = Concat <axis = 0> (last, rows)
            b = Reshape(a, target)
            d = Sigmoid(b)
        }
    """)
    cut = _cut_out(model, "a", "b")
    assert ["shape", "rows", "target"] == [node.outputs[0].name for node in cut.drawn_in]
    assert (["x"], ["b"]) == (_value_names(cut.inputs), _value_names(cut.outputs))


def test_cut_with_a_computing_node_between_is_refused() -> None:
    """A part that needs a value computed outside from its own values cannot run alone; the node is named."""
    model = parse("g (float[2] x) => (float[2] c) { a = Relu(x) \n b = Exp(a) \n c = Neg(b) }")
    reason = _refusal_reason(model, "a", "c")
    assert "/exp/Exp_1 (Exp)" in reason


def test_cut_includes_an_adjacent_computing_node() -> None:
    """A node of a shared module belongs to the call in which the node runs."""
    model = parse("g (float[2] x) => (float[2] c) { a = Relu(x) \n b = Exp(a) \n c = Neg(b) }")
    cut = _cut_out(model, "a", "c", may_join=_nodes_making(model, "b"))
    assert ["a", "b", "c"] == [node.outputs[0].name for node in cut.nodes]
    assert _nodes_making(model, "b") == list(cut.drawn_in)


SHARED_MASK = """
g (float[2,3] x, bool[2,3] m) => (float[2,3] z)
<float[3] w1 = {0, 0, 0}, float[3] w2 = {0, 0, 0}, float zero = {0}>
{
    mask = Where(m, x, zero)
    a = Add(x, mask)
    b = Mul(a, w1)
    c = Add(b, mask)
    d = Mul(c, w2)
    e = Sigmoid(d)
    f = Relu(e)
    z = Neg(f)
}
"""


def test_cut_excludes_a_light_node_with_earlier_readers() -> None:
    """A tensor shared between modules by an optimizer, and owned by one of them, becomes an input."""
    cut = _cut_out(parse(SHARED_MASK), "mask", "c", "d", "e", "f", "z")
    assert ["mask"] == [node.outputs[0].name for node in cut.left_out]
    assert ["b", "mask"] == _value_names(cut.inputs)


def test_cut_that_would_leave_out_much_is_refused() -> None:
    """A node that is a good part of the module is no accident of an optimizer."""
    assert "/add/Add_1" in _refusal_reason(parse(SHARED_MASK), "mask", "c")


def test_cut_with_chance_inside_is_refused_and_outside_is_an_input() -> None:
    """Noise can be recorded as an input, but not reproduced inside a part."""
    model = parse("g (float[2] x) => (float[2] b) { n = RandomNormalLike(x) \n a = Add(x, n) \n b = Neg(a) }")
    assert "RandomNormalLike)" in _refusal_reason(model, "n", "a")
    assert ["x", "n"] == _value_names(_cut_out(model, "a").inputs)


def test_cut_without_readers_is_refused() -> None:
    """A part without outputs has no result."""
    model = parse("g (float[2] x) => (float[2] b) { a = Neg(x) \n b = Relu(x) }")
    assert "its outputs are not read outside" == _refusal_reason(model, "a")


def test_cut_with_a_sequence_on_its_boundary_is_refused() -> None:
    """Only tensors can be recorded."""
    model = parse("g (float[2] x) => (float[2] b) <int64 i = {0}> { a = SequenceConstruct(x) \n b = SequenceAt(a, i) }")
    _nodes_making(model, "a")[0].outputs[0].type = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
    assert "value a" in _refusal_reason(model, "b")


IF = """
g (float[2] x, bool p, float[2] y) => (float[2] d)
<float[2] w1 = {0, 0}>
{
    a = Mul(x, w1)
    b = If (p) <
        then_branch = t () => (float[2] u) { s = Add(a, y) \n u = Add(s, w1) },
        else_branch = f () => (float[2] v) { v = Neg(a) }
    >
    c = Relu(b)
    d = Neg(c)
}
"""


def test_cut_with_subgraphs_reads_their_captured_values() -> None:
    """Values captured by a branch are inputs or weights of the part."""
    model = parse(IF)
    cut = _cut_out(model, "b", "c")
    assert ["p", "a", "y"] == _value_names(cut.inputs)
    assert ["w1"] == _value_names(cut.initializers)
    a, y = np.float32([1, -2]), np.float32([3, 4])
    part = cut_model(model, cut)
    w1 = model.graph.initializers["w1"].const_value
    assert w1 is not None
    expected = np.maximum(a + y + w1.numpy(), 0)
    assert np.array_equal(expected, _run_checked(part, p=np.array(True), a=a, y=y)["c"])
    assert np.array_equal([0, 2], _run_checked(part, p=np.array(False), a=a, y=y)["c"])


def test_cut_before_subgraphs_returns_their_captured_values() -> None:
    """A value that only a branch reads is read outside all the same."""
    assert ["a"] == _value_names(_cut_out(parse(IF), "a").outputs)


def test_cut_model_includes_its_called_functions() -> None:
    """Called functions come along, and so do the functions called inside; others stay."""
    model = parse(
        "g (float[2] x) => (float[2] c) { a = local.Twice(x) \n b = local.Other(a) \n c = Neg(b) }",
        domains=', "local" : 1',
        functions="""
            <domain: "local", opset_import: ["" : 17, "local" : 1]>
            Twice (i) => (o) { h = local.Half(i) \n o = Add(h, h) }
            <domain: "local", opset_import: ["" : 17]>
            Half (i) => (o) { o = Neg(i) }
            <domain: "local", opset_import: ["" : 17]>
            Other (i) => (o) { o = Relu(i) }
        """,
    )
    inner = _nodes_making(model, "a")[0].outputs[0]
    inner.type, inner.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([2])
    part = cut_model(model, _cut_out(model, "a"))
    assert {"Twice", "Half"} == {function.name for function in part.functions.values()}
    assert np.array_equal([-2, 4], _run_checked(part, x=np.float32([1, -2]))["a"])


@pytest.mark.parametrize("size", [2, 30])
def test_cut_of_an_optional_input_keeps_the_gap(size: int) -> None:
    """An input left out stays out."""
    model = parse(f"g (float[{size}] x, float low) => (float[{size}] b) {{ a = Neg(x) \n b = Clip(a, , low) }}")
    assert ["a", "low"] == _value_names(_cut_out(model, "b").inputs)
