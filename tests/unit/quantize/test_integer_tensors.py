"""Weights, biases and ranges become integers with scales and zero points."""

from __future__ import annotations

import numpy as np
import pytest

from winml.modelkit.quantize.integer_tensors import quantize_bias, quantize_weight, scale_of_range

WEIGHT = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32) * np.array([1, 10, 0.1, 3], np.float32)


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_weight_comes_back_within_half_a_step(*, is_signed: bool, axis: int | None, is_symmetric: bool) -> None:
    """Each value is the nearest of the integers there are, whatever the form."""
    integers = quantize_weight(WEIGHT, is_signed=is_signed, axis=axis, is_symmetric=is_symmetric)
    shape = {None: (), 0: (-1, 1), 1: (1, -1)}[axis]
    scale, zero = integers.scale.reshape(shape), integers.zero_point.reshape(shape).astype(np.float32)
    back = (integers.values.astype(np.float32) - zero) * scale
    assert np.all(np.abs(back - WEIGHT) <= scale * 0.501)
    assert (np.int8 if is_signed else np.uint8) == integers.values.dtype == integers.zero_point.dtype
    if is_symmetric:
        assert {0 if is_signed else 128} == set(integers.zero_point.ravel().tolist())
    assert (WEIGHT.shape[axis] if axis is not None else 1) == integers.scale.size


def test_channel_of_zeros_has_scale_one() -> None:
    """Nothing is divided by zero, and zero stays zero."""
    weight = WEIGHT.copy()
    weight[:, 2] = 0
    integers = quantize_weight(weight, is_signed=True, axis=1, is_symmetric=True)
    assert 1.0 == integers.scale[2]
    assert not integers.values[:, 2].any()


def test_least_scale_makes_steps_wider() -> None:
    """A channel whose bias would not fit gets coarser weights; the others stay."""
    free = quantize_weight(WEIGHT, is_signed=True, axis=1, is_symmetric=True)
    least = np.array([0, 0, free.scale[2] * 4, 0])
    bound = quantize_weight(WEIGHT, is_signed=True, axis=1, is_symmetric=True, least_scale=least)
    assert bound.scale[2] == pytest.approx(4 * free.scale[2])
    assert np.array_equal(bound.values[:, [0, 1, 3]], free.values[:, [0, 1, 3]])
    assert np.abs(bound.values[:, 2]).max() <= 32


def test_bias_is_rounded_and_clipped_to_32_bits() -> None:
    """The scale is that of the products."""
    assert [3, -(2**31), 2**31 - 1] == quantize_bias(np.array([0.3, -1e9, 1e9]), np.array(0.1)).tolist()


@pytest.mark.parametrize(
    ("low", "high", "bits", "scale", "zero"),
    [(0, 25.5, 8, 0.1, 0), (-12.7, 12.8, 8, 0.1, 127), (2, 51, 8, 0.2, 0), (-1, -0.5, 8, 1 / 255, 255),
     (-1, 1, 16, 2 / 65535, 32768), (0, 0, 8, 1, 0)],
)  # fmt: skip
def test_range_has_an_exact_zero(low: float, high: float, bits: int, scale: float, zero: int) -> None:
    """The range is widened to hold zero, since padding and ReLU give it."""
    found_scale, found_zero = scale_of_range(low, high, bits)
    assert scale == pytest.approx(float(found_scale), rel=1e-6)
    assert abs(zero - int(found_zero)) <= 1
    assert {8: np.uint8, 16: np.uint16}[bits] == found_zero.dtype
