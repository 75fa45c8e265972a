"""Removes Identity nodes."""

from __future__ import annotations

import onnx_ir as ir

from winml.modelkit.hierarchy.coverage import all_nodes

__all__ = ["IdentityRemovalPass"]


class IdentityRemovalPass(ir.passes.InPlacePass):
    """Remove ``Identity`` nodes, in subgraphs and functions too. Works in place.

    Before / After::

        x → Identity → y → Relu              x → Relu
        Relu → x → Identity → (output y)     Relu → (output y)

    Must not fire when ``y`` is an output of its graph and ``x``
        1. is an input or an initializer: the output would have no node that produces it;
        2. is itself an output: two outputs would become one (torch writes such an ``Identity`` for a tensor returned
           twice);
        3. is produced outside this graph: the output of a branch must be produced in the branch.

    onnx_ir's own pass fires in cases 2 and 3, hence this one.

    Tags: keeps. The ``Identity`` is removed; the node before it keeps its tag.

    Why it is safe: both names stand for the same tensor.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Remove every ``Identity`` outside these cases."""
        modified = False
        for node in list(all_nodes(model)):
            if node.op_type == "Identity" and node.domain in ("", "ai.onnx") and _is_removable(node):
                _remove_identity(node)
                modified = True
        return ir.passes.PassResult(model, modified)


def _is_removable(node: ir.Node) -> bool:
    input_value, output_value = node.inputs[0], node.outputs[0]
    if input_value is None:
        return False
    if not output_value.is_graph_output():
        return True
    producer = input_value.producer()
    return producer is not None and producer.graph is node.graph and not input_value.is_graph_output()


def _remove_identity(node: ir.Node) -> None:
    input_value, output_value = node.inputs[0], node.outputs[0]
    assert input_value is not None
    if input_value.type is None:
        input_value.type = output_value.type
    if input_value.shape is None:
        input_value.shape = output_value.shape
    is_output, name = output_value.is_graph_output(), output_value.name
    output_value.replace_all_uses_with(input_value, replace_graph_outputs=is_output)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
    if is_output:
        input_value.name = name
