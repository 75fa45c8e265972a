"""Fusion of attentions as torch's exporters write them, and near misses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphs import operators, parse, run_onnx, tags
from installed_versions import OPSET_24
from winml.modelkit.optimize.attention_fusion import AttentionFusionPass, guard_by_masks
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import GraphCensus, optimize
from winml.modelkit.ort.sessions import Session

MINUS_INFINITY = float("-inf")
NOT_GUARDED = {"guard": "", "softmax": "p = Softmax <axis = -1> (b)", "product": "c = MatMul (p, vt)"}


def _attention_model(
    *,
    keys: str = "kt = Transpose <perm = [0, 2, 3, 1]> (ks) k1 = Mul (kt, s)",
    scores: str = "a = MatMul (q1, k1) b = Add (a, mask)",
    softmax: str = "p = Softmax <axis = -1> (b)",
    guard: str = "n = IsNaN (p) g = Where (n, zero, p)",
    product: str = "c = MatMul (g, vt)",
    joined: str = "o = Transpose <perm = [0, 2, 1, 3]> (c)",
    mask: str = "float[2, 1, 5, 7]",
    outputs: str = "float[2, 5, 12] y",
) -> ir.Model:
    """Return one attention: two samples, 3 heads of 4, 5 queries, 7 keys."""
    return parse(
        f"""m (float[2, 5, 12] q, float[2, 7, 12] k, float[2, 7, 12] v, {mask} mask) => ({outputs})
        <float s = {{0.7}}, float zero = {{0}}, int64[4] heads = {{2, -1, 3, 4}}, int64[3] flat = {{2, 5, 12}},
         float[2, 3, 5, 4] q1, float[2, 7, 3, 4] ks, float[2, 5, 3, 4] qs, float[2, 7, 3, 4] vs, float[2, 3, 5, 7] a,
         float[2, 3, 5, 7] b, float[2, 3, 5, 7] p, float[2, 3, 5, 4] c, float[2, 5, 3, 4] o, float[2, 5, 12] y>
        {{ qs = Reshape (q, heads) qt = Transpose <perm = [0, 2, 1, 3]> (qs) q1 = Mul (qt, s)
          ks = Reshape (k, heads) {keys}
          vs = Reshape (v, heads) vt = Transpose <perm = [0, 2, 1, 3]> (vs)
          {scores} {softmax} {guard} {product} {joined} y = Reshape (o, flat) }}"""
    )


def _attention_feeds(*, masked_row: bool = False) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    feeds = {
        name: generator.standard_normal((2, length, 12)).astype(np.float32)
        for name, length in (("q", 5), ("k", 7), ("v", 7))
    }
    mask = np.where(generator.random((2, 1, 5, 7)) < 0.3, MINUS_INFINITY, 0.0).astype(np.float32)
    mask[:, :, :, 0] = 0.0
    if masked_row:
        mask[1, :, 2, :] = MINUS_INFINITY
    return {**feeds, "mask": mask}


def _run_model(model: ir.Model, feeds: dict[str, Any]) -> Any:
    return run_onnx(ir.to_proto(model).SerializeToString(), feeds, optimize=False)["y"]


def _fuse_attention(model: ir.Model) -> ir.Model:
    return optimize(model, OptimizeOptions.model_validate({"attention_fusion": True})).model


@pytest.mark.parametrize("masked_row", [False, True])
def test_guarded_attention_becomes_one_operator_with_the_same_numbers(masked_row: bool) -> None:
    """A fully masked row is zero before and after. It is found in the mask, as WebGPU has no kernel of IsNaN."""
    feeds = _attention_feeds(masked_row=masked_row)
    expected = _run_model(_attention_model(), feeds)
    fused = _fuse_attention(_attention_model())
    assert Counter(["MultiHeadAttention", "ReduceMax", "Transpose", "Equal", "Where"]) == Counter(operators(fused))
    assert all(tags(fused))
    actual = _run_model(fused, feeds)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert (actual[1, 2] == 0).all() == masked_row


def test_masks_without_a_lowest_value_in_numpy_keep_isnan() -> None:
    """An attention of another tool in bfloat16."""
    model = parse(
        """m (bfloat16[2, 5, 12] q, bfloat16[2, 1, 5, 5] mask) => (bool[2, 5, 12] y)
        { a = com.microsoft.MultiHeadAttention <num_heads = 3> (q, q, q, , , mask) n = IsNaN (a) y = Not (n) }""",
        domains=', "com.microsoft" : 1',
    )
    guard_by_masks(model)
    assert ["MultiHeadAttention", "IsNaN", "Not"] == list(operators(model))


def _model_with_zeroed_rows(condition: str = "") -> ir.Model:
    """Return an attention as the dynamo exporter writes it, with the given shape of the condition on rows."""
    return parse(
        f"""m (float[2, 5, 12] q, float[2, 7, 12] k, float[2, 7, 12] v, float[2, 1, 5, 7] mask) => (float[2, 5, 12] y)
        <float s = {{0.7}}, float zero = {{0}}, float low = {{-1e30}}, int64[4] heads = {{2, -1, 3, 4}},
         int64[3] flat = {{2, 5, 12}}, float[2, 3, 5, 4] q1, float[2, 7, 3, 4] ks, float[2, 5, 3, 4] qs,
         float[2, 7, 3, 4] vs, float[2, 3, 5, 7] a, float[2, 3, 5, 7] b, float[2, 3, 5, 7] p, float[2, 3, 5, 4] d,
         float[2, 3, 5, 4] c, float[2, 5, 3, 4] o, bool{condition or "[2, 1, 5, 1]"} out, float[2, 5, 12] y>
        {{ qs = Reshape (q, heads) qt = Transpose <perm = [0, 2, 1, 3]> (qs) q1 = Mul (qt, s)
          ks = Reshape (k, heads) kt = Transpose <perm = [0, 2, 3, 1]> (ks) k1 = Mul (kt, s)
          vs = Reshape (v, heads) vt = Transpose <perm = [0, 2, 1, 3]> (vs)
          a = MatMul (q1, k1) b = Add (a, mask) p = Softmax <axis = -1> (b) d = MatMul (p, vt)
          rows = ReduceMax <keepdims = 1, axes = [-1]> (mask) out = Less (rows, low) c = Where (out, zero, d)
          o = Transpose <perm = [0, 2, 1, 3]> (c) y = Reshape (o, flat) }}"""
    )


def test_rows_zeroed_after_the_product_are_zeroed_after_the_operator() -> None:
    """The dynamo exporter zeroes rows after the product; a fully masked row is zero before and after."""
    feeds = _attention_feeds(masked_row=True)
    # The dynamo exporter writes the lowest number in place of minus infinity.
    feeds["mask"] = np.maximum(feeds["mask"], np.float32(-3.4e38))
    expected = _run_model(_model_with_zeroed_rows(), feeds)
    fused = _fuse_attention(_model_with_zeroed_rows())
    assert Counter(["MultiHeadAttention", "ReduceMax", "Less", "Reshape", "Where"]) == Counter(operators(fused))
    actual = _run_model(fused, feeds)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert (actual[1, 2] == 0).all()
    assert all(tags(fused))


def test_rows_zeroed_by_head_stay() -> None:
    """The heads are joined after the operator, so a condition that differs between heads cannot be applied."""
    model = _model_with_zeroed_rows("[2, 3, 5, 1]")
    assert "MultiHeadAttention" not in operators(_fuse_attention(model))


def test_unguarded_unmasked_attention_with_keys_transposed_in_two_steps_is_fused() -> None:
    """Without mask and guard, only the operator is left; a scale after the product is included."""
    variant = {
        "keys": "kt = Transpose <perm = [0, 2, 1, 3]> (ks) k1 = Transpose <perm = [0, 1, 3, 2]> (kt)",
        "scores": "r = MatMul (q1, k1) b = Div (r, s)",
        **NOT_GUARDED,
    }
    model = _attention_model(**variant)
    feeds = _attention_feeds()
    expected = _run_model(model, feeds)
    fused = _fuse_attention(model)
    assert ["MultiHeadAttention"] == operators(fused)
    # Scale 0.7 on the queries and 1 / 0.7 behind the product: 1.
    np.testing.assert_allclose(next(iter(fused.graph)).attributes.get_float("scale"), 1.0, rtol=1e-6)
    np.testing.assert_allclose(_run_model(fused, feeds), expected, rtol=1e-5, atol=1e-6)


def _model_with_cache(batch: int = 2, size: int = 4) -> ir.Model:
    """Return an attention over a cache of this batch, with values of this size."""
    return parse(
        f"""m (float[2, 5, 12] q, float[{batch}, 3, 2, 4] pk, float[{batch}, 3, 5, 4] nk,
            float[{batch}, 3, 2, {size}] pv, float[{batch}, 3, 5, {size}] nv, float[2, 1, 5, 7] mask)
        => (float[2, 5, {3 * size}] y, float[{batch}, 3, 7, 4] k, float[{batch}, 3, 7, {size}] v)
        <int64[4] heads = {{2, -1, 3, 4}}, int64[3] flat = {{2, 5, {3 * size}}}, float[2, 5, 3, 4] qs,
         float[2, 3, 5, 4] q1, float[2, 3, 5, 7] a, float[2, 3, 5, 7] b, float[2, 3, 5, 7] p, float[2, 3, 5, {size}] c,
         float[2, 5, 3, {size}] o>
        {{ qs = Reshape (q, heads) q1 = Transpose <perm = [0, 2, 1, 3]> (qs)
          k = Concat <axis = 2> (pk, nk) v = Concat <axis = 2> (pv, nv) kt = Transpose <perm = [0, 1, 3, 2]> (k)
          a = MatMul (q1, kt) b = Add (a, mask) p = Softmax <axis = -1> (b) c = MatMul (p, v)
          o = Transpose <perm = [0, 2, 1, 3]> (c) y = Reshape (o, flat) }}"""
    )


def test_attention_over_a_cache_reads_its_keys_and_values() -> None:
    """Keys and values are outputs as well, and stay."""
    model = _model_with_cache()
    generator = np.random.default_rng(1)
    sizes = {"pk": 2, "nk": 5, "pv": 2, "nv": 5}
    cache = {name: generator.standard_normal((2, 3, size, 4)).astype(np.float32) for name, size in sizes.items()}
    feeds = {**{name: _attention_feeds()[name] for name in ("q", "mask")}, **cache}
    expected = _run_model(model, feeds)
    fused = _fuse_attention(model)
    assert ["Concat", "Concat", "MultiHeadAttention"] == sorted(operators(fused))
    np.testing.assert_allclose(_run_model(fused, feeds), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes", [{"batch": 1}, {"size": 8}])
def test_cache_that_the_operator_refuses_is_not_fused(changes: Mapping[str, int]) -> None:
    """The operator broadcasts no batch, and takes values of a cache only in the size of keys."""
    assert "MultiHeadAttention" not in operators(_fuse_attention(_model_with_cache(**changes)))


def test_two_attentions_of_one_scope_are_both_fused() -> None:
    """A module that is called twice has two attentions with equal name prefixes, but different values."""

    def block(number: int, query: str, result: str) -> str:
        lines = f"""qs = Reshape ({query}, heads) q1 = Transpose <perm = [0, 2, 1, 3]> (qs)
          ks = Reshape (k, heads) k1 = Transpose <perm = [0, 2, 3, 1]> (ks)
          vs = Reshape (k, heads) vt = Transpose <perm = [0, 2, 1, 3]> (vs)
          b = MatMul (q1, k1) p = Softmax <axis = -1> (b) n = IsNaN (p) g = Where (n, zero, p)
          c = MatMul (g, vt) o = Transpose <perm = [0, 2, 1, 3]> (c) {result} = Reshape (o, flat)"""
        return re.sub(r"\b(qs|q1|ks|k1|vs|vt|b|p|n|g|c|o)\b", rf"\g<1>_{number}", lines)

    types = ", ".join(
        f"float[2, 5, 3, 4] {name}_{number}" for number in (1, 2) for name in ("qs", "ks", "vs", "o")
    ) + ", ".join(
        f", float[2, 3, 5, 5] b_{number}, float[2, 3, 5, 5] p_{number}, float[2, 3, 5, 4] c_{number}"
        for number in (1, 2)
    ).replace(", ,", ",")
    text = f"""m (float[2, 5, 12] q, float[2, 5, 12] k) => (float[2, 5, 12] y)
        <float zero = {{0}}, int64[4] heads = {{2, -1, 3, 4}}, int64[3] flat = {{2, 5, 12}}, float[2, 5, 12] t, {types}>
        {{ {block(1, "q", "t")} {block(2, "t", "y")} }}"""
    feeds = {name: value for name, value in _attention_feeds().items() if name == "q"}
    feeds["k"] = feeds["q"][:, ::-1].copy()
    expected = _run_model(parse(text), feeds)
    fused = _fuse_attention(parse(text))
    assert 2 == operators(fused).count("MultiHeadAttention")
    np.testing.assert_allclose(_run_model(fused, feeds), expected, rtol=1e-5, atol=1e-6)


def test_fused_attention_belongs_to_the_module_of_its_products() -> None:
    """The new node has the module of the replaced products, and its opset is imported."""
    fused = _fuse_attention(_attention_model())
    assert {("/M/MatMul", "merged")} <= set(tags(fused))
    assert all(tags(fused))
    assert fused.opset_imports["com.microsoft"] == 1


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param({"outputs": "float[2, 5, 12] y, float[2, 3, 5, 7] p"}, id="probabilities are an output"),
        pytest.param({"outputs": "float[2, 5, 12] y, float[2, 3, 5, 7] a"}, id="scores are an output"),
        pytest.param({"mask": "float[2, 1, 1, 7]"}, id="mask broadcasts over queries"),
        pytest.param({"softmax": "p = Softmax <axis = 2> (b)"}, id="softmax over queries"),
        pytest.param({"guard": "n = IsNaN (p) g = Where (n, s, p)"}, id="guard puts something other than zero"),
        pytest.param({"joined": "o = Transpose <perm = [0, 2, 3, 1]> (c)"}, id="heads are joined in another order"),
        pytest.param({"scores": "a = MatMul (q1, k1) b = Mul (a, mask)"}, id="mask multiplies"),
    ],
)
def test_near_miss_is_left_alone(variant: dict[str, str]) -> None:
    """A graph similar to an attention keeps its operators."""
    model = _attention_model(**variant)
    before = GraphCensus.of(model)
    rewrite = AttentionFusionPass()
    assert not rewrite(model).modified
    assert before == GraphCensus.of(model)


def _fuse_into_standard(model: ir.Model) -> ir.Model:
    result = optimize(model, OptimizeOptions.model_validate({"attention_fusion": True, "operators": "standard"}))
    assert all(tags(result.model))
    assert not [name for name in GraphCensus.of(result.model).operators if ":" in name]
    return result.model


@OPSET_24
@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        pytest.param({}, ["Attention", "IsNaN", "Where"], id="guarded"),
        pytest.param({**NOT_GUARDED}, ["Max", "Attention"], id="not guarded"),
        pytest.param({"scores": "b = MatMul (q1, k1)", **NOT_GUARDED}, ["Attention"], id="no mask"),
        pytest.param({"mask": "float[2, 3, 5, 7]", **NOT_GUARDED}, ["Max", "Attention"], id="mask by head"),
        pytest.param(
            {"joined": "o1 = Relu (c) o = Transpose <perm = [0, 2, 1, 3]> (o1)", **NOT_GUARDED},
            [*["Reshape", "Transpose"] * 3, "Max", "Attention", "Relu", "Transpose", "Reshape"],
            id="heads not joined",
        ),
    ],
)
def test_attention_becomes_the_operator_of_onnx_with_the_same_numbers(
    variant: dict[str, str], expected: list[str]
) -> None:
    """Heads stay an axis where they are not joined. Max keeps the lowest float out of masks without a guard."""
    feeds = _attention_feeds()
    if variant.get("mask") == "float[2, 3, 5, 7]":
        feeds["mask"] = np.repeat(feeds["mask"], 3, axis=1)
    reference = _run_model(_attention_model(**variant), feeds)
    fused = _fuse_into_standard(_attention_model(**variant))
    assert Counter(expected) == Counter(operators(fused))
    np.testing.assert_allclose(_run_model(fused, feeds), reference, rtol=1e-5, atol=1e-6)


@OPSET_24
@pytest.mark.parametrize("masked_row", [False, True])
def test_fully_masked_row_of_the_operator_of_onnx_is_zero(masked_row: bool) -> None:
    """The guard stays, since readers differ in such rows."""
    feeds = _attention_feeds(masked_row=masked_row)
    actual = _run_model(_fuse_into_standard(_attention_model()), feeds)
    np.testing.assert_allclose(actual, _run_model(_attention_model(), feeds), rtol=1e-5, atol=1e-6)


@OPSET_24
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param({"mask": "float[2, 1, 1, 7]"}, id="mask of one row"),
        pytest.param({"scores": "a = MatMul (q1, k1) b = Mul (a, mask)"}, id="mask multiplies"),
        pytest.param({"scores": "a = MatMul (q1, k1) t = Tanh (a) b = Add (t, mask)"}, id="limited scores"),
        pytest.param({"outputs": "float[2, 5, 12] y, float[2, 3, 5, 7] p"}, id="probabilities are an output"),
    ],
)
def test_near_miss_of_the_operator_of_onnx_is_left_alone(variant: dict[str, str]) -> None:
    """A graph similar to an attention keeps its softmax."""
    assert "Softmax" in operators(_fuse_into_standard(_attention_model(**variant)))


def test_attention_stays_if_the_provider_lacks_the_operator() -> None:
    """An execution provider with operators of ONNX only gets no MultiHeadAttention at any level."""
    result = optimize(_attention_model(), OptimizeOptions(level="full", ep="qnn"))
    assert not [name for name in GraphCensus.of(result.model).operators if ":" in name]


LOWEST = float(np.finfo(np.float32).min)


def _standard_attention(query: str = "B, 2, T, 4", keys: str = "B, 2, T, 4", scale: float = 0.5) -> ir.Model:
    """An attention with a mask that is added to the scores."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 23]>
        attention (float[{query}] q, float[{keys}] k, float[{keys}] v, float[B, 1, T, T] mask) => (float[B, 4, T, 4] y)
        <float scale = {{{scale}}}>
        {{
            transposed = Transpose <perm = [0, 1, 3, 2]> (k)
            scores = MatMul (q, transposed)
            scaled = Mul (scores, scale)
            masked = Add (scaled, mask)
            weights = Softmax <axis = -1> (masked)
            y = MatMul (weights, v)
        }}"""
    )
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def _fused_standard(model: ir.Model) -> ir.Model:
    """Return the model with standard operators."""
    return optimize(model.clone(), OptimizeOptions(level="full", operators="standard")).model


@OPSET_24
@pytest.mark.parametrize("hidden", [LOWEST, -1e4])
def test_row_without_visible_tokens_has_the_numbers_of_the_source(hidden: float) -> None:
    """Softmax gives each hidden token an equal weight; the lowest float is the mask of transformers."""
    model, generator = _standard_attention(), np.random.default_rng(0)
    result = _fused_standard(model)
    assert "Attention" in [node.op_type for node in result.graph]
    feeds = {name: generator.standard_normal((2, 2, 3, 4)).astype(np.float32) for name in "qkv"}
    feeds["mask"] = np.zeros((2, 1, 3, 3), np.float32)
    feeds["mask"][0] = hidden
    feeds["mask"][1, :, :, 0] = hidden
    expected, found = (Session(ir.to_proto(each).SerializeToString()).run(feeds)["y"] for each in (model, result))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@OPSET_24
@pytest.mark.parametrize(
    "model",
    [
        _standard_attention(scale=-0.5),
        _standard_attention(query="B, 1, T, 4", keys="B, 4, T, 4"),
        _standard_attention(query="1, 2, T, 4"),
    ],
    ids=["negative factor", "one query head", "one query sample"],
)
def test_form_that_the_operator_does_not_have_stays(model: ir.Model) -> None:
    """The operators of the attention are left as they are."""
    assert "Softmax" in [node.op_type for node in _fused_standard(model).graph]
