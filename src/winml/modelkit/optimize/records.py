"""Records of optimized files and of the check of capabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path

from winml.modelkit.compare.records import changed_counts
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.transform.records import GraphSummary, ModuleFunctions, TransformedFile


class ModuleChange(Record):
    """Changes to the nodes of one module."""

    tag: str
    nodes_before: int
    nodes_after: int
    operators: Mapping[str, int]
    """Operator → change of its number of nodes; unchanged operators are absent."""


class OptimizedFile(TransformedFile, document="optimize.table:optimization_document"):
    """Record of an optimized file."""

    is_copy: bool
    normalizations: int
    functions: ModuleFunctions | None = field(metadata=entry(before="steps"))
    enabled: tuple[str, ...]
    """Enabled capabilities."""
    fired: Mapping[str, int]
    """Countable enabled capabilities → how often they fired."""

    def operator_changes(self) -> dict[str, tuple[int, int]]:
        """Return the operators with changed numbers of nodes, before and after, the largest change first."""
        return changed_counts(self.before.operators, self.after.operators)

    @recorded(entry("modules", before="coverage"))
    def module_changes(self) -> tuple[ModuleChange, ...]:
        """Return the modules with changed operators, in the order of the source, new modules last."""
        return tuple(_changes_by_module(self.before, self.after))


class OptimizationRound(Record):
    """Result of one optimization round."""

    number: int
    """From 1."""
    enabled: tuple[str, ...]
    """Enabled capabilities."""
    fired: Mapping[str, int]
    """Countable enabled capabilities → how often they fired."""
    changed: bool
    """True if the round changed the graph."""
    before: GraphSummary = field(metadata=entry("nodes_before", attribute="nodes"))
    after: GraphSummary = field(metadata=entry("nodes_after", attribute="nodes"))
    seconds: float = field(metadata=entry("milliseconds", scale=1000, digits=1))

    def operator_changes(self) -> dict[str, tuple[int, int]]:
        """Return the operators with changed numbers of nodes, before and after, the largest change first."""
        return changed_counts(self.before.operators, self.after.operators)

    @recorded(entry("modules", before="milliseconds"))
    def module_changes(self) -> tuple[ModuleChange, ...]:
        """Return the modules with changed operators, in the order of the graph, new modules last."""
        return tuple(_changes_by_module(self.before, self.after))


class OptimizationLoop(Record):
    """Result of an optimization in rounds."""

    file: OptimizedFile = field(metadata=entry(last=True))
    """The result of all rounds together."""
    rounds: tuple[OptimizationRound, ...]

    @property
    @recorded(entry(before="rounds"))
    def is_settled(self) -> bool:
        """True if the last round changed nothing."""
        return not self.rounds[-1].changed


def _changes_by_module(before: GraphSummary, after: GraphSummary) -> Iterator[ModuleChange]:
    for tag in dict.fromkeys([*before.modules, *after.modules]):
        old, new = before.modules.get(tag, {}), after.modules.get(tag, {})
        changed = {name: count - earlier for name, (earlier, count) in changed_counts(old, new).items()}
        if changed:
            yield ModuleChange(tag, sum(old.values()), sum(new.values()), changed)


class BlockedFusion(Record):
    """A fusion prevented by dynamic sizes."""

    module: str
    """Tag of the module."""
    count: int
    """Number of additional matches with fixed sizes."""
    dimensions: Mapping[str, tuple[str, ...]]
    """Dynamic dimension that prevents it → its axes in the inputs, ``input:axis``."""
    only_at_one: bool
    """True if it fires only with a size of 1."""


class CheckedCapability(Record):
    """Effect of one capability."""

    name: str
    count: int | None
    """How often it fires; None for a capability that only removes nodes."""
    removed: int | None
    """Number of nodes removed by the capability alone; None for countable capabilities."""
    modules: Mapping[str, int]
    """Tag → how often it fires there, or number of removed nodes."""
    blocked: tuple[BlockedFusion, ...] = ()


class OptimizationCheck(Record):
    """Result of an optimization check, without a written file."""

    source: Path
    nodes_before: int
    nodes_after: int
    capabilities: tuple[CheckedCapability, ...]
    """Enabled capabilities, in registry order."""
    notes: tuple[str, ...]
