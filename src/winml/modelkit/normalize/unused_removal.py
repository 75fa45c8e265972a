"""Removes initializers that nothing reads."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["UnusedInitializerRemovalPass"]


class UnusedInitializerRemovalPass(ir.passes.InPlacePass):
    """Remove unused initializers, in subgraphs as well, where onnx_ir's own pass keeps them. Works in place.

    Before / After::

        {a, b} Add(x, a)          {a} Add(x, a)

    Must not fire when the initializer is an input or an output of its graph: the names are the caller's.

    Tags: keeps. Nodes are not changed.

    Why it is safe: nothing reads the value.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Remove every unused initializer."""
        modified = False
        for graph in model.graphs():
            for name, value in list(graph.initializers.items()):
                if not (value.uses() or value.is_graph_input() or value.is_graph_output()):
                    del graph.initializers[name]
                    modified = True
        return ir.passes.PassResult(model, modified)
