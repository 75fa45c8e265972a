"""Weights of a graph: what reads them as integers, copies for transposed ones, and idle ones, of which only the sizes
matter.

Tools that take protos get one without the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.tags.tagging import node_graphs

QUANTIZED_OPERATORS = frozenset({
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul",
    "QLinearConv", "MatMulNBits", "GatherBlockQuantized", "QAttention", "QGemm", "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat", "DynamicQuantizeLSTM", "QMoE",
})  # fmt: skip
"""Operators that only a quantized graph has."""
ROUNDING_OPERATORS = QUANTIZED_OPERATORS - {"DequantizeLinear", "GatherBlockQuantized", "MatMulNBits", "QMoE"}
"""Operators that round activations or take rounded ones; the others have weights alone in few bits."""


_PRODUCTS = ("MatMul", "Gemm")


def add_initializer(graph: ir.Graph, tensor: ir.TensorProtocol, name: str | None = None) -> ir.Value:
    """Add a tensor to the initializers of a graph, under its own name unless another is passed; return its value."""
    value = ir.Value(
        name=name or tensor.name,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(tensor.shape.numpy()),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer that no run replaces; `None` for any other value."""
    if value is None or not value.is_initializer() or value.is_graph_input():
        return None
    return value.const_value


def transposed_weight(node: ir.Node) -> ir.Value | None:
    """Return the initializer of two dimensions that a product reads transposed on its right; None where it has none."""
    value = node.inputs[1] if node.op_type in _PRODUCTS and not node.domain else None
    maker = value.producer() if value is not None else None
    if maker is None or maker.op_type != "Transpose" or maker.domain:
        return None
    weight, order = maker.inputs[0], maker.attributes.get_ints("perm", (1, 0))
    tensor = constant_tensor(weight)
    return weight if tensor is not None and len(tensor.shape) == 2 and tuple(order) == (1, 0) else None


def give_products_own_weights(model: ir.Model, names: Container[str | None]) -> None:
    """Let the named products read initializers instead of what a Transpose makes of one, in place.

    Before and after::

        w → Gather,  w → Transpose → MatMul (named)      →      w → Gather,  wᵀ → MatMul

    A transposed weight is computed when it is read, so the table is not copied before.

    Args:
        model: The model.
        names: Names of nodes of the main graph; others stay, and so does a Transpose that others read.
    """
    graph = model.graph
    fresh: FreshNames | None = None
    created: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        weight = transposed_weight(node) if node.name in names else None
        if weight is None:
            continue
        if weight not in created:
            fresh = fresh or FreshNames.of_graph(graph)
            tensor = weight.const_value
            assert tensor is not None  # transposed_weight looked at it
            transposed = transposed_tensor(tensor, fresh.take(f"{weight.name}_transposed"))
            created[weight] = add_initializer(graph, transposed)
        read = node.inputs[1]
        assert read is not None  # transposed_weight looked at it
        transpose = read.producer()
        node.replace_input_with(1, created[weight])
        if transpose is not None and not read.uses() and not read.is_graph_output():
            graph.remove(transpose, safe=True)
    for weight in created:
        if not weight.uses() and not weight.is_graph_output():
            graph.initializers.pop(weight.name or "")


def transposed_tensor(tensor: ir.TensorProtocol, name: str) -> ir.LazyTensor:
    """Return a tensor of two dimensions with its axes exchanged, computed when it is read."""

    def compute() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(read_once(tensor).T), dtype=tensor.dtype, name=name)

    return ir.LazyTensor(compute, tensor.dtype, ir.Shape(list(tensor.shape.numpy())[::-1]), name=name)


_ASKS_SIZES = frozenset({"Shape", "Size"})


def weight_bytes(model: ir.Model) -> int:
    """Return the bytes of all initializers, each counted once; no value is read."""
    tensors = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors if tensor is not None}.values())


def idle_weight_bytes(model: ir.Model) -> int:
    """Return the size of the weights whose values reach no output of the graph, other than as sizes.

    A graph may compute values only to ask for their sizes.
    """
    read: set[str] = set()
    seen: set[ir.Node] = set()
    waiting = list(model.graph.outputs)
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if node is None:
            read.add(value.name or "")
        elif node not in seen and node.op_type not in _ASKS_SIZES:
            seen.add(node)
            waiting += [item for item in node.inputs if item is not None]
            waiting += _captured(node)
    tensors = (value.const_value for name, value in model.graph.initializers.items() if name not in read)
    # Shapes and axes are small numbers beside them.
    return sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.dtype.is_floating_point())


