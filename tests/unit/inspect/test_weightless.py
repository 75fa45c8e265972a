"""Calls and shapes of a forward without values, equal to a real one, or the reason why it cannot run."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import nn

from winml.modelkit.inspect.model_inspection import run_weightless
from winml.modelkit.onnx.specs import InputTensorSpec

ROWS = (InputTensorSpec(name="rows", shape=(2, 8), dtype="float32"),)


class Block(nn.Module):
    """A model with a layer that is called twice, a layer that is never called, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))
        self.constant = torch.full((8,), 2.0)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.used(self.used(rows)) + self.shift * self.constant


class ValueDependent(nn.Module):
    """A model that branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows) if bool(rows.sum() > 0) else rows


def only(returned: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Name a single output."""
    return {"output": returned}


def test_run_weightless_module_with_weights_shows_its_calls_and_outputs() -> None:
    """The calls are counted, output shapes and dtypes are right, and unused modules are known."""
    run = run_weightless(Block().eval(), ROWS, only)
    assert run.trace is not None
    assert {"": 1, "used": 2, "unused": 0} == {module.path: module.calls for module in run.trace.modules}
    assert ((2, 8), torch.float32) == (tuple(run.outputs["output"].shape), run.outputs["output"].dtype)
    assert "" == run.problem


def test_run_weightless_module_without_storage_runs_all_the_same() -> None:
    """A module on the meta device needs no storage."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 10**6), nn.ReLU(), nn.Linear(10**6, 4, dtype=torch.float32))
    run = run_weightless(model.eval(), ROWS, only)
    assert (2, 4) == tuple(run.outputs["output"].shape)


def test_run_weightless_restores_the_module() -> None:
    """Parameters are the same objects with the same values, and no hook stays."""
    model = Block().eval()
    before = {name: (value, value.detach().clone()) for name, value in model.named_parameters()}
    run_weightless(model, ROWS, only)
    assert all(
        value is before[name][0] and torch.equal(value, before[name][1]) for name, value in model.named_parameters()
    )
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_run_weightless_value_dependent_forward_names_the_module() -> None:
    """A decision by a value is no error: the result names the reason and the module, and nothing is logged."""
    level = logging.getLogger("torch._subclasses.fake_tensor").disabled
    run = run_weightless(ValueDependent().eval(), ROWS, only)
    assert run.trace is None
    assert "DataDependent" in run.problem
    assert "(the root)" in run.problem
    assert level == logging.getLogger("torch._subclasses.fake_tensor").disabled


def test_run_weightless_open_dimension_gets_the_requested_size() -> None:
    """The named size is looked up."""
    spec = InputTensorSpec(name="rows", shape=("batch", 8), dtype="float32")
    run = run_weightless(Block().eval(), (spec,), only, {"batch": 5})
    assert (5, 8) == tuple(run.outputs["output"].shape)


class OwnTensors(nn.Module):
    """A model that counts its runs, and computes with a CPU tensor that does not mix with the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.kept: torch.Tensor | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if self.kept is None:
            self.kept = rows * 2
        return self.kept + torch.arange(8)


def test_run_weightless_forward_that_mixes_devices_runs_on_fake_tensors() -> None:
    """The attributes changed by the attempt on the meta device are restored before the second run."""
    model = OwnTensors().eval()
    run = run_weightless(model, ROWS, only)
    assert (2, 8) == tuple(run.outputs["output"].shape)
    assert run.trace is not None
    assert 1 == model.runs


def test_run_weightless_forward_that_takes_the_meta_device_runs_once() -> None:
    """A complete first run needs no second one."""
    model = Block().eval()
    runs: list[int] = []
    model.register_forward_hook(lambda *_arguments: runs.append(1))
    assert "" == run_weightless(model, ROWS, only).problem
    assert [1] == runs
