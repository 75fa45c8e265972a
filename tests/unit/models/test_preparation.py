"""Preparation of live modules for tracing, and names of their outputs."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from winml.modelkit.errors import ExportError
from winml.modelkit.models.preparation import FlatForward, flatten_outputs, prepared_for_export

A, B, C = torch.zeros(1), torch.zeros(2), torch.zeros(3)


class Pair(NamedTuple):
    """A tuple with names."""

    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    """A result with names."""

    scores: Any
    hidden: Any = None


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (A, {"output": 1}),
        ((A, B), {"output_0": 1, "output_1": 2}),
        ([A, None, B], {"output_0": 1, "output_2": 2}),
        ((A, (B, C)), {"output_0": 1, "output_1.0": 2, "output_1.1": 3}),
        ({"x": A, "y": {"z": B, 3: C}}, {"x": 1, "y.z": 2, "y.3": 3}),
        (OrderedDict(b=B, a=A), {"b": 2, "a": 1}),
        (Pair(A, [B, C]), {"left": 1, "right.0": 2, "right.1": 3}),
        (Record(A, (B,)), {"scores": 1, "hidden.0": 2}),
        (Record(A), {"scores": 1}),
        (
            BaseModelOutput(last_hidden_state=A, hidden_states=(B, C)),
            {"last_hidden_state": 1, "hidden_states.0": 2, "hidden_states.1": 3},
        ),
        ((Pair(A, B), {"c": C}), {"output_0.left": 1, "output_0.right": 2, "output_1.c": 3}),
        (None, {}),
        (("text", 3, None), {}),
        ([], {}),
    ],
)  # fmt: skip
def test_flatten_outputs_names_tensors_by_their_path(outputs: Any, names: dict[str, int]) -> None:
    """Names are keys and positions joined by dots, in order; values other than tensors are omitted."""
    assert list(names.items()) == [(name, tensor.numel()) for name, tensor in flatten_outputs(outputs).items()]


def test_flatten_outputs_names_equal_to_inputs_get_a_suffix() -> None:
    """An output never has the name of an input."""
    assert ["mask_output", "scores"] == list(flatten_outputs({"mask": A, "scores": B}, used_names=["ids", "mask"]))


def test_flatten_outputs_ending_does_not_meet_another_output() -> None:
    """The name with the ending is free, too; no output is lost."""
    assert 2 == len(flatten_outputs({"mask": A, "mask_output": B}, used_names=["mask"]))


def test_flatten_outputs_colliding_paths_lose_no_tensor() -> None:
    """Two paths with the same name give two outputs."""
    assert 2 == len(flatten_outputs({"a.b": A, "a": {"b": B}}))


def test_flat_forward_calls_by_name_with_options() -> None:
    """Tensors reach the parameters of their names in any order, beside the fixed keywords."""

    def forward(first: torch.Tensor, second: torch.Tensor, *, scale: int = 1) -> dict[str, torch.Tensor]:
        return {"difference": (first - second) * scale}

    flat = FlatForward(forward, ["second", "first"], {"scale": 10})
    (difference,) = flat(torch.tensor(1.0), torch.tensor(4.0))
    assert 30.0 == difference.item()
    assert ("difference",) == flat.output_names


def test_flat_forward_positional_parameters_are_passed_by_position() -> None:
    """``*args`` and positional-only parameters take tensors in order."""
    assert (
        6.0
        == FlatForward(lambda *values: sum(values), ["values_0", "values_1"])(torch.tensor(2.0), torch.tensor(4.0))[0]
    )

    def forward(first: torch.Tensor, /, second: torch.Tensor) -> torch.Tensor:
        return first - second

    assert -2.0 == FlatForward(forward, ["first", "second"])(torch.tensor(2.0), torch.tensor(4.0))[0]


def test_flat_forward_without_tensors_is_refused() -> None:
    """The error names the type of the result."""
    with pytest.raises(ExportError, match="NoneType"):
        FlatForward(lambda **_tensors: None, ["x"])(A)


def test_flat_forward_renamed_outputs_keep_their_names() -> None:
    """Names once given stay for later calls."""
    flat = FlatForward(lambda x: (x, x + 1), ["x"])
    flat(A)
    assert ("output_0", "output_1") == flat.output_names
    flat.rename_outputs(["left", "right"])
    flat(A)
    assert ("left", "right") == flat.output_names


class Layer(nn.Module):
    """Two drops in different modes."""

    def __init__(self) -> None:
        super().__init__()
        self.active = nn.Dropout(0.5)
        self.still = nn.Dropout(0.5).eval()

    def forward(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Drop."""
        return {"values_": self.still(self.active(values)) * 1}


def test_prepared_for_export_evaluates_without_gradients_inside() -> None:
    """The module returns a flat tuple in evaluation mode, without gradients, inside the block."""
    model = Layer()
    with prepared_for_export(model, ["values"]) as flat:
        (output,) = model(torch.ones(4, requires_grad=True))
        assert model.forward is flat
        assert not any(module.training for module in model.modules())
        assert not output.requires_grad
        assert torch.equal(torch.ones(4), output)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("is_patched", [False, True])
