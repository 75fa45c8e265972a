"""One tuning from the plain file to the winner: builds the candidates, judges them, and lets them race.

1. The plain file is exported, and the values that all are run on are drawn.
2. Every form is built and judged, and a short race tells how fast each is, the wrong ones too.
3. A wrong form that is faster than every right one is worth a search for the modules that must stay in float.
4. The right ones race. Who is slower drops out; of those that cannot be told apart, the simplest wins.
5. Variations of the winner race beside it: levels, numbers of threads, a compiled file.
6. The winner is built once more in its folder, from what is there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from winml.modelkit.errors import InternalError, VerificationError, WinMLError, WriteError
from winml.modelkit.file_names import BUILT_MODEL_NAME, TUNED_NAME
from winml.modelkit.measure.elimination import RUNGS, Choice, choose
from winml.modelkit.progress import StepClock
from winml.modelkit.results.build_result import BuildResult
from winml.modelkit.results.tuning import Candidate, CandidateFacts, TuneResult
from winml.modelkit.tune.answering import Answer
from winml.modelkit.tune.building import CandidateBuilds, TunedModel
from winml.modelkit.tune.candidates import PLAIN, TuningMachine, plan_variations
from winml.modelkit.tune.contestants import Contestants
from winml.modelkit.tune.judging import Judge
from winml.modelkit.tune.mixed_forms import FORMS, MixedForms
from winml.modelkit.tune.options import TuneOptions
from winml.modelkit.tune.racing import Race, block_size, times_of_runs
from winml.modelkit.tune.state import Failure, TuneState
from winml.modelkit.tune.worker import values_path

__all__ = ["Contest", "ContestTask"]

RIGHT, VARIATIONS = "right", "variations"
"""The races behind that of the forms."""
FIRST_RUNG = (6,)
"""Turns of the race that only tells which forms are worth a search. Chosen: the fewest with an interval."""
SAME_SIZE = 1.01
"""Chosen: files whose sizes differ by less count as equally large, and the simpler one wins."""


@dataclass(frozen=True)
class ContestTask:
    """What is tuned."""

    shown: str
    """The model as the user wrote it."""
    source: TunedModel
    options: TuneOptions
    machine: TuningMachine
    folder: Path
    progress: Callable[[int, float], None] | None = None


@dataclass
class Contest:
    """One tuning, in a folder it holds."""

    task: ContestTask
    state: TuneState
    plan: tuple[Candidate, ...]
    clock: StepClock
    variations: tuple[Candidate, ...] = ()
    _started: float = field(default_factory=time.monotonic)
    _skipped: dict[str, Failure] = field(default_factory=dict)
    """Why candidates were not tried, by name; another run may try them."""

    def __post_init__(self) -> None:
        """Prepare; nothing is made yet."""
        self._builds = CandidateBuilds(self.task.source, self.task.folder)
        self._running = Contestants(self._builds.place)
        self._judge = Judge(self.task.options, self._builds.place, self.task.shown, self._running)

    def run(self) -> TuneResult:
        """Run all that is left of the tuning, and build the winner."""
        with contextlib.closing(self._running):
            choice = self._winner()
        with self.clock.step("answer") as step:
            winner = self._named(choice.winner)
            built = self._builds.build_in(self.task.folder / TUNED_NAME, winner, self._rules_of(winner))
            step.summary = str(built.folder)
        return self._answer(choice, built)

    def _winner(self) -> Choice:
        with self.clock.step("plain file") as step:
            self._measure_plain()
            step.summary = f"{self._plain_facts.size_bytes:,} bytes"
        with self.clock.step("forms") as step:
            forms = [self.plan[0], *(item for item in self.plan[1:] if not item.part_of and self._make(item))]
            self._race(FORMS, forms, FIRST_RUNG)
            for item in forms:
                if not self._is_right(item):
                    self._running.drop(item.name)
            step.summary = f"{len(forms)} run, {sum(map(self._is_right, forms))} of them right"
        with self.clock.step("modules in float") as step:
            parts = [item for item in self.plan if item.part_of and self._make_part(item)]
            step.summary = f"{len(parts)} mixed forms"
        with self.clock.step("race") as step:
            right = [item for item in self.plan if self.state.facts(item.name) and self._is_right(item)]
            # Of sizes nothing is left to find out: a few turns tell what the files take.
            race = self._race(RIGHT, right, FIRST_RUNG if self.task.options.target == "size" else None)
            best = self._named(self._choice(race).winner)
            step.summary = f"{len(right)} right ones, {best.name} wins"
        with self.clock.step("variations") as step:
            race, choice = self._race_variations(race, best)
            step.summary = f"{len(self.variations)} of {best.name}, {choice.winner} wins"
        return choice

    @property
    def _candidates(self) -> tuple[Candidate, ...]:
        return (*self.plan, *self.variations)

    @property
    def _plain_facts(self) -> CandidateFacts:
        facts = self.state.facts(PLAIN)
        assert facts is not None  # it is measured first
        return facts

    def _named(self, name: str) -> Candidate:
        return next(item for item in self._candidates if item.name == name)

    def _is_over(self) -> bool:
        minutes = self.task.options.budget_minutes
        return minutes is not None and time.monotonic() - self._started > 60 * minutes

    def _is_right(self, candidate: Candidate) -> bool:
        facts = self.state.facts(candidate.name)
        return candidate.name == PLAIN or (facts is not None and not self._judge.reason_wrong(facts))

    def _measure_plain(self) -> None:
        """Make the plain file, draw the values, and measure it; whatever goes wrong ends the tuning."""
        plain = self.plan[0]
        if self.state.values is not None and self.state.facts(PLAIN) is not None:
            return
        model = self._builds.build(plain).model_path
        told = self._judge.record_values(model)
        facts, run_ms = self._judge.measure(plain, model, told["draws"])
        self.state.keep_values({**told, "run_ms": run_ms, "block": block_size(run_ms)})
        self.state.keep_facts(PLAIN, self._judge.with_scores(facts, plain, model, None))

    def _draw_values_again(self) -> None:
        """Draw the same values again where their files went with the candidates of a tuning that was done."""
        if not values_path(self._builds.place, 0).is_file():
            self._judge.record_values(self._builds.build(self.plan[0]).model_path)

    @property
    def _values(self) -> Mapping[str, Any]:
        assert self.state.values is not None  # they are drawn with the plain file
        return self.state.values

    def _make(self, candidate: Candidate) -> bool:
        """Make and measure a candidate, unless that was done; say whether it runs."""
        if self.state.facts(candidate.name) is not None:
            return self.state.failure(candidate.name) is None
        if self.state.failure(candidate.name) is not None:
            return False
        if self._is_over():
            self._skipped[candidate.name] = Failure("not tried", "the time was up (--budget)")
            return False
        self._draw_values_again()
        try:
            model = self._builds.build(candidate, self._rules_of(candidate)).model_path
            facts, _ = self._judge.measure(candidate, model, self._values["draws"])
            facts = self._judge.with_scores(facts, candidate, model, self._plain_facts)
        except (InternalError, WriteError):
            raise
        except VerificationError as error:
            self.state.keep_failure(candidate.name, Failure("wrong", error.message))
            return False
        except WinMLError as error:
            self.state.keep_failure(candidate.name, Failure("failed", error.message))
            return False
        self.state.keep_facts(candidate.name, facts)
        return True

    def _make_part(self, candidate: Candidate) -> bool:
        """Make a form with some modules in float, where its whole is fast enough to be worth it and not right."""
        mixed = MixedForms(self.plan, self.state, self._judge, self._builds.place, self._is_over)
        if (against := mixed.reason_against(candidate)) is not None:
            self._skipped[candidate.name] = against
            return False
        is_known = self.state.rules(candidate.name) is not None or self.state.failure(candidate.name) is not None
        if not is_known and (self._is_over() or not mixed.find_rules(candidate, self._model_of(self.plan[0]))):
            self._skipped[candidate.name] = Failure("not tried", "the time was up (--budget)")
            return False
        return self.state.failure(candidate.name) is None and self._make(candidate)

    def _rules_of(self, candidate: Candidate) -> Mapping[str, str] | None:
        """Return the modules in float of a mixed form, and of its variations."""
        return self.state.rules(candidate.name.partition("+")[0]) if candidate.part_of else None

    def _model_of(self, candidate: Candidate) -> Path:
        """Return the file of a candidate; made again where it is gone."""
        self._draw_values_again()
        path = self._builds.place / candidate.name / BUILT_MODEL_NAME
        return path if path.is_file() else self._builds.build(candidate, self._rules_of(candidate)).model_path

    def _race(self, name: str, candidates: Sequence[Candidate], rungs: Sequence[int] | None = None) -> Race:
        running = [item for item in candidates if self.state.failure(item.name) is None]
        race = Race(name, running, self.state, self._values["block"], self._is_over, self.task.progress)
        race.rungs = RUNGS if rungs is None else rungs
        race.run(self._running, self._model_of)
        return race

    def _race_variations(self, race: Race, best: Candidate) -> tuple[Race, Choice]:
        """Let the winner race with its variations, and return the race that decides."""
        if self.task.options.target != "size":
            self.variations = plan_variations(best, self.task.options, self.task.machine)
        made = [item for item in self.variations if self._make(item) and self._is_right(item)]
        if not made:
            return race, self._choice(race)
        # The plain file runs along to be measured beside; where it lost a race, it does not enter another one.
        plain = [] if best.name == PLAIN else [self.plan[0]]
        race = self._race(VARIATIONS, [*plain, best, *made])
        return race, self._choice(race, lost=plain)

    def _choice(self, race: Race, lost: Sequence[Candidate] = ()) -> Choice:
        """Return who wins a race by the target.

        Args:
            race: The race that was run.
            lost: Who lost an earlier race, and wins only where nobody else is left.
        """
        names = [item.name for item in race.standing if item not in lost] or [item.name for item in lost]
        if self.task.options.target == "size":
            names = [item.name for item in race.candidates]
            sizes = {item.name: facts.size_bytes for item in race.candidates if (facts := self.state.facts(item.name))}
            least = min(sizes, key=lambda name: sizes[name])
            return Choice(next(name for name in names if sizes[name] <= SAME_SIZE * sizes[least]), least, None)
        return choose(times_of_runs(race.times, race.candidates), names)

    def _answer(self, choice: Choice, built: BuildResult) -> TuneResult:
        return Answer(
            task_options=self.task.options,
            machine=self.task.machine,
            shown=self.task.shown,
            candidates=self._candidates,
            state=self.state,
            judge=self._judge,
            skipped=self._skipped,
            notes=tuple(filter(None, (self.task.source.note,))),
        ).result(choice, built, self.clock.timings())
