"""Searches the modules of a candidate that stay in float.

A search takes most of the time of a tuning. Therefore, only whole forms are searched that are outside the quality
limit, but better than all forms within the limit. Times nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from winml.modelkit.errors import InternalError, WinMLError, WriteError
from winml.modelkit.file_names import measured_path
from winml.modelkit.profile.race import fastest, ratio_between
from winml.modelkit.profile.statistics import NOISE
from winml.modelkit.tune.candidates import PLAIN
from winml.modelkit.tune.quality_limits import QualityLimits
from winml.modelkit.tune.racing import times_of_runs
from winml.modelkit.tune.records import Candidate, CandidateFacts
from winml.modelkit.tune.state import Failure, TuneState

FORMATS = "forms"
"""Name of the race of all whole forms, including forms outside the quality limit."""


class _TimeUp(Exception):  # noqa: N818 - no error: the search goes on with more time
    """Ends a search."""


@dataclass(frozen=True)
class MixedVariants:
    """Forms of a plan in which some modules stay in float."""

    plan: tuple[Candidate, ...]
    state: TuneState
    limits: QualityLimits
    folder: Path
    """Folder of measurements during a search."""
    is_over: Callable[[], bool]
    """Returns True after the time limit: a search then ends before its next measurement."""

    def reason_against(self, candidate: Candidate) -> Failure | None:
        """Return the reason not to search a form, or None."""
        whole = next((variant for variant in self.plan if variant.name == candidate.part_of), None)
        facts = None if whole is None else self.state.facts(whole.name)
        if whole is None or self.state.failure(whole.name) is not None:
            return Failure("not needed", f"{candidate.part_of} failed")
        assert facts is not None  # parts of a skipped candidate are skipped
        if reason := self.limits.reason_too_large(facts):
            return Failure("not needed", f"{whole.name} has a {reason}")
        if not self.limits.reason_wrong(whole, facts):
            return Failure("not needed", f"{whole.name} is within the quality limit")
        if not self._is_better_than_acceptable(whole, facts):
            return Failure("not needed", f"{whole.name} is not better than the candidates within the quality limit")
        return None

    def find_rules(self, candidate: Candidate, plain_model: Path) -> bool:
        """Search the modules that stay in float; intermediate measurements survive an interruption.

        Args:
            candidate: The form.
            plain_model: The plain file.

        Returns:
            True if the search was completed before the time limit.
        """
        if self._copy_equal_search(candidate):
            return True
        facts, values = self.state.facts(PLAIN), self.state.values
        form_facts = self.state.facts(candidate.part_of)
        assert facts is not None  # the plain file is measured first
        assert form_facts is not None  # parts of a candidate without measurements are skipped
        assert values is not None  # values are drawn with the plain file
        measurements = measured_path(self.folder / candidate.name)

        def end_in_time() -> None:
            if self.is_over():
                raise _TimeUp

        try:
            sensitivity = self.limits.find_rules(
                candidate,
                plain_model,
                measurements,
                end_in_time,
                plain_facts=facts,
                candidate_facts=form_facts,
                is_as_drawn=values.is_as_drawn,
            )
        except (InternalError, WriteError):
            raise
        except _TimeUp:
            return False
        except WinMLError as error:
            self.state.keep_failure(candidate.name, Failure("failed", error.message))
            return True
        exclude_list = sensitivity.exclude_list
        assert exclude_list is not None  # a target is set
        if exclude_list.is_met:
            self.state.keep_rules(candidate.name, exclude_list.rules)
        else:
            self.state.keep_failure(candidate.name, Failure("wrong", self.limits.unmet_words(exclude_list)))
        return True

    def _is_better_than_acceptable(self, candidate: Candidate, facts: CandidateFacts) -> bool:
        """Return True if a form outside the quality limit is better by the target than every form within the limit."""
        pairs = [(rival, measures) for rival in self.plan if (measures := self.state.facts(rival.name)) is not None]
        acceptable = [pair for pair in pairs if not self.limits.reason_excluded(*pair)]
        if self.limits.options.decides_by_size:
            return all(facts.size_bytes < measures.size_bytes for _, measures in acceptable)
        times = times_of_runs(self.state.turns(FORMATS), self.plan)
        names = [rival.name for rival, _ in acceptable if times.get(rival.name)]
        if not names or not times.get(candidate.name):
            return False
        ratio = ratio_between(times, candidate.name, fastest(times, names))
        # On a busy machine the interval is wide or unreliable, and a form that may be faster is worth the search.
        return ratio.is_disturbed or ratio.low is None or ratio.low < 1 - NOISE

    def _copy_equal_search(self, candidate: Candidate) -> bool:
        """Copy the outcome of a search for the same quantization on a different provider; False if none is stored."""
        for variant in self.plan:
            if not variant.part_of or variant is candidate or variant.sections != candidate.sections:
                continue
            rules, failure = self.state.rules(variant.name), self.state.failure(variant.name)
            if rules is not None:
                self.state.keep_rules(candidate.name, rules)
                return True
            if failure is not None and failure.status == "wrong":
                self.state.keep_failure(candidate.name, failure)
                return True
        return False
