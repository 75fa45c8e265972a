"""What changed between two files: the record of ``winml diff``, module by module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["ChangedModule", "ComparedFile", "ModuleStatus", "StructureDiff", "WeightChange"]

ModuleStatus = Literal["added", "removed", "changed", "renamed"]
BeforeAfter = tuple[int, int]
"""A number before and after."""


@dataclass(frozen=True)
class ComparedFile:
    """One side in numbers."""

    path: Path
    size_bytes: int
    """With its data files."""
    nodes: int
    parameters: int
    weight_bytes: int
    opset: int
    tree_source: str
    """What says which module a node belongs to."""

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return {
            "path": str(self.path),
            "size_bytes": self.size_bytes,
            "nodes": self.nodes,
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "opset": self.opset,
            "tree_source": self.tree_source,
        }


@dataclass(frozen=True)
class WeightChange:
    """One weight that is not on both sides as it was; its values are not told."""

    name: str
    status: Literal["added", "removed", "changed", "renamed"]
    before: str = ""
    """Type and shape before: ``float32[384, 384]``; empty where it is new."""
    after: str = ""
    renamed_from: str = ""

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return {
            "name": self.name,
            "status": self.status,
            "before": self.before or None,
            "after": self.after or None,
            "renamed_from": self.renamed_from or None,
        }


@dataclass(frozen=True)
class ChangedModule:
    """One module that is not on both sides as it was; nodes and weights of modules below it not included."""

    status: ModuleStatus
    module: str
    """Module path."""
    tag: str
    class_name: str
    nodes: BeforeAfter
    parameters: BeforeAfter
    size_bytes: BeforeAfter
    operators: Mapping[str, BeforeAfter] = field(default_factory=dict)
    """Operator → nodes before and after, where they differ."""
    dtypes: Mapping[str, BeforeAfter] = field(default_factory=dict)
    """Type of weights → bytes before and after, where they differ."""
    weights: tuple[WeightChange, ...] = ()
    attributes_changed: int = 0
    """Nodes whose operator is as before and whose attributes are not."""
    renamed_from: str = ""
    """Tag it had before."""

    @property
    def fusions(self) -> dict[str, int]:
        """Operators that came while others went → how many more there are."""
        if not any(after < before for before, after in self.operators.values()):
            return {}
        return {name: after - before for name, (before, after) in self.operators.items() if after > before}

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return {
            "status": self.status,
            "module": self.module,
            "tag": self.tag,
            "class": self.class_name or None,
            "renamed_from": self.renamed_from or None,
            "nodes": list(self.nodes),
            "parameters": list(self.parameters),
            "size_bytes": list(self.size_bytes),
            "operators": {name: list(match) for name, match in self.operators.items()},
            "dtypes": {name: list(match) for name, match in self.dtypes.items()},
            "fusions": self.fusions,
            "attributes_changed": self.attributes_changed,
            "weights": [weight.as_record() for weight in self.weights],
        }


@dataclass(frozen=True)
class StructureDiff:
    """Everything that changed from one file to another."""

    before: ComparedFile
    after: ComparedFile
    operators: Mapping[str, BeforeAfter]
    """Operator → nodes before and after, where they differ; the largest change first."""
    interface: tuple[str, ...]
    """What changed of inputs, outputs and opsets, a sentence each."""
    modules: tuple[ChangedModule, ...]
    """Those that changed, in the order of the file after, removed ones where they stood."""
    same_modules: int
    """Modules that are as they were."""
    is_rewired: bool = False
    """Whether nodes and weights of all modules are as they were and yet the graph is another one."""
    notes: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether both compute the same with the same weights, as far as the structure tells."""
        return not (self.modules or self.interface or self.is_rewired)

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready record: sizes in bytes, numbers as ``[before, after]``."""
        return {
            "schema_version": 1,
            "is_same": self.is_same,
            "before": self.before.as_record(),
            "after": self.after.as_record(),
            "operators": {name: list(match) for name, match in self.operators.items()},
            "interface": list(self.interface),
            "modules": [module.as_record() for module in self.modules],
            "same_modules": self.same_modules,
            "is_rewired": self.is_rewired,
            "notes": list(self.notes),
        }
