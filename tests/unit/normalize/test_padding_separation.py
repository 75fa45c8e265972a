"""Separation of zero padding from a pool, into which ONNX Runtime would fuse it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graphs import answer, operators, parse, run_onnx, tags
from winml.modelkit.normalize.passes import PaddingSeparationPass
from winml.modelkit.normalize.pipeline import normalize
from winml.modelkit.ort.sessions import is_onnxruntime_at_least

POOL = "MaxPool <kernel_shape = [3,3], strides = [2,2]>"
PADS = "int64[8] pads = {0,0,1,1,0,0,1,1}"
PADDED = f"""
m (float[1,1,6,6] x) => (float[1,1,3,3] y) <{PADS}, float zero = {{0}}>
{{ a = Pad (x, pads, zero)  y = {POOL} (a) }}
"""
NEGATIVE = -1.0 - np.arange(36, dtype=np.float32).reshape(1, 1, 6, 6)
"""Every value is less than the zero of the padding."""


def _answer_by_default(model: ir.Model) -> list[object]:
    """Return the outputs of a model with ONNX Runtime's default optimizations."""
    outputs = run_onnx(ir.to_proto(model).SerializeToString(), {"x": NEGATIVE}, optimize=True)
    return [value.tolist() for value in outputs.values()]


@pytest.mark.parametrize("inputs", ["x, pads, zero", "x, pads"])
def test_padding_of_a_pool_survives_onnxruntime(inputs: str) -> None:
    """The zero, explicit or default, does not become the pool's own padding; outputs, nodes and tags are equal.

    ONNX Runtime before 1.32 returns other values without the pass, so the test detects a missing pass.
    """
    model = parse(PADDED.replace("x, pads, zero", inputs))
    before = (answer(model, x=NEGATIVE), operators(model), tags(model))
    assert is_onnxruntime_at_least("1.32") == (before[0] == _answer_by_default(model))
    assert PaddingSeparationPass()(model).modified
    assert before == (answer(model, x=NEGATIVE), operators(model), tags(model))
    assert before[0] == _answer_by_default(model)
    assert not PaddingSeparationPass()(model).modified


def test_normalized_padding_survives_beside_other_zeros() -> None:
    """The negative zero of the padding stays an initializer of its own, and the added zero stays positive."""
    model = parse(
        f"m (float[1,1,6,6] x) => (float[1,1,3,3] y, float[1,1,6,6] z) <{PADS}>"
        "{ zero = Constant <value_float = 0.0> ()  i = Identity (x)  a = Pad (i, pads, zero)  b = Identity (a)"
        f"  y = {POOL} (b)  z = Add (x, zero) }}"
    )
    expected = answer(model, x=NEGATIVE)
    assert normalize(model).changed
    assert expected == _answer_by_default(model)
    signs = {
        bool(np.signbit(value.const_value.numpy())) for value in model.graph.initializers.values() if not value.shape
    }
    assert {True, False} == signs
    assert not normalize(model).changed


@pytest.mark.parametrize(
    "body",
    [
        # Another value, which ONNX Runtime leaves alone.
        PADDED.replace("{0}>", "{-1}>"),
        # Computed.
        "m (float[1,1,6,6] x, float zero) => (float[1,1,3,3] y) <"
        + PADS
        + "> { a = Pad (x, pads, zero)  y = "
        + POOL
        + " (a) }",
        PADDED.replace("Pad (", 'Pad <mode = "edge"> ('),
        # Integers have one zero.
        PADDED.replace("float", "int8"),
        # Somebody else reads it, or everybody does.
        PADDED.replace("=> (", "=> (float[1,1,8,8] b, ").replace("  y", "  b = Neg (a)  y"),
        PADDED.replace("=> (", "=> (float[1,1,8,8] a, "),
        # No pool reads it.
        PADDED.replace(POOL, "Neg").replace("3,3", "8,8"),
    ],
    ids=["value", "computed", "mode", "integers", "reader", "output", "no pool"],
)
def test_padding_separation_does_not_fire(body: str) -> None:
    """Padding that ONNX Runtime reads correctly is not changed."""
    model = parse(body)
    before = str(ir.to_proto(model))
    assert not PaddingSeparationPass()(model).modified
    assert before == str(ir.to_proto(model))
