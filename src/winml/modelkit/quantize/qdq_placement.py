"""Placement of QuantizeLinear and DequantizeLinear in a graph.

Reads the structure only. A layer with a weight is quantized if selected. An operator without weights is quantized if
all its inputs are quantized already, so that a chain of integer kernels is not interrupted. Inputs of other nodes do
not change unless an integer kernel produces them.

A provider that computes whole units of operators with integers requires a DequantizeLinear before each input of an
operator and a QuantizeLinear after each output. Between modules of two precisions the reader converts: its pair follows
the pair of the producer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import onnx_ir as ir

from winml.modelkit.onnx.cutting import Cutter
from winml.modelkit.onnx.weights import constant_tensor, transposed_weight
from winml.modelkit.quantize.placements import BLOCK_OPERATORS, OperatorRule, Placement, Role

_WITH_QUANTIZED_OUTPUT = frozenset({"Conv", "ConvTranspose"})
"""Layers with a quantized output. Specified: ONNX Runtime's integer kernels of convolutions require an integer output;
MatMul and Gemm support both. Measured: docs/reference/quantization.md."""

_ONE_BY_ONE = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "MaxPool"})
"""Operators that select or rearrange values; the output has the scale of the input."""

_JOINING = frozenset({"Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool"})
"""Operators that compute new values, for which ONNX Runtime has integer kernels."""

ACTIVATIONS = frozenset({"Relu", "Clip"})
"""Operators replaced by the clipping of a range: if they are the only reader of a layer, their output is quantized, and
ONNX Runtime removes them."""

COMPANIONS = _ONE_BY_ONE | _JOINING | ACTIVATIONS
"""Operators without a weight that may compute with integers."""


@dataclass(frozen=True)
class QuantizedValue:
    """A value that gets a QuantizeLinear and a DequantizeLinear."""

    name: str
    readers: frozenset[str] | None
    """Names of the nodes that read it quantized; ``None``: all readers, since an integer kernel produces it."""
    same_as: str = ""
    """Value whose scale it shares, or table of its rows; empty: a separate scale from its range."""
    limits: tuple[float, float] | None = None
    """Fixed range; ``None``: measured."""


@dataclass(frozen=True)
class QuantizedConstant:
    """A constant that an operator reads dequantized."""

    node: str
    """Name of the reader."""
    index: int
    """Input index."""
    role: Role
    axis: int | None = None
    """Channel axis with one scale per channel, or axis of the blocks; ``None``: one scale."""
    block_size: int | None = None
    """Number of values along the axis that share a scale; ``None``: no blocks."""


@dataclass(frozen=True)
class QdqPlacement:
    """Values to quantize, in graph order."""

    values: tuple[QuantizedValue, ...] = ()
    companions: frozenset[str] = frozenset()
    """Names of the quantized nodes without weights."""
    bias_additions: frozenset[str] = frozenset()
    """Names of the additions after a product whose constant may become an integer."""
    constants: tuple[QuantizedConstant, ...] = ()
    """Constants of the operators of units, in graph order."""
    is_by_unit: bool = False
    """True if operators are quantized as whole units."""

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the values whose range is measured."""
        return tuple(value.name for value in self.values if not value.same_as and value.limits is None)


def place_quantized_values(graph: ir.Graph, chosen: frozenset[str], allowed: frozenset[str]) -> QdqPlacement:
    """Place the Q/DQ pairs of layers and their companions.

    Args:
        graph: The main graph, sorted, with unique node names.
        chosen: Names of the nodes with weights to quantize.
        allowed: Names of the nodes without weights that may be quantized too.
    """
    return _Placing(chosen, allowed).place(graph)


def _order_values(
    graph: ir.Graph, computed: Mapping[ir.Value, QuantizedValue], readers: Mapping[ir.Value, set[str]]
) -> tuple[QuantizedValue, ...]:
    """Values produced by integer kernels and values read quantized, in graph order."""
    order = dict.fromkeys([*graph.inputs, *(value for node in graph for value in node.outputs)])
    return tuple(
        computed[value] if value in computed else QuantizedValue(value.name or "", frozenset(readers[value]))
        for value in order
        if value in computed or value in readers
    )


