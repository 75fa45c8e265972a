"""How well a model does its task, beside a baseline: the record of ``winml eval``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate.metrics.metric import CONFIDENCE, RESAMPLES, Interval
from winml.modelkit.measure.statistics import DISTURBED, Summary
from winml.modelkit.progress import StepTiming

__all__ = ["EvaluatedData", "EvaluatedSide", "Evaluation", "Limit", "MetricResult", "evaluation_words", "number_words"]

SCHEMA_VERSION = 1
"""Layout of the JSON, specified in docs/reference/formats.md."""

SLACK = 1e-9
"""By how much a value may miss its limit. Chosen: above rounding of a difference of two shares (1e-16), far below what
one sample of a million changes."""

LimitKind = Literal["min", "max", "max_drop"]


@dataclass(frozen=True)
class MetricResult:
    """One metric of the model and of the baseline, on the same samples."""

    name: str
    value: float
    """NaN where the samples do not define it."""
    is_higher_better: bool
    interval: Interval | None = None
    """None where too few resamples define it."""
    baseline: float | None = None
    baseline_interval: Interval | None = None
    difference_interval: Interval | None = None
    """Of model minus baseline, on the same resamples."""
    resamples: int = RESAMPLES
    """On how many resamples the intervals are computed."""

    @property
    def drop(self) -> float | None:
        """By how much the model is worse than the baseline; negative where it is better, None without a baseline."""
        if self.baseline is None:
            return None
        return self.baseline - self.value if self.is_higher_better else self.value - self.baseline

    def as_record(self) -> dict[str, Any]:
        """Return its entry of ``metrics``."""
        record: dict[str, Any] = {
            "name": self.name,
            "value": _number(self.value),
            "interval": _ends(self.interval),
            "resamples": self.resamples,
            "is_higher_better": self.is_higher_better,
        }
        if self.baseline is not None:
            record["baseline"] = {"value": _number(self.baseline), "interval": _ends(self.baseline_interval)}
            record["difference"] = {
                "value": _number(self.value - self.baseline),
                "interval": _ends(self.difference_interval),
            }
        return record


@dataclass(frozen=True)
class Limit:
    """What a metric has to reach, and whether it does."""

    kind: LimitKind
    metric: str
    limit: float
    value: float
    """The metric, or its drop; NaN where it is not defined, which meets no limit."""

    @property
    def is_met(self) -> bool:
        """Whether it is reached; a value exactly at the limit does."""
        if self.kind == "min":
            return self.value >= self.limit - SLACK
        return self.value <= self.limit + SLACK

    def as_record(self) -> dict[str, Any]:
        """Return its entry of ``limits``."""
        return {
            "kind": self.kind,
            "metric": self.metric,
            "limit": self.limit,
            "value": _number(self.value),
            "is_met": self.is_met,
        }


@dataclass(frozen=True)
class EvaluatedSide:
    """One model that was run."""

    name: str
    """As the user wrote it."""
    kind: Literal["onnx", "pytorch"]
    latency_ms: Summary
    """Of one sample: its share of each run it was in, those of the first run left out where there are more."""
    provider: str | None = None
    """Execution provider of an ONNX file."""
    is_disturbed: bool = False
    """Whether other load slowed half of its runs, so that its times are not those of the model alone."""

    @property
    def busy_note(self) -> str:
        """What is to be said of its times where other load slowed them."""
        return (
            f"Half of the runs of {self.name} took more than {DISTURBED:g} times the fastest of equal sizes: the "
            "machine seems busy, and ms per sample is longer than on a quiet one. winml perf measures times."
        )

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form; times are in milliseconds."""
        return {
            "name": self.name,
            "kind": self.kind,
            "execution_provider": self.provider,
            "latency_per_sample_ms": self.latency_ms.as_record(),
            "is_disturbed": self.is_disturbed,
        }


