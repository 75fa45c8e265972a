"""Recognizes nodes and producers of values by operator."""

from __future__ import annotations

import onnx_ir as ir


def is_operator(node: ir.Node, *operators: str) -> bool:
    """Return True if a node is one of these operators of ONNX itself."""
    return node.op_type in operators and not node.domain


def producer_of(value: ir.Value | None, *operators: str) -> ir.Node | None:
    """Return the node that makes a value if it is one of these operators of ONNX itself, else None."""
    node = value.producer() if value is not None else None
    return node if node is not None and is_operator(node, *operators) else None
