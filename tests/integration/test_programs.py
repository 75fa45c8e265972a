"""Refusal of models without Python code: the message names TorchScript or the exported program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.errors import InternalError, WinMLError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

INPUTS = (torch.randn(2, 4),)


def net() -> nn.Module:
    """Build a small module."""
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).eval()


class WithScriptedPart(nn.Module):
    """Calls a TorchScript module."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = torch.jit.script(net()), nn.Linear(2, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call both modules."""
        result: torch.Tensor = self.last(self.part(values))
        return result


def loaded(folder: Path) -> Any:
    """Save a TorchScript archive and return it loaded."""
    torch.jit.save(torch.jit.script(net()), folder / "net.pt")
    return torch.jit.load(folder / "net.pt")


PROGRAMS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "scripted": (lambda _folder: torch.jit.script(net()), "TorchScript"),
    "loaded": (loaded, "TorchScript"),
    "traced": (lambda _folder: torch.jit.trace(net(), INPUTS), "not a Python function"),
    "module with a scripted part": (lambda _folder: WithScriptedPart(), "module 'part' is TorchScript"),
    "exported program": (lambda _folder: torch.export.export(net(), INPUTS), "ExportedProgram"),
    "module of an exported program": (
        lambda _folder: torch.export.export(net(), INPUTS).module(),
        r"module\(\) of an exported program",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_is_refused_with_the_accepted_object(name: str, tmp_path: Path) -> None:
    """The refusal comes before tracing; the hint asks for the nn.Module."""
    build, words = PROGRAMS[name]
    program = build(tmp_path)
    with pytest.raises(WinMLError) as caught:
        HTPExporter(WinMLExportConfig()).export(program, tmp_path / "model.onnx", INPUTS)
    assert not isinstance(caught.value, InternalError)
    caught.match(words)
    assert "nn.Module" in caught.value.hint
    assert not (tmp_path / "model.onnx").exists()


def test_module_left_in_training_mode_is_noted(tmp_path: Path) -> None:
    """The export evaluates the module; a model entirely in training mode is usual and is not noted."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2)).eval()
    exporter = HTPExporter(WinMLExportConfig())
    assert not any("training" in note for note in exporter.export(model, tmp_path / "a.onnx", INPUTS).only_part.notes)
    model[1].train()
    notes = exporter.export(model, tmp_path / "b.onnx", INPUTS).only_part.notes
    assert ["1 is in training mode inside a model in evaluation mode: exported in evaluation mode."] == [
        note for note in notes if "training" in note
    ]
    assert model[1].training
