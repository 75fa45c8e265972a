"""Computes bfloat16 parts of a float32 graph in float32, since ONNX Runtime's CPU provider has no bfloat16 kernels.

Does nothing to a model whose weights are bfloat16: what computes it is for whoever chose that type.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from winml.modelkit.graph.fresh_names import FreshNames, cast_node

__all__ = ["BFloat16WideningPass"]

_NARROW, _WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT


class BFloat16WideningPass(ir.passes.InPlacePass):
    """Compute operators on bfloat16 in float32 and round their results to bfloat16. Works in place.

    Before / After::

        Cast(x, bfloat16) → Mul → Cast(float)      Cast(x, bfloat16) → Cast(float) → Mul → Cast(bfloat16) → Cast(float)

    For: Falcon with ALiBi, which makes its biases in bfloat16 whatever the type of the model.

    Must not fire when:
        1. the model takes or returns bfloat16, or most of its weights are bfloat16;
        2. the node is a ``Cast``, which has kernels for bfloat16, or of another domain than ONNX's.

    Tags: creates. A new ``Cast`` inherits from the node whose input or output it converts.

    Why it is safe: PyTorch computes each of these operators in float32 on a CPU, and rounds the result.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Widen every such node."""
        if not _has_narrow(model) or _is_narrow(model):
            return ir.passes.PassResult(model, modified=False)
        modified = False
        for graph in model.graphs():
            # Producers stand before readers, so that the type of what a node reads is known when it is reached.
            for node in [node for node in graph if node.domain in ("", "ai.onnx")]:
                if node.op_type == "Cast":
                    node.outputs[0].dtype = ir.DataType(node.attributes.get_int("to"))
                else:
                    modified |= _widen(node, graph, model.opset_imports.get("", 1))
        return ir.passes.PassResult(model, modified)


def _has_narrow(model: ir.Model) -> bool:
    """Say whether a node makes or reads bfloat16; sums up no sizes of weights."""
    for node in (node for graph in model.graphs() for node in graph):
        if node.op_type == "Cast" and node.attributes.get_int("to", 0) == _NARROW:
            return True
        if any(value is not None and _dtype(value) == _NARROW for value in (*node.inputs, *node.outputs)):
            return True
    return False


def _is_narrow(model: ir.Model) -> bool:
    if any(value.dtype == _NARROW for value in (*model.graph.inputs, *model.graph.outputs)):
        return True
    sizes = {_NARROW: 0, _WIDE: 0}
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype in sizes:
                sizes[value.const_value.dtype] += value.const_value.size
    return sizes[_NARROW] > sizes[_WIDE]


def _widen(node: ir.Node, graph: ir.Graph | ir.Function, opset: int) -> bool:
    narrow = [position for position, value in enumerate(node.inputs) if value is not None and _dtype(value) == _NARROW]
    if not narrow:
        return False
    outputs = [output for output in node.outputs if _is_narrow_output(output, node, narrow, opset)]
    fresh = FreshNames.of_graph(graph) if isinstance(graph, ir.Graph) else FreshNames(())
    for position in narrow:
        value = node.inputs[position]
        assert value is not None
        cast = cast_node(value, _WIDE, node, fresh)
        graph.insert_before(node, cast)
        node.replace_input_with(position, cast.outputs[0])
    for output in outputs:
        readers = list(output.uses())
        output.dtype = _WIDE
        cast = cast_node(output, _NARROW, node, fresh)
        graph.insert_after(node, cast)
        for reader, position in readers:
            reader.replace_input_with(position, cast.outputs[0])
    return True


def _is_narrow_output(output: ir.Value, node: ir.Node, narrow: list[int], opset: int) -> bool:
    """Say whether an output is bfloat16: it says so itself, or has the type of an input that is, by ONNX's schema."""
    if output.dtype is not None:
        return output.dtype == _NARROW
    schema = onnx.defs.get_schema(node.op_type, opset)
    kinds = [item.type_str for item in schema.inputs]
    # The last input or output of a schema may stand for any number.
    kind = schema.outputs[min(node.outputs.index(output), len(schema.outputs) - 1)].type_str
    return any(kinds[min(position, len(kinds) - 1)] == kind for position in narrow)


def _dtype(value: ir.Value) -> ir.DataType | None:
    return value.dtype if value.dtype is not None or value.const_value is None else value.const_value.dtype
