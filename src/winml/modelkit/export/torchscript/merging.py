"""Merges equal computations of a captured graph, and says in which modules each ran.

torch's exporter does the same on its own graph, where nothing tells afterwards what was merged.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnx_ir.passes import common

from winml.modelkit.export.node_tagger import Scope

__all__ = ["merge_equal_nodes"]


def merge_equal_nodes(model: ir.Model, scopes: Mapping[ir.Node, Scope]) -> dict[ir.Node, tuple[Scope, ...]]:
    """Let one node stand for all that compute the same of the same values, in place.

    Args:
        model: A captured graph.
        scopes: The scope of each node.

    Returns:
        For each node that stands for several: the scopes of all, its own first. Constants are left out.
    """
    nodes = list(model.graph)
    uses = {node: [(use.node, use.idx) for value in node.outputs for use in value.uses()] for node in nodes}
    common.CommonSubexpressionEliminationPass()(model)
    stands_for: dict[ir.Node, ir.Node] = {}
    merged: dict[ir.Node, tuple[Scope, ...]] = {}
    # Backwards, so that what replaced the reader of a node is known before the node is looked for in it.
    for node in reversed([node for node in nodes if node.graph is None]):
        for reader, position in uses[node]:
            present_reader = stands_for.get(reader, reader)
            value = present_reader.inputs[position] if present_reader.graph is not None else None
            if value is not None and (survivor := value.producer()) is not None:
                stands_for[node] = survivor
                break
    for node in nodes:
        if (kept := stands_for.get(node)) is not None and kept in scopes and kept.inputs:
            merged[kept] = (*merged.get(kept, (scopes[kept],)), scopes[node])
    return merged
