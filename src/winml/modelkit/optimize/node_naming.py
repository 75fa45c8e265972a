"""What are the nodes called that an engine made? After the module they belong to, as every node is.

Profilers keep only the name, so it has to say where a node belongs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import takewhile

import onnx_ir as ir

from winml.modelkit.hierarchy.coverage import all_nodes
from winml.modelkit.hierarchy.tagging import read_tag

__all__ = ["ModuleScopes", "name_new_nodes"]


class ModuleScopes:
    """Where the names of the nodes of each module start, learned from a graph."""

    def __init__(self, model: ir.Model) -> None:
        """Learn from the names of a tagged graph; of an untagged one there is nothing to learn."""
        self.names = {node.name for node in all_nodes(model)}
        found: defaultdict[str, list[list[str]]] = defaultdict(list)
        for node in all_nodes(model):
            tag = read_tag(node)
            if tag is None or not (node.name or "").startswith("/"):
                continue
            parts = (node.name or "").split("/")[:-1]
            # What lies in a module lies in those around it.
            modules = tag.module.split(".") if tag.module else []
            for depth in range(1, len(modules) + 1):
                found[".".join(modules[:depth])].append(parts)
        self._scopes: Mapping[str, str] = {module: "/".join(_common_start(scopes)) for module, scopes in found.items()}

    def scope(self, module: str) -> str:
        """Return the start of the names in a module, such as ``/encoder/layer.0``; the root's is empty."""
        return self._scopes.get(module, "")


def _common_start(scopes: Iterable[list[str]]) -> list[str]:
    levels = takewhile(lambda level: len(set(level)) == 1, zip(*scopes, strict=False))
    return [level[0] for level in levels]


def name_new_nodes(model: ir.Model, scopes: ModuleScopes) -> None:
    """Name the nodes that were not there when ``scopes`` was learned, in place; those well named keep their names."""
    taken = {node.name for node in all_nodes(model)}
    for node in all_nodes(model):
        tag = read_tag(node)
        if tag is None or node.name in scopes.names:
            continue
        scope = scopes.scope(tag.module)
        if (node.name or "").startswith(f"{scope}/"):
            continue
        stem = name = f"{scope}/{node.op_type}"
        number = 0
        while name in taken:
            number += 1
            name = f"{stem}_{number}"
        taken.add(name)
        node.name = name
