"""Record of ``winml quantize --sensitivity``: error of each module when quantized."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from winml.modelkit.compare.fidelity import OutputFidelity, QualitySamples, QualitySource, quality_record
from winml.modelkit.evaluate.metrics import needed_samples
from winml.modelkit.profile.statistics import Ratio
from winml.modelkit.progress import StepTiming
from winml.modelkit.quantize.precisions import FLOAT32, PRECISIONS
from winml.modelkit.records import Record, entry, json_value, recorded
from winml.modelkit.report.result import Result
from winml.modelkit.verdicts import Verdict
from winml.modelkit.words import count_noun, sqnr_words

SCHEMA_VERSION = 1
"""Version of the JSON format, specified in docs/reference/formats.md."""

Metric = Literal["sqnr_db", "cosine", "relative_error"]
Part = Literal["module", "own nodes"]

_MEASURES = ("sqnr_db", "lower_sqnr_db", "cosine", "relative_error", "scores")
"""Record entries with the similarity of the outputs."""


class FidelityTarget(Record):
    """Target for the worst output of a quantized model."""

    metric: Metric
    value: float

    @property
    def words(self) -> str:
        """The target in the syntax of ``--target``."""
        return f"{self.metric}={self.value:g}"

    def is_met(self, variant: MeasuredVariant) -> bool:
        """Return True if a variant meets the target."""
        return variant.runs and self.quality(variant) >= (-self.value if self._is_error else self.value)

    def quality(self, variant: MeasuredVariant) -> float:
        """Metric of a variant, larger is better; ``-inf`` for a variant that cannot be compared."""
        if variant.worst is None or variant.problem:
            return float("-inf")
        # For decibels, the lower end of the interval over the samples counts.
        value: float = variant.worst.lower_db if self.metric == "sqnr_db" else getattr(variant.worst, self.metric)
        return -value if self._is_error else value

    def shortfall(self, variant: MeasuredVariant) -> float:
        """Difference between the target and a variant; 0 if met or not finite."""
        missing = (-self.value if self._is_error else self.value) - self.quality(variant)
        return missing if 0 < missing < math.inf else 0.0

    def stricter(self, amount: float) -> FidelityTarget:
        """Return the target raised by an amount."""
        return replace(self, value=self.value - amount if self._is_error else self.value + amount)

    @property
    def _is_error(self) -> bool:
        """True if smaller values of the metric are better."""
        return self.metric == "relative_error"


class MetricTarget(Record):
    """Target for a metric of a quantized model on the samples of a dataset."""

    metric: str
    value: float
    is_higher_better: bool = field(default=True, metadata=entry(skip=True))
    least_difference: float | None = field(default=None, metadata=entry(skip=True))
    """Smallest difference that the samples resolve; ``None`` if each sample has a part of the value."""

    @property
    def words(self) -> str:
        """The target in the syntax of ``--target``."""
        return f"{self.metric}={self.value:g}"

    def is_met(self, variant: MeasuredVariant) -> bool:
        """Return True if a variant meets the target."""
        return self.margin(variant) >= 0

    def margin(self, variant: MeasuredVariant) -> float:
        """Difference between the metric of a variant and the target; negative if the target is missed."""
        return self.quality(variant) - (self.value if self.is_higher_better else -self.value)

    def quality(self, variant: MeasuredVariant) -> float:
        """Metric of a variant, larger is better; ``-inf`` for a variant without scores."""
        value = variant.scores.get(self.metric, math.nan)
        if not math.isfinite(value):
            return float("-inf")
        return value if self.is_higher_better else -value


class MeasuredVariant(Record):
    """Output error of one variant of the graph relative to the float graph."""

    worst: OutputFidelity | None = field(metadata=entry(skip=True))
    """Output with the largest error; ``None`` if the variant could not be created or run."""
    nodes: int
    """Number of quantized nodes; in float16, also of those without a weight."""
    weight_bytes: int = field(metadata=entry("size_bytes"))
    """Size of all initializers; 0 if the variant could not be created."""
    problem: str = field(default="", metadata=entry(before="nodes", null_if_empty=True))
    """Reason why it could not be created, run or compared."""
    scores: Mapping[str, float] = field(
        default_factory=dict, metadata=entry(before="problem", digits=6, omit_empty=True)
    )
    """Metric → score on the samples of a dataset, if evaluated."""
    samples: int = field(default=0, metadata=entry(skip=True))
    """Number of samples; for an estimate, the smallest number of its parts."""
    outputs_db: Mapping[str, float] = field(default_factory=dict, metadata=entry(skip=True))
    """Output → its SQNR."""
    file_bytes: int = field(default=0, metadata=entry(skip=True))
    """Size of the file: weights, graph and metadata; 0 if the variant could not be created."""
    is_estimate: bool = field(default=False, metadata=entry(skip=True))
    """True for an estimate: its error power is the sum over its parts."""

    @classmethod
    def estimated(cls, parts: Sequence[MeasuredVariant], float_bytes: int) -> MeasuredVariant | None:
        """Estimate a variant in which several individually measured parts are quantized.

        Errors of parts are taken as uncorrelated, so that their powers add up.

        Args:
            parts: The parts.
            float_bytes: Size of all initializers of the float graph.

        Returns:
            The estimate; ``None`` if a part does not run, or the compared outputs differ.
        """
        names = parts[0].outputs_db.keys()
        if not names or any(part.outputs_db.keys() != names or not part.runs for part in parts):
            return None
        outputs = {name: -10 * math.log10(sum(10 ** (-part.outputs_db[name] / 10) for part in parts)) for name in names}
        name = min(outputs, key=lambda name: outputs[name])
        power = 10 ** (-outputs[name] / 10)
        worst = OutputFidelity(name, outputs[name], 1 / math.sqrt(1 + power), math.sqrt(power), math.nan)
        return cls(
            worst,
            nodes=sum(part.nodes for part in parts),
            weight_bytes=float_bytes - sum(float_bytes - part.weight_bytes for part in parts),
            samples=min(part.samples for part in parts),
            outputs_db=outputs,
            is_estimate=True,
        )

    @property
    def runs(self) -> bool:
        """True if its outputs can be compared."""
        return self.worst is not None and not self.problem

    @property
    def sqnr_db(self) -> float | None:
        """Signal-to-quantization-noise ratio of the worst output; ``None`` if not comparable."""
        return self.worst.sqnr_db if self.worst is not None and self.runs else None

    @recorded(entry(before="scores", inline=True))
    def measures(self) -> dict[str, Any]:
        """Metrics of the worst output; null if nothing can be compared."""
        measures = {}
        if self.worst is not None and self.runs:
            measures = {**self.worst.as_record(), "lower_sqnr_db": json_value(self.worst.lower_db)}
        return {name: measures.get(name) for name in _MEASURES if name != "scores"}


@dataclass(frozen=True)
class ModuleSensitivity:
    """Result of one module, quantized alone."""

    path: str
    tag: str
    class_name: str
    part: Part
    """The module with all submodules, or only the nodes outside its measured submodules."""
    precision: str
    """Precision of its weights; empty without weights to quantize."""
    parameters: int
    """Number of values in the weights to quantize."""
    form: MeasuredVariant | None
    """``None`` without nodes to quantize."""
    size_bytes_saved: int = 0
    """Reduction of the model's weight size."""

    @property
    def sqnr_db(self) -> float | None:
        """Signal-to-quantization-noise ratio of the worst output; ``None`` if not comparable."""
        return None if self.form is None else self.form.sqnr_db

    @property
    def basis_words(self) -> str:
        """Basis of the ratio: number of samples, or estimate; empty without a ratio."""
        if self.form is None or not self.form.runs:
            return ""
        return "estimate" if self.form.is_estimate else count_noun(self.form.samples, "sample")

    @property
    def problem(self) -> str:
        """Reason for a missing ratio; empty if present."""
        return "nothing to quantize" if self.form is None else self.form.problem

    def as_record(self) -> dict[str, Any]:
        """Entry of ``modules``."""
        variant = self.form or MeasuredVariant(None, 0, 0)
        measured = variant.as_record()
        return {
            "module": self.path,
            "tag": self.tag,
            "class": self.class_name,
            "part": self.part,
            "precision": self.precision or None,
            **{key: measured[key] for key in _MEASURES if key in measured},
            "basis": None if self.form is None else "estimated" if variant.is_estimate else "measured",
            "samples": variant.samples,
            "output": variant.worst.name if variant.worst else None,
            "nodes": variant.nodes,
            "parameters": self.parameters,
            "size_bytes_saved": self.size_bytes_saved,
            "problem": self.problem or None,
        }


