"""Counts operators and names of a graph, to tell how often a capability fired."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from winml.modelkit.optimize.capabilities import Capability
from winml.modelkit.tags.tagging import all_nodes, operator_name, read_tag


@dataclass(frozen=True)
class GraphCensus:
    """The operators and names of a graph."""

    operators: Counter[str]
    """Operator, with its domain where that is not ONNX itself (``com.microsoft:Gelu``) → number of nodes."""
    names: frozenset[str]
    """Names of nodes and initializers."""
    modules: Mapping[str, Counter[str]] = field(default_factory=dict)
    """Tag → operators of its nodes; of nodes without a tag the empty text."""
    tag_of: Mapping[str, str] = field(default_factory=dict)
    """Name of a node, or of an initializer, → tag of the node, or of the first that reads it."""

    @classmethod
    def of(cls, model: ir.Model) -> GraphCensus:
        """Count a model, subgraphs and functions included."""
        nodes = list(all_nodes(model))
        names = {node.name or "" for node in nodes} | {name for graph in model.graphs() for name in graph.initializers}
        modules: defaultdict[str, Counter[str]] = defaultdict(Counter)
        tag_of: dict[str, str] = {}
        for node in nodes:
            found = read_tag(node)
            tag = "" if found is None else found.tag
            modules[tag][operator_name(node)] += 1
            for name in (node.name, *(value.name for value in node.inputs if value is not None)):
                tag_of.setdefault(name or "", tag)
        return cls(Counter(map(operator_name, nodes)), frozenset(names), modules, tag_of)

    def fired(self, capability: Capability, before: GraphCensus) -> int | None:
        """Return how often a capability fired between ``before`` and this graph, or None where that is unknown."""
        if capability.makes:
            added = sum(self.operators[name] - before.operators[name] for name in capability.makes)
            return max(0, added)
        if capability.marks:
            return sum(any(mark in name for mark in capability.marks) for name in self.names - before.names)
        return None

    def fired_in(self, capability: Capability, before: GraphCensus) -> dict[str, int]:
        """Return in which modules it fired, by tag; of one that cannot be counted, which modules it made shorter."""
        found: Counter[str] = Counter()
        if capability.marks and not capability.makes:
            for name in sorted(self.names - before.names):
                if any(mark in name for mark in capability.marks):
                    found[self.tag_of.get(name, "")] += 1
            return dict(found)
        for tag in dict.fromkeys([*before.modules, *self.modules]):
            now, then = self.modules.get(tag, Counter()), before.modules.get(tag, Counter())
            if capability.makes:
                found[tag] = sum(now[name] - then[name] for name in capability.makes)
            else:
                found[tag] = then.total() - now.total()
        return {tag: count for tag, count in found.most_common() if count > 0}
