"""Which nodes only pass on what they are given?"""

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
        1. is an input or an initializer: the output would have no node that makes it;
        2. is itself an output: two outputs would become one (torch makes such an ``Identity`` for a tensor returned
           twice);
        3. is made outside this graph: the output of a branch must be made in the branch.

    onnx_ir's own pass fires in cases 2 and 3, hence this one.

    Tags: keeps. The ``Identity`` goes; the node before it keeps its tag.

    Why it is safe: both names stand for the same tensor.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Remove every ``Identity`` that may go."""
        modified = False
        for node in list(all_nodes(model)):
            if node.op_type == "Identity" and node.domain in ("", "ai.onnx") and _may_go(node):
                _remove(node)
                modified = True
        return ir.passes.PassResult(model, modified)


def _may_go(node: ir.Node) -> bool:
    before, after = node.inputs[0], node.outputs[0]
    if before is None:
        return False
    if not after.is_graph_output():
        return True
    producer = before.producer()
    return producer is not None and producer.graph is node.graph and not before.is_graph_output()


def _remove(node: ir.Node) -> None:
    before, after = node.inputs[0], node.outputs[0]
    assert before is not None
    if before.type is None:
        before.type = after.type
    if before.shape is None:
        before.shape = after.shape
    is_output, name = after.is_graph_output(), after.name
    after.replace_all_uses_with(before, replace_graph_outputs=is_output)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
    if is_output:
        before.name = name
