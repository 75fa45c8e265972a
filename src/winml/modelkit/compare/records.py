"""Records of ``winml compare`` and ``winml diff``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from winml.modelkit.compare.fidelity import (
    LOSS_DB,
    ROUNDING,
    FidelityInfo,
    OutputFidelity,
    QualitySamples,
    is_loss,
    judged_outputs,
    quality_order,
    quality_record,
)
from winml.modelkit.compare.words import fidelity_words
from winml.modelkit.records import Record, entry, json_value, recorded
from winml.modelkit.report.result import Result
from winml.modelkit.tags import address
from winml.modelkit.tags.address import ModuleIdentity
from winml.modelkit.verdicts import Verdict
from winml.modelkit.words import percent_words, sqnr_words

if TYPE_CHECKING:
    from winml.modelkit.compare.proof.execution import ExecutedModule, RunTimes
    from winml.modelkit.compare.proof.records import ProofPart
    from winml.modelkit.compare.quality_minimum import QualityMinimum
    from winml.modelkit.ort.devices import ChosenProvider


class ComparedOutput(Record):
    """Comparison of one output of both models."""

    fidelity: OutputFidelity = field(metadata=entry(inline=True))
    part: str = field(default="", metadata=entry(before="fidelity", omit_empty=True))
    """Part that returns it, in the comparison of a model of several parts."""

    @property
    @recorded()
    def top1_agreement(self) -> float | None:
        """Share of positions with the same index of the largest value along the last axis; ``None`` for other
        outputs.
        """
        return self.fidelity.top1_agreement


class ComparedModule(Record):
    """Comparison of one call of one module."""

    identity: ModuleIdentity = field(metadata=entry(inline=True))
    fidelity: OutputFidelity | None = field(metadata=entry(skip=True))
    """Similarity of its worst output; ``None`` if no output exists on both sides."""
    input_error: float | None = None
    """Largest relative error of its inputs; ``None`` if unknown."""
    own_error: float | None = None
    """Relative error that its inputs do not explain."""
    reason: str = field(default="", metadata=entry(last=True, null_if_empty=True))
    """Reason why none of its outputs can be compared."""
    is_unchanged: bool | None = field(default=None, metadata=entry("unchanged"))
    """True if its own nodes are equal on both sides: operators, inputs and weights. ``None`` if unknown."""
    fused_with: tuple[str, ...] = field(default=(), metadata=entry(omit_empty=True))
    """Tags of the other modules fused into its nodes; its errors include their work."""

    @property
    @recorded(entry(before="input_error", inline=True))
    def measures(self) -> dict[str, Any]:
        """Measures of its worst output, with its name as ``value``."""
        measures = {} if self.fidelity is None else self.fidelity.as_record()
        name = measures.pop("name", None)
        return {**measures, "value": name}


@dataclass(frozen=True)
class ModelComparison(Result, document="compare.table:comparison_document", rows="modules"):
    """Result of the comparison of two models on the same inputs."""

    reference: str
    candidate: str
    samples: QualitySamples
    """Samples of both models."""
    outputs: tuple[ComparedOutput, ...]
    threshold: float | None
    """Maximum relative error of an output; ``None`` without a threshold."""
    modules: tuple[ComparedModule, ...] | None = None
    """Modules in the order their outputs are computed; ``None`` if not compared."""
    divergence: int | None = None
    """Position in ``modules`` of the first module with an error of its own."""
    tolerance: float = 0.0
    """Relative error of a module that is considered rounding."""
    step: int | None = None
    """Step of a generated text at which decoders were compared; ``None`` without a step."""
    provider: ChosenProvider | None = None
    """Execution provider of the candidate; ``None`` for the CPU provider by default, and for PyTorch."""
    notes: tuple[str, ...] = ()
    graph_name: str = ""
    """Name of the graph in the candidate file; empty without a file or without a module comparison."""
    node_tags: Mapping[str, str] = field(default_factory=dict)
    """Name of a candidate node → tag, for viewers of the file."""
    fingerprint: str = ""
    """Digest of the structure of that file, by which ``winml view`` assigns the result."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """``reference`` and ``candidate`` → digest of the content of the ONNX file, weights included; with modules only."""
    parts: Mapping[str, ModelComparison] = field(default_factory=dict)
    """Part → its comparison, in execution order, for a model of several parts; ``outputs`` are then those of all parts,
    and ``modules`` are listed by part."""

    @classmethod
    def of_parts(
        cls, reference: str, candidate: str, parts: Mapping[str, ModelComparison], notes: Sequence[str] = ()
    ) -> ModelComparison:
        """Join the comparisons of the parts of a model.

        Args:
            reference: Name of the reference.
            candidate: Name of the candidate.
            parts: Part → its comparison, in execution order; at least one.
            notes: Notes on the whole comparison.
        """
        any_part = next(iter(parts.values()))
        outputs = (replace(output, part=name) for name, part in parts.items() for output in part.outputs)
        return cls(
            reference=reference,
            candidate=candidate,
            samples=any_part.samples,
            outputs=tuple(outputs),
            threshold=any_part.threshold,
            tolerance=any_part.tolerance,
            provider=any_part.provider,
            notes=tuple(notes),
            parts=dict(parts),
        )

    @property
    def quality(self) -> dict[str, object]:
        """Quality record, equal in all commands."""
        return quality_record(self.samples, [output.fidelity for output in self.outputs])

    @property
    def worst(self) -> ComparedOutput:
        """The judged output with the lowest quality."""
        if self.parts:  # the scores of a decoder do not replace the states that its encoder returns
            found = (replace(part.worst, part=name) for name, part in self.parts.items())
            return min(found, key=lambda output: quality_order(output.fidelity))
        worst = min(judged_outputs([output.fidelity for output in self.outputs]), key=quality_order)
        return next(output for output in self.outputs if output.fidelity is worst)

    @property
    def first_divergence(self) -> ComparedModule | None:
        """First module with an error of its own; for several parts, in the first part with such a module.

        `None` without such a module.
        """
        if self.parts:
            return next((part.first_divergence for part in self.parts.values() if part.first_divergence), None)
        return self.modules[self.divergence] if self.modules is not None and self.divergence is not None else None

    def modules_within(self, depth: int | None) -> tuple[ComparedModule, ...]:
        """Compared modules of the first levels of the tree, and the first diverging module at any level.

        Args:
            depth: Number of levels; ``None``: all.
        """
        modules, diverging = self.modules or (), self.first_divergence
        if depth is None:
            return modules
        return tuple(module for module in modules if address.depth(module.identity.tag) <= depth or module is diverging)

    def arising_errors(self) -> dict[str, float]:
        """Tag of a module → error that arises in its nodes; 0 for unchanged nodes.

        Modules that were not compared, or without a finite error, are omitted.
        """
        errors: dict[str, float] = {}
        for module in self.modules or ():
            error, tag = module.own_error, module.identity.tag
            if error is not None and math.isfinite(error):
                errors[tag] = max(errors.get(tag, 0.0), 0.0 if module.is_unchanged else error)
        return errors

    @property
    def is_within(self) -> bool:
        """True if every output is within the threshold."""
        return self.threshold is None or all(
            not output.fidelity.problem and output.fidelity.relative_error <= self.threshold for output in self.outputs
        )

    @property
    def verdict(self) -> Verdict | None:
        """Verdict on the threshold; ``None`` without a threshold."""
        if self.threshold is None:
            return None
        question = f"the relative error of every output is at most {self.threshold:g}"
        outputs = [output.fidelity for output in self.outputs]
        largest = max(outputs, key=lambda output: math.inf if output.problem else output.relative_error)
        error = largest.problem or f"relative error {largest.relative_error:.1e}"
        return Verdict.of(question, self.is_within, f"{error} of {largest.name}")

    def as_record(self, *, depth: int | None = None) -> dict[str, Any]:
        """Return a JSON-ready record; errors are relative to the reference, SQNR is in dB.

        Args:
            depth: Levels of the module tree to list; ``None``: all.
        """
        diverging = self.first_divergence
        return {
            "schema_version": 1,
            "reference": self.reference,
            "candidate": self.candidate,
            **({"fingerprint": self.fingerprint, "digests": {**self.digests}} if self.fingerprint else {}),
            "draws": self.samples.count,
            "input_source": "data set" if self.samples.source == "dataset" else self.samples.source,
            "step": self.step,
            "provider": None if self.provider is None else self.provider.provider.name,
            **({} if self.provider is None else self.provider.device_record()),
            "threshold": self.threshold,
            "is_within": self.is_within,
            "verdict": json_value(self.verdict),
            "outputs": [output.as_record() for output in self.outputs],
            **({} if self.parts else {"quality": self.quality}),
            "first_divergence": None
            if diverging is None
            else {**diverging.identity.as_record(), "metric": "own_error", "value": json_value(diverging.own_error)},
            **({} if self.modules is None else {"tolerance": self.tolerance}),
            "modules": None if self.modules is None else [module.as_record() for module in self.modules_within(depth)],
            **(
                {"parts": {name: part.as_record(depth=depth) for name, part in self.parts.items()}}
                if self.parts
                else {}
            ),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class ProofReplay(ModelComparison, document="compare.table:comparison_document"):
    """Result of the replay of a proof: a file compared with the recorded values of PyTorch."""

    minimum: QualityMinimum | None = None
    """Minimum quality of every output; ``None`` for several parts, each with its own."""
    recorded: ProofPart | None = None
    """Record of the part: its quality and time when the proof was made; ``None`` for several parts."""
    run_times: RunTimes | None = None
    """Times of runs on the first sample; ``None`` for several parts."""
    sha256: str = ""
    """SHA-256 of the file; empty for several parts."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Library → its version when the proof was made."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Library → its version here."""
    machine: str = ""
    """Processor and number of usable cores; empty for several parts."""
    execution: tuple[ExecutedModule, ...] | None = None
    """How ONNX Runtime executes the file; ``None`` if not measured."""
    upgrade: UpgradeCheck | None = None
    """Comparison with another environment; ``None`` without one, and for several parts."""

    @property
    def is_recorded_file(self) -> bool:
        """True if the file is the one whose quality was recorded."""
        return self.recorded is not None and self.sha256 == self.recorded.sha256

    @property
    def is_changed_file(self) -> bool:
        """True if the file has the name of the recorded one, and other content."""
        is_same_name = self.recorded is not None and Path(self.candidate).name == self.recorded.file
        return is_same_name and not self.is_recorded_file

    @property
    def run_ms(self) -> float | None:
        """Median time of a run on the first sample; ``None`` for several parts."""
        return None if self.run_times is None else self.run_times.median_ms

    @property
    def provider_name(self) -> str:
        """Name of the execution provider."""
        return "CPUExecutionProvider" if self.provider is None else self.provider.provider.name

    @property
    def losses(self) -> dict[str, tuple[float, float]]:
        """Output → SQNR in dB when the proof was made and here, of those that are worse, also within the limit.

        `{}` for a file of another name, and on another provider than the recorded one.
        """
        recorded = self.recorded
        if recorded is None or recorded.provider != self.provider_name:
            return {}
        if not (self.is_recorded_file or self.is_changed_file):
            return {}
        before = {output.name: output.sqnr_db for output in recorded.outputs}
        limit = LOSS_DB if self.is_recorded_file else _LOSS_OF_CHANGE_DB
        return {
            name: (before[name], output.fidelity.sqnr_db)
            for output in self.outputs
            if (name := output.fidelity.name) in before and is_loss(before[name], output.fidelity.sqnr_db, limit)
        }

    def quality_words(self, name: str) -> str:
        """Return the SQNR of an output, or the reason why it cannot be compared, such as NaN."""
        found = (output.fidelity for output in self.outputs if output.fidelity.name == name)
        fidelity = next(found, None)
        return "a missing output" if fidelity is None else fidelity.problem or sqnr_words(fidelity.sqnr_db)

    @property
    def origin_of_loss(self) -> ComparedModule | None:
        """Module in which the error has grown since the proof was made; ``None`` if unknown."""
        recorded = {} if self.recorded is None else {module.key: module.own_error for module in self.recorded.modules}
        return self.find_origin(recorded)

    @property
    def is_loss_hidden(self) -> bool:
        """True if no error of a module has grown: only the modules of the first sample are recorded."""
        recorded = {} if self.recorded is None else {item.key: item.relative_error for item in self.recorded.modules}
        growths = [
            bool(fidelity.problem) or fidelity.relative_error > earlier + max(ROUNDING, _NOISE_SHARE * earlier)
            for module in self.modules or ()
            if (fidelity := module.fidelity) is not None
            and (earlier := recorded.get((module.identity.tag, module.identity.call))) is not None
        ]
        return bool(growths) and not any(growths)

    def find_origin(self, before: Mapping[tuple[str, int], float | None]) -> ComparedModule | None:
        """Return the module in which an error has grown; if none has, the first that diverges, or ``None``.

        The first module that diverges if its error has grown, else the module whose own error has grown most relative
        to the error of its inputs: a module may amplify the error of another. The root has no input error, and is the
        last resort.

        Args:
            before: (tag, call) → own error before; ``None`` if unknown.
        """
        growths = [
            (
                module is self.first_divergence,
                bool(module.identity.module),
                (own - earlier) / max(module.input_error or 0.0, ROUNDING),
                position,
            )
            for position, module in enumerate(self.modules or ())
            if (own := module.own_error) is not None
            and (earlier := before.get((module.identity.tag, module.identity.call))) is not None
            and own > earlier
        ]
        return self.modules[max(growths)[-1]] if growths and self.modules is not None else self.first_divergence

    @property
    def is_accepted(self) -> bool:
        """True if every output is within its limit, and no worse than in the compared environment."""
        parts = [part for part in self.parts.values() if isinstance(part, ProofReplay)] or [self]
        return self.is_within and not any(part.upgrade is not None and part.upgrade.refused for part in parts)

    @property
    def problems(self) -> list[str]:
        """Reasons why it is not accepted."""
        parts = [part for part in self.parts.values() if isinstance(part, ProofReplay)] or [self]
        limits = [] if self.is_within else [f"{self.verdict.question}: {self.verdict.words}"]
        checks = [part.upgrade for part in parts if part.upgrade is not None]
        return [*limits, *(f"{name} since: {check.problem_words(name)}" for check in checks for name in check.refused)]

    @property
    def versions_words(self) -> str:
        """Versions when the proof was made, for people."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())

    @property
    def fidelity(self) -> FidelityInfo:
        """The outputs with their limit."""
        assert self.minimum is not None  # only the replay of several parts has none
        return FidelityInfo(
            tuple(output.fidelity for output in self.outputs),
            self.minimum.sqnr_db,
            has_signal=True,
            draws=self.samples.count,
            least_agreement=self.minimum.agreement,
            samples=self.samples,
        )

    @property
    def limit_words(self) -> str:
        """The limit of every output, for people."""
        assert self.minimum is not None  # only the replay of several parts has none
        agreement, has_scores = (
            self.minimum.agreement,
            any(output.fidelity.prediction_agreement is not None for output in self.outputs),
        )
        share = f", of scores {percent_words(agreement)} equal predictions" if agreement and has_scores else ""
        return f"the minimum is {self.minimum.sqnr_db:.4g} dB{share}"

    def is_output_within(self, output: ComparedOutput) -> bool:
        """Return True if an output is within its limit, or has none, as a state of the KV cache."""
        fidelity = output.fidelity
        return replace(self.fidelity, outputs=(fidelity,)).is_verified or fidelity not in judged_outputs(
            [other.fidelity for other in self.outputs]
        )

    @property
    def is_within(self) -> bool:
        """True if every output of every part is within its limit."""
        if self.parts:
            return all(part.is_within for part in self.parts.values())
        return self.fidelity.is_verified

    @property
    def verdict(self) -> Verdict:
        """Verdict on the limits."""
        parts = [part for part in self.parts.values() if isinstance(part, ProofReplay)] or [self]
        worst = next((part for part in parts if not part.is_within), parts[0])
        question = "every output is as near to PyTorch as the limit requires"
        return Verdict.of(question, self.is_within, fidelity_words(worst.fidelity))

    def as_record(self, *, depth: int | None = None) -> dict[str, Any]:
        """Return a JSON-ready record, with quality and time when the proof was made.

        Args:
            depth: Levels of the module tree to list; ``None``: all.
        """
        record = super().as_record(depth=depth)
        # It is kept and compared elsewhere: without folders of this machine.
        record |= {"candidate": Path(self.candidate).name, "versions": dict(self.environment)}
        if self.recorded is None or self.minimum is None:
            return record
        errors = {module.key: module.relative_error for module in self.recorded.modules}
        for module in record["modules"] or ():
            module["recorded_error"] = errors.get((module["tag"], module["call"]))
        return {
            **record,
            "limits": {"min_sqnr_db": self.minimum.sqnr_db, "min_agreement": self.minimum.agreement},
            "sha256": self.sha256,
            "run_ms": json_value(self.run_ms, 3),
            "run_times": None if self.run_times is None else self.run_times.model_dump(mode="json"),
            "machine": self.machine,
            "execution": None
            if self.execution is None
            else [module.model_dump(mode="json", exclude_none=True) for module in self.execution],
            "upgrade": json_value(self.upgrade),
            "recorded": {
                "file": self.recorded.file,
                "sha256": self.recorded.sha256,
                "is_same_file": self.is_recorded_file,
                "provider": self.recorded.provider,
                "versions": dict(self.versions),
                "run_ms": self.recorded.run_ms,
                "outputs": [output.model_dump(mode="json") for output in self.recorded.outputs],
            },
        }


