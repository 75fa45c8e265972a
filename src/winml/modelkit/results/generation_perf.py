"""The record of a measured decoder: prompts by length, steps by what the cache holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["GenerationPerf", "PromptTime", "StepTime"]


@dataclass(frozen=True)
class PromptTime:
    """How long a prompt takes until its first token is known."""

    tokens: int
    first_token_ms: float
    """Median of the counted runs."""
    cache_bytes: int
    """Memory of the cache after it."""


@dataclass(frozen=True)
class StepTime:
    """How long one more token takes."""

    cached_tokens: int
    step_ms: float
    """Median of the counted runs."""
    tokens_per_second: float


@dataclass(frozen=True)
class GenerationPerf:
    """A measured decoder with a cache."""

    model: str
    provider: str
    threads: int | None
    iterations: int
    session_ms: float
    prompts: tuple[PromptTime, ...]
    steps: tuple[StepTime, ...]
    cache_bytes_per_token: float
    """Growth of the cache with each token of one row."""
    notes: tuple[str, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "schema_version": 1,
            **vars(self),
            "prompts": [dict(vars(prompt)) for prompt in self.prompts],
            "steps": [dict(vars(step)) for step in self.steps],
            "notes": list(self.notes),
        }
