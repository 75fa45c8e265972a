"""Modules with a loop over the experts chosen for at least one row."""

from __future__ import annotations

import torch
from torch import nn


class Experts(nn.Module):
    """Routes each row to its highest-scored expert, in a loop over the chosen experts."""

    def __init__(self, classes: int, *, experts: int = 3, skips: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.router = nn.Parameter(torch.randn(4, experts, generator=generator))
        self.experts = nn.Parameter(torch.randn(experts, 4, 4, generator=generator))
        self.classes = classes
        self.skips = skips

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply the rows of each expert by its matrix."""
        chosen = nn.functional.one_hot((rows @ self.router).argmax(-1), self.classes).T
        answers = torch.zeros_like(rows)
        for places in (chosen.sum(-1) > 0).nonzero():
            place = places[0]
            (members,) = torch.where(chosen[place])
            if self.skips and members.numel() == 0:
                continue
            answers.index_add_(0, members, rows[members] @ self.experts[place])
        return answers


class Slip(Experts):
    """Makes a mistake in the iteration of one expert."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Index a row that does not exist."""
        chosen = nn.functional.one_hot((rows @ self.router).argmax(-1), self.classes).T
        for places in torch.nonzero(input=chosen.sum(-1) > 0):
            rows = rows + rows[:1] * self.experts[places[0], 0] + chosen[7, 0]
        return rows
