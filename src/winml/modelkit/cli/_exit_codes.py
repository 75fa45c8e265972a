"""What does a verb end with that has an answer, and the answer is no?"""

from __future__ import annotations

__all__ = ["NEGATIVE_ANSWER"]

NEGATIVE_ANSWER = 3
"""Specified: exit code of a valid negative answer: a limit is not met, or two files are not the same."""
