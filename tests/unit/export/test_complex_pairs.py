"""Captures of complex numbers as pairs of real ones, verified against PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from winml.modelkit.export.complex_pairs import complex_as_pairs
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.exporting import export_pytorch


class Rotated(nn.Module):
    """A model that rotates pairs of values by their position, with a table of complex numbers."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Multiply with the table."""
        angles = torch.arange(values.shape[1])[:, None] * torch.tensor([1.0, 0.1])
        table = torch.polar(torch.ones_like(angles), angles) * 0.5
        turned = torch.view_as_complex(values.reshape(*values.shape[:-1], -1, 2)) * table[None]
        return torch.view_as_real(turned).flatten(2)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_complex_rotations_are_exported(tmp_path: Path, exporter: Literal["torchscript", "dynamo"]) -> None:
    """Both exporters give a graph equal to PyTorch."""
    config = WinMLExportConfig(exporter=exporter)
    result = export_pytorch(Rotated(), tmp_path / "model.onnx", torch.randn(1, 5, 4), config=config)
    assert result.only_part.verification is not None
    assert result.only_part.verification.is_verified
    assert not any(note.startswith("complex_pairs.py") for note in result.notes)


def test_pairs_compute_complex_products() -> None:
    """Products with pairs, numbers and complex buffers are computed on pairs; other functions on complex numbers."""
    values, buffer = torch.randn(2, 3, 2), torch.randn(3, dtype=torch.complex64)
    expected = torch.view_as_complex(values)
    with complex_as_pairs():
        pair = torch.view_as_complex(values)
        products = {"pair": pair * pair, "number": 2j * pair, "buffer": buffer * pair, "rows": pair[:, None].squeeze(1)}
        found = {name: torch.view_as_real(product) for name, product in products.items()}
        absolute = torch.abs(pair)
    for name, value in {
        "pair": expected**2,
        "number": 2j * expected,
        "buffer": buffer * expected,
        "rows": expected,
    }.items():
        torch.testing.assert_close(found[name], torch.view_as_real(value))
    torch.testing.assert_close(absolute, expected.abs())
    assert torch.polar(torch.ones(1), torch.zeros(1)).is_complex()


def test_operators_of_python_take_pairs() -> None:
    """The operators accept pairs like complex tensors; an in-place operation on a pair is refused."""
    parts = torch.randn(3, 2)
    expected = torch.view_as_complex(parts)
    with complex_as_pairs():
        pair = torch.view_as_complex(input=parts)
        found = [pair + pair, 1 - pair, pair / 2, -pair, torch.polar(abs=torch.ones(3), angle=torch.zeros(3)) + pair]
        found = [torch.view_as_real(value) for value in found]
        assert 3 == len(pair)
        with pytest.raises(NotImplementedError, match=r"mul_\(\)"):
            pair.mul_(2)
    for value, other in zip(found, [2 * expected, 1 - expected, expected / 2, -expected, 1 + expected], strict=True):
        torch.testing.assert_close(value, torch.view_as_real(other))
