"""Races with given times: dropped candidates and winners."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from winml.modelkit.profile.race import RUNGS, choose, confidence_of_race, fastest, is_decided, losers, ratio_between
from winml.modelkit.profile.statistics import NOISE, compare_pairs, median_interval

TURNS = RUNGS[0]
OF_TWO = confidence_of_race(2, len(RUNGS) - 1)


def times(**medians: float) -> dict[str, list[float]]:
    """Return eight turns for each, which rise and fall together as on a machine that does other things as well."""
    load = (1.0, 1.2, 1.1, 1.0, 1.3, 1.05, 1.0, 1.1)
    return {name: [median * factor for factor in load] for name, median in medians.items()}


def test_loser_is_slower_in_every_pair_and_drops_out() -> None:
    """The times of both overlap, but not the times of a turn."""
    raced = times(plain=10.0, int8=9.0)
    assert max(raced["int8"]) > min(raced["plain"])
    assert ["plain"] == list(losers(raced, ["plain", "int8"], OF_TWO))


def test_slower_within_the_noise_stays_in_the_faster_half() -> None:
    """Half of four candidates stay for the next rung unless the whole interval lies above the noise."""
    raced = times(first=10.0, second=10.0 * (1 + NOISE / 2), third=10.0 * (1 + NOISE / 2 + 0.001), fourth=20.0)
    assert ["third", "fourth"] == list(losers(raced, list(raced), OF_TWO))


def test_possible_winner_within_the_noise_stays_at_any_rank() -> None:
    """The simplest candidate is in the slower half and is still preferred."""
    raced = times(simple=10.0 * (1 + NOISE / 2), second=10.0 * (1 + NOISE / 4), third=10.0, fourth=20.0)
    assert ["fourth"] == list(losers(raced, list(raced), OF_TWO))
    assert "simple" == choose(raced, ["simple", "second", "third"]).winner


def test_no_candidate_is_dropped_before_an_interval_exists() -> None:
    """Five turns are too few for 95 %; two rungs need more than six."""
    for turns in (5, 6):
        raced = {name: series[:turns] for name, series in times(plain=10.0, int8=1.0).items()}
        assert {} == losers(raced, ["plain", "int8"], OF_TWO)


def test_clearly_slower_candidate_is_dropped_from_many() -> None:
    """Eight turns are too few for an interval of twelve candidates; one turn near the fastest keeps a candidate."""
    medians = {f"c{number}": 10.0 + number / 100 for number in range(10)}
    raced = times(fast=5.0, near=5.3, **medians)
    confidence = confidence_of_race(len(raced), len(RUNGS) - 1)
    assert ratio_between(raced, "c0", "fast", confidence).low is None
    assert list(medians) == list(losers(raced, list(raced), confidence))
    raced["c3"][4] = 1.2 * raced["fast"][4]
    assert "c3" not in losers(raced, list(raced), confidence)


def test_comparison_ends_if_no_candidate_beats_the_simplest() -> None:
    """The median of the pairs decides; times of a busy machine decide nothing."""
    raced = times(simple=10.0, other=10.0 * (1 - NOISE / 2), slow=12.0)
    assert is_decided(raced, ["simple", "other", "slow"])
    assert is_decided(raced, ["simple"])
    assert not is_decided(raced, ["slow", "simple"])
    raced["other"] = [10.0, *[20.0] * 7]
    assert not is_decided(raced, ["simple", "other"])


@pytest.mark.parametrize(("rung", "candidates"), [(RUNGS[0], 3), (RUNGS[1], 20)])
def test_rungs_suffice_for_the_chosen_number_of_candidates(rung: int, candidates: int) -> None:
    """A further candidate has no interval at the same rung."""
    ends = [
        compare_pairs([2.0] * rung, [1.0] * rung, confidence_of_race(count, len(RUNGS) - 1)).low
        for count in (candidates, candidates + 1)
    ]
    assert [2.0, None] == ends


def test_few_races_of_equal_candidates_drop_a_candidate_by_chance() -> None:
    """Chance drops a candidate in at most 5 % of the races; with 95 % per interval, more races would lose one."""
    random, names = np.random.default_rng(0), [f"c{number}" for number in range(10)]

    def share(confidence: float) -> float:
        races = ({name: random.lognormal(0, 0.1, RUNGS[1]).tolist() for name in names} for _ in range(100))
        return sum(bool(losers(raced, names, confidence)) for raced in races) / 100

    assert share(confidence_of_race(10, len(RUNGS) - 1)) <= 0.05 < share(0.95)


def test_one_outlier_has_no_effect() -> None:
    """A turn in which the machine stood still moves no end of the interval across 1."""
    raced = times(plain=10.0, int8=5.0)
    raced["int8"][2] = 1000.0
    assert "int8" == fastest(raced, ["plain", "int8"])
    assert {} == losers(raced, ["plain", "int8"], OF_TWO)


def test_disturbed_times_drop_no_candidate_and_name_no_winner() -> None:
    """Most of the turns of one took far more than its fastest: the first of the order stands."""
    raced = {"plain": [10.0, *[20.0] * (TURNS - 1)], "int8": [5.0] * TURNS}
    assert {} == losers(raced, ["plain", "int8"], OF_TWO)
    assert ("plain", "int8") == (choose(raced, ["plain", "int8"]).winner, choose(raced, ["plain", "int8"]).fastest)


def test_single_one_wins_without_times() -> None:
    """No statistics are computed without samples."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "plain" == choose({"plain": []}, ["plain"]).winner


