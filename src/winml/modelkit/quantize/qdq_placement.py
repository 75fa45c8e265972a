"""Decides which values of a graph become numbers of few bits where it computes with QuantizeLinear, DequantizeLinear.

Reads the structure only. A layer with a weight takes part because it was chosen; an operator without weights takes part
where all that it reads is quantized already, so that a chain of integer kernels is not broken. Nodes that are not
chosen read what they read before, unless it comes out of an integer kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from winml.modelkit.onnx.weights import constant_tensor, transposed_weight
from winml.modelkit.quantize.placements import Role

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
        order: Mapping[ir.Value, None] = dict.fromkeys(
            [*graph.inputs, *(value for node in graph for value in node.outputs)]
        )
        values = []
        for value in order:
            if value in self._made:
                values.append(self._made[value])
            elif value in self._read:
                values.append(QuantizedValue(value.name or "", frozenset(self._read[value])))
        return QdqPlacement(tuple(values), frozenset(self._companions), frozenset(self._bias_additions))

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
