"""Graphs whose random numbers are fixed, so that two runs, or two graphs, can be compared."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from winml.modelkit.tags.tagging import all_nodes

FIXED_NORMAL, FIXED_UNIFORM = 1.0, 0.75
"""Chosen: numbers that stand for those drawn from the standard normal distribution, and from 0 to 1. With other numbers
than the means, a wrong scale changes the outputs."""
_RANGES: Mapping[str, tuple[tuple[str, float], tuple[str, float]]] = {
    "Normal": (("mean", 0.0), ("scale", 1.0)),
    "Uniform": (("low", 0.0), ("high", 1.0)),
}
"""Specified by ONNX: attributes of the distributions, with their defaults."""


FIXABLE_OPERATORS = frozenset(f"Random{kind}{suffix}" for kind in _RANGES for suffix in ("", "Like"))


def fix_random_numbers(model: ir.Model) -> bool:
    """Replace the random numbers of a graph by fixed numbers, in place; return True if there are any."""
    nodes = [node for node in all_nodes(model) if node.op_type in FIXABLE_OPERATORS and not node.domain]
    for node in nodes:
        output = node.outputs[0]
        kind = node.op_type.removeprefix("Random").removesuffix("Like")
        first, second = (node.attributes.get_float(name, default) for name, default in _RANGES[kind])
        number = first + FIXED_NORMAL * second if kind == "Normal" else first + FIXED_UNIFORM * (second - first)
        dtype = ir.DataType(node.attributes.get_int("dtype", (output.dtype or ir.DataType.FLOAT).value))
        value = ir.tensor(np.asarray([number], dtype.numpy()))
        attributes = [ir.AttrTensor("value", value)]
        if node.inputs:
            shape = ir.node("Shape", [node.inputs[0]])
        else:
            sizes = ir.tensor(np.asarray(node.attributes.get_ints("shape"), np.int64))
            shape = ir.node("Constant", [], {"value": ir.AttrTensor("value", sizes)})
        filled = ir.Node("", "ConstantOfShape", [shape.outputs[0]], attributes)
        assert node.graph is not None  # it was found in one
        node.graph.insert_before(node, [shape, filled])
        output.replace_all_uses_with(filled.outputs[0], replace_graph_outputs=True)
        node.graph.remove(node, safe=True)
    return bool(nodes)
