"""Goes through the nodes of a model in the form in which onnx reads it, subgraphs and functions included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

__all__ = ["nested_nodes", "proto_nodes"]


def proto_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield every node of a model."""
    yield from nested_nodes(model.graph.node)
    for function in model.functions:
        yield from nested_nodes(function.node)


def nested_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and those of their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nested_nodes(attribute.g.node)
            for graph in attribute.graphs:
                yield from nested_nodes(graph.node)
