"""Order of a GELU's products, with the factor one half last and bit-equal outputs."""

from __future__ import annotations

import numpy as np
import pytest

from graphs import answer, operators, parse, tags
from winml.modelkit.normalize.pipeline import normalize

TEXT = """m (float[4,8] x) => (float[4,8] y) <float r = {{1.4142135}}, float one = {{1}}, float half = {{{factor}}}>
{{ d = Div (x, r)  e = Erf (d)  s = Add (e, one)  {inner}  y = Mul (x, h) }}"""
X = np.random.default_rng(0).standard_normal((4, 8), dtype=np.float32)


def test_half_is_multiplied_last() -> None:
    """The second product reads the first, which reads the tensor and the sum."""
    model = parse(TEXT.format(factor=0.5, inner="h = Mul (half, s)"))
    expected = answer(model, x=X)
    assert normalize(model).changed
    assert ["Div", "Erf", "Add", "Mul", "Mul"] == operators(model)
    first, second = list(model.graph)[-2:]
    assert [value.name for value in first.inputs if value is not None] == ["x", "s"]
    assert second.inputs[0] is first.outputs[0]
    assert expected == answer(model, x=X)
    assert all(tags(model))
    assert not normalize(model).changed


@pytest.mark.parametrize(
    ("factor", "inner"),
    [(0.3, "h = Mul (half, s)"), (0.5, "h = Mul (half, d)"), (0.5, "i = Mul (half, s)  h = Add (i, i)")],
    ids=["another factor", "no Erf", "read twice"],
)
def test_other_products_stay(factor: float, inner: str) -> None:
    """Another order would round differently, or the graph has no GELU."""
    model = parse(TEXT.format(factor=factor, inner=inner))
    before = [
        [value.name for value in node.inputs if value is not None] for node in model.graph if node.op_type == "Mul"
    ]
    normalize(model)
    assert before[-1] == [value.name for value in list(model.graph)[-1].inputs if value is not None]


def test_nodes_stay_sorted_if_the_tensor_follows_the_sum() -> None:
    """A gated form multiplies by a later tensor."""
    model = parse(
        TEXT.format(factor=0.5, inner="h = Mul (half, s)").replace("y = Mul (x, h)", "z = Relu (x)  y = Mul (z, h)")
    )
    expected = answer(model, x=X)
    normalize(model)
    assert ["Div", "Erf", "Add", "Relu", "Mul", "Mul"] == operators(model)
    assert expected == answer(model, x=X)
