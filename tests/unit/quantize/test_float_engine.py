"""Nodes in float16 and weights in bfloat16, with the rest of the graph in float32."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from blocked_graphs import floats, sqnr_db, task_for, weighted
from graphs import answer, operators, run_onnx, tags
from winml.modelkit.quantize.engines.half_float import clipped_values, convert_floats
from winml.modelkit.quantize.kv_cache import narrow_cache

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

ROTARY = {
    "frequencies of one axis": """m (int64[1,3] ids, float[1,3,16] x) => (float[1,3,16] y, float[1,3,16] c)
        <float[1] w = {0}, int64[1] axis = {2}> {
        u = Unsqueeze (ids, axis)
        p = Cast <to = 1> (u)
        f = Mul (p, w)
        e = Concat <axis = -1> (f, f)
        c = Cos (e)
        y = Mul (x, c)
    }""",
    "frequencies as a matrix": """m (int64[1,3] ids, float[1,3,16] x) => (float[1,3,16] y, float[1,3,16] c)
        <float[1] w = {0}, int64[1] axis = {2}> {
        u = Unsqueeze (ids, axis)
        p = Cast <to = 1> (u)
        t = Transpose <perm = [0, 2, 1]> (p)
        f = MatMul (w, t)
        r = Transpose <perm = [0, 2, 1]> (f)
        e = Concat <axis = -1> (r, r)
        c = Sin (e)
        y = Mul (x, c)
    }""",
}
POSITIONS = np.array([[1, 2047, 4096]])


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
    """Two float32 nodes share one Cast of a float16 value."""
    model = weighted(CHAIN, w=(64, 64), wb=(64,))
    halved = convert_floats(model, task_for(model, "fp16", "MatMul", "Add"))
    assert ["Cast", "MatMul", "Add", "Cast", "Tanh", "Sigmoid"] == operators(halved)
    assert sqnr_db(model, halved, x=floats(2, 64)) > 55


def test_norm_computes_its_mean_of_squares_in_float32() -> None:
    """Activations around 1000, with squares beyond float16, give finite outputs."""
    model = weighted(NORM, we=(1,))
    halved = convert_floats(model, task_for(model, "fp16"))
    assert ["Pow", "ReduceMean", "Add", "Sqrt"] == [name for name in operators(halved) if name not in ("Cast", "Div")]
    assert sqnr_db(model, halved, x=1000 * floats(2, 64)) > 55


@pytest.mark.parametrize("body", ROTARY.values(), ids=list(ROTARY))
def test_angles_of_positions_stay_float32(body: str) -> None:
    """The sine of position 4096 equals that of float32; the multiplication by it is in float16."""
    model = weighted(body, w=(8,) if "Cos" in body else (1, 8, 1))
    halved = convert_floats(model, task_for(model, "fp16"))
    feeds = {"ids": POSITIONS, "x": np.ones((1, 3, 16), np.float32)}
    expected, actual = answer(model, **feeds), answer(halved, **feeds)
    assert expected[1] == actual[1]
    np.testing.assert_allclose(expected[0], actual[0], atol=1e-3)
    assert (
        ir.DataType.FLOAT16 == next(node for node in halved.graph if node.name == model.graph[-1].name).outputs[0].dtype
    )


def test_distance_of_positions_is_computed_in_float32() -> None:
    """The difference of 4097 and 4096 is 1, but 0 in float16; the activation added to the difference is float16."""
    body = """m (int64[2] ids, int64[2] jds, float[2] x) => (float[2] y) {
        p = Cast <to = 1> (ids)
        q = Cast <to = 1> (jds)
        d = Sub (p, q)
        r = Relu (x)
        y = Add (r, d)
    }"""
    model = weighted(body)
    halved = convert_floats(model, task_for(model, "fp16"))
    assert [1.0, 3.0] == answer(halved, ids=[4097, 9003], jds=[4096, 9000], x=np.zeros(2, np.float32))[0]
    assert ir.DataType.FLOAT16 == next(node for node in halved.graph if node.op_type == "Add").outputs[0].dtype


def test_mask_of_lowest_numbers_stays_finite() -> None:
    """A row of which everything is masked has equal shares and no NaN."""
    body = """m (int64[2,3] mask, float[2,3] x) => (float[2,3] y) <float[1] one = {1}, float[1] low = {-3.4e38}> {
        p = Cast <to = 1> (mask)
        n = Sub (one, p)
        m = Mul (n, low)
        s = Add (x, m)
        y = Softmax (s)
    }"""
    model = weighted(body)
    halved = convert_floats(model, task_for(model, "fp16"))
    shares = answer(halved, mask=[[0, 0, 0], [1, 0, 1]], x=np.zeros((2, 3), np.float32))[0]
    np.testing.assert_allclose(shares, [[1 / 3] * 3, [0.5, 0, 0.5]], atol=1e-3)


def test_layer_before_a_sine_computes_in_float16() -> None:
    """The sine of a product with a large weight is no position encoding: the product is float16, the sine is not."""
    model = weighted("m (float[2,160] x) => (float[2,160] y) <float[1] w = {0}> { a = MatMul (x, w)  y = Sin (a) }",
                     w=(160, 160))  # fmt: skip
    halved = convert_floats(model, task_for(model, "fp16"))
    assert ["Cast", "MatMul", "Cast", "Sin"] == operators(halved)


@pytest.mark.parametrize(("target", "words"), [(9, "bool"), (7, "int64")])
def test_cast_of_floats_to_other_types_stays(target: int, words: str) -> None:
    """Values that float16 would round to zero or infinity keep their truth value and their integer."""
    body = f"m (float[2] x) => ({words}[2] y, float[2] z) {{ y = Cast <to = {target}> (x)  z = Relu (x) }}"
    model = weighted(body)
    halved = convert_floats(model, task_for(model, "fp16"))
    cast = next(node for node in halved.graph if node.name == model.graph[0].name)
    assert target == cast.attributes["to"].as_int()
    x = [1e-12, 100001.0]
    assert answer(model, x=np.float32(x))[0] == answer(halved, x=np.float32(x))[0]


def test_index_computed_from_positions_equals_float32() -> None:
    """Position 4097 divided by two and converted to an integer is no other index."""
    body = """m (int64[2] x, float[2] a) => (int64[2] y, float[2] z) <float[1] half = {0.5}> {
        p = Cast <to = 1> (x)
        h = Mul (p, half)
        y = Cast <to = 7> (h)
        z = Relu (a)
    }"""
    model = weighted(body)
    halved = convert_floats(model, task_for(model, "fp16"))
    feeds = {"x": [4099, 200001], "a": np.ones(2, np.float32)}
    assert [2049, 100000] == answer(halved, **feeds)[0]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_existing_names_are_not_reused(precision: str) -> None:
    """Weights and values that have the names of new tensors keep their names, and the outputs are correct."""
    body = """m (float[2,64] x) => (float[2,64] y, float[2,64] x_as_float16)
        <float[1] w = {0}, float[1] w_fp16 = {0}, float[1] w_bf16 = {0}> {
        b = MatMul (x, w)
        b_fp16 = MatMul (b, w_fp16)
        w_bf16_as_float = MatMul (b_fp16, w_bf16)
        y_fp16 = Tanh (w_bf16_as_float)
        y = Tanh (y_fp16)
        x_as_float16 = Sigmoid (y_fp16)
    }"""
    model = weighted(body, w=(64, 64), w_fp16=(64, 64), w_bf16=(64, 64))
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy() / 16, name=value.name)
    halved = convert_floats(model, task_for(model, precision, "MatMul", "Tanh"))
    named = [value.name for node in halved.graph for value in node.outputs] + list(halved.graph.initializers)
    assert len(named) == len(set(named))
    assert ["y", "x_as_float16"] == [value.name for value in halved.graph.outputs]
    assert sqnr_db(model, halved, x=floats(2, 64)) > 40


def test_graph_inside_a_node_reads_float32() -> None:
    """The branches of an If read a value of the outer graph and are not changed."""
    model = weighted(BRANCHES)
    halved = convert_floats(model, task_for(model, "fp16"))
    assert ["Cast", "Tanh", "Cast", "If"] == [node.op_type for node in halved.graph]
    assert sqnr_db(model, halved, x=floats(2, 64), c=True) > 55


def test_weights_beyond_float16_are_clipped_and_counted() -> None:
    """Too large values become ±65504, too small ones 2^-24, and infinity stays."""
    model = weighted(CHAIN, w=(64, 64), wb=(64,))
    values = np.ones(64, np.float32)
    values[:5] = [1e6, -1e6, 1e-12, np.inf, 0]
    model.graph.initializers["wb"].const_value = ir.tensor(values, name="wb")
    halved = convert_floats(model, task_for(model, "fp16"))
    tensor = halved.graph.initializers["wb_fp16"].const_value
    assert tensor is not None
    assert [65504, -65504, 2.0**-24, np.inf, 0] == tensor.numpy()[:5].tolist()
    assert 2 == clipped_values(halved)


@pytest.mark.parametrize("order", [[1, 0, 2], [1, 2, 0], [0, 2, 1]])
def test_batch_transposed_before_a_product_stays_float32(order: list[int], tmp_path: Path) -> None:
    """ONNX Runtime 1.31 crashes on the fusion in float16; other transposes become float16."""
    shape = [[2, 5, 64][axis] for axis in np.argsort(order)]
    model = weighted(
        f"m (float{shape} x) => (float[2,5,64] z) <float[1] w = {{0}}> {{\n"
        f"    t = Transpose <perm = {order}> (x)\n    y = MatMul (t, w)\n    z = Tanh (y)\n}}",
        w=(64, 64),
    )
    halved = convert_floats(model, task_for(model, "fp16"))
    halves = {node.op_type for node in halved.graph if node.inputs[0].dtype == ir.DataType.FLOAT16}
    assert {"MatMul", "Tanh", "Cast", *(["Transpose"] if order[0] == 0 else [])} == halves
    ir.save(halved, tmp_path / "halved.onnx")
    x = floats(*shape)
    reference = np.tanh(x.transpose(order) @ model.graph.initializers["w"].const_value.numpy())
    np.testing.assert_allclose(reference, run_onnx(tmp_path / "halved.onnx", {"x": x})["z"], atol=0.01)


@pytest.mark.parametrize("is_shared", [False, True])
def test_bfloat16_weights_are_cast_to_float32(is_shared: bool) -> None:
    """Each weight has a Cast with the tag of its reader, unless a float32 node reads the weight too."""
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


CACHED = """m (float[1,2] past0, float[1,2] past1) => (float[1,2] present0, float[1,2] present1, float[1,2] y) {
    a = Cast <to = 10> (past0)
    b = Neg (a)
    present0 = Cast <to = 1> (b)
    c = Cast <to = 10> (past1)
    d = Abs (c)
    present1 = Cast <to = 1> (d)
    y = Neg (past1)
}"""


def test_cache_that_only_half_precision_reads_becomes_half_precision() -> None:
    """A state with a reader in float32 stays float32, as input and as output."""
    model = ir.from_onnx_text(f'<ir_version: 8, opset_import: ["" : 17]> {CACHED}')
    halves = {"a", "b", "c", "d"}
    for value in (*model.graph.inputs, *(value for node in model.graph for value in node.outputs)):
        value.type = ir.TensorType(ir.DataType.FLOAT16 if value.name in halves else ir.DataType.FLOAT)
        for prefix, name in {"past": "past_key_values.", "present": "present."}.items():
            value.name = re.sub(rf"^{prefix}(\d)$", rf"{name}\1.key", value.name or "")
    narrow_cache(model.graph)
    types = {value.name: value.dtype for value in (*model.graph.inputs, *model.graph.outputs)}
    found = {name for name, dtype in types.items() if dtype == ir.DataType.FLOAT16}
    assert {"past_key_values.0.key", "present.0.key"} == found
    assert ["Neg", "Cast", "Abs", "Cast", "Neg"] == [node.op_type for node in model.graph]


def test_scatter_that_adds_stays_float32() -> None:
    """ONNX Runtime's CPU provider opens no such node in float16; the product before it is float16."""
    body = """m (float[2,64] x, int64[2,64] i) => (float[2,64] y) <float[1] w = {0}> {
        a = MatMul (x, w)
        b = Sigmoid (a)
        y = ScatterElements <axis = 1, reduction = "add"> (a, i, b)
    }"""
    model = weighted(body, w=(64, 64))
    halved = convert_floats(model, task_for(model, "fp16"))
    assert ir.DataType.FLOAT16 == next(node for node in halved.graph if node.op_type == "MatMul").outputs[0].dtype
    index = np.tile(np.arange(64, dtype=np.int64), (2, 1))
    assert sqnr_db(model, halved, x=floats(2, 64), i=index) > 55
