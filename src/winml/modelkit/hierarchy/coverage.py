"""Counts the nodes of a graph that carry a tag, by the source of the tag, and those that only the root stands for.

Counts the graph as written, subgraphs and functions included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.tagging import read_tag

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["Coverage", "all_nodes", "count_coverage", "measure_coverage"]


@dataclass(frozen=True)
class Coverage:
    """Number of nodes, of tagged nodes, of tagged nodes per source, and of those at the root."""

    nodes: int
    tagged: int
    sources: Mapping[str, int]
    """Number of tagged nodes per source; sources without nodes are absent."""
    at_root: int = 0
    """Number of nodes whose tag is that of the root, by whatever source."""

    @property
    def percent(self) -> float:
        """Share of tagged nodes, 0 to 100; an empty graph is fully covered."""
        return 100.0 * self.tagged / self.nodes if self.nodes else 100.0

    @property
    def at_root_percent(self) -> float:
        """Share of the nodes that stand at the root, 0 to 100."""
        return 100.0 * self.at_root / self.nodes if self.nodes else 0.0

    @property
    def is_complete(self) -> bool:
        """Whether every node carries a tag."""
        return self.tagged == self.nodes

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form; shares from 0 to 100."""
        return {
            "tagged": self.tagged,
            "percent": round(self.percent, 2),
            "at_root": self.at_root,
            "at_root_percent": round(self.at_root_percent, 2),
            "sources": dict(self.sources),
        }


def measure_coverage(model: ir.Model) -> Coverage:
    """Count the tagged nodes of a model, those of subgraphs and of functions included."""
    return count_coverage(all_nodes(model))


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yield every node of a model, those of subgraphs and of functions included."""
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


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
