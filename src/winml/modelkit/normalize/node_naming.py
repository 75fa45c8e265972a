"""What is every node called?"""

from __future__ import annotations

import onnx_ir as ir

from winml.modelkit.hierarchy.coverage import all_nodes

__all__ = ["UniqueNodeNamesPass"]


class UniqueNodeNamesPass(ir.passes.InPlacePass):
    """Give every node a name of its own, across subgraphs and functions. Works in place.

    onnx_ir's ``NameFixPass`` makes node names unique within one graph only; a profiler that keeps nothing but names
    needs more.

    Before / After::

        "/a/Add", "/a/Add", ""  (a Mul)        "/a/Add", "/a/Add_1", "/Mul"

    Must not fire when a name is unique already: names are how users find nodes again.

    Tags: keeps.

    Why it is safe: ONNX gives node names no meaning.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rename what needs it; the first of several equal names stays."""
        nodes = list(all_nodes(model))
        taken = {node.name for node in nodes}
        seen: set[str] = set()
        modified = False
        for node in nodes:
            if not node.name or node.name in seen:
                node.name = _free_name(node.name or f"/{node.op_type}", taken)
                taken.add(node.name)
                modified = True
            seen.add(node.name)
        return ir.passes.PassResult(model, modified)


def _free_name(stem: str, taken: set[str | None]) -> str:
    name, number = stem, 0
    while name in taken:
        number += 1
        name = f"{stem}_{number}"
    return name
