"""Which modules lose precision when quantized: the record of ``winml quantize --sensitivity``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from winml.modelkit.compare.fidelity import OutputFidelity, QualitySamples, QualitySource, quality_record
from winml.modelkit.profile.statistics import Ratio
from winml.modelkit.progress import StepTiming
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.words import count_noun

SCHEMA_VERSION = 1
"""Version of the JSON format, specified in docs/reference/formats.md."""

Metric = Literal["sqnr_db", "cosine", "relative_error"]
Part = Literal["module", "own nodes"]

_MEASURES = (*get_args(Metric), "scores")
"""Entries of a form that say how near its answers are."""


@dataclass(frozen=True)
class FidelityTarget(Record):
    """What the worst output of a quantized model has to reach."""

    metric: Metric
    value: float

    @property
    def words(self) -> str:
        """The target as it is written after ``--target``."""
        return f"{self.metric}={self.value:g}"

    def is_met(self, form: MeasuredVariant) -> bool:
        """Say whether the answers of a form are near enough."""
        return form.runs and self.quality(form) >= (-self.value if self._is_error else self.value)

    def quality(self, form: MeasuredVariant) -> float:
        """Return the metric, larger for what is better; the worst there is for a form that cannot be compared."""
        if form.worst is None or form.problem:
            return float("-inf")
        # Of decibels, the lower end of the interval over the samples counts.
        value: float = form.worst.lower_db if self.metric == "sqnr_db" else getattr(form.worst, self.metric)
        return -value if self._is_error else value

    def shortfall(self, form: MeasuredVariant) -> float:
        """Return by how much a form misses the target; 0 where it meets it, or where that is no number."""
        missing = (-self.value if self._is_error else self.value) - self.quality(form)
        return missing if 0 < missing < math.inf else 0.0

    def stricter(self, amount: float) -> FidelityTarget:
        """Return the target with so much more asked for."""
        return replace(self, value=self.value - amount if self._is_error else self.value + amount)

    @property
    def _is_error(self) -> bool:
        return self.metric == "relative_error"


@dataclass(frozen=True)
class MetricTarget(Record):
    """What a metric of a quantized model has to reach on the samples of a data set."""

    metric: str
    value: float
    is_higher_better: bool = field(default=True, metadata=entry(skip=True))

    @property
    def words(self) -> str:
        """The target as it is written after ``--target``."""
        return f"{self.metric}={self.value:g}"

    def is_met(self, form: MeasuredVariant) -> bool:
        """Say whether the model is good enough with a form."""
        return self.quality(form) >= (self.value if self.is_higher_better else -self.value)

    def quality(self, form: MeasuredVariant) -> float:
        """Return the metric, larger for what is better; the worst there is for a form that was not judged."""
        value = form.scores.get(self.metric, math.nan)
        if not math.isfinite(value):
            return float("-inf")
        return value if self.is_higher_better else -value


@dataclass(frozen=True)
class MeasuredVariant(Record):
    """The answers of one form of the graph, some of whose nodes are quantized, against those of the float graph."""

    worst: OutputFidelity | None = field(metadata=entry(skip=True))
    """The output that is farthest from its reference; None where the form could not be made or run."""
    nodes: int
    """Nodes with a weight that are quantized."""
    weight_bytes: int = field(metadata=entry("size_bytes"))
    """Size of all initializers; 0 where the form could not be made."""
    problem: str = field(default="", metadata=entry(before="nodes", null_if_empty=True))
    """Why it could not be made, run or compared."""
    scores: Mapping[str, float] = field(
        default_factory=dict, metadata=entry(before="problem", digits=6, omit_empty=True)
    )
    """Metric → value on the samples of a data set, where the form was judged by them."""
    samples: int = field(default=0, metadata=entry(skip=True))
    """On how many samples it was run; of an estimate, the forms that it is made of."""
    outputs_db: Mapping[str, float] = field(default_factory=dict, metadata=entry(skip=True))
    """Output → its SQNR."""
    is_estimate: bool = field(default=False, metadata=entry(skip=True))
    """Whether it was never run: the power of its error is the sum of those of its parts."""

    @classmethod
    def estimated(cls, parts: Sequence[MeasuredVariant], float_bytes: int) -> MeasuredVariant | None:
        """Return what a form is expected to answer in which several parts are quantized, each measured alone.

        Errors of parts are taken as uncorrelated, so that their powers add up.

        Args:
            parts: The parts.
            float_bytes: Size of all initializers of the float graph.

        Returns:
            The estimate; None where a part does not run, or was not compared at the same outputs.
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
        """Whether there are answers that can be compared."""
        return self.worst is not None and not self.problem

    @recorded(entry(before="scores", inline=True))
    def measures(self) -> dict[str, Any]:
        """Return how near the worst output is; null where nothing can be compared."""
        measures = self.worst.as_record() if self.worst is not None and self.runs else {}
        return {name: measures.get(name) for name in get_args(Metric)}


