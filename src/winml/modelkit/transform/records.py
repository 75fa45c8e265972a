"""The records of written files: of one file, of a file and its source, and of a folder with a record for each part.

A verb adds to :class:`TransformedFile` what it did.
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
from winml.modelkit.tags.address import ModuleIdentity
from winml.modelkit.tags.carry.carrying import CarryReport
from winml.modelkit.tags.tagging import Coverage
from winml.modelkit.words import count_noun


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


RecordT = TypeVar("RecordT", bound=Record)


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

    def as_record(self) -> dict[str, object]:
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


@dataclass(frozen=True)
class WrittenFile(Record):
    """A file that a verb wrote."""

    path: Path
    size_bytes: int


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


DISPLAYED = 3
"""Modules named in words; the JSON names all. Chosen: they fit on a screen."""

_IDENTITY = entry(inline=True, keys=("module", "tag", "class"))


@dataclass(frozen=True)
class LeftOutModule(Record):
    """A module that is no function."""

    module: ModuleIdentity = field(metadata=_IDENTITY)
    reason: str


@dataclass(frozen=True)
class PartlyOutside(Record):
    """A module some of whose nodes are not in its function: others need them before the rest can run, or after."""

    module: ModuleIdentity = field(metadata=_IDENTITY)
    nodes: tuple[str, ...]
    """Names of these nodes."""


@dataclass(frozen=True)
class ModuleFunctions(Record):
    """The functions of a written file."""

    requested: str
    """``all``, ``classes`` or a selector."""
    functions: Mapping[str, int]
    """Name → calls of a module that it stands for."""
    written_nodes: int
    """Nodes in the file: of the graph and of the functions."""
    graph_nodes: int
    """Those of the graph alone."""
    left_out: tuple[LeftOutModule, ...]
    partly_outside: tuple[PartlyOutside, ...]
    raised_from: int | None = field(default=None, metadata=entry(skip=True))
    """IR version of the graph, where that of the file had to be a newer one."""

    @property
    def words(self) -> str:
        """The functions in a sentence."""
        calls = sum(self.functions.values())
        shared = f" for {count_noun(calls, 'call')} of modules" if calls != len(self.functions) else ""
        nodes = f"{count_noun(self.written_nodes, 'node')} in the file, {self.graph_nodes} of them in the main graph"
        return f"{count_noun(len(self.functions), 'function')}{shared} · {nodes}"

    def notes(self) -> Iterator[str]:
        """Yield what the user should know, one sentence each."""
        if self.raised_from is not None:
            yield (
                f"IR version {self.raised_from} was raised to {FIRST_IR_VERSION}, the first that supports functions of "
                "modules."
            )
        for item in self.left_out[:DISPLAYED]:
            yield f"{item.module.words} is not a function: {item.reason}."
        if len(self.left_out) > DISPLAYED:
            yield f"{len(self.left_out) - DISPLAYED} more modules are not functions; reasons: {opt.format} json."
        for part in self.partly_outside[:DISPLAYED]:
            yield f"{part.module.words}: outside its function, between nodes of other modules: {', '.join(part.nodes)}."
