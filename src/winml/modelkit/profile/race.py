"""Comparison of several candidates timed in rounds: elimination and selection of the fastest.

Arithmetic only. Each round measures every remaining candidate once, so that the times of one round are pairs for any
two candidates. Candidates are listed in order of preference: the first of two indistinguishable candidates wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from winml.modelkit.profile.statistics import CONFIDENCE, NOISE, Ratio, compare_pairs, summarize

Times = Mapping[str, Sequence[float]]
"""Candidate → its time in each round; shorter for eliminated candidates."""

RUNGS = (8, 14, 24)
"""Numbers of rounds after which losers are eliminated, except the last. Chosen: the fewest pairs with an interval at
the confidence of a comparison of 3 and of 20 candidates; the work grows for the remaining candidates, as in successive
halving (Jamieson and Talwalkar, 2016)."""


_CLEARLY_SLOWER = 1.25
"""Minimum ratio to the fastest. Chosen: noise does not slow one of two candidates by a quarter in each of eight rounds
without slowing the other."""


@dataclass(frozen=True)
class Choice:
    """Selected candidate, and the fastest candidate."""

    winner: str
    fastest: str
    """Candidate with the smallest median among unbeaten ones; the winner, unless a preferred candidate is as good."""
    ratio: Ratio | None
    """Ratio of the fastest to the winner; ``None`` if equal."""

    @property
    def is_within_noise(self) -> bool:
        """True if the winner was selected by preference within the noise, not as the fastest."""
        return self.winner != self.fastest


def ratio_between(times: Times, candidate: str, base: str, confidence: float = CONFIDENCE) -> Ratio:
    """Compute the ratio of a candidate's times to another's over their common rounds."""
    turns = min(len(times[candidate]), len(times[base]))
    candidate_times, base_times = list(times[candidate][:turns]), list(times[base][:turns])
    slowdown = max(summarize(times).slowdown for times in (candidate_times, base_times))
    return replace(compare_pairs(candidate_times, base_times, confidence), slowdown=slowdown)


def confidence_of_race(candidates: int, rungs: int) -> float:
    """Compute the confidence of each elimination interval, so that the confidence of the whole comparison is 95 %.

    Each pair may be compared after each rung, so the 5 % are divided among all comparisons (Bonferroni).

    Args:
        candidates: Number of initial candidates.
        rungs: Number of rungs with elimination.

    >>> round(confidence_of_race(3, 2), 4)
    0.9917
    """
    return 1 - (1 - CONFIDENCE) / max(math.comb(candidates, 2) * rungs, 1)


def fastest(times: Times, names: Sequence[str]) -> str:
    """Find the candidate with the smallest median; the first of equal candidates.

    >>> fastest({"plain": [3.0, 2.0, 9.0], "int8": [1.0, 2.0, 2.0]}, ["plain", "int8"])
    'int8'
    """
    return min(names, key=lambda name: float(np.median(times[name])))


def losers(times: Times, names: Sequence[str], confidence: float) -> dict[str, Ratio]:
    """Determine the eliminated candidates after a rung: candidate → ratio to the fastest.

    A candidate slower by more than the noise is eliminated. In the slower half, a candidate after the fastest in order
    of preference is eliminated if it is slower at all. The whole interval has to show it. With too few rounds for an
    interval, as with many candidates, every round has to show a slowdown by a quarter. Disturbed ratios eliminate no
    candidate.

    Args:
        times: Times of all remaining candidates.
        names: Remaining candidates, in order of preference.
        confidence: Confidence of each interval, from :func:`confidence_of_race`.
    """
    leader = fastest(times, names)
    ratios = {name: ratio_between(times, name, leader, confidence) for name in names if name != leader}
    ranked = sorted(ratios, key=lambda name: ratios[name].value)
    # Candidates before the fastest are preferred within the noise.
    stay = {*ranked[: math.ceil(len(names) / 2) - 1], *names[: names.index(leader)]}

    def is_slower(name: str, ratio: Ratio) -> bool:
        if ratio.low is not None:
            return ratio.low > (1 + NOISE if name in stay else 1.0)
        each = [time / best for time, best in zip(times[name], times[leader], strict=False)]
        return len(each) >= RUNGS[0] and min(each) > _CLEARLY_SLOWER

    return {name: ratio for name, ratio in ratios.items() if not ratio.is_disturbed and is_slower(name, ratio)}


def is_decided(times: Times, names: Sequence[str]) -> bool:
    """Return True if more rounds would hardly change the winner, so that a comparison may end after a rung.

    True if no candidate is faster than the first by more than the noise, by the median of their pairs: only an interval
    entirely beyond the noise would select another candidate.

    Args:
        times: Times of all remaining candidates.
        names: Remaining candidates, in order of preference.
    """
    ratios = [ratio_between(times, name, names[0]) for name in names[1:]]
    return all(ratio.value >= 1 - NOISE and not ratio.is_disturbed for ratio in ratios)


def choose(times: Times, names: Sequence[str]) -> Choice:
    """Select the first candidate in order of preference to which no other is faster beyond the noise.

    All pairs are compared, not only those with the fastest: the median of one series does not determine its pairs, so a
    slower candidate may be distinguishable from a candidate that the fastest is not distinguishable from. If each
    candidate is slower than another, which noise can cause, the smallest median wins.

    Args:
        times: Times of all remaining candidates; not needed for a single candidate.
        names: Remaining candidates, in order of preference.
    """
    if len(names) == 1:
        return Choice(names[0], names[0], None)

    def is_beaten(name: str) -> bool:
        return any(ratio_between(times, rival, name).verdict == "faster" for rival in names if rival != name)

    unbeaten = [name for name in names if not is_beaten(name)] or [fastest(times, names)]
    winner, leader = unbeaten[0], fastest(times, unbeaten)
    return Choice(winner, leader, None if winner == leader else ratio_between(times, leader, winner))
