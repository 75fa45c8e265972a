"""Run of one tuning, from the plain file to the winner: builds, evaluates and races the candidates.

1. The plain file is exported, and the random values of all runs are drawn.
2. Every form is built and evaluated, and a short race estimates its speed, also for forms outside the quality limit.
3. For a form outside the limit, but faster than all forms within the limit, the modules to keep in float are searched.
4. Forms within the limit race. Slower forms are dropped; among indistinguishable forms, the simplest wins. 5. If the
winner is quantized for a named provider, groups of modules are put back into float, and race with it. 6. Variations of
the winner race with it: levels, numbers of threads, a compiled file. 7. The winner is built again in its own folder,
from stored stage results.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from winml.modelkit.compare.fidelity import QualitySamples
from winml.modelkit.errors import InternalError, MeasureError, VerificationError, WinMLError, WriteError, opt
from winml.modelkit.file_names import BUILT_MODEL_NAME, TUNED_NAME
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.models.request import processor_folder
from winml.modelkit.onnx.files.graph_reading import load_by_reference
from winml.modelkit.profile.race import RUNGS, Choice, choose, ratio_between
from winml.modelkit.progress import Progress, StepClock
from winml.modelkit.quantize.precisions import FLOAT32
from winml.modelkit.transform.module_functions import graph_modules
from winml.modelkit.tune.building import CandidateBuilds, TunedModel
from winml.modelkit.tune.candidates import (
    PLAIN,
    TuningMachine,
    is_requested,
    placed_candidate,
    plan_variations,
    smaller_forms,
)
from winml.modelkit.tune.contestants import Contestants
from winml.modelkit.tune.mixed_variants import FORMATS, MixedVariants
from winml.modelkit.tune.options import TuneOptions
from winml.modelkit.tune.quality_limits import QualityLimits
from winml.modelkit.tune.racing import Race, block_size
from winml.modelkit.tune.records import Candidate, CandidateFacts, TuneResult
from winml.modelkit.tune.state import Failure, SharedValues, TuneState
from winml.modelkit.tune.tune_result import Answer
from winml.modelkit.tune.worker import values_path
from winml.modelkit.words import size_words

_RIGHT, _PLACEMENT, _PLACED, _VARIATIONS = "right", "placement", "placed", "variations"
"""Names of the races after the race of the forms."""
FIRST_RUNG = (6,)
"""Turns of the race that selects forms for a search. Chosen: the minimum for an interval."""
_SAME_SIZE = 1.01
"""Chosen: below this ratio, file sizes count as equal, and the simpler file wins."""
_MOST_GROUPS = 16
"""Chosen: a transformer has six to ten groups. If there are more, groups with the most quantized nodes are tried."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A numeric segment of a module path."""


def _time_limit_failure() -> Failure:
    return Failure("not tried", f"time limit reached ({opt.budget})")


