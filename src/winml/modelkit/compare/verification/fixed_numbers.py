"""Runs of PyTorch whose random numbers are fixed, as those of a graph are for a comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from winml.modelkit.onnx.random_numbers import FIXED_NORMAL, FIXED_UNIFORM

_NUMBERS = {
    torch.randn: FIXED_NORMAL, torch.randn_like: FIXED_NORMAL, torch.rand: FIXED_UNIFORM,
    torch.rand_like: FIXED_UNIFORM,
}  # fmt: skip


class FixedNumbers(TorchFunctionMode):
    """Fix the numbers that are drawn without a generator of their own."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch."""
        drawn = func(*args, **(kwargs or {}))
        if func in _NUMBERS and "generator" not in (kwargs or {}):
            drawn.fill_(_NUMBERS[func])
        return drawn