def weight_operand(node: ir.Node) -> int | None:
    """Input index of the float32 weight of a layer, possibly transposed; ``None`` without a weight."""
    for index in _WEIGHT_OPERANDS.get(node.op_type, ()):
        value = node.inputs[index]
        if index == 1:
            value = transposed_weight(node) or value
        tensor = constant_tensor(value)
        if tensor is not None and tensor.dtype == ir.DataType.FLOAT and len(tensor.shape) >= 2:
            return index
    return None


_WEIGHT_OPERANDS = {"MatMul": (0, 1), "Gemm": (1,), "Conv": (1,), "ConvTranspose": (1,), "Gather": (0,)}
"""Operator → input indices of a possible weight."""


def bias_addition(product: ir.Node) -> tuple[ir.Node, int] | None:
    """Find the Add of a constant bias that is the only reader of a product; return the node and the constant's index.

    For static sizes, ONNX Runtime fuses both into one Gemm before it selects integer kernels; the Gemm has an integer
    kernel only if the bias is an integer too.
    """
    weight = product.inputs[1] if product.op_type == "MatMul" and weight_operand(product) == 1 else None
    uses = list(product.outputs[0].uses())
    if weight is None or weight.shape is None or len(uses) != 1 or product.outputs[0].is_graph_output():
        return None
    addition, index = uses[0].node, 1 - uses[0].idx
    if addition.op_type != "Add" or addition.domain or addition.graph is not product.graph:
        return None
    bias = constant_tensor(addition.inputs[index])
    if bias is None or bias.dtype != ir.DataType.FLOAT or len(bias.shape) != 1:
        return None
    return (addition, index) if bias.shape[0] == weight.shape[-1] else None


class _Placing:
    """Placement for the integer kernels of the CPU provider."""

    def __init__(self, chosen: frozenset[str], allowed: frozenset[str]) -> None:
        self._chosen = chosen
        self._allowed = allowed
        self._quantized_values: dict[ir.Value, QuantizedValue] = {}
        """Values produced by integer kernels."""
        self._read: defaultdict[ir.Value, set[str]] = defaultdict(set)
        self._companions: set[str] = set()
        self._bias_additions: set[str] = set()

    def place(self, graph: ir.Graph) -> QdqPlacement:
        for node in graph:
            if node.name in self._chosen:
                self._place_layer(node)
            elif node.name in self._allowed:
                self._place_companion(node)
        values = _order_values(graph, self._quantized_values, self._read)
        return QdqPlacement(values, frozenset(self._companions), frozenset(self._bias_additions))

    def _place_layer(self, node: ir.Node) -> None:
        """Mark the input of a layer as quantized, and the output if the kernel requires integers."""
        weight = weight_operand(node)
        if weight is None or node.op_type == "Gather":
            return  # lookups read integers from the table, and no operator computes with them
        data = node.inputs[1 - weight]
        if data is None or data.is_initializer():
            return
        self._read[data].add(node.name or "")
        addition = bias_addition(node)
        if addition is not None and addition[0].name in self._allowed:
            self._bias_additions.add(addition[0].name or "")
        if node.op_type in _WITH_QUANTIZED_OUTPUT:
            self._mark_output(node)

    def _place_companion(self, node: ir.Node) -> None:
        """Note the output of a node that copies a quantized value (same scale) or joins such values (own scale)."""
        if node.op_type in _ONE_BY_ONE and node.inputs[0] in self._quantized_values and len(node.outputs) == 1:
            source = self._quantized_values[node.inputs[0]]
            value = node.outputs[0]
            self._quantized_values[value] = QuantizedValue(
                value.name or "", None, same_as=source.same_as or source.name
            )
        elif node.op_type in _JOINING and all(value in self._quantized_values for value in node.inputs):
            self._mark_output(node)
        else:
            return
        self._companions.add(node.name or "")

    def _mark_output(self, node: ir.Node) -> None:
        """Mark the output of a node as quantized, or the output of the activation that is its only reader."""
        value = node.outputs[0]
        uses = list(value.uses())
        if len(uses) == 1 and not value.is_graph_output():
            reader = uses[0].node
            if reader.op_type in ACTIVATIONS and uses[0].idx == 0 and reader.name in self._allowed:
                self._companions.add(reader.name or "")
                value = reader.outputs[0]
        self._quantized_values[value] = QuantizedValue(value.name or "", None)


