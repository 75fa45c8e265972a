"""Hands the structure of a model to a library that works on protobufs, and takes it back, without its weights.

Large initializers travel as tensors of the right type and shape without values, so that a library may copy, write and
read the model as it likes. What still stands for a weight afterwards gets its tensor back, by reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from winml.modelkit.arrays import Array

__all__ = ["WeightlessProto", "from_weightless", "read_once", "to_weightless", "weights_read_on_demand"]

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
