"""What came of a verb that makes one file of another, or one folder of another with a record for each part.

A verb adds to :class:`TransformedFile` what it did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from winml.modelkit.compare.fidelity import FidelityInfo
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.hierarchy.tagging import Coverage
from winml.modelkit.progress import StepTiming
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.results.module_functions import ModuleFunctions
from winml.modelkit.results.written_file import WrittenFile

__all__ = ["GraphSummary", "TransformedFile", "TransformedFolder"]


@dataclass(frozen=True)
class GraphSummary(Record):
    """A graph in numbers."""

    operators: Mapping[str, int]
    """Operator → nodes; those that are not of ONNX itself with their domain (``com.microsoft:Gelu``)."""
    modules: Mapping[str, Mapping[str, int]] = field(metadata=entry(skip=True))
    """Tag → operators of the nodes that bear it, those of deeper modules not included."""
    size_bytes: int
    """Of the file, with its data files."""
    opset: int

    @property
    @recorded(entry(before="operators"))
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(self.operators.values())


@dataclass(frozen=True)
class TransformedFile(Record):
    """A file that was made of another one."""

    source: Path
    model_path: Path
    files: tuple[WrittenFile, ...]
    """Every file written, the model first."""
    is_copy: bool = field(metadata=entry(skip=True))
    """Whether the result is the source under another name: it was in its plain form, and nothing was requested."""
    is_plain: bool = field(metadata=entry(skip=True))
    """Whether the result is in its plain form."""
    normalizations: int = field(metadata=entry(skip=True))
    """How often the graph was brought into its plain form: 0 or 1."""
    before: GraphSummary = field(metadata=entry(last=True))
    after: GraphSummary = field(metadata=entry(last=True))
    """The file that was written, counted in it."""
    coverage: Coverage = field(metadata=entry(skip=True))
    """Tags of the file that was written, counted in it."""
    comparison: VerificationInfo | FidelityInfo | None = field(metadata=entry("verification", last=True))
    """Comparison with the source; None where it was not requested, or the result is a copy."""
    functions: ModuleFunctions | None = field(metadata=entry(skip=True))
    """Modules that are functions of the file; None where none were requested."""
    steps: tuple[StepTiming, ...] = field(metadata=entry(last=True))
    notes: tuple[str, ...] = field(metadata=entry(last=True))

    @property
    def is_tagged(self) -> bool:
        """Whether the source said which module its nodes came from; otherwise coverage is unknown."""
        return any(self.before.modules.values())

    @property
    def verification(self) -> VerificationInfo | None:
        """The comparison, where the outputs have to stay as they are."""
        return self.comparison if isinstance(self.comparison, VerificationInfo) else None

    @property
    def fidelity(self) -> FidelityInfo | None:
        """The comparison, where the outputs may change."""
        return self.comparison if isinstance(self.comparison, FidelityInfo) else None

    @recorded(entry("coverage", before="verification"))
    def coverage_entry(self) -> dict[str, object]:
        """Return the coverage; shares are null where the source has no tags."""
        unknown = {} if self.is_tagged else {"percent": None, "at_root_percent": None}
        return {**self.coverage.as_record(), **unknown}


RecordT = TypeVar("RecordT", bound=TransformedFile)


@dataclass(frozen=True)
class TransformedFolder(Generic[RecordT]):
    """A folder that was made of another one."""

    source: Path
    folder: Path
    parts: Mapping[str, RecordT]
    """Name of the part → what was done with it; of those that were changed."""
    unchanged: Mapping[str, str]
    """Name of a part that came along as it is → why."""
    companions: tuple[str, ...]
    """Names of the files that came along for readers of the folder."""
    size_bytes: int
    """Of all files that were written."""

    @property
    def is_of_one_part(self) -> bool:
        """Whether the model has one part only, so that its record says everything."""
        return len(self.parts) + len(self.unchanged) == 1

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form: the record of the only part and the folder, or the records by part."""
        if self.is_of_one_part:
            (record,) = self.parts.values()
            return {**record.as_record(), "folder": str(self.folder), "companions": list(self.companions)}
        return {
            "schema_version": 1,
            "source": str(self.source),
            "folder": str(self.folder),
            "parts": {part: record.as_record() for part, record in self.parts.items()},
            "unchanged": dict(self.unchanged),
            "companions": list(self.companions),
        }
