"""Writes tags into the metadata of nodes, and reads them back.

Works on any object with a ``metadata_props`` mapping, in place. Does not decide which tag a node gets. The keys are
spelled in ``metadata_keys``.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from winml.modelkit.hierarchy import address
from winml.modelkit.metadata_keys import (
    DEPTH_KEY,
    MODULE_KEY,
    MODULES_KEY,
    NAMESPACE_KEY,
    OUR_PREFIX,
    SOURCE_KEY,
    TAG_KEY,
    TORCH_PREFIX,
)

__all__ = ["HasMetadata", "NodeTag", "Source", "clear_tag", "drop_damaged_tags", "read_tag", "write_tag"]


Source = Literal["direct", "parent", "operation", "root", "merged", "inherited"]
"""How the tag of a node was determined: the first four at export, in the order tried; the last two by later stages."""
SOURCES: tuple[Source, ...] = get_args(Source)


class HasMetadata(Protocol):
    """Anything that carries serialized key–value metadata, such as ``onnx_ir.Node``."""

    @property
    def metadata_props(self) -> MutableMapping[str, str]:
        """The metadata, written to the file with the node."""


@dataclass(frozen=True)
class NodeTag:
    """The address of the module a node belongs to."""

    tag: str
    module: str
    """Dotted path of the hierarchy module the tag stands for."""
    source: Source


def write_tag(node: HasMetadata, tag: NodeTag) -> None:
    """Write a tag on a node, in place; replaces an earlier tag."""
    node.metadata_props.pop(MODULES_KEY, None)
    node.metadata_props[TAG_KEY] = tag.tag
    node.metadata_props[DEPTH_KEY] = str(address.depth(tag.tag))
    node.metadata_props[MODULE_KEY] = tag.module
    node.metadata_props[SOURCE_KEY] = tag.source


def read_tag(node: HasMetadata) -> NodeTag | None:
    """Return the tag of a node, or None if it has none.

    Raises:
        ValueError: the source is not one of FORMATS.
    """
    props = node.metadata_props
    if not props.get(TAG_KEY):
        return None
    source = props.get(SOURCE_KEY, "inherited")
    for known_source in SOURCES:
        if source == known_source:
            return NodeTag(props[TAG_KEY], props.get(MODULE_KEY, ""), known_source)
    raise ValueError(f"unknown tag source {source!r}; expected one of {', '.join(SOURCES)}")


def drop_damaged_tags(nodes: Iterable[HasMetadata]) -> int:
    """Take tags that are none off nodes of a file, in place: nothing can be said of the module they mean.

    Returns:
        The number of nodes that lost one.
    """
    known: dict[str, bool] = {}
    dropped = 0
    for node in nodes:
        props = node.metadata_props
        tag = props.get(TAG_KEY)
        if tag is None:
            continue
        if tag not in known:
            known[tag] = not tag or address.is_tag(tag)
        if not known[tag] or props.get(SOURCE_KEY, "inherited") not in SOURCES:
            for key in (TAG_KEY, DEPTH_KEY, MODULE_KEY, MODULES_KEY, SOURCE_KEY):
                props.pop(key, None)
            dropped += 1
    return dropped


def clear_tag(node: HasMetadata) -> None:
    """Remove our keys, torch's keys and ``namespace`` from a node, in place."""
    for key in list(node.metadata_props):
        if key == NAMESPACE_KEY or key.startswith((OUR_PREFIX, TORCH_PREFIX)):
            del node.metadata_props[key]
