"""Supports ``round()`` of numbers computed from sizes during a TorchScript trace.

In a trace a size is a tensor, and tensors have no ``__round__``; it is added for the time of the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["tensors_rounded_as_numbers"]

_DIGITS = 6
"""Specified: how many decimal digits 32 bits keep for certain (``FLT_DIG``)."""


@contextmanager
def tensors_rounded_as_numbers() -> Iterator[None]:
    """Let ``round()`` accept tensors of one element inside the block; patches torch.

    The result is a Python number, as without a trace: it becomes a constant of the graph, as with ``int()``.
    """
    if hasattr(torch.Tensor, "__round__"):
        yield
        return
    torch.Tensor.__round__ = _round_tensor  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del torch.Tensor.__round__  # type: ignore[attr-defined]


def _round_tensor(values: torch.Tensor, digits: int | None = None) -> int | float:
    number = values.item()
    if values.dtype == torch.float32:
        # Python computes in 64 bits, the trace in 32: drop the digits that 32 bits do not have.
        number = float(f"{number:.{_DIGITS}g}")
    return round(number, digits)
