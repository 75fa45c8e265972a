"""Kinds of the values of a graph, such as attention scores or residual sums, read from its structure.

An attention is a softmax whose result is multiplied with another computed value, a residual sum adds two computed
values. Names are not read. The bits of each kind: ``KIND_RULES`` in ``precisions``.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import onnx_ir as ir

from winml.modelkit.onnx.cutting import Cutter
from winml.modelkit.onnx.operators import walk_back
from winml.modelkit.onnx.weights import constant_tensor
from winml.modelkit.quantize.placements import BLOCK_OPERATORS
from winml.modelkit.quantize.precisions import ValueKind

_MOVING = frozenset({
    "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split", "Expand", "Tile", "Concat", "Identity",
})  # fmt: skip
"""Operators that only move values."""
_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})
_NORMALIZATIONS = frozenset({
    "LayerNormalization", "RMSNormalization", "InstanceNormalization", "GroupNormalization", "BatchNormalization",
    "LpNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
})  # fmt: skip
_FUNCTIONS = frozenset({
    "Gelu", "FastGelu", "QuickGelu", "BiasGelu", "Erf", "Tanh", "Sigmoid", "HardSigmoid", "HardSwish", "Swish", "Elu",
    "Selu", "Mish", "Softplus",
})  # fmt: skip
_FOLLOWING = frozenset({"Relu", "Clip", "MaxPool", "AveragePool", "GlobalAveragePool", "Pad", "Resize"})
"""Operators whose results have the kind of their input."""


def classify_nodes(model: ir.Model) -> dict[str, ValueKind]:
    """Name of a node of the main graph → kind of the values it computes; nodes of constants are omitted."""
    return {node.name or "": kind for node, kind in _Classification(model).run().items()}


def find_score_projections(model: ir.Model) -> dict[str, tuple[ir.Node, ...]]:
    """Return name of attention scores → products with a weight that compute their operands.

    Before the Softmax, scores have a bias and a mask added. Scores that are multiplied or divided are omitted.

    for: T5, which does not divide scores by the root of the channels
    """
    graph = _Classification(model)
    return {
        scores.outputs[0].name or "": tuple(
            maker
            for operand in scores.inputs
            for maker in _iterate_makers(operand, _MOVING | {"Add"})
            if maker.op_type in BLOCK_OPERATORS and graph.has_weight(maker)
        )
        for softmax in model.graph
        if softmax.op_type == "Softmax"
        for scores in _iterate_makers(softmax.inputs[0], _MOVING | {"Add", "Where"})
        if scores.op_type == "MatMul" and not graph.has_weight(scores)
    }


def _iterate_makers(value: ir.Value | None, passed: Container[str]) -> Iterator[ir.Node]:
    """Yield the nearest nodes that a value is computed by, other than operators of ``passed``."""
    nodes = walk_back([value], lambda node: node.inputs if node.op_type in passed else ())
    return (node for node in nodes if node.op_type not in passed)


class _Classification:
    """Kinds of the nodes of one graph; the first kind that a node gets stays."""

    def __init__(self, model: ir.Model) -> None:
        cutter = Cutter(model)
        self._nodes = [node for node in model.graph if not cutter.is_constant(node)]
        self._computing = frozenset(self._nodes)
        self._kinds: dict[ir.Node, ValueKind] = {}

    def run(self) -> dict[ir.Node, ValueKind]:
        for node in self._nodes:
            if node.op_type in _NORMALIZATIONS:
                self._kinds[node] = "normalization"
            elif node.op_type == "Sqrt":
                self._mark_written_normalization(node)
            elif node.op_type in ("Sin", "Cos"):
                self._mark_before(node.outputs[0], "position")
        for node in self._nodes:
            if node.op_type == "Softmax" and (contexts := list(self._iterate_contexts(node))):
                for context in contexts:
                    self._mark_before(context.outputs[0], "attention", of_products="projection")
                    self._mark_moved(context)
        for node in self._nodes:
            if node.op_type == "Add" and node not in self._kinds and len(self._computed_inputs(node)) == 2:
                self._kinds[node] = "residual"
                for value in node.inputs:
                    self._mark_added(value)
        for node in self._nodes:
            if node not in self._kinds:
                self._kinds[node] = self._remaining_kind(node)
        return self._kinds

    def _computed_inputs(self, node: ir.Node) -> list[ir.Value]:
        """Float inputs of a node that depend on inputs of the graph."""
        return [
            value
            for value in node.inputs
            if value is not None
            and value.dtype in (ir.DataType.FLOAT, None)
            and constant_tensor(value) is None
            and (value.producer() is None or value.producer() in self._computing)
        ]

    def has_weight(self, node: ir.Node) -> bool:
        """Return True for a product of a computed value and a constant."""
        return node.op_type in _PRODUCTS and len(self._computed_inputs(node)) == 1

    def _biased_product(self, node: ir.Node) -> ir.Node | None:
        """Return the product of a weight: the node, or the product before a constant bias; ``None`` otherwise."""
        if self.has_weight(node):
            return node
        computed = self._computed_inputs(node)
        maker = computed[0].producer() if node.op_type == "Add" and len(computed) == 1 else None
        return maker if maker is not None and self.has_weight(maker) else None

    def _mark_before(self, value: ir.Value, kind: ValueKind, of_products: ValueKind | None = None) -> None:
        """Mark the nodes that a value is computed by, up to marked nodes and products with weights.

        Args:
            value: The value.
            kind: Kind of the nodes.
            of_products: Kind of the products with weights and of their biases; ``None``: they are marked as the others,
                and the nodes before them too.
        """
        waiting = [value]
        while waiting:
            node = waiting.pop().producer()
            if node is None or node in self._kinds or node not in self._computing:
                continue
            product = self._biased_product(node) if of_products is not None else None
            if product is not None and of_products is not None:
                self._kinds[node] = self._kinds[product] = of_products
                continue
            self._kinds[node] = kind
            waiting += self._computed_inputs(node)

    def _mark_added(self, value: ir.Value | None) -> None:
        """Mark the product, its bias, table lookup and moves that make an operand of a residual sum."""
        while value is not None and (node := value.producer()) is not None:
            is_scaled = node.op_type in ("Add", "Mul") and len(self._computed_inputs(node)) == 1
            has_weight = self.has_weight(node)
            is_carried = has_weight or is_scaled or node.op_type in _MOVING or node.op_type == "Gather"
            if node in self._kinds or node not in self._computing or not is_carried:
                return
            self._kinds[node] = "residual"
            value = None if has_weight else next(iter(self._computed_inputs(node)), None)

    def _mark_moved(self, node: ir.Node) -> None:
        """Mark the nodes that only move the context of an attention."""
        waiting = [node.outputs[0]]
        while waiting:
            for reader, _ in waiting.pop().uses():
                if reader.op_type in _MOVING and reader not in self._kinds and reader in self._computing:
                    self._kinds[reader] = "attention"
                    waiting += reader.outputs

    def _iterate_contexts(self, softmax: ir.Node) -> Iterator[ir.Node]:
        """Yield the products of the result of a softmax and another computed value."""
        waiting, visited = [softmax.outputs[0]], set()
        while waiting:
            for reader, _ in waiting.pop().uses():
                if reader in visited:
                    continue
                visited.add(reader)
                if reader.op_type == "MatMul" and len(self._computed_inputs(reader)) == 2:
                    yield reader
                elif reader.op_type in _MOVING or reader.op_type in ("Mul", "Where", "Cast"):
                    waiting += reader.outputs

    def _mark_written_normalization(self, root: ir.Node) -> None:
        """Mark a normalization of single operators: the mean of squares before a Sqrt, and the division behind it.

        for: RMS normalizations below opset 23
        """
        before, node = [root], root
        while node.op_type != "ReduceMean":
            computed = self._computed_inputs(node)
            maker = computed[0].producer() if len(computed) == 1 else None
            if maker is None or maker.op_type not in ("Add", "Clip", "Max", "ReduceMean"):
                return
            before.append(node := maker)
        squared = self._computed_inputs(node)[0].producer()
        if squared is not None and squared.op_type in ("Pow", "Mul"):
            before.append(squared)
        waiting = [root]
        while waiting:
            node = waiting.pop()
            for reader, _ in node.outputs[0].uses():
                is_scale = reader.op_type in ("Mul", "Add") and len(self._computed_inputs(reader)) == 1
                if is_scale or reader.op_type in ("Div", "Reciprocal") or (
                    reader.op_type == "Mul" and node.op_type in ("Div", "Reciprocal")
                ):  # fmt: skip
                    before.append(reader)
                    waiting.append(reader)
        for node in before:
            self._kinds.setdefault(node, "normalization")

    def _remaining_kind(self, node: ir.Node) -> ValueKind:
        """Return the kind of a node that belongs to no attention, normalization or sum; its inputs have kinds."""
        if node.op_type in _FUNCTIONS:
            return "function"
        if node.op_type in ("Conv", "ConvTranspose"):
            return "convolution"
        if (product := self._biased_product(node)) is not None:
            return "convolution" if product.op_type.startswith("Conv") else "intermediate"
        makers = [value.producer() for value in self._computed_inputs(node)]
        kinds = [self._kinds[maker] for maker in makers if maker is not None]
        if node.op_type in _FOLLOWING or node.op_type in _MOVING:
            return kinds[0] if kinds else "other"
        return "function" if node.op_type in ("Mul", "Add", "Div") and "function" in kinds else "other"
