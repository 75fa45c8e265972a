"""Runs models over the samples of a data set, and keeps of each sample what metrics need.

Batches are run in groups, first all by one model and then all by the other: threads of ONNX Runtime go on spinning for
a while after a run, and would take the processor from PyTorch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from winml.modelkit.errors import InputError
from winml.modelkit.evaluate.media import Recording
from winml.modelkit.evaluate.metrics.metric import Measured, Metric
from winml.modelkit.evaluate.preprocessing import Batch, Preprocessor, Row
from winml.modelkit.evaluate.tasks.task import Judge, Sample
from winml.modelkit.flows.evaluate.sides import Side
from winml.modelkit.measure.statistics import are_disturbed

__all__ = ["Scores", "score_samples"]

GROUP = 16
"""Batches that one model runs before the other does. Chosen: what spins ends long before, and little is in memory."""
GROUP_BYTES = 256_000_000
"""Arrays and pictures in memory at a time, from which on a group ends. Chosen: small beside a model."""
Progress = Callable[[int], None]
"""Called between groups with the number of samples that are done."""


@dataclass
class _SideScores:
    """What one side says."""

    answers: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """Of samples that are not done yet: number → what it says of each row that was fed."""
    kept: list[Any] = field(default_factory=list)
    sample_ms: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Number → milliseconds: its share of each run it was in."""
    run_ms: dict[tuple[Any, ...], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Shapes of what was fed → milliseconds of each run but the first."""
    first: set[int] = field(default_factory=set)
    """Samples in the first run, which sets things up."""
    prepared: dict[Any, Any] = field(default_factory=dict)
    """What metrics share; see :class:`~winml.modelkit.evaluate.metrics.metric.Metric`."""


@dataclass
class Scores:
    """What is kept of all samples, side by side."""

    sides: tuple[_SideScores, ...]
    references: list[Any] = field(default_factory=list)
    agreements: list[float] = field(default_factory=list)
    """0 to 1, of each sample; empty for one side alone."""

    def measured(self, metric: Metric) -> tuple[Measured, ...]:
        """Return a metric of each side."""
        return tuple(metric.measured(side.kept, self.references, side.prepared) for side in self.sides)

    def latencies_ms(self, side: int) -> list[float]:
        """Return milliseconds of each sample, without those of the first run, which sets things up, if there are more.

        A sample that is read in several rows, such as windows over a long context, takes the time of all of them.
        """
        told = self.sides[side]
        later = [milliseconds for number, milliseconds in told.sample_ms.items() if number not in told.first]
        return later or list(told.sample_ms.values())

    def is_disturbed(self, side: int) -> bool:
        """Whether other load slowed the runs of a side: runs of equal sizes would take equally long."""
        return are_disturbed(self.sides[side].run_ms.values())


def score_samples(
    samples: Iterable[Sample],
    preprocessor: Preprocessor,
    judge: Judge,
    sides: Sequence[Side],
    batch_size: int | None,
    progress: Progress | None = None,
) -> Scores:
    """Run all sides on all samples.

    Args:
        samples: Roles → values; each is read when its turn comes.
        preprocessor: Makes arrays of them.
        judge: Makes predictions of answers.
        sides: One model, or a model and a baseline.
        batch_size: Rows of one run, where the graph leaves that open.
        progress: Told how many samples are done.

    Raises:
        UsageError: samples are not what the model takes.
        InputError: a sample is damaged, or an output is missing.
        StageError: a model refuses a batch.
    """
    scores = Scores(tuple(_SideScores() for _ in sides))
    waiting: dict[int, Sample] = {}

    def remembered() -> Iterator[Sample]:
        for number, sample in enumerate(samples):
            waiting[number] = sample
            yield sample

    batches = preprocessor.batches(judge.fed(remembered()), batch_size)
    for group in _grouped(batches, len(sides)):
        for side, told in zip(sides, scores.sides, strict=True):
            for batch in group:
                _run(side, batch, judge, told)
        # Rows of the last sample may go on in the next group.
        _finish(scores, judge, waiting, before=group[-1].rows[-1].number // judge.fed_per_sample)
        if progress is not None:
            progress(len(scores.references))
    _finish(scores, judge, waiting, before=max(waiting, default=-1) + 1)
    if progress is not None:
        progress(len(scores.references))
    return scores


def _grouped(batches: Iterable[Batch], sides: int) -> Iterator[list[Batch]]:
    """Yield batches in groups that are small in number and in memory."""
    group: list[Batch] = []
    held = 0
    for batch in batches:
        group.append(batch)
        held += _held_bytes(batch, sides)
        if len(group) == GROUP or held >= GROUP_BYTES:
            yield group
            group, held = [], 0
    if group:
        yield group


def _held_bytes(batch: Batch, sides: int) -> int:
    """Return what is held of a batch: its arrays, pictures and recordings as they were opened, and maps of classes."""
    samples = {row.number: row for row in batch.rows}.values()
    return sum(array.nbytes for array in batch.feeds.values()) + sum(_sample_bytes(row, sides) for row in samples)


def _sample_bytes(row: Row, sides: int) -> int:
    held = sum(value.samples.nbytes for value in row.sample.values() if isinstance(value, Recording))
    if row.image_size is None:
        return held
    height, width = row.image_size
    # The picture, and where there is a mask that and the map of classes of each side: four bytes a pixel.
    maps = 2 + sides if "mask" in row.sample else 1
    return held + 4 * height * width * maps


def _run(side: Side, batch: Batch, judge: Judge, told: _SideScores) -> None:
    started = time.perf_counter()
    outputs = side.run(batch.feeds)
    run_ms = (time.perf_counter() - started) * 1000
    row_ms = run_ms / len(batch.rows)
    numbers = [row.number // judge.fed_per_sample for row in batch.rows]
    if not told.sample_ms:
        told.first.update(numbers)
    else:
        told.run_ms[tuple(array.shape for array in batch.feeds.values())].append(run_ms)
    for number in numbers:
        told.sample_ms[number] += row_ms
    answers = judge.answers({name: batch.trimmed(array) for name, array in outputs.items()}, batch)
    for row, answer in zip(batch.rows, answers, strict=True):
        told.answers[row.number // judge.fed_per_sample].append(answer)


def _reference(judge: Judge, sample: Sample, number: int) -> Any:
    """Return what is right for a sample.

    Raises:
        UsageError: it is a label that the model does not have.
        InputError: the sample is damaged; names it.
    """
    try:
        return judge.reference(sample)
    except InputError as error:
        raise InputError(f"sample {number}, counted from 0: {error.message}", hint=error.hint) from error


def _finish(scores: Scores, judge: Judge, waiting: dict[int, Sample], *, before: int) -> None:
    """Make predictions of the samples before one of a number, and forget what is not needed of them."""
    for number in sorted(number for number in waiting if number < before):
        sample = waiting.pop(number)
        reference = _reference(judge, sample, number)
        predictions = [judge.prediction(side.answers.pop(number), sample) for side in scores.sides]
        scores.references.append(reference)
        for side, prediction in zip(scores.sides, predictions, strict=True):
            side.kept.append(judge.kept(prediction, reference))
        if len(predictions) > 1:
            scores.agreements.append(judge.agreement(*predictions))
