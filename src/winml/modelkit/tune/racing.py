"""Runs a race: candidates in turns, each in its own process, and who loses drops out.

Which one loses is decided in ``measure/statistics.py``. After each turn the times are on disk.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from winml.modelkit.compare.fidelity import QualitySamples
from winml.modelkit.errors import MeasureError, WriteError
from winml.modelkit.measure.race import RUNGS, confidence_of_race, is_decided, losers
from winml.modelkit.measure.statistics import Ratio, percentile
from winml.modelkit.results.tuning import Candidate
from winml.modelkit.runtime.host import available_bytes
from winml.modelkit.runtime.processes import start_python
from winml.modelkit.tune.candidates import PLAIN
from winml.modelkit.tune.state import Failure, TuneState

# --- Starts the process of a candidate and asks it; ``worker.py`` is what runs there.
#
# A candidate whose process ends, hangs or answers with an error has lost, with that reason. Decides nothing.


LONGEST_S = 600.0
"""Chosen: a provider that compiles a large model when a session opens takes minutes; one that hangs never ends."""
_EXIT_S = 5.0
"""Chosen: time a process has to end by itself."""


class Contestant:
    """The process of one candidate; it starts with the first question."""

    def __init__(self, name: str) -> None:
        """Name it; for messages."""
        self._name = name
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors: IO[str] | None = None

    def ask(self, what: str, **arguments: object) -> dict[str, Any]:
        """Return the answer of the process.

        Raises:
            MeasureError: it says what is wrong, has ended, or does not answer.
            WriteError: it cannot write a file.
        """
        process = self._started()
        assert process.stdin is not None  # a pipe
        with contextlib.suppress(OSError):  # it has ended: nothing comes back
            process.stdin.write(f"{json.dumps({'do': what, **arguments})}\n")
            process.stdin.flush()
        try:
            line = self._lines.get(timeout=LONGEST_S)
        except queue.Empty:
            self.close()
            raise MeasureError(f"{self._name}: did not respond within {LONGEST_S:.0f} s") from None
        if line is None:
            raise MeasureError(f"{self._name}: its process ended{self._last_words()}")
        output: dict[str, Any] = json.loads(line)
        if "error" in output:
            kind = WriteError if output["is_unwritten"] else MeasureError
            raise kind(output["error"], hint=output["hint"])
        return output

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None  # a pipe
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        if self._errors is not None:
            self._errors.close()

    def __enter__(self) -> Contestant:  # noqa: PYI034 - typing has Self from Python 3.11 on
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the process."""
        self.close()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._lines = queue.Queue()
            # Closed with the process.
            self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
            self._process = start_python(
                "winml.modelkit.tune.worker",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                encoding="utf-8",
            )
            threading.Thread(target=_read_lines, args=(self._process.stdout, self._lines), daemon=True).start()
        return self._process

    def _last_words(self) -> str:
        """Return the last line the process wrote on stderr, and how it ended."""
        code = None if self._process is None else self._process.wait()
        words: list[str] = []
        if self._errors is not None:
            self._errors.seek(0)
            words = [line.strip() for line in self._errors if line.strip()]
        return f" with exit code {code}{f': {words[-1]}' if words else ''}"