@dataclass
class Contest:
    """One tuning, in a locked folder."""

    model_name: str
    """The model as written by the user."""
    source: TunedModel
    options: TuneOptions
    machine: TuningMachine
    folder: Path
    state: TuneState
    plan: tuple[Candidate, ...]
    clock: StepClock
    progress: Progress | None = None
    placements: tuple[Candidate, ...] = ()
    variations: tuple[Candidate, ...] = ()
    _started: float | None = None
    """Time of the first candidate after the plain file; None before."""
    _skipped: dict[str, Failure] = field(default_factory=dict)
    """Reasons for candidates that were not tried, by name; another run may try them."""

    def __post_init__(self) -> None:
        """Create the builds, processes and limits; builds nothing."""
        self._builds = CandidateBuilds(self.source, self.folder)
        self._running = Contestants(self._builds.place)
        processors = processor_folder(self.source.plan(None).onnx_path or self.source.request)
        self._limits = QualityLimits(
            self.options,
            self._builds.place,
            self.model_name,
            self._running,
            processors,
            lambda: self.state.facts(PLAIN),
        )

    def run(self) -> TuneResult:
        """Run the remaining steps of the tuning, and build the winner.

        Raises:
            WinMLError: the plain file cannot be built or measured, or its outputs are wrong.
        """
        while True:
            with contextlib.closing(self._running):
                choice = self._run_steps()
            with self.clock.step("answer") as step:
                winner = self._find_candidate(choice.winner)
                try:
                    built = self._builds.build_in(self.folder / TUNED_NAME, winner, self._float_rules(winner))
                except VerificationError as error:
                    if winner.name == PLAIN:
                        raise
                    # The tuning continues without this candidate; measurements of the others are kept.
                    self.state.keep_failure(winner.name, Failure("wrong", error.message))
                    step.summary = f"{winner.name} is wrong"
                    continue
                step.summary = str(built.folder)
            return Answer(
                options=self.options,
                machine=self.machine,
                model_name=self.model_name,
                candidates=self._all_candidates,
                state=self.state,
                limits=self._limits,
                skipped=self._skipped,
                notes=tuple(filter(None, (self.source.note, self._simulation_note()))),
            ).result(choice, built, self.clock.timings())

    def _run_steps(self) -> Choice:
        """Measure and race all candidates, step by step; return the winner, which is not built yet."""
        with self.clock.step("plain file") as step:
            self._measure_plain()
            step.summary = size_words(self._plain_facts.size_bytes)
        # The export of a large model takes longer than many candidates.
        self._started = time.monotonic() if self._started is None else self._started
        with self.clock.step("forms") as step:
            forms = [
                self.plan[0],
                *(candidate for candidate in self.plan[1:] if not candidate.part_of and self._measure_form(candidate)),
            ]
            self._run_race(FORMATS, forms, FIRST_RUNG)
            for candidate in forms:
                if not self._meets_limits(candidate):
                    self._running.drop(candidate.name)
            step.summary = f"{len(forms)} measured, {sum(map(self._meets_limits, forms))} within the limits"
        with self.clock.step("modules in float") as step:
            parts = [candidate for candidate in self._parts_by_quality() if self._measure_mixed_form(candidate)]
            step.summary = f"{len(parts)} mixed variants"
        with self.clock.step("race") as step:
            acceptable = [candidate for candidate in self.plan if self._meets_limits(candidate)]
            if not acceptable:
                self._refuse_limit()
            # If size decides, times are not needed: a few turns suffice for the table.
            rungs = FIRST_RUNG if self.options.decides_by_size else None
            race = self._run_race(_RIGHT, acceptable, rungs, begun=FORMATS)
            best = self._find_candidate(self._choose_winner(race).winner)
            step.summary = f"{len(acceptable)} within the limits, {best.name} wins"
        with self.clock.step("placement") as step:
            race, best, step.summary = self._race_placements(race, best)
        with self.clock.step("variations") as step:
            race, choice = self._race_variations(race, best)
            tried = sum(self.state.facts(candidate.name) is not None for candidate in self.variations)
            verdict = f", {choice.winner} wins" if tried or not self.variations else ""
            step.summary = f"{tried} of {len(self.variations)} of {best.name} tried{verdict}"
        return choice

    @property
    def _all_candidates(self) -> tuple[Candidate, ...]:
        return (*self.plan, *self.placements, *self.variations)

    @property
    def _plain_facts(self) -> CandidateFacts:
        facts = self.state.facts(PLAIN)
        assert facts is not None  # the plain file is measured first
        return facts

    def _refuse_limit(self) -> NoReturn:
        """Raise MeasureError: no candidate is within the limit of memory, which the plain file exceeds."""
        peaks = {
            candidate.name: facts.peak_bytes for candidate in self.plan if (facts := self.state.facts(candidate.name))
        }
        least = min(peaks, key=lambda name: peaks[name])
        winner = self.folder / TUNED_NAME
        earlier = f" {winner} is the winner of an earlier tuning, with other limits." if winner.exists() else ""
        raise MeasureError(
            f"{opt.max_peak} {self.options.max_peak}: no candidate within the quality limit stays within it; the least "
            f"of all, {least}, takes {size_words(peaks[least])}",
            hint=f"Raise {opt.max_peak}, or lower the quality limit: measured candidates are kept.{earlier}",
        )

    def _find_candidate(self, name: str) -> Candidate:
        return next(candidate for candidate in self._all_candidates if candidate.name == name)

    def _is_time_up(self) -> bool:
        minutes = self.options.budget_minutes
        if minutes is None or self._started is None:
            return False
        return time.monotonic() - self._started > 60 * minutes

    def _meets_limits(self, candidate: Candidate) -> bool:
        """Return True if a candidate was measured within the limits."""
        facts = self.state.facts(candidate.name)
        return facts is not None and not self._limits.reason_excluded(candidate, facts)

    def _measure_plain(self) -> None:
        """Build the plain file, draw the values, and measure the file; any error ends the tuning."""
        plain_candidate = self.plan[0]
        if self.state.values is not None and self.state.facts(PLAIN) is not None:
            return
        model = self._builds.build(plain_candidate).model_path
        fields = self._limits.record_values(model)
        samples = QualitySamples(**fields.pop("samples"))
        facts, run_ms = self._limits.measure(plain_candidate, model, samples)
        self.state.keep_values(SharedValues(**fields, samples=samples, run_ms=run_ms, block=block_size(run_ms)))
        self.state.keep_facts(PLAIN, self._limits.with_scores(facts, plain_candidate, model, None))

    def _redraw_values(self) -> None:
        """Draw the same values again if their files were removed with the candidates of a completed tuning."""
        if not values_path(self._builds.place).is_file():
            self._limits.record_values(self._builds.build(self.plan[0]).model_path)

    @property
    def _shared_values(self) -> SharedValues:
        assert self.state.values is not None  # values are drawn with the plain file
        return self.state.values

    def _measure_candidate(self, candidate: Candidate) -> bool:
        """Build and measure a candidate, unless done already; return True if the candidate runs.

        Facts and failures are kept in the state; a candidate after the time limit is noted as skipped.
        """
        if self.state.facts(candidate.name) is not None:
            return self.state.failure(candidate.name) is None
        if self.state.failure(candidate.name) is not None:
            return False
        if self._is_time_up():
            self._skipped[candidate.name] = _time_limit_failure()
            return False
        self._redraw_values()
        try:
            model = self._builds.build(candidate, self._float_rules(candidate)).model_path
            base_facts = self.state.facts(candidate.name.partition("+")[0]) if candidate.kind == "threads" else None
            if base_facts is not None:
                facts = self._limits.measure_same(candidate, model, base_facts)
            else:
                facts, _ = self._limits.measure(candidate, model, self._shared_values.samples)
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

    def _is_acceptable(self, candidate: Candidate) -> bool:
        """Measure a candidate, unless done already; return True if the candidate runs within the quality limits."""
        return self._measure_candidate(candidate) and self._meets_limits(candidate)

    def _measure_form(self, candidate: Candidate) -> bool:
        """Build and measure a form, unless a smaller form is within the quality limit; True if the form runs."""
        forms = {form.name: form for form in self.plan}
        for smaller in smaller_forms(candidate.name):  # a plan lacks forms that the provider does not run
            if smaller in forms and self._meets_limits(forms[smaller]):
                self._skipped[candidate.name] = Failure("not needed", f"{smaller} is within the quality limit")
                return False
        return self._measure_candidate(candidate)

    def _parts_by_quality(self) -> list[Candidate]:
        """Return the forms with some modules in float; those of the best forms first, which need the fewest modules."""

        def loss(candidate: Candidate) -> float:
            facts = self.state.facts(candidate.part_of)
            return math.inf if facts is None or facts.sqnr_db is None else -facts.sqnr_db

        return sorted((candidate for candidate in self.plan if candidate.part_of), key=loss)

    def _measure_mixed_form(self, candidate: Candidate) -> bool:
        """Build and measure a form with some modules in float, if the whole form is fast enough but too inexact.

        Return True if the form runs.
        """
        if (form_failure := self._skipped.get(candidate.part_of)) is not None:
            self._skipped[candidate.name] = form_failure
            return False
        variants = MixedVariants(self.plan, self.state, self._limits, self._builds.place, self._is_time_up)
        if (failure := variants.reason_against(candidate)) is not None:
            self._skipped[candidate.name] = failure
            return False
        is_known = self.state.rules(candidate.name) is not None or self.state.failure(candidate.name) is not None
        if not is_known and (self._is_time_up() or not variants.find_rules(candidate, self._built_model(self.plan[0]))):
            self._skipped[candidate.name] = _time_limit_failure()
            return False
        return self.state.failure(candidate.name) is None and self._measure_candidate(candidate)

    def _float_rules(self, candidate: Candidate) -> Mapping[str, str] | None:
        """Return the modules in float of a mixed form, and of its variations; `None` for other candidates."""
        return self.state.rules(candidate.name.partition("+")[0]) if candidate.part_of else None

    def _built_model(self, candidate: Candidate) -> Path:
        """Return the file of a candidate; build the file again if missing."""
        self._redraw_values()
        path = self._builds.place / candidate.name / BUILT_MODEL_NAME
        return path if path.is_file() else self._builds.build(candidate, self._float_rules(candidate)).model_path

    def _run_race(
        self, name: str, candidates: Sequence[Candidate], rungs: Sequence[int] | None = None, begun: str = ""
    ) -> Race:
        """Run or resume a race of candidates without a failure; turns of the race named ``begun`` are reused.

        On a simulated device, whose times say nothing, no turn is run.
        """
        runnable = [candidate for candidate in candidates if self.state.failure(candidate.name) is None]
        size = self._shared_values.block
        race = Race(name, runnable, self.state, size, self._is_time_up, self.progress, rungs or RUNGS, begun)
        if not self.options.is_simulated:
            race.run(self._running, self._built_model)
        return race

    def _race_placements(self, race: Race, best: Candidate) -> tuple[Race, Candidate, str]:
        """Put groups of modules back into float, and select groups that are faster by more than the noise.

        Returns:
            The deciding race, its winner, and a summary.
        """
        options = self.options
        if options.decides_by_size or (options.ep is None and "placement" not in options.only):
            return race, best, "not requested"
        if not is_requested("placement", options) or "quant" not in best.sections or best.kind == "float":
            return race, best, "no quantized modules to place"
        rules = self._float_rules(best)
        groups = _group_candidates(best, rules, self._built_model(best))
        self.placements = tuple(groups.values())
        placements = {selector: candidate for selector, candidate in groups.items() if self._is_acceptable(candidate)}
        if not placements:
            return race, best, f"{len(groups)} groups of modules, none measured"
        references = [] if best.name == PLAIN else [self.plan[0]]
        times = self._run_race(_PLACEMENT, [*references, best, *placements.values()]).times_of_runs
        faster = [
            selector
            for selector, candidate in placements.items()
            if times.get(candidate.name) and ratio_between(times, candidate.name, best.name).verdict == "faster"
        ]
        if not faster:
            return race, best, f"{len(placements)} groups of modules measured, none faster in float"
        placement = placements[faster[0]]
        if len(faster) > 1:
            placement = placed_candidate(best, rules, dict.fromkeys(faster, FLOAT32), f"{best.name}~placed")
            self.placements = (*self.placements, placement)
            if not self._is_acceptable(placement):
                placement = placements[faster[0]]
        final = self._run_race(_PLACED, [*references, best, placement])
        winner = self._find_candidate(self._choose_winner(final, lost=references).winner)
        return final, winner, f"{', '.join(faster)} faster in float; {winner.name} wins"

    def _race_variations(self, race: Race, best: Candidate) -> tuple[Race, Choice]:
        """Race the winner with its variations; return the deciding race and choice."""
        if not self.options.decides_by_size:
            self.variations = plan_variations(best, self.options, self.machine)
        variations = [candidate for candidate in self.variations if self._is_acceptable(candidate)]
        if not variations:
            return race, self._choose_winner(race)
        # The plain file runs as the reference. It lost an earlier race, so it does not compete.
        references = [] if best.name == PLAIN else [self.plan[0]]
        race = self._run_race(_VARIATIONS, [*references, best, *variations])
        return race, self._choose_winner(race, lost=references)

    def _choose_winner(self, race: Race, lost: Sequence[Candidate] = ()) -> Choice:
        """Choose the winner of a race by the target.

        Args:
            race: The completed race.
            lost: Losers of an earlier race, which win only if no other candidate remains.
        """
        names = [variant.name for variant in race.standing if variant not in lost] or [variant.name for variant in lost]
        if self.options.decides_by_size:
            names = [variant.name for variant in race.candidates]
            sizes = {name: facts.size_bytes for name in names if (facts := self.state.facts(name))}
            smallest = min(sizes, key=lambda name: sizes[name])
            return Choice(next(name for name in names if sizes[name] <= _SAME_SIZE * sizes[smallest]), smallest, None)
        return choose(race.times_of_runs, names)

    def _simulation_note(self) -> str:
        if not self.options.is_simulated:
            return ""
        rivals = [
            candidate.name for candidate in self.plan if candidate.name != PLAIN and self._meets_limits(candidate)
        ]
        fastest = f", and which of {', '.join(rivals)} is the fastest" if len(rivals) > 1 else ""
        return (
            f"The device of {self.options.ep} is absent and simulated. Judged by the simulation: the outputs of each "
            "file, and whether the provider runs it; the smallest file within the quality limit wins. Only the device "
            f"tells times{fastest}: run the same command there."
        )


