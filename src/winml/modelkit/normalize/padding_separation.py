"""Which zeros around a tensor could be taken for something else?"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

__all__ = ["PaddingSeparationPass"]


class PaddingSeparationPass(ir.passes.InPlacePass):
    """Keep zeros that are put around the input of a ``MaxPool`` apart from the padding of the pool. Works in place.

    Before / After::

        Pad(x, pads, 0.0) → MaxPool          Pad(x, pads, -0.0) → MaxPool

    ONNX Runtime (1.31.1, on by default) makes a ``Pad`` whose value is zero in every bit the pool's own padding, which
    is below every number: the pool of negative values comes out wrong. BiT pads like that, and what was ported from
    TensorFlow.

    Must not fire when:
        1. the value is computed or another one, or the padding mirrors or repeats what is there;
        2. the values are integers, which have one zero only;
        3. the pool is not the only reader, or the padded axes are listed: then nothing is made one.

    Tags: keeps. Nodes are not touched.

    Why it is safe: the two zeros are equal, and the larger of them is either.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Give every such ``Pad`` a value of its own."""
        modified = False
        for graph in model.graphs():
            for node in graph:
                if _is_padded_pool(node) and _pads_zeros(node):
                    _pad_negative_zeros(graph, node)
                    modified = True
        return ir.passes.PassResult(model, modified)


def _is_padded_pool(node: ir.Node) -> bool:
    """Say whether a node puts one value around what a ``MaxPool`` alone reads."""
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
