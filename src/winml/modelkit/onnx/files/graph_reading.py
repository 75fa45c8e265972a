"""Reading of ONNX files as graphs; errors name the file.

Errors of ``onnx_ir`` about a file are converted here only. Weights stay where they are.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir

from winml.modelkit.onnx.contexts import proto_nodes
from winml.modelkit.onnx.files.reading import (
    merge_node_keys,
    read_referring,
    read_structure,
    reading_graph,
    replace_metadata,
)
from winml.modelkit.onnx.files.stored_tensors import StoredTensor, StoredValues
from winml.modelkit.onnx.function_inlining import inline_module_functions
from winml.modelkit.onnx.map_types import deserialize_model
from winml.modelkit.onnx.validity import refuse_cycles
from winml.modelkit.tags.tagging import all_nodes, drop_damaged_tags


def graph_of(structure: onnx.ModelProto, path: Path) -> ir.Model:
    """Convert a structure read from ``path`` to a graph.

    Raises:
        InputError: the structure is no valid graph.
    """
    return reading_graph(path, lambda: _check_graph(deserialize_model(structure)))


def _check_graph(model: ir.Model) -> ir.Model:
    """Check the lazily read tensors of a model, which would otherwise fail inside a pass.

    Removes damaged tags in place.

    Raises:
        ValueError: a tensor has an invalid type or size.
    """
    nodes = list(all_nodes(model))
    for graph in model.graphs():
        for value in graph.initializers.values():
            _check_tensor(value.const_value)
    for node in nodes:
        for attribute in node.attributes.values():
            if attribute.is_ref():
                continue
            if attribute.type == ir.AttributeType.TENSOR:
                _check_tensor(attribute.value)
            elif attribute.type == ir.AttributeType.TENSORS:
                for tensor in attribute.value:
                    _check_tensor(tensor)
    drop_damaged_tags(nodes)
    return model


def _check_tensor(tensor: Any) -> None:
    """Refuse a tensor with an invalid type, shape or size.

    Raises:
        ValueError: the message names the tensor.
    """
    if tensor is None:
        return
    name, dtype, sizes = tensor.name, tensor.dtype, tuple(tensor.shape)
    if dtype == ir.DataType.UNDEFINED:
        raise ValueError(f"tensor {name!r} has no element type")
    if any(isinstance(size, int) and size < 0 for size in sizes):
        raise ValueError(f"tensor {name!r} has the shape {list(sizes)}")
    stored = tensor.raw.raw_data if isinstance(tensor, ir.TensorProtoTensor) else b""
    if stored and len(stored) != tensor.nbytes:
        raise ValueError(f"tensor {name!r} has {len(stored)} bytes, but its shape {list(sizes)} needs {tensor.nbytes}")
    if isinstance(tensor, ir.ExternalTensor) and ((tensor.offset or 0) < 0 or (tensor.length or 0) < 0):
        raise ValueError(f"tensor {name!r} lies at byte {tensor.offset} of its data file, with length {tensor.length}")


class MergedKeys(NamedTuple):
    """Merged duplicate keys of a file; false if there were none."""

    nodes: int
    """Number of nodes that had a key several times."""
    model_keys: tuple[str, ...]
    """Keys that the model had several times."""

    def __bool__(self) -> bool:
        """Return True if anything was merged."""
        return bool(self.nodes or self.model_keys)

    def notes(self) -> tuple[str, ...]:
        """Describe the merged keys, one sentence each."""
        nodes = (f"{self.nodes} node(s) had a metadata key several times: merged.",) if self.nodes else ()
        keys = ", ".join(self.model_keys)
        return (*nodes, f"The model had {keys} several times: the last was used.") if keys else nodes


def merge_duplicate_keys(model: onnx.ModelProto) -> MergedKeys:
    """Merge the duplicate metadata keys of the model and of every node, in place.

    Some builds of ONNX Runtime copy the metadata of all fused nodes into the new node, so that a key occurs several
    times; readers then use one of the values.

    Different tags become the tag of the common module, with source ``merged``, the list of modules, and the module path
    if the file records it. For other keys the last value is used; torch's keys are dropped if their values differ.
    """
    model_counts = Counter(entry.key for entry in model.metadata_props)
    model_keys = tuple(key for key, count in model_counts.items() if count > 1)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if model_keys:
        replace_metadata(model, metadata)
    return MergedKeys(merge_node_keys(proto_nodes(model), metadata), model_keys)


def load_foreign(path: str | os.PathLike[str]) -> ir.Model:
    """Load a model written by another tool, weights by reference, with unique metadata keys.

    Raises:
        OSError: the file does not exist.
        ValueError: the file is not an ONNX graph.
    """
    proto = onnx.load(path, load_external_data=False)
    inline_module_functions(proto)
    return _build_graph(proto, Path(path).parent)


def _build_graph(proto: onnx.ModelProto, folder: Path) -> ir.Model:
    """Convert a model with data files in a folder to a graph; duplicate metadata keys are merged in ``proto``."""
    merge_duplicate_keys(proto)
    model = _check_graph(deserialize_model(proto))
    ir.external_data.set_base_dir(model.graph, folder)
    return model


def load_by_reference(path: Path) -> ir.Model:
    """Load a model written by another tool; embedded weights also stay in the file until they are read.

    The file must not change while the model is in use.

    Raises:
        ModelPathError: the file does not exist.
        InputError: the file is no ONNX model.
        ValueError: the file is not an ONNX graph.
    """
    model = _build_graph(read_referring(path), path.parent)
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and tensor.location == path.name:
                value.const_value = _convert_inner_tensor(path, tensor)
    return model


def _convert_inner_tensor(path: Path, tensor: ir.ExternalTensor) -> ir.TensorProtocol:
    """Convert a tensor inside a model file to a tensor read on demand, since unaligned data cannot be mapped.

    Raises:
        ValueError: its size does not match its shape.
    """
    if tensor.length != tensor.nbytes:
        raise ValueError(
            f"tensor {tensor.name!r} has {tensor.length} bytes, and its shape {list(tensor.shape.numpy())} needs "
            f"{tensor.nbytes}"
        )
    if tensor.dtype.bitwidth % 8:
        return tensor  # several values in a byte
    values = StoredValues(path, tensor.offset or 0, tensor.dtype, tuple(tensor.shape.numpy()), tensor.name)
    return StoredTensor(values, name=tensor.name)


def read_foreign(path: Path) -> tuple[ir.Model, MergedKeys]:
    """Read the structure of a model without weights, with unique metadata keys.

    Returns:
        The model, whose larger tensors have no values, and the merged keys.

    Raises:
        ModelPathError: the file does not exist.
        InputError: the file is no ONNX model, or its graph has a cycle.
    """
    structure = read_structure(path)
    refuse_cycles(structure, path)
    merged = merge_duplicate_keys(structure)
    return graph_of(structure, path), merged
