"""Puts the nodes of a graph in an order that depends on the graph alone.

Engines write nodes in different orders. Without one order, equal graphs would be different files, and a second run
could not be compared with the first.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from winml.modelkit.errors import OptimizeError

__all__ = ["order_nodes"]


def order_nodes(model: ir.Model) -> None:
    """Put the nodes of the main graph in the order in which its outputs need them, in place.

    Depth first from the first output, so that related nodes are adjacent. Unused nodes come last.

    Raises:
        OptimizeError: nodes need their own result, so no order is right.
    """
    graph = model.graph
    placed: dict[ir.Node, None] = {}
    for value in graph.outputs:
        _append_with_producers(value.producer(), graph, placed)
    for node in graph:
        _append_with_producers(node, graph, placed)
    nodes = list(placed)
    if nodes != list(graph):
        graph.remove(nodes)
        graph.extend(nodes)


def _append_with_producers(target: ir.Node | None, graph: ir.Graph, placed: dict[ir.Node, None]) -> None:
    """Append a node after the nodes it reads from; iterative, since graphs are deeper than Python's stack."""
    if target is None or target in placed:
        return
    stack = [(target, _producers_read_by(target, graph))]
    waiting = {target}
    while stack:
        node, producers = stack[-1]
        following = next((producer for producer in producers if producer not in placed), None)
        if following is not None:
            if following in waiting:
                raise OptimizeError(
                    f"node {following.name} ({following.op_type}) needs its own result",
                    hint="Leave out an optimization.",
                )
            waiting.add(following)
            stack.append((following, _producers_read_by(following, graph)))
        else:
            stack.pop()
            placed[node] = None


def _producers_read_by(node: ir.Node, graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the nodes of ``graph`` whose values a node reads, its subgraphs included."""
    for value in _read_values(node):
        producer = value.producer() if value is not None else None
        if producer is not None and producer.graph is graph:
            yield producer


def _read_values(node: ir.Node) -> Iterator[ir.Value | None]:
    yield from node.inputs
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH and not attribute.is_ref():
            yield from _values_in(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS and not attribute.is_ref():
            for inner in attribute.as_graphs():
                yield from _values_in(inner)


def _values_in(graph: ir.Graph) -> Iterator[ir.Value | None]:
    # A subgraph may return a value of the outer graph.
    yield from graph.outputs
    for node in graph:
        yield from _read_values(node)
