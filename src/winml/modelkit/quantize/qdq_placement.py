"""Decides which values of a graph become numbers of few bits where it computes with QuantizeLinear, DequantizeLinear.

Reads the structure only. A layer with a weight takes part because it was chosen; an operator without weights takes part
where all that it reads is quantized already, so that a chain of integer kernels is not broken. Nodes that are not
chosen read what they read before, unless it comes out of an integer kernel.

A provider that computes whole units of operators with integers takes a DequantizeLinear before each input of an
operator and a QuantizeLinear behind each of its outputs. Where modules of two precisions meet, the reader converts: its
pair stands behind that of the maker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from winml.modelkit.onnx.cutting import Cutter
from winml.modelkit.onnx.weights import constant_tensor, transposed_weight
from winml.modelkit.quantize.placements import OperatorRule, Placement, Role

_WITH_QUANTIZED_OUTPUT = frozenset({"Conv", "ConvTranspose"})
"""Layers whose output is quantized as well. Specified: ONNX Runtime has integer kernels for a convolution only if its
output is an integer, and for a MatMul or a Gemm either way. Measured: docs/reference/quantization.md."""

_ONE_BY_ONE = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "MaxPool"})
"""Operators that select or rearrange values; what comes out has the scale of what goes in."""

_JOINING = frozenset({"Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool"})
"""Operators that compute new values, for which ONNX Runtime has integer kernels."""

ACTIVATIONS = frozenset({"Relu", "Clip"})
"""Operators that a range can do the work of: where they are all that reads a layer, their output is quantized, and
ONNX Runtime drops them."""

COMPANIONS = _ONE_BY_ONE | _JOINING | ACTIVATIONS
"""Operators without a weight that may compute with integers."""


@dataclass(frozen=True)
class QuantizedValue:
    """A value that gets a QuantizeLinear and a DequantizeLinear."""

    name: str
    readers: frozenset[str] | None
    """Names of the nodes that read it quantized; None: all that reads it, since an integer kernel makes it."""
    same_as: str = ""
    """Value whose scale it shares, or table its rows come from; empty: it has its own, from its own range."""
    limits: tuple[float, float] | None = None
    """Its range, whatever the data; None: the data say it."""


@dataclass(frozen=True)
class QuantizedConstant:
    """A constant that an operator reads as integers."""

    node: str
    """Name of the reader."""
    index: int
    """Which of its inputs."""
    role: Role
    axis: int | None = None
    """Axis of the channels, each with a scale of its own; None: one scale."""


@dataclass(frozen=True)
class QdqPlacement:
    """The values that become numbers of few bits, in the order of the graph."""

    values: tuple[QuantizedValue, ...] = ()
    companions: frozenset[str] = frozenset()
    """Names of the nodes without weights that compute with few bits too."""
    bias_additions: frozenset[str] = frozenset()
    """Names of the additions behind a product whose constant may become an integer."""
    constants: tuple[QuantizedConstant, ...] = ()
    """What operators of units read, in the order of the graph."""
    is_by_unit: bool = False
    """Whether operators are quantized as whole units."""

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the values whose range has to be known."""
        return tuple(value.name for value in self.values if not value.same_as and value.limits is None)


def place_quantized_values(graph: ir.Graph, chosen: frozenset[str], allowed: frozenset[str]) -> QdqPlacement:
    """Return what becomes a number of few bits.

    Args:
        graph: The main graph, its nodes sorted, each with a name of its own.
        chosen: Names of the nodes with weights that are to be quantized.
        allowed: Names of the nodes without weights that may take part.
    """
    return _Placing(chosen, allowed).place(graph)


def _in_order(
    graph: ir.Graph, made: Mapping[ir.Value, QuantizedValue], read: Mapping[ir.Value, set[str]]
) -> tuple[QuantizedValue, ...]:
    """Return the values that integer kernels make and those that nodes read quantized, in the order of a graph."""
    order = dict.fromkeys([*graph.inputs, *(value for node in graph for value in node.outputs)])
    return tuple(
        made[value] if value in made else QuantizedValue(value.name or "", frozenset(read[value]))
        for value in order
        if value in made or value in read
    )