class Trial(Record):
    """One measurement of the search for an exclude list."""

    excluded: int
    """Number of modules that stayed in float."""
    changed: str = field(metadata=entry("tried", before="excluded"))
    """Description of the trial."""
    form: MeasuredVariant = field(metadata=entry(inline=True, keys=_MEASURES))
    is_met: bool


class TimedVariant(Record, digits=6):
    """Latency of a variant, measured in alternation with the float graph."""

    p50_ms: float
    float_p50_ms: float
    ratio: Ratio
    """Ratio of its time to the time of the float graph."""


class ExcludeList(Record):
    """Modules that stay float so that the other modules can be quantized."""

    target: FidelityTarget | MetricTarget
    is_met: bool
    rules: Mapping[str, str]
    """Selector → precision, in the syntax of ``--per-module``; the first match wins."""
    excluded: tuple[str, ...]
    """Tags of the modules, in descending order of sensitivity."""
    form: MeasuredVariant = field(metadata=entry(inline=True, keys=(*_MEASURES, "nodes", "size_bytes")))
    """Measurement with exactly these rules."""
    trials: tuple[Trial, ...]
    latency: TimedVariant | None = field(default=None, metadata=entry(before="trials"))
    """Latency of the variant, if it meets the target."""

    @property
    def float_selectors(self) -> tuple[str, ...]:
        """Selectors of the modules that stay in float32."""
        return tuple(selector for selector, precision in self.rules.items() if precision == FLOAT32)

    @property
    @recorded(entry(before="rules"))
    def verdict(self) -> Verdict:
        """Yes or no if the measured quality answers if the target is reached; undecided for too few samples."""
        target = self.target
        question = f"{target.words} is reached with {count_noun(len(self.excluded), 'module')} in float"
        values = ", ".join(f"{name} {value:.4f}" for name, value in self.form.scores.items())
        worst = self.form.worst
        reached = values or self.form.problem or ("" if worst is None else f"SQNR {sqnr_words(worst.lower_db)}")
        if isinstance(target, MetricTarget) and self.is_met:
            margin, least = target.margin(self.form), target.least_difference or 0.0
            # A share is never below zero.
            if margin < least and (target.value > 0 or not target.is_higher_better):
                reason = f"{reached}, and the samples resolve no difference below {least:.4f}"
                needs = f"about {needed_samples(margin)} samples" if margin else "a target below the measured value"
                return Verdict.undecided(question, reason, needs)
        return Verdict.of(question, self.is_met, reached)


