"""Decides from times of several candidates, measured in turns, which of them lose and which one wins.

Arithmetic only. In each turn every candidate that is still in is measured once, so that the times of one turn are a
pair for any two of them. Candidates stand in an order of preference: the first of two that cannot be told apart wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from winml.modelkit.profile.statistics import CONFIDENCE, NOISE, Ratio, compare_pairs, summarize

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
