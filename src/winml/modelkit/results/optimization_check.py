"""What would optimizing a file do? The record of ``winml optimize --check``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["BlockedFusion", "CheckedCapability", "OptimizationCheck"]


@dataclass(frozen=True)
class BlockedFusion:
    """A place where a capability fires with fixed sizes, and does not with open ones."""

    module: str
    """Tag."""
    count: int
    """How often it fires there besides, with fixed sizes."""
    dimensions: Mapping[str, tuple[str, ...]]
    """Open dimension that keeps it from firing → where the inputs have it, ``input:axis``."""
    only_at_one: bool
    """Whether it fires because a size is 1, and with no larger one."""

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {**vars(self), "dimensions": {name: list(places) for name, places in self.dimensions.items()}}


@dataclass(frozen=True)
class CheckedCapability:
    """What one capability would do."""

    name: str
    count: int | None
    """How often it fires; None for one that only removes nodes, and is not counted one by one."""
    removed: int | None
    """Of such a one: how many nodes fewer there are after it alone; None for those that are counted."""
    modules: Mapping[str, int]
    """Tag → how often it fires there, or how many nodes go."""
    blocked: tuple[BlockedFusion, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {**vars(self), "modules": dict(self.modules), "blocked": [item.as_record() for item in self.blocked]}


@dataclass(frozen=True)
class OptimizationCheck:
    """What optimizing a file would do. Nothing was written."""

    source: Path
    nodes_before: int
    nodes_after: int
    capabilities: tuple[CheckedCapability, ...]
    """Those that are on, in the order of the registry."""
    notes: tuple[str, ...]

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {
            "source": str(self.source),
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "capabilities": [entry.as_record() for entry in self.capabilities],
            "notes": list(self.notes),
        }