class SensitivityCost(Record, digits=3):
    """Seconds spent, over all measurements of this run."""

    measured: int = 0
    """Number of variants created, run and compared now."""
    resumed: int = 0
    """Number of measurements resumed from an interrupted run."""
    quantization_s: float = 0.0
    session_s: float = 0.0
    runs_s: float = 0.0


class QuantizationSensitivity(
    Result,
    Record,
    schema_version=SCHEMA_VERSION,
    document="quantize.sensitivity_table:sensitivity_document",
    rows="modules",
):
    """Output error of each module when quantized alone."""

    model: str
    """As passed by the user."""
    tool_version: str
    onnxruntime_version: str
    precision: str
    modes: tuple[str, ...]
    tree_source: str
    """Source of the module tree: ``winml tags``, or other names in the file."""
    samples: int
    """Number of samples."""
    input_source: QualitySource
    """Origin of the samples: ``processor``, ``random`` or ``file``."""
    input_shapes: Mapping[str, tuple[int, ...]]
    seed: int
    modules: tuple[ModuleSensitivity, ...]
    """In descending order of sensitivity; modules without nodes to quantize last."""
    whole: MeasuredVariant = field(metadata=entry(skip=True))
    """Measurement with all modules quantized."""
    float_bytes: int = field(metadata=entry("size_bytes", within="float", before="modules"))
    """Size of the weights in float."""
    exclude_list: ExcludeList | None
    latency: TimedVariant | None = field(metadata=entry(skip=True))
    """Latency with all modules quantized; measured with the exclude list only."""
    cost: SensitivityCost
    steps: tuple[StepTiming, ...]
    notes: tuple[str, ...] = field(default=())
    float_scores: Mapping[str, float] = field(
        default_factory=dict, metadata=entry("scores", within="float", before="modules", omit_empty=True)
    )
    """Metric → score of the float model, if a target of the task was not met."""
    data: str = field(default="", metadata=entry(omit_empty=True))
    """Name of the dataset of the samples, with its split if it has several; empty for other samples."""
    calibration: str | None = field(default=None, metadata=entry(omit_empty=True))
    """Samples that activation ranges were measured on; ``None`` without calibration."""
    fingerprint: str = field(default="", metadata=entry(before="tool_version", omit_empty=True))
    """Digest of the structure of the model, by which ``winml view`` assigns the result."""
    digest: str = field(default="", metadata=entry(before="tool_version", omit_empty=True))
    """Digest of the content of the model's files, weights included."""

    @property
    def quality_samples(self) -> QualitySamples:
        """Samples of the comparison."""
        return QualitySamples(self.input_source, self.samples, self.seed, data=self.data)

    @property
    @recorded(entry("limit_db", before="modules"))
    def limit_db(self) -> float | None:
        """SQNR that a quantization has to reach: the target, else the default minimum of the precision.

        ``None`` for other metrics, and for a precision of a package that is missing here.
        """
        if self.exclude_list is None:
            if self.precision not in PRECISIONS:
                return None
            agreement = None if self.whole.worst is None else self.whole.worst.prediction_agreement
            return PRECISIONS[self.precision].minimum.searched_db(agreement)
        target = self.exclude_list.target
        if target.metric == "relative_error":
            return -20 * math.log10(target.value) if target.value > 0 else None
        return target.value if target.metric == "sqnr_db" else None

    @property
    def unmet_words(self) -> str:
        """Reason for an unmet target; empty if met or without a target."""
        if (listed := self.exclude_list) is None or listed.is_met:
            return ""
        target = listed.target
        value = self.float_scores.get(target.metric)
        if value is not None and not target.is_met(MeasuredVariant(None, 0, 0, scores=self.float_scores)):
            return f"the float model reaches {value:.4g}"
        return "with fewer modules quantized, nothing would be left to quantize"

    @property
    def measured(self) -> tuple[ModuleSensitivity, ...]:
        """Modules with nodes to quantize, in the order of the ranking."""
        return tuple(module for module in self.modules if module.form is not None)

    @recorded(entry("quantized", before="modules"))
    def quantized_entry(self) -> dict[str, object]:
        """Record entry of the measurement with all modules quantized."""
        quality_samples = self.quality_samples
        quality = None if self.whole.worst is None else quality_record(quality_samples, [self.whole.worst])
        return {**self.whole.as_record(), "quality": quality, "latency": self.latency}
