"""Fusion of GELU with tanh, as torch's exporters write it: the cube is a product of three factors.

ONNX Runtime's own ``FastGeluFusion`` matches a cube written as ``Pow`` only.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from winml.modelkit.onnx.operators import is_operator, producer_of
from winml.modelkit.onnx.stage import GraphPass
from winml.modelkit.optimize import graph_matching

_INNER, _CUBIC = math.sqrt(2 / math.pi), 0.044715
"""Specified: constants of the approximation of GELU with tanh."""
_TOLERANCE = 1e-6
"""Chosen: relative rounding error of a constant in float32."""


class TanhGeluFusionPass(GraphPass):
    """Replace the operators of a GELU with tanh by ONNX Runtime's ``FastGelu``. Works in place.

    Before / After::

        x · x · x → Mul(0.044715) → Add(x) → Mul(√(2/π)) → Tanh → Add(1) → Mul(x) → Mul(0.5) → y

        x → FastGelu → y

    Must not fire when:
        1. an intermediate value is read elsewhere or is an output of the graph; squares may be read elsewhere;
        2. a constant differs from those of the approximation;
        3. values are not float32.

    Tags: creates. The new node has the tag of the last replaced node; all of them are in one module.

    Why it is safe: it is the operator's definition.
    """

    tags = "creates"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuse every GELU."""
        count = 0
        for tanh in [node for graph in model.graphs() for node in graph if is_operator(node, "Tanh")]:
            source = _find_source(tanh)
            last = None if source is None else _find_last(tanh, source)
            if source is not None and last is not None and last.graph is not None:
                name = f"{graph_matching.scope_of(last)}/FastGelu"
                node = ir.node("FastGelu", [source], domain=graph_matching.CONTRIB_DOMAIN, name=name)
                graph_matching.tag_like(node, last, "merged")
                last.graph.insert_after(last, node)
                graph_matching.take_over(last.outputs[0], node.outputs[0])
                count += 1
        return graph_matching.contrib_result(model, count)


def _find_source(tanh: ir.Node) -> ir.Value | None:
    """Return x if a node is tanh(√(2/π) · (x + 0.044715 · x · x · x)); `None` otherwise."""
    if tanh.inputs[0] is None:
        return None
    total = _find_scaled(tanh.inputs[0], _INNER)
    node = producer_of(total, "Add")
    if total is None or node is None or not graph_matching.has_one_use(total):
        return None
    for source, cubic in (node.inputs, reversed(node.inputs)):
        cube = None if cubic is None else _find_scaled(cubic, _CUBIC)
        if source is not None and cube is not None and _is_cube(cube, source):
            return source if source.dtype == ir.DataType.FLOAT else None
    return None


def _find_scaled(product: ir.Value, factor: float) -> ir.Value | None:
    """Return x if a value, which is read once, is x · factor; `None` otherwise."""
    operand, found = graph_matching.split_scale(product)
    is_scaled = math.isclose(found, factor, rel_tol=_TOLERANCE) and graph_matching.has_one_use(product)
    return operand if is_scaled else None


def _is_cube(value: ir.Value, source: ir.Value) -> bool:
    """Return True if a value, which is read once, is source · source · source."""
    outer = producer_of(value, "Mul")
    square = None if outer is None else next((factor for factor in outer.inputs if factor is not source), None)
    inner = producer_of(square, "Mul")
    if outer is None or inner is None or not graph_matching.has_one_use(value):
        return False
    return source in outer.inputs and all(factor is source for factor in inner.inputs)


def _find_last(tanh: ir.Node, source: ir.Value) -> ir.Node | None:
    """Return the node that computes 0.5 · source · (1 + tanh); `None` without it."""
    shifted = graph_matching.only_user(tanh.outputs[0], "Add")
    if shifted is None or 1.0 not in map(graph_matching.constant_number, shifted.inputs):
        return None
    product = graph_matching.only_user(shifted.outputs[0], "Mul")
    if product is None:
        return None
    factor = next((value for value in product.inputs if value is not shifted.outputs[0]), None)
    if factor is source:
        last = graph_matching.only_user(product.outputs[0], "Mul")
        return last if last is not None and 0.5 in map(graph_matching.constant_number, last.inputs) else None
    return product if factor is not None and _find_scaled(factor, 0.5) is source else None
