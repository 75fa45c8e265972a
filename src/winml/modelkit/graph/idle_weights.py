"""Which weights of a graph decide nothing but sizes?

A graph may compute values only to ask for their sizes. Whatever these values are made of is in the file for nothing.
"""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["idle_weight_bytes"]

_ASKS_SIZES = frozenset({"Shape", "Size"})


def idle_weight_bytes(model: ir.Model) -> int:
    """Return the size of the weights whose values reach no output of the graph, other than as sizes."""
    read: set[str] = set()
    seen: set[ir.Node] = set()
    waiting = list(model.graph.outputs)
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if node is None:
            read.add(value.name or "")
        elif node not in seen and node.op_type not in _ASKS_SIZES:
            seen.add(node)
            waiting += [item for item in node.inputs if item is not None]
            waiting += _captured(node)
    tensors = (value.const_value for name, value in model.graph.initializers.items() if name not in read)
    # Shapes and axes are small numbers beside them.
    return sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.dtype.is_floating_point())


def _captured(node: ir.Node) -> list[ir.Value]:
    """Return what the branches of a node read, all of which may be answered."""
    graphs = [
        attribute.as_graph() for attribute in node.attributes.values() if attribute.type == ir.AttributeType.GRAPH
    ]
    return [value for graph in graphs for inner in graph.all_nodes() for value in inner.inputs if value is not None]
