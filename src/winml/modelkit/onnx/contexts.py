"""Nodes with compiled content of an execution provider, and its files.

Specified by ONNX Runtime: ``com.microsoft:EPContext``, whose attribute ``ep_cache_context`` holds the compiled content
(``embed_mode`` 1) or names a file next to the model (0). Nodes of subgraphs and functions are included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.metadata_keys import COMPILE_KEY
from winml.modelkit.onnx.contents import subgraphs
from winml.modelkit.onnx.files.foreign_names import name_problem
from winml.modelkit.onnx.validity import MAX_LISTED
from winml.modelkit.options import load_metadata
from winml.modelkit.tags.carry.original_graph import RANDOM_OPERATORS
from winml.modelkit.tags.tagging import all_nodes
from winml.modelkit.words import printable


def proto_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield every node of a model, including subgraphs and functions."""
    yield from nested_nodes(model.graph.node)
    for function in model.functions:
        yield from nested_nodes(function.node)


def proto_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Yield the graph of a model and every subgraph, including those in functions."""
    yield model.graph
    for node in proto_nodes(model):
        yield from subgraphs(node)


DROPOUT = "Dropout"


def random_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the nodes whose outputs differ from run to run: random numbers, and Dropout in training mode."""
    switches = (tensor for tensor in model.graph.initializer if tensor.data_type == tensor.BOOL)
    off = {"", *(tensor.name for tensor in switches if not any((*tensor.raw_data, *tensor.int32_data)))}
    return [
        node
        for node in proto_nodes(model)
        # The third input of Dropout is its training mode.
        if node.op_type in RANDOM_OPERATORS or (node.op_type == DROPOUT and not off.issuperset(node.input[2:]))
    ]


def random_words(nodes: Iterable[onnx.NodeProto]) -> str:
    """Name the first random nodes, with their operators."""
    names = [f"{node.name or 'a node without a name'} ({node.op_type})" for node in nodes]
    return ", ".join([*dict.fromkeys(names)][:MAX_LISTED])


def nested_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and the nodes of their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from nested_nodes(graph.node)


_DOMAIN, _OPERATOR = "com.microsoft", "EPContext"
_CACHE, _EMBEDS = "ep_cache_context", "embed_mode"


def is_context(node: ir.Node | onnx.NodeProto) -> bool:
    """Return True if a node holds compiled content of a provider."""
    return bool(node.op_type == _OPERATOR and node.domain == _DOMAIN)


def context_nodes(model: ir.Model) -> list[ir.Node]:
    """Return the nodes with compiled content of a provider."""
    return [node for node in all_nodes(model) if is_context(node)]


def context_file_attributes(model: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    """Yield the attributes of nodes that name a file of compiled content."""
    for node in proto_nodes(model):
        if is_context(node):
            attributes = {attribute.name: attribute for attribute in node.attribute}
            embeds = attributes[_EMBEDS].i if _EMBEDS in attributes else 1
            if not embeds and _CACHE in attributes and attributes[_CACHE].s:
                yield attributes[_CACHE]


def context_file_names(model: ir.Model) -> tuple[str, ...]:
    """Return the files of compiled content, as named by the nodes of a model."""
    nodes = (node for node in context_nodes(model) if not node.attributes.get_int(_EMBEDS, 1))
    return tuple(dict.fromkeys(filter(None, (node.attributes.get_string(_CACHE, "") for node in nodes))))


def rename_context_files(model: ir.Model, names: dict[str, str]) -> None:
    """Rename files of compiled content in the nodes of a model, in place: name → new name; names not listed stay."""
    for node in context_nodes(model):
        if not node.attributes.get_int(_EMBEDS, 1) and (name := node.attributes.get_string(_CACHE, "")) in names:
            node.attributes.add(ir.AttrString(_CACHE, names[name]))


def refuse_compiled(model: ir.Model) -> None:
    """Refuse a compiled model: it can only be run.

    Raises:
        InputError: the model is compiled.
    """
    reported, nodes = model.metadata_props.get(COMPILE_KEY), context_nodes(model)
    if reported is None and not nodes:
        return
    by = _value_in(reported or "", "provider") or next((node.attributes.get_string("source", "") for node in nodes), "")
    raise InputError(
        f"the model is already compiled by {by or 'an execution provider'} and can only be run",
        hint="Use its source file, and compile last.",
    )


def refuse_compiled_modules(model: onnx.ModelProto, path: Path) -> None:
    """Refuse a partly compiled file for work on modules: compiled modules have no nodes.

    Args:
        model: The model; no weight is read.
        path: The model file, for the message, which also names the source file if known.

    Raises:
        UsageError: the file is compiled.
    """
    contexts = [node for node in proto_nodes(model) if is_context(node)]
    if not contexts:
        return
    reported = next((entry.value for entry in model.metadata_props if entry.key == COMPILE_KEY), "")
    source, provider = _find_source(reported, path), _value_in(reported, "provider") or "an execution provider"
    raise UsageError(
        f"{path}: {provider} compiled {len(contexts)} of its parts, in which modules have no separate nodes, values or "
        "times",
        hint=f"Use its source file{f': {source}' if source else ''}.",
    )


def _find_source(record: str, path: Path) -> str:
    """Return the source file of a compiled file, looked up beside and above the file; ``""`` if unknown."""
    name = _value_in(record, "source")
    # A layout may have moved the compiled file into a folder of its own.
    problems = {folder: name_problem(folder, name) for folder in (path.parent, path.parent.parent)}
    for folder, problem in problems.items():
        if problem is None and folder / name != path:
            return printable(str(folder / name))
    return printable(name) if {*problems.values()} <= {None, "missing"} else ""


def _value_in(record: str, key: str) -> str:
    """Return a value of the compile record of a file; ``""`` if the record is damaged or lacks the key."""
    try:
        value = load_metadata(record)[key]
    except (ValueError, KeyError, TypeError):
        return ""
    return value if isinstance(value, str) else ""
