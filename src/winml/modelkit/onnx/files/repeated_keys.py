"""Merging of metadata keys that occur several times."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import onnx

from winml.modelkit import metadata_keys
from winml.modelkit.onnx.contexts import proto_nodes
from winml.modelkit.tags import address
from winml.modelkit.tags.selector import recorded_modules


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
        _replace_metadata(model, metadata)
    return MergedKeys(merge_node_keys(proto_nodes(model), metadata), model_keys)


def merge_node_keys(nodes: Iterable[onnx.NodeProto], metadata: Mapping[str, str]) -> int:
    """Merge the duplicate metadata keys of nodes, in place; return the number of nodes that had any.

    Args:
        nodes: The nodes.
        metadata: Metadata of the model.
    """
    repeated = [node for node in nodes if len({entry.key for entry in node.metadata_props}) < len(node.metadata_props)]
    modules = {module.tag: module.path for module in recorded_modules(metadata) or ()} if repeated else {}
    for node in repeated:
        _replace_metadata(node, _merge_metadata(node, modules))
    return len(repeated)


def _replace_metadata(holder: onnx.ModelProto | onnx.NodeProto, metadata: Mapping[str, str]) -> None:
    """Replace all metadata of a model or a node, in place."""
    del holder.metadata_props[:]
    for key, value in metadata.items():
        holder.metadata_props.add(key=key, value=value)


def _merge_metadata(node: onnx.NodeProto, modules: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a node with each key once; different tags become the tag of the common module."""
    values: dict[str, list[str]] = defaultdict(list)
    for entry in node.metadata_props:
        values[entry.key].append(entry.value)
    merged = {
        key: key_values[-1]
        for key, key_values in values.items()
        if len(set(key_values)) == 1 or not key.startswith(metadata_keys.TORCH_PREFIX)
    }
    if len(set(values[metadata_keys.TAG_KEY])) < 2:
        return merged
    try:
        tag = merged[metadata_keys.TAG_KEY] = address.common_ancestor(values[metadata_keys.TAG_KEY])
    except ValueError:
        # Not a valid tag; carrying the tags later finds the node untagged.
        del merged[metadata_keys.TAG_KEY]
        return merged
    merged[metadata_keys.SOURCE_KEY] = "merged"
    merged[metadata_keys.MODULES_KEY] = json.dumps(sorted(set(values[metadata_keys.MODULE_KEY])), ensure_ascii=False)
    for key in (metadata_keys.DEPTH_KEY, metadata_keys.MODULE_KEY, metadata_keys.NAMESPACE_KEY):
        merged.pop(key, None)
    if tag in modules:
        # If the file does not record it, the transfer of tags writes it from the original model.
        merged[metadata_keys.MODULE_KEY] = modules[tag]
        merged[metadata_keys.DEPTH_KEY] = str(address.depth(tag))
    return merged
