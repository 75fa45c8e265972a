"""Engine for nodes in float16, or with weights stored in 16-bit floating point.

Nodes are converted to float16 by :mod:`winml.modelkit.ort.half_precision`. For bfloat16, for which ONNX Runtime's CPU
provider has few kernels, only weights are stored in it. Before / After::

    weight32 → MatMul                       weightb16 → Cast → weight32 → MatMul

Inputs and outputs of the graph are unchanged.
"""

from __future__ import annotations

import onnx_ir as ir

from winml.modelkit.onnx.fresh_names import FreshNames, cast_node
from winml.modelkit.onnx.weights import add_initializer
from winml.modelkit.ort.half_precision import SMALL_BYTES, NarrowTensor, convert_to_half, has_fixed_type
from winml.modelkit.quantize.engines.integer_weights import WeightUse
from winml.modelkit.quantize.planning import EngineTask

_FLOAT, _BRAIN = ir.DataType.FLOAT, ir.DataType.BFLOAT16


def clipped_values(model: ir.Model) -> int:
    """Number of weight values of a written model beyond the range of float16."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.clipped for tensor in tensors if isinstance(tensor, NarrowTensor))


def convert_floats(model: ir.Model, task: EngineTask) -> ir.Model:
    """Return a copy of the model with the selected nodes in 16-bit floating point."""
    converted = model.clone()
    if ir.DataType[task.precision.float_type] == _BRAIN:
        _store_weights_as_bfloat16(converted.graph, task.nodes)
    else:
        convert_to_half(converted, task.nodes, refuse_nan=lambda value, reader: WeightUse.of(value, reader).refuse_nan)
    return converted


def _store_weights_as_bfloat16(graph: ir.Graph, names: frozenset[str]) -> None:
    """Store weights read only by selected nodes in bfloat16, each with a Cast, in place."""
    first_node, fresh = next(iter(graph), None), FreshNames.of_graph(graph)
    for value in list(graph.initializers.values()):
        tensor, readers = value.const_value, [node for node, _ in value.uses()]
        if tensor is None or tensor.dtype != _FLOAT or tensor.nbytes < SMALL_BYTES or has_fixed_type(value):
            continue
        if first_node is None or not readers or any(node.name not in names for node in readers):
            continue
        refuse_nan = WeightUse.of(value, readers[0]).refuse_nan
        narrow = add_initializer(graph, NarrowTensor(tensor, _BRAIN, fresh.take(f"{value.name}_bf16"), refuse_nan))
        cast = cast_node(narrow, _FLOAT, readers[0], fresh)
        graph.insert_before(first_node, cast)
        ir.convenience.replace_all_uses_with(value, cast.outputs[0])
        graph.initializers.pop(value.name or "")
