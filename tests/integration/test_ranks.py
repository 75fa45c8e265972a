"""Comparison of indices by rank: indices of equal values are compared by the values, since both orders are correct."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from winml.modelkit import ExportResult, HTPExporter, WinMLExportConfig
from winml.modelkit.errors import VerificationError

NUMBERS = torch.arange(80).reshape(2, 40) * 7 % 4
"""Numbers with many equal values."""


class Ranked(nn.Module):
    """Returns indices by rank."""

    def __init__(self, places: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.places = places

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the indices."""
        return self.places(numbers)


def export(places: Callable[[torch.Tensor], torch.Tensor], folder: Path) -> ExportResult:
    """Export and verify."""
    return HTPExporter(WinMLExportConfig(exporter="torchscript")).export(Ranked(places), folder / "m.onnx", NUMBERS)


@pytest.mark.parametrize(
    "places",
    [
        lambda numbers: torch.topk(numbers, 9).indices,
        lambda numbers: torch.topk(numbers, 9, dim=1, largest=False).indices + 0,
        lambda numbers: torch.sort(numbers, dim=-1, descending=True).indices,
    ],
    ids=["largest", "smallest", "sorted"],
)
def test_another_order_of_equal_values_is_accepted(places: Any, tmp_path: Path) -> None:
    """ONNX Runtime and PyTorch order equal values differently, also in the first draws."""
    verification = export(places, tmp_path).only_part.verification
    assert verification is not None
    assert verification.agrees


def test_other_values_are_not_accepted(tmp_path: Path) -> None:
    """Indices that a trace froze select other values."""

    def frozen(numbers: torch.Tensor) -> torch.Tensor:
        return torch.topk(torch.tensor(numbers.tolist()) + 0 * numbers, 9).indices

    with pytest.raises(VerificationError):
        export(frozen, tmp_path)
