"""Finds the nodes of each call of a module, so that the call can be cut out.

Selects nodes by tag, those of the modules inside included. All calls of a module share one tag, so the nodes are
divided into calls: by the number of calls in the model's metadata, else by sequences that repeat with the same weights.
Where the calls cannot be separated, or a call cannot be cut out, the result is the reason. Verbs that change some
modules only need less: the module of each node, by its name (``GraphModules``).
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from winml.modelkit.errors import UsageError
from winml.modelkit.graph.cutting import Cut, Cutter, Refusal, node_words
from winml.modelkit.graph.fingerprint import OPERAND_LIMIT_ELEMENTS
from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.selector import HasAddress, select
from winml.modelkit.hierarchy.tagging import read_tag
from winml.modelkit.metadata_keys import TREE_KEY

__all__ = ["GraphModules", "ModuleCall", "ModuleParts", "Signature"]

Part = list[ir.Node]


class Signature(NamedTuple):
    """The properties that corresponding nodes of two calls share."""

    domain: str
    op_type: str
    tag: str
    inputs: int
    weights: tuple[str, ...]


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: its cut, or why it cannot be cut out."""

    call: int
    """Number of the call, from 1."""
    calls: int
    """Number of calls in the graph."""
    result: Cut | Refusal


@dataclass(frozen=True)
class GraphModules:
    """Which module each node belongs to, from tags or, where there are none, from node names."""

    modules: Sequence[HasAddress]
    tag_of: Mapping[str, str]
    """Node name to the tag of its module; ``""`` where nothing says it."""
    source: str = "winml tags"
    """What says it, in words."""

    def selected_tags(self, selector: str) -> frozenset[str]:
        """Return the tags of the modules that a selector names.

        Raises:
            UsageError: it names none; the nearest addresses are listed.
        """
        if not self.modules:
            raise UsageError(
                f"no module matches {selector!r}: no node of the graph says which module it came from",
                hint="Leave the selector out, or bring the tags of an export back first: winml retag EXPORT FILE.",
            )
        return frozenset(module.tag for module in select(self.modules, selector))


