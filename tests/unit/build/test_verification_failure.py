"""Is it told why a file does not answer as the model does, where that is not the graph?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.build.reference_run import dtypes_inside
from winml.modelkit.errors import VerificationError

TORCHSCRIPT = WinMLExportConfig(exporter="torchscript")


class Half(nn.Module):
    """Computes in half precision, and answers in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 3)).half()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Cast, apply, cast back."""
        return self.layers(values.half()).float()


class ByValue(nn.Module):
    """Returns one tensor or two."""

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Decide by the first value."""
        return (values + 1, values) if float(values[0]) == 7.0 else (values + 1,)


class Scaled(nn.Module):
    """Multiplies by its weight."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        nn.init.constant_(self.inner.weight, number)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        return self.inner(values)


def export_error(model: nn.Module, values: torch.Tensor, folder: Path) -> VerificationError:
    """Export what cannot be verified."""
    with pytest.raises(VerificationError) as caught:
        HTPExporter(TORCHSCRIPT).export(model, folder / "model.onnx", {"values": values})
    assert [] == list(folder.iterdir())
    return caught.value


def test_float32_answer_of_a_half_precision_model_is_compared_as_half_precision(tmp_path: Path) -> None:
    """A cast at the end makes nothing more exact; the result tells whose rounding was taken."""
    result = HTPExporter(TORCHSCRIPT).export(Half(), tmp_path / "model.onnx", {"values": torch.randn(3, 4)})
    assert result.verification is not None
    worst = result.verification.worst
    assert ("float32", "float16", 1e-2) == (worst.dtype, worst.computed_in, worst.threshold)
    assert "float16" == result.verification.as_record()["outputs"][0]["computed_in"]
    assert ("float16", "float32") == dtypes_inside(Half(), {"y": torch.zeros(1).numpy()})


@pytest.mark.parametrize(("number", "word"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
def test_weight_that_is_no_number_is_named(number: float, word: str, tmp_path: Path) -> None:
    """Whoever meets a file of nothing but NaN is told where it comes from."""
    error = export_error(Scaled(number), torch.ones(3, 2), tmp_path)
    assert f"parameter 'inner.weight' holds {word}" in error.message
    assert "get them again" in error.hint


def test_outputs_that_depend_on_values_are_not_compared(tmp_path: Path) -> None:
    """Both draws' outputs are named, and what to do."""
    error = export_error(ByValue(), torch.tensor([7.0, 1.0]), tmp_path)
    assert "returns other outputs (output_0, output_1; then output_0)" in error.message
    assert "same outputs" in error.hint
