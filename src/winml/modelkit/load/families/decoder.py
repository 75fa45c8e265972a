"""A decoder that generates: one part with a cache, which serves the prompt and every step after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from winml.modelkit.load.caches.arguments import arguments_with_cache
from winml.modelkit.load.caches.decision import cached_keywords, decision_with_cache
from winml.modelkit.load.caches.module_states import given_states
from winml.modelkit.load.checkpoints.config import CheckpointConfig
from winml.modelkit.load.families.family import FoundParts, part_of_decision

if TYPE_CHECKING:
    from winml.modelkit.load.request import ModelRequest

__all__ = ["decoder_parts"]


def decoder_parts(model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest) -> FoundParts:
    """Return the only part of a decoder that keeps a cache.

    Raises:
        UsageError: the cache is of a kind that no graph can take, or sizes do not fit it.
    """
    decision = decision_with_cache(model, checkpoint, task, request)
    if decision.cache is None:
        return FoundParts(notes=decision.notes)
    cache = decision.cache
    others = [spec.name for spec in decision.inputs if spec.cache is None]
    part = part_of_decision(
        model,
        decision,
        cached_keywords(model, request),
        arguments_with_cache(cache, others),
        feeds=cache.feeds,
        cache=cache,
        entry=given_states(cache.of_modules, cache.argument) if cache.of_modules else None,
    )
    return FoundParts((part,))
