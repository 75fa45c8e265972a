"""Optimality of bit allocation, over arbitrary choices of modules."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winml.modelkit.quantize.knapsack import GRAINS, Choice, allocate

CHOICES = st.builds(Choice, st.integers(0, 60), st.floats(0, 10).map(lambda loss: round(loss, 3)))
MODULES = st.lists(st.lists(CHOICES, min_size=1, max_size=4), min_size=1, max_size=5)


@given(MODULES, st.integers(0, 200))
def test_allocation_equals_brute_force(modules: list[list[Choice]], limit: int) -> None:
    """An allocation fits and has the smallest loss; it is None exactly if no combination fits."""
    losses = [
        sum(choice.loss for choice in picked)
        for picked in itertools.product(*modules)
        if sum(choice.cost for choice in picked) <= limit
    ]
    found = allocate(modules, limit)
    if found is None:
        assert not losses
        return
    picked = [choices[number] for choices, number in zip(modules, found, strict=True)]
    assert sum(choice.cost for choice in picked) <= limit
    assert min(losses) == pytest.approx(sum(choice.loss for choice in picked), abs=1e-9)


@given(MODULES, st.integers(0, 200), st.integers(1, 10**6))
def test_large_limits_hold(modules: list[list[Choice]], limit: int, factor: int) -> None:
    """Costs beyond the steps of a limit are rounded up, so each allocation fits."""
    scaled = [[Choice(cost * factor * GRAINS, loss) for cost, loss in choices] for choices in modules]
    found = allocate(scaled, limit * factor * GRAINS)
    if found is not None:
        cost = sum(choices[number].cost for choices, number in zip(scaled, found, strict=True))
        assert cost <= limit * factor * GRAINS
    smaller = allocate(modules, limit)
    assert (smaller is None) == (found is None) or smaller is not None
