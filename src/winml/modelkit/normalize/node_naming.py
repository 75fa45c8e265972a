"""Gives every value and every node a unique name."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from winml.modelkit.hierarchy.coverage import all_nodes

__all__ = ["UniqueNodeNamesPass", "ValueNamesPass"]

_OMITTED_PREFIX = "\0left out "
"""Chosen: begins with a character that no name contains."""


class ValueNamesPass(ir.passes.InPlacePass):
    """Give every value a unique name, except omitted outputs. Works in place.

    onnx_ir's ``NameFixPass`` also names omitted outputs, which in ONNX have an empty name (the second of ``Unique``).
    The next pass that removes unused outputs would remove those names again, and so never find the graph unchanged.

    Tags: keeps.

    Why it is safe: nothing reads an omitted output.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Name values without a name, and rename all but one of several equal names."""
        omitted_outputs = [value for node in all_nodes(model) for value in node.outputs if value.name == ""]
        for position, value in enumerate(omitted_outputs):
            value.name = f"{_OMITTED_PREFIX}{position}"
        modified = NameFixPass()(model).modified
        for value in omitted_outputs:
            value.name = ""
        return ir.passes.PassResult(model, modified)


class UniqueNodeNamesPass(ir.passes.InPlacePass):
    """Give every node a unique name, across subgraphs and functions. Works in place.

    onnx_ir's ``NameFixPass`` makes node names unique within one graph only. Profilers record nothing but the name, so
    it must be unique in the model.

    Before / After::

        "/a/Add", "/a/Add", ""  (a Mul)        "/a/Add", "/a/Add_1", "/Mul"

    Must not fire when a name is unique already: users find nodes by name.

    Tags: keeps.

    Why it is safe: ONNX gives node names no meaning.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rename nodes without a unique name; the first of several equal names is kept."""
        nodes = list(all_nodes(model))
        used_names = {node.name for node in nodes}
        assigned_names: set[str] = set()
        modified = False
        for node in nodes:
            if not node.name or node.name in assigned_names:
                node.name = _free_name(node.name or f"/{node.op_type}", used_names)
                used_names.add(node.name)
                modified = True
            assigned_names.add(node.name)
        return ir.passes.PassResult(model, modified)


def _free_name(stem: str, used_names: set[str | None]) -> str:
    name, number = stem, 0
    while name in used_names:
        number += 1
        name = f"{stem}_{number}"
    return name
