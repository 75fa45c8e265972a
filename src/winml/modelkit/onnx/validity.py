"""Refusal of graphs that read undefined values, hide values, have cycles or state no opset.

Checks the structure as stored in the file, because libraries add missing parts when they read it. Does not check the
inputs of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypeVar

import onnx

from winml.modelkit.errors import InputError
from winml.modelkit.metadata_keys import MODULE_KEY
from winml.modelkit.onnx.contents import subgraphs

OLDEST_OPSET = 7
"""Specified: the oldest opset that ONNX Runtime supports; operators of older ones broadcast differently."""


MAX_LISTED = 4
"""Nodes of a cycle that are named. Chosen: enough to find it."""

_Item = TypeVar("_Item", bound=Hashable)


def cycle_words(model: onnx.ModelProto) -> str | None:
    """Describe the nodes of a cycle, with their modules if recorded in the file; `None` without a cycle.

    Subgraphs, and functions that call themselves, are included.
    """
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        loop, _ = _find_loop_and_free_names(nodes)
        if loop:
            return f"nodes form a cycle: {_list_briefly([_node_words(node) for node in loop])}"
    functions = {(function.domain, function.name): function for function in model.functions}

    def called(key: tuple[str, str]) -> Iterator[tuple[str, str]]:
        """Yield the functions called by a function."""
        return (call for call in _list_calls(functions[key].node) if call in functions)

    if calls := find_loop(functions, called):
        return f"functions call themselves: {_list_briefly(['::'.join(key) for key in calls])}"
    return None


def find_loop(
    vertices: Iterable[_Item], needed: Callable[[_Item], Iterator[_Item]], finished: dict[_Item, None] | None = None
) -> list[_Item]:
    """Return the vertices of a dependency cycle, each followed by a needed vertex; ``[]`` without a cycle.

    Iterative, since graphs are deeper than Python's stack.

    Args:
        vertices: Items to visit, depth first.
        needed: Item → items that it needs.
        finished: Receives the visited items, each after all items that it needs.
    """
    finished = {} if finished is None else finished
    for vertex in vertices:
        if vertex in finished:
            continue
        path = {vertex: needed(vertex)}
        while path:
            last = next(reversed(path))
            following = next((dependency for dependency in path[last] if dependency not in finished), None)
            if following is None:
                finished[last] = None
                del path[last]
            elif following in path:
                members = list(path)
                return members[members.index(following) :]
            else:
                path[following] = needed(following)
    return []


def _find_loop_and_free_names(nodes: Sequence[onnx.NodeProto]) -> tuple[list[onnx.NodeProto], set[str]]:
    """Return the nodes of a cycle (``[]`` without a cycle), and the names read but produced outside."""
    makers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    reads: list[set[str]] = []
    for node in nodes:
        names = {name for name in node.input if name}
        for graph in subgraphs(node):
            loop, free = _find_loop_and_free_names(graph.node)
            if loop:
                return loop, set()
            inner_names = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
            created = {name for inner in graph.node for name in inner.output}
            # A subgraph may return a value of the graph around it.
            names |= (free | ({value.name for value in graph.output} - created)) - inner_names
        reads.append(names)
    indices = find_loop(range(len(nodes)), lambda index: (makers[name] for name in reads[index] if name in makers))
    return [nodes[index] for index in indices], set().union(*reads) - makers.keys()


def _list_calls(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, str]]:
    """Yield domain and operator of nodes and their inner nodes, any of which may be a call."""
    for node in nodes:
        yield node.domain, node.op_type
        for graph in subgraphs(node):
            yield from _list_calls(graph.node)


def _node_words(node: onnx.NodeProto) -> str:
    """Name a node with its operator and module."""
    module = next((entry.value for entry in node.metadata_props if entry.key == MODULE_KEY), None)
    module_words = "" if module is None else f", in module {module or '(the root)'}"
    return f"{node.name or 'a node without a name'} ({node.op_type}{module_words})"


def _list_briefly(names: Sequence[str]) -> str:
    """List up to ``MAX_LISTED`` names, and the number of further names."""
    rest_words = f", and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{rest_words}"


def refuse_invalid(model: onnx.ModelProto, path: Path) -> None:
    """Refuse a graph that cannot be computed.

    Args:
        model: The structure of the model; values of weights are not read.
        path: The model file, for the message.

    Raises:
        InputError: a node or an output reads an undefined value, a weight of a subgraph has the name of a value around
            it, nodes form a cycle, or the file does not state the opset of its ONNX operators.
    """
    _refuse_unknown_opset(model, path)
    problem = next(_undefined_reads(model.graph, frozenset()), None)
    for function in model.functions:
        known_names = {*function.input, *_output_names(function.node)}
        problem = problem or next(_undefined_inputs(function.node, known_names), None)
        problem = problem or _undefined_output(function.output, known_names)
    refuse_cycles(model, path)
    if hidden := next(_hidden_names(model.graph, frozenset()), None):
        raise InputError(
            f"{path}: the graph is not valid: a subgraph has a weight {hidden!r}, and a graph around it has a value of "
            "this name; ONNX does not define which one the nodes read",
            hint="Rename one of them with the tool that wrote the file.",
        )
    if problem:
        raise InputError(
            f"{path}: the graph is not valid: {problem}, which is not an input, a weight or an output of a node",
            hint="Export it again, or repair it with the tool that wrote it.",
        )


def refuse_cycles(model: onnx.ModelProto, path: Path) -> None:
    """Refuse a graph whose nodes form a cycle: following its values never ends.

    Raises:
        InputError: names the nodes of a cycle.
    """
    if words := cycle_words(model):
        raise InputError(
            f"{path}: the graph is not valid: {words}",
            hint="Export it again, or repair it with the tool that wrote it.",
        )


def _refuse_unknown_opset(model: onnx.ModelProto, path: Path) -> None:
    """Refuse ONNX operators without a stated opset.

    Raises:
        InputError: the message names an operator.
    """
    for model_or_function, nodes in (
        (model, model.graph.node),
        *((function, function.node) for function in model.functions),
    ):
        if any(not entry.domain for entry in model_or_function.opset_import):
            continue
        for node in (node for node in nodes if not node.domain):
            raise InputError(
                f"{path}: has {node.op_type}, but no opset version of ONNX (opset_import)",
                hint="Export it again, or add the version with the tool that wrote it.",
            )


def _undefined_reads(graph: onnx.GraphProto, outer: frozenset[str]) -> Iterator[str]:
    """Yield a phrase for each read of an undefined value; nodes may be in any order."""
    known_names = outer | _defined_names(graph)
    yield from _undefined_inputs(graph.node, known_names)
    if problem := _undefined_output((value.name for value in graph.output), known_names):
        yield problem


def _hidden_names(graph: onnx.GraphProto, outer: frozenset[str]) -> Iterator[str]:
    """Yield the names of weights of subgraphs that a graph around them also defines."""
    yield from (name for name in _weight_names(graph) if name in outer)
    known_names = outer | _defined_names(graph)
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _hidden_names(inner, known_names)


def _defined_names(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the inputs, weights and node outputs of a graph, without those of its subgraphs."""
    return {*(value.name for value in graph.input), *_weight_names(graph), *_output_names(graph.node)}


def _weight_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of the dense and sparse weights of a graph."""
    yield from (tensor.name for tensor in graph.initializer)
    yield from (tensor.values.name for tensor in graph.sparse_initializer)


def _undefined_inputs(nodes: Iterable[onnx.NodeProto], known_names: AbstractSet[str]) -> Iterator[str]:
    """Yield a phrase for each undefined input of nodes and their subgraphs."""
    for node in nodes:
        for name in node.input:
            if name and name not in known_names:
                yield f"node {node.name or 'without a name'} ({node.op_type}) reads {name!r}"
        for graph in subgraphs(node):
            yield from _undefined_reads(graph, frozenset(known_names))


def _undefined_output(names: Iterable[str], known_names: AbstractSet[str]) -> str:
    """Return a phrase for the first undefined output; ``""`` if all are defined."""
    return next((f"its output is {name!r}" for name in names if name not in known_names), "")


def _output_names(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Yield the names of all outputs of nodes."""
    return (name for node in nodes for name in node.output if name)
