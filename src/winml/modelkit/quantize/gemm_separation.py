"""Turns planned ``Gemm`` nodes into ``MatMul`` and ``Add``, of which ONNX Runtime's quantizer has 8-bit forms.

The quantizer can do that itself, but then to every ``Gemm``, those that are to stay included, under other names, and
transposing weights in place that other nodes read as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import numpy as np
import onnx
import onnx_ir as ir
from onnxruntime.quantization.onnx_model import ONNXModel

from winml.modelkit.graph.weightless_proto import WeightlessProto

__all__ = ["gemms_left_alone", "with_products_for_gemms"]


@contextlib.contextmanager
def gemms_left_alone() -> Iterator[None]:
    """Keep the quantizer from replacing any ``Gemm``, for the time of the block."""
    original = ONNXModel.replace_gemm_with_matmul
    ONNXModel.replace_gemm_with_matmul = lambda _: None
    try:
        yield
    finally:
        ONNXModel.replace_gemm_with_matmul = original


def with_products_for_gemms(sent: WeightlessProto, names: Collection[str]) -> WeightlessProto:
    """Replace the named ``Gemm`` nodes, which are a product and a bias each, in place.

    Before / After::

        Gemm(x, w, b, transB=1)        MatMul(x, w.transposed) → Add(b)

    The product keeps the node's name, the sum its output. A transposed weight refers to the old one, which stays for
    those who read it; nothing is computed. The planner names none with ``alpha``, ``beta`` or ``transA``.

    Returns:
        The same proto, with the tensors of the transposed weights.
    """
    graph = sent.proto.graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    weights = dict(sent.weights)
    nodes = []
    for node in graph.node:
        if node.op_type != "Gemm" or node.name not in names:
            nodes.append(node)
            continue
        weight = node.input[1]
        if _is_transposed(node):
            weight = f"{weight}.transposed"
            if weight not in initializers:
                initializers[weight] = _transposed(initializers[node.input[1]], weight, weights)
                graph.initializer.append(initializers[weight])
        nodes += _product_and_sum(node, weight)
    del graph.node[:]
    graph.node.extend(nodes)
    return WeightlessProto(sent.proto, weights)


def _is_transposed(node: onnx.NodeProto) -> bool:
    return any(item.name == "transB" and item.i for item in node.attribute)


def _product_and_sum(node: onnx.NodeProto, weight: str) -> list[onnx.NodeProto]:
    has_bias = len(node.input) > 2 and bool(node.input[2])
    product = f"{node.output[0]}.product" if has_bias else node.output[0]
    made = [onnx.helper.make_node("MatMul", [node.input[0], weight], [product], name=node.name)]
    if has_bias:
        made.append(onnx.helper.make_node("Add", [product, node.input[2]], [node.output[0]], name=f"{node.name}.sum"))
    for new in made:
        new.metadata_props.extend(node.metadata_props)
    return made


def _transposed(tensor: onnx.TensorProto, name: str, weights: dict[str, ir.TensorProtocol]) -> onnx.TensorProto:
    """Return the transposed initializer; of one that travels without values, its tensor is added to ``weights``."""
    if tensor.name not in weights:
        return onnx.numpy_helper.from_array(np.ascontiguousarray(onnx.numpy_helper.to_array(tensor).T), name)
    source = weights[tensor.name]

    def evaluate() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(source.numpy().T), dtype=source.dtype, name=name)

    dims = list(reversed(tensor.dims))
    weights[name] = ir.LazyTensor(evaluate, dtype=source.dtype, shape=ir.Shape(dims), name=name)
    return onnx.TensorProto(name=name, data_type=tensor.data_type, dims=dims)
