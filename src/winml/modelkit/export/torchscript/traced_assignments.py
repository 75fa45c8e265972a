"""Traces the assignment to one place of an axis, ``x[:, :, 2] = y``, as a new tensor in the place of the old one.

TorchScript's own form counts the places of the other axes, and keeps the counts of the traced inputs, such as rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["assignments_of_open_size"]


@contextmanager
def assignments_of_open_size() -> Iterator[None]:
    """Trace such assignments for any size of the other axes, for the time of the block; patches torch."""
    original = torch.Tensor.__setitem__

    def assign(values: torch.Tensor, index: Any, new: Any) -> None:
        axis = _axis_of_place(index) if torch.jit.is_tracing() and isinstance(new, torch.Tensor) else None
        if axis is None or new.dim() != values.dim() - 1 or new.dtype != values.dtype or values.shape[axis] == 1:
            original(values, index, new)
            return
        place = index[axis]
        parts = [values.narrow(axis, 0, place), new.unsqueeze(axis)]
        size = int(values.detach().size(axis))
        ...

    torch.Tensor.__setitem__ = assign  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.__setitem__ = original  # type: ignore[method-assign]


def _axis_of_place(index: Any) -> int | None:
    """Return the only axis whose place an index gives, where it takes all of every axis before it."""
    if not isinstance(index, tuple) or len(index) < 2:
        return None
    *before, place = index
    is_whole = all(isinstance(item, slice) and item == slice(None) for item in before)
    return len(before) if is_whole and isinstance(place, int) and not isinstance(place, bool) else None
