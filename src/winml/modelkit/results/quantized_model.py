"""What came of quantizing a file: the record its summary is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.compare.fidelity import FidelityInfo
from winml.modelkit.hierarchy.tagging import Coverage
from winml.modelkit.progress import StepTiming
from winml.modelkit.quantize.planning import ModulePrecision
from winml.modelkit.results.optimized_model import GraphSummary
from winml.modelkit.results.written_file import WrittenFile

__all__ = ["Calibrated", "QuantizedFile"]


@dataclass(frozen=True)
class Calibrated:
    """Where the ranges of activations came from."""

    words: str
    """For people."""
    record: Mapping[str, Any]
    """As it stands in the file."""


@dataclass(frozen=True)
class QuantizedFile:
    """Everything there is to tell about one quantization."""

    source: Path
    model_path: Path
    files: tuple[WrittenFile, ...]
    """Every file written, the model first."""
    precision: str
    """What was asked for everywhere."""
    modes: tuple[str, ...]
    """The ways that were used, in order."""
    modules: tuple[ModulePrecision, ...]
    """Modules that have nodes with weights, in the order of the graph."""
    before: GraphSummary
    after: GraphSummary
    coverage: Coverage
    """Tags of the file as it is now."""
    is_tagged: bool
    """Whether the source said which module its nodes came from; otherwise coverage is unknown."""
    fidelity: FidelityInfo | None
    """Comparison with the source; None where it was not asked for."""
    steps: tuple[StepTiming, ...]
    notes: tuple[str, ...]
    normalizations: int = 0
    """How often the graph was brought into its plain form: 0 or 1."""
    calibration: Calibrated | None = None
    """None where no mode needed ranges."""

    @property
    def quantized(self) -> int:
        """Number of nodes with a weight that were quantized."""
        return sum(module.quantized for module in self.modules)

    @property
    def left(self) -> dict[str, int]:
        """Why nodes with a weight keep theirs → how many, the most frequent first."""
        reasons: dict[str, int] = {}
        for module in self.modules:
            for reason, count in module.left.items():
                reasons[reason] = reasons.get(reason, 0) + count
        return dict(sorted(reasons.items(), key=lambda item: -item[1]))

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready summary: sizes in bytes, times in milliseconds."""
        unknown = {} if self.is_tagged else {"percent": None, "at_root_percent": None}
        return {
            "schema_version": 1,
            "source": str(self.source),
            "model_path": str(self.model_path),
            "files": [file.as_record() for file in self.files],
            "precision": self.precision,
            "modes": list(self.modes),
            "quantized": self.quantized,
            "left": self.left,
            **({} if self.calibration is None else {"calibration": dict(self.calibration.record)}),
            "modules": [module.as_record() for module in self.modules],
            **{
                key: {"nodes": graph.nodes, "operators": dict(graph.operators), "size_bytes": graph.size_bytes,
                      "opset": graph.opset}
                for key, graph in (("before", self.before), ("after", self.after))
            },
            "coverage": {**self.coverage.as_record(), **unknown},
            "verification": self.fidelity.as_record() if self.fidelity else None,
            "steps": [step.as_record() for step in self.steps],
            "notes": list(self.notes),
        }  # fmt: skip
