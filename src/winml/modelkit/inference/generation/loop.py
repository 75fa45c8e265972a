"""Writes one text token by token, with numpy and ONNX Runtime alone.

Does what transformers' loop does for one prompt without beams; why it stands beside that is told in
docs/decisions/0012-generation-loop.md. Knows token numbers only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from winml.modelkit.inference.generation.beginnings import TextBeginning
from winml.modelkit.inference.generation.choice import choose_token
from winml.modelkit.inference.generation.graph import DecoderGraph, rows_of
from winml.modelkit.inference.generation.settings import GenerationSettings

__all__ = ["GeneratedToken", "generate_tokens"]


@dataclass(frozen=True)
class GeneratedToken:
    """One token of a text."""

    token: int
    seconds: float
    """Since the one before it, or since the start."""
    end: Literal["", "eos", "length"] = ""
    """Why it is the last one; empty where it is not."""


def generate_tokens(
    graph: DecoderGraph,
    prompt: Sequence[int],
    settings: GenerationSettings,
    *,
    encoded: Mapping[str, NDArray[Any]] | None = None,
    beginning: TextBeginning | None = None,
    positions: NDArray[Any] | None = None,
) -> Iterator[GeneratedToken]:
    """Yield the tokens after a prompt, one by one; an end token is the last one.

    Args:
        graph: The model; without a cache, every step runs the whole text.
        prompt: One token at least.
        settings: How tokens are chosen, and when the text ends.
        encoded: What an encoder answered, which the graph takes in every step.
        beginning: Which tokens may stand where, besides what is chosen.
        positions: Of the tokens of the prompt, where they are not counted one by one; later ones follow the last.

    Raises:
        UsageError: the graph does not take as many tokens.
        StageError: ONNX Runtime fails.
    """
    draw = np.random.default_rng(settings.seed)
    text = list(prompt)
    cache = graph.empty_cache(1, encoded) if graph.has_cache else None
    fed = text
    before = time.perf_counter()
    longest = settings.max_new_tokens + (beginning.prompt_places if beginning is not None else 0)
    for count in range(1, longest + 1):
        logits = graph.run(rows_of(fed), positions=positions, cache=cache)
        positions = None if positions is None else positions[..., -1:] + 1
        scores = logits[0, -1]
        if beginning is not None:
            scores = beginning.scores(scores, len(text), is_last=count == longest)
        token = choose_token(scores, text, settings.step, draw)
        text.append(token)
        fed = [token] if graph.has_cache else text
        now = time.perf_counter()
        end: Literal["", "eos", "length"] = ""
        if token in settings.eos_token_ids:
            end = "eos"
        elif count == longest:
            end = "length"
        yield GeneratedToken(token, now - before, end)
        if end:
            return
        before = now
