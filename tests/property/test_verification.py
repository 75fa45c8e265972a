"""Comparison of output arrays with random values: it finds every difference and no other."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from winml.modelkit.compare.outputs import MINIMUM_SCALE, THRESHOLDS, compare_outputs

Array = np.ndarray[Any, Any]

SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, max_side=4)
FLOATS = ("float16", "float32", "float64")
INTEGERS = ("int64", "int32", "int8", "uint8", "bool")


@st.composite
def floats(draw: st.DrawFn, *, allow_special: bool = False) -> Array:
    """Draw an array of any float type, well inside its range."""
    dtype = draw(st.sampled_from(FLOATS))
    numbers = st.floats(-1000, 1000, width=16, allow_nan=False)
    if allow_special:
        numbers |= st.sampled_from([np.nan, np.inf, -np.inf])
    return draw(arrays.arrays(dtype, SHAPES, elements=numbers))


@st.composite
def integers(draw: st.DrawFn) -> Array:
    """Draw an array of any integer type with its whole range, most often where float64 has gaps."""
    dtype = draw(st.sampled_from(INTEGERS))
    elements = st.integers(2**53, 2**63 - 1) if dtype == "int64" and draw(st.booleans()) else None
    return draw(arrays.arrays(dtype, SHAPES, elements=elements))


def is_equal(expected: Array, actual: Array) -> bool:
    """Return True if one output of one draw is accepted."""
    return compare_outputs([{"y": expected}], [{"y": actual}]).comparisons[0].is_equal


@given(st.lists(floats(allow_special=True) | integers(), min_size=1, max_size=3))
def test_equal_arrays_are_equal(outputs: list[Array]) -> None:
    """Arrays that are equal bit by bit have no difference, NaN and infinities included."""
    draw = dict(zip("abc", outputs, strict=False))
    info = compare_outputs([draw], [{name: value.copy() for name, value in draw.items()}])
    assert all(item.is_equal for item in info.comparisons)
    assert 0.0 == info.worst.max_abs_diff


@given(floats(), st.data())
def test_difference_above_the_threshold_is_detected_and_a_smaller_difference_is_not(
    expected: Array, data: st.DataObject
) -> None:
    """A value moved by three thresholds of the scale is found at every position.

    A value moved by a tenth of a threshold is accepted if neighbouring values reach a tenth of the scale along each
    axis.
    """
    threshold = THRESHOLDS[str(expected.dtype)]
    scale = float(np.abs(expected.astype(np.float64)).max())
    assume(scale > 1)
    place = tuple(data.draw(st.integers(0, size - 1)) for size in expected.shape)
    # The shift goes towards zero: float16 stays in its range, and rounding is at most half of the shift.
    sign = -1.0 if expected[place] > 0 else 1.0
    slices = (np.take(expected.astype(np.float64), place[axis], axis) for axis in range(expected.ndim))
    is_of_scale = expected.ndim < 2 or all(np.abs(values).max() >= 0.1 * scale for values in slices)
    for times, accepted in ((3.0, False), *([(0.09, True)] if is_of_scale else [])):
        actual = expected.copy()
        actual[place] = float(expected[place]) + sign * times * threshold * scale
        assert accepted == is_equal(expected, actual)


@given(integers(), st.data())
def test_any_integer_difference_is_detected(expected: Array, data: st.DataObject) -> None:
    """A change of one bit of one element is found, even where float64 would round it away."""
    place = tuple(data.draw(st.integers(0, size - 1)) for size in expected.shape)
    actual = expected.copy()
    actual[place] = not expected[place] if expected.dtype == bool else expected[place] ^ 1
    assert not is_equal(expected, actual)


@given(floats(allow_special=True), st.data())
def test_value_turning_nan_or_infinite_is_detected(expected: Array, data: st.DataObject) -> None:
    """NaN or infinity in place of another value is never accepted."""
    place = tuple(data.draw(st.integers(0, size - 1)) for size in expected.shape)
    value = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    assume(not np.array_equal(expected[place], value, equal_nan=True))
    actual = expected.copy()
    actual[place] = value
    assert not is_equal(expected, actual)
    assert not is_equal(actual, expected)


@given(
    arrays.arrays("float64", 5, elements=st.floats(-10, 10, width=16)),
    arrays.arrays("float64", 5, elements=st.floats(-1, 1, width=16)),
    st.integers(-40, 16),
)
def test_scaling_both_sides_has_no_effect(expected: Array, noise: Array, exponent: int) -> None:
    """The verdict depends on the relative values of the outputs, not on their unit, below the constants of masks."""
    actual = expected + noise * THRESHOLDS["float64"]
    factor = 2.0**exponent
    before = compare_outputs([{"y": expected}, {"y": actual}], [{"y": actual}, {"y": actual}])
    after = compare_outputs(
        [{"y": expected * factor}, {"y": actual * factor}], [{"y": actual * factor}, {"y": actual * factor}]
    )
    assume(np.abs(expected).max() * min(factor, 1.0) > MINIMUM_SCALE)
    assert [(item.is_equal, item.relative_diff) for item in before.comparisons] == [
        (item.is_equal, item.relative_diff) for item in after.comparisons
    ]
    assert (before.has_signal, before.is_verified) == (after.has_signal, after.is_verified)


@given(st.lists(floats(allow_special=True) | integers(), min_size=1, max_size=3), st.data())
def test_verified_means_every_output_is_equal_and_one_listens(outputs: list[Array], data: st.DataObject) -> None:
    """No output is left out of the verdict."""
    draw = dict(zip("abc", outputs, strict=False))
    name = data.draw(st.sampled_from(sorted(draw)))
    wrong = {**draw, name: draw[name].reshape(1, *draw[name].shape)}
    info = compare_outputs([draw, draw], [draw, wrong])
    assert not info.is_verified
    assert (name, 2) == (info.worst.name, info.worst.draw)
