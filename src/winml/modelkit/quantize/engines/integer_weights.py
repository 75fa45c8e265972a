"""Quantization of weights to integers like ONNX Runtime's quantizer, for all channels at once.

Scale and zero point are computed on request, the integers when written: one weight is in memory at a time. Results are
bit-identical to ``onnxruntime.quantization``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.errors import QuantizeError, opt
from winml.modelkit.onnx.weights import computed_tensor, read_once
from winml.modelkit.quantize.planning import PlannedNode, constant_weight
from winml.modelkit.tags.tagging import all_nodes, read_tag
from winml.modelkit.words import size_words

PIECE_ELEMENTS = 1 << 20
"""Values computed at a time. Chosen: they stay in the processor's cache, and their copies take a few MB."""


@dataclass(frozen=True)
class IntegerRange:
    """Integer type and range of a quantized weight."""

    dtype: ir.DataType
    minimum: int
    maximum: int
    is_symmetric: bool
    """True if the range of the weight is widened to be symmetric about zero."""


@dataclass(frozen=True)
class WeightScales:
    """Scales and zero points of a weight: ``integer = round(weight / scale) + zero point``."""

    scales: Array
    """In the weight's dtype: scalar, or one per channel."""
    zero_points: Array
    """In the integers' dtype, with the shape of ``scales``."""
    axis: int | None
    """Channel axis or axis of the blocks, not negative; ``None``: one scale for the weight."""
    integers: IntegerRange
    block_size: int | None = None
    """Number of values along the axis that share a scale, in weights of two dimensions; ``None``: all others do."""


def measure_scales(
    weight: ir.TensorProtocol, axis: int | None, integers: IntegerRange, block_size: int | None = None
) -> WeightScales:
    """Compute scales and zero points from the smallest and the largest value.

    The range always includes 0; a symmetric zero point is the middle of the integers.

    Args:
        weight: Floating-point values, of any shape.
        axis: Channel axis, counted from either end; ``None``: one scale for the weight.
        integers: Integer type and range.
        block_size: Number of values along the axis that share a scale, which divides it; ``None``: no blocks.

    Raises:
        ValueError: a value is NaN or infinite, or the weight has no such axis.
    """
    values = read_once(weight)
    if axis is not None:
        if not -values.ndim <= axis < values.ndim:
            raise ValueError(f"weight {weight.name} of shape {list(values.shape)} has no axis {axis}")
        axis %= values.ndim
    other_axes = tuple(dimension for dimension in range(values.ndim) if dimension != axis)
    grouped = values
    if block_size is not None:
        assert axis is not None  # blocks have one
        grouped = values.reshape(*values.shape[:axis], -1, block_size, *values.shape[axis + 1 :])
        other_axes = (axis + 1,)
    low = np.minimum(grouped.min(axis=other_axes, initial=0), 0)
    high = np.maximum(grouped.max(axis=other_axes, initial=0), 0)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError(f"weight {weight.name} has values that are NaN or infinite")
    if integers.is_symmetric:
        high = np.maximum(-low, high)
        low = -high
    # In float64, like ONNX Runtime: the width of a finite range may not fit the dtype.
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
        block_size,
    )


def quantized_tensor(weight: ir.TensorProtocol, scales: WeightScales, name: str) -> ir.LazyTensor:
    """Return the integers of a weight as a lazy tensor, computed at each read."""
    dtype, shape = scales.integers.dtype, weight.shape.numpy()
    return computed_tensor(lambda: _quantize_values(read_once(weight), scales), dtype, shape, name)


