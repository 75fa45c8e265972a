"""Judges a model by the samples of a data set, beside a baseline that is run on the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate.columns import match_columns
from winml.modelkit.evaluate.data_sets import DataSet, DataSetRequest, open_data_set
from winml.modelkit.evaluate.metrics.metric import Metric, intervals
from winml.modelkit.evaluate.options import EvaluationOptions
from winml.modelkit.evaluate.preprocessing import Preprocessor
from winml.modelkit.evaluate.tasks.table import chosen_metrics, refuse_missing_libraries, task_definition
from winml.modelkit.evaluate.tasks.task import Judge, JudgeContext, TaskDefinition
from winml.modelkit.flows.evaluate.judged_models import JudgedModel, Subject, opened_baseline, opened_model
from winml.modelkit.flows.evaluate.limits import (
    check_limits,
    judged_limits,
    limited_metrics,
    refuse_limits_without_baseline,
)
from winml.modelkit.flows.evaluate.scoring import Scores, score_samples
from winml.modelkit.flows.evaluate.sides import Side, joined_inputs
from winml.modelkit.measure.statistics import summarize
from winml.modelkit.progress import StepClock, StepEvent
from winml.modelkit.results.evaluation import EvaluatedData, EvaluatedSide, Evaluation, MetricResult
from winml.modelkit.runtime.sessions import onnxruntime_version
from winml.modelkit.version import __version__

__all__ = ["PreparedData", "evaluate", "prepared_data"]

Progress = Callable[[int, float], None]
"""Called with the number of samples that are done, and their share."""
_MODEL, _DATA, _BASELINE, _SAMPLES, _METRICS = "model", "data set", "baseline", "samples", "metrics"


@dataclass(frozen=True)
class PreparedData:
    """A data set that is ready to be fed to models of some inputs."""

    task: TaskDefinition
    metrics: tuple[Metric, ...]
    data_set: DataSet
    columns: dict[str, str]
    preprocessor: Preprocessor
    judge: Judge
    batch_size: int
    """Rows of one run."""

    def fitting(self, sides: Sequence[Side], model: JudgedModel, options: EvaluationOptions) -> PreparedData:
        """Return the same data for several models, of which one may take fewer sizes than the judged one.

        Raises:
            UsageError: no samples fit all of them.
        """
        if all(side.kind == "pytorch" for side in sides[1:]):
            return self
        preprocessor = Preprocessor.of(model.folder, joined_inputs(sides))
        return replace(self, preprocessor=preprocessor, batch_size=_batch_size(preprocessor, self.task, options))

    def scores(self, sides: Sequence[Side], progress: Progress | None = None) -> Scores:
        """Run models on all samples.

        Raises:
            UsageError: samples are not what the models take.
            InputError: a sample is damaged, or an output is missing.
            StageError: a model refuses a batch.
        """
        total = len(self.data_set)
        return score_samples(
            self.data_set.rows(self.columns),
            self.preprocessor,
            self.judge,
            sides,
            self.batch_size,
            None if progress is None else lambda done: progress(done, done / total),
        )


def evaluate(
    subject: Subject,
    options: EvaluationOptions,
    *,
    on_step: Callable[[StepEvent], None] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Run a model, and a baseline where there is one, on the samples of a data set.

    Args:
        subject: The models.
        options: Which samples, which metrics, and what is to be reached.
        on_step: Called when a step starts and when it ends.
        progress: Called with the number of samples that are done, and their share.

    Returns:
        Metrics with intervals, agreement and latency; whether limits are met stands in the record.

    Raises:
        UsageError: the task cannot be judged, a metric is not of it, a column is missing, or labels do not match.
        InputError: a file is missing or damaged.
        StageError: a model cannot be loaded, or refuses a sample.
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
            step.summary = f"{(count := len(prepared.data_set))} {'sample' if count == 1 else 'samples'}"
        with clock.step(_BASELINE) as step:
            baseline, baseline_notes = opened_baseline(subject, model, stack)
            step.summary = baseline.name if baseline is not None else "none"
        refuse_limits_without_baseline(options, baseline)
        sides = [model.side, *([baseline] if baseline is not None else [])]
        prepared = prepared.fitting(sides, model, options)
        with clock.step(_SAMPLES) as step:
            scores = prepared.scores(sides, progress)
            step.summary = f"{len(scores.references)} run"
        with clock.step(_METRICS):
            metrics = _metric_results(prepared.metrics, scores, options.seed)
        return _evaluation(model, baseline, (prepared, scores), metrics, (options, clock, baseline_notes))


def prepared_data(model: JudgedModel, options: EvaluationOptions, stack: ExitStack) -> PreparedData:
    """Open a data set, and what makes arrays of it for a model.

    Args:
        model: Whose processors and labels count.
        options: Which samples and metrics.
        stack: Closes the data set.

    Raises:
        UsageError: a column, a file or a package is missing, or labels do not match.
        InputError: a file is damaged.
    """
    task = task_definition(model.task)
    metrics = chosen_metrics(task, options.metrics and (*options.metrics, *limited_metrics(options)))
    refuse_missing_libraries(metrics)
    request = DataSetRequest(
        options.dataset, split=options.split, columns=options.columns, samples=options.samples, seed=options.seed
    )
    data_set = stack.enter_context(open_data_set(request))
    columns = match_columns(data_set, task.roles, optional=task.optional_roles)
    preprocessor = Preprocessor.of(model.folder, joined_inputs([model.side]))
    judge = task.judge(JudgeContext(preprocessor, model.config, model.folder, data_set, columns))
    batch_size = _batch_size(preprocessor, task, options)
    return PreparedData(task, metrics, data_set, columns, preprocessor, judge, batch_size)


def _batch_size(preprocessor: Preprocessor, task: TaskDefinition, options: EvaluationOptions) -> int:
    """Return the rows of one run.

    Raises:
        UsageError: the graph takes another number than is asked for.
    """
    if options.batch_size is not None and preprocessor.fixed_batch not in (None, options.batch_size):
        raise UsageError(
            f"--batch-size {options.batch_size}: the graph takes batches of {preprocessor.fixed_batch}",
            hint="Leave it out, or export with this size or with --dynamic-batch.",
        )
    return preprocessor.fixed_batch or options.batch_size or task.batch_size


def _metric_results(metrics: Sequence[Metric], scores: Scores, seed: int) -> tuple[MetricResult, ...]:
    measured = [scores.measured(metric) for metric in metrics]
    pairs = [(sides[0], sides[1] if len(sides) > 1 else None) for sides in measured]
    ends = intervals(pairs, len(scores.references), seed)
    results = []
    for metric, (ours, theirs), found in zip(metrics, pairs, ends, strict=True):
        padded = [*found, None, None, None]
        results.append(
            MetricResult(
                metric.name,
                ours.value,
                metric.is_higher_better,
                padded[0],
                None if theirs is None else theirs.value,
                None if theirs is None else padded[1],
                None if theirs is None else padded[2],
                metric.resamples,
            )
        )
    return tuple(results)


def _evaluation(
    model: JudgedModel,
    baseline: Side | None,
    run: tuple[PreparedData, Scores],
    metrics: tuple[MetricResult, ...],
    told: tuple[EvaluationOptions, StepClock, tuple[str, ...]],
) -> Evaluation:
    (prepared, scores), (options, clock, baseline_notes) = run, told
    data_set, agreements = prepared.data_set, scores.agreements
    agreement = sum(agreements) / len(agreements) if agreements else None
    ours = _side_result(model.side, scores, 0)
    theirs = None if baseline is None else _side_result(baseline, scores, 1)
    notes = (
        *model.notes,
        *baseline_notes,
        *data_set.notes,
        *prepared.judge.notes,
        *(f"{item.name} is larger than a number can say; JSON has null." for item in metrics if math.isinf(item.value)),
        *(_sentence(note) for note in (*prepared.preprocessor.notes, data_set.unreadable_note) if note),
        *(side.busy_note for side in (ours, theirs) if side is not None and side.is_disturbed),
    )
    return Evaluation(
        task=model.task,
        task_rule=model.task_rule,
        data=EvaluatedData(
            name=data_set.name,
            split=data_set.split,
            columns=prepared.columns,
            samples=len(scores.references),
            available=len(data_set),
            unreadable=tuple((item.name, item.reason) for item in data_set.unreadable.values()),
        ),
        model=ours,
        metrics=metrics,
        batch_size=prepared.batch_size,
        seed=options.seed,
        tool_version=__version__,
        onnxruntime_version=onnxruntime_version(),
        baseline=theirs,
        agreement=agreement,
        agreement_words=prepared.task.agreement_words,
        differing=tuple(number for number, share in enumerate(agreements) if share < 1),
        limits=judged_limits(options, metrics, agreement),
        steps=clock.timings(),
        notes=notes,
    )


def _sentence(note: str) -> str:
    return f"{note[0].upper()}{note[1:].removesuffix('.')}."


def _side_result(side: Side, scores: Scores, number: int) -> EvaluatedSide:
    latency = summarize(scores.latencies_ms(number))
    return EvaluatedSide(side.name, side.kind, latency, side.provider, scores.is_disturbed(number))
