"""Merges equal computations of a captured graph, and says in which modules each ran.

torch's exporter does the same on its own graph, where nothing tells afterwards what was merged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir
from onnx_ir.passes import common

from winml.modelkit.export.node_tagger import Scope

__all__ = ["merge_equal_nodes"]


_APART = "winml_apart"
"""Attribute of nodes that are not to be merged, for the time of the pass."""


def merge_equal_nodes(
    model: ir.Model, scopes: Mapping[ir.Node, Scope], repeated_modules: Collection[str] = ()
) -> dict[ir.Node, tuple[Scope, ...]]:
    """Let one node stand for all that compute the same of the same values, in place.

    Args:
        model: A captured graph.
        scopes: The scope of each node.
        repeated_modules: Paths of modules that run more than once. Their nodes stay, so that each call has its own.

    Returns:
        For each node that stands for several: the scopes of all, its own first. Constants are left out.
    """
    nodes = list(model.graph)
    uses = {node: [(use.node, use.idx) for value in node.outputs for use in value.uses()] for node in nodes}
    apart = [node for node in nodes if not set(scopes.get(node, ())).isdisjoint(repeated_modules)]
    for number, node in enumerate(apart):
        node.attributes.add(ir.AttrInt64(_APART, number))
    common.CommonSubexpressionEliminationPass()(model)
    for node in apart:
        node.attributes.pop(_APART)
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