def _quantize_values(values: Array, scales: WeightScales) -> Array:
    """Quantize values in pieces of whole rows, so that float copies stay small."""
    rows = values.reshape(-1, 1) if values.ndim < 2 else values
    axis = scales.axis
    if scales.block_size is not None:
        spread = [np.repeat(numbers, scales.block_size, scales.axis) for numbers in (scales.scales, scales.zero_points)]
        scale, zero_point, axis = spread[0], spread[1].astype(np.float32), 0
    else:
        shape = [-1 if dimension == axis else 1 for dimension in range(rows.ndim)]
        scale, zero_point = scales.scales.reshape(shape), scales.zero_points.reshape(shape).astype(np.float32)
    integers = np.empty(rows.shape, scales.integers.dtype.numpy())
    step = max(1, PIECE_ELEMENTS // max(1, rows[:1].size))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        here = part if axis == 0 else slice(None)
        piece = rows[part].astype(np.float32) / scale[here]
        np.rint(piece, out=piece)
        piece += zero_point[here]
        np.clip(piece, scales.integers.minimum, scales.integers.maximum, out=piece)
        integers[part] = piece
    return integers.reshape(values.shape)


@dataclass(frozen=True)
class WeightUse:
    """A weight and one node that reads it, for messages about values read while the result is written."""

    weight: str
    node: str
    tag: str
    """Tag of the node; empty without a tag."""

    @classmethod
    def of(cls, weight: ir.Value, node: ir.Node) -> WeightUse:
        """Create the use of a weight by a node."""
        tag = read_tag(node)
        return cls(weight.name or "", node.name or "", tag.tag if tag is not None else "")

    def refuse_nan(self, values: Array) -> None:
        """Refuse values that contain NaN.

        Raises:
            QuantizeError: names weight, node and module.
        """
        if np.isnan(values).any():
            raise self._make_error("has values that are NaN")

    def refuse_non_finite(self, values: Array) -> None:
        """Refuse values that contain NaN or infinity.

        Raises:
            QuantizeError: names weight, node and module.
        """
        if not np.isfinite(values).all():
            raise self._make_error("has values that are NaN or infinite")

    def _make_error(self, fault: str) -> QuantizeError:
        """Create the error for a weight, with module and node."""
        return make_non_finite_error(f"weight {self.weight} {fault}", self.tag, self.node)


def make_non_finite_error(fault: str, tag: str, node: str) -> QuantizeError:
    """Create the error for a weight with NaN or infinite values.

    Args:
        fault: The weight and what is wrong with it.
        tag: Tag of its module; ``""`` in a file without module information.
        node: Name of the node that reads it.
    """
    if not tag:
        return QuantizeError(
            f"{fault}: node {node}",
            hint="Repair the weight in the model that the file was made from, and make the file again.",
        )
    return QuantizeError(
        f"{fault}: module {tag}, node {node}", hint=f"Repair the checkpoint, or {opt.exclude} the module."
    )


def has_non_finite_scales(model: ir.Model, quantized: ir.Model) -> bool:
    """Return True if a new scale is NaN or infinite, which implies such weight values; reads no weight.

    Args:
        model: The graph before.
        quantized: The graph after; lazy scales, computed when the file is written, are not checked.
    """
    old = model.graph.initializers
    for name, value in quantized.graph.initializers.items():
        tensor = value.const_value
        if name in old or tensor is None or not tensor.dtype.is_floating_point() or isinstance(tensor, ir.LazyTensor):
            continue
        if not np.isfinite(tensor.numpy().astype(np.float32)).all():
            return True
    return False


def refuse_non_finite_weights(model: ir.Model, planned: Sequence[PlannedNode]) -> None:
    """Refuse a weight with NaN or infinite values. Reads all weights, so only for errors.

    Raises:
        QuantizeError: names weight, node and module.
    """
    nodes = {node.name: node for node in all_nodes(model)}
    checked: set[ir.Value] = set()
    for decision in planned:
        weight = constant_weight(nodes[decision.name]) if decision.mode is not None else None
        if weight is None or weight in checked:
            continue
        checked.add(weight)
        assert weight.const_value is not None
        values = weight.const_value.numpy().astype(np.float32)
        if count := int(values.size - np.isfinite(values).sum()):
            fault = f"{count} of {values.size} values of weight {weight.name} are NaN or infinite"
            raise make_non_finite_error(fault, decision.tag, decision.name)


def shared_weight_notes(model: ir.Model, reached: Collection[str], quantized: ir.Model) -> Iterator[str]:
    """Note each weight that the file stores both quantized and unquantized.

    Args:
        model: The graph before.
        reached: Names of the nodes that were quantized.
        quantized: The graph after.
    """
    nodes = {node.name: node for node in all_nodes(model)}
    weights = {weight for name in reached if (weight := constant_weight(nodes[name])) is not None}
    for weight in sorted(weights, key=lambda value: value.name or ""):
        raw = quantized.graph.initializers.get(weight.name or "")
        if raw is None or raw.const_value is None or raw.dtype != weight.dtype or not raw.uses():
            continue
        readers = sorted({node.name or node.op_type for node, _ in raw.uses()})
        suffix = " and others" if len(readers) > 2 else ""
        size = size_words(raw.const_value.nbytes)
        yield f"Weight {weight.name} ({size}) is also stored unquantized, for {', '.join(readers[:2])}{suffix}."
