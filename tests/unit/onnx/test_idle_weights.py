"""Weights in a graph that are read for their sizes only."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir

from winml.modelkit.onnx.weights import idle_weight_bytes

_GRAPH = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[batch, 3] x) => (float[batch, 3] y, int64[batch] z)
<float[3] used = {1, 2, 3}, float[3, 2] idle = {1, 2, 3, 4, 5, 6}, int64 first = {0}, int64[1] axis = {0}>
{
    y = Add(x, used)
    hidden = MatMul(x, idle)
    sizes = Shape(hidden)
    batch = Gather(sizes, first)
    one = Unsqueeze(batch, axis)
    z = ConstantOfShape <value: tensor = int64[1] {0}> (one)
}
"""


def test_weights_behind_a_shape_are_idle() -> None:
    """Six numbers of four bytes are idle; weights that contribute to an output and tensors of sizes are not."""
    model = ir.from_proto(onnx.parser.parse_model(_GRAPH))
    assert 6 * 4 == idle_weight_bytes(model)
    model.graph.outputs.append(next(node for node in model.graph if node.op_type == "MatMul").outputs[0])
    assert 0 == idle_weight_bytes(model)
