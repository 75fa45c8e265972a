"""Creates unused names for new values and nodes of a graph, subgraphs included, and Cast nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import onnx_ir as ir


class FreshNames:
    """The names in use in one graph, including newly reserved names."""

    def __init__(self, used_names: Iterable[str | None], *, first_number: int = 2) -> None:
        """Hold the names that are taken.

        Args:
            used_names: The names.
            first_number: Number behind the first duplicate of a name.
        """
        self._used_names = set(used_names)
        self._first_number = first_number

    @classmethod
    def of_graph(cls, graph: ir.Graph, *, without: Collection[ir.Node] = ()) -> FreshNames:
        """Collect the names of the values and nodes of a graph and its subgraphs, except the nodes in ``without``."""
        return cls(_names_of(graph, without))

    def take(self, wish: str) -> str:
        """Reserve and return an unused name: the wish, or the wish with a number."""
        name, number = wish, self._first_number
        while name in self._used_names:
            name, number = f"{wish}_{number}", number + 1
        self._used_names.add(name)
        return name


def cast_node(
    value: ir.Value, dtype: ir.DataType, owner: ir.Node, fresh: FreshNames, name: str | None = None
) -> ir.Node:
    """Create a Cast of a value, not yet in a graph, that belongs to the module of a node.

    Args:
        value: The value to cast.
        dtype: The type of the result.
        owner: The node whose metadata is copied.
        fresh: Names of the graph; the new names are reserved.
        name: Name of the result; None: a fresh one.
    """
    output = name or fresh.take(f"{value.name}_as_{dtype.name.lower()}")
    cast = ir.node("Cast", [value], {"to": int(dtype)}, name=fresh.take(f"{output}/Cast"))
    cast.outputs[0].name = output
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), value.shape
    cast.metadata_props.update(owner.metadata_props)
    return cast


def _names_of(graph: ir.Graph, without: Collection[ir.Node]) -> Iterator[str | None]:
    for part in (graph, *graph.subgraphs()):
        yield from part.initializers
        yield from (value.name for value in part.inputs)
        for node in part:
            if node not in without:
                yield node.name
                yield from (value.name for value in node.outputs)