class RequestedBlocks(NamedTuple):
    """Blocks of the weight of a product."""

    axis: int
    size: int
    depth: int
    """Number of values along the axis."""


@dataclass(frozen=True)
class WeightScaling:
    """Requested bits and scales of the weights of one precision."""

    weight_bits: int
    activation_bits: int
    is_per_channel: bool = True
    """False: one scale for each weight."""
    block_size: int | None = None
    """Number of values that share a scale; ``None``: no blocks."""
    block_sizes: Mapping[str, int] = field(default_factory=dict)
    """Name of a node → block size of its weight, if set by a rule."""

    def block_axis(self, node: ir.Node, index: int) -> tuple[int, int] | None:
        """Return axis and size of the blocks of a weight; ``None`` without blocks, or if they do not divide it."""
        blocks = self.requested_blocks(node, index)
        return None if blocks is None or blocks.depth % blocks.size else (blocks.axis, blocks.size)

    def requested_blocks(self, node: ir.Node, index: int) -> RequestedBlocks | None:
        """Return the blocks that are requested for a weight; ``None`` without blocks.

        Products alone have blocks, along the axis of their sums.
        """
        size = self.block_sizes.get(node.name or "", self.block_size)
        value = node.inputs[index]
        shape = value.shape if value is not None else None
        if size is None or shape is None or node.op_type not in BLOCK_OPERATORS or index != 1 or len(shape) != 2:
            return None
        is_transposed = node.op_type == "Gemm" and node.attributes.get_int("transB", 0) != 0
        axis = int(is_transposed)
        depth = shape[axis]
        return RequestedBlocks(axis, size, depth) if isinstance(depth, int) else None


def place_units(model: ir.Model, names: frozenset[str], placement: Placement, scaling: WeightScaling) -> QdqPlacement:
    """Place the Q/DQ pairs so that every named node supported by the provider is a unit.

    Args:
        model: The model; its main graph is sorted and has unique node names.
        names: Names of the nodes of the modules with this precision.
        placement: Operators and types of the provider.
        scaling: Bits, and scales of weights.
    """
    return _PlacingUnits(model, names, placement, scaling).place()


