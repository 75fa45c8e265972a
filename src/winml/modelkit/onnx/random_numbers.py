"""Graphs whose random numbers are fixed, so that two runs, or two graphs, can be compared."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from winml.modelkit.tags.tagging import all_nodes

FIXED = 0.25
"""Chosen: number that stands for those drawn from the standard normal distribution and from 0 to 1. It is the mean of
neither, so that a wrong scale changes the outputs."""
_PARAMETERS = {"RandomNormal": ("mean", "scale"), "RandomUniform": ("low", "high")}
"""Specified by ONNX: attributes of the distributions, by default 0 and 1."""
FIXABLE_OPERATORS = frozenset(f"{name}{suffix}" for name in _PARAMETERS for suffix in ("", "Like"))


def fix_random_numbers(model: ir.Model) -> None:
    """Replace the random numbers of a graph by fixed numbers, in place."""
    for node in [node for node in all_nodes(model) if node.op_type in FIXABLE_OPERATORS and not node.domain]:
        (output,), attributes = node.outputs, node.attributes
        first, second = _PARAMETERS[node.op_type.removesuffix("Like")]
        start, end = attributes.get_float(first, 0.0), attributes.get_float(second, 1.0)
        number = start + FIXED * (end - start if first == "low" else end)
        dtype = ir.DataType(attributes.get_int("dtype", (output.dtype or ir.DataType.FLOAT).value))
        if node.inputs:
            shape = ir.node("Shape", [node.inputs[0]])
        else:
            shape = ir.node("Constant", [], {"value_ints": attributes.get_ints("shape")})
        value = ir.tensor(np.asarray([number], dtype.numpy()))
        filled = ir.node("ConstantOfShape", [shape.outputs[0]], {"value": value})
        assert node.graph is not None  # it was found in one
        node.graph.insert_before(node, [shape, filled])
        fixed, name = filled.outputs[0], output.name
        output.name, fixed.name, fixed.type, fixed.shape = None, name, ir.TensorType(dtype), output.shape
        output.replace_all_uses_with(fixed, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)
