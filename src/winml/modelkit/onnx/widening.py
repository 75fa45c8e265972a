"""Conversion of a graph that computes in float16 or bfloat16 to float32, with the same weights.

ONNX Runtime's CPU provider has few bfloat16 kernels, so such a file cannot be run there unchanged.
"""

from __future__ import annotations

import copy

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.weights import read_once
from winml.modelkit.tags.tagging import all_nodes

_FLOAT = ir.DataType.FLOAT
DTYPE_ATTRIBUTES = ("dtype", "output_dtype", "stash_type", "to")
"""Specified by ONNX: attributes whose integer is an element type."""


class WidenedTensor(ir.LazyTensor):
    """A tensor of a 16-bit dtype in float32; the values are read and cast on each access, and not held."""

    def __init__(self, original: ir.TensorProtocol, name: str) -> None:
        """Store the reference to the tensor."""
        super().__init__(self._read, _FLOAT, ir.Shape(original.shape.numpy(), frozen=True), name=name)
        self.original = original

    def _read(self) -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(_widen_values(self.original)), dtype=_FLOAT, name=self.name)


def computes_in(model: ir.Model, dtype: ir.DataType) -> bool:
    """Return True if an input or the result of a node has a dtype, stored constants not included."""
    inputs = (value for graph in model.graphs() for value in graph.inputs)
    results = (value for node in all_nodes(model) if node.op_type != "Constant" for value in node.outputs)
    return any(value.dtype == dtype for values in (inputs, results) for value in values)


def widen_floats(model: ir.Model, dtype: ir.DataType) -> bool:
    """Convert a graph that computes in a 16-bit dtype to float32, in place; return True if it was converted.

    Weights, inputs and outputs become float32 as well.
    """
    if not computes_in(model, dtype):
        return False
    for node in all_nodes(model):
        for name, attribute in list(node.attributes.items()):
            if name in DTYPE_ATTRIBUTES and attribute.type == ir.AttributeType.INT and attribute.value == dtype:
                node.attributes[name] = ir.AttrInt64(name, int(_FLOAT))
            elif attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype == dtype:
                widened = ir.tensor(_widen_values(attribute.value), name=attribute.value.name)
                node.attributes[name] = ir.AttrTensor(name, widened)
        for value in node.outputs:
            _widen_value(value, dtype)
    for graph in model.graphs():
        for value in (*graph.initializers.values(), *graph.inputs, *graph.outputs):
            _widen_value(value, dtype)
    return True


def _widen_value(value: ir.Value, dtype: ir.DataType) -> None:
    tensor = value.const_value
    if tensor is not None and tensor.dtype == dtype:
        value.const_value = WidenedTensor(tensor, value.name or "")
    if value.dtype == dtype:
        # A clone shares the type with its original.
        value.type = copy.copy(value.type)
        value.dtype = _FLOAT


def _widen_values(tensor: ir.TensorProtocol) -> Array:
    return read_once(tensor).astype(tensor.dtype.numpy(), copy=False).astype(np.float32)
