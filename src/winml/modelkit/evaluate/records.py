"""Record of ``winml eval``: metrics of a model, its baseline and limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, Literal

from winml.modelkit.compare.fidelity import share_interval
from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate.metrics import CONFIDENCE, RESAMPLES, Interval, least_difference, needed_samples
from winml.modelkit.profile.statistics import Summary
from winml.modelkit.progress import StepTiming
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.report.result import Result
from winml.modelkit.verdicts import DISTURBED, Verdict, weakest
from winml.modelkit.words import count_noun

SCHEMA_VERSION = 1
"""Version of the JSON format, specified in docs/reference/formats.md."""

SLACK = 1e-9
"""Tolerance of limits. Chosen: above rounding of a difference of two shares (1e-16), far below the effect of one sample
in a million."""

_LEAST_TIMED = 20
"""Minimum number of timed samples. Chosen: with fewer, a short load on the machine determines the median."""

LimitKind = Literal["min", "max", "max_drop"]


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
    samples: int = field(default=0, metadata=entry(skip=True))
    least_difference: float | None = field(default=None, metadata=entry(skip=True))
    """Smallest difference that the samples resolve; ``None`` if each sample has a part of the value."""

    @property
    def drop(self) -> float | None:
        """Drop of the model relative to the baseline; negative if better, ``None`` without a baseline."""
        if self.baseline is None:
            return None
        return self.baseline - self.value if self.is_higher_better else self.value - self.baseline

    @property
    def drop_interval(self) -> Interval | None:
        """Interval of the drop; ``None`` without a baseline or for too few samples."""
        if self.difference_interval is None or not self.is_higher_better:
            return self.difference_interval
        low, high = self.difference_interval
        return -high, -low

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


class Limit(Record):
    """Limit of a metric and its measured value."""

    kind: LimitKind
    metric: str
    limit: float
    value: float = field(metadata=entry(digits=6))
    """The metric or its drop; NaN if undefined, which meets no limit."""
    interval: Interval | None = field(default=None, metadata=entry(digits=6))
    """95 % interval of the value; ``None`` if there are too few samples for it."""
    samples: int = field(default=0, metadata=entry(skip=True))

    @property
    @recorded()
    def is_met(self) -> bool:
        """True if the measured value meets the limit; a value equal to the limit meets it."""
        return self._allows(self.value)

    @property
    @recorded()
    def verdict(self) -> Verdict:
        """Yes or no if the whole interval of the value is on one side of the limit; else undecided."""
        if not math.isfinite(self.value):
            return Verdict.of(self.question, self.is_met, self._value_words)
        ends = (self.value, self.value) if self.interval is None else self.interval
        words = f"{self._value_words}{self._interval_words}"
        if self.interval is not None and self._allows(ends[0]) is self._allows(ends[1]):
            return Verdict.of(self.question, self.is_met, words)
        return Verdict.undecided(self.question, words, self._needed_words(ends))

    @property
    def words(self) -> str:
        """The limit, its verdict, and the measured value in one sentence."""
        verdict = self.verdict
        needs = f"; {verdict.decided_by} would decide" if verdict.is_undecided else ""
        missed = "; these samples miss it" if verdict.is_undecided and not self.is_met else ""
        return f"{verdict.limit_words}: {self.question}; measured: {verdict.reason}{missed}{needs}"

    @property
    def question(self) -> str:
        """The requirement."""
        return f"{self.metric} {self._bound_words}"

    def _allows(self, value: float) -> bool:
        return value >= self.limit - SLACK if self.kind == "min" else value <= self.limit + SLACK

    @property
    def _bound_words(self) -> str:
        words = {"min": "at least", "max": "at most", "max_drop": "at most"}[self.kind]
        return f"{words} {self.limit:g}{' worse than the baseline' if self.kind == 'max_drop' else ''}"

    @property
    def _value_words(self) -> str:
        return _drop_words(self.value) if self.kind == "max_drop" else number_words(self.value)

    @property
    def _interval_words(self) -> str:
        if self.interval is None or self.interval[0] == self.interval[1]:
            return ""
        # A drop is written as worse, like in the requirement.
        low, high = map(number_words, self.interval)
        return f" (95 % interval{' of the drop' if self.kind == 'max_drop' else ''} {low} to {high})"

    def _needed_words(self, ends: Interval) -> str:
        """Estimate the number of samples that decide: the interval narrows with their square root, at most to 3/n."""
        margin = abs(self.value - self.limit)
        if not SLACK < margin < math.inf:
            return "a limit outside of the interval"
        if not all(map(math.isfinite, ends)):
            return "samples with finite scores"
        reach = abs(self.value - ends[0 if self.value > self.limit else 1])
        share = min(reach / margin, 1e6)  # of more samples than there are, the estimate says nothing
        count = max(needed_samples(margin), math.ceil(self.samples * share**2))
        if math.isclose(reach, least_difference(max(self.samples, 1))):
            count = needed_samples(margin)
        step = 10 ** max(len(str(count)) - 2, 0)
        return f"about {-(-count // step) * step} samples"


class Confusion(Record):
    """Confusion matrix of a classification; classes without an error are folded if there are many."""

    classes: tuple[str, ...]
    """Classes of the rows and columns."""
    folded: int
    """Number of classes that share the last row and column; 0: each class has its own."""
    model: tuple[tuple[int, ...], ...]
    """For each label, the number of samples by predicted class."""
    baseline: tuple[tuple[int, ...], ...] | None = None
    """The same of the baseline; ``None`` without a baseline."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rows and columns."""
        return (*self.classes, *([f"{self.folded} other{'s' * (self.folded > 1)}"] if self.folded else []))