@dataclass(frozen=True)
class EvaluatedData:
    """The samples both sides were run on."""

    name: str
    """File name, or name at the Hub."""
    split: str
    columns: Mapping[str, str]
    """Role → column."""
    samples: int
    """Samples that were run."""
    available: int
    """Samples that were asked for, those that do not open included."""
    unreadable: tuple[tuple[str, str], ...] = ()
    """Name and reason of each picture or recording that does not open."""

    @property
    def words(self) -> str:
        """How many samples, for people."""
        return f"{self.samples} {'sample' if self.samples == 1 else 'samples'}"

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {
            "name": self.name,
            "split": self.split,
            "columns": dict(self.columns),
            "samples": self.samples,
            "unreadable": [{"name": name, "reason": reason} for name, reason in self.unreadable],
        }


@dataclass(frozen=True)
class Evaluation:
    """Everything there is to tell about how well a model does its task."""

    task: str
    task_rule: str
    """What decided the task, in words."""
    data: EvaluatedData
    model: EvaluatedSide
    metrics: tuple[MetricResult, ...]
    """The task's first metric first."""
    batch_size: int
    seed: int
    tool_version: str
    onnxruntime_version: str
    baseline: EvaluatedSide | None = None
    agreement: float | None = None
    """Share of the samples on which both answer alike, 0 to 1; None without a baseline."""
    agreement_words: str = ""
    """What alike means for the task."""
    differing: tuple[int, ...] = ()
    """Samples on which they do not, by their number from 0 among those that were run."""
    limits: tuple[Limit, ...] = ()
    steps: tuple[StepTiming, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def is_good_enough(self) -> bool:
        """Whether every limit is met."""
        return all(limit.is_met for limit in self.limits)

    def metric(self, name: str) -> MetricResult:
        """Return a metric by name.

        Raises:
            UsageError: it was not measured.
        """
        found = {item.name: item for item in self.metrics}
        if name not in found:
            raise UsageError(f"metric {name!r} was not measured", hint=f"Measured were: {', '.join(found)}.")
        return found[name]

    def as_record(self) -> dict[str, Any]:
        """Return the JSON of ``winml eval``: shares from 0 to 1, times in milliseconds."""
        return {
            "schema_version": SCHEMA_VERSION,
            "tool_version": self.tool_version,
            "onnxruntime_version": self.onnxruntime_version,
            "task": self.task,
            "task_rule": self.task_rule,
            "dataset": self.data.as_record(),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "model": self.model.as_record(),
            "baseline": None if self.baseline is None else self.baseline.as_record(),
            "intervals": {
                "confidence": CONFIDENCE,
                "resamples": max((metric.resamples for metric in self.metrics), default=RESAMPLES),
            },
            "metrics": [metric.as_record() for metric in self.metrics],
            "agreement": None
            if self.agreement is None
            else {
                "share": round(self.agreement, 6),
                "means": self.agreement_words,
                "differing_samples": list(self.differing),
            },
            "limits": [limit.as_record() for limit in self.limits],
            "is_good_enough": self.is_good_enough,
            "steps": [step.as_record() for step in self.steps],
            "notes": list(self.notes),
        }


def evaluation_words(result: Evaluation) -> str:
    """Return the first metric, and the limits that are not met, in one line."""
    first = result.metrics[0]
    beside = "" if first.baseline is None else f" (baseline {number_words(first.baseline)})"
    missed = [
        f"{limit.metric} {number_words(limit.value)}, limit {limit.limit:g}"
        for limit in result.limits
        if not limit.is_met
    ]
    verdict = f"; not good enough: {', '.join(missed)}" if missed else ""
    found = f"{first.name} {number_words(first.value)}{beside}"
    return f"{found} on {result.data.words} of {result.data.name}{verdict}"


def number_words(value: float) -> str:
    """Return a metric as people read it.

    >>> number_words(0.5), number_words(math.inf), number_words(math.nan)
    ('0.5000', 'infinite', 'not defined')
    """
    if not math.isfinite(value):
        return "not defined" if math.isnan(value) else "infinite"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.1f}"


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [round(end, 6) for end in interval]
