"""Refuses graphs that read undefined values, have cycles or state no opset.

Checks the structure as stored in the file, since libraries fill in what is missing when they read it. Does not check
the inputs of operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx

from winml.modelkit.errors import InputError
from winml.modelkit.graph.cycles import cycle_words

__all__ = ["refuse_cycles", "refuse_invalid"]

_ONNX_DOMAINS = ("", "ai.onnx")
"""Specified: both name ONNX itself."""


def refuse_invalid(model: onnx.ModelProto, path: Path) -> None:
    """Refuse a graph that cannot be computed.

    Args:
        model: The structure of the model; values of weights are not read.
        path: Its file, for the message.

    Raises:
        InputError: a node or an output reads a value that nothing produces, nodes need their own result, or the file
            does not state the opset of ONNX's operators it uses.
    """
    _refuse_unknown_opset(model, path)
    problem = next(_undefined_reads(model.graph, frozenset()), None)
    for function in model.functions:
        known_names = {*function.input, *_names_made_by(function.node)}
        problem = problem or next(_undefined_inputs(function.node, known_names), None)
        problem = problem or _undefined_output(function.output, known_names)
    refuse_cycles(model, path)
    if problem:
        raise InputError(
            f"{path}: the graph is not valid: {problem}, which is no input, no weight and no output of a node",
            hint="Export it again, or repair it with the tool it comes from.",
        )


def refuse_cycles(model: onnx.ModelProto, path: Path) -> None:
    """Refuse a graph whose nodes need their own result: following its values never ends.

    Raises:
        InputError: names the nodes of a cycle.
    """
    if words := cycle_words(model):
        raise InputError(
            f"{path}: the graph is not valid: {words}",
            hint="Export it again, or repair it with the tool it comes from.",
        )


def _refuse_unknown_opset(model: onnx.ModelProto, path: Path) -> None:
    for model_or_function, nodes in (
        (model, model.graph.node),
        *((function, function.node) for function in model.functions),
    ):
        if any(entry.domain in _ONNX_DOMAINS for entry in model_or_function.opset_import):
            continue
        for node in (node for node in nodes if node.domain in _ONNX_DOMAINS):
            raise InputError(
                f"{path}: has {node.op_type}, and does not say of which version of ONNX's operators (opset_import)",
                hint="Export it again, or add the version with the tool it comes from.",
            )


def _undefined_reads(graph: onnx.GraphProto, outer: frozenset[str]) -> Iterator[str]:
    """Yield a phrase for each read of a value that nothing produces; nodes may be in any order."""
    known_names = {
        *outer,
        *(value.name for value in graph.input),
        *(tensor.name for tensor in graph.initializer),
        *(tensor.values.name for tensor in graph.sparse_initializer),
        *_names_made_by(graph.node),
    }
    yield from _undefined_inputs(graph.node, known_names)
    if problem := _undefined_output((value.name for value in graph.output), known_names):
        yield problem


def _undefined_inputs(nodes: Iterable[onnx.NodeProto], known_names: set[str]) -> Iterator[str]:
    for node in nodes:
        for name in node.input:
            if name and name not in known_names:
                yield f"node {node.name or 'without a name'} ({node.op_type}) reads {name!r}"
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _undefined_reads(graph, frozenset(known_names))


def _undefined_output(names: Iterable[str], known_names: set[str]) -> str:
    return next((f"its output is {name!r}" for name in names if name not in known_names), "")


def _names_made_by(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    return (name for node in nodes for name in node.output if name)
