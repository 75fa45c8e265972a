"""Summary of samples, and comparison of paired samples.

Arithmetic only. A ratio has a confidence interval; a difference is reported only if the whole interval is on one side
of 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Literal

import numpy as np

from winml.modelkit.errors import opt
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.verdicts import DISTURBED, Verdict
from winml.modelkit.words import count_noun

CONFIDENCE = 0.95
"""Probability that an interval contains the true median ratio. Chosen: the usual value."""

NOISE = 0.02
"""Ratios closer to 1 are reported as no difference. Chosen: three times the largest difference between two sessions of
one file in their fastest runs (0.6 %, measured on six pairs of sessions). The memory layout differs between sessions,
and more runs of one session do not average it out."""

IDLE_MACHINE = f"a machine so idle that it takes less than {DISTURBED:g} times"
"""Missing measurement of a verdict on disturbed times; follows the measured times."""

_INTERRUPTED = 2.0
"""Ratio of mean to median above which a few samples outweigh the others. Chosen: without interruptions, the mean of
latencies is at most some tenths above their median."""

_PERCENTILES = (50, 90, 95, 99)


class Summary(Record, digits=6):
    """Mean, spread and percentiles of samples, in the unit of the samples."""

    mean: float
    std: float
    """Standard deviation of the samples (divided by their number minus one); 0 for a single sample."""
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @property
    def slowdown(self) -> float:
        """Median relative to the smallest sample."""
        return self.p50 / self.min if self.min > 0 else 1.0

    @property
    def is_disturbed(self) -> bool:
        """True if half of the samples are so far above the smallest that other load must have slowed them."""
        return self.p50 > DISTURBED * self.min

    @property
    def is_interrupted(self) -> bool:
        """True if a few samples are so large that they distort the mean."""
        return self.mean > _INTERRUPTED * self.p50


class Ratio(Record):
    """Ratio of two times, from pairs measured in alternation."""

    value: float = field(metadata=entry(digits=6))
    """Median of the pair ratios; below 1: the first is faster."""
    low: float | None = field(metadata=entry(digits=6))
    """Lower end of the interval; ``None`` for too few pairs."""
    high: float | None = field(metadata=entry(digits=6))
    """Upper end of the interval; ``None`` for too few pairs."""
    confidence: float
    """Probability that the interval contains the true median."""
    pairs: int
    slowdown: float = field(default=1.0, metadata=entry(skip=True))
    """Median run relative to the fastest, of the series in which it is larger."""
    of_medians: float | None = field(default=None, metadata=entry(skip=True))
    """Ratio of the medians of the two series; ``None`` if unknown."""

    @property
    def is_slowed(self) -> bool:
        """True if other load slowed the runs of one of the two, so that the times are unreliable."""
        return self.slowdown > DISTURBED

    @property
    def is_disturbed(self) -> bool:
        """True if other load makes the ratio unreliable: the load alone may cause it, or the medians contradict it."""
        is_beyond_load = (self.high is not None and self.high * self.slowdown < 1) or (self.low or 0) > self.slowdown
        return self.is_slowed and (not is_beyond_load or self._is_contradicted)

    @property
    def _is_contradicted(self) -> bool:
        """True if the ratio of the medians is outside the interval by more than the noise."""
        if self.of_medians is None or self.low is None or self.high is None:
            return False
        return not self.low * (1 - NOISE) <= self.of_medians <= self.high * (1 + NOISE)

    @property
    @recorded()
    def verdict(self) -> Literal["faster", "slower", "no difference found", "undecided"]:
        """Verdict based on the interval instead of the value; "undecided" on a busy machine."""
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
        """True if the whole interval is within the noise: more pairs would find no difference either."""
        ends = (self.low, self.high)
        return not self.is_disturbed and all(end is not None and abs(end - 1) <= NOISE for end in ends)

    def answer(self, question: str) -> Verdict:
        """Answer whether the first is faster by more than the noise.

        Args:
            question: The question.
        """
        if self.is_disturbed:
            busy = f"the machine seems busy: the median run took {self.slowdown:.1f} times as long as the fastest"
            return Verdict.undecided(question, busy, IDLE_MACHINE)
        value = _ratio_digits(self.value)
        if self.low is None or self.high is None:
            reason = f"ratio {value} from {count_noun(self.pairs, 'pair')}, too few for an interval"
            return Verdict.undecided(question, reason, f"more runs ({opt.iterations})")
        reason = f"ratio {value} ({_ratio_digits(self.low)}–{_ratio_digits(self.high)})"
        if self.verdict == "faster":
            times = f", so {1 / self.value:.2f} times as fast" if self.value > 0 else ""
            return Verdict.of(question, True, f"{reason}{times}")
        if self.low < 1 - NOISE:
            reason += f", not wholly below or above {1 - NOISE:g}"
            return Verdict.undecided(question, reason, f"an idle machine or more runs ({opt.iterations})")
        return Verdict.of(question, False, reason)

    @property
    def contains_one(self) -> bool:
        """True if the interval allows equal times; also True without an interval."""
        return (self.low is None or self.low <= 1) and (self.high is None or self.high >= 1)


def _ratio_digits(ratio: float) -> str:
    """Format a ratio with two decimals, or with two significant digits below 0.1."""
    decimals = max(2, 1 - math.floor(math.log10(ratio))) if 0 < ratio < math.inf else 2
    return f"{ratio:.{decimals}f}"


def summarize(samples: Sequence[float]) -> Summary:
    """Summarize at least one sample.

    >>> summarize([1.0, 2.0, 3.0]).p50
    2.0
    """
    values = np.asarray(samples, dtype=np.float64)
    p50, p90, p95, p99 = (percentile(samples, share) for share in _PERCENTILES)
    return Summary(
        # Rounding must not move a mean out of the range of its samples.
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
    """Return True if half of the times are so far above the fastest of their group that other load slowed them.

    Args:
        groups: Times of equal work, such as runs of equal sizes. A group of one time is ignored.

    >>> are_disturbed([[1.0, 2.0, 2.0], [30.0, 60.0, 60.0]]), are_disturbed([[1.0, 1.1], [30.0, 31.0], [500.0]])
    (True, False)
    """
    ratios = [time / min(group) for group in groups if len(group) > 1 for time in group]
    return bool(ratios) and percentile(ratios, 50) > DISTURBED


def percentile(samples: Sequence[float], share: float) -> float:
    """Compute a percentile of the samples, linear between two samples.

    >>> percentile([10.0, 20.0], 75)
    17.5
    """
    return float(np.percentile(np.asarray(samples, dtype=np.float64), share))


def middle_mean(samples: Iterable[float]) -> float:
    """Compute the mean of the middle half: a quarter of the samples is ignored at each end (interquartile mean).

    A few long samples do not affect it, and unlike a median it is finer than the clock resolution. For fewer than four
    samples it is the mean.

    >>> middle_mean([1.0, 2.0, 3.0, 900.0])
    2.5
    """
    ordered = sorted(samples)
    left_out = len(ordered) // 4
    middle = ordered[left_out : len(ordered) - left_out]
    return math.fsum(middle) / len(middle)


def compare_pairs(first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """Compare two series of times measured in alternation, pair by pair.

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
        of_medians=float(np.median(first)) / float(np.median(second)),
    )


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Interval of the true median between two samples, as in :func:`compare_pairs`; ``None`` for too few samples.

    >>> median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0])
    (1.0, 6.0)
    """
    rank = _interval_rank(len(samples), CONFIDENCE)
    ordered = sorted(samples)
    return None if rank is None else (ordered[rank], ordered[-1 - rank])


def _interval_rank(count: int, confidence: float) -> int | None:
    """Number of values outside the interval at each end; ``None`` for too few values."""
    tail, rank = 0.0, None
    for left_out in range(count // 2):
        # Probability that at most ``left_out`` of ``count`` values are below the median, as in tosses of a fair coin.
        tail += math.comb(count, left_out) / 2**count
        if 2 * tail > 1 - confidence:
            break
        rank = left_out
    return rank
