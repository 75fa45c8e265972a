"""Invariants of fidelity measures: the SQNR of a scaled copy depends on the scale only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from winml.modelkit.compare.fidelity import MOST_DB, measure_fidelity

Array = np.ndarray[Any, Any]
VALUES = st.floats(-1e3, 1e3, width=32).filter(lambda value: value == 0 or abs(value) > 1e-3)
ARRAYS = st_numpy.arrays(np.float32, st_numpy.array_shapes(max_dims=3, max_side=6), elements=VALUES)
ERRORS = st.floats(1e-4, 0.5).flatmap(lambda error: st.sampled_from([error, -error]))


def single_fidelity(expected: Array, actual: Array) -> Any:
    """Return the fidelity of a single output in a single draw."""
    return measure_fidelity([{"y": expected}], [{"y": actual}], 10.0).outputs[0]


@given(ARRAYS, ERRORS)
def test_scaled_copy_has_the_ratio_of_its_scale(values: Array, error: float) -> None:
    """An output (1 + e) times too large has a noise of e times the signal, and the same direction."""
    wide = values.astype(np.float64)
    measured = single_fidelity(wide, wide * (1 + error))
    if not values.any():
        assert (MOST_DB, 1.0) == (measured.sqnr_db, measured.cosine)
        return
    assert measured.sqnr_db == pytest.approx(-20 * math.log10(abs(error)), abs=1e-3)
    assert measured.relative_error == pytest.approx(abs(error), rel=1e-4)
    assert measured.cosine == pytest.approx(1.0, abs=1e-9)


@given(ARRAYS, ARRAYS, st.floats(0.125, 8.0))
def test_ratio_does_not_depend_on_unit_order_and_sign(values: Array, noise: Array, unit: float) -> None:
    """The measures stay equal if both sides are scaled, negated or shuffled alike."""
    wide = values.astype(np.float64)
    near = wide + np.resize(noise, values.shape) / 100
    expected = single_fidelity(wide, near)
    for changed, also in (
        (wide * unit, near * unit),
        (-wide, -near),
        (wide[::-1], near[::-1]),
        (wide.ravel(), near.ravel()),
    ):
        measured = single_fidelity(changed, also)
        assert measured.sqnr_db == pytest.approx(expected.sqnr_db, abs=1e-6)
        assert measured.cosine == pytest.approx(expected.cosine, abs=1e-9)


@given(ARRAYS)
def test_equal_outputs_reach_the_highest_ratio(values: Array) -> None:
    """An array compared with itself has the highest SQNR and no difference."""
    measured = single_fidelity(values, values)
    assert (MOST_DB, 0.0, 0.0) == (measured.sqnr_db, measured.relative_error, measured.max_abs_diff)
    assert measured.cosine == pytest.approx(1.0)


@given(ARRAYS, ARRAYS)
def test_cosine_and_difference_are_symmetric(values: Array, noise: Array) -> None:
    """Only the ratio depends on which side is the reference."""
    other = values + np.resize(noise, values.shape)
    one, turned = single_fidelity(values, other), single_fidelity(other, values)
    assert one.cosine == pytest.approx(turned.cosine, abs=1e-9)
    assert one.max_abs_diff == pytest.approx(turned.max_abs_diff)
    assert -1 - 1e-9 <= one.cosine <= 1 + 1e-9
    assert abs(one.sqnr_db) <= MOST_DB
