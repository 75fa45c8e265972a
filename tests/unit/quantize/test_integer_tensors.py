"""Biases and ranges as integers with scales and zero points."""

from __future__ import annotations

import numpy as np
import pytest

from winml.modelkit.quantize.engines.qdq import quantize_bias, scale_of_range


def test_bias_is_rounded_and_clipped_to_32_bits() -> None:
    """Values beyond int32 become the least or the greatest int32."""
    assert [3, -(2**31), 2**31 - 1] == quantize_bias(np.array([0.3, -1e9, 1e9]), np.array(0.1)).tolist()


@pytest.mark.parametrize(
    ("low", "high", "bits", "scale", "zero"),
    [(0, 25.5, 8, 0.1, 0), (-12.7, 12.8, 8, 0.1, 127), (2, 51, 8, 0.2, 0), (-1, -0.5, 8, 1 / 255, 255),
     (-1, 1, 16, 2 / 65535, 32768), (0, 0, 8, 1, 0)],
)  # fmt: skip
def test_range_has_an_exact_zero(low: float, high: float, bits: int, scale: float, zero: int) -> None:
    """The range is widened to contain zero, which padding and ReLU produce."""
    found_scale, found_zero = scale_of_range(low, high, bits)
    assert scale == pytest.approx(float(found_scale), rel=1e-6)
    assert abs(zero - int(found_zero)) <= 1
    assert {8: np.uint8, 16: np.uint16}[bits] == found_zero.dtype
