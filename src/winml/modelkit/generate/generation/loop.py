"""Generation of one text token by token, with numpy and ONNX Runtime only.

Equivalent to transformers' loop for one prompt without beams; for the reason see
docs/decisions/0012-generation-loop.md. Works on token ids only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.generate.generation.decoder_prompt import DecoderPrompt
from winml.modelkit.generate.generation.settings import GenerationSettings
from winml.modelkit.ort.decoding.decoder import DecoderGraph, rows_of
from winml.modelkit.ort.decoding.inputs import POSITIONS

Scores = NDArray[np.float32]


def choose_token(logits: Array, before: Sequence[int], settings: GenerationSettings, rng: np.random.Generator) -> int:
    """Choose the next token as transformers' loop does: greedily, or by sampling.

    Args:
        logits: Logits of every token, shape [vocabulary].
        before: Prompt and text so far.
        settings: Generation settings.
        rng: Random number generator.
    """
    if not settings.is_sampled and settings.repetition_penalty == 1.0:
        return int(np.argmax(logits))
    scores = processed_scores(logits, before, settings)
    if not settings.is_sampled:
        return int(np.argmax(scores))
    return int(rng.choice(len(scores), p=_softmax_scores(scores)))


def processed_scores(logits: Array, before: Sequence[int], settings: GenerationSettings) -> Scores:
    """Return the processed scores, shape [vocabulary]; excluded tokens have -inf.

    Each step is transformers' processor of that name, in its order (``generation/logits_process.py``).

    Args:
        logits: The logits of the last token.
        before: Earlier tokens of the row, for the repetition penalty.
        settings: The generation settings.
    """
    scores: Scores = logits.astype(np.float32)
    if settings.repetition_penalty != 1.0:
        earlier_tokens = np.unique(np.asarray(before, np.int64))
        at_seen = scores[earlier_tokens]
        penalty = np.float32(settings.repetition_penalty)
        scores[earlier_tokens] = np.where(at_seen < 0, at_seen * penalty, at_seen / penalty)
    if not settings.is_sampled:
        return scores
    if settings.temperature != 1.0:
        scores = scores / np.float32(settings.temperature)
    if 0 < settings.top_k < len(scores):
        threshold = np.partition(scores, -settings.top_k)[-settings.top_k]
        scores[scores < threshold] = -np.inf
    if settings.top_p < 1.0:
        scores[_mask_unlikely(scores, settings.top_p)] = -np.inf
    if settings.min_p is not None:
        likely = _softmax_scores(scores)
        scores[likely < settings.min_p * likely.max()] = -np.inf
    return scores


def _mask_unlikely(scores: Scores, share: float) -> NDArray[np.bool_]:
    """Return True per token outside the fewest likely tokens that reach a share; never for the most likely."""
    ascending = np.argsort(scores, kind="stable")
    is_out = np.zeros(len(scores), bool)
    below = np.cumsum(_softmax_scores(scores)[ascending]) <= 1 - share
    below[-1] = False
    is_out[ascending] = below
    return is_out


def _softmax_scores(scores: Scores) -> NDArray[np.float64]:
    weights = np.exp(scores.astype(np.float64) - float(scores.max()))
    return np.asarray(weights / weights.sum())


class GeneratedToken(NamedTuple):
    """One token of a text."""

    token: int
    seconds: float
    """Time since the previous token, or since the start."""
    end: Literal["", "eos", "length"] = ""
    """Reason why it is the last token; ``""`` if it is not."""


TokenSource = tuple[Literal["winml", "transformers"], Iterator[GeneratedToken]]
"""The loop that chooses the tokens, and the tokens."""


def generate_tokens(
    graph: DecoderGraph,
    prompt: Sequence[int],
    settings: GenerationSettings,
    *,
    inputs: Arrays | None = None,
    beginning: DecoderPrompt | None = None,
) -> Iterator[GeneratedToken]:
    """Yield the tokens after a prompt, one by one, including an end token.

    Args:
        graph: The model; without a cache, every step runs the whole text.
        prompt: At least one token.
        settings: Generation settings.
        inputs: Inputs of the graphs before the decoder, by name. ``position_ids`` are the positions of the prompt, if
            not consecutive; later positions follow the last.
        beginning: Constraints on tokens by position.

    Raises:
        UsageError: the graph does not take as many tokens.
        StageError: ONNX Runtime fails.
    """
    rng = np.random.default_rng(settings.seed)
    text = list(prompt)
    inputs = inputs or {}
    positions = inputs.get(POSITIONS)
    before = time.perf_counter()
    cache = graph.start(inputs) if graph.has_cache else None
    fed = text
    longest = settings.max_new_tokens + (beginning.prompt_places if beginning is not None else 0)
    for count in range(1, longest + 1):
        logits = graph.run(rows_of(fed), positions=positions, cache=cache)
        positions = None if positions is None else positions[..., -1:] + 1
        scores = logits[0, -1]
        if beginning is not None:
            scores = beginning.scores(scores, len(text), is_last=count == longest)
        token = choose_token(scores, text, settings, rng)
        text.append(token)
        fed = [token] if graph.has_cache else text
        now = time.perf_counter()
        end: Literal["", "eos", "length"]
        end = "eos" if token in settings.eos_token_ids else "length" if count == longest else ""
        yield GeneratedToken(token, now - before, end)
        if end:
            return
        before = now
