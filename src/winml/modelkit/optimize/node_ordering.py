"""In what order do nodes stand in a file? In one that follows from the graph alone.

Engines write nodes in orders of their own, so that one graph would come out as many files, and nobody could say whether
a second round changed anything.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

__all__ = ["order_nodes"]


def order_nodes(model: ir.Model) -> None:
    """Put the nodes of the main graph in the order in which its outputs need them, in place.

    Depth first from the first output on, so that what belongs together stands together. Nodes nobody needs come last.
    """
    graph = model.graph
    placed: dict[ir.Node, None] = {}
    for value in graph.outputs:
        _place(value.producer(), graph, placed)
    for node in graph:
        _place(node, graph, placed)
    nodes = list(placed)
    if nodes != list(graph):
        graph.remove(nodes)
        graph.extend(nodes)


def _place(last: ir.Node | None, graph: ir.Graph, placed: dict[ir.Node, None]) -> None:
    """Add a node behind those it needs; without recursion, since graphs are deeper than Python's stack."""
    if last is None or last in placed:
        return
    waiting = [(last, _needs(last, graph))]
    while waiting:
        node, needs = waiting[-1]
        following = next((need for need in needs if need not in placed), None)
        if following is not None:
            waiting.append((following, _needs(following, graph)))
        else:
            waiting.pop()
            placed[node] = None


def _needs(node: ir.Node, graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the nodes of the graph whose values a node reads, its subgraphs included."""
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
    # A subgraph may hand out what the outer graph made.
    yield from graph.outputs
    for node in graph:
        yield from _read_values(node)
