"""Replaces Python bools by numbers in calls of torch functions during tracing.

TorchScript's tracer records a bool as an operand of a signature that does not exist, and fails with an internal error.
Where the result is the same, such a bool is replaced by 1 or 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from winml.modelkit.runtime.shared_settings import attribute_replaced

__all__ = ["booleans_as_numbers"]

_OF_TENSORS = (
    *("fill_", "fill_diagonal_", "index_fill", "index_fill_", "masked_fill", "masked_fill_", "new_full"),
    *("scatter", "scatter_"),
)
_OF_TORCH = ("full", "full_like", "index_fill", "masked_fill", "scatter")
"""Specified, with those above: functions that write a number into a tensor; all but ``full`` use the tensor's dtype."""
_NAMES_OF_NUMBERS = ("fill_value", "value")


@contextmanager
def booleans_as_numbers() -> Iterator[None]:
    """Pass 1 and 0 instead of True and False to the functions above, for the time of the block; patches torch."""
    with ExitStack() as stack:
        for name in _OF_TENSORS:
            stack.enter_context(_taking_numbers(torch.Tensor, name))
        for name in _OF_TORCH:
            stack.enter_context(_taking_numbers(torch, name))
        yield


@contextmanager
def _taking_numbers(owner: Any, name: str) -> Iterator[None]:
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        numbers = {key: options[key] for key in _NAMES_OF_NUMBERS if key in options}
        if name == "full" and any(isinstance(value, bool) for value in (*args, *numbers.values())):
            # The only one whose dtype follows from the number.
            options["dtype"] = options.get("dtype") or torch.bool
        return original(
            *map(_as_number, args), **{**options, **{key: _as_number(value) for key, value in numbers.items()}}
        )

    with attribute_replaced(owner, name, call):
        yield


def _as_number(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value
