"""One written file and its size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.graph.specs import InputTensorSpec, OutputTensorSpec
from winml.modelkit.hierarchy.carry.carrying import CarryReport
from winml.modelkit.hierarchy.tagging import Coverage

__all__ = [
    "PinnedModel",
    "RetaggedModel",
    "WrittenFile",
]


@dataclass(frozen=True)
class WrittenFile:
    """A file that a verb wrote."""

    path: Path
    size_bytes: int

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {"path": str(self.path), "size_bytes": self.size_bytes}


# --- The result of fixing the open dimensions of an ONNX file.


@dataclass(frozen=True)
class PinnedModel:
    """The result of fixing sizes."""

    model_path: Path
    sizes: Mapping[str, int]
    """Dimension → size, as fixed."""
    still_open: tuple[str, ...]
    inputs: tuple[InputTensorSpec, ...]
    outputs: tuple[OutputTensorSpec, ...]
    coverage: Coverage
    verification: VerificationInfo | None
    """Comparison with the file it was made from; None where it was not asked for."""
    size_bytes: int
    notes: tuple[str, ...]

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready summary."""
        return {
            "model_path": str(self.model_path),
            "size_bytes": self.size_bytes,
            "pinned": dict(self.sizes),
            "open": list(self.still_open),
            "inputs": [spec.as_record() for spec in self.inputs],
            "outputs": [spec.as_record() for spec in self.outputs],
            "nodes": self.coverage.nodes,
            "coverage": self.coverage.as_record(),
            "verification": self.verification.as_record() if self.verification else None,
            "notes": list(self.notes),
        }


# --- The result of carrying tags to a file that another tool wrote: the record of ``winml retag``.


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