class _PlacingUnits:
    """Placement for a provider that computes whole units with integers."""

    def __init__(self, model: ir.Model, names: frozenset[str], placement: Placement, scaling: WeightScaling) -> None:
        self._model = model
        self._graph = model.graph
        self._names = names
        self._placement = placement
        self._scaling = scaling
        self._quantized_values: dict[ir.Value, QuantizedValue] = {}
        """Values produced by units."""
        self._read: defaultdict[ir.Value, set[str]] = defaultdict(set)
        """Value → names of the units that read it."""
        self._constants: list[QuantizedConstant] = []
        self._companions: set[str] = set()
        self._merged: set[ir.Value] = set()
        """Values between a unit and its fused activation."""

    def place(self) -> QdqPlacement:
        # Nodes that depend on no input are computed once at load time, and their values may be infinite.
        cutter = Cutter(self._model)
        for node in self._graph:
            rule = None if cutter.is_constant(node) else self._placement.rule(node)
            if rule is not None and node.name in self._names and self._is_unit(node, rule):
                self._place_unit(node, rule)
        values = _order_values(self._graph, self._quantized_values, self._read)
        return QdqPlacement(values, frozenset(self._companions), constants=tuple(self._constants), is_by_unit=True)

    def _is_unit(self, node: ir.Node, rule: OperatorRule) -> bool:
        """Return True if a node computes floats, and not from constants alone."""
        operands = [value for index in rule.indices(node) if (value := node.inputs[index]) is not None]
        if not operands or any(value.dtype != ir.DataType.FLOAT for value in operands):
            return False
        if rule.result in ("table", "rows"):
            return constant_tensor(operands[0]) is not None and len(operands[0].shape or ()) >= 2
        if rule.is_residual and not _is_residual(node):
            return False
        return not all(constant_tensor(value) is not None for value in operands)

    def _place_unit(self, node: ir.Node, rule: OperatorRule) -> None:
        """Add constants, inputs and outputs of a unit to the placement."""
        name = node.name or ""
        for index in rule.indices(node):
            value = node.inputs[index]
            assert value is not None
            if constant_tensor(value) is not None:
                role = rule.role(index)
                if role == "bias" and not self._placement.integer_bias:
                    continue
                axis, block_size = self._scales_of(node, index) if role == "weight" else (None, None)
                self._constants.append(QuantizedConstant(name, index, role, axis, block_size))
            elif value not in self._merged:
                self._read[value].add(name)
        self._companions.add(name)
        if not self._placement.quantizes_outputs or rule.result == "rows":
            return
        for value in node.outputs:
            if value.name and value.dtype in (ir.DataType.FLOAT, None) and (value.uses() or value.is_graph_output()):
                self._mark_output(node, value, rule)

    def _scales_of(self, node: ir.Node, index: int) -> tuple[int | None, int | None]:
        """Return the axis of the scales of a weight and its block size: as requested, if the provider runs it."""
        bits = self._scaling.weight_bits, self._scaling.activation_bits
        blocks = self._scaling.block_axis(node, index)
        if blocks is not None and not self._placement.product_refusal(*bits, "block", node.op_type):
            return blocks
        if not self._scaling.is_per_channel or self._placement.product_refusal(*bits, "channel", node.op_type):
            return None, None
        return self._placement.channel_axis(node, index), None

    def _mark_output(self, node: ir.Node, value: ir.Value, rule: OperatorRule) -> None:
        """Mark an output as quantized, unless a following activation belongs to the unit."""
        operand = node.inputs[0]
        name = value.name or ""
        if rule.result != "own" and operand is not None:
            source = self._quantized_values.get(operand)
            scale_source = source.same_as or source.name if source is not None else operand.name or ""
            self._quantized_values[value] = QuantizedValue(name, None, same_as=scale_source)
            return
        uses = list(value.uses())
        if len(uses) == 1 and not value.is_graph_output() and rule.takes_activation:
            reader = uses[0].node
            activation = self._placement.rule(reader)
            if activation is not None and activation.is_range and reader.name in self._names and uses[0].idx == 0:
                self._merged.add(value)
                return
        limits = self._placement.limits(node.op_type, self._scaling.activation_bits)
        self._quantized_values[value] = QuantizedValue(name, None, limits=limits)


_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


def _is_residual(node: ir.Node) -> bool:
    """Return True if an addition joins a branch that ends in a product (with or without bias) with another value."""
    values = [value for value in node.inputs if value is not None]
    if any(constant_tensor(value) is not None for value in values) or _makes_scores(node):
        return False
    makers = [value.producer() for value in values]
    biased = [
        value.producer()
        for maker in makers
        if maker is not None
        and maker.op_type == "Add"
        and any(constant_tensor(operand) is not None for operand in maker.inputs)
        for value in maker.inputs
        if value is not None
    ]
    return any(maker is not None and maker.op_type in _PRODUCTS for maker in (*makers, *biased))


def _makes_scores(node: ir.Node) -> bool:
    """Return True if a node adds to attention scores, such as a mask."""
    readers = [reader for reader, _ in node.outputs[0].uses()]
    return any(reader.op_type == "Softmax" or (reader.op_type == "Add" and _makes_scores(reader)) for reader in readers)
