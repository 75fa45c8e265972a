"""Finds in a quantized graph what became of the planned nodes, and writes it on the nodes.

Read from the graph as it is, whichever engine made it: a planned node is quantized if what computes its output reads
numbers of few bits, or if it makes 16-bit floats that were none before.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence

import onnx_ir as ir

from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.quantize.planning import PlannedNode
from winml.modelkit.quantize.precisions import MODES

__all__ = ["mark_quantized_nodes"]

_BLOCK_SIZE = "block_size"
"""The attribute, and the key of the record."""
_HALVES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
_CONVERTING = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}
_RESHAPING = "Reshape"
"""What stands between quantized values and the lookup that reads them."""


def mark_quantized_nodes(original: ir.Model, quantized: ir.Model, planned: Sequence[PlannedNode]) -> frozenset[str]:
    """Write on every quantized node which precision it has; return the names of the planned nodes that reached it.

    Args:
        original: The graph before.
        quantized: The graph after; its nodes get ``winml.quantization``, in place.
        planned: What was to become of the nodes of the first.
    """
    outputs = {node.name: node.outputs[0].name for node in original.graph if node.outputs}
    before = {value.name: value.dtype for node in original.graph for value in node.outputs}
    before.update(
        (value.name, value.dtype) for value in (*original.graph.inputs, *original.graph.initializers.values())
    )
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
        half = _HALVES.get(item.requested.name)
        kinds = {node: _kind_of(node) if half is None else _half_kind_of(node, half, before) for node in new}
        if not {"operator", "weight"}.intersection(kinds.values()):
            continue
        reached.add(item.name)
        for node, kind in kinds.items():
            if kind is not None:
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
    """Say whether a node reads an initializer of at most eight bits, as it is or reshaped."""
    for value in node.inputs:
        maker = value.producer() if value is not None else None
        if maker is not None and maker.op_type == _RESHAPING:
            value = maker.inputs[0]
        tensor = value.const_value if value is not None else None
        if tensor is not None and tensor.dtype.itemsize <= 1 and tensor.dtype != ir.DataType.BOOL:
            return True
    return False


def _half_kind_of(node: ir.Node, half: ir.DataType, before: Mapping[str | None, ir.DataType | None]) -> str | None:
    """Return what a node is of a graph whose weights or values became 16-bit floats; None for others.

    Args:
        node: The node.
        half: The type that was asked for.
        before: Name of each value of the graph before → its type.
    """
    read = node.inputs[0] if node.op_type == "Cast" else None
    if read is not None and read.is_initializer() and read.dtype == half and before.get(read.name) != half:
        return "weight"
    made = [value for value in node.outputs if value.dtype == half and before.get(value.name) != half]
    return "operator" if made and node.op_type != "Cast" else None


def _kind_of(node: ir.Node) -> str | None:
    """Return what a node of a quantized graph is: ``weight``, ``activation`` or ``operator``; None for others."""
    if node.op_type in _CONVERTING:
        first = node.inputs[0]
        return "weight" if first is not None and first.is_initializer() else "activation"
    return "operator" if node.op_type != _RESHAPING and _reads_few_bits(node) else None
