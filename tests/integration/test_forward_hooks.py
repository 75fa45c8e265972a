"""Operators computed in forward hooks, tagged with the module of the hook by both exporters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hostile_modules import Leaf
from tag_checks import load_nodes
from winml.modelkit import WinMLExportConfig, export_pytorch

VALUES = torch.linspace(-1, 1, 12).reshape(3, 4)
EXPORTERS = ("torchscript", "dynamo")


class Pair(nn.Module):
    """Returns a record with two leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Leaf(4), Leaf(4)

    def forward(self, values: torch.Tensor) -> Any:
        """Call the leaves one after the other."""
        hidden = self.first(values)
        return {"hidden": hidden, "result": self.second(hidden)}


def modules_of(path: Path, config: Any, model: nn.Module) -> Counter[tuple[str, str]]:
    """Export with verification, and count the operators of each module."""
    result = export_pytorch(model, path, VALUES, config=config)
    assert result.only_part.verification is not None
    assert result.only_part.verification.is_verified
    return Counter((node.metadata_props["winml.hierarchy.module"], node.op_type) for node in load_nodes(result))


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_root_hooks_get_arguments_and_result_of_the_forward(exporter: Any, tmp_path: Path) -> None:
    """A pre-hook changes the arguments and a hook the record; both hooks are restored afterwards."""
    torch.manual_seed(0)
    model = Pair().eval()
    model.register_forward_pre_hook(lambda _module, args: (args[0].exp(),))
    model.register_forward_hook(lambda _module, _args, output: {"only": output["result"].sin() + output["hidden"]})
    expected = model(VALUES)["only"]
    found = modules_of(tmp_path / "model.onnx", WinMLExportConfig(exporter=exporter), model)
    assert (1, 1) == (found["", "Exp"], found["", "Sin"])
    assert torch.equal(expected, model(VALUES)["only"])


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_root_hook_with_keywords_gets_keywords(exporter: Any, tmp_path: Path) -> None:
    """The forward is called by keyword, as such a hook expects."""
    torch.manual_seed(0)
    model = Pair().eval()
    model.register_forward_pre_hook(
        lambda _module, args, kwargs: (args, {"values": kwargs["values"].exp()}), with_kwargs=True
    )
    found = modules_of(tmp_path / "model.onnx", WinMLExportConfig(exporter=exporter), model)
    assert 1 == found["", "Exp"]


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_computation_in_a_hook_belongs_to_the_hooked_module(exporter: Any, tmp_path: Path) -> None:
    """Hooks before and after the forward count, of a module and of a plain layer inside it."""
    torch.manual_seed(0)
    model = Pair().eval()
    model.first.register_forward_pre_hook(lambda _module, args: (args[0].exp(),))
    model.first.register_forward_hook(lambda _module, _args, output: output.sin())
    model.second.linear.register_forward_hook(lambda _module, _args, output: output.cos())
    found = modules_of(tmp_path / "model.onnx", WinMLExportConfig(exporter=exporter), model)
    assert {("first", "Exp"): 1, ("first", "Sin"): 1, ("second", "Cos"): 1} == {
        key: count for key, count in found.items() if key[1] in {"Exp", "Sin", "Cos"}
    }


class Refusing(nn.Module):
    """Raises an error in its forward."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Raise the error."""
        raise ValueError("no")


class Tolerant(nn.Module):
    """Continues after the error of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.refusing, self.leaf = Refusing(), Leaf(4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Try the refusing child, and call the leaf."""
        try:
            values = self.refusing(values)
        except ValueError:
            values = values.exp()
        return self.leaf(values)


def test_raising_hook_leaves_later_modules_their_nodes(tmp_path: Path) -> None:
    """The scope of the failed module ends with the error."""
    model = Tolerant().eval()
    model.refusing.register_forward_hook(lambda _module, _args, output: output)
    found = modules_of(tmp_path / "model.onnx", WinMLExportConfig(exporter="torchscript", torch_module=()), model)
    assert Counter({("", "Exp"): 1, ("leaf", "Gemm"): 1, ("leaf", "Tanh"): 1}) == found


def test_hooks_of_the_root_with_and_without_keywords_see_the_same_arguments(tmp_path: Path) -> None:
    """Hooks without keywords see positions; hooks with keywords read an argument either way and may replace it."""
    model = Leaf(4).eval()
    model.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))
    model.register_forward_pre_hook(
        lambda _module, args, kwargs: (args, {"values": kwargs["values"].exp()}), with_kwargs=True
    )
    model.register_forward_hook(lambda _module, args, _kwargs, output: output + args[0], with_kwargs=True)
    found = modules_of(tmp_path / "model.onnx", WinMLExportConfig(torch_module=()), model)
    assert 1 == found["", "Exp"]
    assert 1 == found["", "Add"]
