"""The record of an export, from which all reports are rendered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from winml.modelkit.compare.fidelity import FidelityInfo
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.compare.words import fidelity_words, verification_words
from winml.modelkit.models.parts import ModelInfo
from winml.modelkit.onnx.assumptions import Assumption
from winml.modelkit.onnx.bundle import PartDescription, only_part
from winml.modelkit.onnx.files.companions import Companions
from winml.modelkit.onnx.specs import DynamicDimension, InputTensorSpec, OutputTensorSpec
from winml.modelkit.progress import StepTiming
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.report.result import Result
from winml.modelkit.tags.tagging import Coverage, Source
from winml.modelkit.tags.tree import ModuleNode, ModuleTree
from winml.modelkit.transform.records import ModuleFunctions, WrittenFile
from winml.modelkit.words import count_noun, count_words

STEPS = (
    "model preparation",
    "input generation",
    "hierarchy building",
    "ONNX export",
    "node tagger creation",
    "node tagging",
    "tag injection",
    "metadata and reports",
)
"""A model of several parts goes through all steps except the first once per part."""


@dataclass(frozen=True)
class NodeRecord:
    """One node of the written file, subgraphs included."""

    name: str
    op_type: str
    tag: str
    module: str
    source: Source | None
    """None if the export writes no tags."""


@dataclass(frozen=True)
class ModuleSize:
    """Number of nodes and parameters of a module."""

    nodes: int
    """Number of its nodes, including submodules."""
    own_nodes: int
    parameters: int
    """Number of its parameters, including submodules."""

    @property
    def words(self) -> str:
        """The size in words: ``93 nodes (12 own) · 4.4 M parameters``."""
        own_text = "" if self.own_nodes == self.nodes else f" ({self.own_nodes} own)"
        size = f" · {count_words(self.parameters)} parameters" if self.parameters else ""
        return f"{count_noun(self.nodes, 'node')}{own_text}{size}"


class ExportedPart(Record):
    """One written graph: the model, or one part of it."""

    name: str = field(metadata=entry(skip=True))
    """Name of the part; ``model`` if there is only one."""
    description: PartDescription | None = field(metadata=entry(skip=True))
    """Role of the part, as recorded in the file; None if the model has only one part."""
    model_path: Path
    files: tuple[WrittenFile, ...]
    """Files of the part, the model first."""
    tree: ModuleTree = field(metadata=entry(skip=True))
    nodes: tuple[NodeRecord, ...] = field(metadata=entry(skip=True))
    exporter: str
    """``torchscript`` or ``dynamo``."""
    exporter_reason: str
    """Reason for using that exporter; ``""`` for the first exporter tried."""
    opset_requested: int
    opset_produced: int
    inputs: tuple[InputTensorSpec, ...]
    outputs: tuple[OutputTensorSpec, ...]
    dimensions: tuple[DynamicDimension, ...] = field(metadata=entry(skip=True))
    """Dynamic dimensions, each with its traced size."""
    checked_sizes: Mapping[str, tuple[int, ...]] = field(metadata=entry(skip=True))
    """Dimension → sizes at which the file was compared with PyTorch, besides the traced size."""
    openable_sizes: Mapping[str, Mapping[str, int]] = field(metadata=entry(skip=True))
    """Option that makes sizes dynamic → key of ``--shape-config`` → fixed size."""
    coverage: Coverage
    """Counted on the written graph."""
    verification: VerificationInfo | None
    """Comparison with PyTorch; None if it was skipped, or if quality is measured instead (``fidelity``)."""
    notes: tuple[str, ...] = field(metadata=entry(last=True))
    """Notes on this part, one sentence each."""
    fidelity: FidelityInfo | None = field(default=None, metadata=entry(omit_none=True))
    """Quality relative to PyTorch, if the file is quantized."""
    functions: ModuleFunctions | None = None
    """Modules that are functions of the file; None if none were requested."""
    steps: tuple[StepTiming, ...] = ()
    """Its steps with their times; loading the model counts towards the first part."""
    assumed: tuple[Assumption, ...] = field(default=(), metadata=entry(skip=True))
    """Assumptions of the graph about its inputs; without a comparison, all assumptions of the trace."""
    done: tuple[str, ...] = field(default=(), metadata=entry(skip=True))
    """Changes of the graph before it was written, in a few words each."""
    model_sha256: str = field(default="", metadata=entry(skip=True))
    """Digest of the model file, for sidecar and report; ``""`` without them."""

    @property
    def unaccepted(self) -> tuple[Assumption, ...]:
        """Assumptions that the options of the export do not accept."""
        return () if self.verification is not None and self.verification.accepts_assumptions else self.assumed

    @property
    def seconds(self) -> float:
        """Time from its first step to its last."""
        return sum(step.seconds for step in self.steps)

    @property
    def exporter_words(self) -> str:
        """The exporter, the opset and the reason: ``dynamo, opset 18 (asked for)``."""
        reason = f" ({self.exporter_reason})" if self.exporter_reason else ""
        requested = f", requested {self.opset_requested}" if self.opset_requested != self.opset_produced else ""
        return f"{self.exporter}, opset {self.opset_produced}{requested}{reason}"

    @property
    def comparison_words(self) -> str:
        """The outcome of the comparison with PyTorch in one sentence."""
        return verification_words(self.verification) if self.fidelity is None else fidelity_words(self.fidelity)

    def node_counts(self) -> Mapping[str, int]:
        """Return module path → number of its nodes, without submodules."""
        return Counter(node.module for node in self.nodes)

    def total_node_counts(self) -> Mapping[str, int]:
        """Return module path → number of its nodes, including submodules."""
        totals = Counter(self.node_counts())
        # A module comes after the one it ran in.
        for module in reversed(self.tree.nodes):
            if module.parent is not None:
                totals[module.parent] += totals[module.path]
        return totals

    def module_sizes(self) -> Callable[[ModuleNode], ModuleSize]:
        """Return a function from module path to its numbers of nodes and parameters."""
        nodes, totals = self.node_counts(), self.total_node_counts()
        return lambda module: ModuleSize(totals.get(module.path, 0), nodes.get(module.path, 0), module.parameter_count)

    @recorded(entry("dynamic", before="coverage"))
    def dynamic_entry(self) -> list[dict[str, object]]:
        """Return the dynamic dimensions, each with the sizes at which the file was compared."""
        return [
            {**dimension.model_dump(exclude_none=True), "checked": self.checked_sizes.get(dimension.name, ())}
            for dimension in self.dimensions
        ]

    @recorded(entry(before="coverage"))
    def modules_traced(self) -> int:
        """Return the number of modules of the hierarchy."""
        return len(self.tree)

    @recorded(entry("nodes", before="coverage"))
    def node_count(self) -> int:
        """Return the number of nodes of the written graph."""
        return self.coverage.nodes


@dataclass(frozen=True)
class ExportResult(Result, document="export.table:export_document"):
    """The result of an export.

    Values of one graph are in its part: ``result.only_part.coverage`` if the model has one part.
    """

    model: ModelInfo
    parts: tuple[ExportedPart, ...]
    """In the order of execution."""
    started: datetime
    tool_version: str
    model_notes: tuple[str, ...] = ()
    """Notes on the whole model, one sentence each."""
    companions: Companions = field(default_factory=Companions)
    """Config, tokenizer and processor files that were copied beside the model."""

    def in_folder(self, folder: Path) -> ExportResult:
        """Return the result with its files named in ``folder``, an alias of the real folder."""
        parts = (
            replace(
                part,
                model_path=folder / part.model_path.name,
                files=tuple(replace(file, path=folder / file.path.name) for file in part.files),
            )
            for part in self.parts
        )
        return replace(self, parts=tuple(parts))

    @property
    def only_part(self) -> ExportedPart:
        """The part, if the model has one.

        Raises:
            UsageError: the model has several parts.
        """
        return only_part(self.parts)

    @property
    def files(self) -> tuple[WrittenFile, ...]:
        """All written files, part by part, the model of each first."""
        return tuple(file for part in self.parts for file in part.files)

    @property
    def steps(self) -> tuple[StepTiming, ...]:
        """The steps of all parts."""
        return tuple(step for part in self.parts for step in part.steps)

    @property
    def seconds(self) -> float:
        """Time from the first step to the last."""
        return sum(part.seconds for part in self.parts)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes, one sentence each; with several parts, with the name of the part."""
        is_single = len(self.parts) == 1
        part_notes = (note if is_single else f"{part.name}: {note}" for part in self.parts for note in part.notes)
        return (*self.model_notes, *part_notes, *self.companions.notes)

    def as_record(self) -> dict[str, object]:
        """Return a JSON-ready summary: sizes in bytes, times in milliseconds.

        The fields of a graph are at the top level for one part, and in ``parts`` for several.
        """
        record = {
            "files": [file.as_record() for file in self.files],
            "companions": list(self.companions.names),
            "model": self.model.as_record(),
            "steps": [step.as_record() for step in self.steps],
            "notes": list(self.notes),
        }
        if len(self.parts) == 1:
            part = self.only_part.as_record()
            leading_entries = {"model_path": part["model_path"], "files": part["files"], "model": record["model"]}
            return {**leading_entries, **part, **record}
        return {**record, "parts": [{"name": part.name, **part.as_record()} for part in self.parts]}
