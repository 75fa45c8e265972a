"""Inlining of module functions into the graph, with the original names, tags and order of nodes.

onnx_ir's inliner does the work. The file adds metadata relative to the call, for functions with several calls, and a
record of the remaining differences. Functions of other domains stay.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from winml.modelkit.metadata_keys import (
    FUNCTION_CALL_KEY,
    FUNCTION_DOMAIN,
    FUNCTION_NODE_KEY,
    FUNCTIONS_KEY,
    MODULE_KEY,
    NAMESPACE_KEY,
    RELATIVE_KEY,
    TAG_KEY,
)
from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.onnx.map_types import deserialize_model
from winml.modelkit.options import JsonError, load_metadata
from winml.modelkit.tags.tagging import node_graphs

TAG, MODULE, NAMESPACE = "{tag}", "{module}", "{namespace}"
"""Placeholders for values of the call in relative metadata."""
_DIGITS = 16
"""Hexadecimal digits of a digest. Chosen: enough to detect a changed graph, no protection."""
SCOPE_START = "/"
"""Prefix of names of nodes and values in a shared function that are appended to the name of the call."""


def module_functions(model: onnx.ModelProto) -> list[onnx.FunctionProto]:
    """Return the functions of a file that are modules."""
    return [function for function in model.functions if function.domain == FUNCTION_DOMAIN]


def inline_module_functions(model: onnx.ModelProto) -> int:
    """Inline the modules written as functions, in place; weights and the rest of the file stay unchanged.

    Returns:
        The number of inlined functions.

    Raises:
        ValueError: the functions are damaged. Other errors of onnx_ir about a graph occur as well.
    """
    functions = module_functions(model)
    if not functions:
        return 0
    flat = deserialize_model(_replace_weights_by_inputs(model))
    inline_calls(flat)
    restore_recorded(flat)
    graph = ir.serde.serialize_model(flat).graph
    created = {name for node in graph.node for name in node.output}
    declared = [value for value in model.graph.value_info if value.name not in created]
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(graph.node)
    model.graph.value_info.extend([*declared, *(value for value in graph.value_info if value.name in created)])
    _replace_entries(model.functions, [function for function in model.functions if function.domain != FUNCTION_DOMAIN])
    _replace_entries(model.opset_import, [entry for entry in model.opset_import if entry.domain != FUNCTION_DOMAIN])
    _replace_entries(model.metadata_props, [entry for entry in model.metadata_props if entry.key != FUNCTIONS_KEY])
    return len(functions)


def _replace_entries(field: Any, entries: Sequence[Any]) -> None:
    """Replace the entries of a repeated field by copies of other entries, in place."""
    copies = [type(entry).FromString(entry.SerializeToString()) for entry in entries]
    del field[:]
    field.extend(copies)


def _replace_weights_by_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the nodes and functions of a model, with weights as inputs."""
    bare = onnx.ModelProto(ir_version=max(model.ir_version, 10))
    for field in ("opset_import", "functions", "metadata_props"):
        getattr(bare, field).extend(getattr(model, field))
    for field in ("node", "input", "output", "value_info"):
        getattr(bare.graph, field).extend(getattr(model.graph, field))
    input_names = {value.name for value in model.graph.input}
    tensors = (*model.graph.initializer, *(sparse.values for sparse in model.graph.sparse_initializer))
    for name in dict.fromkeys(tensor.name for tensor in tensors):
        if name not in input_names:
            bare.graph.input.add().name = name
    return bare


def inline_calls(model: ir.Model) -> None:
    """Inline every function of the domain ``winml.module``, in place, outermost first.

    Raises:
        ValueError: functions call themselves, or import other opsets than the model.
    """
    while True:
        ours = {key: function for key, function in model.functions.items() if key[0] == FUNCTION_DOMAIN}
        called = {node.op_identifier() for function in ours.values() for node in function.all_nodes()}
        outermost = {key: function for key, function in ours.items() if key not in called}
        if not outermost:
            if ours:
                raise ValueError(f"functions call themselves: {', '.join(key[1] for key in ours)}")
            break
        _inline_functions(model, outermost)
    model.opset_imports.pop(FUNCTION_DOMAIN, None)


