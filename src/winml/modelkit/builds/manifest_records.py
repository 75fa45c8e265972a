"""The records of ``build_manifest.json``: source, stages and files of a build.

The records validate the JSON; ``scripts/build_manifest_schema.py`` generates the JSON Schema beside this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import pydantic

from winml.modelkit.errors import opt
from winml.modelkit.file_names import BUILD_MANIFEST_NAME, ONLY_PART, is_plain_name
from winml.modelkit.onnx.bundle import only_part
from winml.modelkit.options import Options, load_json, read_text_file
from winml.modelkit.records import Record, entry
from winml.modelkit.report.result import Result
from winml.modelkit.words import size_words, sqnr_words

if TYPE_CHECKING:
    from winml.modelkit.compare.fidelity import FidelityInfo
    from winml.modelkit.evaluate.records import Evaluation

MANIFEST_VERSION: Final = 2
"""Raised when a key changes its name or meaning. ``manifest_version`` and ``files`` are the same in all versions."""
READABLE_VERSIONS: Final = (1, 2)
"""Version 1 has the keys ``model`` and ``stages`` of the only part at the top level."""

TOOL_NAME: Final = "winml-modelkit"
"""Key of this tool among the versions of libraries."""

StageName = Literal["export", "optimize", "quantize", "compile"]


class FileRecord(Options):
    """One file."""

    name: str
    """Relative to the build folder."""
    size_bytes: int
    sha256: str


class CoverageRecord(Options):
    """How many nodes of a file carry a tag."""

    tagged: int
    percent: float | None
    """Null if the source model has no tags."""
    at_root_percent: float | None = None
    """Share of the nodes that belong to the root; null if unknown."""


class Origin(Options):
    """Everything that the result of a stage depends on; the result is reused while this is unchanged."""

    options: dict[str, Any]
    """Options of the stage."""
    source: dict[str, Any]
    """Digests of its inputs."""
    versions: dict[str, str]
    """Versions of this tool and of the libraries used."""


class ProviderComparison(Options):
    """Comparison of a result on the execution provider it is for, with the CPU provider."""

    provider: str
    """Name in ONNX Runtime."""
    version: str = ""
    """Version of the provider."""
    device: str = ""
    """Kind of device; empty if the provider cannot be used on this machine."""
    simulated_on: str = ""
    """Kind of device that simulates it, such as ``cpu`` for a graphics driver in software; empty without simulation."""
    problem: str = ""
    """Why the result was not compared on the provider; empty if it was."""
    output: str | None = None
    """The output with the lowest SQNR; null if not compared."""
    sqnr_db: float | None = None
    """SQNR of that output relative to the CPU provider, in dB."""
    cpu_rounding_db: float | None = None
    """SQNR of the CPU provider in dB, if kernels round activations to 8 bits, which each provider does in its own way.
    Both SQNRs are relative to float activations. Null for other files."""
    min_sqnr_db: float | None = None
    """Minimum of every output, in dB."""
    samples: int | None = None
    """Number of samples."""
    is_near: bool = True
    """False if an output is below the minimum: an error on a device, but not on a simulated one, which may be wrong."""

    @property
    def words(self) -> str:
        """The comparison, for people."""
        if self.problem:
            return f"not compared ({self.problem}); the stages compared the result on the CPU"
        device = f"{self.device}, simulated on the {self.simulated_on}" if self.simulated_on else self.device
        assert self.sqnr_db is not None
        activations = rounding = ""
        if self.cpu_rounding_db is not None:
            activations = " with activations in float"
            rounding = f"the CPU in 8 bits {sqnr_words(self.cpu_rounding_db)}, "
        text = (
            f"{device}: {sqnr_words(self.sqnr_db)} relative to the CPU{activations} for {self.output} on "
            f"{self.samples} samples ({rounding}minimum {self.min_sqnr_db:.4g} dB)"
        )
        below = "; below the minimum: the simulation or the provider computes the file differently, a device may not"
        return text if self.is_near else f"{text}{below}"


class StageQuality(Options):
    """Similarity of the output that differs most from the outputs of the source, of a stage that loses precision."""

    sqnr_db: float
    top1_agreement: float | None = None
    """For scores of classes or tokens: share of equal predictions."""

    @classmethod
    def of(cls, fidelity: FidelityInfo | None) -> StageQuality | None:
        """Return the quality in a comparison; `None` without a comparable output."""
        if fidelity is None or not fidelity.has_signal or not fidelity.outputs or fidelity.worst.problem:
            return None
        return cls(sqnr_db=fidelity.worst.sqnr_db, top1_agreement=fidelity.worst.top1_agreement)

    @property
    def words(self) -> str:
        """The numbers, for people."""
        agreement = self.top1_agreement
        return f"SQNR {self.sqnr_db:.1f} dB{'' if agreement is None else f', top-1 agreement {100 * agreement:.1f} %'}"


class StageRecord(Options):
    """Result of one stage."""

    name: StageName
    status: Literal["run", "reused", "skipped"]
    reason: str = ""
    """Why it ran again or was skipped."""
    origin: Origin | None = None
    """Null if the stage was skipped."""
    files: tuple[FileRecord, ...] = ()
    """Files that it wrote, the model first."""
    seconds: float | None = None
    """Wall time of the run that made the files."""
    peak_memory_bytes: int | None = None
    """Peak resident memory of the process during that run, mapped files included; null if it was skipped."""
    nodes: int | None = None
    """Nodes of its model, subgraphs and functions included."""
    coverage: CoverageRecord | None = None
    normalizations: int = 0
    """How often it normalized the graph."""
    summary: str = ""
    quality: StageQuality | None = None
    """Null for a stage with equal outputs, or without a comparison."""
    assumed: tuple[dict[str, Any], ...] = ()
    """Of an export: assumptions of the graph about its inputs, as in ``verification.assumed``."""
    together: str = ""
    """Quality of the text that all parts generate together, compared with PyTorch; in the part with the logits."""
    on_provider: ProviderComparison | None = None
    """Of a skipped compilation: comparison on the execution provider, which compiles the result when a session is
    created; null without one."""
    resolved: dict[str, Any] = pydantic.Field(default_factory=dict)
    """Sections of the config as resolved by this stage."""
    dynamic: tuple[str, ...] = ()
    """Of an export: names of the dynamic dimensions."""
    openable_sizes: dict[str, dict[str, int]] = pydantic.Field(default_factory=dict)
    """Of an export: option that makes sizes dynamic → key of ``--shape-config`` → fixed size."""
    notes: tuple[str, ...] = ()


class PartRecord(Options):
    """One part of the model."""

    name: str
    """Name of the part; ``model`` if there is only one."""
    model: tuple[FileRecord, ...] = ()
    """The result of the last stage and its data files: ``model.onnx``, or ``<part>.onnx`` of several parts."""
    sidecar: FileRecord | None = None
    """The sidecar: that of the export, with the nodes of the result; null without one."""
    stages: tuple[StageRecord, ...] = ()

    @pydantic.field_validator("name")
    @classmethod
    def _refuse_name(cls, name: str) -> str:
        """Refuse a name that is not valid in file names of the folder.

        Raises:
            ValueError: the name is not valid.
        """
        if not is_plain_name(name):
            raise ValueError(f"{name!r} is not a valid name of a part")
        return name

    def stage(self, name: str) -> StageRecord | None:
        """Return the record of a stage; ``None`` if the stage is missing."""
        return next((stage for stage in self.stages if stage.name == name), None)

    @property
    def last_files(self) -> tuple[FileRecord, ...]:
        """Files of the last stage that ran; empty if all were skipped."""
        return next((stage.files for stage in reversed(self.stages) if stage.files), ())


class ProofManifest(Options):
    """The proof beside the models."""

    files: tuple[FileRecord, ...]
    limit_bytes: int
    """Maximum size of its arrays."""
    user_data: bool
    """True if it contains inputs of the user."""
    summary: str
    """Its samples and modules, as a sentence."""


class Recipe(Options):
    """The request of a build, with which ``winml refit`` runs its stages again."""

    request: dict[str, Any]
    """How the model was loaded."""
    config: dict[str, Any]
    """Options of every stage."""
    switched_off: dict[str, str]
    """Section of the config → option that removed it."""
    verify: bool
    with_companions: bool
    has_default_level: bool
    """True if the optimization level is the default, so that a lower one is used if the result is not exact."""


class BuildManifest(Options):
    """The content of a build folder."""

    manifest_version: Literal[2] = MANIFEST_VERSION
    status: Literal["unfinished", "done"]
    """``unfinished``: a build is running, failed or was interrupted; its finished stages are reused."""
    failed: StageName | None = None
    """Stage that failed; null if the build is done, running or was interrupted."""
    reason: str | None = None
    """Error message of the stage that failed; null if none did."""
    files: tuple[str, ...]
    """All files of the build; other files in the folder are never changed."""
    parts: tuple[PartRecord, ...] = ()
    """The parts of the model, in the order in which they run; empty until they are known."""
    companions: tuple[FileRecord, ...] = ()
    """Config, tokenizer and processor files of the checkpoint, as the build wrote them; one that was changed since then
    is never replaced."""
    deploy: tuple[FileRecord, ...] = ()
    """The files to deploy: the models with their data files, and the files that runtimes need beside them. All other
    files are used by later builds only. Empty until the build is finished."""
    proof: ProofManifest | None = None
    """The proof, which ``winml verify`` replays; null without one."""
    recipe: Recipe | None = None
    """The request of a build that ``winml refit`` can repeat with other weights; null if it cannot."""
    layout: str | None = None
    """Runtime that the folder is arranged for; null: none."""
    input: dict[str, Any] = pydantic.Field(default_factory=dict)
    """The source model: its name as passed by the user, and digests of its files."""
    started: str = ""
    """Time at which the build started, with its offset from UTC."""
    seconds: float = 0.0
    """Wall time of the whole build."""
    normalizations: int = 0
    """How often a graph was normalized, in the runs that made the files."""
    versions: dict[str, str] = pydantic.Field(default_factory=dict)
    """Versions of this tool, of Python and of the libraries that the result depends on."""
    notes: tuple[str, ...] = ()
    """Notes for users of the folder, such as required files that the checkpoint lacks."""

    @property
    def only_part(self) -> PartRecord:
        """The part, if the model has one.

        Raises:
            UsageError: the model has several parts.
        """
        return only_part(self.parts)

    @property
    def model(self) -> tuple[FileRecord, ...]:
        """The files of the only part."""
        return self.only_part.model

    @property
    def stages(self) -> tuple[StageRecord, ...]:
        """The stages of the only part."""
        return self.only_part.stages

    def part(self, name: str) -> PartRecord | None:
        """Return the record of a part; ``None`` if the part is missing."""
        return next((part for part in self.parts if part.name == name), None)

    def stage(self, name: str) -> StageRecord | None:
        """Return the record of a stage of the only part; ``None`` if the stage is missing."""
        return self.only_part.stage(name)

    def as_record(self) -> dict[str, Any]:
        """Return the JSON object, as written."""
        return self.model_dump(mode="json")


def read_manifest(content: bytes | str) -> BuildManifest:
    """Read a manifest of any readable version.

    Raises:
        ValueError: the manifest has another version, or is damaged.
    """
    record = load_json(content if isinstance(content, str) else content.decode())
    if isinstance(record, dict) and record.get("manifest_version") == 1:
        model, stages = record.pop("model", []), record.pop("stages", [])
        parts = [{"name": ONLY_PART, "model": model, "stages": stages}] if model or stages else []
        record = {**record, "manifest_version": MANIFEST_VERSION, "parts": parts}
    return BuildManifest.model_validate_json(json.dumps(record))


def find_manifest(folder: Path) -> BuildManifest | None:
    """Return the manifest of a build in a folder; ``None`` if missing or unreadable."""
    try:
        return read_manifest(read_text_file(folder / BUILD_MANIFEST_NAME))
    except (OSError, ValueError):
        return None


class BuildResult(Result, Record, document="builds.table:build_document", rows="parts"):
    """A finished build."""

    folder: Path
    manifest: BuildManifest = field(metadata=entry(inline=True))
    notes: tuple[str, ...] = field(metadata=entry(skip=True))
    """Notes, one sentence each."""
    evaluation: Evaluation | None = field(default=None, metadata=entry(omit_none=True))
    """Evaluation of the result, if the config requests one."""

    @property
    def model_path(self) -> Path:
        """The model file of the last stage, if the model has one part."""
        return self.folder / self.manifest.model[0].name

    @property
    def part_paths(self) -> Mapping[str, Path]:
        """The model file of each part, by name of the part."""
        return {part.name: self.folder / part.model[0].name for part in self.manifest.parts}


def build_lines(result: BuildResult) -> Iterator[tuple[str, str]]:
    """Yield the summary of a build as lines: a heading, and its text."""
    parts = result.manifest.parts
    for part in parts:
        prefix = f"{part.name} " if len(parts) > 1 else ""
        yield from ((f"{prefix}{stage.name}", _stage_words(stage)) for stage in part.stages)
        for stage in part.stages:
            if stage.on_provider is not None:
                provider = stage.on_provider.provider.removesuffix("ExecutionProvider")
                yield f"{prefix}on {provider}", stage.on_provider.words
        last = next((stage for stage in reversed(part.stages) if stage.status != "skipped"), None)
        model = " and ".join(_file_words(file, result.folder) for file in part.model)
        yield f"{prefix}model", f"{model}, from {last.name if last else 'the unchanged input'}"
    yield from _size_lines(result.manifest)
    yield "deploy", _deploy_words(result.manifest)
    if result.manifest.proof is not None:
        yield "proof", result.manifest.proof.summary
    if result.evaluation is not None:
        # Imports numpy, which a manifest does not need.
        from winml.modelkit.evaluate.records import evaluation_words

        yield "judged", evaluation_words(result.evaluation)
    yield from (("note", note) for note in result.notes)


def _size_lines(manifest: BuildManifest) -> Iterator[tuple[str, str]]:
    """Yield the dynamic and the fixed sizes of an exported model, with the options that change them."""
    from winml.modelkit.onnx.specs import fixed_size_words  # imports onnx

    stages = [stage for part in manifest.parts for stage in part.stages]
    if names := dict.fromkeys(name for stage in stages for name in stage.dynamic):
        # Sizes of a KV cache, and numbers of points, are dynamic without a request.
        has_own = any(name.startswith(("past_", "point_")) for name in names)
        option = opt.shape_config if has_own else opt.fixed_sizes
        yield "dynamic", f"{', '.join(names)} ({option} fixes them)"
    openable: dict[str, dict[str, int]] = {}
    for name, sizes in (item for stage in stages for item in stage.openable_sizes.items()):
        openable.setdefault(name, {}).update(sizes)
    if openable:
        yield "fixed", fixed_size_words(openable)


def _file_words(file: FileRecord, folder: Path = Path()) -> str:
    """Format path and size of a file."""
    return f"{folder / file.name} ({size_words(file.size_bytes)})"


def _deploy_words(manifest: BuildManifest) -> str:
    """List the files to deploy with their sizes and total: models by name, several other files as a count."""
    models = {file.name for part in manifest.parts for file in part.model}
    proof = () if manifest.proof is None else manifest.proof.files
    texts = [_file_words(file) for file in manifest.deploy if file.name in models]
    companions = [file for file in manifest.deploy if file.name not in models and file not in proof]
    proof_files = [file for file in manifest.deploy if file in proof]
    for kind, files in {"config and tokenizer": companions, "proof": proof_files}.items():
        size = size_words(sum(file.size_bytes for file in files))
        texts += [f"{len(files)} {kind} files ({size})"] if len(files) > 1 else map(_file_words, files)
    total = size_words(sum(file.size_bytes for file in manifest.deploy))
    return ", ".join(texts) + (f"; {total} in total" if len(texts) > 1 else "")


def _stage_words(stage: StageRecord) -> str:
    """Summarize a stage: nodes, coverage, time and memory, or the reason why it was skipped."""
    if stage.status == "skipped":
        return f"skipped: {stage.reason}"
    percent = stage.coverage.percent if stage.coverage is not None else None
    at_root = stage.coverage.at_root_percent if stage.coverage is not None else None
    tagged = "coverage unknown" if percent is None else f"{percent:.4g} % tagged"
    tagged += "" if at_root is None else f", {at_root:.0f} % at the root"
    memory = "" if stage.peak_memory_bytes is None else f", process memory peak {size_words(stage.peak_memory_bytes)}"
    duration = "reused" if stage.status == "reused" else f"{stage.seconds:.1f} s{memory}"
    return f"{stage.nodes} nodes, {tagged}, {duration}{f' ({stage.reason})' if stage.reason else ''}"
