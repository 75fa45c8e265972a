"""Verification of graphs with weights that hide wrong outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from winml.modelkit import ExportResult, HTPExporter, WinMLExportConfig
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.errors import VerificationError


class Headed(nn.Module):
    """A body and a head of zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor) -> object:
        """Return the output of the head, which is zero."""
        return self.head(torch.relu(self.body(x)))


class TwoHeaded(Headed):
    """A head of zeros beside the body's output, as in ControlNet."""

    def forward(self, x: torch.Tensor) -> object:
        """Return the outputs of body and head."""
        body = torch.relu(self.body(x))
        return body, self.head(body)


class Frozen(Headed):
    """A body traced as a constant: NumPy computes with the values of its input."""

    def forward(self, x: torch.Tensor) -> object:
        """Return the output of the head, which is zero."""
        return self.head(self.body(x) * torch.from_numpy(np.abs(x.detach().numpy())))


class Counted(Headed):
    """One output depends on the shape of the input alone."""

    def forward(self, x: torch.Tensor) -> object:
        """Return the body's output and the numbers from 0."""
        return self.body(x), torch.arange(x.shape[1])


def export(model: nn.Module, folder: Path) -> tuple[ExportResult, VerificationInfo]:
    """Export a model."""
    exporter = HTPExporter(WinMLExportConfig(exporter="torchscript"))
    result = exporter.export(model.eval(), folder / "model.onnx", torch.randn(2, 8))
    assert result.only_part.verification is not None
    return result, result.only_part.verification


@pytest.mark.parametrize("model", [Headed, TwoHeaded])
def test_zero_head_is_compared_on_a_copy_and_written_unchanged(model: type[nn.Module], tmp_path: Path) -> None:
    """A note reports the copy; the model and the file keep their own weights."""
    made = model()
    before = {name: value.clone() for name, value in made.named_parameters()}
    result, verification = export(made, tmp_path)
    assert (True, True) == (verification.is_verified, verification.on_drawn_weights)
    assert any("random weights" in note for note in result.notes)
    stored = {item.name: numpy_helper.to_array(item) for item in onnx.load(tmp_path / "model.onnx").graph.initializer}
    for name, value in made.named_parameters():
        assert torch.equal(before[name], value), name
        if name in stored and stored[name].shape == value.shape:
            assert np.array_equal(stored[name], value.detach().numpy()), name
    assert (True, True) == (not stored["head.bias"].any(), bool(stored["body.bias"].any()))


def test_wrong_graph_before_a_head_of_zeros_is_refused(tmp_path: Path) -> None:
    """The wrong graph would equal the model if compared with the zero weights."""

    class Other(Frozen):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8)
            self.head = nn.Linear(8, 4)
            nn.init.zeros_(self.head.weight)

    with pytest.raises(VerificationError, match="random weights"):
        export(Other(), tmp_path)
    assert not (tmp_path / "model.onnx").exists()


def test_output_that_no_input_changes_is_listed(tmp_path: Path) -> None:
    """No weights show whether the output follows an input."""
    _, verification = export(Counted(), tmp_path)
    assert verification.assumed is not None
    assert [("constant_output", "output_1")] == [(item.kind, item.value) for item in verification.assumed]
    assert (False, True) == (verification.is_verified, verification.agrees)
