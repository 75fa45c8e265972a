"""What came of a build: where it is, and what its manifest says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.results.build_manifest import BuildManifest, StageRecord
from winml.modelkit.words import size_words

__all__ = ["BuildResult", "build_lines"]


@dataclass(frozen=True)
class BuildResult:
    """A finished build."""

    folder: Path
    manifest: BuildManifest
    notes: tuple[str, ...]
    """What the user should know, one sentence each."""

    @property
    def model_path(self) -> Path:
        """The model: the result of the last stage."""
        return self.folder / self.manifest.model[0].name

    def as_record(self) -> dict[str, Any]:
        """Return the manifest and the folder it is in, as JSON values."""
        return {"folder": str(self.folder), **self.manifest.as_record()}


def build_lines(result: BuildResult) -> Iterator[tuple[str, str]]:
    """Yield what is told of a build to people: a word, and what it says."""
    for stage in result.manifest.stages:
        yield stage.name, _stage_words(stage)
    last = next((stage for stage in reversed(result.manifest.stages) if stage.files), None)
    size = size_words(sum(file.size_bytes for file in result.manifest.model))
    yield "model", f"{result.model_path} ({size}), from {last.name if last else 'the input as it is'}"
    yield "normalized", _times(result.manifest.normalizations)
    yield from (("note", note) for note in result.notes)


def _stage_words(stage: StageRecord) -> str:
    if stage.status == "skipped":
        return f"skipped: {stage.reason}"
    percent = stage.coverage.percent if stage.coverage is not None else None
    tagged = "coverage unknown" if percent is None else f"{percent:.4g} % tagged"
    memory = "" if stage.peak_memory_bytes is None else f", peak {size_words(stage.peak_memory_bytes)}"
    done = "reused" if stage.status == "reused" else f"{stage.seconds:.1f} s{memory}"
    return f"{stage.nodes} nodes, {tagged}, {done}{f' ({stage.reason})' if stage.reason else ''}"


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")
