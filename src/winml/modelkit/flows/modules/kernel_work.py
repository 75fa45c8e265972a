"""Charges the kernels that stand for nodes of several modules to the module that does the work.

ONNX Runtime fuses across modules: a convolution takes in the batch norm and the activation behind it. The tag of such a
node is that of the module around all of them; here it becomes that of the convolution. Works on the graph as executed,
in memory; no file keeps these tags.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import onnx
import onnx_ir as ir

from winml.modelkit.hierarchy.carry.carrying import carry_tags
from winml.modelkit.hierarchy.coverage import all_nodes
from winml.modelkit.hierarchy.tagging import NodeTag, clear_tag, read_tag, write_tag
from winml.modelkit.inspect.macs import ShapeTable, count_macs
from winml.modelkit.inspect.onnx_contents import read_contents
from winml.modelkit.inspect.value_shapes import read_shapes
from winml.modelkit.measure.fused_kernels import NodeWork, working_module
from winml.modelkit.metadata_keys import MODULE_KEY, MODULES_KEY

__all__ = ["charge_fused_kernels"]

_LABEL = "#"
"""Marks the position of a node where a module path stands otherwise, which never begins with it."""


def charge_fused_kernels(
    measured_file: onnx.ModelProto,
    original: ir.Model,
    executed_file: onnx.ModelProto,
    executed: ir.Model,
    *,
    modules: Mapping[str, str],
    sizes: Mapping[str, Sequence[int]],
) -> dict[str, frozenset[str]]:
    """Give each node that stands for several modules the tag of the one that does the work, in place.

    Args:
        measured_file: The file that was run.
        original: The same, every node with the tag of its module.
        executed_file: The graph as ONNX Runtime executed it.
        executed: The same, with carried tags; changed in place.
        modules: Module path → tag.
        sizes: Shape of each input as it was measured.

    Returns:
        Node name → tags of the other modules it stands for.
    """
    original_nodes = list(all_nodes(original))
    if not any(MODULES_KEY in node.metadata_props for node in (*original_nodes, *all_nodes(executed))):
        return {}
    works = _node_works(original_nodes, modules, _measured_shapes(measured_file, sizes))
    sources = _source_positions(original_nodes, measured_file, executed_file)
    others: dict[str, frozenset[str]] = {}
    for node in all_nodes(executed):
        carried = read_tag(node)
        positions = sources.get(node.name or "", ())
        paths = [path for holder in (node, *(original_nodes[p] for p in positions)) for path in _listed_modules(holder)]
        if carried is None or not paths or not node.name:
            continue
        fused = [work for position in positions if (work := works[position]) is not None]
        tag = working_module(fused) or carried.tag
        others[node.name] = frozenset(modules[path] for path in paths if path in modules) - {tag}
        path = next((path for path, module_tag in modules.items() if module_tag == tag), carried.module)
        write_tag(node, NodeTag(tag, path, "merged"))
    return others


def _listed_modules(node: ir.Node) -> list[str]:
    """Return the paths of the modules a node stands for, where they are several; none where the list is damaged."""
    try:
        paths = json.loads(node.metadata_props.get(MODULES_KEY, "[]"))
    except (ValueError, RecursionError):
        return []
    return [path for path in paths if isinstance(path, str)] if isinstance(paths, list) else []


def _measured_shapes(file: onnx.ModelProto, sizes: Mapping[str, Sequence[int]]) -> ShapeTable:
    """Return the shapes of values, with the measured sizes where a dimension is open."""
    shapes, _ = read_shapes(file, read_contents(file).nodes)
    measured: dict[str, int] = {}
    for name, actual in sizes.items():
        measured.update({str(size): found for size, found in zip(shapes.get(name, ()), actual, strict=False)})
    return {
        name: tuple(measured.get(size, size) if isinstance(size, str) else size for size in shape)
        for name, shape in shapes.items()
    }


def _node_works(nodes: Iterable[ir.Node], modules: Mapping[str, str], shapes: ShapeTable) -> list[NodeWork | None]:
    """Return what each node of the original computes; None for a node of no module."""
    works: list[NodeWork | None] = []
    for node in nodes:
        tag = read_tag(node)
        if tag is None:
            works.append(None)
            continue
        macs = count_macs(ir.serde.serialize_node(node), shapes)
        owner = _weight_owner(node, modules) if macs != 0 else None
        works.append(NodeWork(owner or tag.tag, macs, _count_elements(node, shapes)))
    return works


def _count_elements(node: ir.Node, shapes: ShapeTable) -> int | None:
    """Return how many values a node makes; None where that is unknown."""
    total = 0
    for value in node.outputs:
        sizes = shapes.get(value.name or "", (None,)) if value.name else ()
        if not all(isinstance(size, int) for size in sizes):
            return None
        total += math.prod(size for size in sizes if isinstance(size, int)) if value.name else 0
    return total


def _weight_owner(node: ir.Node, modules: Mapping[str, str]) -> str | None:
    """Return the module whose weight a node of several modules reads first, by its name; None for other nodes.

    Tools put words before the name of a weight they change: ``ConvBnFusion_W_conv1.weight``.
    """
    listed = sorted((path for path in _listed_modules(node) if path and path in modules), key=len, reverse=True)
    weights = [value.name or "" for value in node.inputs if value is not None and value.is_initializer()]
    owners = (path for name in weights for path in listed if re.search(rf"(^|_){re.escape(path)}\.", name))
    owner = next(owners, None)
    return None if owner is None else modules[owner]


def _source_positions(
    original_nodes: Iterable[ir.Node], measured_file: onnx.ModelProto, executed_file: onnx.ModelProto
) -> dict[str, tuple[int, ...]]:
    """Return for each executed node, by name, the positions of the original nodes it stands for.

    Carrying finds the modules a node stands for. Here every node of a copy of the original is a module of its own.
    """
    labelled, executed = ir.serde.deserialize_model(measured_file), ir.serde.deserialize_model(executed_file)
    for position, (node, original_node) in enumerate(zip(all_nodes(labelled), original_nodes, strict=True)):
        tag = read_tag(original_node)
        clear_tag(node)
        if tag is not None:
            write_tag(node, NodeTag(f"{tag.tag}/{position}", f"{_LABEL}{position}", "direct"))
    for node in all_nodes(executed):
        clear_tag(node)
    carry_tags(labelled, executed)
    return {node.name: _labels_of(node) for node in all_nodes(executed) if node.name}


def _labels_of(node: ir.Node) -> tuple[int, ...]:
    labels = _listed_modules(node) or [node.metadata_props.get(MODULE_KEY, "")]
    if not all(label.startswith(_LABEL) for label in labels):
        return ()
    return tuple(int(label.removeprefix(_LABEL)) for label in labels)