def _captured(node: ir.Node) -> list[ir.Value]:
    """Return what the branches of a node read, all of which may be answered."""
    inner_nodes = (inner for graph in node_graphs(node) for inner in graph.all_nodes())
    return [value for inner in inner_nodes for value in inner.inputs if value is not None]


SMALLEST_BYTES = 4096
"""Tensors from this size on travel without values. Chosen: shapes, scales and biases, which libraries read, are
smaller or no burden."""

_ELSEWHERE = "elsewhere"


class WeightlessProto:
    """A serialized model whose large initializers have no values, and the tensors that have them."""

    def __init__(self, proto: onnx.ModelProto, weights: Mapping[str, ir.TensorProtocol]) -> None:
        """Hold both.

        Args:
            proto: The model; a library may change it.
            weights: By name, the tensors of the initializers without values.
        """
        self.proto = proto
        self.weights = weights


def to_weightless(model: ir.Model) -> WeightlessProto:
    """Return a model as a protobuf without the values of its large initializers; the model is not changed."""
    tensors: dict[str, tuple[ir.Value, ir.TensorProtocol]] = {}
    small: list[tuple[ir.Value, ir.ExternalTensor]] = []
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.dtype != ir.DataType.STRING and tensor.nbytes >= SMALLEST_BYTES:
            tensors[name] = (value, tensor)
        elif isinstance(tensor, ir.ExternalTensor):
            small.append((value, tensor))
    for graph in model.graphs():
        if graph is not model.graph:
            outside = ((value, value.const_value) for value in graph.initializers.values())
            small += [(value, tensor) for value, tensor in outside if isinstance(tensor, ir.ExternalTensor)]
    try:
        for value, tensor in small:
            # A library that writes the model elsewhere would not find its file there.
            value.const_value = ir.Tensor(read_once(tensor), dtype=tensor.dtype, name=tensor.name)
        for name, (value, tensor) in tensors.items():
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor(_ELSEWHERE, None, None, tensor.dtype, shape=shape, name=name)
        proto = ir.serde.serialize_model(model)
    finally:
        for value, tensor in (*tensors.values(), *small):
            value.const_value = tensor
    for initializer in proto.graph.initializer:
        if initializer.name in tensors:
            initializer.ClearField("data_location")
            initializer.ClearField("external_data")
    return WeightlessProto(proto, {name: tensor for name, (_, tensor) in tensors.items()})


def from_weightless(sent: WeightlessProto, returned: onnx.ModelProto) -> ir.Model:
    """Return the model a library made of a weightless one; initializers without values get their tensors back."""
    hollow = {initializer.name for initializer in returned.graph.initializer if _is_hollow(initializer, sent.weights)}
    for initializer in returned.graph.initializer:
        if initializer.name in hollow:
            initializer.data_location = onnx.TensorProto.EXTERNAL
            initializer.external_data.add(key="location", value=_ELSEWHERE)
    model = ir.serde.deserialize_model(returned)
    for name in hollow:
        model.graph.initializers[name].const_value = sent.weights[name]
    return model


@contextlib.contextmanager
def weights_read_on_demand(weights: Mapping[str, ir.TensorProtocol]) -> Iterator[None]:
    """Let ``onnx.numpy_helper.to_array`` give the values of initializers without values, for the time of the block.

    Each is read when it is asked for and not kept.

    Args:
        weights: By name, the tensors that have the values.
    """
    original = numpy_helper.to_array

    def to_array(tensor: onnx.TensorProto, *arguments: Any, **keywords: Any) -> Array:
        if _is_hollow(tensor, weights):
            return read_once(weights[tensor.name])
        return original(tensor, *arguments, **keywords)

    numpy_helper.to_array = to_array
    try:
        yield
    finally:
        numpy_helper.to_array = original


def read_once(tensor: ir.TensorProtocol) -> Array:
    """Return the values of a tensor without keeping the file they are in mapped, which would count as memory."""
    if not isinstance(tensor, ir.ExternalTensor):
        return np.asarray(tensor.numpy())
    values = np.array(tensor.numpy())
    with contextlib.suppress(BufferError):  # someone else still looks at the mapped values
        tensor.release()
    return values


def _is_hollow(tensor: onnx.TensorProto, weights: Mapping[str, ir.TensorProtocol]) -> bool:
    """Say whether an initializer is one of those that travel without values, and nobody gave it any."""
    return (
        tensor.name in weights
        and not tensor.HasField("raw_data")
        and not (tensor.float_data or tensor.int32_data or tensor.int64_data or tensor.double_data)
    )
