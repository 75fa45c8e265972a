"""Counts operators and names of a graph, to tell how often a capability fired."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import onnx_ir as ir

from winml.modelkit.hierarchy.coverage import all_nodes
from winml.modelkit.optimize.capabilities import Capability

__all__ = ["GraphCensus", "operator_name"]


@dataclass(frozen=True)
class GraphCensus:
    """The operators and names of a graph."""

    operators: Counter[str]
    """Operator, with its domain where that is not ONNX itself (``com.microsoft:Gelu``) → number of nodes."""
    names: frozenset[str]
    """Names of nodes and initializers."""

    @classmethod
    def of(cls, model: ir.Model) -> GraphCensus:
        """Count a model, subgraphs and functions included."""
        nodes = list(all_nodes(model))
        names = {node.name or "" for node in nodes} | {name for graph in model.graphs() for name in graph.initializers}
        return cls(Counter(map(operator_name, nodes)), frozenset(names))

    def fired(self, capability: Capability, before: GraphCensus) -> int | None:
        """Return how often a capability fired between ``before`` and this graph, or None where that is unknown."""
        if capability.makes:
            added = sum(self.operators[name] - before.operators[name] for name in capability.makes)
            return max(0, added)
        if capability.marks:
            return sum(any(mark in name for mark in capability.marks) for name in self.names - before.names)
        return None

    def by_count(self) -> dict[str, int]:
        """Return the operators, the most frequent first."""
        return dict(sorted(self.operators.items(), key=lambda item: (-item[1], item[0])))


def operator_name(node: ir.Node) -> str:
    """Return the operator of a node, with its domain where that is not ONNX itself."""
    return f"{node.domain}:{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
