"""Nodes compute in float16, or their weights are kept in bfloat16, and the rest of the graph stays float32."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from blocked_graphs import floats, sqnr_db, task_for, weighted
from graphs import operators, tags
from winml.modelkit.quantize.half_floats.engine import convert_floats
from winml.modelkit.quantize.half_floats.tensors import clipped_values

CHAIN = """m (float[2,64] x) => (float[2,64] y, float[2,64] z) <float[1] w = {0}, float[1] wb = {0}> {
    a = MatMul (x, w)
    b = Add (a, wb)
    y = Tanh (b)
    z = Sigmoid (b)
}"""
NORM = """m (float[2,64] x) => (float[2,64] y) <float[1] we = {0}, float[1] two = {2}> {
    s = Pow (x, two)
    m = ReduceMean <axes = [1]> (s)
    e = Add (m, we)
    r = Sqrt (e)
    y = Div (x, r)
}"""
BRANCHES = """m (float[2,64] x, bool c) => (float[2,64] y) {
    a = Tanh (x)
    y = If (c) <then_branch = t () => (float[2,64] u) { u = Relu (a) },
                else_branch = f () => (float[2,64] v) { v = Neg (a) }>
}"""


def _types(model: ir.Model) -> list[ir.DataType | None]:
    return [value.dtype for value in (*model.graph.inputs, *model.graph.outputs)]


def test_float16_inside_and_float32_at_the_edges() -> None:
    """Weights and nodes become float16 between two kinds of Cast; inputs and outputs keep type and name."""
    model = weighted(CHAIN, w=(64, 64), wb=(64,))
    halved = convert_floats(model, task_for(model, "fp16"))
    assert ["Cast", "MatMul", "Add", "Tanh", "Cast", "Sigmoid", "Cast"] == operators(halved)
    assert [ir.DataType.FLOAT] * 3 == _types(halved)
    assert ["y", "z"] == [value.name for value in halved.graph.outputs]
    assert {ir.DataType.FLOAT16} == {value.dtype for value in halved.graph.initializers.values()}
    assert "/M/Tanh" == (tags(halved)[4] or ("", ""))[0]
    assert sqnr_db(model, halved, x=floats(2, 64)) > 55


def test_value_that_several_float32_nodes_read_is_cast_once() -> None:
    """Two nodes that stay float32 share one Cast of what a float16 node made."""
    model = weighted(CHAIN, w=(64, 64), wb=(64,))
    halved = convert_floats(model, task_for(model, "fp16", "MatMul", "Add"))
    assert ["Cast", "MatMul", "Add", "Cast", "Tanh", "Sigmoid"] == operators(halved)
    assert sqnr_db(model, halved, x=floats(2, 64)) > 55


def test_norm_computes_its_mean_of_squares_in_float32() -> None:
    """Activations of a thousand, whose squares float16 cannot hold, give a finite answer."""
    model = weighted(NORM, we=(1,))
    halved = convert_floats(model, task_for(model, "fp16"))
    assert ["Pow", "ReduceMean", "Add", "Sqrt"] == [name for name in operators(halved) if name not in ("Cast", "Div")]
    assert sqnr_db(model, halved, x=1000 * floats(2, 64)) > 55


def test_graph_inside_a_node_reads_float32() -> None:
    """The branches of an If read a value of the graph around them; they stay as they are."""
    model = weighted(BRANCHES)
    halved = convert_floats(model, task_for(model, "fp16"))
    assert ["Cast", "Tanh", "Cast", "If"] == [node.op_type for node in halved.graph]
    assert sqnr_db(model, halved, x=floats(2, 64), c=True) > 55


def test_weights_beyond_float16_are_clipped_and_counted() -> None:
    """What is too large becomes the largest number, what is too small the smallest, and infinity stays."""
    model = weighted(CHAIN, w=(64, 64), wb=(64,))
    values = np.ones(64, np.float32)
    values[:5] = [1e6, -1e6, 1e-12, np.inf, 0]
    model.graph.initializers["wb"].const_value = ir.tensor(values, name="wb")
    halved = convert_floats(model, task_for(model, "fp16"))
    tensor = halved.graph.initializers["wb_fp16"].const_value
    assert tensor is not None
    assert [65504, -65504, 2.0**-24, np.inf, 0] == tensor.numpy()[:5].tolist()
    assert 2 == clipped_values(halved)


@pytest.mark.parametrize("is_shared", [False, True])
def test_bfloat16_weights_are_cast_to_float32(is_shared: bool) -> None:
    """Each weight has a Cast behind it with the tag of its reader, unless a node that stays reads it as well."""
    body = CHAIN.replace("Sigmoid (b)", "MatMul (x, w)") if is_shared else CHAIN
    model = weighted(body, w=(64, 64), wb=(64,))
    names = frozenset([model.graph[0].name or ""])
    task = task_for(model, "bf16")
    kept = convert_floats(model, type(task)(names, task.precision, task.options))
    dtype = kept.graph.initializers["w" if is_shared else "w_bf16"].dtype
    assert (ir.DataType.FLOAT if is_shared else ir.DataType.BFLOAT16) == dtype
    if not is_shared:
        assert ("/M/MatMul", "direct") == tags(kept)[0]
        assert sqnr_db(model, kept, x=floats(2, 64)) > 40
