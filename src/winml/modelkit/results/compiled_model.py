"""What came of compiling a file: the record its summary is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.compare.fidelity import FidelityInfo
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.compile.pipeline import CompiledPart, OutsideNode
from winml.modelkit.hierarchy.tagging import Coverage
from winml.modelkit.progress import StepTiming
from winml.modelkit.results.optimized_model import GraphSummary
from winml.modelkit.results.written_file import WrittenFile

__all__ = ["CompilableProvider", "CompiledFile"]


@dataclass(frozen=True)
class CompilableProvider:
    """One execution provider that a file can be compiled for."""

    short: str
    name: str
    """Its name in ONNX Runtime."""
    is_present: bool
    """Whether it can compile here."""
    devices: tuple[str, ...]
    makes: str
    """What a compiled file holds, in a few words."""
    package: str | None
    """Requirement of the package that brings it on this platform, for pip; None where there is none."""

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {**vars(self), "devices": list(self.devices)}


@dataclass(frozen=True)
class CompiledFile:
    """Everything there is to tell about one compilation."""

    source: Path
    model_path: Path
    files: tuple[WrittenFile, ...]
    """Every file written, the model first."""
    compiled: Mapping[str, Any]
    """What the file says of it: provider, versions, device, options."""
    parts: tuple[CompiledPart, ...]
    """The nodes that stand for what the provider compiled; empty for the CPU provider."""
    outside: tuple[OutsideNode, ...]
    """Beside them, the nodes that the provider left to the CPU provider."""
    before: GraphSummary
    after: GraphSummary
    coverage: Coverage
    """Tags of the file as it is now."""
    is_tagged: bool
    """Whether the source said which module its nodes came from; otherwise coverage is unknown."""
    comparison: VerificationInfo | FidelityInfo | None
    """Comparison with the source; None where it was not asked for."""
    steps: tuple[StepTiming, ...]
    notes: tuple[str, ...]
    normalizations: int = 0
    """How often the graph was brought into its plain form: 0 or 1."""

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready summary: sizes in bytes, times in milliseconds."""
        unknown = {} if self.is_tagged else {"percent": None, "at_root_percent": None}
        return {
            "schema_version": 1,
            "source": str(self.source),
            "model_path": str(self.model_path),
            "files": [file.as_record() for file in self.files],
            "compiled": dict(self.compiled),
            "parts": [part.as_record() for part in self.parts],
            "outside": [node.as_record() for node in self.outside],
            "nodes_before": self.before.nodes,
            "nodes_after": self.after.nodes,
            "coverage": {**self.coverage.as_record(), **unknown},
            "verification": self.comparison.as_record() if self.comparison else None,
            "steps": [step.as_record() for step in self.steps],
            "notes": list(self.notes),
        }
