"""Lets transformers make masks of several conditions in a form that TorchScript records.

Where a mask joins conditions of its own, transformers asks them for one pair of tokens and maps that over all pairs
with ``torch.vmap``, which the tracer cannot record. The same conditions, asked for all pairs at once, give the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["masks_without_vmap"]

_MODULE = "transformers.masking_utils"
_MAPPED, _INDEXING = "_vmap_expansion_sdpa", "TransformGetItemToIndex"
"""Not public: what maps conditions over tokens, and how their tensors are indexed meanwhile."""


@contextmanager
def masks_without_vmap() -> Iterator[None]:
    """Ask conditions of masks for all pairs of tokens at once, for the time of the block; patches transformers."""
    module: Any = sys.modules.get(_MODULE)
    own = {name: getattr(module, name) for name in (_MAPPED, _INDEXING) if hasattr(module, name)}
    for name, replacement in {_MAPPED: _asked_at_once, _INDEXING: nullcontext}.items():
        if name in own:
            setattr(module, name, replacement)
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(module, name, value)


def _asked_at_once(condition: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return what makes the mask of a condition from the numbers of rows, heads, tokens and tokens they may see."""

    def mask(*numbers: torch.Tensor) -> torch.Tensor:
        placed = [
            item[(*[None] * axis, slice(None), *[None] * (len(numbers) - axis - 1))]
            for axis, item in enumerate(numbers)
        ]
        return condition(*placed).expand(*(item.shape[0] for item in numbers))

    return mask
