"""Names the nodes that an engine created after their module, as exported nodes are named.

Profilers record only the name, so the name must tell the module.
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
    """The name prefix of the nodes of each module, read from a tagged graph."""

    def __init__(self, model: ir.Model) -> None:
        """Read the prefixes; an untagged graph has none."""
        self.names = {node.name for node in all_nodes(model)}
        scopes_by_module: defaultdict[str, list[list[str]]] = defaultdict(list)
        for node in all_nodes(model):
            tag = read_tag(node)
            if tag is None or not (node.name or "").startswith("/"):
                continue
            scope_segments = (node.name or "").split("/")[:-1]
            # A node in a module is also in the modules around it.
            modules = tag.module.split(".") if tag.module else []
            for depth in range(1, len(modules) + 1):
                scopes_by_module[".".join(modules[:depth])].append(scope_segments)
        self._scopes: Mapping[str, str] = {
            module: "/".join(_common_start(scopes)) for module, scopes in scopes_by_module.items()
        }

    def scope(self, module: str) -> str:
        """Return the name prefix of a module, such as ``/encoder/layer.0``; the root's is empty."""
        return self._scopes.get(module, "")


def _common_start(scopes: Iterable[list[str]]) -> list[str]:
    levels = takewhile(lambda level: len(set(level)) == 1, zip(*scopes, strict=False))
    return [level[0] for level in levels]


def name_new_nodes(model: ir.Model, scopes: ModuleScopes) -> None:
    """Name the nodes that are not in the graph ``scopes`` was read from, in place.

    A new node whose name already has the prefix of its module keeps the name.
    """
    used_names = {node.name for node in all_nodes(model)}
    for node in all_nodes(model):
        tag = read_tag(node)
        if tag is None or node.name in scopes.names:
            continue
        scope = scopes.scope(tag.module)
        if (node.name or "").startswith(f"{scope}/"):
            continue
        stem = name = f"{scope}/{node.op_type}"
        number = 0
        while name in used_names:
            number += 1
            name = f"{stem}_{number}"
        used_names.add(name)
        node.name = name
