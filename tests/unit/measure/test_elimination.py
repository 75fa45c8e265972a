"""Races with given times: who drops out, and who wins."""

from __future__ import annotations

import pytest

from winml.modelkit.measure.elimination import RUNGS, choose, fastest, losers, ratio_between
from winml.modelkit.measure.statistics import NOISE, compare_pairs, median_interval

TURNS = RUNGS[0]


def times(**medians: float) -> dict[str, list[float]]:
    """Return six turns for each, which rise and fall together as on a machine that does other things as well."""
    load = (1.0, 1.2, 1.1, 1.0, 1.3, 1.05)
    return {name: [median * factor for factor in load] for name, median in medians.items()}


def test_loser_is_slower_in_every_pair_and_drops_out() -> None:
    """The times of both overlap; those of each turn do not."""
    raced = times(plain=10.0, int8=9.0)
    assert max(raced["int8"]) > min(raced["plain"])
    assert ["plain"] == list(losers(raced, ["plain", "int8"]))


def test_slower_within_the_noise_stays_in_the_faster_half() -> None:
    """Of four, two are kept for the next rung unless the whole interval lies above the noise."""
    raced = times(first=10.0, second=10.0 * (1 + NOISE / 2), third=10.0 * (1 + NOISE / 2 + 0.001), fourth=20.0)
    assert ["third", "fourth"] == list(losers(raced, list(raced)))


def test_nobody_drops_out_before_there_is_an_interval() -> None:
    """Five turns are too few for 95 %."""
    raced = {name: series[: TURNS - 1] for name, series in times(plain=10.0, int8=1.0).items()}
    assert {} == losers(raced, ["plain", "int8"])


def test_one_outlier_decides_nothing() -> None:
    """A turn in which the machine stood still moves no end of the interval across 1."""
    raced = times(plain=10.0, int8=5.0)
    raced["int8"][2] = 1000.0
    assert "int8" == fastest(raced, ["plain", "int8"])
    assert {} == losers(raced, ["plain", "int8"])


def test_winner_is_the_fastest_where_it_is_told_apart() -> None:
    """Half of the time is no noise."""
    choice = choose(times(plain=10.0, level=9.0, int8=5.0), ["plain", "level", "int8"])
    assert ("int8", "int8", None, False) == (choice.winner, choice.fastest, choice.ratio, choice.is_within_noise)


def test_of_two_that_are_not_told_apart_the_first_wins() -> None:
    """The faster one is named, with the ratio that is not enough."""
    choice = choose(times(plain=10.0, level=10.0 * (1 - NOISE / 2)), ["plain", "level"])
    assert ("plain", "level", True) == (choice.winner, choice.fastest, choice.is_within_noise)
    assert choice.ratio is not None
    assert pytest.approx(1 - NOISE / 2) == choice.ratio.value


def test_winner_need_not_be_the_plain_one_to_be_the_simpler_one() -> None:
    """The first of all that the fastest cannot be told from wins."""
    raced = times(plain=10.0, int8=5.0, mixed=5.0 * (1 - NOISE / 2))
    assert "int8" == choose(raced, ["plain", "int8", "mixed"]).winner


def test_ratio_takes_the_turns_that_both_were_in() -> None:
    """Who dropped out has a shorter series."""
    raced = times(plain=10.0, int8=5.0)
    raced["int8"] += [1.0] * 6
    assert (TURNS, 2.0) == (ratio_between(raced, "plain", "int8").pairs, ratio_between(raced, "plain", "int8").value)


@pytest.mark.parametrize(("count", "ends"), [(5, None), (6, (1.0, 6.0)), (20, (6.0, 15.0))])
def test_interval_of_a_median_is_that_of_pairs_with_one(count: int, ends: tuple[float, float] | None) -> None:
    """The same two of the sorted values, wherever they are compared."""
    values = [float(number) for number in range(count, 0, -1)]
    ratio = compare_pairs(values, [1.0] * count)
    assert ends == median_interval(values)
    assert ends == (None if ratio.low is None else (ratio.low, ratio.high))
