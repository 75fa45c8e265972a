"""Quantized weights in a file, and the number of parameters of the floating-point model they represent.

A 4-bit weight may be stored as bytes that hold two values, beside scales and zero points that are no parameters of the
model. The inputs of the operators are specified: https://onnx.ai/onnx/operators and
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx

from winml.modelkit.onnx.contents import Contents, PlacedNode, Weight

FLOATS = ("float", "bfloat", "complex")
"""Prefixes of the names of floating-point types."""


@dataclass(frozen=True)
class _Inputs:
    """Roles of an operator's inputs, by position."""

    weights: tuple[int, ...] = ()
    scales: tuple[int, ...] = ()
    """Scales and zero points, tables of values, permutations of rows."""


_ACTIVATION_AND_WEIGHT = _Inputs((3,), (1, 2, 4, 5, 6, 7))
_PACKED = _Inputs((1,), (2, 3, 4))
_ONNX: Mapping[str, _Inputs] = {
    "DequantizeLinear": _Inputs((0,), (1, 2)),
    "QuantizeLinear": _Inputs((), (1, 2)),
    "MatMulInteger": _Inputs((1,), (2, 3)),
    "ConvInteger": _Inputs((1,), (2, 3)),
    "QLinearMatMul": _ACTIVATION_AND_WEIGHT,
    "QLinearConv": _ACTIVATION_AND_WEIGHT,
}
_MICROSOFT: Mapping[str, _Inputs] = {
    **_ONNX,
    "DynamicQuantizeMatMul": _Inputs((1,), (2, 3)),
    "GatherBlockQuantized": _Inputs((0,), (2, 3)),
    "MatMulBnb4": _PACKED,
    "MatMulIntegerToFloat": _Inputs((1,), (2, 3, 4, 5)),
    "MatMulNBits": _PACKED,
    "QAttention": _Inputs((1,), (3, 4, 6, 7)),
    "QGemm": _Inputs((3,), (1, 2, 4, 5, 7, 8)),
    "QMoE": _Inputs((2, 5, 8), (3, 6, 9, 11, 12, 13)),
}
_SCALES_OF_BLOCKS = 2
"""Position of the scales among the inputs of ``GatherBlockQuantized`` and ``MatMulNBits``."""
_INPUTS: Mapping[str, Mapping[str, _Inputs]] = {"": _ONNX, "com.microsoft": _MICROSOFT}


def count_parameters(contents: Contents) -> None:
    """Set number and type of the represented parameters on every weight, in place."""
    range_makers = {
        node.proto.output[1] for node in contents.nodes if node.proto.op_type == "DynamicQuantizeLinear"
    }  # the scales of activations, which are multiplied with the scales of weights
    reshaped = {
        node.proto.output[0]: index
        for node in contents.nodes
        for position, index in node.weight_inputs
        if node.proto.op_type == "Reshape" and position == 0
    }  # a table and a product may share packed values, in two shapes
    first_packed: dict[int, int] = {}  # scales → the weight of the first block operator that reads them
    for node in contents.nodes:
        inputs = _INPUTS.get(node.proto.domain, {}).get(node.proto.op_type, _Inputs())
        for position, name in enumerate(node.proto.input):
            if position in inputs.weights and name in reshaped:
                contents.weights[reshaped[name]] = _describe_weight(contents.weights[reshaped[name]], node.proto)
        for position, index in node.weight_inputs:
            weight = contents.weights[index]
            if position in inputs.scales or _is_scale(node, range_makers):
                contents.weights[index] = replace(weight, parameters=0)
            elif position in inputs.weights:
                weight = _describe_weight(weight, node.proto)
                scales = dict(node.weight_inputs).get(_SCALES_OF_BLOCKS) if _is_block_operator(node) else None
                first_index = index if scales is None else first_packed.setdefault(scales, index)
                is_copy = first_index != index and weight.size_bytes == contents.weights[first_index].size_bytes
                contents.weights[index] = replace(weight, parameters=0) if is_copy else weight


def _is_block_operator(node: PlacedNode) -> bool:
    """Return True if a node reads a weight with scales of blocks.

    A table that is also a product's weight, in another shape, is stored twice if an execution provider requires
    constants: one weight of the model, recognized by the shared scales.
    """
    return node.proto.domain == "com.microsoft" and node.proto.op_type in ("GatherBlockQuantized", "MatMulNBits")


def _is_scale(node: PlacedNode, range_makers: set[str]) -> bool:
    """Return True if a node multiplies the scale of an activation with the scale of a weight."""
    return node.proto.op_type == "Mul" and any(name in range_makers for name in node.proto.input)


def _describe_weight(weight: Weight, node: onnx.NodeProto) -> Weight:
    """Return the weight of a quantized operator, with type and number of its packed values."""
    if weight.dtype.startswith(FLOATS):
        return weight
    numbers = {attribute.name: attribute.i for attribute in node.attribute}
    if node.op_type in ("MatMulNBits", "MatMulBnb4"):
        bits = numbers.get("bits", 4)
        kind = f"uint{bits}" if node.op_type == "MatMulNBits" else "fp4 or nf4"
        return replace(weight, kind=kind, parameters=numbers.get("K", 0) * numbers.get("N", 0))
    bits = numbers.get("expert_weight_bits" if node.op_type == "QMoE" else "bits", 4)
    if node.op_type in ("GatherBlockQuantized", "QMoE") and weight.dtype == "uint8" and bits < 8:
        return replace(weight, kind=f"uint{bits}", parameters=weight.elements * (8 // bits))
    return replace(weight, kind=weight.dtype, parameters=weight.elements)
