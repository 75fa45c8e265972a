"""Records of optimized files and of the check of capabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from winml.modelkit.compare.records import changed_counts
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.transform.records import GraphSummary, ModuleFunctions, TransformedFile


@dataclass(frozen=True)
class ModuleChange(Record):
    """What became of the nodes of one module."""

    tag: str
    nodes_before: int
    nodes_after: int
    operators: Mapping[str, int]
    """Operator → how many more there are now, or fewer; those as before are absent."""


@dataclass(frozen=True)
class OptimizedFile(TransformedFile):
    """A file that was optimized."""

    is_copy: bool
    normalizations: int
    functions: ModuleFunctions | None = field(metadata=entry(before="steps"))
    enabled: tuple[str, ...]
    """Capabilities that were on."""
    fired: Mapping[str, int]
    """Those of them that can be counted → how often they fired."""

    def operator_changes(self) -> dict[str, tuple[int, int]]:
        """Return the operators whose number changed: nodes before and after, the largest change first."""
        return changed_counts(self.before.operators, self.after.operators)

    @recorded(entry("modules", before="coverage"))
    def module_changes(self) -> tuple[ModuleChange, ...]:
        """Return the modules whose operators changed, in the order of the source, new ones last."""
        return _changes_by_module(self.before, self.after)


@dataclass(frozen=True)
class OptimizationRound(Record):
    """What one round of optimizing did."""

    number: int
    """From 1."""
    enabled: tuple[str, ...]
    """Capabilities that were on."""
    fired: Mapping[str, int]
    """Those of them that can be counted → how often they fired."""
    changed: bool
    """True if the graph is another one than before the round."""
    before: GraphSummary = field(metadata=entry("nodes_before", attribute="nodes"))
    after: GraphSummary = field(metadata=entry("nodes_after", attribute="nodes"))
    seconds: float = field(metadata=entry("milliseconds", scale=1000, digits=1))

    def operator_changes(self) -> dict[str, tuple[int, int]]:
        """Return the operators whose number changed: nodes before and after, the largest change first."""
        return changed_counts(self.before.operators, self.after.operators)

    @recorded(entry("modules", before="milliseconds"))
    def module_changes(self) -> tuple[ModuleChange, ...]:
        """Return the modules whose operators changed, in the order of the graph, new ones last."""
        return _changes_by_module(self.before, self.after)


@dataclass(frozen=True)
class OptimizationLoop(Record):
    """What came of optimizing in rounds."""

    file: OptimizedFile = field(metadata=entry(last=True))
    """The result of all rounds together."""
    rounds: tuple[OptimizationRound, ...]

    @property
    @recorded(entry(before="rounds"))
    def is_settled(self) -> bool:
        """True if the last round found nothing more to do."""
        return not self.rounds[-1].changed


def _changes_by_module(before: GraphSummary, after: GraphSummary) -> tuple[ModuleChange, ...]:
    changes = []
    for tag in dict.fromkeys([*before.modules, *after.modules]):
        old, new = before.modules.get(tag, {}), after.modules.get(tag, {})
        changed = {name: count - earlier for name, (earlier, count) in changed_counts(old, new).items()}
        if changed:
            changes.append(ModuleChange(tag, sum(old.values()), sum(new.values()), changed))
    return tuple(changes)


@dataclass(frozen=True)
class BlockedFusion(Record):
    """A place where a capability fires with fixed sizes, and does not with open ones."""

    module: str
    """Tag."""
    count: int
    """How often it fires there besides, with fixed sizes."""
    dimensions: Mapping[str, tuple[str, ...]]
    """Dynamic dimension that keeps it from firing → where the inputs have it, ``input:axis``."""
    only_at_one: bool
    """True if it fires because a size is 1, and with no larger one."""


@dataclass(frozen=True)
class CheckedCapability(Record):
    """What one capability would do."""

    name: str
    count: int | None
    """How often it fires; None for one that only removes nodes, and is not counted one by one."""
    removed: int | None
    """Of such a one: how many nodes fewer there are after it alone; None for those that are counted."""
    modules: Mapping[str, int]
    """Tag → how often it fires there, or how many nodes go."""
    blocked: tuple[BlockedFusion, ...] = ()


@dataclass(frozen=True)
class OptimizationCheck(Record):
    """What optimizing a file would do. Nothing was written."""

    source: Path
    nodes_before: int
    nodes_after: int
    capabilities: tuple[CheckedCapability, ...]
    """Those that are on, in the order of the registry."""
    notes: tuple[str, ...]
