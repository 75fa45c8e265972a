"""Chooses a token from the scores of all, as transformers' loop does: greedily, or drawn from the likely ones.

Each step is transformers' processor of that name, in its order (``generation/logits_process.py``). numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winml.modelkit.inference.generation.settings import StepSettings

__all__ = ["choose_token", "processed_scores"]

Scores = NDArray[np.float32]


def choose_token(logits: NDArray[Any], before: Sequence[int], settings: StepSettings, draw: np.random.Generator) -> int:
    """Return the next token.

    Args:
        logits: Of every token of the vocabulary, shape [vocabulary].
        before: Prompt and text so far.
        settings: How it is chosen.
        draw: Where random numbers come from.
    """
    scores = processed_scores(logits, before, settings)
    if not settings.is_sampled:
        return int(np.argmax(scores))
    return int(draw.choice(len(scores), p=_probabilities(scores)))


def processed_scores(logits: NDArray[Any], before: Sequence[int], settings: StepSettings) -> Scores:
    """Return the scores a token is chosen by, shape [vocabulary]; those that are out have -inf."""
    scores: Scores = logits.astype(np.float32)
    if settings.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(before, np.int64))
        at_seen = scores[seen]
        penalty = np.float32(settings.repetition_penalty)
        scores[seen] = np.where(at_seen < 0, at_seen * penalty, at_seen / penalty)
    if not settings.is_sampled:
        return scores
    if settings.temperature != 1.0:
        scores = scores / np.float32(settings.temperature)
    if 0 < settings.top_k < len(scores):
        least = np.partition(scores, -settings.top_k)[-settings.top_k]
        scores[scores < least] = -np.inf
    if settings.top_p < 1.0:
        scores[_outside_share(scores, settings.top_p)] = -np.inf
    if settings.min_p is not None:
        likely = _probabilities(scores)
        scores[likely < settings.min_p * likely.max()] = -np.inf
    return scores


def _outside_share(scores: Scores, share: float) -> NDArray[np.bool_]:
    """Say which tokens are not among the fewest likely ones whose probabilities reach a share; the first always is."""
    ascending = np.argsort(scores, kind="stable")
    is_out = np.zeros(len(scores), bool)
    below = np.cumsum(_probabilities(scores)[ascending]) <= 1 - share
    below[-1] = False
    is_out[ascending] = below
    return is_out


def _probabilities(scores: Scores) -> NDArray[np.float64]:
    weights = np.exp(scores.astype(np.float64) - float(scores.max()))
    return np.asarray(weights / weights.sum())
