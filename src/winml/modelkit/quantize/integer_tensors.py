"""Turns biases and ranges into integers with scales and zero points.

Numbers only: knows no graph. A float ``x`` is the integer ``round(x / scale) + zero_point``, clipped to its type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["quantize_bias", "scale_of_range"]

Array = NDArray[Any]


def quantize_bias(bias: Array, scale: Array) -> Array:
    """Return a bias in 32 bits, by the scale of the products it is added to."""
    limits = np.iinfo(np.int32)
    values = np.rint(bias.astype(np.float64) / scale.astype(np.float64))
    return np.clip(values, limits.min, limits.max).astype(np.int32)


def scale_of_range(low: float, high: float, bits: int) -> tuple[Array, Array]:
    """Return scale (float32) and zero point (uint8 or uint16) of a range, both scalars; zero is exact.

    Args:
        low: Smallest value.
        high: Largest value.
        bits: 8 or 16.
    """
    dtype = np.dtype(np.uint8 if bits == 8 else np.uint16)
    steps = 2**bits - 1
    low, high = min(low, 0.0), max(high, 0.0)
    scale = np.float32((high - low) / steps)
    if not scale > 0:
        return np.array(1, np.float32), np.array(0, dtype)
    zero = min(max(round(-low / float(scale)), 0), steps)
    return np.array(scale, np.float32), np.array(zero, dtype)
