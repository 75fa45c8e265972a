"""What is every value and every node called?"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from winml.modelkit.hierarchy.coverage import all_nodes

__all__ = ["UniqueNodeNamesPass", "ValueNamesPass"]

_LEFT_OUT = "\0left out "
"""Chosen: begins with what no name holds."""


class ValueNamesPass(ir.passes.InPlacePass):
    """Give every value a name of its own, and leave out what is left out. Works in place.

    onnx_ir's ``NameFixPass`` does so, and names the outputs besides that a node does not have, which in ONNX are those
    with an empty name (the second of ``Unique``): the next pass that looks for unused ones takes the name away again.

    Tags: keeps.

    Why it is safe: nothing reads a value that is left out.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Name what has none, and of several equal names all but one."""
        left_out = [value for node in all_nodes(model) for value in node.outputs if value.name == ""]
        for position, value in enumerate(left_out):
            value.name = f"{_LEFT_OUT}{position}"
        modified = NameFixPass()(model).modified
        for value in left_out:
            value.name = ""
        return ir.passes.PassResult(model, modified)


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