def _inline_functions(model: ir.Model, functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> None:
    """Inline functions called only by the main graph, in place, and restore names and metadata."""
    for node in model.graph.all_nodes():
        if node.op_identifier() in functions:
            props = node.metadata_props
            call_values = [node.name or "", *(props.get(key, "") for key in (TAG_KEY, MODULE_KEY, NAMESPACE_KEY))]
            props[FUNCTION_CALL_KEY] = json.dumps(call_values)
    for function in functions.values():
        returned = set(function.outputs)
        for node in function.all_nodes():
            names = [None if value in returned else value.name for value in node.outputs]
            node.metadata_props[FUNCTION_NODE_KEY] = json.dumps([node.name, names, list(node.metadata_props)])
    InlinePass(criteria=lambda function: function.identifier() in functions)(model)
    for key in functions:
        model.functions.pop(key, None)  # functions without a call
    nodes = list(model.graph.all_nodes())
    inlined = [node for node in nodes if FUNCTION_CALL_KEY in node.metadata_props]
    free_names = _Names(model.graph, nodes, inlined)
    for node in inlined:
        _restore_node(node, free_names)


class _Names:
    """Restores the names of nodes and values from their function, unless a name is in use."""

    def __init__(self, graph: ir.Graph, nodes: Sequence[ir.Node], inlined: Collection[ir.Node]) -> None:
        inlined_set = set(inlined)
        remaining_nodes = [node for node in nodes if node not in inlined_set]
        renamed = {value for node in inlined for value in _renamed_values(node)}
        original_names = (value.name for node in nodes for value in node.outputs if value not in renamed)
        self.nodes = FreshNames(node.name for node in remaining_nodes)
        self.values = FreshNames([*(value.name for value in graph.inputs), *graph.initializers, *original_names])


def _renamed_values(node: ir.Node) -> list[ir.Value]:
    """Return the outputs of an inlined node with a name in their function."""
    _, outputs, _ = json.loads(node.metadata_props[FUNCTION_NODE_KEY])
    return [value for value, name in zip(node.outputs, outputs, strict=True) if name]


def _restore_node(node: ir.Node, names: _Names) -> None:
    """Set names and metadata of an inlined node."""
    props = node.metadata_props
    renamed = _renamed_values(node)
    scope, *anchors = json.loads(props.pop(FUNCTION_CALL_KEY))
    name, outputs, keys = json.loads(props.pop(FUNCTION_NODE_KEY))
    relative = _parse_relative(props.pop(RELATIVE_KEY)) if RELATIVE_KEY in keys else None
    for key in props.keys() - set(keys):
        del props[key]
    for key, template in (relative or {}).items():
        text = template
        for placeholder, anchor in zip((TAG, MODULE, NAMESPACE), anchors, strict=True):
            text = text.replace(placeholder, anchor)
        props[key] = text

    def absolute(text: str) -> str:
        """Return a name with the name of the call, if relative."""
        return scope + text if relative is not None and text.startswith(SCOPE_START) else text

    node.name = names.nodes.take(absolute(name)) if name else name
    for value, text in zip(renamed, filter(None, outputs), strict=True):
        value.name = names.values.take(absolute(text))


def _parse_relative(text: str) -> dict[str, str]:
    """Parse the metadata of a function's node that is relative to its call.

    Raises:
        ValueError: the text is invalid; names the key.
    """
    try:
        relative = load_metadata(text)
    except JsonError as error:
        raise ValueError(f"{RELATIVE_KEY}: {error}") from None
    if not isinstance(relative, dict) or not all(isinstance(value, str) for value in relative.values()):
        raise ValueError(f"{RELATIVE_KEY}: expected an object of texts")
    return relative


def walk_nodes(nodes: Sequence[ir.Node]) -> Iterator[ir.Node]:
    """Yield nodes, each before the nodes of its subgraphs."""
    for node in nodes:
        yield node
        for graph in node_graphs(node):
            yield from walk_nodes(list(graph))


def restore_recorded(model: ir.Model) -> None:
    """Apply the recorded names, metadata and order to an inlined graph, in place.

    A damaged record is ignored, as is a record of a graph changed by another tool.
    """
    text = model.metadata_props.pop(FUNCTIONS_KEY, "")
    nodes = list(model.graph)
    try:
        record = load_metadata(text or "{}")
        if not isinstance(record, dict) or record.get("graph") != graph_digest(model):
            return
        changes = _parse_changes(record.get("changes", {}), list(walk_nodes(nodes)))
        _check_names(model.graph, changes)
        positions = _parse_positions(record.get("order", [[0, len(nodes)]]), nodes)
    except (ValueError, RecursionError):
        return
    for node, change in changes.items():
        _apply_change(node, change)
    if positions != list(range(len(nodes))):
        model.graph.remove(nodes)
        model.graph.extend(node for _, node in sorted(zip(positions, nodes, strict=True), key=lambda pair: pair[0]))


def graph_digest(model: ir.Model) -> str:
    """Return a digest of operators, names and wiring in order, including subgraphs."""
    described = [
        [*node.op_identifier(), node.name or "", _value_names(node.inputs), _value_names(node.outputs)]
        for node in walk_nodes(list(model.graph))
    ]
    text = json.dumps([described, _value_names(model.graph.outputs)], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _value_names(values: Iterable[ir.Value | None]) -> list[str]:
    return ["" if value is None else value.name or "" for value in values]


def _parse_changes(changes: object, walked: Sequence[ir.Node]) -> dict[ir.Node, Mapping[str, Any]]:
    """Return node → recorded change.

    Raises:
        ValueError: the record is damaged.
    """
    checked: dict[ir.Node, Mapping[str, Any]] = {}
    for index, change in changes.items() if isinstance(changes, dict) else [("", changes)]:
        if not (index.isascii() and index.isdecimal() and int(index) < len(walked) and isinstance(change, dict)):
            raise ValueError(f"no change of a node: {index}")
        node = walked[int(index)]
        outputs, metadata = change.get("outputs", _value_names(node.outputs)), change.get("metadata", {})
        if not (isinstance(outputs, list) and len(outputs) == len(node.outputs) and isinstance(metadata, dict)):
            raise ValueError(f"not of the form of its node: {index}")
        if any(not isinstance(text, str | None) for text in (change.get("name"), *outputs, *metadata.values())):
            raise ValueError(f"no text: {index}")
        checked[node] = change
    return checked


def _check_names(graph: ir.Graph, changes: Mapping[ir.Node, Mapping[str, Any]]) -> None:
    """Refuse changes that give two values of the graph the same name.

    Raises:
        ValueError: two names are equal.
    """
    names = list({*_value_names(graph.inputs), *graph.initializers})
    for node in graph:
        names += filter(None, changes.get(node, {}).get("outputs", _value_names(node.outputs)))
    if len(names) != len(set(names)):
        raise ValueError("two values would have one name")


def _parse_positions(runs: object, nodes: Sequence[ir.Node]) -> list[int]:
    """Compute the position of each node from the recorded runs.

    Raises:
        ValueError: the record is damaged, or a node would precede a producer of its inputs.
    """
    count = len(nodes)
    pairs: list[Any] = runs if isinstance(runs, list) and len(runs) <= count else [None]
    if not all(isinstance(pair, list) and [int, int] == [type(number) for number in pair] for pair in pairs):
        raise ValueError("no runs")
    if any(not 0 <= number <= count for pair in pairs for number in pair):
        raise ValueError("no positions")
    positions = [position for start, length in pairs for position in range(start, start + length)]
    if sorted(positions) != list(range(count)):
        raise ValueError("not every position once")
    position_of: dict[ir.Node | None, int] = dict(zip(nodes, positions, strict=True))
    for node in nodes:
        producers = (value.producer() for inner in walk_nodes([node]) for value in inner.inputs if value is not None)
        if any(position_of.get(maker, -1) >= position_of[node] for maker in producers):
            raise ValueError("a node would stand before what it reads")
    return positions


def _apply_change(node: ir.Node, change: Mapping[str, Any]) -> None:
    """Apply a recorded change of name, outputs and metadata to a node, in place."""
    node.name = change.get("name", node.name)
    for value, name in zip(node.outputs, change.get("outputs", ()), strict=False):
        value.name = name
    for key, text in change.get("metadata", {}).items():
        if text is None:
            node.metadata_props.pop(key, None)
        else:
            node.metadata_props[key] = text