def test_prepared_for_export_restores_after_an_error(is_patched: bool) -> None:
    """The flags of every submodule and an overridden forward are restored."""
    model = Layer()
    replacement = model.forward
    if is_patched:
        model.forward = replacement  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError), prepared_for_export(model, ["values"]):
        raise ZeroDivisionError
    assert [True, True, False] == [module.training for module in model.modules()]
    assert ({"forward"} if is_patched else set()) == {"forward"} & set(vars(model))
    assert not is_patched or vars(model)["forward"] is replacement


@pytest.mark.parametrize("was_enabled", [True, False])
def test_prepared_for_export_attention_is_plain_inside_the_block_only(was_enabled: bool) -> None:
    """The fast path is off inside the block, except with ``plain_attention=False``, and is restored after an error."""
    model, mha = nn.Linear(2, 2), torch.backends.mha
    found = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(was_enabled)
    try:
        with prepared_for_export(model, ["input"], plain_attention=False):
            assert was_enabled is mha.get_fastpath_enabled()
        assert_plain = Mock(side_effect=ZeroDivisionError)
        with pytest.raises(ZeroDivisionError), prepared_for_export(model, ["input"]):
            assert_plain(mha.get_fastpath_enabled())
        assert_plain.assert_called_once_with(False)
        assert was_enabled is mha.get_fastpath_enabled()
    finally:
        mha.set_fastpath_enabled(found)


def test_prepared_for_export_attribute_of_the_class_is_not_shadowed() -> None:
    """No ``forward`` remains in the attributes of the module."""
    model = Layer()
    with prepared_for_export(model, ["values"]):
        pass
    assert "forward" not in vars(model)
    assert model.forward.__func__ is Layer.forward  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # whoever has such modules cannot act on it here
@pytest.mark.parametrize(("path", "place"), [("inner.0", "module 'inner.0' is"), ("", "the model is")])
def test_prepared_for_export_scripted_module_is_refused_by_its_path(path: str, place: str) -> None:
    """No exporter looks into TorchScript; a module that was traced is not of that kind, and is let through."""
    scripted = torch.jit.script(nn.Linear(2, 2))
    model = nn.ModuleDict({"inner": nn.Sequential(scripted)}) if path else scripted
    with (
        pytest.raises(ExportError, match=rf"{place} scripted \(Linear, by torch\.jit\.script") as caught,
        prepared_for_export(model, ["input"]),
    ):
        pass
    assert "before torch.jit.script" in caught.value.hint
    traced = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)))
    with prepared_for_export(traced, ["input"]):
        assert (1, 2) == traced(torch.zeros(1, 2))[0].shape


def test_prepared_for_export_compiled_parts_are_restored() -> None:
    """The names are the user's inside the block, and the compiled module returns afterwards."""
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(model[0], backend="eager")
    model[0] = compiled  # type: ignore[assignment]  # torch.compile returns a module
    with prepared_for_export(model, ["input"]):
        assert ["", "0"] == [name for name, _ in model.named_modules()]
    assert model[0] is compiled


def test_flat_forward_passes_named_tensors_by_position_to_a_wrapper() -> None:
    """A wrapper with `*inputs` does not know the names behind it."""

    def wrapper(*inputs: torch.Tensor, **options: int) -> torch.Tensor:
        assert {"power": 2} == options
        return inputs[0] - inputs[1]

    flat = FlatForward(wrapper, ["inputs_0", "inputs_1"], {"power": 2})
    assert torch.equal(torch.ones(2), flat(torch.full((2,), 3.0), torch.full((2,), 2.0))[0])


def test_complex_output_is_refused_with_a_real_alternative() -> None:
    """ONNX Runtime has no complex numbers; the output is named."""

    class Spectrum(nn.Module):
        def forward(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"spectrum": torch.fft.rfft(values)}

    model = Spectrum()
    with (
        prepared_for_export(model, ["values"]),
        pytest.raises(ExportError, match=r"complex64\)") as caught,
    ):
        model(torch.ones(2, 8))
    assert "torch.view_as_real" in caught.value.hint


class Inner(nn.Module):
    """A module with two tensors as inputs, passed by name."""

    def forward(self, left: torch.Tensor, right: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Add the inputs that are present."""
        return {"sum": left if right is None else left + right}


class Outer(nn.Module):
    """A module with inner modules in a list, which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.inners = nn.ModuleList(Inner() for _ in range(2))

    def forward(self, left: torch.Tensor) -> torch.Tensor:
        """Run the first."""
        return self.inners[0](left)["sum"]


class Root(nn.Module):
    """A module that contains the other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = Outer()

    def forward(self, left: torch.Tensor) -> torch.Tensor:
        """Run the inner modules."""
        return self.outer(left)


def test_prepared_inner_module_is_called_through_its_parents() -> None:
    """Its inputs and outputs are the model's then; hooks of every module on the way run, and forwards come back."""
    model, seen = Root(), list[str]()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _module, _inputs, _output, name=name: seen.append(name))
    with prepared_for_export(model, ["left", "right"], path="outer.inners.1") as flat:
        assert [5.0] == [value.item() for value in model(torch.tensor(2.0), torch.tensor(3.0))]
        assert ("sum",) == flat.output_names
    assert ["outer.inners.1", "outer", ""] == seen
    assert not any("forward" in vars(module) for module in model.modules())
    assert 2.0 == model(torch.tensor(2.0)).item()
