"""How do the tags of a graph come through a tool that drops them?

Compares the graph before with the graph after and gives every node after one tag, in place. What cannot be known is not
made up: a node that replaced nodes of several modules gets the module all of them lie in. Knows no tool; what a node
stands for is decided in ``carry_matching``.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cache, partial

import onnx_ir as ir

from winml.modelkit.hierarchy.carry.matching import Match, Way, match_nodes
from winml.modelkit.hierarchy.carry.original_graph import Origins, Place
from winml.modelkit.hierarchy.coverage import measure_coverage
from winml.modelkit.hierarchy.tagging import SOURCES, NodeTag, Source, read_tag, write_tag
from winml.modelkit.metadata_keys import MODULES_KEY, NAMESPACE_KEY, OUR_PREFIX, SOURCE_KEY, TORCH_PREFIX

__all__ = ["CarryReport", "Way", "carry_tags"]


@dataclass(frozen=True)
class CarryReport:
    """How the nodes of a graph came to their tags."""

    nodes: int
    tagged: int
    by_way: Mapping[Way, int]
    """Number of nodes by the way their tag was won; ways nobody used are absent."""
    notes: tuple[str, ...] = ()
    is_known: bool = True
    """Whether there was anything to carry; False where the original bears no tags."""
    last_resort: tuple[str, ...] = ()
    """Names of the nodes that got the root only because nothing else was known."""
    found_again: int = 0
    """Nodes that show that both are the same model: those that are one original node, and those that replaced several
    and make a value from inside the original. A shared output of the model alone shows nothing."""


def carry_tags(before: ir.Model, after: ir.Model) -> CarryReport:
    """Give every node of ``after`` a tag, in place; subgraphs and functions included.

    ``before`` stays as it is. Where it has no tags, ``after`` does too: nothing is invented.

    Args:
        before: The model a tool was given.
        after: What the tool made of it.
    """
    origins = Origins(before)
    if not origins.place_of:
        coverage = measure_coverage(after)
        note = "the model before bears no tags, so there are none to carry"
        return CarryReport(coverage.nodes, coverage.tagged, {}, (note,), is_known=False)
    matches = _match_model(after, origins)
    writer = _Writer(origins)
    for node, match in matches.items():
        writer.write(node, match)
    _restore_model_metadata(before, after)
    by_way = Counter(match.way for match in matches.values())
    last_resort = tuple(node.name or "" for node, match in matches.items() if match.way == "root")
    inside = origins.main.makers.keys() - {value.name for value in before.graph.outputs}
    found_again = sum(_is_found_again(node, match, inside) for node, match in matches.items())
    notes = _notes(by_way)
    return CarryReport(len(matches), len(matches), by_way, notes, last_resort=last_resort, found_again=found_again)


def _is_found_again(node: ir.Node, match: Match, inside: Container[str | None]) -> bool:
    if match.way == "replaced":
        return any(value.name in inside and not value.is_graph_output() for value in node.outputs)
    return match.way not in ("neighbours", "root")


def _match_model(after: ir.Model, origins: Origins) -> dict[ir.Node, Match]:
    """Match the main graph, then the functions, each after those that call it."""
    root = cache(origins.places.root)
    matches = match_nodes(after.graph, origins.main, origins, root)
    callers: dict[ir.OperatorIdentifier, list[ir.Node]] = defaultdict(list)
    waiting = dict(after.functions)
    found = matches
    while waiting:
        for node in found:
            if (called := node.op_identifier()) in after.functions:
                callers[called].append(node)
        # Functions nobody calls, or that call each other, come last, in the order of the file.
        identifier = next((known for known in waiting if known in callers), next(iter(waiting)))
        scope = origins.functions.get(identifier, origins.main)
        places = {matches[node].place for node in callers[identifier]}
        outside = cache(partial(origins.places.common, places)) if places else root
        found = match_nodes(waiting.pop(identifier), scope, origins, outside)
        matches.update(found)
    return matches


class _Writer:
    """Writes what was found on nodes, in place."""

    def __init__(self, origins: Origins) -> None:
        self._origins = origins
        self._owned: dict[tuple[str, ...], tuple[str, ...]] = {}
        """Metadata keys of a node → those a tag goes with; nodes have few sets of keys."""
        self._at_places: dict[tuple[Place, Source], Mapping[str, str]] = {}

    def write(self, node: ir.Node, match: Match) -> None:
        metadata = node.metadata_props
        survivor = match.survivor.metadata_props if match.survivor is not None else None
        if match.way == "kept":
            if metadata != survivor:
                _confirm(node, match.place)
            return
        if metadata:
            for key in self._owned_keys(metadata):
                del metadata[key]
        if survivor is not None:
            owned = self._owned_keys(survivor)
            metadata.update(survivor if len(owned) == len(survivor) else {key: survivor[key] for key in owned})
            return
        metadata.update(self._written(match.place, self._source(match)))
        if len(match.replaced.places) > 1:
            modules = sorted({replaced.module for replaced in match.replaced.places})
            if len(modules) > 1:
                metadata[MODULES_KEY] = json.dumps(modules, ensure_ascii=False)

    def _written(self, place: Place, source: Source) -> Mapping[str, str]:
        """Return what is written on a node at a place; made once for all its nodes."""
        written = self._at_places.get((place, source))
        if written is None:
            example = ir.Node("", "", [])
            write_tag(example, NodeTag(place.tag, place.module, source))
            _write_namespace(example, place)
            written = self._at_places[place, source] = example.metadata_props
        return written

    def _owned_keys(self, metadata: Mapping[str, str]) -> tuple[str, ...]:
        keys = tuple(metadata)
        owned = self._owned.get(keys)
        if owned is None:
            owned = tuple(key for key in keys if key == NAMESPACE_KEY or key.startswith((OUR_PREFIX, TORCH_PREFIX)))
            self._owned[keys] = owned
        return owned

    def _source(self, match: Match) -> Source:
        if match.way == "root":
            return "root"
        if match.way == "output" and (only := match.replaced.only) is not None and (tag := read_tag(only)) is not None:
            return tag.source
        return "inherited" if match.way in ("neighbours", "output") else "merged"


def _confirm(node: ir.Node, place: Place) -> None:
    """Bring the keys beside a tag that was kept in line with it."""
    metadata = node.metadata_props
    source = metadata.get(SOURCE_KEY)
    known: Source = next((known for known in SOURCES if known == source), "inherited")
    modules = metadata.get(MODULES_KEY)
    write_tag(node, NodeTag(place.tag, place.module, known))
    if modules is not None:
        metadata[MODULES_KEY] = modules
    _write_namespace(node, place)


def _write_namespace(node: ir.Node, place: Place) -> None:
    if place.namespace:
        node.metadata_props[NAMESPACE_KEY] = place.namespace
    else:
        node.metadata_props.pop(NAMESPACE_KEY, None)


def _restore_model_metadata(before: ir.Model, after: ir.Model) -> None:
    """Bring back what the tool dropped of our keys on the model.

    The stamp of a normalized graph needs no care: it names the graph it holds for.
    """
    for key, value in before.metadata_props.items():
        if key.startswith(OUR_PREFIX):
            after.metadata_props.setdefault(key, value)


def _notes(by_way: Mapping[Way, int]) -> tuple[str, ...]:
    if not by_way.get("root"):
        return ()
    return (f"{by_way['root']} node(s) have nothing in common with the model before; they belong to its root",)
