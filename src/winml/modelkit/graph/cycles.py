"""Finds nodes that need their own result: a cycle in a graph, in a graph inside it, or among functions.

Reads the structure as stored in the file, since a reader that follows the values of such a graph never ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import onnx

from winml.modelkit.metadata_keys import MODULE_KEY

__all__ = ["cycle_words", "find_loop"]

SHOWN = 4
"""Nodes of a cycle that are named. Chosen: enough to find it."""

_Item = TypeVar("_Item", bound=Hashable)


def cycle_words(model: onnx.ModelProto) -> str | None:
    """Return a phrase that names the nodes of a cycle, and their modules where the file says them; None without one."""
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        loop, _ = _loop_and_free_names(nodes)
        if loop:
            return f"nodes need their own result: {_shown([_node_words(node) for node in loop])}"
    functions = {(function.domain, function.name): function for function in model.functions}

    def called(key: tuple[str, str]) -> Iterator[tuple[str, str]]:
        return (call for call in _calls(functions[key].node) if call in functions)

    if calls := find_loop(functions, called):
        return f"functions call themselves: {_shown(['::'.join(key) for key in calls])}"
    return None


def find_loop(items: Iterable[_Item], needed: Callable[[_Item], Iterator[_Item]]) -> list[_Item]:
    """Return items each of which needs the next, and the last the first; empty where there are none.

    Iterative, since graphs are deeper than Python's stack.
    """
    done: set[_Item] = set()
    for item in items:
        if item in done:
            continue
        path = {item: needed(item)}
        while path:
            last = next(reversed(path))
            following = next((other for other in path[last] if other not in done), None)
            if following is None:
                done.add(last)
                del path[last]
            elif following in path:
                members = list(path)
                return members[members.index(following) :]
            else:
                path[following] = needed(following)
    return []


def _loop_and_free_names(nodes: Sequence[onnx.NodeProto]) -> tuple[list[onnx.NodeProto], set[str]]:
    """Return the nodes of a cycle, if there is one, and the names that are read and made outside."""
    makers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    reads: list[set[str]] = []
    for node in nodes:
        names = {name for name in node.input if name}
        for graph in _graphs_in(node):
            loop, free = _loop_and_free_names(graph.node)
            if loop:
                return loop, set()
            own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
            made = {name for inner in graph.node for name in inner.output}
            # A subgraph may return a value of the graph around it.
            names |= (free | ({value.name for value in graph.output} - made)) - own
        reads.append(names)
    indices = find_loop(range(len(nodes)), lambda index: (makers[name] for name in reads[index] if name in makers))
    return [nodes[index] for index in indices], set().union(*reads) - makers.keys()


def _graphs_in(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _calls(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        yield node.domain, node.op_type
        for graph in _graphs_in(node):
            yield from _calls(graph.node)


def _node_words(node: onnx.NodeProto) -> str:
    module = next((entry.value for entry in node.metadata_props if entry.key == MODULE_KEY), None)
    place = "" if module is None else f", in module {module or '(the root)'}"
    return f"{node.name or 'a node without a name'} ({node.op_type}{place})"


def _shown(names: Sequence[str]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
