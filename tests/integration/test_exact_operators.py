"""Do both exporters write operators that answer as PyTorch does where torch's own forms do not?

At zeros with a sign, near zero, and for negative integers: values that random inputs seldom hold.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.export.tensors import to_numpy
from winml.modelkit.runtime.sessions import Session

ZERO = [0.0, -0.0]
POINTS = torch.tensor([[y, x] for y in (*ZERO, 1.0, -2.0) for x in (*ZERO, 3.0, -1.0)])
SMALL = torch.tensor([[-0.9, -1e-3, -1e-6, 0.0, 1e-8, 1e-6, 1e-3, 0.5, 30.0]])
SIGNED = torch.tensor([[-8, -7, -1, 0, 1, 7, 8]])
DIVISORS = torch.tensor([[3, -2, 2, 5, -3, 2, -8]])
SHORT = torch.tensor([[1e-7, -2e-7, 3e-7], [3e-9, 1e-9, -1e-9]])

CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "atan2": (lambda points: torch.atan2(points[:, 0], points[:, 1]), (POINTS,)),
    "expm1": (torch.expm1, (SMALL,)),
    "log1p": (torch.log1p, (SMALL,)),
    "cosine": (lambda values: nn.functional.cosine_similarity(values, values.roll(1, 0), dim=1), (SHORT,)),
    "floor_divide": (lambda values, divisor: values // divisor, (SIGNED, DIVISORS)),
    "floor_divide_int32": (lambda values: values.int() // 2, (SIGNED,)),
    "floor_divide_floats": (lambda values, divisor: values / 2 // divisor, (SIGNED, DIVISORS)),
    "right_shift": (lambda values: values >> 1, (SIGNED,)),
    "remainder": (lambda values, divisor: values % divisor, (SIGNED, DIVISORS)),
}


class Applied(nn.Module):
    """Applies a function."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, first: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
        """Apply it."""
        return self.function(first) if second is None else self.function(first, second)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("name", CASES)
def test_operator_is_that_of_torch(name: str, exporter: Any, tmp_path: Path) -> None:
    """To seven digits of floats, and exactly of integers; the traced values were others."""
    function, tensors = CASES[name]
    traced = {
        key: torch.rand_like(value) + 1 if value.is_floating_point() else torch.randint_like(value, 1, 9)
        for key, value in zip(("first", "second"), tensors, strict=False)
    }
    config = WinMLExportConfig(exporter=exporter, verify=False)
    HTPExporter(config).export(Applied(function), tmp_path / "model.onnx", traced)
    feeds = dict(zip(traced, map(to_numpy, tensors), strict=True))
    (answer,) = Session(tmp_path / "model.onnx").run(feeds).values()
    torch.testing.assert_close(torch.from_numpy(answer), function(*tensors), rtol=1e-6, atol=0.0)


def test_sizes_are_divided_by_one_operator(tmp_path: Path) -> None:
    """They are never negative; what is below a size may be."""

    def halves(values: torch.Tensor) -> torch.Tensor:
        return values[:, : values.shape[1] // 2]

    config = WinMLExportConfig(exporter="torchscript", dynamic_axes={"first": {1: "length"}})
    result = HTPExporter(config).export(Applied(halves), tmp_path / "model.onnx", {"first": torch.randn(2, 8)})
    assert "Xor" not in {node.op_type for node in result.only_part.nodes}
    assert result.only_part.verification is not None
    assert result.only_part.verification.is_verified
