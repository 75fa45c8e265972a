"""Engine for known activation ranges: QuantizeLinear and DequantizeLinear around layers, integer weights.

ONNX Runtime's own static quantizer also changes the inputs of nodes outside the selection, and computes weights channel
by channel in Python. The nodes are therefore inserted here. The semantics are those of ONNX, the kernels those of ONNX
Runtime. New nodes are tagged: the nodes of an activation belong to the module that produces it, the nodes of a weight,
a bias or a graph input to the module that reads it.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.errors import QuantizeError, opt
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.onnx import weights
from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.quantize.engines.block_quantizers import dequantized_tensor
from winml.modelkit.quantize.engines.integer_weights import IntegerRange, WeightScales, measure_scales, quantized_tensor
from winml.modelkit.quantize.placements import Role
from winml.modelkit.quantize.planning import EngineTask, WeightKey
from winml.modelkit.quantize.precisions import Precision
from winml.modelkit.quantize.qdq_placement import QuantizedConstant, QuantizedValue, bias_addition, weight_operand
from winml.modelkit.tags import address
from winml.modelkit.tags.tagging import NodeTag, read_tag, write_tag


def quantize_bias(bias: Array, scale: Array) -> Array:
    """Quantize a bias to int32 with the scale of the products that it is added to."""
    limits = np.iinfo(np.int32)
    values = np.rint(bias.astype(np.float64) / scale.astype(np.float64))
    return np.clip(values, limits.min, limits.max).astype(np.int32)


def scale_of_range(low: float, high: float, bits: int) -> tuple[Array, Array]:
    """Compute scale (float32) and zero point (uint8 or uint16) of a range, both scalars; zero is exact.

    A float ``x`` is the integer ``round(x / scale) + zero_point``, clipped to its type.

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


_ONNX_16_BIT_OPSET = 21
"""Specified: the first opset whose QuantizeLinear and DequantizeLinear support 16 bits."""
_CONTRIB_DOMAIN = "com.microsoft"
"""ONNX Runtime's contrib versions of both operators support 16 bits at any opset."""

_RANGES = {
    (True, True): IntegerRange(ir.DataType.INT8, -127, 127, is_symmetric=True),
    (True, False): IntegerRange(ir.DataType.INT8, -128, 127, is_symmetric=False),
    (False, True): IntegerRange(ir.DataType.UINT8, 1, 255, is_symmetric=True),
    (False, False): IntegerRange(ir.DataType.UINT8, 0, 255, is_symmetric=False),
}
"""(is_signed, is_symmetric) → integer range of a weight. Symmetric ranges omit the smallest integer, which has no
counterpart, so that the middle is exact."""


def _weight_range(precision: Precision, *, is_signed: bool, is_symmetric: bool) -> IntegerRange:
    """Return the integer type and range of quantized weights."""
    if precision.weight_bits == 16:
        return IntegerRange(ir.DataType.INT16, -32767, 32767, is_symmetric=True)
    if precision.weight_bits == 4:
        return IntegerRange(ir.DataType.INT4, -7, 7, is_symmetric=True)
    return _RANGES[is_signed, is_symmetric]


class _Usage(Protocol):
    """One use of a value: the reading node and its input index. The type of onnx_ir has no public name."""

    @property
    def node(self) -> ir.Node: ...
    @property
    def idx(self) -> int: ...


class _Bias(NamedTuple):
    """Constant added to each output channel of a layer."""

    reader: ir.Node
    """The layer itself, or the Add after it."""
    input_index: int
    """Position among the inputs of the reader."""
    values: Array
    """float32, one dimension."""


class _Dequantized(NamedTuple):
    """A constant as integers, and the dequantized value that operators read."""

    output: ir.Value
    scale: ir.Value
    zero_point: ir.Value
    scales: WeightScales
    """Scales and zero points used."""


def quantize_statically(model: ir.Model, task: EngineTask) -> ir.Model:
    """Return a copy of the model with the selected nodes between QuantizeLinear and DequantizeLinear.

    Raises:
        QuantizeError: a value has no calibration range.
    """
    quantized = model.clone()
    weights.give_products_own_weights(quantized, task.nodes)
    _Rewriting(quantized, task).run()
    return quantized


