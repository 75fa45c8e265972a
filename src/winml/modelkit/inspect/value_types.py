"""Reads the element types and shapes of the values of a graph, and infers those that the file does not declare."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import onnx

from winml.modelkit.errors import first_line
from winml.modelkit.inspect.contents import PlacedNode, dtype_name
from winml.modelkit.inspect.macs import Shape, ShapeTable, is_counted


@dataclass(frozen=True)
class ValueTypes:
    """Element types and shapes of the values of a main graph."""

    dtypes: dict[str, str]
    """Element type of each tensor by its name."""
    shapes: dict[str, Shape]
    """Shape of each tensor by its name; a tensor of unknown rank is absent."""


def read_value_types(
    model: onnx.ModelProto, needed: AbstractSet[str], consequence: str
) -> tuple[ValueTypes, tuple[str, ...]]:
    """Return the element types and shapes of the values of the main graph, and a note if inference failed.

    Args:
        model: The model, with or without the values of its weights.
        needed: Names of values; shapes are inferred if the file does not declare all of them.
        consequence: What a failed inference means, for the note.
    """
    declared = _declared_types(model.graph)
    if needed <= declared.shapes.keys():
        return declared, ()
    try:
        inferred = _declared_types(onnx.shape_inference.infer_shapes(model, data_prop=True).graph)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        return declared, (f"ONNX's shape inference failed, so {consequence}: {first_line(error)}",)
    return ValueTypes(inferred.dtypes | declared.dtypes, inferred.shapes | declared.shapes), ()


def read_shapes(model: onnx.ModelProto, nodes: Iterable[PlacedNode]) -> tuple[ShapeTable, tuple[str, ...]]:
    """Return the shapes that the operations of the main graph are counted from, and a note if inference failed.

    Args:
        model: The model, with or without the values of its weights.
        nodes: Its nodes.
    """
    protos = [node.proto for node in nodes if node.place == "graph" and is_counted(node.proto)]
    needed = {name for proto in protos for name in (*proto.input, *proto.output) if name}
    types, notes = read_value_types(model, needed, "some operations are not counted")
    return types.shapes, notes


def _declared_types(graph: onnx.GraphProto) -> ValueTypes:
    tensors = [(tensor, tensor.dims) for tensor in graph.initializer]
    tensors += [(sparse.values, sparse.dims) for sparse in graph.sparse_initializer]
    types = ValueTypes(
        {tensor.name: dtype_name(tensor.data_type) for tensor, _ in tensors},
        {tensor.name: tuple(dims) for tensor, dims in tensors},
    )
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.WhichOneof("value") == "tensor_type":
            types.dtypes.setdefault(value.name, dtype_name(value.type.tensor_type.elem_type))
        if (shape := declared_shape(value.type)) is not None:
            types.shapes[value.name] = shape
    return types


def declared_shape(declared: onnx.TypeProto) -> Shape | None:
    """Return the shape of a tensor type: sizes, names of open dimensions, None for an open dimension without a name.

    Returns:
        The shape; None where the rank is unknown, or it is no tensor.
    """
    kind = declared.WhichOneof("value")
    tensor = declared.sparse_tensor_type if kind == "sparse_tensor_type" else declared.tensor_type
    if kind not in ("tensor_type", "sparse_tensor_type") or not tensor.HasField("shape"):
        return None
    return tuple(
        dimension.dim_value if dimension.HasField("dim_value") else dimension.dim_param or None
        for dimension in tensor.shape.dim
    )
