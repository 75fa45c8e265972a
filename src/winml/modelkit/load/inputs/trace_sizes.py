"""Chooses the sizes that open dimensions are traced with.

Pure arithmetic. A size of 1 is traced as a constant, and two dimensions of one size hide that one was taken
for the other; so sizes are at least 2, and apart from each other wherever nobody asked otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["SizeWish", "choose_trace_sizes"]

_SMALLEST = 2
_SHARE_OF_LIMIT = 0.75
"""Chosen: leaves room above the traced size, where a table cut to that size would show."""
_MOST_STEPS = 1000
"""Chosen: far more sizes than dimensions of one model."""


@dataclass(frozen=True)
class SizeWish:
    """What is wanted of the size of one dimension."""

    name: str
    preferred: int
    is_firm: bool = False
    """Whether the user asked for this size; it is taken then, unless it is 1."""
    min: int = 1
    max: int | None = None
    step: int = 1
    """Other sizes are tried this far apart: image sizes must often be multiples of what the network divides by."""
    beside: frozenset[int] = frozenset()
    """Fixed sizes of the inputs it is a dimension of; it differs from them where it can."""


def choose_trace_sizes(wishes: Sequence[SizeWish]) -> dict[str, int]:
    """Return a size per dimension: in its bounds, at least 2 unless the bounds forbid it, distinct if possible.

    Firm sizes are taken first, so that others make way for them.
    """
    chosen: dict[str, int] = {}
    for wish in sorted(wishes, key=lambda wish: not wish.is_firm):
        chosen_sizes = set(chosen.values())
        candidates = list(_candidate_sizes(wish))
        apart = (size for size in candidates if size not in chosen_sizes and size not in wish.beside)
        distinct = (size for size in candidates if size not in chosen_sizes)
        best = candidates[0]
        chosen[wish.name] = best if wish.is_firm else next(apart, next(distinct, best))
    return {wish.name: chosen[wish.name] for wish in wishes}


def _candidate_sizes(wish: SizeWish) -> Iterator[int]:
    """Yield sizes inside the bounds, the best first: the preferred one, then smaller ones, then larger ones."""
    top = wish.max if wish.max is not None else wish.preferred + _MOST_STEPS * wish.step
    bottom = min(max(wish.min, _SMALLEST), top)
    preferred = wish.preferred
    if not wish.is_firm and wish.max is not None:
        preferred = min(preferred, int(wish.max * _SHARE_OF_LIMIT))
    first = min(max(preferred, bottom), top)
    yield first
    yield from range(first - wish.step, bottom - 1, -wish.step)
    yield from range(first + wish.step, min(top, first + _MOST_STEPS * wish.step) + 1, wish.step)