def _read_lines(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    with contextlib.suppress(ValueError):  # closed while it was read
        for line in stream:
            lines.put(line)
    lines.put(None)


class Contestants:
    """The processes of a tuning, each opened on its file.

    In a race all stay open, or each ends when it has answered: a warm session beside a cold one would win by that.
    """

    def __init__(self, folder: Path) -> None:
        """Open none yet.

        Args:
            folder: Folder of the values that all are run on.
        """
        self._folder = folder
        self._open: dict[str, Contestant] = {}
        self._stay_open = True

    def measure(self, candidate: Candidate, model: Path, samples: QualitySamples | None) -> dict[str, Any]:
        """Open a candidate in a fresh process; return what that took, and how near its answers are.

        Args:
            candidate: Which.
            model: Its file.
            samples: What its answers are compared on; None: they are not.

        Raises:
            MeasureError: it does not run, or needs fixed sizes.
        """
        self.drop(candidate.name)
        compared: dict[str, Any] = {}
        try:
            opened = self._opened(candidate, model)
            if samples is not None:
                compared = self._open[candidate.name].ask("compare", folder=str(self._folder), samples=asdict(samples))
        except MeasureError:
            self.drop(candidate.name)
            raise
        available = available_bytes()
        if available is not None and opened["peak_bytes"] > available:  # no room for another one like it
            self.drop(candidate.name)
        return {**opened, **compared}

    def begin_race(self, peak_bytes: Mapping[str, int]) -> None:
        """Decide for a whole race whether all of its processes stay open, or none.

        Args:
            peak_bytes: The most memory that each took, by name.
        """
        for name in [name for name in self._open if name not in peak_bytes]:
            self.drop(name)
        # What the open ones hold is not available any more.
        missing = sum(size for name, size in peak_bytes.items() if name not in self._open)
        available = available_bytes()
        self._stay_open = available is None or missing <= available
        if not self._stay_open:
            self.close()

    def block(self, candidate: Candidate, model_of: Callable[[Candidate], Path], size: int) -> list[float]:
        """Return the times of a block of runs of a candidate, in milliseconds for one run of all its callers.

        Raises:
            MeasureError: it does not run any more.
        """
        if candidate.name not in self._open:
            self._opened(candidate, model_of(candidate))
        times: list[float] = self._open[candidate.name].ask("block", size=size)["runs_ms"]
        if not self._stay_open:
            self.drop(candidate.name)
        return times

    @property
    def open_names(self) -> tuple[str, ...]:
        """Whose processes are open."""
        return tuple(self._open)

    def drop(self, name: str) -> None:
        """End the process of a candidate, where there is one."""
        if (contestant := self._open.pop(name, None)) is not None:
            contestant.close()

    def close(self) -> None:
        """End all of them."""
        for name in list(self._open):
            self.drop(name)

    def _opened(self, candidate: Candidate, model: Path) -> dict[str, Any]:
        contestant = self._open[candidate.name] = Contestant(candidate.name)
        return contestant.ask("open", path=str(model), folder=str(self._folder), run=candidate.as_record()["run"])


_BLOCK_MS = 200.0
"""Chosen: long beside the pause before a block (50 ms), short beside what else a shared machine does."""
MOST_RUNS = 100
"""Chosen: of runs of microseconds, more do not make a median steadier."""


def block_size(run_ms: float) -> int:
    """Return the runs in a row of one turn, by the time of one run of the plain file.

    >>> block_size(50.0), block_size(1000.0), block_size(0.01)
    (4, 1, 100)
    """
    return min(max(math.ceil(_BLOCK_MS / max(run_ms, _BLOCK_MS / MOST_RUNS)), 1), MOST_RUNS)


def times_of_runs(times: Mapping[str, Sequence[float]], candidates: Sequence[Candidate]) -> dict[str, list[float]]:
    """Return the time that one run takes of the machine, where several run at a time."""
    callers = {candidate.name: candidate.callers for candidate in candidates}
    return {name: [time / callers[name] for time in series] for name, series in times.items()}


@dataclass
class Race:
    """One race between candidates, in the order of preference."""

    name: str
    candidates: Sequence[Candidate]
    state: TuneState
    size: int
    """Runs of a block."""
    is_over: Callable[[], bool] = lambda: False
    """Says whether the time is up: then no turn begins beyond those of the first rung."""
    progress: Callable[[int, float], None] | None = None
    rungs: Sequence[int] = RUNGS
    begun: str = ""
    """An earlier race, whose turns are the first of this one where all of these took part in it."""
    dropped: dict[str, Ratio] = field(default_factory=dict)
    """Who dropped out, and the time over that of the fastest then."""

    @property
    def times(self) -> dict[str, list[float]]:
        """The time of each candidate in each turn it took part in, in milliseconds."""
        return self.state.turns(self.name)

    @property
    def standing(self) -> list[Candidate]:
        """Who is in, in the order of preference."""
        return [item for item in self.candidates if item.name not in self.dropped and item.name in self.times]

    def run(self, running: Contestants, model_of: Callable[[Candidate], Path]) -> None:
        """Run what is left of the race.

        Args:
            running: Their processes.
            model_of: Returns the file of a candidate; asked only where a turn is left to run.

        Raises:
            MeasureError: the plain file does not run any more.
        """
        names = [item.name for item in self.candidates]
        if set(self.times) != set(names):
            self.state.keep_turns(self.name, self._turns_so_far(names))
        is_open = False
        while self._eliminated():
            if self.is_over() and self._turns() >= self.rungs[0]:
                return
            if not is_open:
                facts = {item.name: self.state.facts(item.name) for item in self.standing}
                running.begin_race({name: found.peak_bytes if found else 0 for name, found in facts.items()})
                is_open = True
            self._run_turn(running, model_of)

    def _turns_so_far(self, names: Sequence[str]) -> dict[str, list[float]]:
        """Return the turns that all of these took part in together, with others in this race or in an earlier one."""
        for race in (self.name, self.begun):
            times = self.state.turns(race)
            if names and all(name in times for name in names) and len({len(times[name]) for name in names}) == 1:
                return {name: times[name] for name in names}
        return {name: [] for name in names}

    def _eliminated(self) -> int:
        """Let who loses drop out at each rung that is reached; return the turns of the next, 0 where none is left."""
        self.dropped.clear()
        confidence = confidence_of_race(len(self.candidates), len(self.rungs) - 1)
        for rung in self.rungs:
            if len(self.standing) < 2:
                return 0
            if self._turns() < rung:
                return rung
            if rung != self.rungs[-1]:
                times = {name: series[:rung] for name, series in self._times_of_runs().items()}
                self.dropped |= losers(times, [item.name for item in self.standing], confidence)
                if is_decided(times, [item.name for item in self.standing]):
                    return 0
        return 0

    def _turns(self) -> int:
        return min(len(self.times[item.name]) for item in self.standing)

    def _times_of_runs(self) -> dict[str, list[float]]:
        return times_of_runs(self.times, self.candidates)

    def _run_turn(self, running: Contestants, model_of: Callable[[Candidate], Path]) -> None:
        """Time a block of each that is in; successive turns start with another one."""
        for name in self.dropped:
            running.drop(name)
        turn, standing, times = self._turns(), self.standing, self.times
        first = turn % len(standing)
        for item in (*standing[first:], *standing[:first]):
            try:
                times[item.name].append(percentile(running.block(item, model_of, self.size), 50))
            except MeasureError as error:  # noqa: PERF203 - one of a few blocks
                if item.name == PLAIN:
                    raise
                running.drop(item.name)
                del times[item.name]
                self.state.keep_failure(item.name, Failure("failed", error.message))
                self.candidates = [other for other in self.candidates if other.name != item.name]
        self.state.keep_turns(self.name, times)
        if self.progress is not None:
            self.progress(turn + 1, (turn + 1) / self.rungs[-1])
