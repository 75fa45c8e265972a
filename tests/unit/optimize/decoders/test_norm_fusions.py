"""Fusion of root-mean-square normalizations with the sum before them, and near misses."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphs import operators, parse, run_onnx
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import OptimizeResult, optimize
from winml.modelkit.tags.tagging import measure_coverage

FUSED = OptimizeOptions(simplified_layer_norm_fusion=True, skip_simplified_layer_norm_fusion=True)


def _model(
    *,
    square: str = "p = Pow (s, two)",
    mean: str = "m = ReduceMean <axes = [-1], keepdims = 1> (p)",
    inverse: str = "i = Div (one, r) n = Mul (s, i)",
    weight: str = "float[8] w",
    skip: str = "float[2, 5, 8] y",
    outputs: str = "float[2, 5, 8] out",
) -> ir.Model:
    """Return a sum and its normalization."""
    return parse(
        f"""m (float[2, 5, 8] x, {skip}) => ({outputs})
        <{weight} = {{1, 1, 1, 1, 1, 1, 1, 1}}, float two = {{2}}, float one = {{1}}, float epsilon = {{0.01}},
         float[2, 5, 8] s, float[2, 5, 8] p, float[2, 5, 1] m, float[2, 5, 8] n>
        {{ s = Add (x, y) {square} {mean} a = Add (m, epsilon) r = Sqrt (a) {inverse} out = Mul (w, n) }}"""
    )


def _answer(model: ir.Model) -> Any:
    generator = np.random.default_rng(0)
    feeds = {
        str(value.name): generator.standard_normal(value.shape.numpy()).astype(np.float32)  # type: ignore[union-attr]
        for value in model.graph.inputs
    }
    return run_onnx(ir.to_proto(model).SerializeToString(), feeds, optimize=False)["out"]


def _fuse(model: ir.Model) -> OptimizeResult:
    return optimize(model, FUSED)


@pytest.mark.parametrize(
    "variant",
    [{}, {"square": "p = Mul (s, s)"}, {"inverse": "i = Reciprocal (r) n = Mul (s, i)"}, {"inverse": "n = Div (s, r)"}],
    ids=["as_llama", "squared_by_product", "reciprocal", "divided"],
)
def test_sum_and_normalization_become_one_operator_with_the_same_numbers(variant: dict[str, str]) -> None:
    """The spellings of all exporters are fused, and the tag is that of the normalization."""
    model = _model(**variant)
    before = _answer(model)
    result = _fuse(model)
    assert operators(result.model) == ["SkipSimplifiedLayerNormalization"]
    np.testing.assert_allclose(_answer(result.model), before, rtol=1e-5, atol=1e-6)
    assert result.fired["skip_simplified_layer_norm_fusion"] == 1
    assert measure_coverage(result.model).is_complete


@pytest.mark.parametrize(
    "variant",
    [
        {"mean": "m = ReduceMean <axes = [1], keepdims = 1> (p)"},
        {"square": "p = Mul (s, x)"},
        {"inverse": "i = Div (two, r) n = Mul (s, i)"},
        {"weight": "float[5, 1] w"},
        {"outputs": "float[2, 5, 8] out, float[2, 5, 8] n"},
    ],
    ids=["other_axis", "no_square", "two_over_root", "weight_of_other_axis", "inner_value_is_output"],
)
def test_near_miss_is_left_alone(variant: dict[str, str]) -> None:
    """A graph of another function, or with readers of its inner values, stays unchanged."""
    if "weight" in variant:
        model = parse(
            """m (float[2, 5, 8] x, float[2, 5, 8] y) => (float[2, 5, 8] out)
            <float[5, 1] w = {1, 1, 1, 1, 1}, float two = {2}, float epsilon = {0.01}, float[2, 5, 8] p>
            { s = Add (x, y) p = Pow (s, two) m = ReduceMean <axes = [-1], keepdims = 1> (p) a = Add (m, epsilon)
              r = Sqrt (a) n = Div (s, r) out = Mul (w, n) }"""
        )
    else:
        model = _model(**variant)
    before = operators(model)
    assert operators(_fuse(model).model) == before


def test_sum_that_broadcasts_stays_before_its_normalization() -> None:
    """The joint operator needs two tensors of equal shape."""
    model = _model(skip="float[5, 8] y")
    before = _answer(model)
    result = _fuse(model)
    assert operators(result.model) == ["Add", "SimplifiedLayerNormalization"]
    np.testing.assert_allclose(_answer(result.model), before, rtol=1e-5, atol=1e-6)
