"""Which module does each node of a graph belong to? Asked by verbs that change some modules only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from winml.modelkit.errors import UsageError
from winml.modelkit.graph.cutting import GraphModules
from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.tagging import all_nodes
from winml.modelkit.inspect.onnx_tree import read_tree
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import OptimizeResult, optimize

__all__ = [
    "graph_modules",
    "optimize_within",
    "selected_nodes",
    "source_notes",
]


def graph_modules(model: ir.Model, root: str) -> GraphModules:
    """Return the modules of a graph with its subgraphs, from tags or, where it has none, from the names of its nodes.

    Args:
        model: The model.
        root: Name of the root where node names are all there is.
    """
    nodes = [ir.serde.serialize_node(node) for node in all_nodes(model)]
    tree = read_tree(nodes, model.metadata_props, root)
    return GraphModules(tree.modules, dict(zip((node.name for node in nodes), tree.tags, strict=True)), tree.source)


def source_notes(modules: GraphModules) -> list[str]:
    """Say where modules come from if not from tags: who selects by them should know."""
    if modules.source == "winml tags":
        return []
    if not modules.modules:
        return ["No node says which module it came from: all nodes were treated alike."]
    return [
        f"No node bears a tag: modules were read from {modules.source}, which may name them otherwise than PyTorch."
    ]


def selected_nodes(
    model: ir.Model, included: Sequence[str], excluded: Sequence[str]
) -> tuple[frozenset[str], list[str]]:
    """Return the names of the nodes of the main graph that selectors name, and notes on where modules come from.

    Args:
        model: The model; every node has a name of its own.
        included: Selectors of the only modules, with all below them; none: all.
        excluded: Selectors of modules that are left out, with all below them.

    Raises:
        UsageError: a selector names no module, or no node is left.
    """
    modules = graph_modules(model, model.graph.name or "graph")
    only = [modules.selected_tags(text) for text in included]
    never = [modules.selected_tags(text) for text in excluded]

    def is_within(tag: str, tags: Sequence[frozenset[str]]) -> bool:
        return any(address.is_within(tag, other) for found in tags for other in found)

    names = frozenset(
        str(node.name)
        for node in model.graph
        if (not only or is_within(modules.tag_of.get(str(node.name), ""), only))
        and not is_within(modules.tag_of.get(str(node.name), ""), never)
    )
    if not names:
        raise UsageError(
            f"no node is left of {', '.join(included) or 'the graph'} without {', '.join(excluded)}",
            hint="Narrow --exclude, or widen --module.",
        )
    return names, source_notes(modules)


# --- Optimizes a graph in memory, or those of its modules that options select. Used by what writes and what checks.


def optimize_within(model: ir.Model, options: OptimizeOptions) -> OptimizeResult:
    """Optimize a model, or those of its modules that options select.

    Raises:
        UsageError: a selector names no module.
        OptimizeError: an engine failed.
    """
    if not options.is_limited or options.is_empty:
        return optimize(model, options)
    names, notes = selected_nodes(model, options.module, options.exclude)
    before = sum(1 for _ in model.graph)
    result = optimize(model, options, names)
    left = f"Only {len(names)} of {before} nodes were given to the optimizer, those of the selected modules."
    return replace(result, notes=(*notes, left, *result.notes))
