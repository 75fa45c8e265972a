"""The result of fixing the open dimensions of an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.graph.specs import InputTensorSpec, OutputTensorSpec
from winml.modelkit.hierarchy.coverage import Coverage

__all__ = ["PinnedModel"]


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
