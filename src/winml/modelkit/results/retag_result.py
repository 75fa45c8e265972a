"""The result of carrying tags to a file that another tool wrote: the record of ``winml retag``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.hierarchy.carry.carrying import CarryReport
from winml.modelkit.hierarchy.coverage import Coverage

__all__ = ["RetaggedModel"]


@dataclass(frozen=True)
class RetaggedModel:
    """One file whose nodes got the tags of the file it was made from."""

    model_path: Path
    before: Path
    """The tagged file another tool was given."""
    after: Path
    """The file that tool wrote."""
    report: CarryReport
    """How the nodes got their tags."""
    coverage: Coverage
    repaired: int
    """Nodes whose metadata held a key more than once."""
    size_bytes: int
    notes: tuple[str, ...]

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready summary."""
        return {
            "model_path": str(self.model_path),
            "before": str(self.before),
            "after": str(self.after),
            "size_bytes": self.size_bytes,
            "nodes": self.coverage.nodes,
            "coverage": self.coverage.as_record(),
            "ways": dict(self.report.by_way),
            "sources": dict(self.coverage.sources),
            "repaired_nodes": self.repaired,
            "notes": list(self.notes),
        }
