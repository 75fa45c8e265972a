"""Verdicts on questions about a model: yes, no, or undecided with the missing measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Literal

from winml.modelkit.records import Record, entry

_Answer = Literal["yes", "no", "undecided"]

DISTURBED = 1.5
"""Ratio of median to minimum above which samples count as disturbed. Chosen: on an idle machine the median stays near
the fastest run, and caches and clock changes do not add half of it to every second run."""


class Verdict(Record):
    """Answer to a question about a model, with its reason.

    >>> Verdict.of("is it faster", False, "2.10 times as slow").words
    'no: 2.10 times as slow'
    >>> Verdict.undecided("is it faster", "the machine was busy", "an idle machine").words
    'undecided: the machine was busy; an idle machine would decide'
    """

    question: str
    """Statement that "yes" confirms."""
    answer: _Answer
    reason: str
    """The measured values that lead to the answer."""
    decided_by: str = field(default="", metadata=entry(null_if_empty=True))
    """Noun phrase of the missing measurement; empty for a decided question."""

    def __post_init__(self) -> None:
        """Refuse an undecided verdict without a way to decide it, and a decided verdict with one."""
        if (self.answer == "undecided") is not bool(self.decided_by):
            raise ValueError(f"verdict {self.answer!r} with decided_by {self.decided_by!r}")

    @classmethod
    def of(cls, question: str, is_yes: bool, reason: str) -> Verdict:
        """Return a decided verdict."""
        return cls(question, "yes" if is_yes else "no", reason)

    @classmethod
    def undecided(cls, question: str, reason: str, decided_by: str) -> Verdict:
        """Return an undecided verdict.

        Args:
            question: The question.
            reason: Measured values that do not answer the question.
            decided_by: Missing measurement: more samples, an idle machine, more time.
        """
        return cls(question, "undecided", reason, decided_by)

    @property
    def is_yes(self) -> bool:
        """True if the answer is yes."""
        return self.answer == "yes"

    @property
    def is_no(self) -> bool:
        """True if the answer is no."""
        return self.answer == "no"

    @property
    def is_undecided(self) -> bool:
        """True if the measured values do not answer the question."""
        return self.answer == "undecided"

    @property
    def limit_words(self) -> str:
        """The answer to the question whether a limit is met: met, not met or undecided."""
        return {"yes": "met", "no": "not met"}.get(self.answer, self.answer)

    @property
    def words(self) -> str:
        """The answer with its reason; for an undecided question, also the missing measurement."""
        needs = f"; {self.decided_by} would decide" if self.decided_by else ""
        return f"{self.answer}: {self.reason}{needs}"


def weakest(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict that decides a conjunction: the first no, else the first undecided, else the first yes.

    Args:
        verdicts: At least one verdict.
    """
    return max(verdicts, key=lambda verdict: (verdict.is_no, verdict.is_undecided))
