"""Equalization of the channels of activations and weights before quantization to integers.

An activation ``x`` with channels ``j``, read by layers with constant weights, is divided by ``s[j]``, and the rows
``j`` of the weights are multiplied by ``s[j]``. Before / After::

    x = norm(v) · g + b → MatMul(W)          x / s = norm(v) · (g / s) + (b / s) → MatMul(s · W)

The division goes into the constants of the producer of ``x`` (a normalization, a product or a convolution, through ReLU
and pooling, which commute with a positive factor). If this is impossible and outliers justify a node, a Mul is
inserted.

* SmoothQuant: ``s = max|x|^a / max|W|^(1 - a)``, arXiv:2211.10438, equation 4.
* Cross-layer equalization: ``s = sqrt(max|W1| / max|W2|)`` of two consecutive layers, arXiv:1906.04721, equation 11.

Must not fire for a reader whose weight is not constant, for a convolution of several groups that is not depthwise, or
(cross-layer) where another node reads ``x``.
Tags: keeps; an inserted Mul belongs to the module that produces ``x``.
Why it is safe: every factor is positive and finite, and each division is undone by a multiplication.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.onnx.weights import (
    add_initializer,
    computed_tensor,
    constant_tensor,
    drop_unused_initializers,
    give_products_own_weights,
    read_once,
)
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.tags.tagging import NodeTag, read_tag, write_tag

if TYPE_CHECKING:
    from winml.modelkit.quantize.calibration.calibration_data import CalibrationStatistics

_OUTLIERS = 4.0
"""Minimum ratio of the largest channel to the median channel for an inserted Mul. Chosen: below it a channel loses at
most two of eight bits."""
_WEIGHT_STEPS = 255
"""Quantization steps of 8-bit weights."""
_SWEEPS = 3
"""Chosen: cross-layer factors of a chain of layers hardly change after the second sweep."""

_HOMOGENEOUS = frozenset({"Relu", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"})
"""Operators with ``f(x / s) = f(x) / s`` for every positive ``s`` of a channel."""
_LAYERS = frozenset({"Conv", "Gemm", "MatMul"})
_NORMALIZATIONS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})


@dataclass(frozen=True)
class Equalization:
    """Result of the equalization."""

    changes: Mapping[str, str] = field(default_factory=dict)
    """Name of a changed value → description of the change."""
    count: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Slot:
    """A constant input of a node."""

    node: ir.Node
    index: int
    axis: int
    """Axis of the constant along which the channels lie."""

    @property
    def tensor(self) -> ir.TensorProtocol:
        """The constant."""
        value = self.node.inputs[self.index]
        assert value is not None  # _find_slot() checked it
        assert value.const_value is not None
        return value.const_value


@dataclass(frozen=True)
class _Site:
    """An activation that can be equalized."""

    value: ir.Value
    axis: int
    """Channel axis, counted from the last: negative."""
    channels: int
    readers: tuple[_Slot, ...]
    makers: tuple[_Slot, ...] = ()
    """Constants that absorb the division; empty if none exist."""
    path: tuple[ir.Value, ...] = ()
    """Changed values between the makers and the readers."""


def equalize(
    model: ir.Model,
    names: Mapping[str, int],
    options: QuantizeOptions,
    activations: CalibrationStatistics,
    *,
    has_channel_scales: bool,
) -> Equalization:
    """Equalize the channels read by named layers, in place.

    Args:
        model: The model; its float outputs do not change.
        names: Name of a node with a weight and integer activations → bits of the activations.
        options: Methods and strength.
        activations: Measures activations over the calibration samples.
        has_channel_scales: True if each output channel of a weight has a scale.
    """
    give_products_own_weights(model, names)
    changes: dict[str, str] = {}
    count, notes = 0, []
    if options.cross_layer_equalization:
        sites = [
            site for site in _find_sites(model, names) if any(slot.node.op_type in _LAYERS for slot in site.makers)
        ]
        _apply_factors(model, _cross_layer_factors(sites), changes)
        count += len(sites)
        notes.append(
            f"Cross-layer equalization balanced {len(sites)} pairs of layers."
            if sites
            else "Cross-layer equalization changed nothing: no two layers are connected through ReLU or pooling only."
        )
    if options.smooth_quant is not None:
        sites = list(_find_sites(model, names))
        maxima = activations.channel_maxima(model, {site.value.name or "": site.axis for site in sites})
        factors = {
            site: _smoothing_factors(maxima[site.value.name or ""], _weight_maxima(site.readers), options.smooth_quant)
            for site in sites
            if site.makers or _has_outliers(maxima[site.value.name or ""])
        }
        products = [site for site in factors if all(slot.node.op_type != "Conv" for slot in site.readers)]
        rows = activations.channel_rows(model, [site.value.name or "" for site in products])
        worse = {
            site
            for site in products
            if _output_error(site, rows[site.value.name or ""], names, factors[site], has_channel_scales)
            >= _output_error(site, rows[site.value.name or ""], names, None, has_channel_scales)
        }
        factors = {site: numbers for site, numbers in factors.items() if site not in worse}
        _apply_factors(model, factors, changes)
        count += len(factors)
        notes.append(_describe_smoothing(options.smooth_quant, list(factors), len(worse)))
    return Equalization(changes, count, tuple(notes))


def _describe_smoothing(strength: float, balanced: list[_Site], worse: int) -> str:
    """Note the number of activations balanced by SmoothQuant, and the number skipped."""
    skipped = f" {worse} more were not balanced, since the error of their layers would increase." if worse else ""
    if not balanced:
        return f"SmoothQuant (strength {strength:g}) balanced no activation.{skipped}"
    inserted = sum(not site.makers for site in balanced)
    return (
        f"SmoothQuant (strength {strength:g}) balanced {len(balanced)} activations: {len(balanced) - inserted} "
        f"in the weights of the preceding layer, {inserted} by a Mul node.{skipped}"
    )


def _output_error(
    site: _Site, rows: Array, bits: Mapping[str, int], factors: Array | None, has_channel_scales: bool
) -> float:
    """Squared output error of the layers on sample rows with integer activations and weights.

    Args:
        site: The activation and its layers.
        rows: Sample rows, float32 [rows, channels].
        bits: Layer name → bits of its activations.
        factors: Divisors of the values and factors of the weights; ``None``: no equalization.
        has_channel_scales: True if each output channel of a weight has a scale.
    """
    numbers = np.ones(site.channels, np.float32) if factors is None else factors.astype(np.float32)
    error = 0.0
    for slot in site.readers:
        values = read_once(slot.tensor)
        weight = values if slot.axis == 0 else values.T
        activations = _simulate_rounding(rows / numbers, 2 ** bits[slot.node.name or ""] - 1, None)
        scaled = weight * numbers[:, None]
        integers = _simulate_rounding(scaled, _WEIGHT_STEPS, 0 if has_channel_scales else None)
        error += float(((activations @ integers - rows @ weight) ** 2).sum())
    return error


def _simulate_rounding(values: Array, steps: int, axis: int | None) -> Array:
    """Round values to integers of so many steps and back; one scale, or one per channel along all axes except
    ``axis``.
    """
    low = np.minimum(values.min(axis=axis, keepdims=axis is not None), 0)
    high = np.maximum(values.max(axis=axis, keepdims=axis is not None), 0)
    step = np.where(high > low, (high - low) / steps, 1).astype(np.float32)
    return np.asarray(np.rint(values / step) * step)


def _find_sites(model: ir.Model, names: Mapping[str, int]) -> Iterator[_Site]:
    """Yield each activation read by at least one named layer, with these layers."""
    readers: defaultdict[ir.Value, list[tuple[_Slot, int]]] = defaultdict(list)
    for node in model.graph:
        reader = _find_reader(node) if node.name in names else None
        if reader is not None and (value := node.inputs[0]) is not None and not value.is_initializer():
            readers[value].append(reader)
    for value, slots_with_axes in readers.items():
        slots, axes = tuple(slot for slot, _ in slots_with_axes), {axis for _, axis in slots_with_axes}
        counts = {slot.tensor.shape.numpy()[slot.axis] for slot in slots}
        if len(axes) != 1 or len(counts) != 1:
            continue  # a product and a convolution of one value have different channel axes
        axis, channels = axes.pop(), counts.pop()
        path: list[ir.Value] = []
        makers: tuple[_Slot, ...] | None = None
        if len(list(value.uses())) == len(slots) and not value.is_graph_output():
            makers = _find_makers(value, axis, channels, path)
        yield _Site(value, axis, channels, slots, makers or (), tuple(path) if makers else ())


def _find_reader(node: ir.Node) -> tuple[_Slot, int] | None:
    """Weight of a layer and the channel axis of its input; ``None`` without a constant weight."""
    if node.domain:
        return None
    if node.op_type == "MatMul":
        slot = _find_slot(node, 1, 0, rank=2)
        return None if slot is None else (slot, -1)
    if node.op_type == "Gemm" and not node.attributes.get_int("transA", 0):
        slot = _find_slot(node, 1, 1 if node.attributes.get_int("transB", 0) else 0, rank=2)
        return None if slot is None else (slot, -1)
    if node.op_type == "Conv":
        groups = node.attributes.get_int("group", 1)
        slot = _find_slot(node, 1, 1 if groups == 1 else 0)
        if slot is None:
            return None
        shape = slot.tensor.shape.numpy()
        is_depthwise = shape[0] == groups and shape[1] == 1
        return (slot, 1 - len(shape)) if groups == 1 or is_depthwise else None
    return None


def _find_slot(node: ir.Node, index: int, axis: int, rank: int | None = None) -> _Slot | None:
    """Constant float32 input of a node; ``None`` for other inputs."""
    tensor = constant_tensor(node.inputs[index]) if index < len(node.inputs) else None
    if tensor is None or tensor.dtype != ir.DataType.FLOAT:
        return None
    dimensions = len(tensor.shape)
    if (rank is not None and dimensions != rank) or not -dimensions <= axis < dimensions:
        return None
    return _Slot(node, index, axis % dimensions)


def _find_makers(value: ir.Value, axis: int, channels: int, path: list[ir.Value]) -> tuple[_Slot, ...] | None:
    """Find the constants whose division divides a value; ``None`` if no set of constants does.

    Args:
        value: The activation, read only by the layers.
        axis: Channel axis, counted from the last: negative.
        channels: Number of channels.
        path: Receives the changed values.
    """
    node = value.producer()
    if node is None or node.domain not in ("", "com.microsoft"):
        return None
    path.append(value)
    if node.op_type in _HOMOGENEOUS:
        return _find_input_makers(node, 0, axis, channels, path)
    if node.op_type in _NORMALIZATIONS and axis == -1 and node.attributes.get_int("axis", -1) == -1:
        return _find_scaled_constants(node, (1, 2), -1, channels)
    if node.op_type == "Conv" and axis < -1:
        return _find_scaled_constants(node, (1, 2), 0, channels)
    if node.op_type == "MatMul" and axis == -1:
        return _find_scaled_constants(node, (1,), -1, channels, rank=2)
    if node.op_type == "Gemm" and axis == -1:
        weight = _find_slot(node, 1, 0 if node.attributes.get_int("transB", 0) else 1, rank=2)
        bias = _find_scaled_constants(node, (2,), -1, channels) if len(node.inputs) > 2 else ()
        return None if weight is None or bias is None else (weight, *bias)
    if node.op_type in ("Add", "Mul"):
        for index in (1, 0):
            constant = _find_channel_constant(node, index, axis, channels)
            if constant is None:
                continue
            if node.op_type == "Mul":
                return (constant,)
            input_makers = _find_input_makers(node, 1 - index, axis, channels, path)
            return None if input_makers is None else (constant, *input_makers)
        if node.op_type == "Mul":  # a gate: one factor is sufficient
            for index in (0, 1):
                length = len(path)
                if (makers := _find_input_makers(node, index, axis, channels, path)) is not None:
                    return makers
                del path[length:]
    return None


def _find_input_makers(
    node: ir.Node, index: int, axis: int, channels: int, path: list[ir.Value]
) -> tuple[_Slot, ...] | None:
    """Find the makers of an input without other readers; ``None`` for other inputs."""
    value = node.inputs[index]
    if value is None or len(list(value.uses())) != 1 or value.is_graph_output():
        return None
    return _find_makers(value, axis, channels, path)


def _find_scaled_constants(
    node: ir.Node, indices: tuple[int, ...], axis: int, channels: int, rank: int | None = None
) -> tuple[_Slot, ...] | None:
    """Constants at these inputs, ignoring missing inputs; ``None`` if a constant cannot be divided."""
    slots = []
    for index in indices:
        if index >= len(node.inputs) or node.inputs[index] is None:
            continue
        slot = _find_slot(node, index, axis, rank)
        if slot is None or slot.tensor.shape.numpy()[slot.axis] != channels:
            return None
        slots.append(slot)
    return tuple(slots) or None


def _find_channel_constant(node: ir.Node, index: int, axis: int, channels: int) -> _Slot | None:
    """Constant with one value per channel, broadcast over the other axes; ``None`` for other inputs."""
    slot = _find_slot(node, index, axis)
    if slot is None:
        return None
    shape = slot.tensor.shape.numpy()
    return slot if shape[slot.axis] == channels and int(np.prod(shape)) == channels else None


def _cross_layer_factors(sites: list[_Site]) -> dict[_Site, Array]:
    """Compute the factors of each pair of layers in several sweeps over chains of layers."""
    factors = {site: np.ones(site.channels) for site in sites}
    of_slot: defaultdict[tuple[ir.Node, int], list[tuple[_Site, int, int]]] = defaultdict(list)
    for site in sites:
        for slot, sign in (*((slot, -1) for slot in site.makers), *((slot, 1) for slot in site.readers)):
            of_slot[slot.node, slot.index].append((site, slot.axis, sign))

    def maxima(slots: tuple[_Slot, ...]) -> Array:
        """Largest absolute weight per channel over the layers of slots, with the current factors."""
        largest = np.zeros(())
        for slot in slots:
            if slot.node.op_type not in _LAYERS or slot.index != 1:
                continue  # a bias follows its layer
            values = np.abs(read_once(slot.tensor).astype(np.float64))
            for site, axis, sign in of_slot[slot.node, slot.index]:
                values = values * _reshape_along(factors[site] ** sign, axis, values.ndim)
            largest = np.maximum(largest, values.max(axis=tuple(a for a in range(values.ndim) if a != slot.axis)))
        return largest

    for _ in range(_SWEEPS):
        for site in sites:
            maker_maxima, reader_maxima = maxima(site.makers), maxima(site.readers)
            factors[site] = factors[site] * _reset_unusable_factors(
                np.sqrt(maker_maxima / np.where(reader_maxima > 0, reader_maxima, 1)), maker_maxima, reader_maxima
            )
    return factors


def _smoothing_factors(activations: Array, weights: Array, strength: float) -> Array:
    """Return the factor of each channel, from maxima of activations and weights."""
    # A channel without activations counts as the smallest active channel: its weights must not determine the range.
    largest = activations.astype(np.float64)
    largest = np.where(largest > 0, largest, largest[largest > 0].min(initial=np.inf))
    safe = np.where(weights > 0, weights, 1)
    return _reset_unusable_factors(largest**strength / safe ** (1 - strength), largest, weights)


def _reset_unusable_factors(factors: Array, activations: Array, weights: Array) -> Array:
    """Replace factors by 1 if a side is zero or the factor is not a positive float32."""
    tiny = float(np.finfo(np.float32).tiny)
    is_usable = (activations > 0) & (weights > 0) & np.isfinite(factors) & (factors > tiny) & (factors < 1 / tiny)
    return np.where(is_usable, factors, 1.0)


def _weight_maxima(slots: tuple[_Slot, ...]) -> Array:
    """Largest absolute weight per channel over the constants of slots."""
    largest = np.zeros(())
    for slot in slots:
        values = read_once(slot.tensor)
        axes = tuple(axis for axis in range(values.ndim) if axis != slot.axis)
        largest = np.maximum(largest, np.maximum(values.max(axis=axes), -values.min(axis=axes)))
    return largest.astype(np.float64)


def _has_outliers(maxima: Array) -> bool:
    """Return True if the largest channel is far above the median channel."""
    middle = float(np.median(maxima))
    return middle > 0 and float(maxima.max()) > _OUTLIERS * middle


def _apply_factors(model: ir.Model, factors: Mapping[_Site, Array], changes: dict[str, str]) -> None:
    """Divide activations and multiply weights, in place; record the changed values in ``changes``."""
    fresh = FreshNames.of_graph(model.graph)
    for site, numbers in factors.items():
        numbers = numbers.astype(np.float32)
        description = f"equalized {hashlib.sha256(numbers.tobytes()).hexdigest()[:16]}"
        changed = [value.name or "" for value in site.path]
        for slot in site.readers:
            _multiply_constant(model.graph, slot, numbers, fresh)
        for slot in site.makers:
            _multiply_constant(model.graph, slot, (1 / numbers.astype(np.float64)).astype(np.float32), fresh)
        if not site.makers:
            changed = [_insert_division(model.graph, site, numbers, fresh).name or ""]
        for name in changed:
            changes[name] = f"{changes[name]}, {description}" if name in changes else description


def _multiply_constant(graph: ir.Graph, slot: _Slot, numbers: Array, fresh: FreshNames) -> None:
    """Multiply a node's constant by factors per channel, lazily when written."""
    before = slot.node.inputs[slot.index]
    tensor, shape = slot.tensor, slot.tensor.shape.numpy()
    assert before is not None  # the slot has a constant
    name = fresh.take(f"{before.name}_equalized")
    factors = _reshape_along(numbers, slot.axis, len(shape))
    product = computed_tensor(lambda: read_once(tensor) * factors, tensor.dtype, shape, name)
    slot.node.replace_input_with(slot.index, add_initializer(graph, product))
    drop_unused_initializers(graph, [before])


