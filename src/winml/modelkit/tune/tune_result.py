"""Result of a tuning, made from its measurements: a row for each candidate, and the reason for the winner."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from winml.modelkit.builds.manifest_records import BuildResult
from winml.modelkit.compare.quality_minimum import LEAST_AGREEMENT
from winml.modelkit.errors import opt, spell_flag
from winml.modelkit.file_names import BUILD_CONFIG_NAME, EXPORTED_NAME
from winml.modelkit.ort.execution_providers import library_words
from winml.modelkit.ort.sessions import onnxruntime_version
from winml.modelkit.profile.race import Choice, ratio_between
from winml.modelkit.profile.statistics import IDLE_MACHINE, NOISE, Ratio, median_interval, summarize
from winml.modelkit.progress import StepTiming
from winml.modelkit.tune import records
from winml.modelkit.tune.candidates import PLAIN, TuningMachine
from winml.modelkit.tune.options import TuneOptions
from winml.modelkit.tune.quality_limits import QualityLimits
from winml.modelkit.tune.racing import times_of_runs
from winml.modelkit.tune.state import Failure, TuneState
from winml.modelkit.verdicts import Verdict
from winml.modelkit.version import __version__
from winml.modelkit.words import command_line, count_noun, first_words, sqnr_words

_RACES = ("variations", "placed", "placement", "right", "forms")
"""Races, the last first: the latency of a candidate is from its last race."""
_DECIDING = ("placed", "placement", "right", "variations", "forms")
"""Between two forms, the race of forms within the limit decides, even if both take part in the race of variations."""
_GAINS = {"latency": "faster", "throughput": "faster", "size": "smaller"}
"""Target → comparative of a better candidate."""
_MAX_NAMES = 3
"""Maximum number of candidates in a reason. Chosen: they fit on a line."""
_OF_WRONG = -1.0
"""SQNR of a candidate with incomparable outputs, for the Pareto front."""


@dataclass(frozen=True)
class Answer:
    """Data for the result of a tuning."""

    options: TuneOptions
    machine: TuningMachine
    model_name: str
    candidates: tuple[records.Candidate, ...]
    state: TuneState
    limits: QualityLimits
    skipped: Mapping[str, Failure]
    notes: tuple[str, ...]

    def result(self, choice: Choice, built: BuildResult, steps: Sequence[StepTiming]) -> records.TuneResult:
        """Return the record."""
        values = self.state.values
        assert values is not None  # drawn with the plain file
        rows = [self._make_candidate_record(candidate, choice) for candidate in self.candidates]
        options = self.options
        return records.TuneResult(
            model=self.model_name,
            target=options.target,
            limits={
                "min_sqnr_db": options.min_sqnr_db,
                "min_agreement": LEAST_AGREEMENT if options.uses_default_limit else None,
                "max_drop": dict(options.max_drop),
                "dataset": options.dataset,
                "max_peak_bytes": options.max_peak_bytes,
            },
            machine=self.machine.as_record(),
            candidates=tuple(_mark_front(rows)),
            verdict=self._candidate_verdict(choice, rows),
            winner=self._winner_record(choice, built),
            measured_shapes=values.shapes,
            block=values.block,
            batch_size=values.batch_size,
            resumed=self.state.resumed,
            tool_version=__version__,
            onnxruntime_version=onnxruntime_version(),
            steps=tuple(steps),
            notes=(*self.notes, *values.notes, *self._list_notes()),
        )

    def _make_candidate_record(self, candidate: records.Candidate, choice: Choice) -> records.TunedCandidate:
        """Return a candidate with its measurements, latency and outcome; the Pareto mark is set later."""
        facts, latency = self.state.facts(candidate.name), self._find_latency(candidate)
        status, reason = self._outcome(candidate, choice, facts)
        ratio = None if candidate.name == choice.winner else self._deciding_ratio(candidate.name, choice.winner)
        samples = None
        if latency is not None and self.state.values is not None:
            samples = self.state.values.batch_size * candidate.callers * 1000 / latency.p50_ms
        return records.TunedCandidate(candidate, status, reason, facts, latency, samples, ratio_to_winner=ratio)

    def _last_race(self, name: str) -> str | None:
        """Return the last race in which a candidate was timed."""
        return next((race for race in _RACES if self.state.turns(race).get(name)), None)

    def _find_latency(self, candidate: records.Candidate) -> records.MeasuredLatency | None:
        """Return the latency of a candidate in its last race; None if it was not timed."""
        race = self._last_race(candidate.name)
        if race is None:
            return None
        series = self.state.turns(race)[candidate.name]
        low, high = median_interval(series) or (None, None)
        ratio = None if candidate.name == PLAIN else self._race_ratio(race, candidate.name, PLAIN)
        return records.MeasuredLatency(median(series), low, high, ratio, len(series), race)

    def _race_ratio(self, race: str, name: str, baseline: str) -> Ratio | None:
        """Return the latency of a candidate in a race divided by the baseline's; None if either was not timed."""
        times = times_of_runs(self.state.turns(race), self.candidates)
        return ratio_between(times, name, baseline) if times.get(name) and times.get(baseline) else None

    def _deciding_ratio(self, name: str, baseline: str) -> Ratio | None:
        """Return the ratio of two latencies in the race that decides between both; None without such a race."""
        return next(
            (ratio for race in _DECIDING if (ratio := self._race_ratio(race, name, baseline)) is not None), None
        )

    def _candidate_verdict(self, choice: Choice, rows: Sequence[records.TunedCandidate]) -> Verdict:
        """Answer whether a candidate within the quality limit is better than the plain file.

        Args:
            choice: The choice of the last race.
            rows: All candidates.
        """
        gain = "smaller" if self.options.decides_by_size else _GAINS[self.options.target]
        question = f"a variant within the quality limit is {gain} than the plain file"
        words = self._gain_words(choice)
        out_of_time = any(row.status == "not tried" for row in rows)
        more_time = f"more time ({opt.budget})"
        won = next(row for row in rows if row.candidate.name == choice.winner)
        plain = next(row for row in rows if row.candidate.name == PLAIN)
        if plain.status == "wrong":
            gain = "within the limit of memory"
            question = f"a variant is {gain}, which the plain file exceeds"
        if won.candidate.name != PLAIN:
            assert won.facts is not None  # a candidate without measurements cannot win
            reason, needs = self.limits.unresolved_words(won.facts)
            if reason:
                return Verdict.undecided(question, f"{choice.winner} is {gain} ({words}), but {reason}", needs)
            return Verdict.of(question, True, words)
        measured = [row for row in rows if row.facts is not None and row.candidate.name != PLAIN]
        if not measured and out_of_time:
            return Verdict.undecided(question, "only the plain file was measured", more_time)
        if not measured and all(row.status != "failed" and row.status != "wrong" for row in rows):
            return Verdict.undecided(question, "only the plain file was measured", f"other candidates ({opt.only})")
        if unclear := [row.candidate.name for row in measured if self._may_be_faster(row)]:
            first = next(row for row in measured if row.candidate.name == unclear[0])
            assert first.ratio_to_winner is not None  # else its time leaves nothing open
            names, measured_words = first_words(unclear, _MAX_NAMES), first.ratio_to_winner.answer(question).reason
            reason = f"the times do not tell {names} from {choice.winner} ({unclear[0]}: {measured_words})"
            needs = IDLE_MACHINE if first.ratio_to_winner.is_disturbed else "an idle machine"
            return Verdict.undecided(question, reason, needs)
        if out_of_time:
            tried = f"{count_noun(len(measured), 'candidate')} measured, none {gain}"
            return Verdict.undecided(question, tried, more_time)
        return Verdict.of(question, False, words)

    def _may_be_faster(self, row: records.TunedCandidate) -> bool:
        """Return True if the times leave open that a candidate is faster than the winner by more than the noise."""
        ratio = row.ratio_to_winner
        if self.options.decides_by_size or row.status != "right" or ratio is None or ratio.is_within_noise:
            return False
        return ratio.is_disturbed or ratio.low is None or ratio.low < 1 - NOISE

    def _outcome(
        self, candidate: records.Candidate, choice: Choice, facts: records.CandidateFacts | None
    ) -> tuple[records.CandidateStatus, str]:
        """Return the status of a candidate, and its reason.

        Args:
            candidate: The candidate.
            choice: The winner, with the reason.
            facts: Measurements; `None` if not measured.
        """
        if candidate.name == choice.winner:
            return "won", self._gain_words(choice)
        failure = self.state.failure(candidate.name) or self.skipped.get(candidate.name)
        if failure is not None:
            return failure.status, failure.reason
        if facts is None:
            return "not tried", f"time limit reached ({opt.budget})"
        if reason := self.limits.reason_excluded(candidate, facts):
            return "wrong", reason
        if self.options.decides_by_size:
            winner = self.state.facts(choice.winner)
            is_as_small = winner is not None and facts.size_bytes <= winner.size_bytes
            return "right", f"{'no' if is_as_small else 'not'} smaller than {choice.winner}"
        return self._loss_outcome(candidate, choice)

    def _loss_outcome(self, candidate: records.Candidate, choice: Choice) -> tuple[records.CandidateStatus, str]:
        """Return status and reason of a candidate within the quality limits that did not win."""
        ratio = self._deciding_ratio(candidate.name, choice.winner)
        if ratio is not None:
            words = _ratio_words(ratio, choice.winner)
            if ratio.verdict == "slower":
                return "slower", words
            return "right", f"{words}: {_difference_words(ratio)}; {choice.winner} is preferred"
        # The form of which the winner is a variation.
        form = choice.winner.partition("+")[0]
        ratio = self._race_ratio("right", candidate.name, form)
        if ratio is None:
            return "slower", "not in the last race"
        return "slower", f"{_ratio_words(ratio, form)}, but {choice.winner} is faster"

    def _winner_record(self, choice: Choice, built: BuildResult) -> records.Winner:
        candidate = next(candidate for candidate in self.candidates if candidate.name == choice.winner)
        latency, facts = self._find_latency(candidate), self.state.facts(candidate.name)
        config = str(built.folder / BUILD_CONFIG_NAME)
        threads = [] if candidate.threads is None else [spell_flag("threads"), str(candidate.threads)]
        sizes = [] if candidate.fixed_sizes else list(self._size_words())
        exported = built.folder / EXPORTED_NAME
        plain = str(exported) if exported.is_file() else self.model_name
        return records.Winner(
            name=candidate.name,
            folder=str(built.folder),
            config=config,
            words=self._gain_words(choice),
            build_command=command_line(["winml", "build", "-c", config, "-o", "DIR"]),
            perf_command=None
            if candidate.callers > 1
            else command_line(["winml", "perf", str(built.folder), *provider_words(candidate), *threads, *sizes]),
            view_command=command_line(["winml", "view", plain, str(built.folder), "-o", "view.html"]),
            is_within_noise=choice.is_within_noise,
            ratio_to_plain=None if latency is None else latency.ratio,
            sqnr_db=None if facts is None else facts.sqnr_db,
            size_bytes=None if facts is None else facts.size_bytes,
            fastest=choice.fastest if choice.is_within_noise else None,
            fastest_to_winner=choice.ratio,
        )

    def _size_words(self) -> Iterator[str]:
        """Yield the options for the sizes of dynamic dimensions."""
        if self.options.sizes:
            yield from (spell_flag("shape_config"), json.dumps(dict(self.options.sizes)))
        if self.options.batch_size is not None:
            yield from (spell_flag("batch_size"), str(self.options.batch_size))

    def _gain_words(self, choice: Choice) -> str:
        """Describe the gain of the winner, and equally good candidates."""
        candidate = next(candidate for candidate in self.candidates if candidate.name == choice.winner)
        latency, facts = self._find_latency(candidate), self.state.facts(choice.winner)
        reasons = []
        if latency is not None and latency.ratio is not None:
            reasons.append(f"{latency.ratio.value:.2f} of the time of the plain file{_ratio_ends(latency.ratio)}")
        if facts is not None and facts.sqnr_db is not None and choice.winner != PLAIN:
            quality = sqnr_words(facts.sqnr_db)
            reasons.append("equal outputs" if quality == "equal" else f"SQNR {quality}")
        if choice.is_within_noise:
            reasons += _preference_words(choice)
        if candidate.fixed_sizes:
            fixed = ", ".join(f"{name} {size}" for name, size in candidate.fixed_sizes.items())
            reasons.append(f"its sizes are fixed ({fixed}): it runs at these sizes only")
        if candidate.callers > 1:
            reasons.append(f"with {candidate.callers} parallel runs, which winml perf does not measure")
        if sum(self.state.facts(candidate.name) is not None for candidate in self.candidates) == 1:
            reasons.append("the only file that was measured")
        elif choice.winner == PLAIN and not choice.is_within_noise:
            reasons.append("no candidate within the quality limit is better than the plain file")
        return "; ".join(reasons)

    def _list_notes(self) -> Iterator[str]:
        """Yield notes on unreliable times, random inputs and a reached time limit."""
        latencies = {variant.name: self._find_latency(variant) for variant in self.candidates}
        ratios = {name: latency.ratio for name, latency in latencies.items() if latency is not None and latency.ratio}
        decided = {name for name, ratio in ratios.items() if not ratio.is_disturbed}
        names = [
            name
            for name in latencies
            if name not in decided and not (name == PLAIN and decided)
            if (race := self._last_race(name)) and summarize(self.state.turns(race)[name]).is_disturbed
        ]
        is_out_of_time = any(skip.status == "not tried" and opt.budget in skip.reason for skip in self.skipped.values())
        if names:
            budget_words = f", with a longer {opt.budget} or none" if is_out_of_time else ""
            notice = (
                f"Half of the turns of {', '.join(names)} took more than 1.5 times the fastest: the machine seems busy."
            )
            if self.options.decides_by_size:
                yield f"{notice} The smallest file was chosen in any case; the times in the table may be too long."
            else:
                yield (
                    f"{notice} Their times were not used, and the simpler candidate was chosen. Repeat the tuning in a "
                    f"new folder on an idle machine{budget_words}."
                )
        if self.state.values is not None and self.state.values.samples.source == "random":
            yield (
                f"Outputs were compared on random values in the ranges that the file states; {opt.input_data} takes "
                "real inputs."
            )
        if is_out_of_time and not names:
            yield (
                "The time limit was reached before all candidates were tried; repeat the command with a different "
                f"{opt.budget} to resume."
            )


