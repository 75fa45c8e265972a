"""Errors of a failed PyTorch run, with the notes about its inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from winml.modelkit.compare.verification.reference_run import prepared_part, run_reference
from winml.modelkit.errors import ExportError
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.onnx.specs import InputTensorSpec


@pytest.mark.parametrize(
    ("notes", "words"),
    [
        ((), ""),
        (("how many tokens is not known; --input-specs says it", "Cast."),
         " Note: how many tokens is not known; --input-specs says it. Note: Cast."),
    ],
)  # fmt: skip
def test_refused_reference_repeats_the_notes_on_inputs(notes: tuple[str, ...], words: str) -> None:
    """The hint names the source of the model's inputs first."""
    part = ModelPart(
        model=nn.Sequential(nn.Linear(3, 2)),
        inputs=(InputTensorSpec(name="input", shape=(1, 4), dtype="float32"),),
        notes=notes,
    )
    with prepared_part(part) as prepared, pytest.raises(ExportError) as caught:
        run_reference(prepared, {"input": torch.zeros(1, 4)})
    assert "float32[1, 4]" in caught.value.message
    assert "Set valid shapes with --shape-config, or all inputs with --input-specs." + words == caught.value.hint


class Compiling(nn.Module):
    """A model that compiles a function with options only."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call the function that a decorator returns."""
        return torch.compile(fullgraph=True)(torch.relu)(values)


def test_function_compiled_with_options_runs_uncompiled() -> None:
    """The decorator form of torch.compile returns the function."""
    part = ModelPart(model=Compiling(), inputs=(InputTensorSpec(name="values", shape=(2,), dtype="float32"),))
    with prepared_part(part) as prepared:
        (answer,) = run_reference(prepared, {"values": torch.tensor([-1.0, 1.0])}).values()
    assert [0.0, 1.0] == answer.tolist()
