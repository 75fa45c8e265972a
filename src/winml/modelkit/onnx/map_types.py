"""Conversion between models with maps and graphs of onnx_ir, which has no type of maps.

A value whose type contains a map, such as the sequence of maps that ``ZipMap`` returns, has no type in a graph: ONNX
Runtime infers it. The type stays with the value, and is written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import onnx
import onnx_ir as ir

from winml.modelkit.onnx.contents import subgraphs
from winml.modelkit.onnx.sparse_tensors import make_dense

_KEY = "type with a map"
"""Key of ``ir.Value.meta``, which no file contains: the type of a value, a ``TypeProto``."""


def deserialize_model(proto: onnx.ModelProto) -> ir.Model:
    """Convert a model to a graph; types with maps are removed from the model and remembered.

    Sparse tensors of the model become dense.

    Raises:
        ValueError: the model is no valid graph. Other errors of onnx_ir occur as well.
    """
    types = {value.name: _take_type(value) for value in _values(proto.graph) if _contains_map(value.type)}
    make_dense(proto)
    model = ir.serde.deserialize_model(proto)
    if types:
        for value in (*model.graph.inputs, *model.graph.outputs):
            if value.name in types:
                value.meta[_KEY] = types[value.name]
    return model


def serialize_model(model: ir.Model) -> onnx.ModelProto:
    """Convert a graph to a model, with the types of maps."""
    return restore_map_types(ir.serde.serialize_model(model), model)


def restore_map_types(proto: onnx.ModelProto, model: ir.Model) -> onnx.ModelProto:
    """Set the types of maps of a serialized graph, in place, and return it; onnx crashes on inputs without a type."""
    types = {
        value.name: value.meta[_KEY] for value in (*model.graph.inputs, *model.graph.outputs) if _KEY in value.meta
    }
    for value in (*proto.graph.input, *proto.graph.output) if types else ():
        if value.name in types:
            value.type.CopyFrom(types[value.name])
    return proto


def save_model(model: ir.Model, path: Path, data_name: str) -> None:
    """Write a graph with the types of maps, its weights into a data file beside it."""
    ir.save(model, path, external_data=data_name)
    if any(_KEY in value.meta for value in (*model.graph.inputs, *model.graph.outputs)):
        onnx.save(restore_map_types(onnx.load(path, load_external_data=False), model), path)


class DetachedMaps(NamedTuple):
    """Values with maps that were taken out of a graph."""

    makers: Mapping[int, ir.Node]
    """Position among the outputs of the graph → node of a map."""
    inputs: Mapping[int, onnx.TypeProto]
    """Position among the inputs of the graph → type of a map."""


def detach_maps(model: ir.Model) -> DetachedMaps:
    """Remove the nodes whose outputs are maps and outputs of the graph, in place; their inputs become outputs instead.

    Inputs that are maps get the type of a tensor: without a type, onnx crashes.
    """
    outputs, makers = model.graph.outputs, dict[int, ir.Node]()
    for position, value in enumerate(outputs):
        maker = value.producer()
        source = None if maker is None or not maker.inputs else maker.inputs[0]
        if _KEY in value.meta and maker is not None and source is not None and len(maker.outputs) == 1:
            outputs[position] = source
            model.graph.remove(maker)
            makers[position] = maker
    inputs = {number: value.meta[_KEY] for number, value in enumerate(model.graph.inputs) if _KEY in value.meta}
    for number in inputs:
        model.graph.inputs[number].type = ir.TensorType(ir.DataType.FLOAT)
    return DetachedMaps(makers, inputs)


def attach_maps(model: ir.Model, detached: DetachedMaps, imports: Mapping[str, int]) -> None:
    """Insert the removed nodes and types of maps, in place; the graph may have been replaced since.

    Args:
        model: The model.
        detached: The nodes and types.
        imports: Opsets of the model before; those of the nodes may have been removed as unused.
    """
    for number, map_type in detached.inputs.items():
        value = model.graph.inputs[number]
        value.type, value.meta[_KEY] = None, map_type
    for position, maker in detached.makers.items():
        model.opset_imports.setdefault(maker.domain, imports[maker.domain])
        maker.replace_input_with(0, model.graph.outputs[position])
        model.graph.append(maker)
        model.graph.outputs[position] = maker.outputs[0]


def _take_type(value: onnx.ValueInfoProto) -> onnx.TypeProto:
    """Return the type of a value, and remove it, in place."""
    taken = onnx.TypeProto()
    taken.CopyFrom(value.type)
    value.ClearField("type")
    return taken


def _values(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """Yield the values of a graph and its subgraphs that have a type."""
    yield from (*graph.input, *graph.output, *graph.value_info)
    for node in graph.node:
        for subgraph in subgraphs(node):
            yield from _values(subgraph)


def _contains_map(value_type: onnx.TypeProto) -> bool:
    """Return True for a map, and for a sequence or an optional of maps."""
    kind = value_type.WhichOneof("value")
    if kind in ("sequence_type", "optional_type"):
        return _contains_map(getattr(value_type, kind).elem_type)
    return bool(kind == "map_type")
