"""Explanation of output sizes by input sizes, checked at untried sizes."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from hypothesis import given
from hypothesis import strategies as st

from winml.modelkit.models.output_shapes import MOST_QUESTIONS, Observation, explain_output_shapes

Size = Callable[[dict[str, int]], int]

SYMBOLS = ("a", "b")
offsets = st.integers(0, 40)
factors = st.integers(1, 9)


@st.composite
def expressions(draw: st.DrawFn) -> Size:
    """Draw a size as networks compute it: affine, a division by a stride, a product or a sum."""
    symbol, factor, offset = draw(st.sampled_from(SYMBOLS)), draw(factors), draw(offsets)
    kind = draw(st.sampled_from(["affine", "division", "product", "sum"]))
    if kind == "affine":
        return lambda s: factor * s[symbol] + offset
    if kind == "division":
        return lambda s: (s[symbol] + offset) // (factor + 1)
    if kind == "product":
        return lambda s: factor * s["a"] * s["b"]
    return lambda s: s["a"] + s["b"] + offset


@given(size=expressions(), traced=st.tuples(st.integers(50, 120), st.integers(121, 200)), probe=st.integers(1, 300))
def test_explanation_holds_at_every_size(size: Size, traced: tuple[int, int], probe: int) -> None:
    """An explained size is correct at untried sizes, and the number of runs stays within its limit."""
    base = dict(zip(SYMBOLS, traced, strict=True))
    asked = []

    def observe(sizes: dict[str, int]) -> Observation:
        return Observation(sizes, {"out": (size(sizes),)})

    def ask(sizes: object) -> Observation:
        asked.append(sizes)
        return observe(dict(sizes))  # type: ignore[call-overload]

    others = [{**base, name: other} for name in SYMBOLS for other in (1, base[name] * 9 // 8 + 1)]
    observations = [observe(sizes) for sizes in (base, *others, {name: value + 7 for name, value in base.items()})]
    (explained,) = explain_output_shapes(observations, ask)["out"]
    assert MOST_QUESTIONS >= len(asked)
    if explained == "out_dim_0":
        return
    elsewhere = {"a": probe, "b": 301 - probe}
    assert size(elsewhere) == ir.SymbolicDim(str(explained)).evaluate(elsewhere)


@given(size=expressions())
def test_common_expressions_are_explained(size: Size) -> None:
    """Expressions that are common in networks always get an explanation."""
    base = {"a": 96, "b": 160}
    others = [{**base, name: other} for name in SYMBOLS for other in (1, base[name] * 9 // 8 + 1)]
    every = (base, *others, {name: value + 7 for name, value in base.items()})
    observations = [Observation(sizes, {"out": (size(sizes),)}) for sizes in every]

    def ask(sizes: object) -> Observation:
        return Observation(dict(sizes), {"out": (size(dict(sizes)),)})  # type: ignore[call-overload]

    assert ("out_dim_0",) != explain_output_shapes(observations, ask)["out"]
