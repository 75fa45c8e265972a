"""Keeps the zero padding before a MaxPool from being fused into the pool."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

__all__ = ["PaddingSeparationPass"]


class PaddingSeparationPass(ir.passes.InPlacePass):
    """Pad the input of a ``MaxPool`` with -0.0 instead of 0.0, so that ONNX Runtime does not fuse it. Works in place.

    Before / After::

        Pad(x, pads, 0.0) → MaxPool          Pad(x, pads, -0.0) → MaxPool

    ONNX Runtime (1.31.1, on by default) fuses a ``Pad`` whose value has all bits zero into the pool. The pool pads with
    minus infinity, so the result is wrong where values are negative. BiT and models ported from TensorFlow pad like
    that.

    Must not fire when:
        1. the value is computed or not zero, or the padding mirrors or repeats values;
        2. the values are integers, which have no negative zero;
        3. the pool is not the only reader, or the padded axes are listed: ONNX Runtime does not fuse these.

    Tags: keeps. Nodes are not changed.

    Why it is safe: the two zeros are equal, and either may be the maximum.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Give every such ``Pad`` the value -0.0."""
        modified = False
        for graph in model.graphs():
            for node in graph:
                if _is_padded_pool(node) and _pads_zeros(node):
                    _pad_negative_zeros(graph, node)
                    modified = True
        return ir.passes.PassResult(model, modified)


def _is_padded_pool(node: ir.Node) -> bool:
    """Say whether a node pads with a constant, and a ``MaxPool`` alone reads the result."""
    if node.op_type != "Pad" or node.domain not in ("", "ai.onnx") or not 2 <= len(node.inputs) <= 3:
        return False
    padded = node.outputs[0]
    readers = [reader.op_type for reader, _ in padded.uses()]
    is_constant = node.attributes.get_string("mode", "constant") == "constant"
    return is_constant and readers == ["MaxPool"] and not padded.is_graph_output()


def _pads_zeros(node: ir.Node) -> bool:
    """Say whether the value of a ``Pad`` is the positive zero of a floating point type."""
    value = node.inputs[2] if len(node.inputs) > 2 else None
    dtype = (value or node.inputs[0] or node.outputs[0]).dtype
    if dtype is None or not dtype.is_floating_point():
        return False
    if value is None:
        return True
    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and not any(tensor.tobytes())


def _pad_negative_zeros(graph: ir.Graph, node: ir.Node) -> None:
    dtype = (node.inputs[0] or node.outputs[0]).dtype
    assert dtype is not None  # known to be a floating point type
    name = f"{node.outputs[0].name}.zero"
    zero = ir.Value(
        name=name,
        type=ir.TensorType(dtype),
        shape=ir.Shape([]),
        const_value=ir.tensor(np.array(-0.0, dtype.numpy()), dtype=dtype, name=name),
    )
    graph.register_initializer(zero)
    node.resize_inputs(3)
    node.replace_input_with(2, zero)
