"""Number and order of the runs of a latency measurement."""

from __future__ import annotations

import gc
import itertools
import time

import pytest

from winml.modelkit.profile.latency import PAIRS, LatencyOptions, measure_alternating, measure_latency


def test_latency_counts_first_warm_up_and_measured_runs() -> None:
    """The runs are one first run, three for warm-up and five counted."""
    calls: list[int] = []
    result = measure_latency(lambda: calls.append(len(calls)), LatencyOptions(iterations=5, warmup=3))
    assert (9, 5) == (len(calls), len(result.samples_ms))
    assert min(result.samples_ms) > 0


def test_latency_excludes_the_slow_first_run() -> None:
    """The cost of the first run is not in the samples."""
    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        if len(calls) == 1:
            time.sleep(0.05)

    result = measure_latency(run, LatencyOptions(iterations=20, warmup=0))
    assert result.first_run_ms >= 50
    assert result.summary.p50 < 50


def test_latency_measures_the_time_of_a_run() -> None:
    """Samples are milliseconds: 5 ms of sleep take no less, and in the middle less than ten times that."""
    result = measure_latency(lambda: time.sleep(0.005), LatencyOptions(iterations=9, warmup=0))
    assert result.summary.min >= 5
    assert result.summary.p50 < 50


def test_latency_is_measured_for_the_requested_duration() -> None:
    """A duration counts runs by the clock, and one run at least."""
    started = time.perf_counter()
    result = measure_latency(lambda: time.sleep(0.001), LatencyOptions(warmup=0, duration_s=0.2))
    assert time.perf_counter() - started >= 0.2
    assert len(result.samples_ms) > 1
    assert 1 == len(measure_latency(lambda: time.sleep(0.01), LatencyOptions(warmup=0, duration_s=0.001)).samples_ms)


def test_garbage_collector_is_off_inside_the_block_only() -> None:
    """The collector is off during sampling and in its earlier state afterwards, even after an error."""
    seen: list[bool] = []
    measure_latency(lambda: seen.append(gc.isenabled()), LatencyOptions(iterations=2, warmup=0))
    assert [True, False, False] == seen
    assert gc.isenabled()

    def fail() -> None:
        if not gc.isenabled():
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        measure_latency(fail, LatencyOptions(iterations=2, warmup=0))
    assert gc.isenabled()


def test_progress_ends_at_all_of_the_work() -> None:
    """The last report counts all runs."""
    reports: list[tuple[int, float]] = []
    options = LatencyOptions(iterations=4, warmup=0)
    measure_latency(lambda: None, options, lambda *report: reports.append(report))
    assert (4, 1.0) == reports[-1]


def test_alternation_changes_sides_in_every_pair() -> None:
    """Blocks are run in the order a b, b a, a b …, so a drift of the machine affects both equally."""
    calls: list[str] = []
    options = LatencyOptions(iterations=6, warmup=2)
    result = measure_alternating(lambda: calls.append("a"), lambda: calls.append("b"), options)
    # One first run of each, two of each to warm up, then pairs of a run that is not counted and one that is.
    assert ["a", "b", *"aabb"] == calls[:6]
    assert [*"aabb", *"bbaa"] * 3 == calls[6:]
    assert (1, 6, 6) == (result.block, len(result.model.samples_ms), len(result.baseline.samples_ms))


def test_alternation_detects_a_real_difference() -> None:
    """A model of twice the time is found slower, and one of half the time faster."""
    options = LatencyOptions(iterations=6, warmup=0)
    short, long = (lambda: time.sleep(0.01)), (lambda: time.sleep(0.05))
    assert "faster" == measure_alternating(short, long, options).ratio.verdict
    assert "slower" == measure_alternating(long, short, options).ratio.verdict


def test_alternation_under_other_load_is_undecided() -> None:
    """Half of the runs of one side take three times as long as its fastest."""
    durations = itertools.cycle([0.01, 0.03, 0.03])
    options = LatencyOptions(iterations=6, warmup=0)
    result = measure_alternating(lambda: time.sleep(next(durations)), lambda: time.sleep(0.05), options)
    assert "undecided" == result.ratio.verdict


def test_alternation_divides_many_runs_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of pairs is chosen; more runs make longer blocks."""
    monkeypatch.setattr("winml.modelkit.profile.latency.SETTLE_S", 0.0)
    result = measure_alternating(lambda: None, lambda: None, LatencyOptions(iterations=3 * PAIRS, warmup=0))
    assert (3, PAIRS) == (result.block, result.ratio.pairs)


def test_alternation_ends_after_the_requested_duration() -> None:
    """The duration covers both runs and the pauses."""
    started = time.perf_counter()
    options = LatencyOptions(warmup=0, duration_s=0.5)
    result = measure_alternating(lambda: time.sleep(0.001), lambda: time.sleep(0.001), options)
    assert time.perf_counter() - started >= 0.5
    assert len(result.model.samples_ms) == len(result.baseline.samples_ms)