def _ratio_ends(ratio: Ratio) -> str:
    """Format the interval of a ratio; empty if there is no interval."""
    return "" if ratio.low is None or ratio.high is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"


def _ratio_words(ratio: Ratio, name: str) -> str:
    return f"{ratio.value:.2f} of the time of {name}{_ratio_ends(ratio)}"


def _difference_words(ratio: Ratio) -> str:
    """Describe the relation to the winner of a candidate that is not significantly slower."""
    if ratio.is_disturbed:
        return "undecided, because the machine was busy"
    if ratio.is_within_noise:
        return f"within {100 * NOISE:g} %"
    if ratio.contains_one:
        return "not distinguishable"
    if ratio.verdict == "faster":
        return "faster in these turns, but slower than a candidate that is not"
    return f"the difference may be below {100 * NOISE:g} %"


def _preference_words(choice: Choice) -> Iterator[str]:
    """Yield the reasons why a winner won that is not the best candidate."""
    ratio = choice.ratio
    if ratio is None:
        yield f"{choice.fastest} is smaller by no more than the noise, so the simpler one wins"
        return
    yield f"{choice.fastest} takes {ratio.value:.2f} of its time{_ratio_ends(ratio)}: {_difference_words(ratio)}"
    yield "the simpler one wins"
    if not ratio.is_within_noise:
        yield "on an idle machine, a tuning may distinguish them"


def _mark_front(rows: Sequence[records.TunedCandidate]) -> Iterator[records.TunedCandidate]:
    """Mark the Pareto-optimal candidates among the timed candidates."""
    comparable = [row for row in rows if row.facts is not None and row.latency is not None and row.status != "failed"]
    points = [
        (
            row.latency.ratio.value if row.latency.ratio is not None else 1.0,
            float(row.facts.size_bytes),
            row.facts.sqnr_db if row.facts.sqnr_db is not None else _OF_WRONG,
        )
        for row in comparable
        if row.latency is not None and row.facts is not None
    ]
    front = {row.candidate.name for row, is_best in zip(comparable, records.on_front(points), strict=True) if is_best}
    for row in rows:
        yield replace(row, is_on_front=row.candidate.name in front)


def provider_words(candidate: records.Candidate) -> list[str]:
    """Return the words of a command that run a candidate's file with its execution provider; ``[]`` for the CPU."""
    if candidate.ep is None:
        return []
    options = (
        text for name, value in candidate.ep_options.items() for text in (spell_flag("ep_options"), f"{name}={value}")
    )
    return [spell_flag("ep"), candidate.ep, *library_words(candidate.ep), *options]
