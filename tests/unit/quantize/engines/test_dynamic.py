"""The dynamic engine, compared with ONNX Runtime's quantizer, without holding the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic

from blocked_graphs import floats, sqnr_db
from graphs import operators, parse, run_onnx
from winml.modelkit.quantize.engines.dynamic import quantize_dynamically
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.planning import EngineTask

TWO_PRODUCTS = """
g (int64[2] i, float[2, 40] x) => (float[2, 24] y)
<float[50, 40] w_table = {0}, float[40, 64] w_large = {0}, float[64, 24] w_small = {0}>
{
    e = Gather <axis = 0> (w_table, i)
    s = Add (e, x)
    h = MatMul (s, w_large)
    y = MatMul (h, w_small)
}
"""

GEMMS = """
g (float[3, 40] x) => (float[3, 32] y, float[3, 32] z, float[3, 32] doubled)
<float[32, 40] w = {0}, float[32] w_bias = {0}>
{
    y = Gemm <transB = 1> (x, w, w_bias)
    z = Gemm <transB = 1> (x, w)
    doubled = Gemm <transB = 1, alpha = 2.0> (x, w)
}
"""


def quantized(model: ir.Model, *names: str, **options: Any) -> ir.Model:
    """Return the model with the named nodes quantized, by default all."""
    nodes = frozenset(names) or frozenset(str(node.name) for node in model.graph)
    chosen = QuantizeOptions(precision="int8", **options)
    return quantize_dynamically(model, EngineTask(nodes, chosen.base, chosen))


def weights(model: ir.Model) -> dict[str, list[Any]]:
    return {name: value.const_value.numpy().tolist() for name, value in model.graph.initializers.items()}


@pytest.mark.parametrize("per_channel", [True, False])
def test_engine_equals_bare_onnxruntime(tmp_path: Path, per_channel: bool) -> None:
    """Nodes, scales, zero points and integers are those of ``quantize_dynamic`` on the same file."""
    model = parse(TWO_PRODUCTS)
    ir.save(model, tmp_path / "plain.onnx")
    quantize_dynamic(
        tmp_path / "plain.onnx", tmp_path / "bare.onnx", per_channel=per_channel, weight_type=QuantType.QInt8
    )
    bare = ir.load(tmp_path / "bare.onnx")

    ours = quantized(model, per_channel=per_channel)

    assert sorted(operators(bare)) == sorted(operators(ours))
    assert weights(bare) == weights(ours)


def test_engine_computes_integers_on_read() -> None:
    """Quantized weights are computed from their source on access and are not held in memory."""
    ours = quantized(parse(TWO_PRODUCTS))

    lazy = [name for name, value in ours.graph.initializers.items() if isinstance(value.const_value, ir.LazyTensor)]
    assert sorted(lazy) == ["w_large_quantized", "w_small_quantized", "w_table_quantized"]


def test_engine_quantizes_gemms_that_share_a_weight() -> None:
    """A Gemm becomes an integer product and an addition; a Gemm with a factor stays, as does its weight."""
    model = parse(GEMMS)
    x = np.random.default_rng(1).standard_normal((3, 40)).astype(np.float32)
    expected = run_onnx(ir.to_proto(model).SerializeToString(), {"x": x})

    ours = quantized(model)

    assert operators(ours).count("MatMulInteger") == 2
    assert operators(ours).count("Gemm") == 1
    answers = run_onnx(ir.to_proto(ours).SerializeToString(), {"x": x})
    for name, values in expected.items():
        np.testing.assert_allclose(answers[name], values, atol=0.05 * np.abs(values).max(), err_msg=name)
    assert np.array_equal(answers["doubled"], expected["doubled"])


def test_engine_leaves_unrequested_gemms() -> None:
    """Nodes outside the task are not changed."""
    ours = quantized(parse(GEMMS), "/gemm/Gemm_0")

    assert operators(ours).count("MatMulInteger") == 1
    assert operators(ours).count("Gemm") == 2


def test_engine_reads_small_weights_of_a_data_file(tmp_path: Path) -> None:
    """Weights outside the model file, however small, become the same integers as those inside."""
    model = parse(TWO_PRODUCTS)
    expected = weights(quantized(model))
    ir.save(model, tmp_path / "outside.onnx", external_data="outside.data", size_threshold_bytes=0)

    assert expected == weights(quantized(ir.load(tmp_path / "outside.onnx")))


def test_existing_names_are_not_reused() -> None:
    """Initializers with the names of the engine's own tensors keep their values and readers."""
    names = ("w_transposed", "w_scale", "w_quantized", "w_zero_point", "y_product", "w_transposed_scale")
    extra = ", ".join(f"float[3, 32] {name} = {{0}}" for name in names)
    sums = "".join(f"s{at} = Add ({f's{at - 1}' if at else 'z'}, {name}) " for at, name in enumerate(names))
    body = GEMMS.replace("float[32] w_bias = {0}>", f"float[32] w_bias = {{0}}, {extra}>")
    body = body.replace("float[3, 32] doubled)", "float[3, 32] doubled, float[3, 32] s5)")
    model = parse(body.rstrip().removesuffix("}") + sums + "}")
    for at, name in enumerate(names):
        model.graph.initializers[name].const_value = ir.tensor(np.full((3, 32), at + 1, np.float32), name=name)
    x = np.random.default_rng(1).standard_normal((3, 40)).astype(np.float32)
    ours = quantized(model)
    answers = run_onnx(ir.to_proto(ours).SerializeToString(), {"x": x})
    np.testing.assert_allclose(answers["s5"], answers["z"] + sum(range(1, 7)), rtol=1e-6)
    expected = run_onnx(ir.to_proto(model).SerializeToString(), {"x": x})
    np.testing.assert_allclose(answers["y"], expected["y"], atol=0.05 * np.abs(expected["y"]).max())


