"""Creates unused names for new values and nodes of a graph, subgraphs included, and Cast nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx
import onnx_ir as ir


class FreshNames:
    """The names of one graph, and those given since."""

    def __init__(self, taken: Iterable[str | None]) -> None:
        """Hold the names that are taken."""
        self._taken = set(taken)

    @classmethod
    def of_graph(cls, graph: ir.Graph) -> FreshNames:
        """Return the names of the values and nodes of a graph and of its subgraphs."""
        return cls(_names_of(graph))

    @classmethod
    def of_proto(cls, graph: onnx.GraphProto) -> FreshNames:
        """Return the names of the values and nodes of a serialized graph and of its subgraphs."""
        return cls(_names_in(graph))

    def take(self, wish: str) -> str:
        """Return a name that nothing bears, and keep it taken: the wish, or the wish with a number from 2 on."""
        name, number = wish, 1
        while name in self._taken:
            number += 1
            name = f"{wish}_{number}"
        self._taken.add(name)
        return name


def cast_node(
    value: ir.Value, dtype: ir.DataType, owner: ir.Node, fresh: FreshNames, name: str | None = None
) -> ir.Node:
    """Return a Cast of a value, in no graph yet, that belongs to the module of a node.

    Args:
        value: What is cast.
        dtype: The type of the result.
        owner: Whose metadata the Cast bears.
        fresh: Names of the graph; those of the Cast are taken.
        name: Name of the result; None: a fresh one.
    """
    output = name or fresh.take(f"{value.name}_as_{dtype.name.lower()}")
    cast = ir.node("Cast", [value], {"to": int(dtype)}, name=fresh.take(f"{output}/Cast"))
    cast.outputs[0].name = output
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), value.shape
    cast.metadata_props.update(owner.metadata_props)
    return cast


def _names_of(graph: ir.Graph) -> Iterator[str | None]:
    for part in (graph, *graph.subgraphs()):
        yield from part.initializers
        yield from (value.name for value in part.inputs)
        for node in part:
            yield node.name
            yield from (value.name for value in node.outputs)


def _names_in(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (item.name for item in (*graph.initializer, *graph.input))
    yield from (item.values.name for item in graph.sparse_initializer)
    for node in graph.node:
        yield node.name
        yield from node.output
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from _names_in(inner)
