"""Reads the shapes of the values of an ONNX file.

Uses the declared shapes, and ONNX's shape inference where a counted operator lacks one. Reads no weights; a shape that
depends on the values of a weight stays unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from winml.modelkit.errors import first_line
from winml.modelkit.inspect.module_costs import Shape, ShapeTable, is_counted
from winml.modelkit.inspect.onnx_contents import PlacedNode

__all__ = ["declared_shape", "read_shapes"]


def read_shapes(model: onnx.ModelProto, nodes: Sequence[PlacedNode]) -> tuple[ShapeTable, list[str]]:
    """Return the shapes of the values of the main graph, and a note where inference failed.

    Args:
        model: The model, with or without the values of its weights.
        nodes: Its nodes.
    """
    shapes = _declared_shapes(model.graph)
    needed_names = {
        name
        for node in nodes
        if node.place == "graph" and is_counted(node.proto)
        for name in (*node.proto.input, *node.proto.output)
        if name
    }
    if needed_names <= shapes.keys():
        return shapes, []
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        return shapes, [f"ONNX's shape inference failed, so some operations are not counted: {first_line(error)}"]
    return {**_declared_shapes(inferred.graph), **shapes}, []


def _declared_shapes(graph: onnx.GraphProto) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    shapes.update({sparse.values.name: tuple(sparse.dims) for sparse in graph.sparse_initializer})
    values: Iterable[onnx.ValueInfoProto] = (*graph.input, *graph.output, *graph.value_info)
    for value in values:
        shape = declared_shape(value.type)
        if shape is not None:
            shapes[value.name] = shape
    return shapes


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
