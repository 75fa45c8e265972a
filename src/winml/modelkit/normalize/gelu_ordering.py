"""Writes a GELU in the order in which optimizers recognise it."""

from __future__ import annotations

import onnx_ir as ir

from winml.modelkit.hierarchy.coverage import all_nodes
from winml.modelkit.normalize.sizes.propagation import is_standard

__all__ = ["GeluOrderingPass"]


class GeluOrderingPass(ir.passes.InPlacePass):
    """Multiply by one half last in a GELU. Works in place.

    Before / After::

        x · (0.5 · (1 + Erf(x / √2)))              (x · (1 + Erf(x / √2))) · 0.5

    torch's dynamo exporter writes the first, its TorchScript exporter the second; ONNX Runtime recognises the second
    only (measured with 1.31).

    Must not fire when:
        1. the factor is another than one half: the order would change how the product is rounded;
        2. the inner product is used elsewhere, or is an output of the graph;
        3. what it is multiplied by is no sum with an ``Erf`` in it.

    Tags: keeps. Both nodes stay, with other inputs.

    Why it is safe: one half only takes one from the exponent, so every number is rounded as before. Only products above
    the largest number, where GELU is far from its bend, or below the smallest normal one differ.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Order every GELU."""
        changed = False
        for node in list(all_nodes(model)):
            if is_standard(node, "Mul"):
                changed |= _order(node)
        return ir.passes.PassResult(model, changed)


def _order(outer: ir.Node) -> bool:
    for value, product in (outer.inputs, outer.inputs[::-1]):
        inner = product.producer() if product is not None else None
        if inner is None or product is None or value is None or not is_standard(inner, "Mul"):
            continue
        if len(product.uses()) != 1 or product.is_graph_output() or value is product or inner.graph is not outer.graph:
            continue
        for half, rest in (inner.inputs, inner.inputs[::-1]):
            if half is not None and rest is not None and _is_half(half, product) and _is_sum_with_erf(rest):
                inner.replace_input_with(0, value)
                inner.replace_input_with(1, rest)
                outer.replace_input_with(0, product)
                outer.replace_input_with(1, half)
                product.shape = outer.outputs[0].shape
                # It reads the tensor now, which may be made after the sum.
                graph = outer.graph
                assert graph is not None
                graph.remove(inner)
                graph.insert_before(outer, inner)
                return True
    return False


def _is_half(value: ir.Value, scaled: ir.Value) -> bool:
    """Say whether a value is one half, of no more axes than what is multiplied by it."""
    tensor = value.const_value
    if tensor is None or tensor.size != 1 or scaled.shape is None or len(tensor.shape) > len(scaled.shape):
        return False
    return float(tensor.numpy().reshape(-1)[0]) == 0.5


def _is_sum_with_erf(value: ir.Value) -> bool:
    node = value.producer()
    if node is None or not is_standard(node, "Add"):
        return False
    makers = [term.producer() for term in node.inputs if term is not None]
    return any(maker is not None and is_standard(maker, "Erf") for maker in makers)
