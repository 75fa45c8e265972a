"""The records of written files: of one file, of a file and its source, and of a folder with a record for each part.

A verb adds to :class:`TransformedFile` what it did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from winml.modelkit.compare.fidelity import FidelityInfo
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.compare.structure import changed_counts
from winml.modelkit.graph.function_folding import FIRST_IR_VERSION
from winml.modelkit.graph.specs import InputTensorSpec, OutputTensorSpec
from winml.modelkit.hierarchy.address import ModuleIdentity
from winml.modelkit.hierarchy.carry.carrying import CarryReport
from winml.modelkit.hierarchy.tagging import Coverage
from winml.modelkit.progress import StepTiming
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.words import count_noun

if TYPE_CHECKING:
    from winml.modelkit.compile.pipeline import CompiledPart, OutsideNode
    from winml.modelkit.quantize.planning import ModulePrecision
    from winml.modelkit.results.quantization_budget import BudgetSearch


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
class ModuleChange(Record):
    """What became of the nodes of one module."""

    tag: str
    nodes_before: int
    nodes_after: int
    operators: Mapping[str, int]
    """Operator → how many more there are now, or fewer; those as before are absent."""


@dataclass(frozen=True)
class OptimizedFile(TransformedFile):
    """A file that was optimized."""

    is_copy: bool
    normalizations: int
    functions: ModuleFunctions | None = field(metadata=entry(before="steps"))
    enabled: tuple[str, ...]
    """Capabilities that were on."""
    fired: Mapping[str, int]
    """Those of them that can be counted → how often they fired."""

    def operator_changes(self) -> dict[str, tuple[int, int]]:
        """Return the operators whose number changed: nodes before and after, the largest change first."""
        return changed_counts(self.before.operators, self.after.operators)

    @recorded(entry("modules", before="coverage"))
    def module_changes(self) -> tuple[ModuleChange, ...]:
        """Return the modules whose operators changed, in the order of the source, new ones last."""
        return _changes_by_module(self.before, self.after)


@dataclass(frozen=True)
class OptimizationRound(Record):
    """What one round of optimizing did."""

    number: int
    """From 1."""
    enabled: tuple[str, ...]
    """Capabilities that were on."""
    fired: Mapping[str, int]
    """Those of them that can be counted → how often they fired."""
    changed: bool
    """Whether the graph is another one than before the round."""
    before: GraphSummary = field(metadata=entry("nodes_before", attribute="nodes"))
    after: GraphSummary = field(metadata=entry("nodes_after", attribute="nodes"))
    seconds: float = field(metadata=entry("milliseconds", scale=1000, digits=1))

    def operator_changes(self) -> dict[str, tuple[int, int]]:
        """Return the operators whose number changed: nodes before and after, the largest change first."""
        return changed_counts(self.before.operators, self.after.operators)

    @recorded(entry("modules", before="milliseconds"))
    def module_changes(self) -> tuple[ModuleChange, ...]:
        """Return the modules whose operators changed, in the order of the graph, new ones last."""
        return _changes_by_module(self.before, self.after)


@dataclass(frozen=True)
class OptimizationLoop(Record):
    """What came of optimizing in rounds."""

    file: OptimizedFile = field(metadata=entry(last=True))
    """The result of all rounds together."""
    rounds: tuple[OptimizationRound, ...]

    @property
    @recorded(entry(before="rounds"))
    def is_settled(self) -> bool:
        """Whether the last round found nothing more to do."""
        return not self.rounds[-1].changed


def _changes_by_module(before: GraphSummary, after: GraphSummary) -> tuple[ModuleChange, ...]:
    changes = []
    for tag in dict.fromkeys([*before.modules, *after.modules]):
        old, new = before.modules.get(tag, {}), after.modules.get(tag, {})
        changed = {name: count - earlier for name, (earlier, count) in changed_counts(old, new).items()}
        if changed:
            changes.append(ModuleChange(tag, sum(old.values()), sum(new.values()), changed))
    return tuple(changes)


@dataclass(frozen=True)
class Calibrated:
    """Where the ranges of activations came from."""

    words: str
    """For people."""
    record: Mapping[str, Any]
    """As it stands in the file."""


@dataclass(frozen=True)
class QuantizedFile(TransformedFile, schema_version=1):
    """A file some of whose weights have fewer bits."""

    precision: str
    """The one requested for the whole model."""
    modes: tuple[str, ...]
    """The ways that were used, in order."""
    calibration: Calibrated | None = field(metadata=entry(attribute="record", omit_none=True))
    """None where no mode needed ranges."""
    modules: tuple[ModulePrecision, ...]
    """Modules that have nodes with weights, in the order of the graph."""
    budget: BudgetSearch | None = field(default=None, metadata=entry(omit_none=True))
    """How bits were chosen for each module; None where the options say them."""
    kv_cache: str | None = field(default=None, metadata=entry(omit_none=True))
    """Precision of the KV cache, where it was quantized."""

    @property
    @recorded(entry(before="calibration"))
    def quantized(self) -> int:
        """Number of nodes with a weight that were quantized."""
        return sum(module.quantized for module in self.modules)

    @property
    @recorded(entry(before="calibration"))
    def left(self) -> dict[str, int]:
        """Why nodes with a weight keep theirs → how many, the most frequent first."""
        reasons: dict[str, int] = {}
        for module in self.modules:
            for reason, count in module.left.items():
                reasons[reason] = reasons.get(reason, 0) + count
        return dict(sorted(reasons.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class CompilableProvider(Record):
    """One execution provider that a file can be compiled for."""

    short: str
    name: str
    """Its name in ONNX Runtime."""
    is_present: bool
    """Whether it can compile here."""
    devices: tuple[str, ...]
    makes: str
    """What a compiled file holds, in a few words."""
    package: str | None
    """Requirement of the package that brings it on this platform, for pip; None where there is none."""


@dataclass(frozen=True)
class CompiledFile(TransformedFile, schema_version=1):
    """A file that was compiled for an execution provider."""

    before: GraphSummary = field(metadata=entry("nodes_before", attribute="nodes", last=True))
    after: GraphSummary = field(metadata=entry("nodes_after", attribute="nodes", last=True))
    compiled: Mapping[str, Any]
    """What the file says of it: provider, versions, device, options."""
    parts: tuple[CompiledPart, ...]
    """The nodes that stand for what the provider compiled; empty for the CPU provider."""
    outside: tuple[OutsideNode, ...]
    """Beside them, the nodes that the provider left to the CPU provider."""


@dataclass(frozen=True)
class BlockedFusion(Record):
    """A place where a capability fires with fixed sizes, and does not with open ones."""

    module: str
    """Tag."""
    count: int
    """How often it fires there besides, with fixed sizes."""
    dimensions: Mapping[str, tuple[str, ...]]
    """Dynamic dimension that keeps it from firing → where the inputs have it, ``input:axis``."""
    only_at_one: bool
    """Whether it fires because a size is 1, and with no larger one."""


@dataclass(frozen=True)
class CheckedCapability(Record):
    """What one capability would do."""

    name: str
    count: int | None
    """How often it fires; None for one that only removes nodes, and is not counted one by one."""
    removed: int | None
    """Of such a one: how many nodes fewer there are after it alone; None for those that are counted."""
    modules: Mapping[str, int]
    """Tag → how often it fires there, or how many nodes go."""
    blocked: tuple[BlockedFusion, ...] = ()


@dataclass(frozen=True)
class OptimizationCheck(Record):
    """What optimizing a file would do. Nothing was written."""

    source: Path
    nodes_before: int
    nodes_after: int
    capabilities: tuple[CheckedCapability, ...]
    """Those that are on, in the order of the registry."""
    notes: tuple[str, ...]


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
            yield f"{len(self.left_out) - DISPLAYED} more modules are not functions; reasons: --format json."
        for part in self.partly_outside[:DISPLAYED]:
            yield f"{part.module.words}: outside its function, between nodes of other modules: {', '.join(part.nodes)}."


SCHEMA_VERSION = 1
"""Layout of the manifest, specified in docs/reference/formats.md."""


@dataclass(frozen=True)
class ExtractedModule(Record):
    """One module that was written as a model of its own."""

    identity: ModuleIdentity = field(metadata=entry(inline=True))
    file: str
    """Name of the model in the folder."""
    inputs_file: str | None
    """Name of the file with the recorded inputs; None where it was not requested."""
    outputs_file: str | None
    """Name of the file with the recorded outputs of the whole model; None where it was not requested."""
    inputs: tuple[dict[str, Any], ...]
    """Name, shape and dtype of each."""
    outputs: tuple[dict[str, Any], ...]
    nodes: int
    parameters: int
    size_bytes: int
    """Size of the model with its weights."""
    drawn_in: tuple[str, ...]
    """Names of nodes of other modules that are included because they lie between nodes of this module."""
    left_out: tuple[str, ...]
    """Names of nodes of this module that are left out: other modules need them first, so their outputs are inputs."""
    max_abs_diff: float = field(metadata=entry(within="verification"))
    """Largest difference from the recorded outputs of the whole model."""
    relative_diff: float = field(metadata=entry(within="verification"))
    """``max_abs_diff`` divided by the largest recorded value."""


@dataclass(frozen=True)
class RefusedModule(Record):
    """One module that cannot be cut out."""

    identity: ModuleIdentity = field(metadata=entry(inline=True))
    reason: str


@dataclass(frozen=True)
class ExtractResult(Record, schema_version=SCHEMA_VERSION):
    """The outcome of one extraction."""

    source: str
    """The model as the user wrote it."""
    selector: str
    folder: Path = field(metadata=entry(skip=True))
    tool_version: str = field(metadata=entry(before="source"))
    modules: tuple[ExtractedModule, ...]
    refused: tuple[RefusedModule, ...]
    without_nodes: tuple[ModuleIdentity, ...] = field(metadata=entry(keys=("module", "tag", "class")))
    """Modules without a node in the graph: they computed nothing, or their nodes were merged into others."""
    notes: tuple[str, ...] = ()
