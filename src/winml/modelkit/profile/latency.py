"""Measurement of the latency of a run, which is a function without arguments; every sample is kept.

Independent of models and sessions. The first call is reported separately, because it includes initialization that later
calls reuse. Warm-up calls are not counted. Python's garbage collector is off during the measurement.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from winml.modelkit.profile.statistics import Ratio, Summary, compare_pairs, percentile, summarize
from winml.modelkit.progress import Progress
from winml.modelkit.records import Record, entry, recorded

Run = Callable[[], object]
_NS_PER_MS = 1e6

PAIRS = 30
"""Pairs of blocks in a comparison. Chosen: the interval then spans the tenth to the twenty-first of the sorted ratios,
and a block is still long compared with the switch between the models."""

SETTLE_S = 0.05
"""Pause before each block of a comparison. Measured: ONNX Runtime's threads spin for up to 40 ms after a run, and would
slow down the other model."""

_PROGRESS_NS = 100_000_000
"""Minimum time between two progress reports. Chosen: ten a second."""


class LatencyOptions(Record):
    """Number or duration of the measured runs."""

    iterations: int = 100
    """Counted runs; ignored if ``duration_s`` is set."""
    warmup: int = 10
    """Uncounted runs between the first run and the counted runs."""
    duration_s: float | None = None
    """Duration of the measurement in seconds, instead of a number of runs."""


class LatencyResult(Record, digits=6):
    """Times of one run function."""

    samples_ms: tuple[float, ...] = field(metadata=entry("raw_samples_ms"))
    """Every counted run, in order."""
    first_run_ms: float
    """The very first run."""

    @property
    @recorded(entry("latency_ms", before="raw_samples_ms"))
    def summary(self) -> Summary:
        """Mean, spread and percentiles of the samples, in milliseconds."""
        return summarize(self.samples_ms)


@dataclass(frozen=True)
class Comparison:
    """Times of a model and its baseline, measured in alternation."""

    model: LatencyResult
    baseline: LatencyResult
    ratio: Ratio
    """Ratio of the model's time to the baseline's."""
    block: int
    """Number of consecutive runs of each."""


def measure_latency(run: Run, options: LatencyOptions, progress: Progress | None = None) -> LatencyResult:
    """Measure one run function.

    Args:
        run: The function to time.
        options: Number or duration of runs.
        progress: Called between runs.
    """
    first_ns = _time_run(run)
    samples_ns: list[int] = []
    with _pause_collector():
        for _ in range(options.warmup):
            run()
        for _ in _count_turns(options, options.iterations, progress, samples_ns):
            samples_ns += [_time_run(run)]
    return LatencyResult(_as_milliseconds(samples_ns), first_ns / _NS_PER_MS)


def measure_alternating(
    model: Run, baseline: Run, options: LatencyOptions, progress: Progress | None = None
) -> Comparison:
    """Measure two run functions in alternating blocks, so that other load on the machine slows both equally.

    Successive pairs of blocks alternate the order of the two. A block begins with a pause and an uncounted run, in
    which caches fill and threads of the other function go to sleep. The two blocks of a pair are compared by their
    medians.

    Args:
        model: Run of the model.
        baseline: Run of the baseline.
        options: Number of runs of each, or total duration.
        progress: Called between runs.
    """
    first_runs_ns = (_time_run(model), _time_run(baseline))
    samples_ns: tuple[list[int], list[int]] = ([], [])
    medians: tuple[list[float], list[float]] = ([], [])
    with _pause_collector():
        for run in (model, baseline):
            for _ in range(options.warmup):
                run()
        block_size = _block_size(options, model, baseline)
        pairs = math.ceil(options.iterations / block_size)
        for turn in _count_turns(options, pairs, progress, samples_ns[0]):
            for index in (0, 1) if turn % 2 == 0 else (1, 0):
                block_ns = _measure_block((model, baseline)[index], block_size)
                samples_ns[index].extend(block_ns)
                medians[index].append(percentile(block_ns, 50))
    model_result, baseline_result = (
        LatencyResult(_as_milliseconds(side_ns), first_ns / _NS_PER_MS)
        for side_ns, first_ns in zip(samples_ns, first_runs_ns, strict=True)
    )
    slowdown = max(side.summary.slowdown for side in (model_result, baseline_result))
    ratio = replace(compare_pairs(*medians), slowdown=slowdown)
    return Comparison(model_result, baseline_result, ratio, block_size)


def measure_block(run: Run, size: int) -> tuple[float, ...]:
    """Measure consecutive runs, for alternation among more than two candidates; return milliseconds.

    A pause and an uncounted run come first, as in :func:`measure_alternating`.
    """
    with _pause_collector():
        return _as_milliseconds(_measure_block(run, size))


def _time_run(run: Run) -> int:
    """Run once; return nanoseconds."""
    started = time.perf_counter_ns()
    run()
    return time.perf_counter_ns() - started


def _measure_block(run: Run, size: int) -> list[int]:
    """Run ``size`` times after a pause and an uncounted run; return nanoseconds."""
    time.sleep(SETTLE_S)
    run()
    return [_time_run(run) for _ in range(size)]


def _block_size(options: LatencyOptions, model: Run, baseline: Run) -> int:
    """Compute the runs per block that divide the iterations, or the duration, into about :data:`PAIRS` pairs."""
    if options.duration_s is None:
        return max(1, options.iterations // PAIRS)
    one_pair_s = (_time_run(model) + _time_run(baseline)) / 1e9
    time_for_runs_s = options.duration_s / PAIRS - 2 * SETTLE_S - one_pair_s
    return max(1, math.floor(time_for_runs_s / one_pair_s))


def _count_turns(
    options: LatencyOptions, count: int, progress: Progress | None, samples_ns: list[int]
) -> Iterator[int]:
    """Yield 0, 1, … until the count or the duration is reached, at least once; report progress in between.

    Args:
        options: The duration, if limited.
        count: Number of turns without a duration.
        progress: Listener.
        samples_ns: Measured times, whose number is reported.
    """
    started = reported = time.perf_counter_ns()
    turn = 0
    while True:
        yield turn
        turn += 1
        now = time.perf_counter_ns()
        share = turn / count if options.duration_s is None else (now - started) / 1e9 / options.duration_s
        if progress is not None and (now - reported >= _PROGRESS_NS or share >= 1):
            progress(len(samples_ns), min(share, 1.0))
            reported = now
        if share >= 1:
            return


@contextmanager
def _pause_collector() -> Iterator[None]:
    """Run the garbage collector once, and disable it for the time of the block."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _as_milliseconds(samples_ns: list[int]) -> tuple[float, ...]:
    return tuple(sample / _NS_PER_MS for sample in samples_ns)
