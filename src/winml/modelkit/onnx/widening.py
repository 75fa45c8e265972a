"""Conversion of a graph that computes in float16 or bfloat16 to float32, with the same weights.

ONNX Runtime's CPU provider has few bfloat16 kernels, so such a file cannot be run there unchanged.
"""

from __future__ import annotations

import copy

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.fresh_names import FreshNames, cast_node
from winml.modelkit.onnx.operators import is_operator
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

    Weights, inputs and outputs become float32 as well. A value that is cast to the 16-bit dtype and from it to another
    one is still rounded.
    """
    if not computes_in(model, dtype):
        return False
    rounding = _separate_rounding_casts(model, dtype)
    for node in all_nodes(model):
        if node in rounding:
            continue
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


_EXACT_IN_16_BITS = frozenset({ir.DataType.BOOL, ir.DataType.INT8, ir.DataType.UINT8})
"""Types whose values float16 and bfloat16 hold without rounding."""


def _separate_rounding_casts(model: ir.Model, dtype: ir.DataType) -> set[ir.Node]:
    """Return the casts to a dtype that round a value for further casts, after separation from other readers, in place.

    Before / After, if other nodes read the rounded value too::

        x → Cast(dtype) → y → Cast → Relu          x → Cast(dtype) → y_as_… → Cast → Relu
                          y → Mul                  x → Cast(dtype) → y → Mul
    """
    fresh, rounding = FreshNames.of_graph(model.graph), set[ir.Node]()
    for node in list(all_nodes(model)):
        source, graph = node.inputs[0] if node.inputs else None, node.graph
        if _cast_type(node) != dtype or source is None or graph is None:
            continue
        if source.dtype == dtype or source.dtype in _EXACT_IN_16_BITS:
            continue
        uses = list(node.outputs[0].uses())
        casts = [(user, position) for user, position in uses if _cast_type(user) not in (None, dtype)]
        if casts and len(casts) == len(uses) and not node.outputs[0].is_graph_output():
            rounding.add(node)
        elif casts:
            separate = cast_node(source, dtype, node, fresh)
            graph.insert_after(node, separate)
            for user, position in casts:
                user.replace_input_with(position, separate.outputs[0])
            rounding.add(separate)
    return rounding


def _cast_type(node: ir.Node) -> ir.DataType | None:
    """Return the type that a Cast converts to; `None` for other operators."""
    return ir.DataType(node.attributes.get_int("to", 0)) if is_operator(node, "Cast") else None


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
