"""Which models do the tests of ``file.py:factory`` export? Some go well, most go wrong in a way of their own.

Loaded by path, never imported. All take the one tensor of :func:`example_inputs`.
"""

from __future__ import annotations

import os
import time

import torch
from torch import nn


class Around(nn.Module):
    """A layer with weights, then the module a test is about."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.linear(x))


class Singular(nn.Module):
    """Needs an operator no opset has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(x)


class Deciding(nn.Module):
    """Goes one way for the example and another for everything else, as a trace cannot."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x[0, 0].item() == -1.0 else x - 1


class Noise(nn.Module):
    """Answers differently each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(3, 4)


class Constant(nn.Module):
    """Answers the same whatever it is asked."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(3, 4) + 0 * x


class NotANumber(nn.Module):
    """Answers nothing that can be compared."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float("nan")


class Waiting(nn.Module):
    """Sends the signal of ``SENT_SIGNAL`` to its process while it is traced, and waits: stopped in the middle."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            os.kill(os.getpid(), int(os.environ["SENT_SIGNAL"]))
            time.sleep(120)
        return x


def good() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def wide() -> nn.Module:
    """Weights of a megabyte each, so that a file of them can end in the middle."""
    return nn.Sequential(nn.Linear(4, 512), *(nn.Linear(512, 512) for _ in range(3)))


def singular() -> nn.Module:
    return Around(Singular())


def deciding() -> nn.Module:
    return Deciding()


def noise() -> nn.Module:
    return Around(Noise())


def constant() -> nn.Module:
    return Around(Constant())


def not_a_number() -> nn.Module:
    return Around(NotANumber())


def waiting() -> nn.Module:
    return Around(Waiting())


def broken() -> nn.Module:
    raise ValueError("the recipe is missing")


def number() -> int:
    return 7


def example_inputs() -> torch.Tensor:
    return torch.linspace(-1.0, 2.0, 12).reshape(3, 4)
