"""Weights of a graph: weights of integer operators, copies of transposed weights, and weights read only for sizes.

Tools that need protos get a proto without the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.onnx.map_types import serialize_model
from winml.modelkit.tags.tagging import node_graphs

QUANTIZED_OPERATORS = frozenset({
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul",
    "QLinearConv", "MatMulNBits", "GatherBlockQuantized", "QAttention", "QGemm", "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat", "DynamicQuantizeLSTM", "QMoE",
})  # fmt: skip
"""Operators that only a quantized graph has."""
ROUNDING_OPERATORS = QUANTIZED_OPERATORS - {"DequantizeLinear", "GatherBlockQuantized", "MatMulNBits", "QMoE"}
"""Operators that round activations or read rounded activations; the remaining operators have quantized weights only."""


_PRODUCTS = ("MatMul", "Gemm")


def add_initializer(graph: ir.Graph, tensor: ir.TensorProtocol, name: str | None = None) -> ir.Value:
    """Add a tensor to the initializers of a graph, under ``name`` or the tensor's name; return its value."""
    value = ir.Value(
        name=name or tensor.name,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(tensor.shape.numpy()),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value


def drop_unused_initializers(graph: ir.Graph, values: Iterable[ir.Value]) -> None:
    """Remove unused initializers among the values, in place."""
    for value in values:
        if value.is_initializer() and not (value.uses() or value.is_graph_input() or value.is_graph_output()):
            graph.initializers.pop(value.name or "", None)


def computed_tensor(
    compute_values: Callable[[], Array], dtype: ir.DataType, shape: Iterable[int], name: str
) -> ir.LazyTensor:
    """Return a tensor with values computed on each read, and not stored."""

    def compute() -> ir.TensorProtocol:
        return ir.Tensor(np.asarray(compute_values(), order="C"), dtype=dtype, name=name)

    return ir.LazyTensor(compute, dtype, ir.Shape(shape), name=name)


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer that is no graph input; `None` for any other value."""
    if value is None or not value.is_initializer() or value.is_graph_input():
        return None
    return value.const_value


def transposed_weight(node: ir.Node) -> ir.Value | None:
    """Return the 2-D initializer read by a product as transposed right operand; `None` without a transposed weight."""
    value = node.inputs[1] if node.op_type in _PRODUCTS and not node.domain else None
    maker = value.producer() if value is not None else None
    if maker is None or maker.op_type != "Transpose" or maker.domain:
        return None
    weight, order = maker.inputs[0], maker.attributes.get_ints("perm", (1, 0))
    tensor = constant_tensor(weight)
    return weight if tensor is not None and len(tensor.shape) == 2 and tuple(order) == (1, 0) else None


def give_products_own_weights(model: ir.Model, names: Container[str | None]) -> None:
    """Replace the Transpose of a weight before the named products by a transposed initializer, in place.

    Before and after::

        w → Gather,  w → Transpose → MatMul (named)      →      w → Gather,  wᵀ → MatMul

    A transposed weight is computed on each read, so the table is not copied.

    Args:
        model: The model.
        names: Names of nodes of the main graph; other nodes stay, and so does a Transpose with other readers.
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
        transposed_value = node.inputs[1]
        assert transposed_value is not None  # transposed_weight looked at it
        transpose = transposed_value.producer()
        node.replace_input_with(1, created[weight])
        if transpose is not None and not transposed_value.uses() and not transposed_value.is_graph_output():
            graph.remove(transpose, safe=True)
    drop_unused_initializers(graph, created)


def transposed_tensor(tensor: ir.TensorProtocol, name: str) -> ir.LazyTensor:
    """Return the transpose of a 2-D tensor, computed on each read."""
    return computed_tensor(lambda: read_once(tensor).T, tensor.dtype, tensor.shape.numpy()[::-1], name)


_ASKS_SIZES = frozenset({"Shape", "Size"})


def weight_bytes(model: ir.Model) -> int:
    """Return the bytes of all initializers, each counted once; no value is read."""
    tensors = [value.const_value for graph in model.graphs() for value in graph.initializers.values()]
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors if tensor is not None}.values())


