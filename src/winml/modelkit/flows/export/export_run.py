"""The records that travel through one export: what was asked, what stays the same, and the graph of one part."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.exporter_choice import ExporterUse
from winml.modelkit.file_names import ONLY_PART, part_path
from winml.modelkit.flows.graph_handover import GraphHandover, HandedGraph
from winml.modelkit.graph.files.output_files import OutputFiles
from winml.modelkit.graph.files.output_paths import ExportPaths
from winml.modelkit.hierarchy.coverage import Coverage
from winml.modelkit.hierarchy.tracing import CallTrace
from winml.modelkit.hierarchy.tree import ModuleTree
from winml.modelkit.load.parts import LoadedModel, ModelPart
from winml.modelkit.progress import StepClock
from winml.modelkit.verify.input_draws import InputDraws
from winml.modelkit.verify.other_sizes import Draw, DynamicProof

__all__ = ["ExportRun", "ExportTarget", "TaggedGraph"]


@dataclass(frozen=True)
class ExportTarget:
    """Where an export goes."""

    output: str | os.PathLike[str]
    """The ``.onnx`` file; of a model of several parts, the stem of their names."""
    overwrite: bool
    with_sidecar: bool
    with_report: bool
    with_companions: bool = True
    """Whether config, tokenizer and processor files of a checkpoint are copied beside it."""
    functions: str | None = None
    """Modules that the file holds as functions: ``all``, ``classes`` or a selector. None: none."""
    named_folder: Path = field(default_factory=Path)
    """Its folder as the user wrote it, for what is told."""

    def paths(self) -> ExportPaths:
        """Return the files of a model of one part.

        Raises:
            UsageError: the path is a directory, or does not end in ``.onnx``.
        """
        return ExportPaths.for_output(self.output, with_sidecar=self.with_sidecar, with_report=self.with_report)

    def part_paths(self, part: ModelPart) -> ExportPaths:
        """Return the files of one part."""
        path = part_path(self.paths().model, part.name, of_several=part.name != ONLY_PART)
        return ExportPaths.for_output(path, with_sidecar=self.with_sidecar, with_report=self.with_report)


@dataclass(frozen=True)
class ExportRun:
    """What stays the same while the parts of one model are exported."""

    config: WinMLExportConfig
    seed: int
    clock: StepClock
    target: ExportTarget
    loaded: LoadedModel
    files: OutputFiles
    """Everything that is written; put in place with the last part."""
    all_parts: CallTrace | None = None
    """Which modules run in any of the parts; None where there is one part."""
    handover: GraphHandover | None = None
    """What is done to each graph before it is written; None: nothing."""
    draws: dict[str, InputDraws] = field(default_factory=dict)
    """Part → what draws its inputs; filled as it is asked for."""

    staged: dict[str, Path] = field(default_factory=dict)
    """Part → its model file under the temporary name; filled as they are written."""

    def inputs(self, part: ModelPart) -> InputDraws:
        """Return what draws the inputs of a part; it remembers what the model takes."""
        return self.draws.setdefault(part.name, InputDraws(part, self.seed))


@dataclass(frozen=True)
class TaggedGraph:
    """The graph of one part as it will be written, and what it was made from."""

    model: ir.Model
    tree: ModuleTree
    coverage: Coverage
    draw: Draw
    """What was traced."""
    proof: DynamicProof
    """What the part answers at other sizes than the traced ones."""
    exporter: ExporterUse
    notes: tuple[str, ...]
    handed: HandedGraph | None = None
    """What was done to it after the export; None: nothing."""
    choices: tuple[str, ...] = ()
    """Lines of the user's Python that read a tensor's value while it was traced."""
