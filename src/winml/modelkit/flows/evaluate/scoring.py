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

from winml.modelkit.evaluate.metrics.metric import Measured, Metric
from winml.modelkit.evaluate.preprocessing import Batch, Preprocessor
from winml.modelkit.evaluate.tasks.task import Judge, Sample
from winml.modelkit.flows.evaluate.sides import Side

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
    run_ms: list[float] = field(default_factory=list)
    """Of each run: milliseconds for one row."""


@dataclass
class Scores:
    """What is kept of all samples, side by side."""

    sides: tuple[_SideScores, ...]
    references: list[Any] = field(default_factory=list)
    agreements: list[float] = field(default_factory=list)
    """0 to 1, of each sample; empty for one side alone."""

    def measured(self, metric: Metric) -> tuple[Measured, ...]:
        """Return a metric of each side."""
        return tuple(metric.measure(side.kept, self.references) for side in self.sides)

    def latencies_ms(self, side: int, rows_per_sample: int) -> list[float]:
        """Return milliseconds a sample of each run, without the first run, which sets things up, if there are more."""
        times = self.sides[side].run_ms
        return [value * rows_per_sample for value in (times[1:] or times)]


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
    for group in _grouped(batches):
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


def _grouped(batches: Iterable[Batch]) -> Iterator[list[Batch]]:
    """Yield batches in groups that are small in number and in memory."""
    group: list[Batch] = []
    held = 0
    for batch in batches:
        group.append(batch)
        held += _held_bytes(batch)
        if len(group) == GROUP or held >= GROUP_BYTES:
            yield group
            group, held = [], 0
    if group:
        yield group


def _held_bytes(batch: Batch) -> int:
    """Return what a batch takes: its arrays, and its pictures as they were opened, with four bytes a pixel."""
    sizes = (row.image_size for row in batch.rows if row.image_size is not None)
    return sum(array.nbytes for array in batch.feeds.values()) + sum(4 * height * width for height, width in sizes)


def _run(side: Side, batch: Batch, judge: Judge, told: _SideScores) -> None:
    started = time.perf_counter()
    outputs = side.run(batch.feeds)
    told.run_ms.append((time.perf_counter() - started) * 1000 / len(batch.rows))
    answers = judge.answers({name: batch.trimmed(array) for name, array in outputs.items()}, batch)
    for row, answer in zip(batch.rows, answers, strict=True):
        told.answers[row.number // judge.fed_per_sample].append(answer)


def _finish(scores: Scores, judge: Judge, waiting: dict[int, Sample], *, before: int) -> None:
    """Make predictions of the samples before one of a number, and forget what is not needed of them."""
    for number in sorted(number for number in waiting if number < before):
        sample = waiting.pop(number)
        reference = judge.reference(sample)
        predictions = [judge.prediction(side.answers.pop(number), sample) for side in scores.sides]
        scores.references.append(reference)
        for side, prediction in zip(scores.sides, predictions, strict=True):
            side.kept.append(judge.kept(prediction, reference))
        if len(predictions) > 1:
            scores.agreements.append(judge.agreement(*predictions))
