"""Rewrites a graph that computes in bfloat16 to compute in float32, with the same weights.

ONNX Runtime's CPU provider has few bfloat16 kernels, so such a file cannot be run there as it is.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from winml.modelkit.graph.fresh_names import FreshNames
from winml.modelkit.hierarchy.tagging import all_nodes

__all__ = ["computes_in_bfloat16", "widen_bfloat16"]

_FLOAT, _BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16
_DTYPE_ATTRIBUTES = ("dtype", "output_dtype", "stash_type", "to")
"""Specified by ONNX: attributes whose integer is an element type."""


def computes_in_bfloat16(model: ir.Model) -> bool:
    """Say whether a value of the graph other than a stored weight is bfloat16."""
    return any(
        value.dtype == _BFLOAT16
        for graph in model.graphs()
        for value in (*graph.inputs, *(output for node in graph for output in node.outputs if not _is_weight(output)))
    )


def _is_weight(value: ir.Value) -> bool:
    """Say whether a value is a stored tensor, or one that is cast right away."""
    node = value.producer()
    return node is not None and node.op_type == "Constant"


def widen_bfloat16(model: ir.Model) -> None:
    """Compute in float32 where a graph computes in bfloat16, in place.

    Weights are not read: a stored bfloat16 tensor remains where it is, and is cast where the graph begins::

        weight (bfloat16) → MatMul        weight (bfloat16) → Cast (float32) → MatMul

    Inputs and outputs become float32 as well.
    """
    fresh = FreshNames.of_graph(model.graph)
    for graph in model.graphs():
        for value in [value for value in graph.initializers.values() if value.dtype == _BFLOAT16]:
            _cast_initializer(graph, value, fresh)
    stored = {value for graph in model.graphs() for value in graph.initializers.values()}
    for node in all_nodes(model):
        _widen_attributes(node)
        for value in node.outputs:
            _widen_value(value)
    for graph in model.graphs():
        for value in (*graph.inputs, *graph.outputs):
            if value not in stored:
                _widen_value(value)


def _cast_initializer(graph: ir.Graph, value: ir.Value, fresh: FreshNames) -> None:
    name = str(value.name)
    graph.initializers.pop(name)
    cast = ir.node("Cast", [value], {"to": int(_FLOAT)}, name=fresh.take(f"{name}_to_float32"))
    (widened,) = cast.outputs
    value.replace_all_uses_with(widened, replace_graph_outputs=True)
    cast.replace_input_with(0, value)
    value.name, widened.name = fresh.take(f"{name}_bfloat16"), name
    widened.dtype, widened.shape = _FLOAT, value.shape
    graph.initializers[str(value.name)] = value
    nodes = iter(graph)
    first = next(nodes, None)
    if first is None:
        graph.append(cast)
    else:
        graph.insert_before(first, cast)


def _widen_attributes(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if name in _DTYPE_ATTRIBUTES and attribute.type == ir.AttributeType.INT and attribute.value == _BFLOAT16:
            node.attributes[name] = ir.AttrInt64(name, int(_FLOAT))
        elif attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype == _BFLOAT16:
            values = attribute.value.numpy().astype(ml_dtypes.bfloat16).astype(np.float32)
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(values, name=attribute.value.name))


def _widen_value(value: ir.Value) -> None:
    if value.dtype == _BFLOAT16:
        value.dtype = _FLOAT
