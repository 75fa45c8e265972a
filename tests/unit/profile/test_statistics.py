"""Summaries compared with values computed by hand, and intervals of differences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from winml.modelkit.profile.statistics import NOISE, Ratio, compare_pairs, percentile, summarize


def test_summary_has_the_values_computed_by_hand() -> None:
    """Mean 5, deviation from it 2.138 (n − 1), and percentiles linear between neighbours."""
    summary = summarize([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    assert (5.0, 2.0, 9.0, 4.5) == (summary.mean, summary.min, summary.max, summary.p50)
    assert pytest.approx((32 / 7) ** 0.5) == summary.std
    assert pytest.approx((7.6, 8.3, 8.86)) == (summary.p90, summary.p95, summary.p99)


def test_summary_of_one_sample_is_that_sample() -> None:
    """A single run has no spread, and every percentile equals its time."""
    record = summarize([3.5]).as_record()
    assert 0.0 == record.pop("std")
    assert {3.5} == set(record.values())


@pytest.mark.parametrize(
    ("samples", "is_disturbed", "is_interrupted"),
    [
        ([1.0] * 10, False, False),
        ([1.0] * 9 + [15.0], False, True),
        ([1.0] + [2.0] * 9, True, False),
    ],
)
def test_few_long_samples_interrupt_and_many_disturb(
    samples: list[float], is_disturbed: bool, is_interrupted: bool
) -> None:
    """One run of ten that takes 15 times as long makes the mean more than twice the median."""
    summary = summarize(samples)
    assert (is_disturbed, is_interrupted) == (summary.is_disturbed, summary.is_interrupted)


@pytest.mark.parametrize(("share", "value"), [(0, 10.0), (25, 12.5), (50, 15.0), (100, 20.0)])
def test_percentile_is_interpolated_between_two_samples(share: float, value: float) -> None:
    """Percentiles of two samples lie on the straight line between them."""
    assert value == percentile([20.0, 10.0], share)


def test_interval_of_twenty_pairs_leaves_five_out_at_each_end() -> None:
    """The binomial table: of 20 pairs the 6th and 15th hold the median between them with a chance of 95.86 %."""
    ratio = compare_pairs([float(number) for number in range(1, 21)], [1.0] * 20)
    assert (10.5, 6.0, 15.0, 20) == (ratio.value, ratio.low, ratio.high, ratio.pairs)


@pytest.mark.parametrize(("pairs", "has_interval"), [(1, False), (5, False), (6, True)])
def test_interval_needs_six_pairs(pairs: int, has_interval: bool) -> None:
    """Five fair coins agree by chance in 6.25 % of cases, six in 3.1 %."""
    ratio = compare_pairs([1.0] * pairs, [2.0] * pairs)
    assert has_interval == (ratio.low is not None)
    assert ("faster" if has_interval else "no difference found") == ratio.verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.90, 0.95, "faster"),
        (1.05, 1.10, "slower"),
        (0.97, 1.05, "no difference found"),
        (0.95, 1 - NOISE / 2, "no difference found"),
        (1 + NOISE / 2, 1.10, "no difference found"),
        (None, None, "no difference found"),
    ],
)
def test_verdict_is_a_difference_only_for_a_whole_interval(low: float | None, high: float | None, verdict: str) -> None:
    """An interval that touches the range of noise is no difference, regardless of its middle."""
    assert verdict == Ratio(1.0, low, high, 0.95, 30).verdict
    assert "undecided" == Ratio(1.0, low, high, 0.95, 30, slowdown=2.0).verdict


@pytest.mark.parametrize(
    ("ends", "verdict"), [((0.2, 0.4), "faster"), ((2.1, 3.0), "slower"), ((0.2, 0.6), "undecided")]
)
def test_interval_beyond_the_load_is_decided_on_a_busy_machine(ends: tuple[float, float], verdict: str) -> None:
    """Load that doubled the time of one side alone would not explain the ratio."""
    assert verdict == Ratio(1.0, *ends, 0.95, 30, slowdown=2.0).verdict


def test_ratio_that_its_medians_contradict_is_undecided_on_a_busy_machine() -> None:
    """Load that changes during the measurement: the pairs say 0.2, the medians of the two series 0.5."""
    first, second = [1.0] * 10 + [5.0] * 9, [5.0] * 6 + [2.0] * 4 + [25.0] * 9
    ratio = replace(compare_pairs(first, second), slowdown=2.5)
    assert ratio.of_medians == pytest.approx(0.2)
    assert "faster" == ratio.verdict  # far beyond the load
    contradicted = replace(ratio, of_medians=0.52)
    assert "undecided" == contradicted.verdict
    assert contradicted.answer("").is_undecided


def test_outlier_moves_neither_ratio_nor_interval() -> None:
    """Ranks exclude one block of a busy machine."""
    even = compare_pairs([2.0] * 30, [1.0] * 30)
    disturbed = compare_pairs([2.0] * 29 + [900.0], [1.0] * 30)
    assert (even.value, even.low, even.high) == (disturbed.value, disturbed.low, disturbed.high)


def test_samples_far_above_the_fastest_are_called_disturbed() -> None:
    """A single outlier is not enough; half of the samples are."""
    assert not summarize([1.0, 1.1, 1.2, 9.0]).is_disturbed
    assert summarize([1.0, 1.6, 1.7]).is_disturbed
