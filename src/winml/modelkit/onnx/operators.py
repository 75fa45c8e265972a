"""Recognizes nodes and producers of values by operator, and walks back along values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import onnx_ir as ir

_MAKING = frozenset({"Sigmoid", "HardSigmoid", "Softmax"})
_MOVING = frozenset(
    {"Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose"}
    | {"Unsqueeze"}
)
"""Operators whose outputs consist of values of their first input, of Concat of all inputs."""


def probability_outputs(graph: ir.Graph) -> frozenset[str]:
    """Return the names of the outputs with values between 0 and 1, judged by the producing operators."""
    return frozenset(value.name or "" for value in graph.outputs if _is_probability(value))


def _is_probability(value: ir.Value | None) -> bool:
    """Return True if the operators that produce a value limit all elements to 0 … 1."""
    node = None if value is None else value.producer()
    if node is None or node.domain:
        return False
    if node.op_type in _MOVING:
        moved = node.inputs if node.op_type == "Concat" else node.inputs[:1]
        return all(map(_is_probability, moved))
    return node.op_type in _MAKING


def walk_back(
    values: Iterable[ir.Value | None],
    read: Callable[[ir.Node], Iterable[ir.Value | None]] = lambda node: node.inputs,
) -> Iterator[ir.Node]:
    """Yield the nodes that compute values, directly or through others; each once.

    Args:
        values: The values.
        read: Node → inputs to follow.
    """
    waiting, visited = [*values], set[ir.Node]()
    while waiting:
        value = waiting.pop()
        node = None if value is None else value.producer()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            waiting += read(node)


def is_operator(node: ir.Node, *operators: str) -> bool:
    """Return True for a node with one of the operators, of the ONNX domain."""
    return node.op_type in operators and not node.domain


def producer_of(value: ir.Value | None, *operators: str) -> ir.Node | None:
    """Return the producer of a value if it is one of the operators of the ONNX domain; otherwise `None`."""
    node = value.producer() if value is not None else None
    return node if node is not None and is_operator(node, *operators) else None