@pytest.mark.parametrize("chosen", [True, False])
def test_branches_read_the_rows_of_a_quantized_table_as_floats(chosen: bool) -> None:
    """A node of a subgraph stays and still reads floats."""
    model = parse("""g (int64[2] i, bool c) => (float[2, 40] y) <float[50, 40] w_table = {0}> {
        r = Gather <axis = 0> (w_table, i)
        y = If (c) <then_branch = t () => (float[2, 40] u) { u = Neg (r) },
                    else_branch = f () => (float[2, 40] v) { v = Abs (r) }> }""")
    feeds = {"i": np.array([3, 7]), "c": np.array(chosen)}
    expected = run_onnx(ir.to_proto(model).SerializeToString(), feeds)["y"]
    ours = quantized(model, "/gather/Gather_0")
    assert "DequantizeLinear" in operators(ours)
    answers = run_onnx(ir.to_proto(ours).SerializeToString(), feeds)["y"]
    np.testing.assert_allclose(answers, expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("directions", [1, 2])
def test_lstm_has_integer_weights_and_close_outputs(directions: int, per_channel: bool) -> None:
    """The weights of all gates are integers; the outputs of the recurrence stay close."""
    direction = "bidirectional" if directions == 2 else "forward"
    model = parse(f"""
    g (float[6, 2, 24] x) => (float[6, {directions}, 2, 32] y)
    <float[{directions}, 128, 24] w = {{0}}, float[{directions}, 128, 32] wr = {{0}},
     float[{directions}, 256] wb = {{0}}>
    {{ y = LSTM <hidden_size = 32, direction = "{direction}"> (x, w, wr, wb) }}
    """)
    for name in ("w", "wr"):
        tensor = model.graph.initializers[name].const_value
        model.graph.initializers[name].const_value = ir.tensor(tensor.numpy() / 6, name=name)
    ours = quantized(model, per_channel=per_channel)
    assert ["DynamicQuantizeLSTM"] == operators(ours)
    assert [model.graph.node(0).name] == [node.name for node in ours.graph]
    types = [value.dtype for value in ours.graph.initializers.values() if len(value.shape) == 3]
    assert [ir.DataType.INT8] * 2 == types
    assert sqnr_db(model, ours, x=floats(6, 2, 24)) > 30
