"""Finds in a quantized graph what became of the planned nodes, and writes it on the nodes.

Read from the graph as it is, whichever engine made it: a planned node is quantized if what computes its output reads
numbers of few bits.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence

import onnx_ir as ir

from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.quantize.planning import PlannedNode
from winml.modelkit.quantize.precisions import MODES

__all__ = ["mark_quantized_nodes"]

_BLOCK_SIZE = "block_size"
"""The attribute, and the key of the record."""
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_CONVERTING = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}


def mark_quantized_nodes(original: ir.Model, quantized: ir.Model, planned: Sequence[PlannedNode]) -> frozenset[str]:
    """Write on every quantized node which precision it has; return the names of the planned nodes that reached it.

    Args:
        original: The graph before.
        quantized: The graph after; its nodes get ``winml.quantization``, in place.
        planned: What was to become of the nodes of the first.
    """
    outputs = {node.name: node.outputs[0].name for node in original.graph if node.outputs}
    before = {value.name for node in original.graph for value in node.outputs} | set(original.graph.initializers)
    before |= {value.name for value in original.graph.inputs}
    makers = {value.name: node for node in quantized.graph for value in node.outputs}
    by_name = {node.name: node for node in quantized.graph}
    reached = set()
    for item in planned:
        if item.mode is None:
            continue
        if MODES[item.mode].needs_ranges:
            # The node itself stays, and what it reads may be quantized without it: who did it wrote it there.
            if item.name in by_name and QUANTIZATION_KEY in by_name[item.name].metadata_props:
                reached.add(item.name)
            continue
        new = list(_nodes_behind(makers.get(outputs[item.name]), before))
        has_fewer_bits = _is_half if item.mode == "float" else _reads_few_bits
        if not any(has_fewer_bits(node) for node in new):
            continue
        reached.add(item.name)
        for node in new:
            if kind := _half_kind_of(node) if item.mode == "float" else _kind_of(node):
                record: dict[str, str | int] = {"precision": item.requested.name, "kind": kind}
                if (size := node.attributes.get(_BLOCK_SIZE)) is not None:
                    record[_BLOCK_SIZE] = size.as_int()
                node.metadata_props.setdefault(QUANTIZATION_KEY, json.dumps(record))
    return frozenset(reached)


def _nodes_behind(node: ir.Node | None, known: Container[str | None]) -> Iterator[ir.Node]:
    """Yield a node and those behind it, up to values that were there before."""
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [value.producer() for value in node.inputs if value is not None and value.name not in known]


def _reads_few_bits(node: ir.Node) -> bool:
    """Say whether a node reads an initializer of at most eight bits."""
    for value in node.inputs:
        tensor = value.const_value if value is not None else None
        if tensor is not None and tensor.dtype.itemsize <= 1 and tensor.dtype != ir.DataType.BOOL:
            return True
    return False


def _is_half(node: ir.Node) -> bool:
    """Say whether a node makes 16-bit floats, or casts a weight that is kept in them."""
    return _is_weight_cast(node) or (node.op_type != "Cast" and any(value.dtype in _HALVES for value in node.outputs))


def _is_weight_cast(node: ir.Node) -> bool:
    value = node.inputs[0] if node.op_type == "Cast" else None
    return value is not None and value.is_initializer() and value.dtype in _HALVES


def _half_kind_of(node: ir.Node) -> str | None:
    if _is_weight_cast(node):
        return "weight"
    return "operator" if _is_half(node) else None


def _kind_of(node: ir.Node) -> str | None:
    """Return what a node of a quantized graph is: ``weight``, ``activation`` or ``operator``; None for others."""
    if node.op_type in _CONVERTING:
        first = node.inputs[0]
        return "weight" if first is not None and first.is_initializer() else "activation"
    return "operator" if _reads_few_bits(node) else None