def weight_operand(node: ir.Node) -> int | None:
    """Return the index of the float32 weight among the inputs of a layer, maybe transposed; None where it has none."""
    for index in _WEIGHT_OPERANDS.get(node.op_type, ()):
        value = node.inputs[index]
        if index == 1:
            value = transposed_weight(node) or value
        tensor = constant_tensor(value)
        if tensor is not None and tensor.dtype == ir.DataType.FLOAT and len(tensor.shape) >= 2:
            return index
    return None


_WEIGHT_OPERANDS = {"MatMul": (0, 1), "Gemm": (1,), "Conv": (1,), "ConvTranspose": (1,), "Gather": (0,)}
"""Inputs that can be the weight of a layer, by operator."""


def bias_addition(product: ir.Node) -> tuple[ir.Node, int] | None:
    """Return the Add of a constant to each column of a product, which alone reads it, and the constant's index.

    ONNX Runtime makes one Gemm of both where sizes are fixed, before it looks for integer kernels; that has one only if
    the bias is an integer as well.
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
    def __init__(self, chosen: frozenset[str], allowed: frozenset[str]) -> None:
        self._chosen = chosen
        self._allowed = allowed
        self._made: dict[ir.Value, QuantizedValue] = {}
        """Values that integer kernels make."""
        self._read: defaultdict[ir.Value, set[str]] = defaultdict(set)
        self._companions: set[str] = set()
        self._bias_additions: set[str] = set()

    def place(self, graph: ir.Graph) -> QdqPlacement:
        for node in graph:
            if node.name in self._chosen:
                self._place_layer(node)
            elif node.name in self._allowed:
                self._place_companion(node)
        values = _in_order(graph, self._made, self._read)
        return QdqPlacement(values, frozenset(self._companions), frozenset(self._bias_additions))

    def _place_layer(self, node: ir.Node) -> None:
        weight = weight_operand(node)
        if weight is None or node.op_type == "Gather":
            return  # a table of weights is read by integers, and no value of it is computed with
        data = node.inputs[1 - weight]
        if data is None or data.is_initializer():
            return
        self._read[data].add(node.name or "")
        addition = bias_addition(node)
        if addition is not None and addition[0].name in self._allowed:
            self._bias_additions.add(addition[0].name or "")
        if node.op_type in _WITH_QUANTIZED_OUTPUT:
            self._make(node)

    def _place_companion(self, node: ir.Node) -> None:
        if node.op_type in _ONE_BY_ONE and node.inputs[0] in self._made and len(node.outputs) == 1:
            source = self._made[node.inputs[0]]
            value = node.outputs[0]
            self._made[value] = QuantizedValue(value.name or "", None, same_as=source.same_as or source.name)
        elif node.op_type in _JOINING and all(value in self._made for value in node.inputs):
            self._make(node)
        else:
            return
        self._companions.add(node.name or "")

    def _make(self, node: ir.Node) -> None:
        """Let a node make a quantized value: its own, or that of the activation that is all that reads it."""
        value = node.outputs[0]
        uses = list(value.uses())
        if len(uses) == 1 and not value.is_graph_output():
            reader = uses[0].node
            if reader.op_type in ACTIVATIONS and uses[0].idx == 0 and reader.name in self._allowed:
                self._companions.add(reader.name or "")
                value = reader.outputs[0]
        self._made[value] = QuantizedValue(value.name or "", None)


def place_units(model: ir.Model, names: frozenset[str], placement: Placement, bits: int) -> QdqPlacement:
    """Return what becomes an integer so that every named node that the provider takes is a unit.

    Args:
        model: Its main graph is sorted, and each of its nodes has a name of its own.
        names: Names of the nodes of the modules that get this precision.
        placement: What the provider takes.
        bits: Bits of activations.
    """
    return _PlacingUnits(model, names, placement, bits).place()


class _PlacingUnits:
    def __init__(self, model: ir.Model, names: frozenset[str], placement: Placement, bits: int) -> None:
        self._model = model
        self._graph = model.graph
        self._names = names
        self._placement = placement
        self._bits = bits
        self._made: dict[ir.Value, QuantizedValue] = {}
        """Values that units make."""
        self._read: defaultdict[ir.Value, set[str]] = defaultdict(set)
        """Values that units read → their names."""
        self._constants: list[QuantizedConstant] = []
        self._companions: set[str] = set()
        self._merged: set[ir.Value] = set()
        """Values between a unit and the activation that is part of it."""

    def place(self) -> QdqPlacement:
        # What depends on no input is computed once, when the file is loaded, and may reach to infinity on the way.
        cutter = Cutter(self._model)
        for node in self._graph:
            rule = None if cutter.is_constant(node) else self._placement.rule(node)
            if rule is not None and node.name in self._names and self._is_unit(node, rule):
                self._place(node, rule)
        values = _in_order(self._graph, self._made, self._read)
        return QdqPlacement(values, frozenset(self._companions), constants=tuple(self._constants), is_by_unit=True)

    def _is_unit(self, node: ir.Node, rule: OperatorRule) -> bool:
        """Say whether a node computes floats of what it reads, and not of constants alone."""
        read = [value for index in rule.indices(node) if (value := node.inputs[index]) is not None]
        if not read or any(value.dtype != ir.DataType.FLOAT for value in read):
            return False
        if rule.result in ("table", "rows"):
            return constant_tensor(read[0]) is not None and len(read[0].shape or ()) >= 2
        if rule.is_residual and not _is_residual(node):
            return False
        return not all(constant_tensor(value) is not None for value in read)

    def _place(self, node: ir.Node, rule: OperatorRule) -> None:
        name = node.name or ""
        for index in rule.indices(node):
            value = node.inputs[index]
            assert value is not None
            if constant_tensor(value) is not None:
                role = rule.role(index)
                if role == "bias" and not self._placement.integer_bias:
                    continue
                axis = self._placement.channel_axis(node, index) if role == "weight" else None
                self._constants.append(QuantizedConstant(name, index, role, axis))
            elif value not in self._merged:
                self._read[value].add(name)
        self._companions.add(name)
        if not self._placement.quantizes_outputs or rule.result == "rows":
            return
        for value in node.outputs:
            if value.name and value.dtype in (ir.DataType.FLOAT, None) and (value.uses() or value.is_graph_output()):
                self._make(node, value, rule)

    def _make(self, node: ir.Node, value: ir.Value, rule: OperatorRule) -> None:
        first = node.inputs[0]
        name = value.name or ""
        if rule.result != "own" and first is not None:
            source = self._made.get(first)
            known = source.same_as or source.name if source is not None else first.name or ""
            self._made[value] = QuantizedValue(name, None, same_as=known)
            return
        uses = list(value.uses())
        if len(uses) == 1 and not value.is_graph_output() and rule.takes_activation:
            reader = uses[0].node
            activation = self._placement.rule(reader)
            if activation is not None and activation.is_range and reader.name in self._names and uses[0].idx == 0:
                self._merged.add(value)
                return
        limits = self._placement.limits(node.op_type, self._bits)
        self._made[value] = QuantizedValue(name, None, limits=limits)


_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


def _is_residual(node: ir.Node) -> bool:
    """Say whether an addition joins a branch that ends in a product, its bias included, with another value."""
    values = [value for value in node.inputs if value is not None]
    if any(constant_tensor(value) is not None for value in values) or _makes_scores(node):
        return False
    makers = [value.producer() for value in values]
    biased = [
        value.producer()
        for maker in makers
        if maker is not None
        and maker.op_type == "Add"
        and any(constant_tensor(item) is not None for item in maker.inputs)
        for value in maker.inputs
        if value is not None
    ]
    return any(maker is not None and maker.op_type in _PRODUCTS for maker in (*makers, *biased))


def _makes_scores(node: ir.Node) -> bool:
    """Say whether a node adds to the scores of an attention, such as its mask."""
    readers = [reader for reader, _ in node.outputs[0].uses()]
    return any(reader.op_type == "Softmax" or (reader.op_type == "Add" and _makes_scores(reader)) for reader in readers)
