"""Weights of a graph: transposed ones get values of their own, and idle ones decide nothing but sizes."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import onnx_ir as ir

from winml.modelkit.graph.fresh_names import FreshNames
from winml.modelkit.graph.weightless_proto import read_once

__all__ = [
    "give_products_own_weights",
    "idle_weight_bytes",
    "transposed_weight",
]


# --- Gives products transposed weights of their own where they read one that a Transpose makes of a shared table.
#
# Before / After::
#
#     w → Gather,  w → Transpose → MatMul (named)      →      w → Gather,  wᵀ → MatMul
#
# Must not fire when the weight is an input of the graph, has not two dimensions, or the order of its axes is kept.
# Tags: no node is made. A transposed weight is computed when it is read, so the table is not copied before.


_PRODUCTS = ("MatMul", "Gemm")


def transposed_weight(node: ir.Node) -> ir.Value | None:
    """Return the initializer of two dimensions that a product reads transposed on its right; None where it has none."""
    value = node.inputs[1] if node.op_type in _PRODUCTS and not node.domain else None
    maker = value.producer() if value is not None else None
    if maker is None or maker.op_type != "Transpose" or maker.domain:
        return None
    weight = maker.inputs[0]
    if weight is None or not weight.is_initializer() or weight.is_graph_input() or weight.const_value is None:
        return None
    order = maker.attributes.get_ints("perm", (1, 0))
    return weight if len(weight.const_value.shape) == 2 and tuple(order) == (1, 0) else None


def give_products_own_weights(model: ir.Model, names: Container[str | None]) -> None:
    """Let the named products read initializers instead of what a Transpose makes of one, in place.

    Args:
        model: The model.
        names: Names of nodes of the main graph; others stay, and so does a Transpose that others read.
    """
    graph = model.graph
    fresh: FreshNames | None = None
    created: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        weight = transposed_weight(node) if node.name in names else None
        if weight is None:
            continue
        if weight not in created:
            fresh = fresh or FreshNames.of_graph(graph)
            created[weight] = _transposed(weight, fresh.take(f"{weight.name}_transposed"))
            graph.register_initializer(created[weight])
        read = node.inputs[1]
        assert read is not None  # transposed_weight looked at it
        transpose = read.producer()
        node.replace_input_with(1, created[weight])
        if transpose is not None and not read.uses() and not read.is_graph_output():
            graph.remove(transpose, safe=True)
    for weight in created:
        if not weight.uses() and not weight.is_graph_output():
            graph.initializers.pop(weight.name or "")


def _transposed(weight: ir.Value, name: str) -> ir.Value:
    tensor = weight.const_value
    assert tensor is not None  # transposed_weight looked at it
    shape = ir.Shape(list(tensor.shape.numpy())[::-1])

    def compute() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(read_once(tensor).T), dtype=tensor.dtype, name=name)

    lazy = ir.LazyTensor(compute, tensor.dtype, shape, name=name)
    return ir.Value(name=name, const_value=lazy, shape=shape, type=ir.TensorType(tensor.dtype))


# --- Which weights of a graph decide nothing but sizes?
#
# A graph may compute values only to ask for their sizes. Whatever these values are made of is in the file for nothing.


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
