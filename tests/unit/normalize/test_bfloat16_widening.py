"""Computation of bfloat16 parts in float32 with rounding, as PyTorch does on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphs import answer, operators, parse, tags
from winml.modelkit.errors import WinMLError
from winml.modelkit.normalize.passes import BFloat16WideningPass

ISLAND = """m (float[2,3] x) => (float[3,2] y) {
    a = Cast <to = 16> (x)  b = Mul (a, a)  c = Transpose <perm = [1,0]> (b)  y = Cast <to = 1> (c)
}"""
X = np.random.default_rng(0).standard_normal((2, 3), dtype=np.float32)


def test_island_has_kernels_and_rounds_as_pytorch() -> None:
    """ONNX Runtime's CPU provider opens such a graph only after the pass."""
    model = parse(ISLAND)
    with pytest.raises(WinMLError):
        answer(model, x=X)
    assert BFloat16WideningPass()(model).modified
    assert ["Mul", "Transpose"] == [operator for operator in operators(model) if operator != "Cast"]
    narrow = torch.from_numpy(X).bfloat16()
    assert [(narrow * narrow).T.float().tolist()] == answer(model, x=X)
    assert all(tags(model))
    assert not BFloat16WideningPass()(model).modified


@pytest.mark.parametrize(
    "text",
    [
        "m (bfloat16[2] x) => (float[2] y) { a = Mul (x, x)  y = Cast <to = 1> (a) }",
        "m (float[2] x) => (float[2] y) { a = Cast <to = 16> (x)  y = Cast <to = 1> (a) }",
        "m (float[2] x) => (float[2] y) { y = Mul (x, x) }",
    ],
    ids=["a model in bfloat16", "rounding alone", "nothing in bfloat16"],
)
def test_other_graphs_stay(text: str) -> None:
    """Operators with kernels, and graphs of another type, are not changed."""
    assert not BFloat16WideningPass()(parse(text)).modified
