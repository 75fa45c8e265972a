"""What does a forward get that rounds a number it computed from sizes, while TorchScript traces it?

There a size is a tensor, and tensors have no ``round()``. Here they have one for the time of the block.
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
    """Let ``round()`` take tensors of one element inside the block; patches torch.

    The answer is a number, as it is without a trace: the graph keeps it, as it keeps what ``int()`` makes of a tensor.
    """
    if hasattr(torch.Tensor, "__round__"):
        yield
        return
    torch.Tensor.__round__ = _rounded  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del torch.Tensor.__round__  # type: ignore[attr-defined]


def _rounded(values: torch.Tensor, digits: int | None = None) -> int | float:
    number = values.item()
    if values.dtype == torch.float32:
        # What Python divides in 64 bits was divided in 32: the digits beyond are none of the number's.
        number = float(f"{number:.{_DIGITS}g}")
    return round(number, digits)
