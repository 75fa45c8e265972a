"""Names the nodes, values and open sizes of a captured graph.

Both exporters get the same names: nodes and values after the module they ran in, open sizes as the user named them.
Works in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import onnx_ir as ir

from winml.modelkit.export.node_tagger import Scope, neighbours, shared_scope
from winml.modelkit.hierarchy.tree import ModuleTree

__all__ = ["name_by_module", "name_open_sizes", "place_operands"]


def place_operands(scopes: dict[ir.Node, Scope]) -> None:
    """Give constants that the exporter added (axes, shapes) the scope shared by the nodes that read them, in place."""
    for node in [node for node, scope in scopes.items() if not scope and not node.inputs]:
        scopes[node] = shared_scope(scopes, neighbours(node))


def name_by_module(graph: ir.Graph, scopes: Mapping[ir.Node, Scope], tree: ModuleTree) -> None:
    """Name nodes and their outputs after the module they ran in, ``/encoder/layer.0/MatMul_1``, in place."""
    fixed = {value.name for value in (*graph.inputs, *graph.outputs)} | set(graph.initializers)
    name_counts: Counter[str] = Counter()
    for node in graph.all_nodes():
        scope = scopes[node]
        stem = f"{tree.scope(scope[-1]) if scope else ''}/{node.op_type}"
        node.name = f"{stem}_{name_counts[stem]}" if name_counts[stem] else stem
        name_counts[stem] += 1
        for position, value in enumerate(node.outputs):
            if value.name and value.name not in fixed:
                value.name = f"{node.name}_output_{position}"


def name_open_sizes(graph: ir.Graph, dynamic_axes: Mapping[str, Mapping[int, str]]) -> None:
    """Name the open sizes of the inputs, and remove all other shapes, in place.

    Exporters use their own names for sizes they could not compute (``Add_123_dim_0``, ``s77``), and may state some open
    sizes as fixed. Shape inference derives the inner shapes from the inputs again.
    """
    for value in graph.inputs:
        axis_names = dynamic_axes.get(value.name or "", {})
        value.shape = ir.Shape([axis_names.get(axis, size) for axis, size in enumerate(value.shape or ())])
    for node in graph.all_nodes():
        for value in node.outputs:
            value.shape = None
