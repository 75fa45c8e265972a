"""Inputs of a module that the caller passes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from checkpoints import build_model
from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.models.live_module import loaded_from_module
from winml.modelkit.onnx.specs import InputTensorSpec


class Model(nn.Module):
    """A model with two tensors as inputs."""

    def forward(self, values: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Add the tensors."""
        return values if ids is None else values + ids


IDS = torch.tensor([[3, 7, 5]])
SPEC = InputTensorSpec(name="values", shape=(2, 2), dtype="float64")


@pytest.mark.parametrize(
    ("inputs", "shapes"),
    [
        (torch.zeros(2, 3), {"values": (2, 3)}),
        ([torch.zeros(2), IDS], {"values": (2,), "ids": (1, 3)}),
        ((torch.zeros(2), IDS), {"values": (2,), "ids": (1, 3)}),
        ({"ids": IDS, "values": torch.zeros(2)}, {"ids": (1, 3), "values": (2,)}),
    ],
    ids=["one", "list", "tuple", "by name"],
)
def test_examples_are_named_after_parameters_in_their_order(inputs: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """One tensor, several by position, or by name; shapes become those of the graph."""
    loaded = loaded_from_module(Model(), inputs)
    assert list(shapes.items()) == [(spec.name, spec.shape) for spec in loaded.only_part.inputs]
    assert loaded.only_part.example is not None
    assert list(shapes) == list(loaded.only_part.example)


def test_examples_of_indices_bound_the_valid_values() -> None:
    """Random draws stay between the smallest and the largest index of the example."""
    spec = loaded_from_module(Model(), {"values": torch.zeros(1), "ids": IDS}).only_part.inputs[1]
    assert ("int64", (3.0, 7.0)) == (spec.dtype, spec.value_range)


def test_examples_win_over_input_tensors() -> None:
    """Examples take precedence over input tensor descriptions."""
    loaded = loaded_from_module(Model(), torch.zeros(2, 3), input_tensors=(SPEC,))
    assert (2, 3) == loaded.only_part.inputs[0].shape


def test_input_tensors_are_accepted_without_examples() -> None:
    """Specifications are enough; values are drawn later."""
    loaded = loaded_from_module(Model(), None, input_tensors=(SPEC,))
    assert ((SPEC,), None) == (loaded.only_part.inputs, loaded.only_part.example)


def test_transformers_model_is_described_by_its_config() -> None:
    """The config of a transformers model is enough, and its version is recorded."""
    import transformers

    loaded = loaded_from_module(build_model("bert"), None)
    assert {"input_ids", "attention_mask"} <= {spec.name for spec in loaded.only_part.inputs}
    assert ("transformers", transformers.__version__) == (loaded.info.library, loaded.info.library_version)
    assert ("BertModel", "bert", "live") == (loaded.info.class_name, loaded.info.model_type, loaded.info.source_kind)


def test_plain_module_is_recorded_as_torch() -> None:
    """A module that is no transformers model is torch's, named after its class."""
    info = loaded_from_module(Model(), torch.zeros(1)).info
    assert ("torch", torch.__version__, "Model") == (info.library, info.library_version, info.name_or_path)


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        (None, UsageError, "inputs of Model"),
        ({"value": torch.zeros(1)}, UsageError, "value"),
        ([torch.zeros(1)] * 3, InputError, "3 values, .* 2"),
        ({"values": 3}, InputError, "'values'"),
        ([], InputError, "no inputs"),
        (torch.zeros(1, dtype=torch.complex64), UsageError, "complex64"),
    ],
    ids=["nothing", "unknown name", "too many", "no tensor", "empty", "unknown dtype"],
)
def test_inputs_that_cannot_be_are_refused(inputs: Any, error: type[Exception], words: str) -> None:
    """The error names the value, and the hint an alternative."""
    with pytest.raises(error, match=words) as caught:
        loaded_from_module(Model(), inputs)
    assert caught.value.hint  # type: ignore[attr-defined]


def test_module_is_not_touched() -> None:
    """The description of a module does not change the module."""
    model = Model().train()
    before = dict(vars(model))
    loaded_from_module(model, torch.zeros(1))
    assert before == vars(model)
    assert model.training


def test_traced_module_is_refused_for_its_unknown_inputs() -> None:
    """A module traced by torch.jit has no Python forward; the hint asks for an nn.Module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(nn.Linear(4, 2), torch.ones(1, 4))
    with pytest.raises(InputError, match="Python function") as caught:
        loaded_from_module(traced, torch.ones(1, 4))
    assert "nn.Module" in caught.value.hint