class ModuleParts:
    """The modules of one graph, ready to be cut out."""

    def __init__(self, model: ir.Model) -> None:
        """Look at the graph once.

        Args:
            model: A tagged model; its weights are not read.
        """
        self._cutter = Cutter(model)
        self._calls = _recorded_calls(model.metadata_props.get(TREE_KEY, ""))
        self._nodes_by_tag: dict[str, Part] = defaultdict(list)
        self._inner_owners: dict[str, ir.Node] = {}
        for node in self._cutter.position:
            if tag := read_tag(node):
                self._nodes_by_tag[tag.tag].append(node)
        for inner, owner in self._cutter.owners.items():
            if tag := read_tag(inner):
                self._inner_owners.setdefault(tag.tag, owner)
        for function in model.functions.values():
            for inner in function.all_nodes():
                if tag := read_tag(inner):
                    self._inner_owners.setdefault(tag.tag, inner)
        self._tags_below = _tags_within([*self._nodes_by_tag, *self._inner_owners])

    def cut(self, tag: str) -> tuple[ModuleCall, ...]:
        """Cut out every call of the module with this tag.

        Returns:
            One entry per call, in execution order; none where the graph has no node of the module. A single entry with
            a refusal where the calls cannot be separated.
        """
        call_parts = self.calls(tag)
        if isinstance(call_parts, Refusal):
            return (ModuleCall(1, 1, call_parts),)
        shared = self._shared_nodes(tag)
        return tuple(
            ModuleCall(number, len(call_parts), self._cutter.cut(call_nodes, may_join=shared))
            for number, call_nodes in enumerate(call_parts, start=1)
        )

    def calls(self, tag: str) -> list[Part] | Refusal:
        """Return the nodes of every call of the module with this tag, in the order of the graph.

        Of a module that is called once, constants are included. No calls where the graph has no node of the module; a
        refusal where they cannot be separated, or the module runs inside a node of another one.
        """
        module_nodes = self._nodes_of(tag)
        if hidden := self._hidden_part(tag, set(module_nodes)):
            return hidden
        if not module_nodes:
            return []
        changing = [node for node in module_nodes if not self._cutter.is_constant(node)]
        call_parts = self._divide_into_calls(changing, self._calls.get(tag)) if changing else [module_nodes]
        return [module_nodes] if not isinstance(call_parts, Refusal) and len(call_parts) == 1 else call_parts

    def _nodes_of(self, tag: str) -> Part:
        nodes = [node for below in self._tags_below.get(tag, ()) for node in self._nodes_by_tag.get(below, ())]
        return sorted(nodes, key=self._cutter.position.__getitem__)

    def _hidden_part(self, tag: str, module_nodes: set[ir.Node]) -> Refusal | None:
        """Return why a module that runs inside a node of another module cannot be cut out, or None."""
        for below in self._tags_below.get(tag, ()):
            owner = self._inner_owners.get(below)
            if owner is None or owner in module_nodes:
                continue
            if owner in self._cutter.position:
                return Refusal(
                    f"it runs inside {node_words(owner)}, which belongs to another module; values inside a subgraph "
                    "cannot be recorded"
                )
            if not module_nodes:
                return Refusal(f"it runs inside a function of the model, at {node_words(owner)}")
        return None

    def _shared_nodes(self, tag: str) -> Part:
        """Return the nodes of other modules that are called more than once: this module may call them too."""
        return [
            node
            for other_tag, nodes in self._nodes_by_tag.items()
            if self._calls.get(other_tag, 1) > 1 and not address.is_within(other_tag, tag)
            for node in nodes
        ]

    def _divide_into_calls(self, nodes: Part, calls: int | None) -> list[Part] | Refusal:
        """Divide the nodes of a module, in the order of the graph, into its calls."""
        if calls == 1:
            return [nodes]
        signatures = [self._signature_of(node) for node in nodes]
        if calls is None:
            return _equal_parts(nodes, signatures, _repetition_count(signatures)) or [nodes]
        division_methods: tuple[Callable[[], list[Part]], ...] = (
            lambda: _equal_parts(nodes, signatures, calls),
            lambda: self._split_at_gaps(nodes),
            lambda: self._split_by_connection(nodes),
        )
        for divide in division_methods:
            call_parts = divide()
            if len(call_parts) == calls and len({self._common_content(call_nodes) for call_nodes in call_parts}) == 1:
                return call_parts
        return Refusal(f"it is called {calls} times, and the graph does not tell which of its nodes are of which call")

    def _signature_of(self, node: ir.Node) -> Signature:
        """Return the signature of a node."""
        tag = read_tag(node)
        tensors = [(str(value.name), value.const_value) for value in self._cutter.reads(node) if value.is_initializer()]
        # Exporters write small constants once per call; a weight is the same tensor in all calls.
        weights = tuple(name for name, tensor in tensors if tensor and tensor.size > OPERAND_LIMIT_ELEMENTS)
        return Signature(node.domain, node.op_type, tag.tag if tag else "", len(node.inputs), weights)

    def _common_content(self, nodes: Part) -> frozenset[object]:
        """Return what any two calls of one module share: its weights, or where it has none its operators."""
        signatures = [self._signature_of(node) for node in nodes]
        weights = frozenset(name for signature in signatures for name in signature.weights)
        return weights or frozenset(Counter(signature[:2] for signature in signatures).items())

    def _split_at_gaps(self, nodes: Part) -> list[Part]:
        """Divide where nodes of other modules lie between, in graph order; constants do not divide."""
        call_parts: list[Part] = []
        members = set(nodes)
        in_run = False
        for node in self._cutter.between(nodes[0], nodes[-1]):
            if node in members:
                if not in_run:
                    call_parts.append([])
                call_parts[-1].append(node)
                in_run = True
            elif not self._cutter.is_constant(node):
                in_run = False
        return call_parts

    def _split_by_connection(self, nodes: Part) -> list[Part]:
        """Divide into parts that exchange no values."""
        leader = {node: node for node in nodes}

        def leader_of(node: ir.Node) -> ir.Node:
            while leader[node] is not node:
                leader[node] = node = leader[leader[node]]
            return node

        for node in nodes:
            for value in self._cutter.reads(node):
                if (producer := value.producer()) in leader:
                    leader[leader_of(node)] = leader_of(producer)
        call_parts: dict[ir.Node, Part] = defaultdict(list)
        for node in nodes:
            call_parts[leader_of(node)].append(node)
        return list(call_parts.values())


def _recorded_calls(text: str) -> dict[str, int]:
    """Return tag → number of calls at export, from the metadata; nothing where it is damaged."""
    try:
        return {entry["tag"]: entry["calls"] for entry in json.loads(text or "[]") if entry.get("calls")}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _tags_within(tags: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return tag → tags within it, itself included; also for the tags above the given ones."""
    tags_within: dict[str, dict[str, None]] = defaultdict(dict)
    for tag in tags:
        segments = address.parse_tag(tag)
        for depth in range(1, len(segments) + 1):
            tags_within[address.format_tag(segments[:depth])][tag] = None
    return {tag: tuple(below) for tag, below in tags_within.items()}


def _equal_parts(nodes: Part, signatures: Sequence[Signature], count: int) -> list[Part]:
    """Divide into ``count`` parts of equal length whose nodes match one by one; no parts where they do not."""
    if count < 2 or len(nodes) % count:
        return []
    length = len(nodes) // count
    if any(signatures[number] != signatures[number % length] for number in range(len(nodes))):
        return []
    return [nodes[start : start + length] for start in range(0, len(nodes), length)]


def _repetition_count(signatures: Sequence[Signature]) -> int:
    """Return how often every node that reads weights occurs; 1 where they differ, or no node reads weights."""
    counts = [count for signature, count in Counter(signatures).items() if signature.weights]
    return math.gcd(*counts) if counts else 1
