"""An answer that stands in a text: the span of the best start and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winml.modelkit.evaluate.metrics.texts import EXACT_MATCH, OVERLAP_F1
from winml.modelkit.evaluate.preprocessing import Batch, Row
from winml.modelkit.evaluate.tasks.task import (
    Judge,
    JudgeContext,
    Outputs,
    Sample,
    TaskDefinition,
    named_output,
    refuse_slow_tokenizer,
)

__all__ = ["QUESTION_ANSWERING"]

Array = NDArray[Any]

LONGEST_ANSWER = 15
"""Tokens of an answer. Specified: the default of the pipeline of transformers 4, and of its SQuAD scripts nearly
twice as many."""


@dataclass(frozen=True)
class _AnswerJudge(Judge):
    """A prediction is the text of the answer, empty where the model says that the text holds none."""

    may_be_empty: bool
    """Whether the data set has questions without an answer."""

    def reference(self, sample: Sample) -> list[str]:
        return _answer_texts(sample["answers"])

    def answers(self, outputs: Outputs, batch: Batch) -> list[_Answer]:
        starts, ends = named_output(outputs, "start_logits"), named_output(outputs, "end_logits")
        return [_best_answer(row, start, end) for row, start, end in zip(batch.rows, starts, ends, strict=True)]

    def prediction(self, answers: Sequence[_Answer], sample: Sample) -> str:
        """Return the text of the best span of all windows; no window may be surer that there is none."""
        best = max(answers, key=lambda answer: answer.score)
        if not best.characters or (self.may_be_empty and min(answer.empty_score for answer in answers) > best.score):
            return ""
        return str(sample["context"])[slice(*best.characters)]


@dataclass(frozen=True)
class _Answer:
    """What one window over a context says."""

    score: float
    characters: tuple[int, int] | None
    """First character of the span, and the one after its last; None where the window holds no context."""
    empty_score: float
    """How sure it is that there is no answer: the first token stands for that."""


def _best_answer(row: Row, start: Array, end: Array) -> _Answer:
    start, end = start.astype(np.float64), end.astype(np.float64)
    is_context = np.asarray([number == 1 for number in row.sequence_ids or ()], bool)
    empty_score = float(start[0] + end[0])
    if row.offsets is None or not is_context.any():
        return _Answer(-np.inf, None, empty_score)
    score, first, last = _best_span(start, end, is_context)
    return _Answer(score, (int(row.offsets[first][0]), int(row.offsets[last][1])), empty_score)


def _best_span(start: Array, end: Array, is_context: Array) -> tuple[float, int, int]:
    """Return the score of the best span in the context, its first token and its last."""
    start, end = np.where(is_context, start, -np.inf), np.where(is_context, end, -np.inf)
    scores = start[:, None] + end[None, :]
    places = np.arange(len(start))
    length = places[None, :] - places[:, None]
    scores = np.where((length >= 0) & (length < LONGEST_ANSWER), scores, -np.inf)
    first, last = np.unravel_index(np.argmax(scores), scores.shape)
    return float(scores[first, last]), int(first), int(last)


def _answer_texts(cell: Any) -> list[str]:
    """Return the accepted answers: of SQuAD's record of lists, of a list of texts, or of one text."""
    texts = cell["text"] if isinstance(cell, Mapping) else cell
    return [texts] if isinstance(texts, str) else [str(text) for text in texts or ()]


def _judge(context: JudgeContext) -> _AnswerJudge:
    refuse_slow_tokenizer(context, "places in the context")
    return _AnswerJudge(any(not _answer_texts(cell) for cell in context.values("answers")))


QUESTION_ANSWERING = TaskDefinition(
    "question-answering", ("question", "context", "answers"), (OVERLAP_F1, EXACT_MATCH), _judge, "equal answers"
)
