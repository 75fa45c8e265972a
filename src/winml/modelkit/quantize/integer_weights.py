"""Quantizes weights to 8-bit integers as ONNX Runtime's quantizer does, all channels at once.

Scale and zero point are computed when they are asked for, the integers when they are written: one weight is in memory
at a time. Numbers are those of ``onnxruntime.quantization``, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from winml.modelkit.graph.weightless_proto import read_once

__all__ = ["IntegerRange", "WeightScales", "measure_scales", "quantized_tensor"]

Array = NDArray[Any]

PIECE_ELEMENTS = 1 << 20
"""Values computed at a time. Chosen: they stay in the processor's cache, and their copies take a few MB."""


@dataclass(frozen=True)
class IntegerRange:
    """The integers a weight may become."""

    dtype: ir.DataType
    minimum: int
    maximum: int
    is_symmetric: bool
    """Whether the range of the weight is widened to be the same on both sides of zero."""


@dataclass(frozen=True)
class WeightScales:
    """How a weight becomes integers: ``integer = round(weight / scale) + zero point``."""

    scales: Array
    """Of the weight's dtype: one, or one for each channel."""
    zero_points: Array
    """Of the integers' dtype, in the shape of ``scales``."""
    axis: int | None
    """Axis of the channels, not negative; None: one scale for the weight."""
    integers: IntegerRange


def measure_scales(weight: ir.TensorProtocol, axis: int | None, integers: IntegerRange) -> WeightScales:
    """Return scales and zero points by the smallest and the largest value.

    Args:
        weight: Floating-point values, of any shape.
        axis: Axis of the channels, counted from either end; None: one scale for the weight.
        integers: What the values become.

    Raises:
        ValueError: a value is NaN or infinite, or the weight has no such axis.
    """
    values = read_once(weight)
    if axis is not None:
        if not -values.ndim <= axis < values.ndim:
            raise ValueError(f"weight {weight.name} of shape {list(values.shape)} has no axis {axis}")
        axis %= values.ndim
    others = tuple(other for other in range(values.ndim) if other != axis)
    low = np.minimum(values.min(axis=others, initial=0), 0)
    high = np.maximum(values.max(axis=others, initial=0), 0)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError(f"weight {weight.name} has values that are NaN or infinite")
    if integers.is_symmetric:
        high = np.maximum(-low, high)
        low = -high
    # In float64, as ONNX Runtime computes it: a finite range may not fit the dtype.
    exact = (high.astype(np.float64) - low.astype(np.float64)) / (integers.maximum - integers.minimum)
    is_zero = exact < np.finfo(values.dtype).tiny
    safe = np.where(is_zero, 1.0, exact)
    middle = np.round((integers.minimum + integers.maximum) / 2)
    zero_points = middle if integers.is_symmetric else np.round(integers.minimum - low / safe)
    return WeightScales(
        safe.astype(values.dtype),
        np.where(is_zero, 0, zero_points).astype(integers.dtype.numpy()),
        axis,
        integers,
    )


def quantized_tensor(weight: ir.TensorProtocol, scales: WeightScales, name: str) -> ir.LazyTensor:
    """Return the integers of a weight as a tensor that is computed each time it is read."""

    def compute() -> ir.TensorProtocol:
        return ir.Tensor(_integers_of(read_once(weight), scales), name=name)

    return ir.LazyTensor(compute, scales.integers.dtype, ir.Shape(weight.shape.numpy()), name=name)


def _integers_of(values: Array, scales: WeightScales) -> Array:
    """Return the integers, in pieces of whole rows, so that copies in float stay small."""
    rows = values.reshape(-1, 1) if values.ndim < 2 else values
    shape = [-1 if other == scales.axis else 1 for other in range(rows.ndim)]
    scale, zero_point = scales.scales.reshape(shape), scales.zero_points.reshape(shape).astype(np.float32)
    integers = np.empty(rows.shape, scales.integers.dtype.numpy())
    step = max(1, PIECE_ELEMENTS // max(1, rows[:1].size))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        here = part if scales.axis == 0 else slice(None)
        piece = rows[part].astype(np.float32) / scale[here]
        np.rint(piece, out=piece)
        piece += zero_point[here]
        np.clip(piece, scales.integers.minimum, scales.integers.maximum, out=piece)
        integers[part] = piece
    return integers.reshape(values.shape)