class _Rewriting:
    """Quantization of one group of nodes of a model, in place."""

    def __init__(self, model: ir.Model, task: EngineTask) -> None:
        self._model = model
        self._graph = model.graph
        self._task = task
        self._bits = task.precision.range_bits
        is_contrib = self._bits > 8 and model.opset_imports.get("", 0) < _ONNX_16_BIT_OPSET
        self._domain = _CONTRIB_DOMAIN if is_contrib else ""
        if is_contrib:
            model.opset_imports.setdefault(_CONTRIB_DOMAIN, 1)
        self._scales: dict[str, tuple[ir.Value, ir.Value]] = {}
        """Name of a value → its scale and zero point."""
        self._dequantized: dict[tuple[str, Role, int | None, int | None], _Dequantized] = {}
        """(name of a constant, role, axis, block size) → the dequantized value that operators read."""
        self._readers = task.placement.companions if task.placement.is_by_unit else task.nodes
        """Names of the nodes that read dequantized constants."""
        self._tables: dict[str, tuple[ir.Value, ir.Value, ir.Value]] = {}
        """Name of a table → integers, scale and zero point."""
        self._fresh = FreshNames.of_graph(self._graph)
        self._modules = {
            tag.tag: tag.module for node in self._graph if (tag := read_tag(node)) is not None
        }  # fmt: skip

    def run(self) -> None:
        """Quantize weights and constants, then insert the Q/DQ pairs of the placed values."""
        placement = self._task.placement
        if placement.is_by_unit:
            self._quantize_unit_constants()
        else:
            layers = [node for node in self._graph if node.name in self._task.nodes]
            for spec in placement.values:
                self._scales[spec.name] = self._register_scale(spec)
            for node in layers:
                replaced = [value for value in node.inputs if value is not None and value.is_initializer()]
                self._quantize_layer(node)
                weights.drop_unused_initializers(self._graph, replaced)
        # Only now, since the looked-up rows are a new value with the old name.
        values = {value.name: value for value in self._graph.inputs}
        values |= {value.name: value for node in self._graph for value in node.outputs}
        for spec in placement.values:
            self._quantize_value(values[spec.name], spec)
        for node in self._graph:
            if node.name in placement.companions:
                self._record_precision(node, "operator")

    def _quantize_unit_constants(self) -> None:
        """Replace the constants of unit operators by dequantized integers; set the scales of all values."""
        nodes = {node.name: node for node in self._graph}
        # Looked-up rows have the scale of their table, and bias scales are computed from weight scales.
        constants = sorted(self._task.placement.constants, key=lambda constant: _ORDER[constant.role])
        for constant in (constant for constant in constants if constant.role == "table"):
            name = _get_input_name(nodes[constant.node], constant.index)
            self._scales[name] = self._quantize_constant(nodes[constant.node], constant)
        for spec in self._task.placement.values:
            self._scales.setdefault(spec.name, self._register_scale(spec))
        for constant in (constant for constant in constants if constant.role != "table"):
            if constant.role == "bias":
                self._quantize_unit_bias(nodes[constant.node], constant)
            elif constant.role == "rows":
                self._quantize_table(nodes[constant.node], constant.index)
            else:
                self._quantize_constant(nodes[constant.node], constant)

    def _quantize_constant(self, node: ir.Node, constant: QuantizedConstant) -> tuple[ir.Value, ir.Value]:
        """Replace a constant input by its dequantized integers; return scale and zero point."""
        value = node.inputs[constant.index]
        assert value is not None  # the placement read it
        assert value.const_value is not None
        entry = self._dequantize_constant(value, constant.role, constant.axis, node, block_size=constant.block_size)
        node.replace_input_with(constant.index, entry.output)
        weights.drop_unused_initializers(self._graph, [value])
        return entry.scale, entry.zero_point

    def _dequantize_constant(
        self, value: ir.Value, role: Role, axis: int | None, node: ir.Node, floor: Array | None = None,
        block_size: int | None = None,
    ) -> _Dequantized:  # fmt: skip
        """Return the dequantized value of a constant, shared by its readers unless its scales are too small.

        Args:
            value: The constant.
            role: Its role for the node.
            axis: Channel axis with one scale per channel; ``None``: one scale for the tensor.
            node: The node that reads it.
            floor: Minimum of the scales, per channel or scalar.
            block_size: Number of values along the axis that share a scale; ``None``: no blocks.

        Raises:
            QuantizeError: the constant has non-finite values.
        """
        key = (value.name or "", role, axis, block_size)
        entry = self._dequantized.get(key)
        if entry is None or (floor is not None and not np.all(entry.scales.scales >= floor)):
            tensor = value.const_value
            assert tensor is not None  # a constant has a value
            if role == "weight":
                is_unit, task = self._task.placement.is_by_unit, self._task
                if is_unit and len(value.shape or ()) < 2:
                    bits = task.provider.vector_bits(node.op_type, task.precision.weight_bits, self._bits)
                    task = _with_weight_bits(task, bits)
                elif node.name in task.wide_weights:
                    task = _with_weight_bits(task, 16)
                scales = _weight_scales(value, axis, task, is_unit=is_unit, floor=floor, block_size=block_size)
                solved = self._solved_weight(value, scales)
                if solved is not None:
                    tensor, scales = solved[0], _raise_scales(solved[1], floor)
            else:
                scales = self._activation_scales(value)
            tag = _common_tag([use.node for use in value.uses() if use.node.name in self._readers], self._modules)
            stored = self._store_integers(value, tensor, scales)
            output = self._insert_dequantize(stored, value, tag, node, axis, block_size)
            entry = self._dequantized[key] = _Dequantized(output, stored[1], stored[2], scales)
        return entry

    def _solved_weight(self, value: ir.Value, measured: WeightScales) -> tuple[ir.TensorProtocol, WeightScales] | None:
        """Return the values and scales of a weight solved on calibration data; ``None`` if it was not solved.

        Args:
            value: The weight.
            measured: Scales of its range, which the solved ones replace.
        """
        assert value.const_value is not None  # a weight has values
        for is_transposed in (False, True):
            solved = self._task.solved.get(WeightKey(value.name or "", is_transposed))
            if solved is None:
                continue
            scales = solved.read().scales
            scales = (scales if is_transposed else scales.T).reshape(measured.scales.shape)
            scales = np.where(scales > 0, scales, measured.scales)  # of a channel of zeros
            tensor = dequantized_tensor(value.const_value, solved, is_transposed=is_transposed)
            return tensor, replace(measured, scales=scales.astype(np.float32))
        return None

    def _activation_scales(self, value: ir.Value) -> WeightScales:
        """Scales of a constant that is quantized like an activation."""
        limits = self._task.ranges.get(value.name or "")
        if limits is None:
            assert value.const_value is not None  # a constant has a value
            array = weights.read_once(value.const_value)
            limits = (float(array.min(initial=0)), float(array.max(initial=0)))
        return WeightScales(*self._unit_scale(*limits), None, self._activation_integers)

    def _unit_scale(self, low: float, high: float) -> tuple[Array, Array]:
        """Compute scale and zero point of a range in the activation type of the provider."""
        low = min(low, 0.0)
        high = max(high, 0.0, low + _LEAST_RANGE)
        if not self._task.provider.symmetric_activations:
            return scale_of_range(low, high, self._bits)
        dtype = np.dtype(np.int8 if self._bits == 8 else np.int16)
        return np.array(max(-low, high) / (2 ** (self._bits - 1) - 1), np.float32), np.array(0, dtype)

    @property
    def _activation_integers(self) -> IntegerRange:
        """Range of the activation integers."""
        if self._task.provider.symmetric_activations:
            dtype, low = (ir.DataType.INT8 if self._bits == 8 else ir.DataType.INT16), -(2 ** (self._bits - 1))
        else:
            dtype, low = (ir.DataType.UINT8 if self._bits == 8 else ir.DataType.UINT16), 0
        return IntegerRange(dtype, low, low + 2**self._bits - 1, is_symmetric=False)

    def _quantize_unit_bias(self, node: ir.Node, constant: QuantizedConstant) -> None:
        """Quantize the bias of an operator to int32 with the product of its input and weight scales."""
        data, weight = node.inputs[0], node.inputs[1]
        value = node.inputs[constant.index]
        maker = weight.producer() if weight is not None else None
        data_scale = self._scales[_measured_name(data, self._scales)][0].const_value
        assert value is not None  # the placement read it
        assert value.const_value is not None
        if maker is None or maker.op_type != "DequantizeLinear" or data_scale is None:
            return
        scales = maker.inputs[1]
        assert scales is not None  # inputs of DequantizeLinear
        assert scales.const_value is not None
        bias = np.asarray(value.const_value.numpy())
        self._quantize_bias(_Bias(node, constant.index, bias), data_scale.numpy() * scales.const_value.numpy())

    def _register_scale(self, value: QuantizedValue) -> tuple[ir.Value, ir.Value]:
        """Add scale and zero point of a value to the graph; a value with shared scale gets those.

        Raises:
            QuantizeError: the calibration has no range for the value.
        """
        if value.same_as:
            return self._scales[value.same_as]
        if value.limits is None and value.name not in self._task.ranges:
            raise QuantizeError(
                f"no calibration range for value {value.name}", hint="Use calibration data that covers it."
            )
        limits = value.limits or self._task.ranges[value.name]
        by_unit = self._task.placement.is_by_unit
        scale, zero_point = self._unit_scale(*limits) if by_unit else scale_of_range(*limits, self._bits)
        return self._register_initializer(f"{value.name}_scale", scale), self._register_initializer(
            f"{value.name}_zero_point", zero_point
        )

    def _quantize_value(self, value: ir.Value, placed: QuantizedValue) -> None:
        """Insert QuantizeLinear and DequantizeLinear after a value and redirect its readers."""
        value, uses = _find_read_version(value, placed.readers)
        maker = value.producer()
        tag = read_tag(maker) if maker is not None else _common_tag([use.node for use in uses], self._modules)
        scale, zero_point = self._scales[placed.name]
        quantize = self._make_node("QuantizeLinear", [value, scale, zero_point], placed.name, tag, "activation")
        dequantize = self._make_node(
            "DequantizeLinear", [quantize.outputs[0], scale, zero_point], placed.name, tag, "activation"
        )
        self._redirect_readers(value, dequantize, uses, takes_name=placed.readers is None and value.is_graph_output())
        if maker is not None:
            self._graph.insert_after(maker, [quantize, dequantize])
        else:
            self._graph.insert_before(self._graph[0], [quantize, dequantize])

    def _quantize_layer(self, node: ir.Node) -> None:
        """Quantize the weight and the constant bias of a layer, in place."""
        operand = weight_operand(node)
        if operand is None:
            return
        if node.op_type == "Gather":
            self._quantize_table(node, operand)
            self._record_precision(node, "operator")
            return
        data = node.inputs[1 - operand]
        data_name = _measured_name(data, self._scales)
        if not data_name:
            return
        weight = node.inputs[operand]
        assert weight is not None  # weight_operand returned its position
        axis = _channel_axis(node, operand) if self._task.is_per_channel else None
        axis, block_size = self._task.scaling.block_axis(node, operand) or (axis, None)
        input_scale = self._scales[data_name][0].const_value
        bias = _constant_bias(node, self._task) if block_size is None else None  # sums of blocks have no common scale
        floor = None if bias is None or input_scale is None else _least_scale(bias.values, input_scale.numpy(), axis)
        dequantized = self._dequantize_constant(weight, "weight", axis, node, floor, block_size)
        node.replace_input_with(operand, dequantized.output)
        self._record_precision(node, "operator")
        scales = dequantized.scales.scales
        if bias is not None and input_scale is not None and scales.size in (1, bias.values.size):
            self._quantize_bias(bias, input_scale.numpy() * scales)
            if bias.reader is not node:
                self._record_precision(bias.reader, "operator")

    def _quantize_table(self, node: ir.Node, operand: int) -> None:
        """Quantize the table of a Gather and dequantize the looked-up rows instead of the table."""
        table = node.inputs[operand]
        assert table is not None  # weight_operand returned its position
        name = table.name or ""
        if name not in self._tables:
            assert table.const_value is not None  # a table has values
            scales = _weight_scales(table, None, _with_weight_bits(self._task, 8))
            self._tables[name] = self._store_integers(table, table.const_value, scales)
        stored, scale, zero_point = self._tables[name]
        node.replace_input_with(operand, stored)
        rows = node.outputs[0]
        uses = list(rows.uses())
        dequantize = self._make_node(
            "DequantizeLinear", [rows, scale, zero_point], rows.name or "", read_tag(node), "weight"
        )
        self._redirect_readers(rows, dequantize, uses, takes_name=True)
        rows.type = stored.type
        self._graph.insert_after(node, [dequantize])

    def _redirect_readers(
        self, value: ir.Value, dequantize: ir.Node, uses: Sequence[_Usage], *, takes_name: bool
    ) -> None:  # fmt: skip
        """Redirect readers of a value to a new node, which takes the value's name if ``takes_name``."""
        result = dequantize.outputs[0]
        result.shape, result.type = value.shape, value.type
        for use in uses:
            use.node.replace_input_with(use.idx, result)
        if not takes_name:
            return
        result.name, value.name = value.name, self._fresh.take(f"{value.name}_before")
        for index, output in enumerate(self._graph.outputs):
            if output is value:
                self._graph.outputs[index] = result

    def _store_integers(
        self, weight: ir.Value, tensor: ir.TensorProtocol, integers: WeightScales
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Add integers, scale and zero point of a weight as initializers, and return the three.

        Args:
            weight: The weight.
            tensor: Its values, or values that are rounded already.
            integers: Scales and zero points.
        """
        name = self._fresh.take(f"{weight.name}_quantized")
        return (
            weights.add_initializer(self._graph, quantized_tensor(tensor, integers, name)),
            self._register_initializer(f"{weight.name}_scale", integers.scales),
            self._register_initializer(f"{weight.name}_zero_point", integers.zero_points),
        )

    def _quantize_bias(self, bias: _Bias, scale: Array) -> None:
        """Replace a constant bias by int32 integers and a DequantizeLinear."""
        value = bias.reader.inputs[bias.input_index]
        assert value is not None  # the bias was read from it
        name = value.name or ""
        axis = 0 if scale.size > 1 else None
        scale = scale.astype(np.float32).reshape(-1 if scale.size > 1 else ())
        inputs = [
            self._register_initializer(f"{name}_quantized", quantize_bias(bias.values, scale)),
            self._register_initializer(f"{name}_scale", scale),
            self._register_initializer(f"{name}_zero_point", np.zeros(scale.shape, np.int32)),
        ]
        dequantized = self._insert_dequantize(inputs, value, read_tag(bias.reader), bias.reader, axis)
        bias.reader.replace_input_with(bias.input_index, dequantized)
        weights.drop_unused_initializers(self._graph, [value])

    def _insert_dequantize(
        self, inputs: Sequence[ir.Value], constant: ir.Value, tag: NodeTag | None, reader: ir.Node, axis: int | None,
        block_size: int | None = None,
    ) -> ir.Value:  # fmt: skip
        """Insert a DequantizeLinear before the reader of a constant; return its output."""
        attributes = {} if axis is None else {"axis": axis}
        attributes |= {} if block_size is None else {"block_size": block_size}
        dequantize = self._make_node("DequantizeLinear", inputs, constant.name or "", tag, "weight", attributes)
        output = dequantize.outputs[0]
        output.shape, output.type = constant.shape, constant.type
        self._graph.insert_before(reader, [dequantize])
        return output

    def _make_node(
        self, operator: str, inputs: Sequence[ir.Value], name: str, tag: NodeTag | None, kind: str,
        attributes: Mapping[str, int] = {},
    ) -> ir.Node:  # fmt: skip
        """Create a node with one output, not yet in the graph."""
        output = ir.Value(name=self._fresh.take(f"{name}_{operator}_Output"))
        integers = [ir.AttrInt64(key, value) for key, value in attributes.items()]
        node = ir.Node(
            self._domain, operator, inputs, integers, outputs=[output], name=self._fresh.take(f"{name}_{operator}")
        )
        if tag is not None:
            write_tag(node, NodeTag(tag.tag, tag.module, "inherited"))
        self._record_precision(node, kind)
        return node

    def _record_precision(self, node: ir.Node, kind: str) -> None:
        """Write precision and kind to the metadata of a node."""
        node.metadata_props[QUANTIZATION_KEY] = json.dumps({"precision": self._task.precision.name, "kind": kind})

    def _register_initializer(self, name: str, array: Array) -> ir.Value:
        """Add an initializer with an unused name."""
        return weights.add_initializer(self._graph, ir.Tensor(array, name=self._fresh.take(name)))


_LEAST_RANGE = 1e-4
"""Minimum range width of a value in a unit. Specified: the value of ONNX Runtime's recipe for QNN. Measured with QNN
2.7: sums with a constant of zeros are wrong at scale 1 (-13 dB), and right at the scale of this range."""


_ORDER = {"table": 0, "rows": 1, "weight": 1, "activation": 1, "bias": 2}


def _get_input_name(node: ir.Node, index: int) -> str:
    """Return the name of an input; empty if the input is omitted."""
    value = node.inputs[index]
    return (value.name if value is not None else "") or ""


def _measured_name(value: ir.Value | None, scales: Container[str | None]) -> str:
    """Name of the value with a scale that a layer reads, directly or through Q/DQ pairs; empty if absent.

    An integer kernel of another group is read through the DequantizeLinear of that group.
    """
    while value is not None:
        if value.name in scales:
            return value.name or ""
        value = _find_quantized_input(value)
    return ""


def _find_quantized_input(value: ir.Value) -> ir.Value | None:
    """Input of the QuantizeLinear/DequantizeLinear pair that produces a value; ``None`` without a pair.

    Only engines insert such pairs here, since graphs with existing pairs are not quantized again.
    """
    dequantize = value.producer()
    integers = dequantize.inputs[0] if dequantize is not None and dequantize.op_type == "DequantizeLinear" else None
    quantize = integers.producer() if integers is not None else None
    return quantize.inputs[0] if quantize is not None and quantize.op_type == "QuantizeLinear" else None


def _find_read_version(value: ir.Value, names: frozenset[str] | None) -> tuple[ir.Value, Sequence[_Usage]]:
    """Find the version of a value that the named nodes read, and their uses of it.

    An earlier group may have inserted a Q/DQ pair for all readers. The new pair then goes after the existing pair, so
    that the producer keeps its integer kernel.
    """
    if names is None:
        return value, list(value.uses())
    versions = [value]
    for quantize, _ in value.uses():
        if quantize.op_type == "QuantizeLinear":
            versions += [use.node.outputs[0] for use in quantize.outputs[0].uses()]
    for version in versions:
        if uses := [use for use in version.uses() if use.node.name in names]:
            return version, uses
    return value, []


def _common_tag(nodes: Sequence[ir.Node], modules: Mapping[str, str]) -> NodeTag | None:
    """Return the tag of the deepest module that contains all of the nodes."""
    tags = {tag.tag: tag for node in nodes if (tag := read_tag(node)) is not None}
    if len(tags) <= 1:
        return next(iter(tags.values()), None)
    common = address.common_ancestor(list(tags))
    return NodeTag(common, modules.get(common, ""), "inherited")


def _with_weight_bits(task: EngineTask, least: int) -> EngineTask:
    """Return a task whose weights have at least these bits: tables and vectors have one scale."""
    precision = task.precision
    return replace(task, precision=replace(precision, weight_bits=max(least, precision.weight_bits)))


def _weight_scales(
    weight: ir.Value, axis: int | None, task: EngineTask, *, is_unit: bool = False, floor: Array | None = None,
    block_size: int | None = None,
) -> WeightScales:  # fmt: skip
    """Compute the scales of a weight.

    Args:
        weight: An initializer, float32.
        axis: As in :meth:`_Rewriting._dequantize_constant`.
        task: Integer type and symmetry.
        is_unit: Use the weight types of the provider, whose units require scales of similar size.
        floor: As in :meth:`_Rewriting._dequantize_constant`.
        block_size: As in :meth:`_Rewriting._dequantize_constant`.

    Raises:
        QuantizeError: the weight has non-finite values.
    """
    tensor = weight.const_value
    assert tensor is not None  # initializers of the main graph have a value
    provider, is_channel = task.provider, axis is not None
    is_signed, is_symmetric = task.precision.signed_weights, task.options.symmetric is not False
    if is_unit:
        is_signed = is_channel or (is_signed if provider.signed_weights is None else provider.signed_weights)
        is_symmetric = is_symmetric if provider.symmetric_weights is None else provider.symmetric_weights
    # Specified: ONNX Runtime's integer kernels require one zero point for all channels, hence the middle.
    is_symmetric = is_symmetric or is_channel
    try:
        integers = _weight_range(task.precision, is_signed=is_signed, is_symmetric=is_symmetric)
        scales = measure_scales(tensor, axis, integers, block_size)
    except ValueError as error:
        raise QuantizeError(str(error), hint=f"Check the checkpoint, or exclude its module ({opt.exclude}).") from error
    if is_unit:
        # Channels of zeros have scale 1, which is far from the other scales.
        is_zero = (scales.scales == 1) & (scales.zero_points == 0)
        smallest = np.float32(_LEAST_RANGE / (integers.maximum - integers.minimum))
        return replace(scales, scales=np.where(is_zero, smallest, scales.scales).astype(np.float32))
    if is_symmetric:
        # Channels of zeros have another zero point otherwise.
        middle = 0 if is_signed else 128
        scales = replace(scales, zero_points=np.full_like(scales.zero_points, middle))
    return _raise_scales(scales, floor)


def _raise_scales(scales: WeightScales, floor: Array | None) -> WeightScales:
    """Return scales of at least a minimum, per channel or scalar; ``None``: no minimum."""
    return scales if floor is None else replace(scales, scales=np.maximum(scales.scales, floor).astype(np.float32))


def _channel_axis(node: ir.Node, operand: int) -> int | None:
    """Output channel axis of a layer's weight; ``None`` if no axis holds output channels."""
    weight = node.inputs[operand]
    assert weight is not None  # weight_operand returned its position
    assert weight.const_value is not None
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1
    if operand == 0 or len(weight.const_value.shape) != 2:
        return None
    if node.op_type == "Gemm":
        return 0 if node.attributes.get_int("transB", 0) else 1
    return 1


def _constant_bias(node: ir.Node, task: EngineTask) -> _Bias | None:
    """Constant, unscaled bias of a layer, from its own input or from the Add after it; ``None`` otherwise."""
    reader, index = node, 2
    if node.op_type == "MatMul":
        addition = bias_addition(node)
        if addition is None or addition[0].name not in task.placement.bias_additions:
            return None
        reader, index = addition
    elif node.op_type not in ("Conv", "Gemm") or len(node.inputs) < 3:
        return None
    tensor = weights.constant_tensor(reader.inputs[index])
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) != 1:
        return None
    if node.attributes.get_float("beta", 1.0) != 1.0 or node.attributes.get_float("alpha", 1.0) != 1.0:
        return None
    return _Bias(reader, index, np.asarray(tensor.numpy()))


def _least_scale(bias: Array, input_scale: Array, axis: int | None) -> Array:
    """Smallest weight scale with which the bias fits into int32."""
    limit = np.abs(bias.astype(np.float64)) / (float(input_scale) * np.iinfo(np.int32).max) * 1.0001
    return np.asarray(limit.max() if axis is None else limit)
