"""Summarizes samples, and decides from pairs of samples whether one thing is faster than another.

Arithmetic only. A ratio comes with a confidence interval; a difference is reported only where the whole interval is on
one side of 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Return two of the samples between which the true median lies, as :func:`compare_pairs` does; None of too few.

    >>> median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0])
    (1.0, 6.0)
    """
    rank = _interval_rank(len(samples), confidence)
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


# --- Decides from times of several candidates, measured in turns, which of them lose and which one wins.
#
# Arithmetic only. In each turn every candidate that is still in is measured once, so that the times of one turn are a
# pair for any two of them. Candidates stand in an order of preference: the first of two that cannot be told apart wins.


Times = Mapping[str, Sequence[float]]
"""Candidate → its time in each turn; who drops out has a shorter series."""

RUNGS = (8, 14, 24)
"""Turns after which losers drop out, all but the last. Chosen: the fewest pairs with an interval at the confidence of a
race of 3 and of 20 candidates; the work grows for those who stay, as in successive halving (Jamieson and Talwalkar,
2016)."""


_CLEARLY_SLOWER = 1.25
"""Times those of the fastest. Chosen: noise does not slow one of two by a quarter in each of eight turns, and not the
other beside it."""


@dataclass(frozen=True)
class Choice:
    """Which candidate wins, and beside which it stands."""

    winner: str
    fastest: str
    """The one with the least median of those that no other beats; the winner, unless an earlier one is as good."""
    ratio: Ratio | None
    """Time of the fastest over that of the winner; None where both are one."""

    @property
    def is_within_noise(self) -> bool:
        """Whether the winner wins because it comes first, not because it is the fastest."""
        return self.winner != self.fastest


def ratio_between(times: Times, first: str, second: str, confidence: float = CONFIDENCE) -> Ratio:
    """Return the ratio of two candidates over the turns that both took part in."""
    turns = min(len(times[first]), len(times[second]))
    one, other = list(times[first][:turns]), list(times[second][:turns])
    is_disturbed = summarize(one).is_disturbed or summarize(other).is_disturbed
    return replace(compare_pairs(one, other, confidence), is_disturbed=is_disturbed)


def confidence_of_race(candidates: int, rungs: int) -> float:
    """Return the confidence of each interval by which somebody drops out, so that that of the race is 95 %.

    Each pair may be compared at each rung, so each takes its part of the 5 % (Bonferroni).

    Args:
        candidates: How many begin the race.
        rungs: At how many rungs somebody may drop out.

    >>> round(confidence_of_race(3, 2), 4)
    0.9917
    """
    return 1 - (1 - CONFIDENCE) / max(math.comb(candidates, 2) * rungs, 1)


def fastest(times: Times, names: Sequence[str]) -> str:
    """Return the candidate with the least median; of equal ones the first.

    >>> fastest({"plain": [3.0, 2.0, 9.0], "int8": [1.0, 2.0, 2.0]}, ["plain", "int8"])
    'int8'
    """
    return min(names, key=lambda name: float(np.median(times[name])))


def losers(times: Times, names: Sequence[str], confidence: float) -> dict[str, Ratio]:
    """Return who drops out after a rung, each with its time over that of the fastest.

    Who is slower by more than the noise drops out, wherever it stands; in the slower half, of those that come after the
    fastest, whoever is slower at all. The whole interval has to say so. Where the turns are too few for one, as with
    many candidates, each turn has to say that it is slower by a quarter. On a disturbed ratio nobody drops out.

    Args:
        times: Times of all that are in.
        names: Who is in, in the order of preference.
        confidence: That of each interval, as :func:`confidence_of_race` returns it.
    """
    leader = fastest(times, names)
    ratios = {name: ratio_between(times, name, leader, confidence) for name in names if name != leader}
    ranked = sorted(ratios, key=lambda name: ratios[name].value)
    # Who comes before the fastest is preferred to it within the noise.
    stay = {*ranked[: math.ceil(len(names) / 2) - 1], *names[: names.index(leader)]}

    def is_slower(name: str, ratio: Ratio) -> bool:
        if ratio.low is not None:
            return ratio.low > (1 + NOISE if name in stay else 1.0)
        each = [time / best for time, best in zip(times[name], times[leader], strict=False)]
        return len(each) >= RUNGS[0] and min(each) > _CLEARLY_SLOWER

    return {name: ratio for name, ratio in ratios.items() if not ratio.is_disturbed and is_slower(name, ratio)}


def is_decided(times: Times, names: Sequence[str]) -> bool:
    """Say whether more turns would hardly change who wins, so that a race may end after a rung.

    So it is where no other is faster by more than the noise than the first in the order of preference, by the median of
    their pairs: only an interval that lies beyond the noise as a whole would let another one win.

    Args:
        times: Times of all that are in.
        names: Who is in, in the order of preference.
    """
    ratios = [ratio_between(times, name, names[0]) for name in names[1:]]
    return all(ratio.value >= 1 - NOISE and not ratio.is_disturbed for ratio in ratios)


def choose(times: Times, names: Sequence[str]) -> Choice:
    """Return the winner: the first in the order of preference than which no other is faster beyond the noise.

    Every pair is asked, not only those with the fastest: the median of one series says nothing of its pairs, so one
    that is not the fastest may be told from a candidate that the fastest is not told from. Where each is slower than
    some other, which noise can do, the one with the least median wins.

    Args:
        times: Times of all that are in; of a single one, none are needed.
        names: Who is in, in the order of preference.
    """
    if len(names) == 1:
        return Choice(names[0], names[0], None)

    def is_beaten(name: str) -> bool:
        return any(ratio_between(times, other, name).verdict == "faster" for other in names if other != name)

    unbeaten = [name for name in names if not is_beaten(name)] or [fastest(times, names)]
    winner, leader = unbeaten[0], fastest(times, unbeaten)
    return Choice(winner, leader, None if winner == leader else ratio_between(times, leader, winner))
