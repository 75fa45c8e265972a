"""Which nodes stand for what an execution provider compiled, and in which files is it?

Specified by ONNX Runtime: ``com.microsoft:EPContext``, whose attribute ``ep_cache_context`` holds what was compiled
(``embed_mode`` 1) or names a file beside the model (0). The nodes of subgraphs and functions count as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir

from winml.modelkit.errors import InputError
from winml.modelkit.graph.proto_nodes import proto_nodes
from winml.modelkit.hierarchy.coverage import all_nodes
from winml.modelkit.metadata_keys import COMPILE_KEY
from winml.modelkit.options import load_json

__all__ = [
    "context_file_attributes",
    "context_file_names",
    "context_nodes",
    "is_context",
    "refuse_compiled",
    "rename_context_files",
]

_DOMAIN, _OPERATOR = "com.microsoft", "EPContext"
_CACHE, _EMBEDS = "ep_cache_context", "embed_mode"


def is_context(node: ir.Node | onnx.NodeProto) -> bool:
    """Say whether a node stands for what a provider compiled."""
    return bool(node.op_type == _OPERATOR and node.domain == _DOMAIN)


def context_nodes(model: ir.Model) -> list[ir.Node]:
    """Return the nodes that stand for what a provider compiled."""
    return [node for node in all_nodes(model) if is_context(node)]


def context_file_attributes(model: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    """Yield the attributes of nodes that name a file of what was compiled."""
    for node in proto_nodes(model):
        if is_context(node):
            attributes = {attribute.name: attribute for attribute in node.attribute}
            embeds = attributes[_EMBEDS].i if _EMBEDS in attributes else 1
            if not embeds and _CACHE in attributes and attributes[_CACHE].s:
                yield attributes[_CACHE]


def context_file_names(model: ir.Model) -> tuple[str, ...]:
    """Return the files of what was compiled, as the nodes of a model name them."""
    named = (node for node in context_nodes(model) if not node.attributes.get_int(_EMBEDS, 1))
    return tuple(dict.fromkeys(filter(None, (node.attributes.get_string(_CACHE, "") for node in named))))


def rename_context_files(model: ir.Model, names: dict[str, str]) -> None:
    """Let the nodes of a model name other files, in place: name → new name; names that are not given stay."""
    for node in context_nodes(model):
        if not node.attributes.get_int(_EMBEDS, 1) and (name := node.attributes.get_string(_CACHE, "")) in names:
            node.attributes.add(ir.AttrString(_CACHE, names[name]))


def refuse_compiled(model: ir.Model) -> None:
    """Refuse a model that was compiled before: it can only be run.

    Raises:
        InputError: it was.
    """
    told, nodes = model.metadata_props.get(COMPILE_KEY), context_nodes(model)
    if told is None and not nodes:
        return
    by = _provider_in(told or "") or next((node.attributes.get_string("source", "") for node in nodes), "")
    raise InputError(
        f"the model is compiled already, by {by or 'an execution provider'}, and can only be run",
        hint="Take the file that it was made from, and compile last.",
    )


def _provider_in(record: str) -> str:
    """Return the provider that a file names; empty where what it says is damaged."""
    try:
        return str(load_json(record)["provider"])
    except (ValueError, KeyError, TypeError):
        return ""