@dataclass(frozen=True)
class ModuleSensitivity:
    """One module, quantized alone."""

    path: str
    tag: str
    class_name: str
    part: Part
    """The module with all below it, or only the nodes that no measured module below it has."""
    precision: str
    """What its weights would have; empty where it has none to quantize."""
    parameters: int
    """Numbers in the weights that are to be quantized."""
    form: MeasuredVariant | None
    """None where it has nothing to quantize."""
    size_bytes_saved: int = 0
    """By how much the weights of the model shrink."""

    @property
    def sqnr_db(self) -> float | None:
        """Signal-to-quantization-noise ratio of the worst output; None where there is none."""
        return self.form.worst.sqnr_db if self.form is not None and self.form.worst and self.form.runs else None

    @property
    def basis_words(self) -> str:
        """What the ratio is based on: measurements on so many samples, or an estimate; empty where there is none."""
        if self.form is None or not self.form.runs:
            return ""
        return "estimate" if self.form.is_estimate else count_noun(self.form.samples, "sample")

    @property
    def problem(self) -> str:
        """Why there is no ratio; empty where there is one."""
        return "nothing to quantize" if self.form is None else self.form.problem

    def as_record(self) -> dict[str, Any]:
        """Return its entry of ``modules``."""
        form = self.form or MeasuredVariant(None, 0, 0)
        measured = form.as_record()
        return {
            "module": self.path,
            "tag": self.tag,
            "class": self.class_name,
            "part": self.part,
            "precision": self.precision or None,
            **{key: measured[key] for key in _MEASURES if key in measured},
            "basis": None if self.form is None else "estimated" if form.is_estimate else "measured",
            "samples": form.samples,
            "output": form.worst.name if form.worst else None,
            "nodes": form.nodes,
            "parameters": self.parameters,
            "size_bytes_saved": self.size_bytes_saved,
            "problem": self.problem or None,
        }


@dataclass(frozen=True)
class Trial(Record):
    """One measurement on the way to an exclude list."""

    excluded: int
    """Number of modules that stayed in float."""
    changed: str = field(metadata=entry("tried", before="excluded"))
    """What was tried, in words."""
    form: MeasuredVariant = field(metadata=entry(inline=True, keys=_MEASURES))
    is_met: bool


@dataclass(frozen=True)
class TimedVariant(Record, digits=6):
    """The latency of a form, measured in alternation with the float graph."""

    p50_ms: float
    float_p50_ms: float
    ratio: Ratio
    """Its time over that of the float graph."""


@dataclass(frozen=True)
class ExcludeList(Record):
    """The modules that stay in float so that the others can have fewer bits."""

    target: FidelityTarget | MetricTarget
    is_met: bool
    rules: Mapping[str, str]
    """Selector to precision, as ``--per-module`` takes it; the first that matches wins."""
    excluded: tuple[str, ...]
    """Tags of the modules, the most sensitive first."""
    form: MeasuredVariant = field(metadata=entry(inline=True, keys=(*_MEASURES, "nodes", "size_bytes")))
    """What is left of the answers, measured with exactly these rules."""
    trials: tuple[Trial, ...]
    latency: TimedVariant | None = field(default=None, metadata=entry(before="trials"))
    """What the form takes, where it meets the target."""


@dataclass(frozen=True)
class SensitivityCost(Record, digits=3):
    """Where the time went: seconds over all measurements of this run."""

    measured: int = 0
    """Forms that were made, run and compared now."""
    resumed: int = 0
    """Forms whose measurement an interrupted run had kept."""
    quantization_s: float = 0.0
    session_s: float = 0.0
    runs_s: float = 0.0


@dataclass(frozen=True)
class QuantizationSensitivity(Record, schema_version=SCHEMA_VERSION):
    """The damage that each module does when it alone is quantized."""

    model: str
    """As passed by the user."""
    tool_version: str
    onnxruntime_version: str
    precision: str
    modes: tuple[str, ...]
    tree_source: str
    """What the modules were read from: ``winml tags``, or other names in the file."""
    samples: int
    """Sets of values the model was run on."""
    input_source: QualitySource
    """Where they came from: ``processor``, ``random`` or ``file``."""
    input_shapes: Mapping[str, tuple[int, ...]]
    seed: int
    modules: tuple[ModuleSensitivity, ...]
    """Most sensitive first; those with nothing to quantize last."""
    whole: MeasuredVariant = field(metadata=entry(skip=True))
    """All modules quantized."""
    float_bytes: int = field(metadata=entry("size_bytes", within="float", before="modules"))
    """Size of the weights in float."""
    exclude_list: ExcludeList | None
    latency: TimedVariant | None = field(metadata=entry(skip=True))
    """Latency of the whole in fewer bits; measured with the exclude list only."""
    cost: SensitivityCost
    steps: tuple[StepTiming, ...]
    notes: tuple[str, ...] = field(default=())
    float_scores: Mapping[str, float] = field(
        default_factory=dict, metadata=entry("scores", within="float", before="modules", omit_empty=True)
    )
    """Metric → value of the float model, where a target of the task was not met."""

    @property
    def unmet_words(self) -> str:
        """Why the target was not met; empty where it was, or there is none."""
        if (listed := self.exclude_list) is None or listed.is_met:
            return ""
        target = listed.target
        value = self.float_scores.get(target.metric)
        if value is not None and not target.is_met(MeasuredVariant(None, 0, 0, scores=self.float_scores)):
            return f"the float model reaches {value:.4g}"
        return "with fewer modules quantized, nothing would be left to quantize"

    @property
    def measured(self) -> tuple[ModuleSensitivity, ...]:
        """The modules that have something to quantize, in the order of the ranking."""
        return tuple(module for module in self.modules if module.form is not None)

    @recorded(entry("quantized", before="modules"))
    def quantized_entry(self) -> dict[str, object]:
        """Return what is left of the answers with all modules quantized."""
        about = QualitySamples(self.input_source, self.samples, self.seed)
        quality = None if self.whole.worst is None else quality_record(about, [self.whole.worst])
        return {**self.whole.as_record(), "quality": quality, "latency": self.latency}
