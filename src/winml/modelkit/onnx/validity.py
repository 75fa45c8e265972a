"""Refusal of graphs that read undefined values, have cycles or state no opset.

Checks the structure as stored in the file, because libraries add missing parts when they read it. Does not check the
inputs of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
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
    """Describe the nodes of a cycle, with their modules if recorded in the file; None without a cycle.

    Subgraphs are included, and functions that call themselves.
    """
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        loop, _ = _loop_and_free_names(nodes)
        if loop:
            return f"nodes form a cycle: {_list_names([_node_words(node) for node in loop])}"
    functions = {(function.domain, function.name): function for function in model.functions}

    def called(key: tuple[str, str]) -> Iterator[tuple[str, str]]:
        return (call for call in _calls(functions[key].node) if call in functions)

    if calls := find_loop(functions, called):
        return f"functions call themselves: {_list_names(['::'.join(key) for key in calls])}"
    return None


def find_loop(
    items: Iterable[_Item], needed: Callable[[_Item], Iterator[_Item]], done: dict[_Item, None] | None = None
) -> list[_Item]:
    """Return the items of a dependency cycle, each followed by an item it needs; ``[]`` without a cycle.

    Iterative, since graphs are deeper than Python's stack.

    Args:
        items: Items to visit, depth first.
        needed: Item → items that it needs.
        done: Receives the visited items, each after all items that it needs.
    """
    done = {} if done is None else done
    for item in items:
        if item in done:
            continue
        path = {item: needed(item)}
        while path:
            last = next(reversed(path))
            following = next((other for other in path[last] if other not in done), None)
            if following is None:
                done[last] = None
                del path[last]
            elif following in path:
                members = list(path)
                return members[members.index(following) :]
            else:
                path[following] = needed(following)
    return []


def _loop_and_free_names(nodes: Sequence[onnx.NodeProto]) -> tuple[list[onnx.NodeProto], set[str]]:
    """Return the nodes of a cycle (``[]`` without a cycle) and the names that are read but produced outside."""
    makers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    reads: list[set[str]] = []
    for node in nodes:
        names = {name for name in node.input if name}
        for graph in subgraphs(node):
            loop, free = _loop_and_free_names(graph.node)
            if loop:
                return loop, set()
            own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
            created = {name for inner in graph.node for name in inner.output}
            # A subgraph may return a value of the graph around it.
            names |= (free | ({value.name for value in graph.output} - created)) - own
        reads.append(names)
    indices = find_loop(range(len(nodes)), lambda index: (makers[name] for name in reads[index] if name in makers))
    return [nodes[index] for index in indices], set().union(*reads) - makers.keys()


def _calls(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        yield node.domain, node.op_type
        for graph in subgraphs(node):
            yield from _calls(graph.node)


def _node_words(node: onnx.NodeProto) -> str:
    module = next((entry.value for entry in node.metadata_props if entry.key == MODULE_KEY), None)
    place = "" if module is None else f", in module {module or '(the root)'}"
    return f"{node.name or 'a node without a name'} ({node.op_type}{place})"


def _list_names(names: Sequence[str]) -> str:
    more = f", and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{', '.join(names[:MAX_LISTED])}{more}"


def refuse_invalid(model: onnx.ModelProto, path: Path) -> None:
    """Refuse a graph that cannot be computed.

    Args:
        model: The structure of the model; values of weights are not read.
        path: The model file, for the message.

    Raises:
        InputError: a node or an output reads an undefined value, nodes form a cycle, or the file does not state the
            opset of its ONNX operators.
    """
    _refuse_unknown_opset(model, path)
    problem = next(_undefined_reads(model.graph, frozenset()), None)
    for function in model.functions:
        known_names = {*function.input, *_output_names(function.node)}
        problem = problem or next(_undefined_inputs(function.node, known_names), None)
        problem = problem or _undefined_output(function.output, known_names)
    refuse_cycles(model, path)
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
    known_names = {
        *outer,
        *(value.name for value in graph.input),
        *(tensor.name for tensor in graph.initializer),
        *(tensor.values.name for tensor in graph.sparse_initializer),
        *_output_names(graph.node),
    }
    yield from _undefined_inputs(graph.node, known_names)
    if problem := _undefined_output((value.name for value in graph.output), known_names):
        yield problem


def _undefined_inputs(nodes: Iterable[onnx.NodeProto], known_names: set[str]) -> Iterator[str]:
    for node in nodes:
        for name in node.input:
            if name and name not in known_names:
                yield f"node {node.name or 'without a name'} ({node.op_type}) reads {name!r}"
        for graph in subgraphs(node):
            yield from _undefined_reads(graph, frozenset(known_names))


def _undefined_output(names: Iterable[str], known_names: set[str]) -> str:
    return next((f"its output is {name!r}" for name in names if name not in known_names), "")


def _output_names(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    return (name for node in nodes for name in node.output if name)
