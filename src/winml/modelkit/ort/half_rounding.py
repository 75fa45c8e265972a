"""Computation of a float16 graph on the CPU with the rounding and overflow of a float16 device.

ONNX Runtime's CPU provider has float16 kernels for few operators. The provider computes all other operators in float32
and omits the conversions between these operators, so that values neither round nor overflow: a sum of 700,000 stays
finite on the CPU, and is infinite on a GPU. Before / After, for a node in float16::

    x16 → MatMul → y16 → …                  x32 → MatMul → y32 → Cast → y16 → Cast → …

ONNX Runtime keeps a Cast that loses precision, unless it has inserted the Cast itself. Inputs and outputs of the graph
keep their types, and a value keeps its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx_ir as ir

from winml.modelkit.onnx.fresh_names import FreshNames, cast_node
from winml.modelkit.onnx.widening import computes_in, widen_floats
from winml.modelkit.ort.half_precision import complete_types

ROUNDING_NOTE = (
    "float16 values were rounded as on a device; ONNX Runtime's CPU provider computes most of them in float32, and "
    "hides overflow."
)
"""Note of a measurement of a float16 file on the CPU."""

_FLOAT, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16


def round_half_values(model: ir.Model) -> bool:
    """Compute in float32 and round every float16 value of a graph, in place; return True if there is such a value.

    Values of unknown type and of ONNX functions are not rounded.
    """
    return _compute_in_float32(model, _HALF, is_rounded=lambda _: True)


def widen_graph(model: ir.Model, dtype: ir.DataType) -> bool:
    """Compute a graph of 16-bit floats in float32, in place; return True if it computed in ``dtype``.

    Inputs and outputs keep their types.
    """
    return _compute_in_float32(model, dtype, is_rounded=ir.Value.is_graph_output)


def _compute_in_float32(model: ir.Model, dtype: ir.DataType, is_rounded: Callable[[ir.Value], bool]) -> bool:
    """Compute a graph of 16-bit floats in float32, in place, and round selected values; False for other graphs."""
    complete_types(model)
    if not computes_in(model, dtype):
        return False
    # Also values of subgraphs, such as the branches of a merged decoder.
    rounded = [
        (node, value)
        for graph in (model.graph, *model.graph.subgraphs())
        for node in graph
        for value in node.outputs
        if value.dtype == dtype and is_rounded(value)
    ]
    inputs = [value for value in model.graph.inputs if value.dtype == dtype]
    fresh, first_node = FreshNames.of_graph(model.graph), next(iter(model.graph))
    widen_floats(model, dtype)
    for node, value in rounded:
        _round_value(node, value, dtype, fresh, is_main=node.graph is model.graph)
    for value in inputs:
        value.dtype = dtype
        if uses := tuple(value.uses()):
            cast = cast_node(value, _FLOAT, first_node, fresh)
            model.graph.insert_before(first_node, cast)
            _redirect(uses, cast.outputs[0])
    return True


def _round_value(node: ir.Node, value: ir.Value, dtype: ir.DataType, fresh: FreshNames, *, is_main: bool) -> None:
    """Insert a Cast to 16 bits and back after a value, in place.

    The value of 16 bits takes over the name, so that an output of the main graph keeps its type.
    """
    graph = node.graph
    assert graph is not None  # a node of the model
    name, uses = value.name or "", tuple(value.uses())
    value.name = fresh.take(f"{name}_fp32")
    narrow = cast_node(value, dtype, node, fresh, name)
    wide = cast_node(narrow.outputs[0], _FLOAT, node, fresh)
    graph.insert_after(node, [narrow, wide])
    _redirect(uses, wide.outputs[0])
    for position, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[position] = (narrow if is_main else wide).outputs[0]


def _redirect(uses: Iterable[tuple[ir.Node, int]], value: ir.Value) -> None:
    """Replace the values at some inputs of nodes by another value."""
    for node, position in uses:
        node.replace_input_with(position, value)
