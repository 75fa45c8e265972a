"""Fusion of the GELU with tanh whose cube is a product of three factors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphs import parse, run_onnx
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import optimize

GELU = """m (float[2, 4] x, float[2, 4] z) => (float[2, 4] y) <float c = {0.044714998453855515},
        float root = {0.7978845834732056}, float one = {1}, float half = {0.5}> {
    a = Mul (x, x) p = Mul (a, x) q = Mul (c, p) s = Add (x, q) t = Mul (root, s) u = Tanh (t)
    v = Add (one, u) h = Mul (x, v) r = Mul (half, h) y = Abs (r) }"""
EARLY_HALF = GELU.replace("h = Mul (x, v) r = Mul (half, h)", "h = Mul (x, half) r = Mul (h, v)")
CHANGES = {
    "constant": ("0.0447", "0.05"),
    "base of the cube": ("p = Mul (a, x)", "p = Mul (a, z)"),
    "factor": ("h = Mul (x, v)", "h = Mul (z, v)"),
    "other reader": ("y = Abs (r)", "y = Add (r, u)"),
}


@pytest.mark.parametrize("body", [GELU, EARLY_HALF])
def test_gelu_with_tanh_becomes_one_node(body: str, tmp_path: Path) -> None:
    """The outputs differ by the rounding of another order."""
    model = parse(body)
    ir.save(model, tmp_path / "before.onnx")
    result = optimize(model, OptimizeOptions.model_validate({"tanh_gelu_fusion": True}))
    assert ["FastGelu", "Abs"] == [node.op_type for node in result.model.graph]
    assert 1 == result.fired["tanh_gelu_fusion"]
    ir.save(result.model, tmp_path / "after.onnx")
    feeds = {name: np.linspace(-4, 4, 8, dtype=np.float32).reshape(2, 4) for name in ("x", "z")}
    before, after = (run_onnx(tmp_path / f"{name}.onnx", feeds) for name in ("before", "after"))
    np.testing.assert_allclose(after["y"], before["y"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_computations_stay(change: tuple[str, str]) -> None:
    """A different constant, another operand, or a value that is read elsewhere."""
    model = parse(GELU.replace(*change))
    result = optimize(model, OptimizeOptions.model_validate({"tanh_gelu_fusion": True}))
    assert "Tanh" in {node.op_type for node in result.model.graph}
