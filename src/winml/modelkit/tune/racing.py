"""Runs races of candidates in turns, each candidate in its own process; losers are dropped.

Losers are determined by ``profile/race.py``. Times are saved after each turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from winml.modelkit.errors import MeasureError
from winml.modelkit.profile.race import RUNGS, confidence_of_race, is_decided, losers
from winml.modelkit.profile.statistics import Ratio, percentile
from winml.modelkit.progress import Progress
from winml.modelkit.tune.candidates import PLAIN
from winml.modelkit.tune.contestants import Contestants
from winml.modelkit.tune.records import Candidate
from winml.modelkit.tune.state import Failure, TuneState

_BLOCK_MS = 200.0
"""Chosen: long compared with the pause before a block (50 ms), short compared with other load of a shared machine."""
_MOST_RUNS = 100
"""Chosen: for runs of microseconds, more runs do not stabilize the median."""


def block_size(run_ms: float) -> int:
    """Return the number of consecutive runs in one turn, by the time of one run of the plain file.

    >>> block_size(50.0), block_size(1000.0), block_size(0.01)
    (4, 1, 100)
    """
    return min(max(math.ceil(_BLOCK_MS / max(run_ms, _BLOCK_MS / _MOST_RUNS)), 1), _MOST_RUNS)


def times_of_runs(times: Mapping[str, Sequence[float]], candidates: Sequence[Candidate]) -> dict[str, list[float]]:
    """Return the times per run, divided by the number of parallel runs."""
    callers = {candidate.name: candidate.callers for candidate in candidates}
    return {name: [time / callers[name] for time in series] for name, series in times.items()}


@dataclass
class Race:
    """One race of candidates, in the order of preference."""

    name: str
    candidates: Sequence[Candidate]
    state: TuneState
    size: int
    """Number of runs in a block."""
    is_over: Callable[[], bool] = lambda: False
    """Returns True after the time limit: no turn then starts beyond the first rung."""
    progress: Progress | None = None
    rungs: Sequence[int] = RUNGS
    begun: str = ""
    """Name of an earlier race; its turns are reused if all candidates took part in it."""
    dropped: dict[str, Ratio] = field(default_factory=dict)
    """Dropped candidate → ratio of its time to the fastest at that point."""

    @property
    def times(self) -> dict[str, list[float]]:
        """Times of each candidate by turn, in milliseconds."""
        return self.state.turns(self.name)

    @property
    def times_of_runs(self) -> dict[str, list[float]]:
        """Times per run of each candidate by turn, divided by the number of parallel runs."""
        return times_of_runs(self.times, self.candidates)

    @property
    def standing(self) -> list[Candidate]:
        """Remaining candidates, in the order of preference."""
        return [racer for racer in self.candidates if racer.name not in self.dropped and racer.name in self.times]

    def run(self, running: Contestants, model_of: Callable[[Candidate], Path]) -> None:
        """Run the remaining turns of the race.

        Args:
            running: Processes of the candidates.
            model_of: Returns the file of a candidate; called only if a turn remains.

        Raises:
            MeasureError: the plain file does not run any more.
        """
        names = [candidate.name for candidate in self.candidates]
        if set(self.times) != set(names):
            self.state.keep_turns(self.name, self._reusable_turns(names))
        is_open = False
        while self._drop_losers():
            if self.is_over() and self._count_turns() >= self.rungs[0]:
                return
            if not is_open:
                facts = {candidate.name: self.state.facts(candidate.name) for candidate in self.standing}
                running.begin_race({name: fact.peak_bytes if fact else 0 for name, fact in facts.items()})
                is_open = True
            self._run_turn(running, model_of)

    def _reusable_turns(self, names: Sequence[str]) -> dict[str, list[float]]:
        """Return turns with all named candidates, from the current or the earlier race."""
        for race in (self.name, self.begun):
            times = self.state.turns(race)
            if names and all(name in times for name in names) and len({len(times[name]) for name in names}) == 1:
                return {name: times[name] for name in names}
        return {name: [] for name in names}

    def _drop_losers(self) -> int:
        """Drop losers at each completed rung; return the turns of the next rung, 0 if the race is over."""
        self.dropped.clear()
        confidence = confidence_of_race(len(self.candidates), len(self.rungs) - 1)
        for rung in self.rungs:
            if len(self.standing) < 2:
                return 0
            if self._count_turns() < rung:
                return rung
            if rung != self.rungs[-1]:
                times = {name: series[:rung] for name, series in self.times_of_runs.items()}
                self.dropped |= losers(times, [candidate.name for candidate in self.standing], confidence)
                if is_decided(times, [candidate.name for candidate in self.standing]):
                    return 0
        return 0

    def _count_turns(self) -> int:
        """Return the number of turns that all remaining candidates completed."""
        return min(len(self.times[candidate.name]) for candidate in self.standing)

    def _run_turn(self, running: Contestants, model_of: Callable[[Candidate], Path]) -> None:
        """Time a block of each remaining candidate; the first candidate changes from turn to turn."""
        for name in self.dropped:
            running.drop(name)
        turn, standing, times = self._count_turns(), self.standing, self.times
        start = turn % len(standing)
        for candidate in (*standing[start:], *standing[:start]):
            try:
                times[candidate.name].append(percentile(running.block(candidate, model_of, self.size), 50))
            except MeasureError as error:  # noqa: PERF203 - one of a few blocks
                if candidate.name == PLAIN:
                    raise
                running.drop(candidate.name)
                del times[candidate.name]
                self.state.keep_failure(candidate.name, Failure("failed", error.message))
                self.candidates = [rival for rival in self.candidates if rival.name != candidate.name]
        self.state.keep_turns(self.name, times)
        if self.progress is not None:
            self.progress(turn + 1, (turn + 1) / self.rungs[-1])