def idle_weight_bytes(model: ir.Model) -> int:
    """Return the size in bytes of the weights with values that reach no output of the graph, except as sizes.

    A graph may compute values only to read their sizes.
    """
    read_names: set[str] = set()
    visited: set[ir.Node] = set()
    waiting = list(model.graph.outputs)
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if node is None:
            read_names.add(value.name or "")
        elif node not in visited and node.op_type not in _ASKS_SIZES:
            visited.add(node)
            waiting += [input_value for input_value in node.inputs if input_value is not None]
            waiting += _captured_values(node)
    tensors = (value.const_value for name, value in model.graph.initializers.items() if name not in read_names)
    # Shapes and axes are small compared with weights.
    return sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.dtype.is_floating_point())


def _captured_values(node: ir.Node) -> list[ir.Value]:
    """Return the values read by the subgraphs of a node, any of which may reach an output."""
    inner_nodes = (inner for graph in node_graphs(node) for inner in graph.all_nodes())
    return [value for inner in inner_nodes for value in inner.inputs if value is not None]


SMALLEST_BYTES = 4096
"""Minimum size of tensors omitted from protos. Chosen: shapes, scales and biases, which libraries read, are smaller."""

_ELSEWHERE = "elsewhere"


class WeightlessProto(NamedTuple):
    """A serialized model whose large initializers have no values, and the omitted tensors."""

    proto: onnx.ModelProto
    weights: Mapping[str, ir.TensorProtocol]
    """Name → tensor of each initializer without values."""


def to_weightless(model: ir.Model, *, reads_none: bool = False) -> WeightlessProto:
    """Serialize a model without the values of its large initializers; the model is not changed.

    Args:
        model: The model.
        reads_none: Also omit the values of smaller initializers that would have to be read or computed.
    """
    weights: dict[str, ir.TensorProtocol] = {}
    replaced: dict[ir.Value, ir.TensorProtocol] = {}
    for value in (value for graph in model.graphs() for value in graph.initializers.values()):
        tensor, name = value.const_value, value.name or ""
        if tensor is None or tensor.dtype == ir.DataType.STRING:
            continue
        is_omitted = tensor.nbytes >= SMALLEST_BYTES or (
            reads_none and isinstance(tensor, (ir.ExternalTensor, ir.LazyTensor))
        )
        if value.graph is model.graph and is_omitted:
            weights[name] = tensor
            replaced[value] = placed_tensor(value, tensor, _ELSEWHERE)
        elif isinstance(tensor, ir.ExternalTensor):
            # A library that writes the model elsewhere would not find its file there.
            replaced[value] = ir.Tensor(read_once(tensor), dtype=tensor.dtype, name=tensor.name)
    with replaced_tensors(replaced):
        proto = serialize_model(model)
    for initializer in proto.graph.initializer:
        if initializer.name in weights:
            initializer.ClearField("data_location")
            initializer.ClearField("external_data")
    return WeightlessProto(proto, weights)


def file_bytes(model: ir.Model) -> int:
    """Return the bytes of a model with its graph, metadata and weights when written; large weights are not read."""
    proto, weights = to_weightless(model)
    return int(proto.ByteSize()) + sum(
        tensor.nbytes for tensor in {id(tensor): tensor for tensor in weights.values()}.values()
    )


@contextlib.contextmanager
def replaced_tensors(tensors: Mapping[ir.Value, ir.TensorProtocol]) -> Iterator[None]:
    """Replace the tensors of initializers for the time of the block."""
    originals = {value: value.const_value for value in tensors}
    try:
        for value, tensor in tensors.items():
            value.const_value = tensor
        yield
    finally:
        for value, original in originals.items():
            value.const_value = original


def placed_tensor(
    value: ir.Value, tensor: ir.TensorProtocol, location: str, offset: int | None = None, length: int | None = None
) -> ir.ExternalTensor:
    """Return a tensor for an initializer that refers to bytes in a data file.

    Args:
        value: The initializer, for the name.
        tensor: Its tensor, for type and shape.
        location: Name of the data file.
        offset: Position of the bytes; `None`: the start.
        length: Number of bytes; `None`: by type and shape.
    """
    return ir.ExternalTensor(
        location,
        offset,
        length,
        tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=value.name or "",
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
    )


def read_once(tensor: ir.TensorProtocol) -> Array:
    """Return the values of a tensor, and unmap its file, which would count as memory."""
    if not isinstance(tensor, ir.ExternalTensor):
        return np.asarray(tensor.numpy())
    values = np.array(tensor.numpy())
    with contextlib.suppress(BufferError):  # someone else still looks at the mapped values
        tensor.release()
    return values
