"""Summarizes samples, and decides from pairs of samples whether one thing is faster than another.

Arithmetic only. A ratio comes with a confidence interval; a difference is reported only where the whole interval is on
one side of 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from winml.modelkit.records import Record, entry, recorded

CONFIDENCE = 0.95
"""Probability that an interval contains the true median ratio. Chosen: the usual value."""

NOISE = 0.02
"""Ratios closer to 1 than this are reported as no difference. Chosen: three times the largest difference between two
sessions of one file in their fastest runs (0.6 %, measured on six pairs of sessions). The memory layout differs from
session to session, and more runs of one session do not average it out."""

DISTURBED = 1.5
"""Ratio of median to minimum above which samples count as disturbed. Chosen: on an idle machine the median stays near
the fastest run, and caches and clock changes do not add half of it to every second run."""

_INTERRUPTED = 2.0
"""Ratio of mean to median above which a few samples outweigh the others. Chosen: without interruptions, the mean of
latencies is at most some tenths above their median."""

_PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Summary(Record, digits=6):
    """Mean, spread and percentiles of samples, in the unit of the samples."""

    mean: float
    std: float
    """Standard deviation of the samples (divided by their number less one); 0 for a single one."""
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @property
    def is_disturbed(self) -> bool:
        """Whether half of the samples lie so far above the smallest that other load must have slowed them."""
        return self.p50 > DISTURBED * self.min

    @property
    def is_interrupted(self) -> bool:
        """Whether a few samples are so large that the mean says nothing of the others."""
        return self.mean > _INTERRUPTED * self.p50


@dataclass(frozen=True)
class Ratio(Record):
    """The ratio of two times, from pairs measured side by side."""

    value: float = field(metadata=entry(digits=6))
    """Median of the ratios of the pairs; below 1 means that the first is faster."""
    low: float | None = field(metadata=entry(digits=6))
    """Lower end of the interval; None where there are too few pairs for one."""
    high: float | None = field(metadata=entry(digits=6))
    """Upper end of the interval; None where there are too few pairs for one."""
    confidence: float
    """Probability that the interval contains the true median."""
    pairs: int
    is_disturbed: bool = field(default=False, metadata=entry(skip=True))
    """Whether other load slowed the runs of one of the two, so that the ratio says little."""

    @property
    @recorded()
    def verdict(self) -> Literal["faster", "slower", "no difference found", "undecided"]:
        """Whether the first is faster or slower. The interval decides, not the value; a busy machine none."""
        if self.is_disturbed:
            return "undecided"
        if self.low is None or self.high is None:
            return "no difference found"
        if self.high < 1 - NOISE:
            return "faster"
        if self.low > 1 + NOISE:
            return "slower"
        return "no difference found"

    @property
    def is_within_noise(self) -> bool:
        """Whether the whole interval is within the noise: then more pairs would find no difference either."""
        ends = (self.low, self.high)
        return not self.is_disturbed and all(end is not None and abs(end - 1) <= NOISE for end in ends)

    @property
    def contains_one(self) -> bool:
        """Whether the interval allows that both take the same time; so does one that does not exist."""
        return (self.low is None or self.low <= 1) and (self.high is None or self.high >= 1)


def summarize(samples: Sequence[float]) -> Summary:
    """Summarize at least one sample.

    >>> summarize([1.0, 2.0, 3.0]).p50
    2.0
    """
    values = np.asarray(samples, dtype=np.float64)
    p50, p90, p95, p99 = (percentile(samples, share) for share in _PERCENTILES)
    return Summary(
        # Rounding must not carry a mean out of the samples it is made of.
        mean=float(np.clip(values.mean(), values.min(), values.max())),
        std=float(values.std(ddof=1)) if values.size > 1 else 0.0,
        min=float(values.min()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(values.max()),
    )


def are_disturbed(groups: Iterable[Sequence[float]]) -> bool:
    """Say whether half of the times lie so far above the fastest of their group that other load must have slowed them.

    Args:
        groups: Times of what takes equally long, such as runs of equal sizes. One alone in its group tells nothing.

    >>> are_disturbed([[1.0, 2.0, 2.0], [30.0, 60.0, 60.0]]), are_disturbed([[1.0, 1.1], [30.0, 31.0], [500.0]])
    (True, False)
    """
    ratios = [time / min(group) for group in groups if len(group) > 1 for time in group]
    return bool(ratios) and percentile(ratios, 50) > DISTURBED


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` percent of the samples lie, linear between two samples.

    >>> percentile([10.0, 20.0], 75)
    17.5
    """
    return float(np.percentile(np.asarray(samples, dtype=np.float64), share))


def middle_mean(samples: Iterable[float]) -> float:
    """Return the mean of the middle half: a quarter of the samples is left out at each end (interquartile mean).

    A few long samples do not move it, and unlike a median it is finer than the steps of the clock. Of fewer than four
    samples it is the mean.

    >>> middle_mean([1.0, 2.0, 3.0, 900.0])
    2.5
    """
    ordered = sorted(samples)
    left_out = len(ordered) // 4
    middle = ordered[left_out : len(ordered) - left_out]
    return math.fsum(middle) / len(middle)


def compare_pairs(first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """Compare two series of times that were measured side by side, pair by pair.

    The ratio is the median of the ratios of the pairs. The ends of its interval are two of the sorted ratios: the
    narrowest two that contain the true median with at least the requested probability for any distribution (inverted
    sign test; Conover, Practical Nonparametric Statistics, 3.2). An outlier moves neither end.

    Args:
        first: Times of the first, one per pair; positive.
        second: Times of the second, in the same order.
        confidence: Requested probability that the interval contains the true median.
    """
    ratios = sorted(first_time / second_time for first_time, second_time in zip(first, second, strict=True))
    rank = _interval_rank(len(ratios), confidence)
    return Ratio(
        value=float(np.median(ratios)),
        low=ratios[rank] if rank is not None else None,
        high=ratios[-1 - rank] if rank is not None else None,
        confidence=confidence,
        pairs=len(ratios),
    )


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Return two of the samples between which the true median lies, as :func:`compare_pairs` does; None of too few.

    >>> median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0])
    (1.0, 6.0)
    """
    rank = _interval_rank(len(samples), CONFIDENCE)
    ordered = sorted(samples)
    return None if rank is None else (ordered[rank], ordered[-1 - rank])


def _interval_rank(count: int, confidence: float) -> int | None:
    """Return how many values the interval leaves out at each end; None where there are too few values."""
    tail, rank = 0.0, None
    for left_out in range(count // 2):
        # Probability that at most ``left_out`` of ``count`` values lie below the median: tosses of a fair coin.
        tail += math.comb(count, left_out) / 2**count
        if 2 * tail > 1 - confidence:
            break
        rank = left_out
    return rank
