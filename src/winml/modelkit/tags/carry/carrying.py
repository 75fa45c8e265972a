"""Transfer of module tags to the graph written by a tool that drops node metadata.

Compares the original graph with the graph the tool wrote and tags every node of the latter, in place. A node that
replaced nodes of several modules gets the module of the product among them, else the deepest common
module. Depends on no particular tool; ``matching`` decides the original nodes of each node. Why several anchors
are used: docs/decisions/0007-carry-by-anchors.md.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import onnx_ir as ir

from winml.modelkit.metadata_keys import MODULES_KEY, NAMESPACE_KEY, OUR_PREFIX, SOURCE_KEY, TAG_KEY
from winml.modelkit.tags.address import SEPARATOR
from winml.modelkit.tags.carry.matching import Match, Way, match_nodes
from winml.modelkit.tags.carry.original_graph import (
    OriginalModel,
    Position,
    is_foreign,
    join_values,
    name_prefix,
    split_values,
)
from winml.modelkit.tags.dialects import names_module
from winml.modelkit.tags.tagging import SOURCES, NodeTag, Source, all_nodes, measure_coverage, read_tag, write_tag
from winml.modelkit.words import count_noun


@dataclass(frozen=True)
class CarryReport:
    """Result of a tag transfer: counts by rule, and notes."""

    nodes: int
    tagged: int
    by_way: Mapping[Way, int]
    """Number of nodes by the rule that found their position; rules without nodes are absent."""
    notes: tuple[str, ...] = ()
    is_known: bool = True
    """False if the original has no tags to carry."""
    last_resort: tuple[str, ...] = ()
    """Names of the nodes tagged with the root because no rule found their position."""
    matched: int = 0
    """Number of nodes that prove that both graphs are the same model: nodes matched with an original node, and nodes
    that replaced several and produce an inner value of the original. A shared graph output alone proves nothing.
    """


def carry_tags(original_model: ir.Model, carried_model: ir.Model) -> CarryReport:
    """Tag every node of ``carried_model`` in place, including subgraphs and functions.

    Metadata of other tools is transferred, too: :func:`carry_metadata`. ``original_model`` is not changed. If
    ``original_model`` has no tags, no tag is written.

    Args:
        original_model: The model before the tool.
        carried_model: The model the tool wrote.
    """
    original = OriginalModel(original_model)
    carry_metadata(original_model, carried_model)
    if not original.is_tagged:
        coverage = measure_coverage(carried_model)
        note = "the original model has no tags to carry"
        return CarryReport(coverage.nodes, coverage.tagged, {}, (note,), is_known=False)
    matches = _match_model(carried_model, original)
    tag_metadata = cache(_tag_metadata)
    for node, match in matches.items():
        _write_matched(node, match, tag_metadata)
    for key, value in original_model.metadata_props.items():
        # Includes the stamp of a normalized graph, which names the graph it is valid for.
        if key.startswith(OUR_PREFIX):
            carried_model.metadata_props.setdefault(key, value)
    by_way = Counter(match.way for match in matches.values())
    last_resort = tuple(node.name or "" for node, match in matches.items() if match.way == "root")
    inside = original.main.makers.keys() - {value.name for value in original_model.graph.outputs}
    matched = sum(_is_matched(node, match, inside) for node, match in matches.items())
    notes: tuple[str, ...] = ()
    if last_resort:
        notes = (f"{len(last_resort)} node(s) match nothing in the original model; they are tagged with its root",)
    return CarryReport(len(matches), len(matches), by_way, notes, last_resort=last_resort, matched=matched)


def carry_metadata(original_model: ir.Model, carried_model: ir.Model) -> None:
    """Transfer the metadata of other tools to the nodes of ``carried_model``, in place.

    A node that still exists keeps its metadata. A node that replaced several nodes gets the values of all, joined by
    ``;`` if they differ. A new node gets the values of its neighbours. Names and values of the graph decide, never
    tags, which say nothing of the other nodes that a node replaced. Without tags, the keys in which a tool names
    modules are transferred, too: of several replaced nodes, those of the module around them.

    Args:
        original_model: The model before one or more tools; it is not changed.
        carried_model: The model after them.
    """
    if not has_foreign_metadata(original_model):
        return
    original = OriginalModel(original_model, with_foreign=True)
    for node, match in _match_model(carried_model, original, trusts_tags=False).items():
        _write_foreign(node, match, original)


def has_foreign_metadata(model: ir.Model) -> bool:
    """Return True if nodes have metadata of other tools, or no tags and modules named by another tool."""
    nodes = list(all_nodes(model))
    if any(is_foreign(key) for node in nodes for key in node.metadata_props):
        return True
    if any(TAG_KEY in node.metadata_props for node in nodes):
        return False
    return any(SEPARATOR in (node.name or "") or any(map(names_module, node.metadata_props)) for node in nodes)


def lost_metadata_notes(original_model: ir.Model, carried_model: ir.Model) -> Iterator[str]:
    """Yield a note for each key of another tool with values that are on no node anymore."""
    before, after = _foreign_values(original_model), _foreign_values(carried_model)
    for key, values in before.items():
        if lost := [value for value in values if value not in after.get(key, ())]:
            shown = ", ".join(repr(value[:_LISTED_CHARACTERS]) for value in lost[:_LISTED_VALUES])
            shown += ", …" if len(lost) > _LISTED_VALUES else ""
            yield (
                f"Metadata {key} of nodes: {count_noun(len(lost), 'value', 'are')} on no node of the result, as their "
                f"nodes were folded or removed: {shown}."
            )


_LISTED_VALUES = 3
"""Chosen: number of lost values listed in a note."""
_LISTED_CHARACTERS = 40
"""Chosen: characters of a lost value in a note, so that three fit into two lines."""


def _foreign_values(model: ir.Model) -> dict[str, dict[str, None]]:
    """Return key of another tool → its values, of all nodes in order."""
    values: dict[str, dict[str, None]] = {}
    for node in all_nodes(model):
        for key, text in node.metadata_props.items():
            if is_foreign(key):
                values.setdefault(key, {}).update(dict.fromkeys(split_values(text)))
    return values


def _is_matched(node: ir.Node, match: Match, inside: Container[str | None]) -> bool:
    """Return True if a match proves that both graphs are one model; ``inside`` holds inner values of the original."""
    if match.way == "replaced":
        return any(value.name in inside and not value.is_graph_output() for value in node.outputs)
    return match.way not in ("neighbours", "root")


def _match_model(carried_model: ir.Model, original: OriginalModel, *, trusts_tags: bool = True) -> dict[ir.Node, Match]:
    """Match the main graph, then the functions, each after its callers; return node → match."""
    root = cache(original.positions.root)
    match = partial(match_nodes, original=original, trusts_tags=trusts_tags)
    matches = match(carried_model.graph, original.main, outside=root)
    callers: dict[ir.OperatorIdentifier, list[ir.Node]] = defaultdict(list)
    waiting = dict(carried_model.functions)
    function_matches = matches
    while waiting:
        for node in function_matches:
            if (called := node.op_identifier()) in carried_model.functions:
                callers[called].append(node)
        # Functions without a matched caller, or with circular calls, come last, in the order of the file.
        identifier = next(filter(callers.__contains__, waiting), next(iter(waiting)))
        names = original.functions.get(identifier, original.main)
        positions = {matches[node].position for node in callers[identifier]}
        outside = cache(partial(original.positions.common, positions)) if positions else root
        function_matches = match(waiting.pop(identifier), names, outside=outside)
        matches.update(function_matches)
    return matches


def _write_foreign(node: ir.Node, match: Match, original: OriginalModel) -> None:
    """Write the metadata of other tools to a matched node, in place."""
    metadata = node.metadata_props
    if match.survivor is not None:
        for key, text in match.survivor.metadata_props.items():
            if is_foreign(key) or not original.is_tagged:
                metadata.setdefault(key, text)
    elif match.way != "root":
        for key, text in original.module_keys(match.position.tag):
            metadata.setdefault(key, text)
        prefix = name_prefix(match.position.tag)
        if prefix and not original.module_keys(match.position.tag) and SEPARATOR not in (node.name or ""):
            # Modules are named by the names of nodes alone.
            node.name = f"{prefix}/{node.name or node.op_type}"
        for key, text in match.position.foreign:
            # An earlier step may have written the values of one of the replaced nodes.
            earlier = split_values(metadata[key]) if key in metadata else ()
            metadata[key] = join_values((*split_values(text), *earlier))


def _write_matched(node: ir.Node, match: Match, tag_metadata: Callable[[Position, Source], Mapping[str, str]]) -> None:
    """Write the tag of a matched node, in place.

    Args:
        node: The node.
        match: Match of the node.
        tag_metadata: Returns the metadata of a node at a position.
    """
    metadata = node.metadata_props
    survivor = match.survivor.metadata_props if match.survivor is not None else None
    if match.way == "kept":
        if metadata != survivor:
            _realign_tag(node, match.position)
        return
    for key in _owned_keys(tuple(metadata)):
        del metadata[key]
    if survivor is not None:
        metadata.update({key: survivor[key] for key in _owned_keys(tuple(survivor))})
        return
    metadata.update(tag_metadata(match.position, _tag_source(match)))
    modules = sorted({path for replaced in match.replaced.positions for path in replaced.modules})
    if len(modules) > 1:
        metadata[MODULES_KEY] = json.dumps(modules, ensure_ascii=False)


def _tag_metadata(position: Position, source: Source) -> Mapping[str, str]:
    """Return the metadata of a node at a position."""
    example = ir.Node("", "", [])
    write_tag(example, NodeTag(position.tag, position.module, source))
    _write_namespace(example, position)
    return example.metadata_props


@lru_cache
def _owned_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys that belong to a tag, without keys of other tools. Cached: few distinct sets of keys occur."""
    return tuple(key for key in keys if not is_foreign(key))


def _tag_source(match: Match) -> Source:
    """Return the source to record with the tag of a matched node."""
    if match.way == "root":
        return "root"
    if match.way == "output" and (only := match.replaced.only) is not None and (tag := read_tag(only)) is not None:
        return tag.source
    return "inherited" if match.way in ("neighbours", "output") else "merged"


def _realign_tag(node: ir.Node, position: Position) -> None:
    """Rewrite the metadata beside a retained tag to agree with the position, in place."""
    metadata = node.metadata_props
    source = metadata.get(SOURCE_KEY)
    known_source: Source = next((known_source for known_source in SOURCES if known_source == source), "inherited")
    modules = metadata.get(MODULES_KEY)
    write_tag(node, NodeTag(position.tag, position.module, known_source))
    if modules is not None:
        metadata[MODULES_KEY] = modules
    _write_namespace(node, position)


def _write_namespace(node: ir.Node, position: Position) -> None:
    """Set the namespace of a node; remove it if the position has none. In place."""
    if position.namespace:
        node.metadata_props[NAMESPACE_KEY] = position.namespace
    else:
        node.metadata_props.pop(NAMESPACE_KEY, None)
