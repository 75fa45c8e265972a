"""What would optimizing a file do? The record of ``winml optimize --check``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from winml.modelkit.records import Record

__all__ = ["BlockedFusion", "CheckedCapability", "OptimizationCheck"]


@dataclass(frozen=True)
class BlockedFusion(Record):
    """A place where a capability fires with fixed sizes, and does not with open ones."""

    module: str
    """Tag."""
    count: int
    """How often it fires there besides, with fixed sizes."""
    dimensions: Mapping[str, tuple[str, ...]]
    """Open dimension that keeps it from firing → where the inputs have it, ``input:axis``."""
    only_at_one: bool
    """Whether it fires because a size is 1, and with no larger one."""


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
