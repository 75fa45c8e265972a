"""Which forms are worth a search for the modules that stay in float, and which modules are these?

A search takes most of the time of a tuning, so it is made only of a whole form that is not right, and better than every
right one. Times nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from winml.modelkit.errors import InternalError, WinMLError, WriteError
from winml.modelkit.file_names import measured_path
from winml.modelkit.measure.elimination import fastest, ratio_between
from winml.modelkit.measure.statistics import NOISE
from winml.modelkit.results.tuning import Candidate, CandidateFacts
from winml.modelkit.tune.candidates import PLAIN
from winml.modelkit.tune.judging import Judge
from winml.modelkit.tune.racing import times_of_runs
from winml.modelkit.tune.state import Failure, TuneState

__all__ = ["FORMS", "MixedForms"]

FORMS = "forms"
"""The race of all whole forms, the wrong ones too."""


class _TimeUp(Exception):  # noqa: N818 - no error: the search goes on with more time
    """Ends a search."""


@dataclass(frozen=True)
class MixedForms:
    """The forms of a plan in which some modules stay in float."""

    plan: tuple[Candidate, ...]
    state: TuneState
    judge: Judge
    place: Path
    """Where measurements are kept as long as a search runs."""
    is_over: Callable[[], bool]
    """Says whether the time is up: then a search ends before its next measurement."""

    def reason_against(self, candidate: Candidate) -> Failure | None:
        """Return why no search is made for a form; None where it is worth one."""
        whole = next((item for item in self.plan if item.name == candidate.part_of), None)
        facts = None if whole is None else self.state.facts(whole.name)
        if whole is None or self.state.failure(whole.name) is not None:
            return Failure("not needed", f"{candidate.part_of} does not run")
        if facts is None:
            return Failure("not tried", "the time was up (--budget)")
        if not self.judge.reason_wrong(facts):
            return Failure("not needed", f"{whole.name} is right as a whole")
        if not self._beats_the_right(whole, facts):
            return Failure("not needed", f"{whole.name} gains nothing over those that are right")
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
            found = self.judge.find_rules(
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
            self.state.keep_failure(candidate.name, Failure("wrong", self.judge.unmet_words(listed)))
        return True

    def _end_in_time(self) -> None:
        if self.is_over():
            raise _TimeUp

    def _beats_the_right(self, whole: Candidate, facts: CandidateFacts) -> bool:
        """Say whether a wrong form is better than every right one by the target."""
        measured = [(item, found) for item in self.plan if (found := self.state.facts(item.name)) is not None]
        right = [(item, found) for item, found in measured if not self.judge.reason_wrong(found)]
        if self.judge.options.target == "size":
            return all(facts.size_bytes < found.size_bytes for _, found in right)
        times = times_of_runs(self.state.turns(FORMS), self.plan)
        names = [item.name for item, _ in right if times.get(item.name)]
        if not names or not times.get(whole.name):
            return False
        ratio = ratio_between(times, whole.name, fastest(times, names))
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
