"""What came of an export: the record every report is made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.graph.dimensions import DynamicDimension
from winml.modelkit.graph.specs import InputTensorSpec, OutputTensorSpec
from winml.modelkit.hierarchy.coverage import Coverage
from winml.modelkit.hierarchy.tagging import Source
from winml.modelkit.hierarchy.tree import ModuleTree
from winml.modelkit.load.parts import ModelInfo
from winml.modelkit.progress import StepTiming
from winml.modelkit.results.written_file import WrittenFile

__all__ = ["ExportResult", "NodeRecord"]


@dataclass(frozen=True)
class NodeRecord:
    """One node of the written file, subgraphs included."""

    name: str
    op_type: str
    tag: str
    module: str
    source: Source | None
    """None where tags were not asked for."""


@dataclass(frozen=True)
class ExportResult:
    """Everything there is to tell about one export."""

    model_path: Path
    files: tuple[WrittenFile, ...]
    """Every file written, the model first."""
    model: ModelInfo
    tree: ModuleTree
    nodes: tuple[NodeRecord, ...]
    coverage: Coverage
    """Counted on the written graph."""
    inputs: tuple[InputTensorSpec, ...]
    outputs: tuple[OutputTensorSpec, ...]
    verification: VerificationInfo | None
    """None where it was not asked for."""
    steps: tuple[StepTiming, ...]
    started: datetime
    tool_version: str
    exporter: str
    """``torchscript`` or ``dynamo``."""
    opset_requested: int
    opset_produced: int
    notes: tuple[str, ...]
    """What the user should know, one sentence each."""
    dimensions: tuple[DynamicDimension, ...] = ()
    """The dimensions left open, each with the size it was traced with."""
    checked_sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Dimension → other sizes at which the file was compared with PyTorch."""
    exporter_reason: str = ""
    """Why that exporter was used; empty where it was simply the first to be tried."""

    @property
    def seconds(self) -> float:
        """Time from the first step to the last."""
        return sum(step.seconds for step in self.steps)

    @property
    def exporter_words(self) -> str:
        """The exporter, the opset and the reason: ``dynamo, opset 18 (asked for)``."""
        reason = f" ({self.exporter_reason})" if self.exporter_reason else ""
        asked = f", asked for {self.opset_requested}" if self.opset_requested != self.opset_produced else ""
        return f"{self.exporter}, opset {self.opset_produced}{asked}{reason}"

    def node_counts(self) -> Mapping[str, int]:
        """Count the nodes of each module by its path, those of deeper modules not included."""
        return Counter(node.module for node in self.nodes)

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready summary: sizes in bytes, times in milliseconds."""
        return {
            "model_path": str(self.model_path),
            "files": [file.as_record() for file in self.files],
            "model": self.model.as_record(),
            "exporter": self.exporter,
            "exporter_reason": self.exporter_reason,
            "opset_requested": self.opset_requested,
            "opset_produced": self.opset_produced,
            "inputs": [spec.as_record() for spec in self.inputs],
            "outputs": [spec.as_record() for spec in self.outputs],
            "dynamic": [
                {**dimension.model_dump(exclude_none=True), "checked": list(self.checked_sizes.get(dimension.name, ()))}
                for dimension in self.dimensions
            ],
            "modules_traced": len(self.tree),
            "nodes": self.coverage.nodes,
            "coverage": {
                "tagged": self.coverage.tagged,
                "percent": round(self.coverage.percent, 2),
                "sources": dict(self.coverage.sources),
            },
            "verification": self.verification.as_record() if self.verification else None,
            "steps": [step.as_record() for step in self.steps],
            "notes": list(self.notes),
        }
