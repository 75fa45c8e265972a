"""Reasons of a failed verification other than the graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.compare.verification.reference_run import dtypes_inside
from winml.modelkit.errors import VerificationError

TORCHSCRIPT = WinMLExportConfig(exporter="torchscript")


class Half(nn.Module):
    """A model that computes in half precision, with a float32 output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 3)).half()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Cast, apply and cast back."""
        return self.layers(values.half()).float()


class ByValue(nn.Module):
    """A model that returns one tensor or two."""

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Decide by the first value."""
        return (values + 1, values) if float(values[0]) == 7.0 else (values + 1,)


class Masked(nn.Module):
    """A model that reads its mask only if the mask hides something."""

    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Decide by the mask."""
        return values * 2 if bool(mask.all()) else values * mask


class Scaled(nn.Module):
    """A model that multiplies by its weight."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        nn.init.constant_(self.inner.weight, number)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Apply the weight."""
        return self.inner(values)


def export_error(model: nn.Module, values: torch.Tensor, folder: Path) -> VerificationError:
    """Export a model that cannot be verified, and return the error."""
    with pytest.raises(VerificationError) as caught:
        HTPExporter(TORCHSCRIPT).export(model, folder / "model.onnx", {"values": values})
    assert [] == list(folder.iterdir())
    return caught.value


def test_float32_output_of_a_half_precision_model_is_compared_as_half_precision(tmp_path: Path) -> None:
    """A cast at the end adds no precision; the result names the dtype of the rounding."""
    result = HTPExporter(TORCHSCRIPT).export(Half(), tmp_path / "model.onnx", {"values": torch.randn(3, 4)})
    assert result.only_part.verification is not None
    worst = result.only_part.verification.worst
    assert ("float32", "float16", 1e-2) == (worst.dtype, worst.computed_in, worst.threshold)
    assert "float16" == result.only_part.verification.as_record()["outputs"][0]["computed_in"]
    assert ("float16", "float32") == dtypes_inside(Half(), {"y": torch.zeros(1).numpy()})


@pytest.mark.parametrize(("number", "word"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
def test_non_finite_weight_is_named(number: float, word: str, tmp_path: Path) -> None:
    """The cause of a file with NaN alone is named."""
    error = export_error(Scaled(number), torch.ones(3, 2), tmp_path)
    assert f"parameter 'inner.weight' contains {word}" in error.message
    assert "them again" in error.hint


def test_partly_nan_outputs_are_noted(tmp_path: Path) -> None:
    """One bad weight makes the same column NaN on both sides, so the outputs are equal."""
    model = Scaled(1.0)
    with torch.no_grad():
        model.inner.weight[0, 0] = float("nan")
    result = HTPExporter(TORCHSCRIPT).export(model, tmp_path / "model.onnx", {"values": torch.randn(3, 2)})
    assert result.only_part.verification is not None
    assert [3, 3] == [item.nan_count for item in result.only_part.verification.comparisons]
    assert any(note.startswith("Output 'output' contains NaN (3 values in sample 1") for note in result.notes)


def test_outputs_that_depend_on_values_are_not_compared(tmp_path: Path) -> None:
    """The error names the outputs of both draws, and a remedy."""
    error = export_error(ByValue(), torch.tensor([7.0, 1.0]), tmp_path)
    assert "output_0, output_1; then" in error.message
    assert "same outputs" in error.hint


@pytest.mark.parametrize("hidden", [0, 2], ids=["traced without padding", "traced with padding"])
def test_mask_that_decides_the_way_is_tried_with_and_without_padding(hidden: int, tmp_path: Path) -> None:
    """One draw has padding and the other has none, for any traced mask."""
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[:, 6 - hidden :] = 0
    with pytest.raises(VerificationError, match="'output', sample 2") as caught:
        HTPExporter(TORCHSCRIPT).export(Masked(), tmp_path / "model.onnx", {"values": torch.randn(2, 6), "mask": mask})
    assert f"fails {'without' if hidden else 'with'} padding" in caught.value.hint
