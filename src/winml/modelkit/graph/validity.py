"""Is every name that a graph reads there, and every operator's version known?

Looks at the structure as it stands in the file, since libraries make up what is missing when they read it. Says nothing
about what operators make of their inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx

from winml.modelkit.errors import InputError

__all__ = ["refuse_invalid"]

_ONNX_DOMAINS = ("", "ai.onnx")
"""Specified: both name ONNX itself."""


def refuse_invalid(model: onnx.ModelProto, path: Path) -> None:
    """Refuse a graph that nobody could compute.

    Args:
        model: The structure of the model; values of weights are not looked at.
        path: Its file, for the message.

    Raises:
        InputError: a node or an output reads a value that nothing makes, or the file does not say which version of
            ONNX's operators it uses.
    """
    _refuse_unknown_opset(model, path)
    problem = next(_undefined(model.graph, frozenset()), None)
    for function in model.functions:
        known = {*function.input, *_made_by(function.node)}
        problem = problem or next(_undefined_inputs(function.node, known), None)
        problem = problem or _undefined_output(function.output, known)
    if problem:
        raise InputError(
            f"{path}: the graph is not valid: {problem}, which is no input, no weight and no output of a node",
            hint="Export it again, or mend it with the tool it comes from.",
        )


def _refuse_unknown_opset(model: onnx.ModelProto, path: Path) -> None:
    for part, nodes in ((model, model.graph.node), *((function, function.node) for function in model.functions)):
        if any(entry.domain in _ONNX_DOMAINS for entry in part.opset_import):
            continue
        for node in (node for node in nodes if node.domain in _ONNX_DOMAINS):
            raise InputError(
                f"{path}: has {node.op_type}, and does not say of which version of ONNX's operators (opset_import)",
                hint="Export it again, or add the version with the tool it comes from.",
            )


def _undefined(graph: onnx.GraphProto, outer: frozenset[str]) -> Iterator[str]:
    """Yield what reads a value that nothing makes, in words; nodes may stand in any order."""
    known = {
        *outer,
        *(value.name for value in graph.input),
        *(tensor.name for tensor in graph.initializer),
        *(tensor.values.name for tensor in graph.sparse_initializer),
        *_made_by(graph.node),
    }
    yield from _undefined_inputs(graph.node, known)
    if problem := _undefined_output((value.name for value in graph.output), known):
        yield problem


def _undefined_inputs(nodes: Iterable[onnx.NodeProto], known: set[str]) -> Iterator[str]:
    for node in nodes:
        for name in node.input:
            if name and name not in known:
                yield f"node {node.name or 'without a name'} ({node.op_type}) reads {name!r}"
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _undefined(graph, frozenset(known))


def _undefined_output(names: Iterable[str], known: set[str]) -> str:
    return next((f"its output is {name!r}" for name in names if name not in known), "")


def _made_by(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    return (name for node in nodes for name in node.output if name)
