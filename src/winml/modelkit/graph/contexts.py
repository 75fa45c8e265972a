"""Which nodes stand for what an execution provider compiled, and in which files is it?

Specified by ONNX Runtime: ``com.microsoft:EPContext``, whose attribute ``ep_cache_context`` holds what was compiled
(``embed_mode`` 1) or names a file beside the model (0).
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir

from winml.modelkit.hierarchy.coverage import all_nodes

__all__ = ["CONTEXT_OPERATOR", "context_file_attributes", "context_file_names", "context_nodes", "rename_context_files"]

CONTEXT_OPERATOR = "EPContext"
_CACHE, _EMBEDS = "ep_cache_context", "embed_mode"


def context_nodes(model: ir.Model) -> list[ir.Node]:
    """Return the nodes that stand for what a provider compiled."""
    return [node for node in all_nodes(model) if node.op_type == CONTEXT_OPERATOR]


def context_file_attributes(model: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    """Yield the attributes of the main graph's nodes that name a file of what was compiled."""
    for node in model.graph.node:
        if node.op_type == CONTEXT_OPERATOR:
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
