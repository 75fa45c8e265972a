"""Record of the modules that ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from winml.modelkit.tags.torch_modules import join_traces, record_calls


class Pair(nn.Module):
    """A model of two layers, one of which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.probe = nn.Linear(2, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call the layer."""
        return self.layer(values)


def test_record_calls_counts_users_hooks_as_inside() -> None:
    """A module called from a user's hook, before or after, ran inside the module the hook is on."""
    for register in (nn.Module.register_forward_pre_hook, nn.Module.register_forward_hook):
        model = Pair()

        def ask_probe(_module: nn.Module, args: Any, *_output: Any, probe: nn.Module = model.probe) -> None:
            probe(args[0])

        register(model.layer, ask_probe)
        with record_calls(model) as trace:
            model(torch.ones(1, 2))
        assert ("", "layer") == trace.by_path()["probe"].stack


def test_record_calls_runs_after_hooks_that_stop_a_module() -> None:
    """A module with a failing hook is left too, so the next call starts from an empty stack."""
    model = Pair()

    def stop(_module: nn.Module, _args: object) -> None:
        raise StopIteration

    handle = model.layer.register_forward_pre_hook(stop)
    with record_calls(model) as trace:
        with pytest.raises(StopIteration):
            model(torch.ones(1, 2))
        handle.remove()
        model(torch.ones(1, 2))
    modules = trace.by_path()
    assert ("",) == modules["layer"].stack
    assert () == modules[""].stack
    assert (2, 2) == (modules[""].calls, modules["layer"].calls)


def test_record_calls_tied_parameter_is_held_by_its_first_owner() -> None:
    """A parameter shared by two modules counts for the first."""
    model = Pair()
    model.probe.weight = model.layer.weight
    with record_calls(model) as trace:
        model(torch.ones(1, 2))
    modules = trace.by_path()
    assert ({"weight", "bias"}, {"bias"}) == (set(modules["layer"].parameters), set(modules["probe"].parameters))


def test_record_calls_modules_that_never_ran_have_no_order() -> None:
    """Uncalled modules are listed, without order, calls or stack."""
    with record_calls(model := Pair()) as trace:
        model(torch.ones(1, 2))
    assert ["", "layer", "probe"] == [module.path for module in trace.modules]
    probe = trace.by_path()["probe"]
    assert (None, 0, ()) == (probe.execution_order, probe.calls, probe.stack)
    assert 2 == trace.execution_steps


def test_joined_traces_equal_one_run() -> None:
    """Modules keep the place of their first call; calls are counted together."""
    model = Pair()
    with record_calls(model) as first:
        model(torch.zeros(1, 2))
    with record_calls(model) as second:
        model.probe(model(torch.zeros(1, 2)))
    joined = join_traces([first, second]).by_path()
    assert ["", "layer", "probe"] == sorted(joined, key=lambda path: joined[path].execution_order or 0)
    assert {"": 2, "layer": 2, "probe": 1} == {path: module.calls for path, module in joined.items()}
    assert first.modules[2].execution_order is None
