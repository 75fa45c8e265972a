"""What a metric is, and how far its value is moved by the choice of samples.

The value comes from a library, named in each file beside this one. The interval comes from resampling the samples with
replacement (bootstrap). For that a metric keeps one row of numbers for each sample, from which its value on thousands
of resamples is computed at once; a test compares the value on all samples with the library's. The draws are ours, and
not those of ``scipy.stats.bootstrap``, whose interval a test compares: all metrics of a model and its baseline share
them, and a resample that does not define a metric is left out, where scipy's interval would be NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from winml.modelkit.arrays import Array

__all__ = [
    "CONFIDENCE",
    "RESAMPLES",
    "Interval",
    "Measured",
    "Metric",
    "Resamples",
    "RowSums",
    "SampleRows",
    "intervals",
]

RowSums = Array
"""Sums of the rows of the samples: ``[resamples, numbers of a row]``."""

RESAMPLES = 1000
"""Chosen: the ends of a 95 % interval then move by less than a tenth of its width from seed to seed."""
CONFIDENCE = 0.95
CHUNK = 2_000_000
"""Numbers of resampled samples in memory at a time. Chosen: 16 MB."""


@dataclass(frozen=True)
class Resamples:
    """Some draws with replacement of as many samples as there are."""

    indices: Array
    """``[resamples, samples]``."""

    @functools.cached_property
    def counts(self) -> Array:
        """How often each sample was drawn: ``[resamples, samples]``, float64."""
        rows, samples = self.indices.shape
        places = self.indices + np.arange(rows)[:, None] * samples
        return np.bincount(places.ravel(), minlength=rows * samples).reshape(rows, samples).astype(np.float64)


class Measured(Protocol):
    """One metric of one model on all samples."""

    @property
    def value(self) -> float:
        """On all samples, by the library; NaN where the samples do not define it."""

    def resampled(self, resamples: Resamples) -> Array:
        """Return the value on each resample, or on the first of them where it takes long; NaN: not defined."""


@dataclass(frozen=True)
class SampleRows:
    """A metric that is a function of sums over samples."""

    value: float
    rows: Any
    """``[samples, numbers]``: an array, or a sparse one."""
    finish: Callable[[RowSums], Array]
    """Makes the value of each resample from its sums."""

    def resampled(self, resamples: Resamples) -> Array:
        """Return the value on each resample."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return self.finish((self.rows.T @ resamples.counts.T).T)


@dataclass(frozen=True)
class Metric:
    """A way to say in one number how good predictions are."""

    name: str
    """As options and records spell it; with its unit, where it has one."""
    measure: Callable[[Sequence[Any], Sequence[Any]], Measured]
    """Takes the predictions and the references of all samples."""
    library: str = ""
    """Package that its value comes from, by the name it is imported with; of the extra ``eval``."""
    is_higher_better: bool = True
    prepare: Callable[[Sequence[Any], Sequence[Any]], Any] | None = None
    """Work that several metrics share, done once: ``measure`` takes its result in place of the predictions."""
    resamples: int = RESAMPLES
    """Of how many resamples the value is computed."""

    def measured(
        self, predictions: Sequence[object], references: Sequence[Any], prepared: dict[object, Any] | None = None
    ) -> Measured:
        """Measure the predictions of all samples.

        Args:
            predictions: What is kept of each sample.
            references: What is right for each.
            prepared: Keeps what metrics share, for one model on these samples.
        """
        if self.prepare is None:
            return self.measure(predictions, references)
        shared = {} if prepared is None else prepared
        if self.prepare not in shared:
            shared[self.prepare] = self.prepare(predictions, references)
        return self.measure(shared[self.prepare], references)


Interval = tuple[float, float]
"""Low and high end: where a value lies in 95 of 100 draws of the samples."""


def intervals(measured: Sequence[tuple[Measured, Measured | None]], samples: int, seed: int) -> list[list[Interval]]:
    """Return how far chance moves metrics of a model, those of a baseline, and their differences.

    All are computed on the same resamples, so that the interval of a difference leaves out what moves both.

    Args:
        measured: Each metric, of the model and of the baseline where there is one.
        samples: How many samples both were measured on.
        seed: Seed of the resamples.

    Returns:
        For each metric the interval of the model and, where there is a baseline, that of the baseline and of the
        difference, model minus baseline. Empty for a metric that too few resamples define.
    """
    if samples < 2:
        return [[] for _ in measured]  # one sample says nothing of how far chance moves a value
    values: list[list[Array]] = [[] for _ in measured]
    for resamples in _draws(samples, seed):
        for retained, (model, baseline) in zip(values, measured, strict=True):
            ours = model.resampled(resamples)
            if baseline is None:
                retained.append(ours[None])
                continue
            theirs = baseline.resampled(resamples)
            retained.append(np.stack([ours, theirs, ours - theirs]))
    return [_ends(np.concatenate(retained, axis=1)) for retained in values]


def _draws(samples: int, seed: int) -> Iterator[Resamples]:
    generator, left = np.random.default_rng(seed), RESAMPLES
    while left > 0:
        rows = min(left, max(1, CHUNK // samples))
        yield Resamples(generator.integers(0, samples, (rows, samples)))
        left -= rows


def _ends(values: Array) -> list[Interval]:
    tail = (1 - CONFIDENCE) / 2 * 100
    found: list[Interval] = []
    for row in values:
        defined = row[np.isfinite(row)]
        if len(defined) < len(row) / 2:
            return []
        low, high = np.percentile(defined, [tail, 100 - tail])
        found.append((float(low), float(high)))
    return found
