"""Which nodes of a graph make up one call of a module?

By their tags, those of all modules below it included. A module that is called several times keeps one tag, so its nodes
are divided into calls: by the number of calls the model's metadata records, else by what repeats with the same weights.
Where that cannot be told, or a call cannot stand alone, the answer is the reason.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from winml.modelkit.graph.cutting import Cut, Cutter, Refusal, node_words
from winml.modelkit.graph.fingerprint import OPERAND_LIMIT_ELEMENTS
from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.tagging import read_tag
from winml.modelkit.metadata_keys import TREE_KEY

__all__ = ["ModuleCall", "ModuleParts", "Signature"]

Part = list[ir.Node]


class Signature(NamedTuple):
    """What equal nodes of two calls have in common."""

    domain: str
    op_type: str
    tag: str
    inputs: int
    weights: tuple[str, ...]


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module, as far as it could be cut out."""

    call: int
    """Which call, from 1."""
    calls: int
    """How many there are in the graph."""
    result: Cut | Refusal


class ModuleParts:
    """The modules of one graph, ready to be cut out."""

    def __init__(self, model: ir.Model) -> None:
        """Look at the graph once.

        Args:
            model: A tagged model; its weights are not read.
        """
        self._cutter = Cutter(model)
        self._calls = _recorded_calls(model.metadata_props.get(TREE_KEY, ""))
        self._own: dict[str, Part] = defaultdict(list)
        self._inner: dict[str, ir.Node] = {}
        for node in self._cutter.position:
            if tag := read_tag(node):
                self._own[tag.tag].append(node)
        for inner, owner in self._cutter.owners.items():
            if tag := read_tag(inner):
                self._inner.setdefault(tag.tag, owner)
        for function in model.functions.values():
            for inner in function.all_nodes():
                if tag := read_tag(inner):
                    self._inner.setdefault(tag.tag, inner)
        self._tags_below = _below([*self._own, *self._inner])

    def cut(self, tag: str) -> tuple[ModuleCall, ...]:
        """Cut out every call of the module with this tag.

        Returns:
            One entry per call, in the order they run; none where no node of the module is left in the graph. A single
            entry with a refusal where the calls cannot be told apart.
        """
        own = self._nodes_of(tag)
        if hidden := self._hidden_part(tag, set(own)):
            return (ModuleCall(1, 1, hidden),)
        if not own:
            return ()
        changing = [node for node in own if not self._cutter.is_constant(node)]
        parts = self._divide(changing, self._calls.get(tag)) if changing else [own]
        if isinstance(parts, Refusal):
            return (ModuleCall(1, 1, parts),)
        shared = self._shared_nodes(tag)
        return tuple(
            ModuleCall(number, len(parts), self._cutter.cut(part, may_join=shared))
            for number, part in enumerate(parts, start=1)
        )

    def _nodes_of(self, tag: str) -> Part:
        nodes = [node for below in self._tags_below.get(tag, ()) for node in self._own.get(below, ())]
        return sorted(nodes, key=self._cutter.position.__getitem__)

    def _hidden_part(self, tag: str, own: set[ir.Node]) -> Refusal | None:
        """Return why a module that runs inside a node of another module cannot be cut out, or None."""
        for below in self._tags_below.get(tag, ()):
            owner = self._inner.get(below)
            if owner is None or owner in own:
                continue
            if owner in self._cutter.position:
                return Refusal(
                    f"it runs inside {node_words(owner)}, which belongs to another module; values inside a subgraph "
                    "cannot be recorded"
                )
            if not own:
                return Refusal(f"it runs inside a function of the model, at {node_words(owner)}")
        return None

    def _shared_nodes(self, tag: str) -> Part:
        """Return the nodes of modules elsewhere that are called more than once, so perhaps also by this one."""
        return [
            node
            for other, nodes in self._own.items()
            if self._calls.get(other, 1) > 1 and not address.is_within(other, tag)
            for node in nodes
        ]

    def _divide(self, nodes: Part, calls: int | None) -> list[Part] | Refusal:
        """Divide the nodes of a module, in the order of the graph, into its calls."""
        if calls == 1:
            return [nodes]
        signatures = [self._signature(node) for node in nodes]
        if calls is None:
            return _equal_parts(nodes, signatures, _repetitions(signatures)) or [nodes]
        ways: tuple[Callable[[], list[Part]], ...] = (
            lambda: _equal_parts(nodes, signatures, calls),
            lambda: self._runs(nodes),
            lambda: self._connected(nodes),
        )
        for way in ways:
            parts = way()
            if len(parts) == calls and len({self._content(part) for part in parts}) == 1:
                return parts
        return Refusal(f"it is called {calls} times, and the graph does not tell which of its nodes are of which call")

    def _signature(self, node: ir.Node) -> Signature:
        """Return what equal nodes of two calls have in common."""
        tag = read_tag(node)
        tensors = [(str(value.name), value.const_value) for value in self._cutter.reads(node) if value.is_initializer()]
        # Exporters write small constants anew for each call; a weight is the same tensor in all of them.
        weights = tuple(name for name, tensor in tensors if tensor and tensor.size > OPERAND_LIMIT_ELEMENTS)
        return Signature(node.domain, node.op_type, tag.tag if tag else "", len(node.inputs), weights)

    def _content(self, part: Part) -> frozenset[object]:
        """Return what two calls of one module have in common however they ran: its weights, else its operators."""
        signatures = [self._signature(node) for node in part]
        weights = frozenset(name for signature in signatures for name in signature.weights)
        return weights or frozenset(Counter(signature[:2] for signature in signatures).items())

    def _runs(self, nodes: Part) -> list[Part]:
        """Divide where nodes of other modules stand between, in the order of the graph; constants do not count."""
        parts: list[Part] = []
        members = set(nodes)
        is_open = False
        for node in self._cutter.between(nodes[0], nodes[-1]):
            if node in members:
                if not is_open:
                    parts.append([])
                parts[-1].append(node)
                is_open = True
            elif not self._cutter.is_constant(node):
                is_open = False
        return parts

    def _connected(self, nodes: Part) -> list[Part]:
        """Divide into parts no value passes between."""
        leader = {node: node for node in nodes}

        def find(node: ir.Node) -> ir.Node:
            while leader[node] is not node:
                leader[node] = node = leader[leader[node]]
            return node

        for node in nodes:
            for value in self._cutter.reads(node):
                if (producer := value.producer()) in leader:
                    leader[find(node)] = find(producer)
        parts: dict[ir.Node, Part] = defaultdict(list)
        for node in nodes:
            parts[find(node)].append(node)
        return list(parts.values())


def _recorded_calls(text: str) -> dict[str, int]:
    """Return how often each module was called when it was exported, by tag, as far as the file says."""
    try:
        return {record["tag"]: record["calls"] for record in json.loads(text or "[]") if record.get("calls")}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _below(tags: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return for each tag, and those above it, the tags that lie within it."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for tag in tags:
        segments = address.parse_tag(tag)
        for depth in range(1, len(segments) + 1):
            found[address.format_tag(segments[:depth])][tag] = None
    return {tag: tuple(below) for tag, below in found.items()}


def _equal_parts(nodes: Part, signatures: Sequence[Signature], count: int) -> list[Part]:
    """Divide into ``count`` parts of equal length whose nodes match one by one; no parts where they do not."""
    if count < 2 or len(nodes) % count:
        return []
    length = len(nodes) // count
    if any(signatures[number] != signatures[number % length] for number in range(len(nodes))):
        return []
    return [nodes[start : start + length] for start in range(0, len(nodes), length)]


def _repetitions(signatures: Sequence[Signature]) -> int:
    """Return how often all that reads weights repeats; 1 where something does not, or nothing reads any."""
    counts = [count for signature, count in Counter(signatures).items() if signature.weights]
    return math.gcd(*counts) if counts else 1
