"""Fusion into Attention of ONNX: numbers in hidden rows, and forms that the operator does not have."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import optimize
from winml.modelkit.ort.sessions import Session

LOWEST = float(np.finfo(np.float32).min)


def attention(query: str = "B, 2, T, 4", keys: str = "B, 2, T, 4", scale: float = 0.5) -> ir.Model:
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


def fused(model: ir.Model) -> ir.Model:
    """Return the model with standard operators."""
    return optimize(model.clone(), OptimizeOptions(level="full", operators="standard")).model


@pytest.mark.parametrize("hidden", [LOWEST, -1e4])
def test_row_without_visible_tokens_has_the_numbers_of_the_source(hidden: float) -> None:
    """Softmax gives each hidden token an equal weight; the lowest float is the mask of transformers."""
    model, generator = attention(), np.random.default_rng(0)
    result = fused(model)
    assert "Attention" in [node.op_type for node in result.graph]
    feeds = {name: generator.standard_normal((2, 2, 3, 4)).astype(np.float32) for name in "qkv"}
    feeds["mask"] = np.zeros((2, 1, 3, 3), np.float32)
    feeds["mask"][0] = hidden
    feeds["mask"][1, :, :, 0] = hidden
    expected, found = (Session(ir.to_proto(each).SerializeToString()).run(feeds)["y"] for each in (model, result))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    "model",
    [attention(scale=-0.5), attention(query="B, 1, T, 4", keys="B, 4, T, 4"), attention(query="1, 2, T, 4")],
    ids=["negative factor", "one query head", "one query sample"],
)
def test_form_that_the_operator_does_not_have_stays(model: ir.Model) -> None:
    """The operators of the attention are left as they are."""
    assert "Softmax" in [node.op_type for node in fused(model).graph]
