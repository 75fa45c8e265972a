"""Fusion of mixtures of experts, near misses, and their weights in few bits."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from checkpoints import make_distinct
from graphs import operators, parse, run_onnx
from installed_versions import EXPERTS
from winml.modelkit import HTPExporter, optimize_onnx, quantize_onnx
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.metadata_keys import MODULES_KEY
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.coded_weights import unpack_codes
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import OptimizeResult, optimize
from winml.modelkit.tags.tagging import measure_coverage

FUSED = OptimizeOptions(mixture_of_experts_fusion=True)
NORMALIZED = "t = ReduceSum <keepdims = 1> (v, i1) n = Div (v, t)"
SELECTED = "s = Softmax <axis = -1> (p) v, i = TopK (s, k)"
PREFERRED = """s = Softmax <axis = -1> (p) preferred = Add (s, preference) v0, i = TopK (preferred, k)
    v = GatherElements <axis = 1> (s, i)"""
HALVES = "gate, up = Split <axis = 2> (h, sizes)"
ALTERNATING = "gate = Slice (h, i0, end, i2, i2) up = Slice (h, i1, end, i2, i2)"
GATED = "z = Sigmoid (gate) a = Mul (gate, z) b = Mul (a, up)"


def _model(
    *,
    scores: str = SELECTED,
    shares: str = NORMALIZED,
    split: str = HALVES,
    activation: str = GATED,
    bias: float = 0.0,
    outputs: str = "",
    weight: str = "up_rows",
    experts: int = 4,
    odd: int | None = None,
) -> ir.Model:
    """Return experts of 16 → 32 → 16 values, of which each token has two; the weight of the ``odd`` one is doubled."""
    first = {"up_rows": f"float[{experts}, 64, 16] w_up", "up_columns": f"float[{experts}, 16, 64] w_up"}[weight]
    if odd is not None:
        shares += " one = Equal (i, odd) more = Cast <to = 1> (one) n1 = Add (more, unit) n2 = Mul (n, n1)"
    turned = "g = Gather (w_up, i)"
    if weight == "up_columns":
        turned = "g0 = Gather (w_up, i) g = Transpose <perm = [0, 1, 3, 2]> (g0)"
    product = "hb = MatMul (g, xs) h = Add (hb, w_bias)" if bias else "h = MatMul (g, xs)"
    known = "" if outputs else "float[n, 2, 16] o,"
    model = parse(
        f"""m (float[n, 16] x, float[16, {experts}] w_router, {first}, float[{experts}, 16, 32] w_down,
            float[64, 1] w_bias)
        => (float[n, 16] y{outputs})
        <{known} int64[1] k = {{2}}, int64[1] i0 = {{0}},
         int64[1] i1 = {{1}}, int64[1] i2 = {{2}}, int64[2] i13 = {{1, 3}}, int64[1] i3 = {{3}},
         int64[2] sizes = {{32, 32}}, float most = {{100}},
         float[4] preference = {{0, 0, 0.001, 0}}, int64[1] end = {{9999}}, float[n, {experts}] p, float[n, 2] v,
         int64[1] odd = {{{odd or 0}}}, float[1] unit = {{1}}, int64[n, 2] i,
         float[n, 2] v0, float[n, 16] r, float[n, 16] x2, float[n, 2] q>
        {{ x2 = Abs (x) p = MatMul (x2, w_router) {scores} {shares}
          {turned} xs = Unsqueeze (x2, i13) {product} {split} {activation}
          d = Gather (w_down, i) c = MatMul (d, b) cs = Squeeze (c, i3)
          ns = Unsqueeze ({"n" if odd is None else "n2"}, i2)
          o = Mul (cs, ns) r = ReduceSum <keepdims = 0> (o, i1) y = Neg (r) }}"""
    )
    generator = np.random.default_rng(0)
    for value in [value for value in model.graph.inputs if value.name != "x"]:
        assert value.shape is not None
        array = generator.standard_normal(value.shape.numpy()).astype(np.float32)
        if value.name == "w_bias":
            array *= bias
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(array, name=value.name)
        if value.uses():
            model.graph.register_initializer(value)
    return model


def _run(model: ir.Model) -> Any:
    feeds = {"x": np.random.default_rng(3).standard_normal((9, 16)).astype(np.float32)}
    return run_onnx(ir.to_proto(model).SerializeToString(), feeds, optimize=False)["y"]


def _fuse(model: ir.Model) -> OptimizeResult:
    return optimize(model, FUSED)


@EXPERTS
@pytest.mark.parametrize(
    ("variant", "is_normalized"),
    [
        ({}, 1),
        ({"shares": "n = Identity (v)"}, 0),
        ({"scores": "q, i = TopK (p, k)", "shares": "n = Softmax <axis = -1> (q)"}, 1),
        ({"split": ALTERNATING}, 1),
        ({"split": "up, gate = Split <axis = 2> (h, sizes)"}, 1),
        ({"weight": "up_columns"}, 1),
        ({"experts": 201}, 1),
    ],
    ids=["normalized", "not_normalized", "softmax_of_selected", "alternating", "up_first", "columns", "many_experts"],
)
def test_mixture_becomes_one_operator_with_the_same_numbers(variant: dict[str, Any], is_normalized: int) -> None:
    """Routing weights and the order of gate and up are those of the operators."""
    model = _model(**variant)
    before = _run(model)
    result = _fuse(model)
    assert ["Abs", "MatMul", "MoE", "Neg"] == operators(result.model)
    [node] = [node for node in result.model.graph if node.op_type == "MoE"]
    assert (2, is_normalized) == tuple(node.attributes.get_int(name) for name in ("k", "normalize_routing_weights"))
    np.testing.assert_allclose(_run(result.model), before, rtol=1e-4, atol=1e-4)
    assert 1 == result.fired["mixture_of_experts_fusion"]
    assert measure_coverage(result.model).is_complete
    assert {"topk", "reducesum"} <= set(json.loads(node.metadata_props[MODULES_KEY]))


@pytest.mark.parametrize(
    "variant",
    [
        {"scores": "s = Sigmoid (p) v, i = TopK (s, k)"},
        {"scores": "s = Softmax <axis = -1> (p) v, i = TopK <largest = 0> (s, k)"},
        {"activation": "z = Relu (gate) b = Mul (z, up)"},
        {"activation": f"gate0 = Min (gate, most) {GATED.replace('(gate', '(gate0')}"},
        {"scores": PREFERRED},
        {"bias": 0.0003},
        {"outputs": ", float[n, 2, 16] o"},
        {"shares": "t = ReduceSum <keepdims = 1> (v, i1) n0 = Div (v, t) n = Add (n0, n0)"},
        {"experts": 200, "odd": 150},
    ],
    ids=["sigmoid", "smallest", "relu", "limit", "preferred", "bias", "read_elsewhere", "scaled", "odd_expert"],
)
def test_other_routing_or_experts_stay(variant: dict[str, Any]) -> None:
    """A sigmoid router, the smallest scores, preferred or odd experts, limited activations and small biases stay."""
    result = _fuse(_model(**variant))
    assert "MoE" not in operators(result.model)
    assert 0 == result.fired["mixture_of_experts_fusion"]


@EXPERTS
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_exported_experts_are_fused_and_quantized(exporter: Any, tmp_path: Any) -> None:
    """Tokens sorted by expert, as exporters write them, become MoE; 4 bits are QMoE with the values of the blocks.

    The shared expert, and shares without normalization, are those of Qwen2-MoE.
    """
    import torch
    import transformers

    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False}
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        **sizes, **experts, num_key_value_heads=1, intermediate_size=32, shared_expert_intermediate_size=32
    )
    model = transformers.Qwen2MoeForCausalLM(config)
    make_distinct(model)
    model.eval().save_pretrained(tmp_path / "checkpoint")
    exported = HTPExporter(WinMLExportConfig(exporter=exporter, verify=False)).export_checkpoint(
        ModelRequest(str(tmp_path / "checkpoint")), tmp_path / "model.onnx"
    )
    fused, quantized, dequantized = (tmp_path / f"{name}.onnx" for name in ("fused", "quantized", "dequantized"))
    optimize_onnx(exported.only_part.model_path, fused, level="full")  # compares the outputs
    counts = operators(ir.load(fused))
    assert (1, 0, 0) == tuple(counts.count(name) for name in ("MoE", "TopK", "ScatterND"))
    quantize_onnx(fused, quantized, precision="int4", include=["model.layers.0.mlp.experts"])
    [experts_node] = [node for node in ir.load(quantized).graph if node.op_type == "QMoE"]
    names = [None if value is None else str(value.name) for value in experts_node.inputs]
    graph = ir.load(fused)
    [plain] = [node for node in graph.graph if node.op_type == "MoE"]
    stored = ir.load(quantized).graph.initializers
    for position, codes_at, scales_at, zeros_at in ((2, 2, 3, 11), (4, 5, 6, 12)):
        codes, scales, zeros = (
            None if names[index] is None else stored[str(names[index])].const_value.numpy()  # type: ignore[union-attr]
            for index in (codes_at, scales_at, zeros_at)
        )
        weight = plain.inputs[position]
        assert weight is not None
        assert weight.const_value is not None
        experts_count, rows, columns = weight.const_value.shape.numpy()
        steps = unpack_codes(codes, 4, columns).astype(np.float32).reshape(experts_count, rows, -1, 32)
        offsets = 8 if zeros is None else unpack_codes(zeros, 4, columns // 32)[..., None]
        values = ((steps - offsets) * scales[..., None]).reshape(experts_count, rows, columns)
        weight.const_value = ir.tensor(values, name=weight.name)
    ir.save(graph, dequantized)
    feeds = _decoder_feeds(fused)
    expected, found = (run_onnx(path, feeds, optimize=False)["logits"] for path in (dequantized, quantized))
    # The same weights in another kernel; without the shares of the router, the error is 0.3.
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


@EXPERTS
def test_experts_of_other_programs_keep_their_biases(tmp_path: Any) -> None:
    """QMoE has the biases of MoE."""
    sizes = {"w_router": "64, 4", "w_up": "4, 64, 64", "b_up": "4, 64", "w_down": "4, 64, 32", "b_down": "4, 64"}
    model = parse(
        f"""m (float[n, 64] x, {", ".join(f"float[{size}] {name}" for name, size in sizes.items())}) => (float[n, 64] y)
        {{ p = MatMul (x, w_router)
          y = com.microsoft.MoE <k = 2, normalize_routing_weights = 1, activation_type = "swiglu", swiglu_fusion = 1>
            (x, p, w_up, b_up, w_down, b_down) }}"""
    )
    model.opset_imports["com.microsoft"] = 1
    generator = np.random.default_rng(0)
    for value in [value for value in model.graph.inputs if value.name != "x"]:
        assert value.shape is not None
        scale = 0.01 if value.name in ("w_up", "w_down") else 1
        array = (scale * generator.standard_normal(value.shape.numpy())).astype(np.float32)
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(array, name=value.name)
        model.graph.register_initializer(value)
    plain, quantized = tmp_path / "plain.onnx", tmp_path / "quantized.onnx"
    ir.save(model, plain)
    quantize_onnx(plain, quantized, precision="int8", mode="weight-only", verify=False)
    assert "QMoE" in operators(ir.load(quantized))
    feeds = {"x": generator.standard_normal((5, 64)).astype(np.float32)}
    before, after = (run_onnx(path, feeds, optimize=False)["y"] for path in (plain, quantized))
    # Biases are larger than products, of which 8 bits change 1e-2.
    np.testing.assert_allclose(after, before, rtol=0, atol=0.05 * np.abs(before).max())


def _decoder_feeds(path: Any) -> dict[str, Any]:
    """Return a prompt of seven tokens."""
    feeds: dict[str, Any] = {}
    for value in ir.load(path).graph.inputs:
        if "past" in str(value.name):
            feeds[str(value.name)] = np.zeros((1, 1, 0, 32), np.float32)
        else:
            feeds[str(value.name)] = np.arange(7)[None]
    feeds["attention_mask"] = np.ones((1, 7), np.int64)
    return feeds
