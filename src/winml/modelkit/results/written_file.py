"""One written file and its size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.graph.specs import InputTensorSpec, OutputTensorSpec
from winml.modelkit.hierarchy.carry.carrying import CarryReport
from winml.modelkit.hierarchy.tagging import Coverage
from winml.modelkit.records import Record, entry, recorded

__all__ = [
    "PinnedModel",
    "RetaggedModel",
    "WrittenFile",
]


@dataclass(frozen=True)
class WrittenFile(Record):
    """A file that a verb wrote."""

    path: Path
    size_bytes: int


# --- The result of fixing the open dimensions of an ONNX file.


@dataclass(frozen=True)
class PinnedModel(Record):
    """The result of fixing sizes."""

    model_path: Path
    sizes: Mapping[str, int] = field(metadata=entry("pinned"))
    """Dimension → size, as fixed."""
    still_open: tuple[str, ...] = field(metadata=entry("open"))
    inputs: tuple[InputTensorSpec, ...]
    outputs: tuple[OutputTensorSpec, ...]
    coverage: Coverage
    verification: VerificationInfo | None
    """Comparison with the file it was made from; None where it was not asked for."""
    size_bytes: int = field(metadata=entry(before="pinned"))
    notes: tuple[str, ...]

    @property
    @recorded(entry(before="coverage"))
    def nodes(self) -> int:
        """Number of nodes."""
        return self.coverage.nodes


# --- The result of carrying tags to a file that another tool wrote: the record of ``winml retag``.


@dataclass(frozen=True)
class RetaggedModel(Record):
    """One file whose nodes got the tags of the file it was made from."""

    model_path: Path
    before: Path
    """The tagged file another tool was given."""
    after: Path
    """The file that tool wrote."""
    report: CarryReport = field(metadata=entry("ways", attribute="by_way"))
    """How the nodes got their tags."""
    coverage: Coverage = field(metadata=entry(before="ways"))
    repaired: int = field(metadata=entry("repaired_nodes"))
    """Nodes whose metadata held a key more than once."""
    size_bytes: int = field(metadata=entry(before="coverage"))
    notes: tuple[str, ...]

    @property
    @recorded(entry(before="coverage"))
    def nodes(self) -> int:
        """Number of nodes."""
        return self.coverage.nodes

    @property
    @recorded(entry(before="repaired_nodes"))
    def sources(self) -> Mapping[str, int]:
        """Number of tagged nodes per source."""
        return self.coverage.sources
