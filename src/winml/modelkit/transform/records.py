"""Records of written files: of one file, of a file and its source, and of a folder with a record for each part.

Commands derive their records from :class:`TransformedFile`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from winml.modelkit.compare.fidelity import FidelityInfo
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.errors import opt
from winml.modelkit.onnx.function_folding import FIRST_IR_VERSION
from winml.modelkit.onnx.specs import InputTensorSpec, OutputTensorSpec
from winml.modelkit.progress import StepTiming
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.report.result import Result
from winml.modelkit.tags.address import ModuleIdentity
from winml.modelkit.tags.carry.carrying import CarryReport
from winml.modelkit.tags.tagging import Coverage
from winml.modelkit.words import count_noun


class GraphSummary(Record):
    """Statistics of a graph."""

    operators: Mapping[str, int]
    """Operator → number of nodes; operators outside of ONNX have their domain (``com.microsoft:Gelu``)."""
    modules: Mapping[str, Mapping[str, int]] = field(metadata=entry(skip=True))
    """Tag → operator → number of nodes with exactly this tag, without nodes of submodules."""
    size_bytes: int
    """Size of the file with its data files."""
    opset: int

    @property
    @recorded(entry(before="operators"))
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(self.operators.values())


class TransformedFile(Result, Record):
    """A file made from a source file."""

    source: Path
    model_path: Path
    files: tuple[WrittenFile, ...]
    """Every file written, the model first."""
    is_copy: bool = field(metadata=entry(skip=True))
    """True if the result is a copy of the source, which needed no change."""
    is_plain: bool = field(metadata=entry(skip=True))
    """True if the result is normalized."""
    normalizations: int = field(metadata=entry(skip=True))
    """Number of normalizations of the graph: 0 or 1."""
    before: GraphSummary = field(metadata=entry(last=True))
    after: GraphSummary = field(metadata=entry(last=True))
    """Statistics of the written file."""
    coverage: Coverage = field(metadata=entry(skip=True))
    """Tags of the written file."""
    comparison: VerificationInfo | FidelityInfo | None = field(metadata=entry("verification", last=True))
    """Comparison with the source; `None` if it was not requested, or the result is a copy."""
    functions: ModuleFunctions | None = field(metadata=entry(skip=True))
    """Functions of modules in the file; `None` if no functions were requested."""
    steps: tuple[StepTiming, ...] = field(metadata=entry(last=True))
    notes: tuple[str, ...] = field(metadata=entry(last=True))

    @property
    def is_tagged(self) -> bool:
        """True if a node of the source has a tag; otherwise the coverage is unknown."""
        return any(self.before.modules.values())

    @property
    def verification(self) -> VerificationInfo | None:
        """The comparison, if the outputs must be equal; else `None`."""
        return self.comparison if isinstance(self.comparison, VerificationInfo) else None

    @property
    def fidelity(self) -> FidelityInfo | None:
        """The comparison, if the outputs may differ; else `None`."""
        return self.comparison if isinstance(self.comparison, FidelityInfo) else None

    @recorded(entry("coverage", before="verification"))
    def coverage_entry(self) -> dict[str, object]:
        """Return the coverage; shares are `None` if the source has no tags."""
        overrides = {} if self.is_tagged else {"percent": None, "at_root_percent": None}
        return {**self.coverage.as_record(), **overrides}


RecordT = TypeVar("RecordT", bound=Record)


@dataclass(frozen=True)
class TransformedFolder(Result, Generic[RecordT], document="transform.table:folder_document"):
    """A folder made from a source folder."""

    source: Path
    folder: Path
    parts: Mapping[str, RecordT]
    """Name of a changed part → record of its change."""
    unchanged: Mapping[str, str]
    """Name of an unchanged part → reason."""
    companions: tuple[str, ...]
    """Names of the other files copied from the source folder, such as configs and tokenizers."""
    size_bytes: int
    """Total size of the written files."""

    @property
    def is_of_one_part(self) -> bool:
        """True if the model has a single part, so that the record of the part stands for the folder."""
        return len(self.parts) + len(self.unchanged) == 1

    def as_record(self) -> dict[str, object]:
        """Return the JSON record: the record of the only part with the folder, or the records by part."""
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


class WrittenFile(Record):
    """A file written by a command."""

    path: Path
    size_bytes: int


class PinnedModel(Record):
    """The result of fixing sizes."""

    model_path: Path
    sizes: Mapping[str, int] = field(metadata=entry("pinned"))
    """Fixed dimension → size."""
    still_open: tuple[str, ...] = field(metadata=entry("open"))
    inputs: tuple[InputTensorSpec, ...]
    outputs: tuple[OutputTensorSpec, ...]
    coverage: Coverage
    verification: VerificationInfo | None
    """Comparison with the source; `None` if it was not requested."""
    size_bytes: int = field(metadata=entry(before="pinned"))
    notes: tuple[str, ...]

    @property
    @recorded(entry(before="coverage"))
    def nodes(self) -> int:
        """Number of nodes."""
        return self.coverage.nodes


class RetaggedModel(Result, Record, document="transform.table:retagged_document"):
    """A file with tags transferred from its source."""

    model_path: Path
    before: Path
    """The tagged file that another tool read."""
    after: Path
    """The file that the tool wrote."""
    report: CarryReport = field(metadata=entry("ways", attribute="by_way"))
    """Result of the tag transfer, with node counts by rule."""
    coverage: Coverage = field(metadata=entry(before="ways"))
    repaired: int = field(metadata=entry("repaired_nodes"))
    """Number of nodes with duplicate metadata keys."""
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


MAX_LISTED = 3
"""Number of modules named in notes; the JSON names all. Chosen: the notes fit on a screen."""

_IDENTITY = entry(inline=True, keys=("module", "tag", "class"))


class LeftOutModule(Record):
    """A module without a function, and the reason."""

    module: ModuleIdentity = field(metadata=_IDENTITY)
    reason: str


class PartlyOutside(Record):
    """A module with nodes outside its function, since these nodes run between nodes of other modules."""

    module: ModuleIdentity = field(metadata=_IDENTITY)
    nodes: tuple[str, ...]
    """Names of the nodes outside."""


class ModuleFunctions(Record):
    """The functions of a written file."""

    requested: str
    """``all``, ``classes`` or a selector."""
    functions: Mapping[str, int]
    """Name of a function → number of module calls that it replaces."""
    written_nodes: int
    """Number of nodes in the file: of the graph and of the functions."""
    graph_nodes: int
    """Number of nodes of the graph alone."""
    left_out: tuple[LeftOutModule, ...]
    partly_outside: tuple[PartlyOutside, ...]
    raised_from: int | None = field(default=None, metadata=entry(skip=True))
    """IR version of the graph before it was raised for functions; `None` if it was not raised."""

    @property
    def words(self) -> str:
        """The functions in a sentence."""
        calls = sum(self.functions.values())
        shared = f" for {count_noun(calls, 'call')} of modules" if calls != len(self.functions) else ""
        nodes = f"{count_noun(self.written_nodes, 'node')} in the file, {self.graph_nodes} of them in the main graph"
        return f"{count_noun(len(self.functions), 'function')}{shared} · {nodes}"

    def notes(self) -> Iterator[str]:
        """Yield notes for the user, one sentence each."""
        if self.raised_from is not None:
            yield (
                f"IR version {self.raised_from} was raised to {FIRST_IR_VERSION}, the first that supports functions of "
                "modules."
            )
        for left_out in self.left_out[:MAX_LISTED]:
            yield f"{left_out.module.words} is not a function: {left_out.reason}."
        if len(self.left_out) > MAX_LISTED:
            yield f"{len(self.left_out) - MAX_LISTED} more modules are not functions; reasons: {opt.format} json."
        for part in self.partly_outside[:MAX_LISTED]:
            yield f"{part.module.words}: outside its function, between nodes of other modules: {', '.join(part.nodes)}."
