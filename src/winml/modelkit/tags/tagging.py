"""Writing and reading of tags in the metadata of nodes.

Works on any object with a ``metadata_props`` mapping, in place. Does not decide the tag of a node. The keys are
spelled in ``metadata_keys``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import onnx

from winml.modelkit import metadata_keys
from winml.modelkit.options import JsonError, load_metadata
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.tags import address

if TYPE_CHECKING:
    import onnx_ir as ir

Source = Literal["direct", "parent", "operation", "root", "merged", "inherited"]
"""Origin of the tag of a node: the first four at export, in the order tried; the last two by later stages."""
SOURCES: tuple[Source, ...] = get_args(Source)


class HasMetadata(Protocol):
    """Protocol of an object with serialized key–value metadata, such as ``onnx_ir.Node``."""

    @property
    def metadata_props(self) -> MutableMapping[str, str]:
        """The metadata, written to the file with the node."""


@dataclass(frozen=True)
class NodeTag:
    """Address of the module of a node."""

    tag: str
    module: str
    """Dotted path of the tagged hierarchy module."""
    source: Source


def write_tag(node: HasMetadata, tag: NodeTag) -> None:
    """Write a tag on a node, in place; replaces an earlier tag."""
    node.metadata_props.pop(metadata_keys.MODULES_KEY, None)
    node.metadata_props[metadata_keys.TAG_KEY] = tag.tag
    node.metadata_props[metadata_keys.DEPTH_KEY] = str(address.depth(tag.tag))
    node.metadata_props[metadata_keys.MODULE_KEY] = tag.module
    node.metadata_props[metadata_keys.SOURCE_KEY] = tag.source


def read_tag(node: HasMetadata) -> NodeTag | None:
    """Return the tag of a node; `None` without a tag.

    Raises:
        ValueError: the source is not in SOURCES.
    """
    props = node.metadata_props
    if not props.get(metadata_keys.TAG_KEY):
        return None
    source = props.get(metadata_keys.SOURCE_KEY, "inherited")
    for known_source in SOURCES:
        if source == known_source:
            return NodeTag(props[metadata_keys.TAG_KEY], props.get(metadata_keys.MODULE_KEY, ""), known_source)
    raise ValueError(f"unknown tag source {source!r}; expected one of {', '.join(SOURCES)}")


def listed_modules(node: HasMetadata) -> list[str]:
    """Return the paths of the modules of a merged node; ``[]`` if the node belongs to a single module.

    Raises:
        ValueError: the list in the file is damaged; names the key.
    """
    text = node.metadata_props.get(metadata_keys.MODULES_KEY, "[]")
    try:
        paths = load_metadata(text)
    except JsonError as error:
        raise ValueError(f"{metadata_keys.MODULES_KEY}: {error}") from None
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ValueError(f"{metadata_keys.MODULES_KEY}: expected a list of module paths")
    return paths


def drop_damaged_tags(nodes: Iterable[HasMetadata]) -> int:
    """Remove damaged tags, which identify no module, from nodes of a file, in place.

    Returns:
        The number of nodes whose tag was removed.
    """
    is_valid: dict[str, bool] = {}
    dropped = 0
    for node in nodes:
        props = node.metadata_props
        tag = props.get(metadata_keys.TAG_KEY)
        if tag is None:
            continue
        if tag not in is_valid:
            is_valid[tag] = not tag or address.is_tag(tag)
        if not is_valid[tag] or props.get(metadata_keys.SOURCE_KEY, "inherited") not in SOURCES:
            for key in (
                metadata_keys.TAG_KEY,
                metadata_keys.DEPTH_KEY,
                metadata_keys.MODULE_KEY,
                metadata_keys.MODULES_KEY,
                metadata_keys.SOURCE_KEY,
            ):
                props.pop(key, None)
            dropped += 1
    return dropped


def clear_tag(node: HasMetadata) -> None:
    """Remove our keys, torch's keys and ``namespace`` from a node, in place."""
    for key in list(node.metadata_props):
        if key == metadata_keys.NAMESPACE_KEY or key.startswith((metadata_keys.OUR_PREFIX, metadata_keys.TORCH_PREFIX)):
            del node.metadata_props[key]


class Coverage(Record):
    """Number of nodes, of tagged nodes, of tagged nodes per source, and of those at the root."""

    nodes: int = field(metadata=entry(skip=True))
    tagged: int
    sources: Mapping[str, int] = field(metadata=entry(last=True))
    """Number of tagged nodes per source; sources without nodes are absent."""
    at_root: int = 0
    """Number of nodes tagged with the root, from any source."""

    @property
    @recorded(entry(before="at_root", digits=2))
    def percent(self) -> float:
        """Share of tagged nodes, 0 to 100; an empty graph is fully covered."""
        return 100.0 * self.tagged / self.nodes if self.nodes else 100.0

    @property
    @recorded(entry(before="sources", digits=2))
    def at_root_percent(self) -> float:
        """Share of the nodes tagged with the root, 0 to 100."""
        return 100.0 * self.at_root / self.nodes if self.nodes else 0.0

    @property
    def is_root_only(self) -> bool:
        """True if nodes are tagged, all of them with the root."""
        return bool(self.tagged) and self.at_root == self.tagged

    @property
    def is_complete(self) -> bool:
        """True if every node has a tag."""
        return self.tagged == self.nodes


def measure_coverage(model: ir.Model) -> Coverage:
    """Count the tagged nodes of a model, including subgraphs and functions."""
    return count_coverage(all_nodes(model))


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yield every node of a model, including subgraphs and functions."""
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


_GRAPH, _GRAPHS = int(onnx.AttributeProto.GRAPH), int(onnx.AttributeProto.GRAPHS)
"""Types of attributes, as integers: onnx_ir is not imported here."""


def node_graphs(node: ir.Node) -> Iterator[ir.Graph]:
    """Yield the graphs among the attributes of a node."""
    for attribute in node.attributes.data.values():
        if attribute.type == _GRAPH and not attribute.is_ref():
            yield attribute.as_graph()
        elif attribute.type == _GRAPHS and not attribute.is_ref():
            yield from attribute.as_graphs()


def operator_name(node: ir.Node) -> str:
    """Return the operator of a node, with its domain unless it is the ONNX domain."""
    return f"{node.domain}:{node.op_type}" if node.domain else node.op_type


def count_coverage(nodes: Iterable[ir.Node]) -> Coverage:
    """Count the tagged nodes among ``nodes``."""
    total = at_root = 0
    sources: Counter[str] = Counter()
    for node in nodes:
        total += 1
        if tag := read_tag(node):
            sources[tag.source] += 1
            at_root += address.depth(tag.tag) == 1
    return Coverage(nodes=total, tagged=sources.total(), sources=dict(sources), at_root=at_root)