class ChangedSample(Record):
    """A sample with different predictions of model and baseline; texts are shortened."""

    sample: int
    """Number from 0 among the samples run."""
    label: str | None
    """Reference value; ``None`` if the task has none."""
    baseline: str
    model: str
    effect: Literal["now wrong", "now right", "still wrong"] | None
    """Effect on the metric; ``None`` if predictions of the task are not either right or wrong."""
    text: str = field(default="", metadata=entry(null_if_empty=True))
    """First characters of the text of the sample; empty for images and audio."""
    file: str = field(default="", metadata=entry(null_if_empty=True))
    """Name of the image or audio file; empty for samples without a file."""


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
    simulated_on: str = field(default="", metadata=entry(omit_empty=True, before="latency_per_sample_ms"))
    """Kind of device on which the provider simulates its device; empty without simulation."""


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


class Evaluation(
    Result, Record, schema_version=SCHEMA_VERSION, document="evaluate.table:evaluation_document", rows="metrics"
):
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
    changed: tuple[ChangedSample, ...] = field(default=(), metadata=entry(skip=True))
    """Samples with different predictions, those now wrong first; a bounded number, of tasks with textual
    predictions."""
    confusion: Confusion | None = field(default=None, metadata=entry(before="limits"))
    """Confusion matrix; ``None`` for tasks without classes."""
    limits: tuple[Limit, ...] = ()
    steps: tuple[StepTiming, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    @recorded(entry(before="steps"))
    def is_good_enough(self) -> bool:
        """True if every measured value meets its limit."""
        return all(limit.is_met for limit in self.limits)

    @property
    @recorded(entry(before="steps"))
    def verdict(self) -> Verdict | None:
        """Verdict on all limits; ``None`` without limits."""
        return weakest([limit.verdict for limit in self.limits]) if self.limits else None

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
            "interval": share_interval(self.agreement, self.data.samples),
            "means": self.agreement_words,
            "differing_samples": self.differing,
            "changed_samples": [sample.as_record() for sample in self.changed],
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
    unresolved = [
        f"{limit.metric} ({limit.verdict.decided_by} would decide)"
        for limit in result.limits
        if limit.is_met and limit.verdict.is_undecided
    ]
    verdict = f"; limit missed: {', '.join(missed)}" if missed else ""
    undecided = f"; limit undecided: {', '.join(unresolved)}" if unresolved else ""
    summary = f"{main.name} {number_words(main.value)}{beside}"
    return f"{summary} on {result.data.words} of {result.data.name}{verdict}{undecided}"


def _drop_words(drop: float) -> str:
    """Describe the drop of a metric.

    >>> _drop_words(0.5), _drop_words(-0.5), _drop_words(0.0), _drop_words(math.nan)
    ('0.5000 worse', '0.5000 better', 'equal', 'not defined')
    """
    if not drop or math.isnan(drop):
        return "not defined" if drop else "equal"
    return f"{number_words(abs(drop))} {'worse' if drop > 0 else 'better'}"


def number_words(value: float) -> str:
    """Format a metric.

    >>> number_words(0.5), number_words(math.inf), number_words(math.nan)
    ('0.5000', 'infinite', 'not defined')
    """
    if not math.isfinite(value):
        return "not defined" if math.isnan(value) else "infinite"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.1f}"
