"""Turns weights, biases and ranges into integers with scales and zero points.

Numbers only: knows no graph. A float ``x`` is the integer ``round(x / scale) + zero_point``, clipped to its type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["IntegerWeight", "quantize_bias", "quantize_weight", "scale_of_range"]

Array = NDArray[Any]


@dataclass(frozen=True)
class IntegerWeight:
    """A weight in 8 bits."""

    values: Array
    """int8 or uint8, of the weight's shape."""
    scale: Array
    """float32: one for each channel, or a scalar."""
    zero_point: Array
    """Of the dtype of the values and the shape of the scale."""
    axis: int | None
    """Axis of the channels; None for one scale."""


def quantize_weight(
    weight: Array, *, is_signed: bool, axis: int | None, is_symmetric: bool, least_scale: Array | None = None
) -> IntegerWeight:
    """Return a weight in 8 bits.

    Args:
        weight: float32, finite.
        is_signed: int8 rather than uint8.
        axis: Axis of the channels, each of which gets a scale of its own; None: one scale for all.
        is_symmetric: Zero is the middle of the integers, 0 or 128; else smallest and largest value are the ends.
        least_scale: Scales may not be smaller, one for each channel or a scalar.
    """
    dtype = np.dtype(np.int8 if is_signed else np.uint8)
    limits = np.iinfo(dtype)
    others = None if axis is None else tuple(other for other in range(weight.ndim) if other != axis)
    low, high = weight.min(axis=others), weight.max(axis=others)
    if is_symmetric:
        # -128 has no counterpart; without it the middle is exact.
        scale = np.maximum(-low, high) / np.float32(127)
        zero = np.full(scale.shape, 0 if is_signed else 128, np.int64)
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scale = (high - low) / np.float32(limits.max - limits.min)
        scale = np.where(scale > 0, scale, np.float32(1))
        zero = np.rint(limits.min - low / scale).astype(np.int64)
    if least_scale is not None:
        scale = np.maximum(scale, least_scale)
    scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
    shape = tuple(-1 if index == axis else 1 for index in range(weight.ndim)) if axis is not None else ()
    values = np.divide(weight, scale.reshape(shape))
    np.rint(values, out=values)
    values += zero.reshape(shape).astype(np.float32)
    np.clip(values, limits.min, limits.max, out=values)
    return IntegerWeight(values.astype(dtype), scale, zero.astype(dtype), axis)


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
