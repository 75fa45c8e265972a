"""Merging of adapters by the published formulas, into values in memory and into deferred tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from adapters import merge_by_formula, save_adapter
from winml.modelkit.errors import CheckpointError
from winml.modelkit.models.checkpoints.adapters import Adapter, read_adapters
from winml.modelkit.models.checkpoints.deferred_tensors import DeferredTensor, deferred_entries
from winml.modelkit.models.checkpoints.merging import check_adapters, merge_adapters, swappable_branches
from winml.modelkit.models.checkpoints.weight_files import stored_entries

TARGETS = ("table", "linear", "columns", "image", "signal", "attention", "out_proj", "head")
# Sums of a few products of float32.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Net(nn.Module):
    """A model with a module of each class that takes LoRA; ``head`` shares the weight of ``table``."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.linear = nn.Linear(8, 6)
        self.columns = Conv1D(5, 6)
        self.image = nn.Conv2d(3, 4, (3, 2))
        self.signal = nn.Conv1d(3, 4, 3)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight


@pytest.fixture
def net() -> Net:
    """A net with random values."""
    torch.manual_seed(0)
    return Net()


def deferred(model: nn.Module, folder: Path) -> nn.Module:
    """Return a copy of a model with parameters deferred to a file."""
    save_file({name: value.detach().clone() for name, value in model.state_dict().items()}, folder / "base.safetensors")
    tensors: Any = deferred_entries(stored_entries([folder / "base.safetensors"]))
    unread = copy.deepcopy(model)
    for path, module in unread.named_modules():
        for name in list(module._parameters):
            if module._parameters[name] is not None:
                module._parameters[name] = nn.Parameter(tensors[f"{path}.{name}".lstrip(".")], requires_grad=False)
    return unread


def read(folder: Path, net: nn.Module) -> tuple[Adapter, ...]:
    """Return an adapter that fits a model."""
    adapters = read_adapters((str(folder),))
    check_adapters(net, adapters)
    return adapters


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("rslora", [False, True])
def test_each_class_of_module_gets_its_matrices_added(
    tmp_path: Path, net: Net, is_deferred: bool, rslora: bool
) -> None:
    """W + scaling · B · A: tables and Conv1D transposed, kernels of convolutions element by element."""
    folder = save_adapter(
        tmp_path / "adapter", net, TARGETS, seed=1, ranks={"linear": 2}, alpha_pattern={"image": 3}, use_rslora=rslora
    )
    base = deferred(net, tmp_path) if is_deferred else copy.deepcopy(net)
    assert [] == merge_adapters(base, read(folder, net))
    scaling = dict.fromkeys(TARGETS, 8 / (2 if rslora else 4))
    scaling.update({"linear": 8 / (2**0.5 if rslora else 2), "image": 3 / (2 if rslora else 4)})
    expected = dict(merge_by_formula(net, folder, scaling).named_parameters())
    for name, value in base.named_parameters():
        found: Any = value
        assert is_deferred == isinstance(found, DeferredTensor)
        torch.testing.assert_close(found.realized() if is_deferred else found, expected[name], **CLOSE)
    assert base.head.weight is not base.table.weight


def test_shared_weight_changes_only_in_the_module_of_the_adapter(tmp_path: Path, net: Net) -> None:
    """A tied weight is untied if an adapter changes one of the two modules."""
    before = net.table.weight.detach().clone()
    merge_adapters(net, read(save_adapter(tmp_path / "adapter", net, ("head",), seed=1), net))
    assert torch.equal(before, net.table.weight)
    assert not torch.allclose(before, net.head.weight)


def test_sum_of_half_precision_weights_is_rounded_once(tmp_path: Path, net: Net) -> None:
    """The weights keep their type, and hold the nearest number to the float32 sum."""
    folder = save_adapter(tmp_path / "adapter", net, ("linear",), seed=1)
    half = copy.deepcopy(net).half()
    exact = merge_by_formula(copy.deepcopy(half).float(), folder, 2.0)
    merge_adapters(half, read(folder, half))
    assert torch.equal(half.linear.weight, exact.linear.weight.half())


def test_parameters_saved_whole_replace_the_model_parameters(tmp_path: Path, net: Net) -> None:
    """modules_to_save, and biases of lora_only."""
    extra = {
        "base_model.model.linear.bias": torch.arange(6.0),
        "base_model.model.head.modules_to_save.weight": torch.rand(12, 8),
    }
    folder = save_adapter(tmp_path / "adapter", net, ("columns",), seed=1, extra=extra, modules_to_save=["head"])
    merge_adapters(net, read(folder, net))
    assert torch.equal(net.linear.bias, torch.arange(6.0))
    assert torch.equal(net.head.weight, extra["base_model.model.head.modules_to_save.weight"])


