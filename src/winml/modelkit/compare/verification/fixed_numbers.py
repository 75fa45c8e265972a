"""Runs of PyTorch whose random numbers are fixed, as those of a graph are for a comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from winml.modelkit.onnx.random_numbers import FIXED

_DRAWING = (torch.randn, torch.randn_like, torch.rand, torch.rand_like)


class FixedNumbers(TorchFunctionMode):
    """Fix the numbers that are drawn without a generator of their own."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch."""
        drawn = func(*args, **(kwargs or {}))
        return drawn.fill_(FIXED) if func in _DRAWING and "generator" not in (kwargs or {}) else drawn