def _group_candidates(best: Candidate, rules: Mapping[str, str] | None, model: Path) -> dict[str, Candidate]:
    """Return a candidate for each group of modules, with the group in float: selector → candidate.

    `{}` with fewer than two groups.

    Conversions cost time if the provider has no integer kernel for the operator, or if the product is small. Modules
    with equal paths except for numbers, such as one module of each layer, form a group.

    Args:
        best: A quantized candidate.
        rules: Modules of the candidate that are in float already, selector → precision.
        model: File of the candidate, with the number of quantized nodes of each module in its metadata.

    Raises:
        InputError: the file is damaged.
    """
    graph = load_by_reference(model)
    record = json.loads(graph.metadata_props.get(QUANTIZATION_KEY, "{}"))
    paths = {module.tag: module.path for module in graph_modules(graph, model.stem).modules}
    nodes: Counter[str] = Counter()
    for module in record.get("modules", ()):
        if path := paths.get(module["tag"], ""):
            nodes[_NUMBER.sub("*", path)] += int(module["quantized"])
    selectors = [selector for selector, count in nodes.most_common(_MOST_GROUPS) if count]
    # A single group in float would equal the float file.
    if len(selectors) < 2:
        return {}
    slugs = [re.sub(r"[^\w.]+", "_", selector)[-40:].strip("._") for selector in selectors]  # parts of file names
    return {
        selector: placed_candidate(best, rules, {selector: FLOAT32}, f"{best.name}~{number}-{slug}")
        for number, (selector, slug) in enumerate(zip(selectors, slugs, strict=True), start=1)
    }