def test_adapters_with_a_name_leave_the_weights_and_have_one_branch_by_module(tmp_path: Path, net: Net) -> None:
    """The branches are in the order of the model's modules."""
    folders = [save_adapter(tmp_path / name, net, targets, seed=1) for name, targets in
               (("a", ("linear", "columns")), ("b", ("table", "linear")))]  # fmt: skip
    adapters = read_adapters([f"{folder.name}={folder}" for folder in folders])
    check_adapters(net, adapters)
    before = copy.deepcopy(net.state_dict())
    assert [] == merge_adapters(net, adapters)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    found = [(item.path, item.inputs, item.outputs, item.is_table) for item in swappable_branches(net, adapters)]
    assert [("table", 12, 8, True), ("linear", 8, 6, False), ("columns", 6, 5, False)] == found


@pytest.mark.filterwarnings("ignore")  # peft warns of what it decides itself, and of its own biases
@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, {"use_dora": True}, {"rank_pattern": {"linear": 2}},
                                    {"alpha_pattern": {"image": 5}}, {"lora_bias": True, "bias": "none"}])  # fmt: skip
def test_merged_weights_equal_peft(tmp_path: Path, net: Net, config: dict[str, Any]) -> None:
    """Files saved by peft give the weights that peft merges."""
    peft = pytest.importorskip("peft")
    net.head.weight = nn.Parameter(torch.rand(12, 8))  # peft changes both modules of a shared weight
    plain = ["linear", "columns"]
    targets = plain if {"use_dora", "lora_bias"} & config.keys() else [*plain, "table", "image", "signal", "head"]
    if config.get("lora_bias"):
        targets = ["linear"]
    base = copy.deepcopy(net)
    wrapped = peft.get_peft_model(net, peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, **config))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.rand_like(parameter) + (0.5 if "magnitude" in name else -0.5))
    wrapped.save_pretrained(str(tmp_path / "saved"), save_embedding_layers=False)
    merge_adapters(base, read(tmp_path / "saved", base))
    expected = wrapped.merge_and_unload().state_dict()
    for name, value in base.state_dict().items():
        torch.testing.assert_close(value, expected[name], **CLOSE)


def damaged(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Return a function that changes the tensors of a saved adapter."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return apply


def reshape_linear(tensors: dict[str, torch.Tensor], a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """Give the matrices of ``linear`` other shapes."""
    tensors["base_model.model.linear.lora_A.weight"] = torch.zeros(a)
    tensors["base_model.model.linear.lora_B.weight"] = torch.zeros(b)


REFUSALS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], tuple[str, ...]]] = {
    "no such module": (
        lambda t: t.update({"base_model.model.layer.lora_A.weight": torch.zeros(4, 8),
                            "base_model.model.layer.lora_B.weight": torch.zeros(6, 4)}),
        ("Net has no module 'layer'",),
    ),
    "another size": (lambda t: reshape_linear(t, (4, 9), (6, 4)), ("[4, 9]", "expected [4, 8] and [6, 4] by linear")),
    "another rank": (lambda t: reshape_linear(t, (3, 8), (6, 3)), ("rank 3", "expected 4")),
    "two ranks": (lambda t: reshape_linear(t, (4, 8), (6, 2)), ("rank 4", "rank 2", "expected 4")),
    "one matrix": (lambda t: t.pop("base_model.model.linear.lora_B.weight"), ("has no matching lora_B",)),
    "unknown kind": (lambda t: t.update({"base_model.model.linear.lora_E": torch.zeros(4)}), ("lora_E",)),
    "unknown parameter": (lambda t: t.update({"base_model.model.linear.gain": torch.zeros(4)}), ("'linear.gain'",)),
    "another vocabulary": (
        lambda t: t.update({"base_model.model.table.weight": torch.zeros(14, 8)}), ("[14, 8]", "[12, 8]"),
    ),
    "magnitudes without DoRA": (
        lambda t: t.update({"base_model.model.linear.lora_magnitude_vector": torch.ones(6)}), ("DoRA",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, net: Net, name: str) -> None:
    """The message names the tensor or module, its value and the expected one."""
    change, words = REFUSALS[name]
    folder = save_adapter(tmp_path / "adapter", net, ("linear",), seed=1)
    damaged(change)(folder)
    with pytest.raises(CheckpointError) as caught:
        read(folder, net)
    assert all(word in caught.value.message for word in words), caught.value.message
    assert caught.value.message.startswith(f"--adapter {folder}")
    assert caught.value.hint


@pytest.mark.parametrize(("targets", "word"), [(("image",), "Conv2d"), (("attention",), "MultiheadAttention")])
def test_modules_without_a_branch_are_refused_by_name(
    tmp_path: Path, net: Net, targets: tuple[str, ...], word: str
) -> None:
    """Such an adapter can only be merged."""
    folder = save_adapter(tmp_path / "adapter", net, targets, seed=1)
    with pytest.raises(CheckpointError, match=f"{word}, which cannot be switched at run time"):
        check_adapters(net, read_adapters([f"one={folder}"]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_adapter_with_non_finite_numbers_is_refused_by_name(tmp_path: Path, net: Net, value: float) -> None:
    """The tensor is named before anything is merged."""
    folder = save_adapter(tmp_path / "adapter", net, ("linear",), seed=1)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name][0, 0] = value
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError) as refused:
        read(folder, net)
    assert name in refused.value.message
