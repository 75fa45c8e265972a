"""How well is a text foreseen? The likelihood of each token after those before it (perplexity)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winml.modelkit.evaluate.metrics.texts import PERPLEXITY
from winml.modelkit.evaluate.preprocessing import Batch
from winml.modelkit.evaluate.tasks.task import (
    Judge,
    JudgeContext,
    Outputs,
    Sample,
    TaskDefinition,
    named_output,
    token_masks,
)

__all__ = ["TEXT_GENERATION"]

Array = NDArray[Any]


@dataclass(frozen=True)
class _Foreseen:
    """One text."""

    surprise: float
    """Sum over its tokens of the negative logarithm of what the model gave them."""
    best: tuple[int, ...]
    """The likeliest token at each place that is foreseen."""


@dataclass(frozen=True)
class _GenerationJudge(Judge):
    """A prediction is how well each token of a text was foreseen; its tokens are what is right."""

    tokenizer: Any

    def reference(self, sample: Sample) -> None:  # noqa: ARG002  # the text itself
        return None

    def answers(self, outputs: Outputs, batch: Batch) -> list[_Foreseen]:
        logits = named_output(outputs, "logits")
        return [
            _foreseen(scores[mask], tokens[mask])
            for scores, tokens, mask in zip(
                logits, batch.feeds["input_ids"], token_masks(batch, self.tokenizer), strict=False
            )
        ]

    def agreement(self, ours: _Foreseen, theirs: _Foreseen) -> float:
        return float(np.mean(np.asarray(ours.best) == np.asarray(theirs.best))) if ours.best else 1.0

    def kept(self, prediction: _Foreseen, reference: None) -> tuple[float, int]:  # noqa: ARG002  # the text itself
        return prediction.surprise, len(prediction.best)


def _foreseen(scores: Array, tokens: Array) -> _Foreseen:
    """Return what is to be told of a text: ``[tokens, vocabulary]`` scores and its ``[tokens]``."""
    scores, following = scores[:-1].astype(np.float64), tokens[1:]
    if not len(following):
        return _Foreseen(0.0, ())
    largest = scores.max(axis=1, keepdims=True)
    totals = np.log(np.exp(scores - largest).sum(axis=1)) + largest[:, 0]
    surprise = totals - scores[np.arange(len(following)), following]
    return _Foreseen(float(surprise.sum()), tuple(scores.argmax(axis=1).tolist()))


def _judge(context: JudgeContext) -> _GenerationJudge:
    return _GenerationJudge(context.processor("tokenizer"))


TEXT_GENERATION = TaskDefinition(
    "text-generation",
    ("text",),
    (PERPLEXITY,),
    _judge,
    "equal likeliest next tokens, token by token",
    # Scores of a whole vocabulary for each of 512 tokens take 0.1 GB a text.
    batch_size=1,
)
