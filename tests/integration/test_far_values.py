"""Verification far from 0: files correct only near 0 are refused, unless PyTorch itself fails there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.errors import VerificationError
from winml.modelkit.onnx.specs import InputTensorSpec


class Behind(nn.Module):
    """Applies a function to the output of a layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Apply layer and function."""
        return self.function(self.layer(values))


def export(function: Callable[[torch.Tensor], torch.Tensor], folder: Path, **options: Any) -> Any:
    """Export a module with the function, and return its part."""
    inputs = {"values": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}
    exporter = HTPExporter(WinMLExportConfig(**options))
    return exporter.export(Behind(function), folder / "model.onnx", inputs).only_part


def log_of_scaled_sigmoid(values: torch.Tensor) -> torch.Tensor:
    """Compute a log that is infinite in ONNX Runtime, where sigmoid is 0 from -18 on."""
    return torch.log(torch.sigmoid(values) * 1.0)


def test_file_wrong_for_large_values_is_refused_with_operator_and_range(tmp_path: Path) -> None:
    """The message names the operator that returns infinity and the range of values."""
    with pytest.raises(VerificationError, match=r"values from -?\d.*Log.* of values from 0 to 1") as caught:
        export(log_of_scaled_sigmoid, tmp_path)
    assert 3 == caught.value.exit_code
    assert not list(tmp_path.iterdir())


def test_declared_range_is_the_remedy(tmp_path: Path) -> None:
    """The message names the remedy: a value range excludes the values beyond."""
    spec = InputTensorSpec(name="values", dtype="float32", shape=(4, 8), value_range=(-3.0, 3.0))
    exporter = HTPExporter(WinMLExportConfig(input_tensors=(spec,)))
    part = exporter.export(Behind(log_of_scaled_sigmoid), tmp_path / "model.onnx").only_part
    assert part.verification is not None
    assert part.verification.is_verified


@pytest.mark.parametrize(
    "function",
    [
        lambda values: torch.log(values.sigmoid()),
        # PyTorch's float32 is rounding where 1 - sigmoid is 6e-8.
        lambda values: torch.log(1 - values.sigmoid() + 1e-30),
        # Infinite on both sides, and NaN.
        torch.exp,
        lambda values: torch.exp(values) / torch.exp(values).sum(-1, keepdim=True),
        lambda values: torch.sqrt(4 - values**2).log(),
        # Scores so far apart that the largest always wins.
        lambda values: (values @ values.T * 10).softmax(-1).log1p(),
        # A length.
        lambda values: torch.arange(values.exp().sum().long().clamp(max=9)) * values.mean(),
        nn.functional.softplus,
        nn.functional.logsigmoid,
    ],
)
def test_good_model_is_not_refused(function: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    """The model is compared only where PyTorch's own output is meaningful."""
    part = export(function, tmp_path, accept_assumptions=True)
    assert part.verification is not None
    assert part.verification.agrees


def test_no_run_is_spent_on_a_graph_without_sensitive_operators(tmp_path: Path) -> None:
    """An exponential in the graph costs one more run of the forward."""
    counts = []
    for function in (torch.relu, torch.exp):
        calls: list[int] = []

        def counted(values: torch.Tensor, calls: list[int] = calls, function: Any = function) -> torch.Tensor:
            calls.append(1)
            result: torch.Tensor = function(values)
            return result

        (tmp_path / function.__name__).mkdir()
        export(counted, tmp_path / function.__name__)
        counts.append(len(calls))
    assert counts[0] + 1 == counts[1]
