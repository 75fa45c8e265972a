"""Evaluation of a model and a baseline on the samples of a dataset."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.fidelity import FidelitySum, QualitySamples, quality_record
from winml.modelkit.errors import InputError, UsageError, opt, spell
from winml.modelkit.evaluate.evaluated_models import EvaluatedModel, Subject, opened_baseline, opened_model
from winml.modelkit.evaluate.metrics import Interval, Measured, Metric, intervals, least_difference, ratio_of_sums
from winml.modelkit.evaluate.options import AGREEMENT, EvaluationOptions
from winml.modelkit.evaluate.records import (
    ChangedSample,
    Confusion,
    EvaluatedData,
    EvaluatedSide,
    Evaluation,
    Limit,
    LimitKind,
    MetricResult,
)
from winml.modelkit.evaluate.sides import Side, joined_inputs
from winml.modelkit.evaluate.tasks.table import (
    chosen_metrics,
    refuse_missing_libraries,
    refuse_unknown_metrics,
    task_definition,
)
from winml.modelkit.evaluate.tasks.task import Evaluator, EvaluatorContext, Sample, TaskDefinition
from winml.modelkit.options import Drop, drop_at, drop_words
from winml.modelkit.ort.sessions import onnxruntime_version
from winml.modelkit.profile.statistics import are_disturbed, summarize
from winml.modelkit.progress import OnStep, Progress, StepClock, count_share
from winml.modelkit.samples.columns import match_columns
from winml.modelkit.samples.data_sets import DataSet, DataSetRequest, open_data_set
from winml.modelkit.samples.media import Recording, media_name
from winml.modelkit.samples.preprocessing import Batch, Preprocessor, Row
from winml.modelkit.version import __version__
from winml.modelkit.words import count_noun


def check_limits(task: TaskDefinition, options: EvaluationOptions) -> None:
    """Check that metrics and limits belong to the task.

    Raises:
        UsageError: a metric does not belong to the task, or its limit has the wrong direction or is unreachable.
    """
    chosen_metrics(task, options.metrics)
    directions = {metric.name: metric.is_higher_better for metric in task.metrics}
    chosen_metrics(task, tuple(options.max_drop), "max_drop")
    for option, limits in (("min", options.min), ("max", options.max)):
        names = [name for name in limits if name != AGREEMENT or option != "min"]
        chosen_metrics(task, tuple(names), option)
        wrong = [name for name in names if directions[name] is (option == "max")]
        if wrong:
            opposite, direction = ("min", "more") if option == "max" else ("max", "less")
            raise UsageError(
                f"{spell(option)} {wrong[0]}={limits[wrong[0]]:g}: of {wrong[0]}, {direction} is better",
                hint=f"Write {spell(opposite)} {wrong[0]}={limits[wrong[0]]:g}.",
            )
    _refuse_unreachable(options)


def check_unknown_task(options: EvaluationOptions) -> None:
    """Refuse metrics that no task has, while the task is unknown.

    Raises:
        UsageError: names the metric.
    """
    refuse_unknown_metrics(options.metrics, "metric")
    refuse_unknown_metrics(options.min, "min", AGREEMENT)
    refuse_unknown_metrics(options.max, "max")
    refuse_unknown_metrics(options.max_drop, "max_drop")


def _refuse_unreachable(options: EvaluationOptions) -> None:
    """Refuse unreachable shares above one, and negative drops.

    Raises:
        UsageError: names the limit.
    """
    for name, value in options.min.items():
        # Every metric for which higher is better is a share or a correlation.
        if value > 1:
            raise UsageError(
                f"{opt.min} {name}={value:g}: expected at most 1",
                hint=f"State a fraction: {opt.min} {name}={value / 100:g}."
                if value <= 100
                else "State a fraction from 0 to 1.",
            )
    for name, drop in options.max_drop.items():
        if not isinstance(drop, str) and drop < 0:
            raise UsageError(
                f"{opt.max_drop} {name}={drop:g}: expected zero or more", hint="State the maximum drop, such as 0.01."
            )


def refuse_limits_without_baseline(options: EvaluationOptions, baseline: Side | None) -> None:
    """Refuse limits that require a baseline if there is no baseline.

    Raises:
        UsageError: names the first such limit.
    """
    limits: dict[str, Mapping[str, Drop]] = {
        "max_drop": options.max_drop,
        "min": {name: value for name, value in options.min.items() if name == AGREEMENT},
    }
    for option, values in limits.items():
        if values and baseline is None:
            name = next(iter(values))
            raise UsageError(
                f"{spell(option)} {name}={drop_words(values[name])} needs a baseline, and there is none",
                hint=f"Set {opt.baseline} to pytorch, an ONNX file or a checkpoint folder.",
            )


def _pair_limits(
    options: EvaluationOptions, metrics: Sequence[MetricResult], agreements: Sequence[float]
) -> tuple[Limit, ...]:
    """Pair every limit with its measured value."""
    measured = {metric.name: metric for metric in metrics}
    if AGREEMENT in options.min:
        measured[AGREEMENT] = _agreement_result(agreements, options.seed)

    def limit_on(kind: LimitKind, name: str, limit: float) -> Limit:
        metric = measured[name]
        return Limit(kind, name, limit, metric.value, metric.interval, metric.samples)

    def drop_limit(name: str, drop: Drop) -> Limit:
        metric = measured[name]
        assert metric.baseline is not None  # refused without a baseline
        assert metric.drop is not None
        limit = drop_at(drop, metric.baseline)
        return Limit("max_drop", name, limit, metric.drop, metric.drop_interval, metric.samples)

    return (
        *(limit_on("min", name, limit) for name, limit in options.min.items()),
        *(limit_on("max", name, limit) for name, limit in options.max.items()),
        *(drop_limit(name, limit) for name, limit in options.max_drop.items()),
    )


def _agreement_result(agreements: Sequence[float], seed: int) -> MetricResult:
    """Measure the agreement as a metric, with its interval."""
    metric = Metric(AGREEMENT, lambda *_: share, resolution="each")
    share = ratio_of_sums(sum(agreements) / len(agreements), [(agreement, 1.0) for agreement in agreements])
    [ends] = intervals([(share, None)], len(agreements), seed)
    interval = metric.resolved(ends[0], share.value, len(agreements)) if ends else None
    return MetricResult(AGREEMENT, share.value, True, interval, samples=len(agreements))


GROUP = 16
"""Number of batches that one model runs before the other. Chosen: spinning threads end long before, and little is in
memory."""
GROUP_BYTES = 256_000_000
"""Maximum bytes of arrays and images in memory before a group ends. Chosen: small relative to a model."""


@dataclass
class _SideScores:
    """Predictions and times of one side."""

    answers: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """Number of an unfinished sample → prediction of each of its rows."""
    predictions: list[Any] = field(default_factory=list)
    sample_ms: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Sample number → milliseconds, its share of each of its runs."""
    run_ms: dict[tuple[Any, ...], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Input shapes → milliseconds of each run except the first."""
    untimed: set[int] = field(default_factory=set)
    """Samples of the first run, which includes set-up."""
    prepared: dict[Any, Any] = field(default_factory=dict)
    """Data shared by metrics; see :class:`~winml.modelkit.evaluate.metrics.Metric`."""


class _Nearness:
    """Similarity of a model's outputs to those of a baseline, accumulated by batch."""

    def __init__(self) -> None:
        """Start without batches."""
        self._sums: dict[str, FidelitySum] = {}
        self._outputs: list[Arrays] = []
        self._bytes = 0

    def add(self, side: int, position: int, inputs: Arrays, outputs: Arrays) -> None:
        """Add the outputs of a batch of a group; outputs of the model are held until the baseline has run the batch.

        Args:
            side: 0: the model; 1: the baseline.
            position: Position of the batch in its group.
            inputs: Inputs of the batch.
            outputs: Name → array.
        """
        if self._bytes > GROUP_BYTES:
            return
        if side == 0:
            self._outputs = [*(self._outputs if position else ()), outputs]
            self._bytes = max(self._bytes, sum(array.nbytes for batch in self._outputs for array in batch.values()))
            if self._bytes > GROUP_BYTES:
                self._outputs = []
        elif side == 1 and position < len(self._outputs):
            for name in outputs.keys() & self._outputs[position].keys():
                total = self._sums.setdefault(name, FidelitySum(name))
                total.add(outputs[name], self._outputs[position][name], inputs)

    def record(self, count: int, seed: int, data: str) -> dict[str, object] | None:
        """Quality record of so many samples of a dataset; ``None`` if output names differ or outputs are too large."""
        if not self._sums or self._bytes > GROUP_BYTES:
            return None
        outputs = [total.of_output() for _, total in sorted(self._sums.items())]
        return quality_record(QualitySamples("dataset", count, seed, data=data), outputs)


_MAX_CLASSES = 10
"""Maximum number of classes of a confusion matrix. Chosen: a page shows that many columns."""


@dataclass
class Scores:
    """Predictions, references and agreement over all samples, by side."""

    sides: tuple[_SideScores, ...]
    references: list[Any] = field(default_factory=list)
    agreements: list[float] = field(default_factory=list)
    """Agreement from 0 to 1 of each sample; ``[]`` without a baseline."""
    changed: list[ChangedSample] = field(default_factory=list)
    """The first samples with different predictions, at most :data:`_MAX_CHANGED`."""
    nearness: _Nearness | None = None
    """Similarity of the first side's outputs to the second's; ``None`` without a baseline."""

    def measured(self, metric: Metric) -> tuple[Measured, ...]:
        """Compute a metric for each side."""
        return tuple(metric.measured(side.predictions, self.references, side.prepared) for side in self.sides)

    def latencies_ms(self, side: int) -> list[float]:
        """Milliseconds of each sample, excluding samples of the first run, which includes set-up, if there are others.

        A sample of several rows, such as windows over a long context, takes the total time of its rows.
        """
        reported = self.sides[side]
        later = [milliseconds for number, milliseconds in reported.sample_ms.items() if number not in reported.untimed]
        return later or list(reported.sample_ms.values())

    def timed_samples(self, side: int) -> int:
        """Number of samples timed after the first run."""
        reported = self.sides[side]
        return len(reported.sample_ms.keys() - reported.untimed)

    def is_disturbed(self, side: int) -> bool:
        """Return True if other load slowed the runs of a side: runs of equal sizes should take equally long."""
        return are_disturbed(self.sides[side].run_ms.values())

    def confusion(self, classes: Sequence[str]) -> Confusion | None:
        """Count the predictions of each label; ``None`` for tasks without classes.

        Of many classes, those with the most errors have rows and columns of their own.

        Args:
            classes: Class names by index; ``()`` if predictions are no classes.
        """
        if not classes:
            return None
        sides = [np.asarray(side.predictions, np.int64) for side in self.sides]
        labels = np.asarray(self.references, np.int64)
        occurring = np.unique(np.concatenate([labels, *sides]))
        errors = np.zeros(len(classes), np.int64)
        for predictions in sides:
            wrong = predictions != labels
            np.add.at(errors, labels[wrong], 1)
            np.add.at(errors, predictions[wrong], 1)
        most = np.argsort(-errors[occurring], kind="stable")[:_MAX_CLASSES]
        kept = np.sort(occurring[most])
        folded = len(occurring) - len(kept)
        rows = np.full(len(classes), len(kept), np.int64)
        rows[kept] = np.arange(len(kept))

        def counts(predictions: Array) -> tuple[tuple[int, ...], ...]:
            matrix = np.zeros((len(kept) + bool(folded),) * 2, np.int64)
            np.add.at(matrix, (rows[labels], rows[predictions]), 1)
            return tuple(map(tuple, matrix.tolist()))

        return Confusion(tuple(classes[number] for number in kept), folded, *map(counts, sides))


def _score_samples(
    samples: Iterable[Sample],
    preprocessor: Preprocessor,
    evaluator: Evaluator,
    sides: Sequence[Side],
    batch_size: int | None,
    progress: Callable[[int], None] | None = None,
) -> Scores:
    """Run all sides on all samples.

    Batches run in groups, each on one model before the next model: ONNX Runtime's threads spin for a while after a run,
    and would slow PyTorch down.

    Args:
        samples: Role → value; read on demand.
        preprocessor: Converts samples to arrays.
        evaluator: Converts outputs to predictions.
        sides: One model, or a model and a baseline.
        batch_size: Rows of one run, if dynamic in the graph.
        progress: Called between groups with the number of finished samples.

    Raises:
        UsageError: samples do not fit the model.
        InputError: a sample is damaged, or an output is missing.
        StageError: a model refuses a batch.
    """
    scores = Scores(tuple(_SideScores() for _ in sides), nearness=_Nearness() if len(sides) > 1 else None)
    waiting: dict[int, Sample] = {}

    def remember_samples() -> Iterator[Sample]:
        """Yield the samples, and store each until it is scored."""
        for number, sample in enumerate(samples):
            waiting[number] = sample
            yield sample

    batches = preprocessor.batches(evaluator.fed(remember_samples()), batch_size)
    for group in _group_batches(batches, len(sides)):
        for number, (side, reported) in enumerate(zip(sides, scores.sides, strict=True)):
            for position, batch in enumerate(group):
                outputs = _run_batch(side, batch, evaluator, reported)
                if scores.nearness is not None:
                    scores.nearness.add(number, position, batch.feeds, outputs)
        # Rows of the last sample may continue in the next group.
        _finish_samples(scores, evaluator, waiting, before=group[-1].rows[-1].number // evaluator.fed_per_sample)
        if progress is not None:
            progress(len(scores.references))
    _finish_samples(scores, evaluator, waiting, before=max(waiting, default=-1) + 1)
    if progress is not None:
        progress(len(scores.references))
    return scores


def _group_batches(batches: Iterable[Batch], sides: int) -> Iterator[list[Batch]]:
    """Yield batches in groups limited in number and memory."""
    group: list[Batch] = []
    size = 0
    for batch in batches:
        group.append(batch)
        size += _batch_bytes(batch, sides)
        if len(group) == GROUP or size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _batch_bytes(batch: Batch, sides: int) -> int:
    """Bytes held for a batch: its arrays, images, audio and class maps."""
    samples = {row.number: row for row in batch.rows}.values()
    return sum(array.nbytes for array in batch.feeds.values()) + sum(_sample_bytes(row, sides) for row in samples)


def _sample_bytes(row: Row, sides: int) -> int:
    """Bytes of a sample in memory: audio, image, mask, and the class map of each side."""
    audio_bytes = sum(value.samples.nbytes for value in row.sample.values() if isinstance(value, Recording))
    if row.image_size is None:
        return audio_bytes
    height, width = row.image_size
    # The image, its mask, and the class map of each side: four bytes a pixel.
    maps = 2 + sides if "mask" in row.sample else 1
    return audio_bytes + 4 * height * width * maps


def _run_batch(side: Side, batch: Batch, evaluator: Evaluator, reported: _SideScores) -> Arrays:
    """Run a side on a batch and return its outputs; note time and predictions in ``reported``."""
    started = time.perf_counter()
    outputs = side.run(batch.feeds)
    run_ms = (time.perf_counter() - started) * 1000
    row_ms = run_ms / len(batch.rows)
    numbers = [row.number // evaluator.fed_per_sample for row in batch.rows]
    if not reported.sample_ms:
        reported.untimed.update(numbers)
    else:
        reported.run_ms[tuple(array.shape for array in batch.feeds.values())].append(run_ms)
    for number in numbers:
        reported.sample_ms[number] += row_ms
    trimmed = {name: batch.trimmed(array) for name, array in outputs.items()}
    for row, output in zip(batch.rows, evaluator.row_predictions(trimmed, batch), strict=True):
        reported.answers[row.number // evaluator.fed_per_sample].append(output)
    return trimmed


def _finish_samples(scores: Scores, evaluator: Evaluator, waiting: dict[int, Sample], *, before: int) -> None:
    """Score the samples with numbers below ``before``, and drop their data.

    Args:
        scores: Receives references, predictions and agreements.
        evaluator: The evaluator of the task.
        waiting: Number → sample without a score; finished samples are removed.
        before: Number of the first sample that remains.

    Raises:
        InputError: a reference is damaged; names the sample.
    """
    for number in sorted(number for number in waiting if number < before):
        sample = waiting.pop(number)
        try:
            reference = evaluator.reference(sample)
        except InputError as error:
            raise InputError(f"sample {number}, counted from 0: {error.message}", hint=error.hint) from error
        predictions = [evaluator.prediction(side.answers.pop(number), sample) for side in scores.sides]
        scores.references.append(reference)
        for side, prediction in zip(scores.sides, predictions, strict=True):
            side.predictions.append(evaluator.for_metrics(prediction, reference))
        if len(predictions) > 1:
            scores.agreements.append(evaluator.agreement(*predictions))
            if scores.agreements[-1] < 1 and len(scores.changed) < _MAX_CHANGED:
                scores.changed.extend(_changed_sample(evaluator, number, sample, reference, predictions))


_MAX_CHANGED = 100
"""Maximum number of recorded samples with different predictions. Chosen: a page of them is read in minutes."""
_MAX_EXCERPT = 80
"""Maximum number of characters of a recorded text. Chosen: enough to recognize the sample."""
_TEXT_ROLES = ("question", "text", "text_pair")
"""Roles whose values identify a sample to a reader."""


def _changed_sample(
    evaluator: Evaluator, number: int, sample: Sample, reference: Any, predictions: Sequence[Any]
) -> Iterator[ChangedSample]:
    """Yield the record of a sample with different predictions; nothing if predictions of the task have no text."""
    model, baseline = map(evaluator.words, predictions)
    if model is None or baseline is None:
        return
    effect: Literal["now wrong", "now right", "still wrong"] | None = None
    if evaluator.classes:
        is_right, was_right = (prediction == reference for prediction in predictions)
        effect = "now right" if is_right else "now wrong" if was_right else "still wrong"
    label = evaluator.words(reference)
    text = " | ".join(sample[role] for role in _TEXT_ROLES if isinstance(sample.get(role), str))
    yield ChangedSample(
        number,
        None if label is None else _shorten(label),
        _shorten(baseline),
        _shorten(model),
        effect,
        _shorten(text),
        next(filter(None, map(media_name, sample.values())), ""),
    )


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_EXCERPT else f"{text[: _MAX_EXCERPT - 1]}…"


_DIFFERENCE = 2
"""Position of the difference among the intervals of a metric."""
_MODEL, _DATA, _BASELINE, _SAMPLES, _METRICS = "model", "data set", "baseline", "samples", "metrics"


@dataclass(frozen=True)
class PreparedData:
    """An open dataset with preprocessor and evaluator for a model."""

    task: TaskDefinition
    metrics: tuple[Metric, ...]
    data_set: DataSet
    columns: dict[str, str]
    preprocessor: Preprocessor
    evaluator: Evaluator
    batch_size: int
    """Number of rows of one run."""

    def fitting(self, sides: Sequence[Side], model: EvaluatedModel, options: EvaluationOptions) -> PreparedData:
        """Adapt the data to several models, whose supported sizes may be narrower than the evaluated model's.

        Raises:
            UsageError: no samples fit all models.
        """
        if all(side.kind == "pytorch" for side in sides[1:]):
            return self
        preprocessor = Preprocessor.of(model.folder, joined_inputs(sides))
        return replace(self, preprocessor=preprocessor, batch_size=_batch_size(preprocessor, self.task, options))

    def scores(self, sides: Sequence[Side], progress: Progress | None = None) -> Scores:
        """Run models on all samples.

        Raises:
            UsageError: samples do not fit the models.
            InputError: a sample is damaged, or an output is missing.
            StageError: a model refuses a batch.
        """
        total = len(self.data_set)
        return _score_samples(
            self.data_set.rows(self.columns),
            self.preprocessor,
            self.evaluator,
            sides,
            self.batch_size,
            None if progress is None else lambda count: progress(count, count / total),
        )


def evaluate(
    subject: Subject, options: EvaluationOptions, *, on_step: OnStep | None = None, progress: Progress | None = None
) -> Evaluation:
    """Run a model and an optional baseline on the samples of a dataset.

    Args:
        subject: The models.
        options: Samples, metrics and limits.
        on_step: Called when a step starts and when it ends.
        progress: Called with the number and the share of finished samples.

    Returns:
        Metrics with intervals, agreement, latency, and limits with their measured values.

    Raises:
        UsageError: the task cannot be evaluated, a metric belongs to another task, a column is missing, or labels
            differ.
        InputError: a file is missing or damaged.
        StageError: a model cannot be loaded, or cannot run a sample.
    """
    clock = StepClock((_MODEL, _DATA, _BASELINE, _SAMPLES, _METRICS), on_step)
    with ExitStack() as stack:
        with clock.step(_MODEL) as step:
            model = opened_model(subject, options.task, stack)
            step.summary = f"{model.side.kind}, {model.task}"
        task = task_definition(model.task)
        check_limits(task, options)
        with clock.step(_DATA) as step:
            prepared = prepared_data(model, options, stack)
            step.summary = count_noun(len(prepared.data_set), "sample")
        with clock.step(_BASELINE) as step:
            baseline, baseline_notes = opened_baseline(subject, model, stack)
            step.summary = baseline.name if baseline is not None else "none"
        refuse_limits_without_baseline(options, baseline)
        sides = [model.side, *([baseline] if baseline is not None else [])]
        prepared = prepared.fitting(sides, model, options)
        with clock.step(_SAMPLES) as step:
            scores = prepared.scores(sides, progress or count_share("samples"))
            step.summary = f"{len(scores.references)} run"
        with clock.step(_METRICS):
            metrics = tuple(_metric_results(prepared.metrics, scores, options.seed))
        return _make_evaluation(model, baseline, prepared, scores, metrics, options, clock, baseline_notes)


def prepared_data(model: EvaluatedModel, options: EvaluationOptions, stack: ExitStack) -> PreparedData:
    """Open a dataset with preprocessor and evaluator for a model.

    Args:
        model: The model; its processors and labels are used.
        options: Samples and metrics.
        stack: Closes the dataset.

    Raises:
        UsageError: a column, a file or a package is missing, or labels differ.
        InputError: a file is damaged.
    """
    task = task_definition(model.task)
    limited = (name for name in options.limited if name != AGREEMENT)
    metrics = chosen_metrics(task, options.metrics and (*options.metrics, *limited))
    refuse_missing_libraries(metrics)
    request = DataSetRequest(
        options.dataset, split=options.split, columns=options.columns, samples=options.samples, seed=options.seed
    )
    data_set = stack.enter_context(open_data_set(request))
    columns = match_columns(data_set, task.roles, optional=task.optional_roles)
    preprocessor = Preprocessor.of(model.folder, joined_inputs([model.side]))
    evaluator = task.evaluator(EvaluatorContext(preprocessor, model.config, model.folder, data_set, columns))
    batch_size = _batch_size(preprocessor, task, options)
    return PreparedData(task, metrics, data_set, columns, preprocessor, evaluator, batch_size)


def _batch_size(preprocessor: Preprocessor, task: TaskDefinition, options: EvaluationOptions) -> int:
    """Select the number of rows of one run.

    Raises:
        UsageError: the graph requires a different batch size.
    """
    if options.batch_size is not None and preprocessor.fixed_batch not in (None, options.batch_size):
        raise UsageError(
            f"{opt.batch_size} {options.batch_size}: the graph takes batches of {preprocessor.fixed_batch}",
            hint=f"Omit it, or export with this size or with {opt.dynamic_batch}.",
        )
    return preprocessor.fixed_batch or options.batch_size or task.batch_size


def _metric_results(metrics: Sequence[Metric], scores: Scores, seed: int) -> Iterator[MetricResult]:
    """Yield the metrics of all sides with their intervals."""
    measured = [scores.measured(metric) for metric in metrics]
    pairs = [(sides[0], sides[1] if len(sides) > 1 else None) for sides in measured]
    samples = len(scores.references)
    for metric, (ours, theirs), ends in zip(metrics, pairs, intervals(pairs, samples, seed), strict=True):
        values = [ours.value] if theirs is None else [ours.value, theirs.value, ours.value - theirs.value]
        if not ends and metric.resolution == "each" and all(map(math.isfinite, values)):
            ends = [(value, value) for value in values]  # a single sample: the metric may have any value
        resolved: list[Interval | None] = [
            metric.resolved(bounds, value, samples, is_difference=number == _DIFFERENCE)
            for number, (bounds, value) in enumerate(zip(ends, values, strict=False))
        ]
        own, of_baseline, of_difference = [*resolved, None, None, None][:3]
        yield MetricResult(
            metric.name,
            ours.value,
            metric.is_higher_better,
            own,
            None if theirs is None else theirs.value,
            of_baseline,
            of_difference,
            metric.resamples,
            samples,
            least_difference(samples) if metric.resolution == "each" else None,
        )


def _make_evaluation(
    model: EvaluatedModel,
    baseline: Side | None,
    prepared: PreparedData,
    scores: Scores,
    metrics: tuple[MetricResult, ...],
    options: EvaluationOptions,
    clock: StepClock,
    baseline_notes: tuple[str, ...],
) -> Evaluation:
    """Create the record of an evaluation, with all notes."""
    data_set, agreements = prepared.data_set, scores.agreements
    agreement = sum(agreements) / len(agreements) if agreements else None
    notes = (
        *model.notes,
        *baseline_notes,
        *data_set.notes,
        *prepared.evaluator.notes,
        *(
            f"{metric.name} is beyond the range of a number; the JSON record contains null."
            for metric in metrics
            if math.isinf(metric.value)
        ),
        *(
            f"{note[0].upper()}{note[1:].removesuffix('.')}."
            for note in (*prepared.preprocessor.notes, data_set.unreadable_note)
            if note
        ),
    )
    evaluation = Evaluation(
        task=model.task,
        task_rule=model.task_rule,
        data=EvaluatedData(
            name=data_set.name,
            split=data_set.split,
            columns=prepared.columns,
            samples=len(scores.references),
            available=len(data_set),
            unreadable=tuple((file.name, file.reason) for file in data_set.unreadable.values()),
        ),
        model=_side_result(model.side, scores, 0),
        metrics=metrics,
        batch_size=prepared.batch_size,
        seed=options.seed,
        tool_version=__version__,
        onnxruntime_version=onnxruntime_version(),
        baseline=None if baseline is None else _side_result(baseline, scores, 1),
        agreement=agreement,
        quality=None
        if scores.nearness is None
        else scores.nearness.record(len(scores.references), options.seed, data_set.words),
        agreement_words=prepared.task.agreement_words,
        differing=tuple(number for number, share in enumerate(agreements) if share < 1),
        changed=tuple(sorted(scores.changed, key=lambda changed: changed.effect != "now wrong")),
        confusion=scores.confusion(prepared.evaluator.classes),
        limits=_pair_limits(options, metrics, agreements),
        steps=clock.timings(),
        notes=notes,
    )
    return replace(evaluation, notes=(*notes, *evaluation.time_notes()))


def _side_result(side: Side, scores: Scores, number: int) -> EvaluatedSide:
    """Summarize the times of a side, by the number of the side."""
    latency = summarize(scores.latencies_ms(number))
    is_disturbed, timed = scores.is_disturbed(number), scores.timed_samples(number)
    return EvaluatedSide(side.name, side.kind, latency, side.provider, is_disturbed, timed, side.simulated_on)
