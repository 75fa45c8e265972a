"""The pass of ``idempotent_removal``."""

from __future__ import annotations

import onnx_ir as ir

from winml.modelkit.extend import GraphPass

_IDEMPOTENT = {"Abs", "Ceil", "Floor", "Relu", "Round", "Sign"}


class IdempotentRemovalPass(GraphPass):
    """Read ``f(x)`` where ``f(f(x))`` is read. Works in place; winml removes unused nodes afterwards.

    Before / After::

        x → Relu → Relu → y          x → Relu → y

    Must not fire when the second makes a graph output: its name is the caller's.

    Tags: keeps. No node is new.

    Why it is safe: these operators return what they already returned.
    """

    tags = "keeps"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Remove every repetition."""
        modified = False
        for node in list(model.graph):
            before = node.inputs[0].producer() if node.op_type in _IDEMPOTENT and node.inputs[0] is not None else None
            if before is None or before.op_identifier() != node.op_identifier() or node.outputs[0].is_graph_output():
                continue
            if node.outputs[0].uses():
                node.outputs[0].replace_all_uses_with(before.outputs[0])
                modified = True
        return ir.passes.PassResult(model, modified)
