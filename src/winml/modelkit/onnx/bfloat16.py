"""Conversion of a graph that computes in bfloat16 to float32, with the same weights.

ONNX Runtime's CPU provider has few bfloat16 kernels, so such a file cannot be run there unchanged.
"""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.weights import computed_tensor, read_once
from winml.modelkit.tags.tagging import all_nodes

_FLOAT, _BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16
_DTYPE_ATTRIBUTES = ("dtype", "output_dtype", "stash_type", "to")
"""Specified by ONNX: attributes whose integer is an element type."""


def computes_in_bfloat16(model: ir.Model) -> bool:
    """Return True if an input or the result of a node is bfloat16, stored constants not included."""
    inputs = (value for graph in model.graphs() for value in graph.inputs)
    results = (value for node in all_nodes(model) if node.op_type != "Constant" for value in node.outputs)
    return any(value.dtype == _BFLOAT16 for values in (inputs, results) for value in values)


def widen_bfloat16(model: ir.Model) -> bool:
    """Convert a graph that computes in bfloat16 to float32, in place; return True if it was converted.

    Weights, inputs and outputs become float32 as well. The values of a weight are read and cast on each access, and not
    held.
    """
    if not computes_in_bfloat16(model):
        return False
    for node in all_nodes(model):
        for name, attribute in list(node.attributes.items()):
            if name in _DTYPE_ATTRIBUTES and attribute.type == ir.AttributeType.INT and attribute.value == _BFLOAT16:
                node.attributes[name] = ir.AttrInt64(name, int(_FLOAT))
            elif attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype == _BFLOAT16:
                node.attributes[name] = ir.AttrTensor(
                    name, ir.tensor(_widen_tensor(attribute.value), name=attribute.value.name)
                )
        for value in node.outputs:
            _widen_value(value)
    for graph in model.graphs():
        for value in (*graph.initializers.values(), *graph.inputs, *graph.outputs):
            _widen_value(value)
    return True


def _widen_value(value: ir.Value) -> None:
    tensor = value.const_value
    if tensor is not None and tensor.dtype == _BFLOAT16:
        value.const_value = computed_tensor(
            partial(_widen_tensor, tensor), _FLOAT, tensor.shape.numpy(), value.name or ""
        )
    if value.dtype == _BFLOAT16:
        value.dtype = _FLOAT


def _widen_tensor(tensor: ir.TensorProtocol) -> Array:
    return read_once(tensor).astype(ml_dtypes.bfloat16, copy=False).astype(np.float32)
