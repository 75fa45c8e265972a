"""Which word was hidden? The likeliest tokens at the mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate.metrics.classes import ACCURACY
from winml.modelkit.evaluate.metrics.metric import Metric, SampleRows
from winml.modelkit.evaluate.preprocessing import Batch
from winml.modelkit.evaluate.tasks.task import Judge, JudgeContext, Outputs, Sample, TaskDefinition, named_output
from winml.modelkit.evaluate.tokenizer_calls import tokenizer_call

__all__ = ["FILL_MASK"]

FIRST = 5
"""Tokens of a prediction. Specified: as many as the pipeline answers."""


@dataclass(frozen=True)
class _MaskedWordJudge(Judge):
    """A prediction is the likeliest tokens at the one mask of a text, the best first."""

    tokenizer: Any

    def reference(self, sample: Sample) -> int:
        """Return the token of the hidden word.

        Raises:
            UsageError: it is several tokens.
        """
        word = str(sample["label"])
        # Vocabularies of byte pairs know a word after a space by another token than one without.
        before, _, _ = str(sample["text"]).partition(self.tokenizer.mask_token)
        spellings = (f" {word}", word) if before[-1:].isspace() else (word, f" {word}")
        for spelled in spellings:
            with tokenizer_call(self.tokenizer, spelled):
                tokens = self.tokenizer(spelled, add_special_tokens=False)["input_ids"]
            if len(tokens) == 1:
                return int(tokens[0])
        raise UsageError(
            f"the hidden word {word!r} is {len(tokens)} tokens of the model, and a mask stands for one",
            hint="Take samples whose hidden word is one token.",
        )

    def answers(self, outputs: Outputs, batch: Batch) -> list[tuple[int, ...]]:
        logits = named_output(outputs, "logits", "prediction_logits")
        answers = []
        for tokens, scores, row in zip(batch.feeds["input_ids"], logits, batch.rows, strict=False):
            places = np.flatnonzero(tokens == self.tokenizer.mask_token_id)
            if len(places) != 1:
                raise UsageError(
                    f"{row.sample['text']!r} holds {len(places)} masks, and a sample has one to be filled",
                    hint=f"Write {self.tokenizer.mask_token} where the word is hidden.",
                )
            answers.append(tuple(np.argsort(-scores[places[0]], kind="stable")[:FIRST].tolist()))
        return answers

    def agreement(self, ours: tuple[int, ...], theirs: tuple[int, ...]) -> float:
        return float(ours[0] == theirs[0])


def _first(predictions: Sequence[tuple[int, ...]], references: Sequence[int]) -> Any:
    return ACCURACY.measure([tokens[0] for tokens in predictions], references)


def _among_first(predictions: Sequence[tuple[int, ...]], references: Sequence[int]) -> SampleRows:
    from sklearn.metrics import accuracy_score

    found = [right in tokens for tokens, right in zip(predictions, references, strict=True)]
    rows = np.stack([found, np.ones(len(found))], axis=1).astype(np.float64)
    return SampleRows(float(accuracy_score([True] * len(found), found)), rows, lambda sums: sums[:, 0] / sums[:, 1])


def _judge(context: JudgeContext) -> _MaskedWordJudge:
    tokenizer = context.processor("tokenizer")
    if getattr(tokenizer, "mask_token_id", None) is None:
        raise UsageError("the tokenizer has no mask token, so no word can be hidden", hint="Give another --task.")
    return _MaskedWordJudge(tokenizer)


FILL_MASK = TaskDefinition(
    "fill-mask",
    ("text", "label"),
    (Metric("accuracy", _first, "sklearn"), Metric("top_5_accuracy", _among_first, "sklearn")),
    _judge,
    "equal likeliest tokens",
)
