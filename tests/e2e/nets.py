"""Models for the tests of ``file.py:function``: some can be exported, most fail, each in its own way.

Loaded by path, never imported. All take the one tensor of :func:`example_inputs`.
"""

from __future__ import annotations

import os
import time

import torch
from torch import nn


class Around(nn.Module):
    """A layer with weights, then the module under test."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.linear(x))


class Singular(nn.Module):
    """A module with an operator that no opset has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(x)


class Deciding(nn.Module):
    """A module that branches on the example, which a trace cannot represent."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x[0, 0].item() == -1.0 else x - 1


class Noise(nn.Module):
    """A module with random outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.bernoulli(torch.sigmoid(x))


class Constant(nn.Module):
    """A module with constant outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(3, 4) + 0 * x


class NotANumber(nn.Module):
    """A module with NaN outputs, which cannot be compared."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float("nan")


class Waiting(nn.Module):
    """A module that sends the signal of ``SENT_SIGNAL`` to its process during its trace, and waits to be stopped."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            os.kill(os.getpid(), int(os.environ["SENT_SIGNAL"]))
            time.sleep(120)
        return x


def good() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def wide() -> nn.Module:
    """Weights of a megabyte each, so that a file with them can be interrupted in the middle."""
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