def _insert_division(graph: ir.Graph, site: _Site, numbers: Array, fresh: FreshNames) -> ir.Value:
    """Insert a Mul by ``1 / s`` before the layers; return its output."""
    name = site.value.name
    shape = [site.channels, *([1] * (-site.axis - 1))]
    array = (1 / numbers.astype(np.float64)).astype(np.float32).reshape(shape)
    constant = add_initializer(graph, ir.Tensor(array, name=fresh.take(f"{name}_smoothing")))
    output = ir.Value(name=fresh.take(f"{name}_smoothed"), shape=site.value.shape, type=site.value.type)
    node = ir.Node("", "Mul", [site.value, constant], outputs=[output], name=fresh.take(f"{name}_smoothing"))
    maker = site.value.producer()
    tag = read_tag(maker if maker is not None else site.readers[0].node)
    if tag is not None:
        write_tag(node, NodeTag(tag.tag, tag.module, "inherited"))
    for slot in site.readers:
        slot.node.replace_input_with(0, output)
    if maker is not None:
        graph.insert_after(maker, [node])
    else:
        graph.insert_before(graph[0], [node])
    return output


def _reshape_along(numbers: Array, axis: int, rank: int) -> Array:
    """Reshape a vector to a rank, with its values along one axis."""
    return numbers.reshape([-1 if dimension == axis else 1 for dimension in range(rank)])
