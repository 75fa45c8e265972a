"""What are the nodes, values and sizes of a captured graph called?

The same names whichever exporter made the graph: nodes and values after the module they ran in, open sizes as the user
calls them. Works on the graph, in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import onnx_ir as ir

from winml.modelkit.export.node_tagger import Scope, neighbours, shared_scope
from winml.modelkit.hierarchy.tree import ModuleTree

__all__ = ["leave_open", "name_by_module", "place_operands"]


def place_operands(scopes: dict[ir.Node, Scope]) -> None:
    """Give each constant the exporter made up (axes, shapes) the scope of the nodes it was made for; in place."""
    for node in [node for node, scope in scopes.items() if not scope and not node.inputs]:
        scopes[node] = shared_scope(scopes, neighbours(node))


def name_by_module(graph: ir.Graph, scopes: Mapping[ir.Node, Scope], tree: ModuleTree) -> None:
    """Name nodes and the values they make after the module they ran in: ``/encoder/layer.0/MatMul_1``; in place."""
    fixed = {value.name for value in (*graph.inputs, *graph.outputs)} | set(graph.initializers)
    used: Counter[str] = Counter()
    for node in graph.all_nodes():
        scope = scopes[node]
        stem = f"{tree.scope(scope[-1]) if scope else ''}/{node.op_type}"
        node.name = f"{stem}_{used[stem]}" if used[stem] else stem
        used[stem] += 1
        for position, value in enumerate(node.outputs):
            if value.name and value.name not in fixed:
                value.name = f"{node.name}_output_{position}"


def leave_open(graph: ir.Graph, dynamic_axes: Mapping[str, Mapping[int, str]]) -> None:
    """Name the open sizes of the inputs, and forget every other shape, in place.

    An exporter names the sizes it could not compute in its own way (``Add_123_dim_0``, ``s77``), and may state as fixed
    some that it could; inference tells them anew from the inputs.
    """
    for value in graph.inputs:
        named = dynamic_axes.get(value.name or "", {})
        value.shape = ir.Shape([named.get(axis, size) for axis, size in enumerate(value.shape or ())])
    for node in graph.all_nodes():
        for value in node.outputs:
            value.shape = None
