"""Reads files that another tool wrote, and merges duplicate metadata keys.

Some builds of ONNX Runtime copy the metadata of every node they fuse into the fused node, so that a key occurs several
times. Readers then keep one of the values, and ``onnx.checker`` refuses the file. Does not restore tags that are
missing.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from winml.modelkit.graph.files.graph_reading import checked_graph, graph_of
from winml.modelkit.graph.files.reading import read_structure
from winml.modelkit.graph.validity import refuse_cycles
from winml.modelkit.hierarchy import address
from winml.modelkit.metadata_keys import (
    DEPTH_KEY,
    MODULE_KEY,
    MODULES_KEY,
    NAMESPACE_KEY,
    SOURCE_KEY,
    TAG_KEY,
    TORCH_PREFIX,
)

__all__ = ["load_foreign", "merge_duplicate_keys", "read_foreign"]


def load_foreign(path: str | os.PathLike[str]) -> ir.Model:
    """Load a model another tool wrote, weights by reference, with every metadata key once.

    Raises:
        OSError: there is no such file.
        ValueError: it is not an ONNX graph.
    """
    proto = onnx.load(path, load_external_data=False)
    merge_duplicate_keys(proto)
    model = checked_graph(ir.serde.deserialize_model(proto))
    ir.external_data.set_base_dir(model.graph, Path(path).parent)
    return model


def read_foreign(path: Path) -> tuple[ir.Model, int]:
    """Read the structure of a model, no weights, with every metadata key once.

    Returns:
        The model, whose larger tensors have no values, and the number of nodes that had duplicate keys.

    Raises:
        ModelPathError: there is no such file.
        InputError: it is no ONNX model, or its graph has a cycle.
    """
    structure = read_structure(path)
    refuse_cycles(structure, path)
    repaired = merge_duplicate_keys(structure)
    return graph_of(structure, path), repaired


def merge_duplicate_keys(model: onnx.ModelProto) -> int:
    """Merge the duplicate metadata keys of every node, in place.

    Different tags become the tag of the common module, with source ``merged`` and the list of modules; ``carry_tags``
    completes the other keys. Of other keys the last value is kept; torch's keys are dropped where their values differ.

    Returns:
        The number of nodes that had duplicate keys.
    """
    repaired = 0
    for node in (
        *_all_nodes(model.graph.node),
        *_all_nodes(node for function in model.functions for node in function.node),
    ):
        keys = [entry.key for entry in node.metadata_props]
        if len(keys) == len(set(keys)):
            continue
        merged = _merged_metadata(node)
        del node.metadata_props[:]
        for key, value in merged.items():
            node.metadata_props.add(key=key, value=value)
        repaired += 1
    return repaired


def _merged_metadata(node: onnx.NodeProto) -> dict[str, str]:
    values: dict[str, list[str]] = defaultdict(list)
    for entry in node.metadata_props:
        values[entry.key].append(entry.value)
    merged = {
        key: key_values[-1]
        for key, key_values in values.items()
        if len(set(key_values)) == 1 or not key.startswith(TORCH_PREFIX)
    }
    if len(set(values[TAG_KEY])) < 2:
        return merged
    try:
        merged[TAG_KEY] = address.common_ancestor(values[TAG_KEY])
    except ValueError:
        # Not a valid tag; carrying the tags later finds the node untagged.
        del merged[TAG_KEY]
        return merged
    merged[SOURCE_KEY] = "merged"
    merged[MODULES_KEY] = json.dumps(sorted(set(values[MODULE_KEY])), ensure_ascii=False)
    for key in (DEPTH_KEY, MODULE_KEY, NAMESPACE_KEY):
        # Carrying the tags writes these from the original model, which knows the module of this tag.
        merged.pop(key, None)
    return merged


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and those of their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _all_nodes(attribute.g.node)
            for graph in attribute.graphs:
                yield from _all_nodes(graph.node)
