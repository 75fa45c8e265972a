"""Record of ``winml eval``: metrics of a model, its baseline and limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate.metrics import CONFIDENCE, RESAMPLES, Interval
from winml.modelkit.profile.statistics import DISTURBED, Summary
from winml.modelkit.progress import StepTiming
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.words import count_noun

SCHEMA_VERSION = 1
"""Version of the JSON format, specified in docs/reference/formats.md."""

SLACK = 1e-9
"""Tolerance of limits. Chosen: above rounding of a difference of two shares (1e-16), far below the effect of one sample
in a million."""

_LEAST_TIMED = 20
"""Minimum number of timed samples. Chosen: with fewer, a short load on the machine determines the median."""

LimitKind = Literal["min", "max", "max_drop"]


@dataclass(frozen=True)
class MetricResult(Record, digits=6):
    """One metric of the model and of the baseline, on the same samples."""

    name: str
    value: float
    """NaN if undefined on the samples."""
    is_higher_better: bool
    interval: Interval | None = field(default=None, metadata=entry(before="is_higher_better"))
    """``None`` if defined on too few resamples."""
    baseline: float | None = field(default=None, metadata=entry(skip=True))
    baseline_interval: Interval | None = field(default=None, metadata=entry(skip=True))
    difference_interval: Interval | None = field(default=None, metadata=entry(skip=True))
    """Interval of model minus baseline, on the same resamples."""
    resamples: int = field(default=RESAMPLES, metadata=entry(before="is_higher_better"))
    """Number of resamples of the intervals."""

    @property
    def drop(self) -> float | None:
        """Drop of the model relative to the baseline; negative if better, ``None`` without a baseline."""
        if self.baseline is None:
            return None
        return self.baseline - self.value if self.is_higher_better else self.value - self.baseline

    @recorded(entry("baseline", omit_none=True))
    def baseline_entry(self) -> dict[str, object] | None:
        """Value of the baseline with its interval; `None` without a baseline."""
        return None if self.baseline is None else {"value": self.baseline, "interval": self.baseline_interval}

    @recorded(entry("difference", omit_none=True))
    def difference_entry(self) -> dict[str, object] | None:
        """Model minus baseline with its interval; `None` without a baseline."""
        if self.baseline is None:
            return None
        return {"value": self.value - self.baseline, "interval": self.difference_interval}


@dataclass(frozen=True)
class Limit(Record):
    """Limit of a metric and its measured value."""

    kind: LimitKind
    metric: str
    limit: float
    value: float = field(metadata=entry(digits=6))
    """The metric or its drop; NaN if undefined, which meets no limit."""

    @property
    @recorded()
    def is_met(self) -> bool:
        """True if the limit is met; a value equal to the limit meets it."""
        if self.kind == "min":
            return self.value >= self.limit - SLACK
        return self.value <= self.limit + SLACK


@dataclass(frozen=True)
class EvaluatedSide(Record):
    """Results of one model."""

    name: str
    """Name or path as passed by the user."""
    kind: Literal["onnx", "pytorch"]
    latency_ms: Summary = field(metadata=entry("latency_per_sample_ms"))
    """Latency of one sample: its share of each of its runs, excluding samples of the first run if there are others."""
    provider: str | None = field(default=None, metadata=entry("execution_provider", before="latency_per_sample_ms"))
    """Execution provider of an ONNX file."""
    is_disturbed: bool = False
    """True if other load slowed half of its runs, so that the times are unreliable."""
    timed_samples: int = 0
    """Number of samples timed after the first run, which includes set-up."""


@dataclass(frozen=True)
class EvaluatedData(Record):
    """Samples that both models were run on."""

    name: str
    """File name, or name on the Hub."""
    split: str
    columns: Mapping[str, str]
    """Role → column."""
    samples: int
    """Number of samples run."""
    available: int = field(metadata=entry(skip=True))
    """Number of requested samples, including unreadable ones."""
    unreadable: tuple[tuple[str, str], ...] = field(default=(), metadata=entry(skip=True))
    """(name, reason) of each unreadable image or audio file."""

    @property
    def words(self) -> str:
        """Number of samples, in words."""
        return count_noun(self.samples, "sample")

    @property
    @recorded(entry("unreadable"))
    def unreadable_files(self) -> list[dict[str, str]]:
        """Unreadable files as objects with name and reason."""
        return [{"name": name, "reason": reason} for name, reason in self.unreadable]


@dataclass(frozen=True)
class Evaluation(Record, schema_version=SCHEMA_VERSION):
    """Result of an evaluation."""

    tool_version: str
    onnxruntime_version: str
    task: str
    task_rule: str
    """Origin of the task, in words."""
    data: EvaluatedData = field(metadata=entry("dataset"))
    batch_size: int
    seed: int
    model: EvaluatedSide
    metrics: tuple[MetricResult, ...]
    """Metrics, the task's first metric first."""
    baseline: EvaluatedSide | None = field(default=None, metadata=entry(before="metrics"))
    agreement: float | None = field(default=None, metadata=entry(skip=True))
    """Mean agreement of the predictions, 0 to 1; ``None`` without a baseline."""
    agreement_words: str = field(default="", metadata=entry(skip=True))
    """Meaning of agreement for the task."""
    quality: dict[str, Any] | None = field(default=None, metadata=entry(skip=True))
    """Quality record of the outputs relative to the baseline, on the same samples; ``None`` without a baseline."""
    differing: tuple[int, ...] = field(default=(), metadata=entry(skip=True))
    """Indices of the samples without full agreement, from 0, among the samples run."""
    limits: tuple[Limit, ...] = ()
    steps: tuple[StepTiming, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    @recorded(entry(before="steps"))
    def is_good_enough(self) -> bool:
        """True if every limit is met."""
        return all(limit.is_met for limit in self.limits)

    @property
    def sides(self) -> tuple[EvaluatedSide, ...]:
        """The model, and the baseline if any."""
        return (self.model,) if self.baseline is None else (self.model, self.baseline)

    @property
    def is_timed(self) -> bool:
        """True if enough samples were timed on each side."""
        return all(side.timed_samples >= _LEAST_TIMED for side in self.sides)

    @property
    def has_times(self) -> bool:
        """True if the time of a sample is shown: it was measured, and no other load slowed the runs."""
        return self.is_timed and not any(side.is_disturbed for side in self.sides)

    def time_notes(self) -> Iterator[str]:
        """Yield notes on missing times, or on sides slowed by other load."""
        if not self.is_timed:
            yield (
                f"Not timed: fewer than {_LEAST_TIMED} samples were run after the first run. "
                "Use winml perf for latency."
            )
            return
        for side in self.sides:
            if side.is_disturbed:
                yield (
                    f"Half of the runs of {side.name} took more than {DISTURBED:g} times the fastest of equal sizes: "
                    "the machine seems busy, so the time of a sample is not shown. Use winml perf for latency."
                )

    def metric(self, name: str) -> MetricResult:
        """Return a metric by name.

        Raises:
            UsageError: the metric was not measured.
        """
        metrics = {metric.name: metric for metric in self.metrics}
        if name not in metrics:
            raise UsageError(f"metric {name!r} was not measured", hint=f"Measured: {', '.join(metrics)}.")
        return metrics[name]

    @recorded(entry("intervals", before="metrics"))
    def intervals_entry(self) -> dict[str, object]:
        """Confidence and number of resamples of the intervals."""
        resamples = max((metric.resamples for metric in self.metrics), default=RESAMPLES)
        return {"confidence": CONFIDENCE, "resamples": resamples}

    @recorded(entry("agreement", before="limits", digits=6))
    def agreement_entry(self) -> dict[str, object] | None:
        """Agreement of the predictions, and the samples that differ; `None` without a baseline."""
        if self.agreement is None:
            return None
        return {
            "share": self.agreement,
            "means": self.agreement_words,
            "differing_samples": self.differing,
            "quality": self.quality,
        }


def evaluation_words(result: Evaluation) -> str:
    """Describe the first metric and the missed limits in one line."""
    main = result.metrics[0]
    beside = "" if main.baseline is None else f" (baseline {number_words(main.baseline)})"
    missed = [
        f"{limit.metric} {number_words(limit.value)}, limit {limit.limit:g}"
        for limit in result.limits
        if not limit.is_met
    ]
    verdict = f"; limit missed: {', '.join(missed)}" if missed else ""
    summary = f"{main.name} {number_words(main.value)}{beside}"
    return f"{summary} on {result.data.words} of {result.data.name}{verdict}"


def number_words(value: float) -> str:
    """Format a metric.

    >>> number_words(0.5), number_words(math.inf), number_words(math.nan)
    ('0.5000', 'infinite', 'not defined')
    """
    if not math.isfinite(value):
        return "not defined" if math.isnan(value) else "infinite"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.1f}"
