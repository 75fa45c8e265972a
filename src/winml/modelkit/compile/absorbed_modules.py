"""Which modules did a provider compile into one node? All whose nodes lie between what it reads and what it makes.

A provider keeps the names of the values at its borders, so that its part of the graph is known exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import onnx_ir as ir

from winml.modelkit.hierarchy.address import common_ancestor
from winml.modelkit.hierarchy.coverage import all_nodes
from winml.modelkit.hierarchy.tagging import NodeTag, read_tag, write_tag
from winml.modelkit.metadata_keys import MODULES_KEY

__all__ = ["write_absorbed_modules"]


def write_absorbed_modules(contexts: Iterable[ir.Node], original: ir.Model) -> None:
    """Give nodes that stand for a part of a graph the tag of the module that contains it, and the list of its modules.

    Nodes whose part has no tags are left as they are. Works in place.

    Args:
        contexts: The nodes.
        original: The model before it was compiled.
    """
    makers = {value.name: node for node in original.graph for value in node.outputs}
    module_of = {tag.tag: tag.module for node in all_nodes(original) if (tag := read_tag(node)) is not None}
    root = min(module_of, key=len, default="")
    for context in contexts:
        tags = [tag for node in _absorbed(context, makers) for tag in _tags_inside(node)]
        if not tags:
            continue
        common = common_ancestor(tag.tag for tag in tags)
        common = common if common in module_of else root
        write_tag(context, NodeTag(common, module_of[common], "merged"))
        modules = sorted({tag.module for tag in tags})
        context.metadata_props[MODULES_KEY] = json.dumps(modules, ensure_ascii=False)


def _absorbed(context: ir.Node, makers: dict[str | None, ir.Node]) -> list[ir.Node]:
    """Return the original nodes between the values that a node reads and those that it makes."""
    read = {value.name for value in context.inputs if value is not None}
    found: dict[ir.Node, None] = {}
    waiting = [value.name for value in context.outputs]
    while waiting:
        node = makers.get(waiting.pop())
        if node is not None and node not in found:
            found[node] = None
            waiting += [value.name for value in node.inputs if value is not None and value.name not in read]
    return list(found)


def _tags_inside(node: ir.Node) -> list[NodeTag]:
    """Return the tags of a node and of those in its subgraphs."""
    nodes = [node]
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            nodes += attribute.as_graph().all_nodes()
    return [tag for item in nodes if (tag := read_tag(item)) is not None]
