"""One tag a word: names in a text, parts of speech."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.evaluate.labels import LabelMap, label_names, match_labels, model_labels
from winml.modelkit.evaluate.metrics.spans import SPAN_METRICS, TAG_ACCURACY
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

__all__ = ["TOKEN_CLASSIFICATION"]

_LEFT_OUT = -100
"""Specified: the tag of a word that is not judged, as torch's losses leave it out."""
_OUTSIDE = "O"


@dataclass(frozen=True)
class _TagJudge(Judge):
    """A prediction is the tag of each word: that of its first token. Words beyond the longest row have none."""

    labels: LabelMap
    notes: tuple[str, ...] = ()

    def reference(self, sample: Sample) -> list[str | None]:
        """Return the tag of each word, None where it is not judged.

        Raises:
            UsageError: the model has no such tag.
            InputError: there are more words than tags, or fewer.
        """
        words, tags = len(sample["tokens"]), len(sample["tags"])
        if words != tags:
            raise InputError(f"it has {words} words and {tags} tags", hint="Give each word one tag.")
        return [None if tag == _LEFT_OUT else self.labels.name(tag) for tag in sample["tags"]]

    def answers(self, outputs: Outputs, batch: Batch) -> list[list[str]]:
        classes = np.argmax(named_output(outputs, "logits"), axis=-1)
        return [self._tags(row, numbers.tolist()) for row, numbers in zip(batch.rows, classes, strict=True)]

    def _tags(self, row: Row, numbers: Sequence[int]) -> list[str]:
        tags: list[str] = [_OUTSIDE] * len(row.sample["tokens"])
        words = row.word_ids or ()
        for place in reversed(range(len(words))):
            if (word := words[place]) is not None:
                tags[word] = self.labels.model[numbers[place]]
        return tags

    def kept(self, prediction: list[str], reference: list[str | None]) -> list[str]:
        """Return the tags of the words that are judged."""
        return [tag for tag, right in zip(prediction, reference, strict=True) if right is not None]


def _judge(context: JudgeContext) -> _TagJudge:
    refuse_slow_tokenizer(context, "words")
    column = context.columns["tags"]
    names = label_names(context.data_set.features[column])
    values = (tag for tags in context.values("tags") for tag in _tags_of(tags, column) if tag != _LEFT_OUT)
    labels = match_labels(model_labels(context.config), names, values, column)
    return _TagJudge(labels, labels.notes)


def _tags_of(cell: Any, column: str) -> Sequence[Any]:
    if isinstance(cell, Sequence) and not isinstance(cell, str):
        return cell
    raise UsageError(
        f"column {column} holds {type(cell).__name__} where a list of tags is expected, one a word",
        hint="Say which column it is: --columns tags=COLUMN.",
    )


TOKEN_CLASSIFICATION = TaskDefinition(
    "token-classification", ("tokens", "tags"), (*SPAN_METRICS, TAG_ACCURACY), _judge, "equal tags of all words"
)
