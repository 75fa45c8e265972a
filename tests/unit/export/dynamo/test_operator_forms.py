"""Decompositions of operators that torch's dynamo exporter lacks or has wrong, in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

from unit.export.dynamo.test_capturing import capture

VALUES = torch.tensor([-1.0, -0.9999, -0.71, -0.3, 0.0, 1e-4, 0.7, 0.95, 0.999999, 1.0, 1.5])


class Computing(nn.Module):
    """A module that applies a function."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Apply the function."""
        return self.act(values)


class Bags(nn.Module):
    """A module that sums weighted rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 4))
        self.weights = nn.Parameter(torch.randn(3, 2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Sum the rows, and add the averages."""
        sums = nn.functional.embedding_bag(values, self.table, per_sample_weights=self.weights, mode="sum")
        return sums + nn.functional.embedding_bag(values, self.table)


FORMS: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "bags": (Bags(), torch.tensor([[0, 3], [1, 1], [4, 2]])),
    "erfinv": (Computing(torch.erfinv), VALUES),
    "conv3d without bias": (nn.Conv3d(2, 4, (1, 2, 2), stride=(1, 2, 2), bias=False), torch.randn(1, 2, 3, 4, 4)),
    "squeeze of a longer axis": (Computing(lambda values: values.squeeze(1) * 2), torch.randn(1, 3, 4)),
    "squeeze": (Computing(lambda values: values.squeeze(-3) * 2), torch.randn(1, 3, 4)),
    "conv3d": (nn.Conv3d(2, 4, 2, padding=(0, 1, 1), dilation=2, groups=2), torch.randn(1, 2, 3, 4, 4)),
}


@pytest.mark.parametrize("name", FORMS)
def test_form_equals_pytorch(name: str, tmp_path: Path) -> None:
    """The graph of one operator gives the values of PyTorch, limits and NaN included."""
    model, values = FORMS[name]
    captured = capture(model.eval(), {"input" if isinstance(model, nn.Conv3d) else "values": values})
    ir.save(captured.model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: values.numpy()})
    with torch.no_grad():
        expected = model(values)
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=2e-6, atol=1e-6, equal_nan=True)
