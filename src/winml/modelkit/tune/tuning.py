"""Finds the fastest file on this machine that is still right: plans, builds, judges, races, and answers.

Composes the files beside it. What is measured is on disk before the next step begins, so the same call goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from winml.modelkit.builds.cache import only_looking, resume_identity
from winml.modelkit.builds.config import WinMLBuildConfig
from winml.modelkit.builds.identity import file_digests
from winml.modelkit.builds.plan import is_onnx_path, plan_build, request_record
from winml.modelkit.builds.planned_build import is_to_be_fetched
from winml.modelkit.compare.fidelity import QualitySamples
from winml.modelkit.errors import InternalError, UsageError, VerificationError, WinMLError, WriteError
from winml.modelkit.evaluate.data_sources import find_source, source_files
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.file_names import (
    BUILT_MODEL_NAME,
    TUNE_CANDIDATES_NAME,
    TUNE_PAGE_NAME,
    TUNE_RESULT_NAME,
    TUNE_STATE_NAME,
    TUNED_NAME,
    measured_path,
)
from winml.modelkit.flows.quantize.calibration_files import calibration_files
from winml.modelkit.found_models import onnx_file
from winml.modelkit.graph.files.output_files import refuse_existing
from winml.modelkit.graph.files.resumable_results import write_atomically
from winml.modelkit.load.load_options import declared_options
from winml.modelkit.load.request import ModelRequest, processor_folder
from winml.modelkit.measure.race import RUNGS, Choice, choose, fastest, ratio_between
from winml.modelkit.measure.statistics import NOISE
from winml.modelkit.options import options_of
from winml.modelkit.progress import StepClock, StepEvent
from winml.modelkit.quantize.precisions import FLOAT32
from winml.modelkit.report.html import render_html
from winml.modelkit.report.tuning import tuning_document
from winml.modelkit.results.build_manifest import BuildResult
from winml.modelkit.results.tuning import Candidate, CandidateFacts, TuneResult
from winml.modelkit.tune.building import CandidateBuilds, TunedModel, exported_once, tuned_model
from winml.modelkit.tune.candidates import (
    INSTEAD_OF,
    PLAIN,
    TuningMachine,
    is_requested,
    look_at_tuning_machine,
    plan_candidates,
    plan_variations,
)
from winml.modelkit.tune.module_placement import faster_in_float, group_candidates, placed_candidate
from winml.modelkit.tune.options import TuneOptions
from winml.modelkit.tune.quality_limits import QualityLimits
from winml.modelkit.tune.racing import Contestants, Race, block_size, times_of_runs
from winml.modelkit.tune.state import (
    Failure,
    TuneState,
    held_tune_folder,
    measured_candidates,
    refuse_foreign_folder,
)
from winml.modelkit.tune.tune_result import Answer
from winml.modelkit.tune.worker import values_path
from winml.modelkit.words import size_words

# --- Which forms are worth a search for the modules that stay in float, and which modules are these?
#
# A search takes most of the time of a tuning, so it is made only of a whole form that is not right, and better than
# every right one. Times nothing.


FORMATS = "forms"
"""The race of all whole forms, the wrong ones too."""


_OUT_OF_TIME = Failure("not tried", "time limit reached (--budget)")


class _TimeUp(Exception):  # noqa: N818 - no error: the search goes on with more time
    """Ends a search."""


@dataclass(frozen=True)
class MixedVariants:
    """The forms of a plan in which some modules stay in float."""

    plan: tuple[Candidate, ...]
    state: TuneState
    limits: QualityLimits
    place: Path
    """Where measurements are kept as long as a search runs."""
    is_over: Callable[[], bool]
    """Says whether the time is up: then a search ends before its next measurement."""

    def reason_against(self, candidate: Candidate) -> Failure | None:
        """Return why no search is made for a form; None where it is worth one."""
        complete = next((item for item in self.plan if item.name == candidate.part_of), None)
        facts = None if complete is None else self.state.facts(complete.name)
        if complete is None or self.state.failure(complete.name) is not None:
            return Failure("not needed", f"{candidate.part_of} failed")
        assert facts is not None  # one that was left out leaves out its parts
        if not self.limits.reason_wrong(facts):
            return Failure("not needed", f"{complete.name} is within the quality limit")
        if not self._beats_the_right(complete, facts):
            return Failure("not needed", f"{complete.name} is not better than the candidates within the quality limit")
        return None

    def find_rules(self, candidate: Candidate, plain: Path) -> bool:
        """Look for the modules that stay in float; what is measured on the way survives an interruption.

        Args:
            candidate: The form.
            plain: The plain file.

        Returns:
            Whether the search came to an end before the time was up.
        """
        if (same := self._searched_alike(candidate)) is not None:
            self._take_rules(candidate, same)
            return True
        facts, values = self.state.facts(PLAIN), self.state.values
        assert facts is not None  # the plain file is measured first
        assert values is not None  # and values are drawn with it
        measured = measured_path(self.place / candidate.name)
        try:
            found = self.limits.find_rules(
                candidate, plain, measured, self._end_in_time, plain_facts=facts, is_as_drawn=values["is_as_drawn"]
            )
        except (InternalError, WriteError):
            raise
        except _TimeUp:
            return False
        except WinMLError as error:
            self.state.keep_failure(candidate.name, Failure("failed", error.message))
            return True
        listed = found.exclude_list
        assert listed is not None  # a target was given
        if listed.is_met:
            self.state.keep_rules(candidate.name, listed.rules)
        else:
            self.state.keep_failure(candidate.name, Failure("wrong", self.limits.unmet_words(listed)))
        return True

    def _end_in_time(self) -> None:
        if self.is_over():
            raise _TimeUp

    def _beats_the_right(self, complete: Candidate, facts: CandidateFacts) -> bool:
        """Say whether a wrong form is better than every right one by the target."""
        measured = [(item, found) for item in self.plan if (found := self.state.facts(item.name)) is not None]
        right = [(item, found) for item, found in measured if not self.limits.reason_wrong(found)]
        if self.limits.options.target == "size":
            return all(facts.size_bytes < found.size_bytes for _, found in right)
        times = times_of_runs(self.state.turns(FORMATS), self.plan)
        names = [item.name for item, _ in right if times.get(item.name)]
        if not names or not times.get(complete.name):
            return False
        ratio = ratio_between(times, complete.name, fastest(times, names))
        # On a busy machine the interval is wide or says little, and a form that may be faster is worth the search.
        return ratio.is_disturbed or ratio.low is None or ratio.low < 1 - NOISE

    def _searched_alike(self, candidate: Candidate) -> Candidate | None:
        """Return a candidate of the same numbers, run elsewhere, for which the modules were looked for already."""
        alike = (
            item for item in self.plan if item.part_of and item.sections == candidate.sections and item is not candidate
        )
        return next((item for item in alike if self._was_searched(item)), None)

    def _was_searched(self, candidate: Candidate) -> bool:
        failure = self.state.failure(candidate.name)
        return self.state.rules(candidate.name) is not None or (failure is not None and failure.status == "wrong")

    def _take_rules(self, candidate: Candidate, same: Candidate) -> None:
        """Take over what came of a search for another candidate."""
        rules, failure = self.state.rules(same.name), self.state.failure(same.name)
        if rules is not None:
            self.state.keep_rules(candidate.name, rules)
        elif failure is not None:
            self.state.keep_failure(candidate.name, failure)


# --- One tuning from the plain file to the winner: builds the candidates, judges them, and lets them race.
#
# 1. The plain file is exported, and the values that all are run on are drawn.
# 2. Every form is built and judged, and a short race tells how fast each is, the wrong ones too.
# 3. A wrong form that is faster than every right one is worth a search for the modules that must stay in float.
# 4. The right ones race. Who is slower drops out; of those that cannot be told apart, the simplest wins.
# 5. Of a winner with integers for a named provider, groups of modules are put back into float, and race beside it.
# 6. Variations of the winner race beside it: levels, numbers of threads, a compiled file.
# 7. The winner is built once more in its folder, from what is there.


RIGHT, PLACEMENT, PLACED, VARIATIONS = "right", "placement", "placed", "variations"
"""The races behind that of the forms."""
FIRST_RUNG = (6,)
"""Turns of the race that only tells which forms are worth a search. Chosen: the fewest with an interval."""
_SIMULATED_RUNG = (1,)
"""Turns of a race on a simulated device, whose times decide nothing."""
_SAME_SIZE = 1.01
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
class _Contest:
    """One tuning, in a folder it holds."""

    task: ContestTask
    state: TuneState
    plan: tuple[Candidate, ...]
    clock: StepClock
    placements: tuple[Candidate, ...] = ()
    variations: tuple[Candidate, ...] = ()
    _started: float = field(default_factory=time.monotonic)
    _skipped: dict[str, Failure] = field(default_factory=dict)
    """Why candidates were not tried, by name; another run may try them."""

    def __post_init__(self) -> None:
        """Prepare; nothing is made yet."""
        self._builds = CandidateBuilds(self.task.source, self.task.folder)
        self._running = Contestants(self._builds.place)
        processors = processor_folder(self.task.source.plan(None).onnx_path or self.task.source.request)
        self._limits = QualityLimits(self.task.options, self._builds.place, self.task.shown, self._running, processors)

    def run(self) -> TuneResult:
        """Run all that is left of the tuning, and build the winner."""
        while True:
            with contextlib.closing(self._running):
                choice = self._winner()
            with self.clock.step("answer") as step:
                winner = self._named(choice.winner)
                try:
                    built = self._builds.build_in(self.task.folder / TUNED_NAME, winner, self._rules_of(winner))
                except VerificationError as error:
                    if winner.name == PLAIN:
                        raise
                    # The others go on without it; what was measured of them is kept.
                    self.state.keep_failure(winner.name, Failure("wrong", error.message))
                    step.summary = f"{winner.name} is wrong"
                    continue
                step.summary = str(built.folder)
            return self._answer(choice, built)

    def _winner(self) -> Choice:
        with self.clock.step("plain file") as step:
            self._measure_plain()
            step.summary = size_words(self._plain_facts.size_bytes)
        with self.clock.step("forms") as step:
            forms = [self.plan[0], *(item for item in self.plan[1:] if not item.part_of and self._make_form(item))]
            self._race(FORMATS, forms, _SIMULATED_RUNG if self.task.options.is_simulated else FIRST_RUNG)
            for item in forms:
                if not self._is_right(item):
                    self._running.drop(item.name)
            step.summary = f"{len(forms)} measured, {sum(map(self._is_right, forms))} within the quality limit"
        with self.clock.step("modules in float") as step:
            parts = [item for item in self.plan if item.part_of and self._make_part(item)]
            step.summary = f"{len(parts)} mixed variants"
        with self.clock.step("race") as step:
            right = [item for item in self.plan if self.state.facts(item.name) and self._is_right(item)]
            # Of sizes nothing is left to find out: a few turns tell what the files take.
            race = self._race(RIGHT, right, self._rungs_of_right, begun=FORMATS)
            best = self._named(self._choice(race).winner)
            step.summary = f"{len(right)} within the quality limit, {best.name} wins"
        with self.clock.step("placement") as step:
            race, best, step.summary = self._race_placements(race, best)
        with self.clock.step("variations") as step:
            race, choice = self._race_variations(race, best)
            tried = sum(self.state.facts(item.name) is not None for item in self.variations)
            verdict = f", {choice.winner} wins" if tried or not self.variations else ""
            step.summary = f"{tried} of {len(self.variations)} of {best.name} tried{verdict}"
        return choice

    @property
    def _candidates(self) -> tuple[Candidate, ...]:
        return (*self.plan, *self.placements, *self.variations)

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
        return candidate.name == PLAIN or (facts is not None and not self._limits.reason_wrong(facts))

    def _measure_plain(self) -> None:
        """Make the plain file, draw the values, and measure it; whatever goes wrong ends the tuning."""
        plain = self.plan[0]
        if self.state.values is not None and self.state.facts(PLAIN) is not None:
            return
        model = self._builds.build(plain).model_path
        reported = self._limits.record_values(model)
        facts, run_ms = self._limits.measure(plain, model, QualitySamples(**reported["samples"]))
        self.state.keep_values({**reported, "run_ms": run_ms, "block": block_size(run_ms)})
        self.state.keep_facts(PLAIN, self._limits.with_scores(facts, plain, model, None))

    def _redraw_values(self) -> None:
        """Draw the same values again where their files went with the candidates of a tuning that was done."""
        if not values_path(self._builds.place).is_file():
            self._limits.record_values(self._builds.build(self.plan[0]).model_path)

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
            self._skipped[candidate.name] = _OUT_OF_TIME
            return False
        self._redraw_values()
        try:
            model = self._builds.build(candidate, self._rules_of(candidate)).model_path
            same = self.state.facts(candidate.name.partition("+")[0]) if candidate.kind == "threads" else None
            if same is not None:
                facts = self._limits.measure_same(candidate, model, same)
            else:
                facts, _ = self._limits.measure(candidate, model, QualitySamples(**self._values["samples"]))
                facts = self._limits.with_scores(facts, candidate, model, self._plain_facts)
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

    def _make_form(self, candidate: Candidate) -> bool:
        """Make a form, unless it stands in for another one that is right."""
        other = INSTEAD_OF.get(candidate.name)
        if other is not None and self._is_right(self._named(other)):
            self._skipped[candidate.name] = Failure("not needed", f"{other} is within the quality limit")
            return False
        return self._make(candidate)

    def _make_part(self, candidate: Candidate) -> bool:
        """Make a form with some modules in float, where its whole is fast enough to be worth it and not right."""
        if (skipped := self._skipped.get(candidate.part_of)) is not None:
            self._skipped[candidate.name] = skipped
            return False
        mixed = MixedVariants(self.plan, self.state, self._limits, self._builds.place, self._is_over)
        if (against := mixed.reason_against(candidate)) is not None:
            self._skipped[candidate.name] = against
            return False
        is_known = self.state.rules(candidate.name) is not None or self.state.failure(candidate.name) is not None
        if not is_known and (self._is_over() or not mixed.find_rules(candidate, self._model_of(self.plan[0]))):
            self._skipped[candidate.name] = _OUT_OF_TIME
            return False
        return self.state.failure(candidate.name) is None and self._make(candidate)

    def _rules_of(self, candidate: Candidate) -> Mapping[str, str] | None:
        """Return the modules in float of a mixed form, and of its variations."""
        return self.state.rules(candidate.name.partition("+")[0]) if candidate.part_of else None

    def _model_of(self, candidate: Candidate) -> Path:
        """Return the file of a candidate; made again where it is gone."""
        self._redraw_values()
        path = self._builds.place / candidate.name / BUILT_MODEL_NAME
        return path if path.is_file() else self._builds.build(candidate, self._rules_of(candidate)).model_path

    def _race(
        self, name: str, candidates: Sequence[Candidate], rungs: Sequence[int] | None = None, begun: str = ""
    ) -> Race:
        running = [item for item in candidates if self.state.failure(item.name) is None]
        race = Race(name, running, self.state, self._values["block"], self._is_over, self.task.progress)
        race.rungs, race.begun = RUNGS if rungs is None else rungs, begun
        race.run(self._running, self._model_of)
        return race

    @property
    def _rungs_of_right(self) -> tuple[int, ...] | None:
        """Turns of the race of the right ones; None: as many as decide."""
        if self.task.options.is_simulated:
            return _SIMULATED_RUNG
        return FIRST_RUNG if self.task.options.decides_by_size else None

    def _race_placements(self, race: Race, best: Candidate) -> tuple[Race, Candidate, str]:
        """Put groups of modules back into float, and retain what is faster by more than the noise.

        Returns:
            The race that decides, the candidate that won it, and what was done.
        """
        options = self.task.options
        if options.decides_by_size or (options.ep is None and "placement" not in options.only):
            return race, best, "not requested"
        if not is_requested("placement", options) or "quant" not in best.sections or best.kind == "float":
            return race, best, "no quantized modules to place"
        rules = self._rules_of(best)
        groups = group_candidates(best, rules, self._model_of(best))
        self.placements = tuple(groups.values())
        created = {selector: item for selector, item in groups.items() if self._make(item) and self._is_right(item)}
        if not created:
            return race, best, f"{len(groups)} groups of modules, none measured"
        plain = [] if best.name == PLAIN else [self.plan[0]]
        groups_race = self._race(PLACEMENT, [*plain, best, *created.values()])
        faster = faster_in_float(times_of_runs(groups_race.times, groups_race.candidates), best.name, created)
        if not faster:
            return race, best, f"{len(created)} groups of modules measured, none faster in float"
        placed = created[faster[0]]
        if len(faster) > 1:
            placed = placed_candidate(best, rules, dict.fromkeys(faster, FLOAT32), f"{best.name}~placed")
            self.placements = (*self.placements, placed)
            if not self._make(placed) or not self._is_right(placed):
                placed = created[faster[0]]
        final = self._race(PLACED, [*plain, best, placed])
        winner = self._named(self._choice(final, lost=plain).winner)
        return final, winner, f"{', '.join(faster)} faster in float; {winner.name} wins"

    def _race_variations(self, race: Race, best: Candidate) -> tuple[Race, Choice]:
        """Let the winner race with its variations, and return the race that decides."""
        if not self.task.options.decides_by_size:
            self.variations = plan_variations(best, self.task.options, self.task.machine)
        created = [item for item in self.variations if self._make(item) and self._is_right(item)]
        if not created:
            return race, self._choice(race)
        # The plain file runs along to be measured beside; where it lost a race, it does not enter another one.
        plain = [] if best.name == PLAIN else [self.plan[0]]
        race = self._race(VARIATIONS, [*plain, best, *created])
        return race, self._choice(race, lost=plain)

    def _choice(self, race: Race, lost: Sequence[Candidate] = ()) -> Choice:
        """Return who wins a race by the target.

        Args:
            race: The race that was run.
            lost: Who lost an earlier race, and wins only where nobody else is left.
        """
        names = [item.name for item in race.standing if item not in lost] or [item.name for item in lost]
        if self.task.options.decides_by_size:
            names = [item.name for item in race.candidates]
            sizes = {item.name: facts.size_bytes for item in race.candidates if (facts := self.state.facts(item.name))}
            least = min(sizes, key=lambda name: sizes[name])
            return Choice(next(name for name in names if sizes[name] <= _SAME_SIZE * sizes[least]), least, None)
        return choose(times_of_runs(race.times, race.candidates), names)

    def _answer(self, choice: Choice, built: BuildResult) -> TuneResult:
        return Answer(
            task_options=self.task.options,
            machine=self.task.machine,
            shown=self.task.shown,
            candidates=self._candidates,
            state=self.state,
            limits=self._limits,
            skipped=self._skipped,
            notes=tuple(filter(None, (self.task.source.note, _simulation_note(self.task.options)))),
        ).result(choice, built, self.clock.timings())


def _simulation_note(options: TuneOptions) -> str:
    if not options.is_simulated:
        return ""
    return (
        f"The device of {options.ep} is absent and simulated, so times are meaningless: the smallest file "
        "within the quality limit wins. Run the same command on the device to optimize for time."
    )


_NAME = "tune_model"
TUNE_STEPS = ("plain file", "forms", "modules in float", "race", "placement", "variations", "answer")


def tune_model(
    model: str | os.PathLike[str] | ModelRequest,
    output: str | os.PathLike[str],
    *,
    options: TuneOptions | None = None,
    export: WinMLExportConfig | None = None,
    overwrite: bool = False,
    on_step: Callable[[StepEvent], None] | None = None,
    progress: Callable[[int, float], None] | None = None,
    **flags: Any,
) -> TuneResult:
    """Find the fastest variant of a model on this machine within a quality limit.

    Measurements are stored in the folder: the same call resumes them, and returns at once if all are finished.

    Args:
        model: Hub id, checkpoint folder, ``file.py:factory``, ONNX file, or folder of a build.
        output: Folder of the tuning; the winner is the build in ``best`` below it.
        options: Limits and candidates; None: those in ``flags``.
        export: How a checkpoint is exported; None: as :func:`~winml.modelkit.build_hf_model` does.
        overwrite: Start again if the folder belongs to another tuning.
        on_step: Called when a step starts and when it ends.
        progress: Called after each turn of a race, with its number and the finished share.
        **flags: Fields of :class:`~winml.modelkit.tune.options.TuneOptions`, such as ``min_sqnr_db``; and how a
            checkpoint is loaded, as :func:`~winml.modelkit.build_hf_model` takes it.

    Returns:
        Every candidate with its time, size and quality, and the winner.

    Raises:
        ConfigError: an unknown flag, or a value of the wrong kind.
        UsageError: the request is wrong, the model has several parts, or the folder holds something else.
        InputError: files of the model are damaged.
        StageError: the model cannot be exported, or does not run.
        VerificationError: the outputs of ONNX Runtime and PyTorch differ.
    """
    requested, request = _parsed_flags(options, model, flags)
    requested.refuse_contradictions()
    folder = Path(output)
    clock = StepClock(TUNE_STEPS, on_step)
    machine = look_at_tuning_machine()
    with held_tune_folder(folder):
        requested_model = tuned_model(request, export or WinMLExportConfig())
        plan = plan_candidates(requested, machine)
        state = TuneState(folder, _request_of(requested_model, requested, machine, plan), overwrite=overwrite)
        try:
            source = exported_once(requested_model, folder.absolute(), state)
            task = ContestTask(request.model, source, requested, machine, folder.absolute(), progress)
            result = _Contest(task, state, plan, clock).run()
        except WinMLError:
            state.forget()
            raise
        _write_tune_result(result, folder)
        if all(item.status != "not tried" for item in result.candidates):
            shutil.rmtree(folder / TUNE_CANDIDATES_NAME, ignore_errors=True)
    return result


@dataclass(frozen=True)
class TuningOutlook:
    """What a tuning would do with what is there at this moment."""

    candidates: tuple[Candidate, ...]
    measured: frozenset[str]
    """Names of those that an earlier run of the same tuning has settled."""
    starts_anew: bool
    """Whether the folder belongs to another tuning, which would be removed."""


def look_at_tuning(
    request: ModelRequest, options: TuneOptions, folder: Path, *, overwrite: bool = False
) -> TuningOutlook:
    """Return what a tuning would try, and what of it is measured. Writes nothing, fetches nothing.

    Args:
        request: The model.
        options: What is looked for.
        folder: That of the tuning.
        overwrite: Start again if the folder belongs to another tuning.

    Raises:
        UsageError: the request is wrong, or the folder belongs to another tuning.
        OutputExistsError: the folder holds what no tuning wrote.
        WriteError: the folder cannot be written.
    """
    options.refuse_contradictions()
    if options.dataset is not None:
        find_source(options.dataset)
    refuse_foreign_folder(folder)
    state = folder / TUNE_STATE_NAME
    refuse_existing([state], overwrite=True)
    machine = look_at_tuning_machine()
    candidates = plan_candidates(options, machine)
    measured: frozenset[str] | None = frozenset()
    with only_looking():
        # Without a state, nothing of the model has to be known, nor read twice.
        if state.exists() and not is_to_be_fetched(plan_build(WinMLBuildConfig(), request)):
            model = tuned_model(request, WinMLExportConfig())
            identity = _request_of(model, options, machine, candidates)
            measured = measured_candidates(folder, identity, overwrite=overwrite)
    return TuningOutlook(candidates, measured or frozenset(), measured is None)


def _tuned_request(model: str | os.PathLike[str], **load: Any) -> ModelRequest:
    """Return the request of a model, which may be an ONNX file or the folder of a build.

    Raises:
        UsageError: nothing is there.
    """
    name = os.fspath(model)
    path = onnx_file(name)
    if path is None:
        return ModelRequest(model=name, **load)
    if load := {name: value for name, value in load.items() if name != "seed"}:
        raise UsageError(f"{next(iter(load))} does not apply to {path}, an ONNX file", hint="Omit it.")
    return ModelRequest(model=str(path))


def _parsed_flags(
    options: TuneOptions | None, model: str | os.PathLike[str] | ModelRequest, flags: Mapping[str, object]
) -> tuple[TuneOptions, ModelRequest]:
    """Return the options and the request that flags of both kinds make."""
    load = {option.name: flags[option.name] for option in declared_options() if option.name in flags}
    own = {name: value for name, value in flags.items() if name not in load or name in TuneOptions.model_fields}
    requested = options_of(TuneOptions, options, own, _NAME)
    return requested, model if isinstance(model, ModelRequest) else _tuned_request(model, **load)


def _request_of(
    source: TunedModel, options: TuneOptions, machine: TuningMachine, plan: tuple[Candidate, ...]
) -> dict[str, object]:
    """Return what the measurements depend on; the time that may be taken is no part of it."""
    request = {"model": source.request.model} if is_onnx_path(source.request.model) else request_record(source.request)
    # What a factory returns cannot be known, its file can.
    script = {} if source.identity.is_repeatable else {"files": file_digests(source.identity.places)}
    requested = {
        "identity": {**source.identity.record, **script},
        "request": request,
        "export": source.export.model_dump(mode="json"),
        **options.model_dump(mode="json", exclude={"budget_minutes"}),
        "machine": machine.as_record(),
        "plan": [candidate.as_record() for candidate in plan],
    }
    return resume_identity(requested, _data_digests(options))


def _data_digests(options: TuneOptions) -> dict[str, dict[str, str]]:
    """Return what is in the files of values and samples, by option; a data set of the Hub is known by its name."""
    data: dict[str, dict[str, str]] = {}
    if options.input_data is not None:
        data["input_data"] = file_digests([options.input_data])
    if options.dataset is not None:
        source = find_source(options.dataset)
        data["dataset"] = file_digests({str(path): path for path in source_files(source)})
    if options.calibration_data is not None:
        data["calibration_data"] = file_digests(calibration_files(options.calibration_data))
    return data


def _write_tune_result(result: TuneResult, folder: Path) -> None:
    """Write the answer and its page."""
    text = json.dumps(result.as_record(), indent=2, ensure_ascii=False)
    write_atomically(folder / TUNE_RESULT_NAME, f"{text}\n")
    write_atomically(folder / TUNE_PAGE_NAME, render_html(tuning_document(result)))
