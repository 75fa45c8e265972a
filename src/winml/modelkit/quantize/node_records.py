"""Finds in a quantized graph what became of the planned nodes, and writes it on the nodes.

Read from the graph as it is, whichever engine made it: a planned node is quantized if what computes its output reads
numbers of few bits.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir

from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.quantize.planning import PlannedNode

__all__ = ["mark_quantized_nodes"]

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
    reached = set()
    for item in planned:
        if item.mode is None:
            continue
        new = list(_nodes_behind(makers.get(outputs[item.name]), before))
        if not any(_reads_few_bits(node) for node in new):
            continue
        reached.add(item.name)
        for node in new:
            if kind := _kind_of(node):
                record = {"precision": item.requested.name, "kind": kind}
                node.metadata_props.setdefault(QUANTIZATION_KEY, json.dumps(record))
    return frozenset(reached)


def _nodes_behind(node: ir.Node | None, known: Collection[str | None]) -> Iterator[ir.Node]:
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


def _kind_of(node: ir.Node) -> str | None:
    """Return what a node of a quantized graph is: ``weight``, ``activation`` or ``operator``; None for others."""
    if node.op_type in _CONVERTING:
        first = node.inputs[0]
        return "weight" if first is not None and first.is_initializer() else "activation"
    return "operator" if _reads_few_bits(node) else None