_NOISE_SHARE = 0.01
"""Growth of a module's error that is no loss, as a share. Chosen: rounding of another processor is less."""
_LOSS_OF_CHANGE_DB = 1.0
"""Loss of a changed file that is noted. Chosen: an eighth more error, while equal weights in another order of nodes
have the same."""


ModuleStatus = Literal["added", "removed", "changed", "renamed"]
BeforeAfter = tuple[int, int]
"""A number before and after."""


def changed_counts(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Name → (before, after) of differing counts, the largest change first."""
    difference = Counter(after)
    difference.subtract(before)
    ordered = sorted(difference.items(), key=lambda pair: (-abs(pair[1]), pair[0]))
    return {name: (before.get(name, 0), after.get(name, 0)) for name, change in ordered if change}


_MOST_NAMES = 5
"""Modules named in a sentence. Chosen: one line of a terminal."""


class ModuleChange(Record):
    """Differences of one module; a measure without a difference is empty."""

    module: str
    tag: str
    class_name: str = field(metadata=entry("class"))
    own_error: tuple[float, float] | None = None
    """Part of its relative error that its inputs do not explain, before and after, infinite for NaN; ``None`` if it has
    not doubled or halved."""
    nodes: Mapping[str, BeforeAfter] = field(default_factory=dict)
    """Operator → nodes of the file, before and after."""
    kernels: Mapping[str, BeforeAfter] = field(default_factory=dict)
    """Operator → kernels in a run, before and after: fused otherwise."""
    providers: Mapping[str, BeforeAfter] = field(default_factory=dict)
    """Execution provider → kernels in a run, before and after."""
    ms: tuple[float, float] | None = field(default=None, metadata=entry(digits=4))
    """Fastest time of its kernels, before and after; ``None`` within the noise."""

    @property
    def is_changed(self) -> bool:
        """True if a measure differs."""
        return any((self.own_error, self.nodes, self.kernels, self.providers, self.ms))


class UpgradeCheck(Record):
    """Comparison of one part with its verification in another environment."""

    versions: Mapping[str, tuple[str | None, str | None]]
    """Package → version before and after, of those that differ."""
    outputs: Mapping[str, tuple[float | None, float | None]]
    """Output → SQNR in dB before and after."""
    quality: Verdict
    """Verdict on the errors of the outputs."""
    placement: Verdict
    """Verdict on the providers of the nodes."""
    time: Verdict
    """Verdict on the time of a run."""
    run_ms: tuple[float | None, float | None] = field(metadata=entry(digits=3))
    """Median time of a run, before and after."""
    modules: tuple[ModuleChange, ...]
    """Modules that differ, in the order of the module tree."""
    origin: str = field(default="", metadata=entry(skip=True))
    """Tag of the module in which the error has grown; empty if unknown."""

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """Name → verdict."""
        return {"errors": self.quality, "placement": self.placement, "time": self.time}

    @property
    def refused(self) -> list[str]:
        """Names of the negative verdicts that end a verification with exit code 3: all but the time."""
        return [name for name, verdict in self.verdicts.items() if verdict.is_no and verdict is not self.time]

    def problem_words(self, name: str) -> str:
        """Reason of a negative verdict, and the modules that differ in its measure; empty for another verdict."""
        verdict = self.verdicts[name]
        if not verdict.is_no:
            return ""
        changed = {
            "errors": sorted((module for module in self.modules if module.own_error), key=self._distance_from_origin),
            "placement": [module for module in self.modules if module.providers],
            "time": [module for module in self.modules if module.ms],
        }
        modules = [module.module or module.tag or "no module" for module in changed[name]]
        more = f" and {len(modules) - _MOST_NAMES} more" if len(modules) > _MOST_NAMES else ""
        where = f"; modules that differ: {', '.join(modules[:_MOST_NAMES])}{more}" if modules else ""
        return f"{verdict.reason}{where}"

    def _distance_from_origin(self, module: ModuleChange) -> tuple[bool, bool, float]:
        """Sort key: the module in which the error has grown, then the largest growth first, and the root last."""
        before, after = module.own_error or (0.0, 0.0)
        return module.tag != self.origin, not module.module, before - after


class ComparedFile(Record):
    """Properties of one file."""

    path: Path
    size_bytes: int
    """Size including data files."""
    nodes: int
    parameters: int
    weight_bytes: int
    opset: int
    tree_source: str
    """Source of the module tree."""


class WeightChange(Record):
    """Change of one weight, without its values."""

    name: str
    status: Literal["added", "removed", "changed", "renamed"]
    before: str = field(default="", metadata=entry(null_if_empty=True))
    """Type and shape before: ``float32[384, 384]``; empty if added."""
    after: str = field(default="", metadata=entry(null_if_empty=True))
    renamed_from: str = field(default="", metadata=entry(null_if_empty=True))


class ChangedModule(Record):
    """Change of one module, without nodes and weights of its submodules."""

    status: ModuleStatus
    module: str
    """Module path."""
    tag: str
    class_name: str = field(metadata=entry("class", null_if_empty=True))
    nodes: BeforeAfter
    parameters: BeforeAfter
    size_bytes: BeforeAfter
    operators: Mapping[str, BeforeAfter] = field(default_factory=dict)
    """Operator → numbers of nodes before and after, if different."""
    dtypes: Mapping[str, BeforeAfter] = field(default_factory=dict)
    """Type of weights → bytes before and after, if different."""
    weights: tuple[WeightChange, ...] = field(default=(), metadata=entry(last=True))
    attributes_changed: int = 0
    """Number of nodes with an unchanged operator and changed attributes."""
    renamed_from: str = field(default="", metadata=entry(before="nodes", null_if_empty=True))
    """Previous tag."""

    @property
    @recorded(entry(before="attributes_changed"))
    def fusions(self) -> dict[str, int]:
        """Operator → number of added nodes, if nodes of other operators were removed; `{}` otherwise."""
        if not any(after < before for before, after in self.operators.values()):
            return {}
        return {name: after - before for name, (before, after) in self.operators.items() if after > before}


class StructureDiff(Result, Record, schema_version=1, document="compare.diff_table:diff_document", rows="modules"):
    """Structural differences of two files."""

    before: ComparedFile
    after: ComparedFile
    operators: Mapping[str, BeforeAfter]
    """Operator → numbers of nodes before and after, if different; the largest change first."""
    interface: tuple[str, ...]
    """Changes of inputs, outputs and opsets, one sentence each."""
    modules: tuple[ChangedModule, ...]
    """Changed modules, in the order of the file after, removed modules at their previous position."""
    same_modules: int
    """Number of unchanged modules."""
    is_rewired: bool = False
    """True if nodes and weights of all modules are equal, but the graph is connected differently."""
    notes: tuple[str, ...] = ()

    @property
    @recorded(entry(before="before"))
    def is_same(self) -> bool:
        """True if both files are structurally equal with the same weights."""
        return not (self.modules or self.interface or self.is_rewired)
