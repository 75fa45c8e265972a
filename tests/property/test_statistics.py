"""Invariants of statistics of random samples: order, scale and intervals."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from winml.modelkit.profile.statistics import compare_pairs, percentile, summarize

TIMES = st.floats(min_value=1e-3, max_value=1e6)
SAMPLES = st.lists(TIMES, min_size=1, max_size=60)
PAIRS = st.lists(st.tuples(TIMES, TIMES), min_size=6, max_size=60)


@given(SAMPLES)
def test_percentiles_are_ordered_within_the_samples(samples: list[float]) -> None:
    """Smallest ≤ p50 ≤ p90 ≤ p95 ≤ p99 ≤ largest, and the mean lies between the ends."""
    summary = summarize(samples)
    order = [summary.min, summary.p50, summary.p90, summary.p95, summary.p99, summary.max]
    assert sorted(order) == order
    assert summary.min <= summary.mean <= summary.max
    assert summary.std >= 0


@given(SAMPLES, st.randoms(use_true_random=False))
def test_summary_does_not_depend_on_the_order(samples: list[float], random: object) -> None:
    """Shuffled samples have the same percentiles."""
    shuffled = list(samples)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert summarize(samples).p90 == summarize(shuffled).p90


@given(SAMPLES, st.floats(min_value=0, max_value=100))
def test_percentile_splits_the_samples_by_its_share(samples: list[float], share: float) -> None:
    """The share of samples below a percentile, and the share above, never exceed the nominal shares."""
    value = percentile(samples, share)
    below, above = (sum(sample < value for sample in samples), sum(sample > value for sample in samples))
    assert below <= math.ceil(share / 100 * (len(samples) - 1) + 1e-9)
    assert above <= math.ceil((1 - share / 100) * (len(samples) - 1) + 1e-9)


@given(st.lists(TIMES, min_size=1, max_size=60))
def test_same_samples_show_no_difference(samples: list[float]) -> None:
    """The ratio of samples to themselves is 1, its interval contains 1, and the verdict is no difference."""
    ratio = compare_pairs(samples, samples)
    assert 1.0 == ratio.value
    assert (1.0 if len(samples) >= 6 else None) == ratio.low == ratio.high
    assert "no difference found" == ratio.verdict


@given(PAIRS)
def test_interval_contains_the_ratio_and_is_inverted_with_the_sides(pairs: list[tuple[float, float]]) -> None:
    """Low ≤ ratio ≤ high, and swapping the sides swaps the ends."""
    first, second = zip(*pairs, strict=True)
    there, back = compare_pairs(first, second), compare_pairs(second, first)
    assert there.low is not None
    assert there.high is not None
    assert there.low <= there.value <= there.high
    assert back.low is not None
    assert math.isclose(back.low, 1 / there.high, rel_tol=1e-9)
    assert {"faster": "slower", "slower": "faster"}.get(there.verdict, there.verdict) == back.verdict or (
        # 1 / 1.02 lies just inside of 1 - 0.02.
        min(abs(there.low - 1), abs(there.high - 1), abs(back.low - 1)) < 0.021
    )


def test_median_interval_reaches_its_stated_coverage() -> None:
    """The interval contains the median in at least 94 % of 2000 draws from a skewed distribution."""
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        ratio = compare_pairs(generator.lognormal(0.2, 1.0, 30).tolist(), [1.0] * 30)
        assert ratio.low is not None
        assert ratio.high is not None
        held += ratio.low <= math.exp(0.2) <= ratio.high
    assert held >= 0.94 * 2000


def test_equal_things_are_rarely_called_different() -> None:
    """Less than 5 % of 1000 comparisons of a noisy sample with itself end in a difference."""
    generator = np.random.default_rng(1)
    draws = generator.gamma(4.0, 1.0, (1000, 2, 30))
    verdicts = [compare_pairs(first.tolist(), second.tolist()).verdict for first, second in draws]
    assert sum(verdict != "no difference found" for verdict in verdicts) < 50
