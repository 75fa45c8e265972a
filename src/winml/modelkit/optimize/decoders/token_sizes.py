"""Learns that values have the sizes of the tokens, where shape inference lost sight of it.

Exporters split and join heads by shapes that are computed when the graph runs. Once an attention is one operator, what
is after it has known sizes again.
"""

from __future__ import annotations

import onnx_ir as ir

from winml.modelkit.optimize.graph_matching import rank_of, same_shape

__all__ = ["spread_sizes"]

_OF_BOTH = ("Add", "Sub", "Mul", "Div")
_OF_FIRST = (
    "Sigmoid", "Tanh", "Gelu", "Relu", "Neg", "Cast", "Identity", "LayerNormalization",
    "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "RotaryEmbedding",
)  # fmt: skip
"""Specified: operators whose first output has the shape of their first input."""


def spread_sizes(graph: ir.Graph) -> None:
    """Give values the shape that follows from those before them, in place; others keep what they have."""
    for node in graph:
        shape = _shape_of(node)
        output = node.outputs[0]
        if shape is not None and rank_of(output) in (None, len(shape)):
            output.shape = ir.Shape(shape)


def _shape_of(node: ir.Node) -> list[int | ir.SymbolicDim] | None:
    first = node.inputs[0] if node.inputs else None
    if first is None or first.shape is None:
        return None
    if node.op_type in _OF_FIRST:
        return list(first.shape)
    second = node.inputs[1] if len(node.inputs) > 1 else None
    if second is None or second.shape is None:
        return None
    if node.op_type in _OF_BOTH:
        if same_shape(first, second) or _is_of_last_axis(second, first):
            return list(first.shape)
        return list(second.shape) if _is_of_last_axis(first, second) else None
    is_product = node.op_type == "MatMul" and second.const_value is not None and rank_of(second) == 2
    return [*first.shape[:-1], second.shape[1]] if is_product and rank_of(first) == 3 else None


def _is_of_last_axis(value: ir.Value, other: ir.Value) -> bool:
    """Say whether a value is one number, or one for each element of the last axis of another."""
    assert value.shape is not None
    assert other.shape is not None
    sizes = list(value.shape)
    if len(sizes) > 1 or len(other.shape) == 0:
        return False
    return not sizes or sizes == [1] or sizes == [other.shape[-1]]
