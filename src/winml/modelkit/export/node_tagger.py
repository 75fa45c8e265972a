"""Tags captured nodes by the scope they were traced in.

The scope decides. Only a node without a scope is tagged by its neighbours, and only if requested. Writes metadata on
the nodes in place; does not change the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

import onnx_ir as ir

from winml.modelkit.hierarchy.tagging import NodeTag, write_tag
from winml.modelkit.hierarchy.tree import ModuleTree
from winml.modelkit.metadata_keys import NAMESPACE_KEY

__all__ = ["NodeTagger", "neighbours", "shared_scope"]

Scope = tuple[str, ...]
"""Paths of the modules on the call stack, outermost first; the root is ``("",)``, an unknown scope ``()``."""


@dataclass(frozen=True)
class NodeTagger:
    """Writes the tags for scopes."""

    tree: ModuleTree
    operation_fallback: bool = False
    """Give a node without scope the longest scope its neighbours share, instead of the root."""

    def tag_nodes(self, scopes: Mapping[ir.Node, Scope]) -> None:
        """Write a tag and a namespace on every node, in place.

        Args:
            scopes: The scope of each node, in execution order.
        """
        known_scopes = dict(scopes)
        for node in scopes:
            source: Literal["operation"] | None = None
            if not known_scopes[node] and self.operation_fallback:
                known_scopes[node] = shared_scope(known_scopes, neighbours(node))
                source = "operation" if known_scopes[node] else None
            write_tag(node, self.tag_for(known_scopes[node], source))
            node.metadata_props[NAMESPACE_KEY] = self.namespace(known_scopes[node])

    def tag_for(self, scope: Scope, source: Literal["operation"] | None = None) -> NodeTag:
        """Return the tag of a node that ran in ``scope``: that of the innermost hierarchy module on it.

        Args:
            scope: The call stack.
            source: How the scope was won, if not read from the trace.
        """
        for path in reversed(scope):
            module = self.tree.get(path)
            if module is None:
                continue
            if source is None and path == scope[-1]:
                return NodeTag(module.tag, path, "root" if path == "" else "direct")
            return NodeTag(module.tag, path, source or "parent")
        return NodeTag(self.tree.root.tag, "", "root")

    def namespace(self, scope: Scope) -> str:
        """Return the scope as torch writes it: ``BertModel/encoder: BertEncoder/encoder.layer.0: BertLayer``."""
        return "/".join(
            f"{path}: {self.tree.class_name(path)}" if path else self.tree.class_name(path) for path in scope or ("",)
        )


def neighbours(node: ir.Node) -> list[ir.Node]:
    """Return the nodes that produce the inputs of ``node``, and those that read its outputs."""
    producers = (value.producer() for value in node.inputs if value is not None)
    readers = (use.node for output in node.outputs for use in output.uses())
    return [*(producer for producer in producers if producer is not None), *readers]


def shared_scope(scopes: Mapping[ir.Node, Scope], nodes: Iterable[ir.Node]) -> Scope:
    """Return the longest common scope of those of ``nodes`` that have one."""
    known_scopes = [scopes[node] for node in nodes if scopes.get(node)]
    if not known_scopes:
        return ()
    return tuple(level[0] for level in takewhile(lambda level: len(set(level)) == 1, zip(*known_scopes, strict=False)))
