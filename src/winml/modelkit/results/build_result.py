"""The record of a finished build: its folder, and what its manifest says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from winml.modelkit.records import Record, entry
from winml.modelkit.results.build_manifest import BuildManifest, FileRecord, StageRecord
from winml.modelkit.results.evaluation import Evaluation, evaluation_words
from winml.modelkit.words import size_words

__all__ = ["BuildResult", "build_lines"]


@dataclass(frozen=True)
class BuildResult(Record):
    """A finished build."""

    folder: Path
    manifest: BuildManifest = field(metadata=entry(inline=True))
    notes: tuple[str, ...] = field(metadata=entry(skip=True))
    """What the user should know, one sentence each."""
    evaluation: Evaluation | None = field(default=None, metadata=entry(omit_none=True))
    """How well the result does its task, where the config asks for that."""

    @property
    def model_path(self) -> Path:
        """The model, the result of the last stage, of a model of one part."""
        return self.folder / self.manifest.model[0].name

    @property
    def part_paths(self) -> Mapping[str, Path]:
        """The model file of each part, by name of the part."""
        return {part.name: self.folder / part.model[0].name for part in self.manifest.parts}


def build_lines(result: BuildResult) -> Iterator[tuple[str, str]]:
    """Yield what is told of a build to people: a word, and what it says."""
    parts = result.manifest.parts
    for part in parts:
        prefix = f"{part.name} " if len(parts) > 1 else ""
        yield from ((f"{prefix}{stage.name}", _stage_words(stage)) for stage in part.stages)
        last = next((stage for stage in reversed(part.stages) if stage.status != "skipped"), None)
        model = " and ".join(_file_words(file, result.folder) for file in part.model)
        yield f"{prefix}model", f"{model}, from {last.name if last else 'the input as it is'}"
    yield "deploy", _deploy_words(result.manifest)
    yield "normalized", _times_words(result.manifest.normalizations)
    if result.evaluation is not None:
        yield "judged", evaluation_words(result.evaluation)
    yield from (("note", note) for note in result.notes)


def _file_words(file: FileRecord, folder: Path = Path()) -> str:
    return f"{folder / file.name} ({size_words(file.size_bytes)})"


def _deploy_words(manifest: BuildManifest) -> str:
    """Say which files of the folder are needed where the model is used."""
    size = size_words(sum(file.size_bytes for file in manifest.deploy))
    return f"{', '.join(map(_file_words, manifest.deploy))}; {size} in all"


def _stage_words(stage: StageRecord) -> str:
    if stage.status == "skipped":
        return f"skipped: {stage.reason}"
    percent = stage.coverage.percent if stage.coverage is not None else None
    at_root = stage.coverage.at_root_percent if stage.coverage is not None else None
    tagged = "coverage unknown" if percent is None else f"{percent:.4g} % tagged"
    tagged += "" if at_root is None else f", {at_root:.0f} % at the root"
    memory = "" if stage.peak_memory_bytes is None else f", peak {size_words(stage.peak_memory_bytes)}"
    done = "reused" if stage.status == "reused" else f"{stage.seconds:.1f} s{memory}"
    return f"{stage.nodes} nodes, {tagged}, {done}{f' ({stage.reason})' if stage.reason else ''}"


def _times_words(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")
