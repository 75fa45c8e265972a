"""Writes a Gemm as the product and the addition it is, for quantizers that know only the product.

Before / After::

    y = Gemm(x, w, b, transB=1)      →      p = MatMul(x, wᵀ);  y = Add(p, b)

Must not fire when factors other than 1 stand before product or addition, or the activation is transposed. The product
keeps the name of the node. A transposed weight is a weight of its own, computed when it is read: the one it comes from
may have other users.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import onnx
import onnx_ir as ir

from winml.modelkit.graph.fresh_names import FreshNames
from winml.modelkit.graph.weightless_proto import WeightlessProto, read_once

__all__ = ["gemms_as_products"]


def gemms_as_products(sent: WeightlessProto, names: Collection[str]) -> WeightlessProto:
    """Return the model with the named Gemms written as products.

    Args:
        sent: The model; its protobuf is changed in place.
        names: Names of nodes; those that are no Gemm, or none that can be written so, stay.
    """
    tensors = dict(sent.weights)
    initializers = {initializer.name: initializer for initializer in sent.proto.graph.initializer}
    fresh = FreshNames.of_proto(sent.proto.graph)
    transposed: dict[str, str] = {}
    """Name of a weight → that of its transposed form."""
    nodes = []
    for node in sent.proto.graph.node:
        settings = {attribute.name: attribute.f or attribute.i for attribute in node.attribute}
        if node.op_type != "Gemm" or node.domain or node.name not in names or not _is_product(settings):
            nodes.append(node)
            continue
        if settings.get("transB"):
            weight = initializers.get(node.input[1])
            if weight is None:
                nodes.append(node)
                continue
            if weight.name not in transposed:
                name = transposed[weight.name] = fresh.take(f"{weight.name}_transposed")
                tensors[name] = _transposed(tensors.get(weight.name), weight, name)
                added = onnx.TensorProto(name=name, data_type=weight.data_type, dims=weight.dims[::-1])
                sent.proto.graph.initializer.append(added)
            node.input[1] = transposed[weight.name]
        nodes += _product_and_sum(node, fresh)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    sent.proto.graph.ClearField("node")
    sent.proto.graph.node.extend(copies)
    return WeightlessProto(sent.proto, tensors)


def _is_product(settings: dict[str, float]) -> bool:
    return settings.get("alpha", 1.0) == 1.0 and settings.get("beta", 1.0) == 1.0 and not settings.get("transA")


def _transposed(tensor: ir.TensorProtocol | None, weight: onnx.TensorProto, name: str) -> ir.TensorProtocol:
    original = tensor if tensor is not None else ir.serde.deserialize_tensor(weight)

    def compute() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(read_once(original).T), dtype=original.dtype, name=name)

    return ir.LazyTensor(compute, original.dtype, ir.Shape(list(original.shape.numpy())[::-1]), name=name)


def _product_and_sum(node: onnx.NodeProto, fresh: FreshNames) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that compute what a Gemm does; both bear its metadata."""
    has_bias = len(node.input) > 2 and bool(node.input[2])
    product = fresh.take(f"{node.output[0]}_product") if has_bias else node.output[0]
    yield onnx.NodeProto(
        op_type="MatMul", name=node.name, input=node.input[:2], output=[product], metadata_props=node.metadata_props
    )
    if has_bias:
        yield onnx.NodeProto(
            op_type="Add",
            name=fresh.take(f"{node.name}_bias"),
            input=[product, node.input[2]],
            output=node.output,
            metadata_props=node.metadata_props,
        )
