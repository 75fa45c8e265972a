"""Is it told why PyTorch does not answer, and what was known about its inputs?"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from winml.modelkit.errors import ExportError
from winml.modelkit.export.preparation import prepared_for_export
from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.load.parts import LoadedModel, ModelInfo
from winml.modelkit.verify.reference_run import run_reference


@pytest.mark.parametrize(
    ("notes", "words"),
    [
        ((), []),
        (("how many tokens is not known; --input-specs says it", "Cast."),
         ["Note: how many tokens is not known; --input-specs says it.", "Note: Cast."]),
    ],
)  # fmt: skip
def test_reference_that_is_refused_repeats_what_was_noted_about_the_inputs(
    notes: tuple[str, ...], words: list[str]
) -> None:
    """What the model's inputs were decided by is the first thing to look at."""
    loaded = LoadedModel(
        model=nn.Sequential(nn.Linear(3, 2)),
        inputs=(InputTensorSpec(name="input", shape=(1, 4), dtype="float32"),),
        info=ModelInfo("module", "Sequential", "torch", "2"),
        notes=notes,
    )
    with prepared_for_export(loaded.model, ["input"], {}) as forward, pytest.raises(ExportError) as caught:
        run_reference(loaded, forward, {"input": torch.zeros(1, 4)})
    assert "the model refused input float32[1, 4], in module 0" in caught.value.message
    assert words == (caught.value.hint or "").splitlines()[1:]
