"""Invariants of the comparison of candidates by time, for random times."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from winml.modelkit.profile.race import choose, confidence_of_race, fastest, losers, ratio_between

NAMES = ("plain", "level", "int8", "mixed")
CONFIDENCE = confidence_of_race(len(NAMES), 1)
TIMES = st.integers(1, 12).flatmap(
    lambda turns: st.fixed_dictionaries(
        {name: st.lists(st.floats(0.1, 100.0), min_size=turns, max_size=turns) for name in NAMES}
    )
)


@given(TIMES)
def test_fastest_never_drops_out(times: dict[str, list[float]]) -> None:
    """One candidate or more is left."""
    assert fastest(times, NAMES) not in losers(times, NAMES, CONFIDENCE)


@given(TIMES)
def test_winner_precedes_the_fastest_and_is_not_beaten(times: dict[str, list[float]]) -> None:
    """The fastest candidate does not beat the winner beyond the noise, and beats every candidate before the winner."""
    choice = choose(times, NAMES)
    assert NAMES.index(choice.winner) <= NAMES.index(choice.fastest)

    def is_beaten(name: str) -> bool:
        return ratio_between(times, choice.fastest, name).verdict == "faster"

    assert choice.winner == choice.fastest or not is_beaten(choice.winner)
    assert all(is_beaten(name) for name in NAMES[: NAMES.index(choice.winner)])


@given(TIMES, st.integers(-6, 6))
def test_unit_of_the_times_has_no_effect(times: dict[str, list[float]], power: int) -> None:
    """A machine that is twice as fast has the same winner; powers of two cause no rounding."""
    scaled = {name: [value * 2.0**power for value in series] for name, series in times.items()}
    assert choose(times, NAMES) == choose(scaled, NAMES)
    assert losers(times, NAMES, CONFIDENCE) == losers(scaled, NAMES, CONFIDENCE)


@given(TIMES)
def test_dropped_candidate_has_a_ratio_above_one(times: dict[str, list[float]]) -> None:
    """A dropped candidate has a ratio above 1, and the interval of the ratio is above 1."""
    for name, ratio in losers(times, NAMES, CONFIDENCE).items():
        assert ratio.low is not None
        assert 1.0 < ratio.low <= ratio.value
        assert float(np.median(times[name])) >= float(np.median(times[fastest(times, NAMES)]))