def test_clearly_fastest_candidate_wins() -> None:
    """Half of the time is no noise."""
    choice = choose(times(plain=10.0, level=9.0, int8=5.0), ["plain", "level", "int8"])
    assert ("int8", "int8", None, False) == (choice.winner, choice.fastest, choice.ratio, choice.is_within_noise)


def test_indistinguishable_candidates_leave_the_first_as_winner() -> None:
    """The faster candidate is named, with the insufficient ratio."""
    choice = choose(times(plain=10.0, level=10.0 * (1 - NOISE / 2)), ["plain", "level"])
    assert ("plain", "level", True) == (choice.winner, choice.fastest, choice.is_within_noise)
    assert choice.ratio is not None
    assert pytest.approx(1 - NOISE / 2) == choice.ratio.value


def test_winner_is_the_simplest_indistinguishable_candidate() -> None:
    """The first of all that the fastest cannot be told from wins."""
    raced = times(plain=10.0, int8=5.0, mixed=5.0 * (1 - NOISE / 2))
    assert "int8" == choose(raced, ["plain", "int8", "mixed"]).winner


def test_winner_is_beaten_by_no_candidate() -> None:
    """Medians of whole series rank differently from pairs: ``steady`` beats ``plain`` in every turn, and
    ``erratic``, with the least median, is slower than ``plain`` in 10 of 24.
    """
    plain = [10.0, 12.0] * 12
    steady = [0.9 * time for time in plain]
    erratic = [7.0] * 14 + [13.0] * 10
    raced = {"plain": plain, "steady": steady, "erratic": erratic}
    assert "erratic" == fastest(raced, list(raced))
    assert "faster" == ratio_between(raced, "steady", "plain").verdict
    assert "no difference found" == ratio_between(raced, "erratic", "plain").verdict
    assert "steady" == choose(raced, list(raced)).winner


def test_fastest_wins_in_a_circle_of_ratios() -> None:
    """Pairs in a circle decide nothing, and still the race has a winner."""
    going_round = {"a": [1.0, 2.0, 3.0] * 8, "b": [1.1, 2.2, 2.0] * 8, "c": [1.2, 1.9, 2.1] * 8}
    choice = choose(going_round, list(going_round))
    assert choice.winner in going_round


def test_ratio_uses_the_rounds_of_both() -> None:
    """A dropped candidate has a shorter series."""
    raced = times(plain=10.0, int8=5.0)
    raced["int8"] += [1.0] * 6
    assert (TURNS, 2.0) == (ratio_between(raced, "plain", "int8").pairs, ratio_between(raced, "plain", "int8").value)


@pytest.mark.parametrize(("count", "ends"), [(5, None), (6, (1.0, 6.0)), (20, (6.0, 15.0))])
def test_interval_of_a_median_equals_the_interval_of_pairs_with_1(count: int, ends: tuple[float, float] | None) -> None:
    """The same two of the sorted values, wherever they are compared."""
    values = [float(number) for number in range(count, 0, -1)]
    ratio = compare_pairs(values, [1.0] * count)
    assert ends == median_interval(values)
    assert ends == (None if ratio.low is None else (ratio.low, ratio.high))
