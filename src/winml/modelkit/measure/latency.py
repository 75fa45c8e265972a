"""How long does one run take? Calls what it is given, many times, and keeps every sample.

Knows no model and no session: a run is a function without arguments. The first call is kept apart, since it pays for
what later ones find ready; warm-up calls are not counted. Python's garbage collector rests while the clock runs.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from winml.modelkit.measure.statistics import Ratio, Summary, compare_pairs, percentile, summarize

__all__ = ["Comparison", "LatencyOptions", "LatencyResult", "Run", "measure_alternating", "measure_latency"]

Run = Callable[[], object]
Progress = Callable[[int, float], None]
"""Told how many runs are counted so far, and the share of the work that is done, 0 to 1; while no clock runs."""

_NS_PER_MS = 1e6

PAIRS = 30
"""Pairs a comparison is divided into. Chosen: enough for an interval from the tenth to the twenty-first of the sorted
ratios, few enough that a block outlasts the change from one model to the other."""

SETTLE_S = 0.05
"""Pause before each block of a comparison. Measured: threads of ONNX Runtime wait for work, at full speed, for up to
40 ms after a run, and would take the processor from the other model."""

PROGRESS_NS = 100_000_000
"""Time between two reports of progress. Chosen: ten a second look alive."""


@dataclass(frozen=True)
class LatencyOptions:
    """How often to measure."""

    iterations: int = 100
    """Counted runs; without meaning where ``duration_s`` is given."""
    warmup: int = 10
    """Runs before, besides the very first."""
    duration_s: float | None = None
    """Measure for this long instead of a number of times."""


@dataclass(frozen=True)
class LatencyResult:
    """What was measured of one thing."""

    samples_ms: tuple[float, ...]
    """Every counted run, in order."""
    first_run_ms: float
    """The very first one."""

    @property
    def summary(self) -> Summary:
        """What the samples come to, in milliseconds."""
        return summarize(self.samples_ms)


@dataclass(frozen=True)
class Comparison:
    """What was measured of two things in alternation."""

    model: LatencyResult
    baseline: LatencyResult
    ratio: Ratio
    """The model's time over the baseline's."""
    block: int
    """Runs of each in a row."""


def measure_latency(run: Run, options: LatencyOptions, progress: Progress | None = None) -> LatencyResult:
    """Measure one thing.

    Args:
        run: What to measure.
        options: How often.
        progress: Told how far it is.
    """
    first = _timed(run)
    samples: list[int] = []
    with _resting_collector():
        _repeat(run, options.warmup)
        for _ in _turns(options, options.iterations, progress, samples):
            samples += [_timed(run)]
    return LatencyResult(_milliseconds(samples), first / _NS_PER_MS)


def measure_alternating(
    model: Run, baseline: Run, options: LatencyOptions, progress: Progress | None = None
) -> Comparison:
    """Measure two things in blocks that take turns, so that whatever else the machine does meets both.

    Each pair of blocks starts with the other of the two. A block begins with a pause and a run that is not counted, in
    which caches fill and threads of the other go to sleep. A pair counts by the medians of its blocks.

    Args:
        model: The one that is asked about.
        baseline: The one it is compared with.
        options: How often; ``iterations`` is of each.
        progress: Told how far it is.
    """
    firsts = (_timed(model), _timed(baseline))
    samples: tuple[list[int], list[int]] = ([], [])
    medians: tuple[list[float], list[float]] = ([], [])
    with _resting_collector():
        for run in (model, baseline):
            _repeat(run, options.warmup)
        block = _block_size(options, model, baseline)
        pairs = math.ceil(options.iterations / block)
        for turn in _turns(options, pairs, progress, samples[0]):
            for side in (0, 1) if turn % 2 == 0 else (1, 0):
                times = _block((model, baseline)[side], block)
                samples[side].extend(times)
                medians[side].append(percentile(times, 50))
    results = [
        LatencyResult(_milliseconds(times), first / _NS_PER_MS) for times, first in zip(samples, firsts, strict=True)
    ]
    return Comparison(results[0], results[1], compare_pairs(*medians), block)


def _timed(run: Run) -> int:
    started = time.perf_counter_ns()
    run()
    return time.perf_counter_ns() - started


def _repeat(run: Run, times: int) -> None:
    for _ in range(times):
        run()


def _block(run: Run, size: int) -> list[int]:
    time.sleep(SETTLE_S)
    run()
    return [_timed(run) for _ in range(size)]


def _block_size(options: LatencyOptions, model: Run, baseline: Run) -> int:
    if options.duration_s is None:
        return max(1, options.iterations // PAIRS)
    one_pair_s = (_timed(model) + _timed(baseline)) / 1e9
    time_for_runs_s = options.duration_s / PAIRS - 2 * SETTLE_S - one_pair_s
    return max(1, math.floor(time_for_runs_s / one_pair_s))


def _turns(options: LatencyOptions, count: int, progress: Progress | None, samples: list[int]) -> Iterator[int]:
    """Yield numbers until the count or the time is reached, at least one; reports progress in between."""
    started = reported = time.perf_counter_ns()
    turn = 0
    while True:
        yield turn
        turn += 1
        now = time.perf_counter_ns()
        share = turn / count if options.duration_s is None else (now - started) / 1e9 / options.duration_s
        if progress is not None and (now - reported >= PROGRESS_NS or share >= 1):
            progress(len(samples), min(share, 1.0))
            reported = now
        if share >= 1:
            return


@contextmanager
def _resting_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _milliseconds(samples: list[int]) -> tuple[float, ...]:
    return tuple(sample / _NS_PER_MS for sample in samples)
