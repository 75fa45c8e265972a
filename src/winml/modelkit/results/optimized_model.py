"""What came of optimizing a file: the record its summary is made from, and what the graph looked like before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.compare.structure import changed_counts
from winml.modelkit.hierarchy.tagging import Coverage
from winml.modelkit.progress import StepTiming
from winml.modelkit.results.module_functions import ModuleFunctions
from winml.modelkit.results.written_file import WrittenFile

__all__ = [
    "GraphSummary",
    "ModuleChange",
    "OptimizationLoop",
    "OptimizationRound",
    "OptimizedFile",
]


@dataclass(frozen=True)
class GraphSummary:
    """A graph in numbers."""

    operators: Mapping[str, int]
    """Operator → nodes; those that are not of ONNX itself with their domain (``com.microsoft:Gelu``)."""
    modules: Mapping[str, Mapping[str, int]]
    """Tag → operators of the nodes that bear it, those of deeper modules not included."""
    size_bytes: int
    """Of the file, with its data files."""
    opset: int

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(self.operators.values())


@dataclass(frozen=True)
class ModuleChange:
    """What became of the nodes of one module."""

    tag: str
    nodes_before: int
    nodes_after: int
    operators: Mapping[str, int]
    """Operator → how many more there are now, or fewer; those as before are absent."""

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {
            "tag": self.tag,
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "operators": dict(self.operators),
        }


@dataclass(frozen=True)
class OptimizedFile:
    """Everything there is to tell about one optimization."""

    source: Path
    model_path: Path
    files: tuple[WrittenFile, ...]
    """Every file written, the model first."""
    is_copy: bool
    """Whether nothing was asked for and the source was in its plain form: the result is the source under another
    name."""
    is_plain: bool
    """Whether the result is in its plain form."""
    normalizations: int
    """How often the graph was brought into its plain form: 0 or 1."""
    enabled: tuple[str, ...]
    """Capabilities that were on."""
    fired: Mapping[str, int]
    """Those of them that can be counted → how often they fired."""
    before: GraphSummary
    after: GraphSummary
    coverage: Coverage
    """Tags of the file as it is now."""
    is_tagged: bool
    """Whether the source said which module its nodes came from; otherwise coverage is unknown."""
    verification: VerificationInfo | None
    """Comparison with the source; None where it was not asked for, or the result is a copy."""
    steps: tuple[StepTiming, ...]
    notes: tuple[str, ...]
    functions: ModuleFunctions | None = None
    """Modules that are functions of the file; None where none were asked for."""

    def operator_changes(self) -> dict[str, tuple[int, int]]:
        """Return the operators whose number changed: nodes before and after, the largest change first."""
        return changed_counts(self.before.operators, self.after.operators)

    def module_changes(self) -> tuple[ModuleChange, ...]:
        """Return the modules whose operators changed, in the order of the source, new ones last."""
        return _changes_by_module(self.before, self.after)

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready summary: sizes in bytes, times in milliseconds."""
        unknown = {} if self.is_tagged else {"percent": None, "at_root_percent": None}
        return {
            "source": str(self.source),
            "model_path": str(self.model_path),
            "files": [file.as_record() for file in self.files],
            "is_copy": self.is_copy,
            "normalizations": self.normalizations,
            "enabled": list(self.enabled),
            "fired": dict(self.fired),
            **{
                key: {"nodes": graph.nodes, "operators": dict(graph.operators), "size_bytes": graph.size_bytes,
                      "opset": graph.opset}
                for key, graph in (("before", self.before), ("after", self.after))
            },
            "modules": [change.as_record() for change in self.module_changes()],
            "coverage": {**self.coverage.as_record(), **unknown},
            "verification": self.verification.as_record() if self.verification else None,
            "functions": self.functions.as_record() if self.functions else None,
            "steps": [step.as_record() for step in self.steps],
            "notes": list(self.notes),
        }  # fmt: skip


@dataclass(frozen=True)
class OptimizationRound:
    """What one round of optimizing did."""

    number: int
    """From 1."""
    enabled: tuple[str, ...]
    """Capabilities that were on."""
    fired: Mapping[str, int]
    """Those of them that can be counted → how often they fired."""
    changed: bool
    """Whether the graph is another one than before the round."""
    before: GraphSummary
    after: GraphSummary
    seconds: float

    def operator_changes(self) -> dict[str, tuple[int, int]]:
        """Return the operators whose number changed: nodes before and after, the largest change first."""
        return changed_counts(self.before.operators, self.after.operators)

    def module_changes(self) -> tuple[ModuleChange, ...]:
        """Return the modules whose operators changed, in the order of the graph, new ones last."""
        return _changes_by_module(self.before, self.after)

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form; time in milliseconds."""
        return {
            "number": self.number,
            "enabled": list(self.enabled),
            "fired": dict(self.fired),
            "changed": self.changed,
            "nodes_before": self.before.nodes,
            "nodes_after": self.after.nodes,
            "modules": [change.as_record() for change in self.module_changes()],
            "milliseconds": round(self.seconds * 1000, 1),
        }


@dataclass(frozen=True)
class OptimizationLoop:
    """What came of optimizing in rounds."""

    file: OptimizedFile
    """The result of all rounds together."""
    rounds: tuple[OptimizationRound, ...]

    @property
    def is_settled(self) -> bool:
        """Whether the last round found nothing more to do."""
        return not self.rounds[-1].changed

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {
            "is_settled": self.is_settled,
            "rounds": [item.as_record() for item in self.rounds],
            "file": self.file.as_record(),
        }


def _changes_by_module(before: GraphSummary, after: GraphSummary) -> tuple[ModuleChange, ...]:
    changes = []
    for tag in dict.fromkeys([*before.modules, *after.modules]):
        old, new = before.modules.get(tag, {}), after.modules.get(tag, {})
        changed = {name: count - earlier for name, (earlier, count) in changed_counts(old, new).items()}
        if changed:
            changes.append(ModuleChange(tag, sum(old.values()), sum(new.values()), changed))
    return tuple(changes)
