"""Symbolic sizes compared with numbers, and outputs of a graph simplified by them."""

from __future__ import annotations

from functools import reduce

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import answer, parse
from winml.modelkit.normalize.pipeline import normalize
from winml.modelkit.normalize.size_propagation import ONE, Size, constant, product, symbol

NAMES = ("batch", "past", "sequence")
monomials = st.builds(
    lambda names, factor: product([constant(factor), *map(symbol, names)]),
    st.lists(st.sampled_from(NAMES), max_size=3),
    st.integers(-4, 4),
)
polynomials = st.builds(lambda parts: reduce(Size.__add__, parts), st.lists(monomials, min_size=1, max_size=4))
values = st.fixed_dictionaries({name: st.integers(0, 50) for name in NAMES})


def _evaluate(size: Size, sizes: dict[str, int]) -> int:
    return sum(factor * int(np.prod([sizes[name] for name in names], dtype=object)) for names, factor in size.terms)


@given(left=polynomials, right=polynomials, sizes=values)
def test_sizes_compute_as_numbers(left: Size, right: Size, sizes: dict[str, int]) -> None:
    """Sum, difference and product hold at all sizes; a natural size is never below zero."""
    one, other = _evaluate(left, sizes), _evaluate(right, sizes)
    assert (one + other, one - other, one * other) == (
        _evaluate(left + right, sizes), _evaluate(left - right, sizes), _evaluate(left * right, sizes),
    )  # fmt: skip
    assert not left.is_natural or one >= 0
    assert (left == right) == (not (left - right).terms)


@given(left=polynomials, right=polynomials)
def test_quotient_times_divisor_is_the_size(left: Size, right: Size) -> None:
    """A product divided by its factor is the other factor; a quotient exists only without a remainder."""
    if right.terms:
        assert (left * right).divide_exactly(right) == left
    quotient = left.divide_exactly(right)
    assert quotient is None or quotient * right == left
    assert left.divide_exactly(ONE) == left


STEPS = {
    "rows": "{o}s = Shape ({i})  {o}n = Slice ({o}s, zero, one)  {o}r = Concat <axis=0> ({o}n, rest, last)"
    "  {o} = Reshape ({i}, {o}r)",
    "tokens": "{o}s = Shape ({i})  {o}n = Slice ({o}s, zero, two)  {o}r = Concat <axis=0> ({o}n, rest)"
    "  {o} = Reshape ({i}, {o}r)",
    "flat": "{o}f = Reshape ({i}, flat)  {o}s = Shape ({i})  {o} = Reshape ({o}f, {o}s)",
    "swap": "{o}t = Transpose <perm=[1,0,2]> ({i})  {o}s = Shape ({i})  {o}u = Transpose <perm=[1,0,2]> ({o}t)"
    "  {o} = Reshape ({o}u, {o}s)",
    "cut": "{o}s = Shape ({i})  {o}n = Slice ({o}s, one, two)  {o} = Slice ({i}, zero, {o}n, one)",
    "wide": "{o}s = Shape ({i})  {o} = Expand ({i}, {o}s)",
    "half": "{o}a, {o}b = Split <axis=2> ({i})  {o} = Concat <axis=2> ({o}b, {o}a)",
}
"""Operations on a tensor [batch, sequence, 6] with computed sizes."""


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5), batch=st.integers(1, 4))
def test_simplified_graph_has_equal_outputs(steps: list[str], batch: int) -> None:
    """The outputs are equal with one token and with five."""
    numbers = {"zero": [0], "one": [1], "two": [2], "rest": [-1], "last": [6], "flat": [-1]}
    constants = "  ".join(f"{name} = Constant <value_ints={value}> ()" for name, value in numbers.items())
    body = "  ".join(STEPS[step].format(i=f"v{place}", o=f"v{place + 1}") for place, step in enumerate(steps))
    text = f"m (float[batch,sequence,6] v0) => (float[b,s,c] y) {{ {constants}  {body}  y = Relu (v{len(steps)}) }}"
    model = parse(text)
    rng = np.random.default_rng(0)
    feeds = [rng.standard_normal((batch, tokens, 6), dtype=np.float32) for tokens in (1, 5)]
    before = [answer(model, v0=x)[0] for x in feeds]
    normalize(model)
    assert all(np.array_equal(old, answer(model, v0=x)[0]) for old, x in zip(before, feeds, strict=True))
