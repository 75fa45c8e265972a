"""State of the live module after an export: unchanged, for successful and failed exports."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from checkpoints import make_distinct
from winml.modelkit import (
    ExportError,
    OutputTensorSpec,
    UsageError,
    VerificationError,
    WinMLError,
    WinMLExportConfig,
    export_pytorch,
)
from winml.modelkit.models.state_restoration import restored_module_state


class Block(nn.Module):
    """A layer, a norm with running statistics and dropout, followed by a function."""

    def __init__(self, then: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.then = then

    def forward(self, values: torch.Tensor) -> Any:
        """Apply all layers and the function."""
        return self.then(self.dropout(self.norm(self.linear(values))))


class Holder(nn.Module):
    """Two blocks; the second ends with a given function."""

    def __init__(self, then: Callable[[torch.Tensor], Any] = torch.tanh) -> None:
        super().__init__()
        self.first = Block(torch.tanh)
        self.second = Block(then)

    def forward(self, values: torch.Tensor) -> Any:
        """Call both blocks."""
        return self.second(self.first(values))


def holder(then: Callable[[torch.Tensor], Any] = torch.tanh) -> Holder:
    """Build a module in a mixed state as users' are: flags, frozen parameters, gradients, hooks of every kind."""
    model = Holder(then)
    make_distinct(model)
    model.train()
    model.first.eval()
    model.second.dropout.eval()
    model.first.linear.weight.requires_grad_(False)
    model.first.linear.bias.grad = torch.ones(4)
    model.second.linear.double()
    model.second.linear.float()
    model.register_forward_pre_hook(lambda _module, _args: None)
    model.first.register_forward_hook(lambda _module, _args, output: output * 2)
    model.second.register_forward_hook(lambda _module, _args, _kwargs, _output: None, with_kwargs=True)
    model.second.register_full_backward_hook(lambda _module, _before, _after: None)
    return model


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the complete state of a module, by value and by identity."""
    state: dict[str, Any] = {
        "gradients are on": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "inlining": torch._C._jit_get_inline_everything_mode(),
    }
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            # Hooks, parameters and children are mappings; their objects and order are compared.
            state[path, name] = (
                (list(zip(value, map(id, value.values()), strict=True)), "" if name.startswith("_") else str(value))
                if isinstance(value, dict)
                else (id(value), str(value))
            )
        for name, buffer in module.named_buffers(recurse=False):
            state[path, "buffer", name] = id(buffer), buffer.numpy().tobytes()
    for name, value in model.state_dict(keep_vars=True).items():
        state["tensor", name] = (id(value), value.dtype, value.device, value.requires_grad, id(value.grad))
        state["bytes", name] = value.detach().numpy().tobytes()
    return state


def test_state_of_notices_every_kind_of_change() -> None:
    """A changed flag, hook, forward, value or dtype would fail the comparison of states."""
    changes: list[Callable[[Holder], Any]] = [
        lambda model: model.first.train(),
        lambda model: model.second.register_forward_hook(lambda *_: None),
        lambda model: setattr(model, "forward", model.forward),
        lambda model: model.second.norm.running_mean.add_(1e-6),  # type: ignore[union-attr, operator]
        lambda model: model.second.half(),
        lambda model: model.first.linear.weight.requires_grad_(True),
    ]
    for change in changes:
        model = holder()
        before = state_of(model)
        assert before == state_of(model)
        change(model)
        assert before != state_of(model)


@pytest.mark.parametrize("is_patched", [False, True], ids=["own forward", "forward of the instance"])
def test_export_restores_the_module(is_patched: bool, tmp_path: Path) -> None:
    """Forward, hooks, flags, gradients, dtypes and bytes are unchanged."""
    model = holder()
    if is_patched:
        own = model.forward
        model.forward = lambda values: own(values) + 1  # type: ignore[method-assign]
    before = state_of(model)
    result = export_pytorch(model, tmp_path / "model.onnx", torch.randn(3, 4))
    assert before == state_of(model)
    assert result.only_part.verification is not None
    assert result.only_part.verification.is_verified
    assert ("forward" in vars(model)) == is_patched


def random_numbers() -> Any:
    """Return the states of the random number generators."""
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()


class Keeper(nn.Module):
    """Stores something at every call, as a function says."""

    count: torch.Tensor
    table: torch.Tensor

    def __init__(self, keep: Callable[[Keeper, torch.Tensor], Any], then: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("table", torch.zeros(4), persistent=False)
        self.plain = torch.zeros(4)
        self.calls: list[Any] = []
        self.known: dict[str, Any] = {"nested": [torch.zeros(4)]}
        self.record = Record()
        self.keep, self.then = keep, then

    def forward(self, values: torch.Tensor) -> Any:
        """Store, and return the output."""
        self.keep(self, values)
        return self.then(self.linear(values))


class Record:
    """An object like the caches of libraries."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def __str__(self) -> str:
        return str(self.entries)


def write_parameter(model: Keeper, _values: torch.Tensor) -> None:
    """Write into a parameter outside of autograd."""
    with torch.no_grad():
        model.linear.weight.mul_(0.5)
        model.linear.bias.data = torch.ones(4)


def draw_numbers(_model: Keeper, _values: torch.Tensor) -> None:
    """Draw random numbers from every generator."""
    torch.manual_seed(3)
    torch.rand(1)
    np.random.rand()
    random.random()


KEEPS: dict[str, Callable[[Keeper, torch.Tensor], Any]] = {
    "a counter": lambda model, _values: model.count.add_(1),
    "a counter that is replaced": lambda model, _values: setattr(model, "count", model.count + 1),
    "a buffer that is no state": lambda model, _values: model.table.fill_(7),
    "a tensor": lambda model, values: model.plain.copy_(values[0].detach()),
    "another tensor": lambda model, values: setattr(model, "plain", values[0].detach()),
    "a new attribute": lambda model, values: setattr(model, "last", values.shape),
    "a list": lambda model, _values: model.calls.append(1),
    "a tensor deep inside": lambda model, _values: model.known["nested"][0].add_(1),
    "an entry of a cache": lambda model, _values: model.record.entries.append(1),
    "a hook": lambda model, _values: model.linear.register_forward_hook(lambda *_: None),
    "a parameter": write_parameter,
    "a flag": lambda model, _values: model.linear.weight.requires_grad_(False),
    "a gradient": lambda model, _values: setattr(model.linear.bias, "grad", torch.ones(4)),
    "the mode": lambda model, _values: model.linear.train(not model.linear.training),
    "random numbers": draw_numbers,
    "the type of numbers": lambda _model, _values: torch.set_default_dtype(torch.float64),
}


@pytest.mark.parametrize(
    ("exporter", "then"),
    [("torchscript", torch.tanh), ("dynamo", torch.tanh), ("torchscript", lambda _values: 1 / 0)],
    ids=["torchscript", "dynamo", "refused"],
)
@pytest.mark.parametrize("name", KEEPS)
def test_state_stored_by_a_forward_is_restored(
    name: str, exporter: Any, then: Callable[..., Any], tmp_path: Path
) -> None:
    """Buffers, attributes, hooks, parameters, flags and random states are restored, after success and failure."""
    model = Keeper(KEEPS[name], then)
    model.linear.bias.grad = torch.zeros(4)
    before = state_of(model)
    with suppress(WinMLError):
        export_pytorch(model, tmp_path / "model.onnx", torch.randn(3, 4), config=WinMLExportConfig(exporter=exporter))
    assert before == state_of(model)


@pytest.mark.parametrize("name", KEEPS)
def test_state_comparison_detects_each_kind_of_stored_state(name: str) -> None:
    """Each kind of stored state would fail the comparison of states."""
    model = Keeper(KEEPS[name], torch.tanh)
    dtype = torch.get_default_dtype()
    values = torch.randn(3, 4)
    before = state_of(model), random_numbers()
    model(values)
    after = state_of(model), random_numbers()
    torch.set_default_dtype(dtype)
    assert before != after


def test_module_with_dead_references_and_lazy_layers_is_restored() -> None:
    """Neither a dead reference on a module nor a lazy layer without sizes prevents the restoration."""
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    owner = Record()
    vars(model)["owner"] = weakref.proxy(owner)
    del owner
    with restored_module_state(model):
        vars(model)["last"] = 1
    assert not hasattr(model, "last")


class Frozen(dict[str, int]):
    """A mapping that cannot be cleared."""

    def clear(self) -> None:
        """Refuse."""
        raise TypeError("frozen")


def test_unrestorable_state_loses_no_other_state() -> None:
    """Sparse tensors, inference tensors and a mapping without ``clear`` do not prevent the restoration."""
    model = nn.Linear(2, 2)
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    with torch.inference_mode():
        model.register_buffer("count", torch.zeros(1))
    model.register_buffer("last", torch.zeros(1))
    vars(model)["table"] = Frozen(first=1)
    with restored_module_state(model) as found:
        with torch.inference_mode():
            model.count += 1
        model.last += 1
        model.table["second"] = 2
    assert (0.0, 0.0, {"first": 1}) == (model.count.item(), model.last.item(), model.table)
    assert () == found.notes


def test_large_buffer_is_not_copied_and_its_changes_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit bounds the copied bytes of all tensors; small tensors come first, and a note names the large one."""
    monkeypatch.setattr("winml.modelkit.models.state_restoration.LARGEST_COPY_BYTES", 64)
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.zeros(100))
    model.register_buffer("unchanged", torch.zeros(100))
    model.register_buffer("count", torch.zeros(1))
    with restored_module_state(model) as found:
        model.table += 1
        model.count += 1
    assert (1.0, 0.0) == (model.table[0].item(), model.count.item())
    assert ["table"] == [note.removeprefix("the forward wrote into ").split()[0] for note in found.notes]


def test_setting_that_cannot_be_read_does_not_stop_an_export(tmp_path: Path) -> None:
    """Torch cannot read a setting under one name after a write under another name."""
    before = torch.backends.fp32_precision
    torch.backends.fp32_precision = "tf32"
    try:
        result = export_pytorch(nn.Linear(4, 4), tmp_path / "model.onnx", torch.randn(3, 4))
        assert "tf32" == torch.backends.fp32_precision
    finally:
        torch.backends.fp32_precision = before
    assert result.only_part.verification is not None
    assert result.only_part.verification.is_verified


def test_counter_changed_by_a_forward_does_not_stop_an_export(tmp_path: Path) -> None:
    """The file is correct and the counter is restored, with either exporter."""
    for exporter in ("torchscript", "dynamo"):
        model = Keeper(KEEPS["a counter"], torch.tanh)
        config = WinMLExportConfig(exporter=exporter)
        result = export_pytorch(model, tmp_path / f"{exporter}.onnx", torch.randn(3, 4), config=config)
        assert result.only_part.verification is not None
        assert result.only_part.verification.is_verified
        assert 0 == int(model.count)


def fail(_values: torch.Tensor) -> torch.Tensor:
    """Refuse to run."""
    raise RuntimeError("no")


def choose(values: torch.Tensor) -> torch.Tensor:
    """Branch in Python by the values, which a trace cannot follow."""
    return values * 100 if int(values.argmax()) % 2 else -values


def differ_in_the_trace(values: torch.Tensor) -> torch.Tensor:
    """Return a different output during tracing, so that the graph is wrong."""
    return values * 3 if torch.jit.is_tracing() or torch.compiler.is_exporting() else values


FAILURES: dict[str, tuple[Callable[[torch.Tensor], Any], dict[str, Any], tuple[int, ...], type[WinMLError]]] = {
    "the forward raises": (fail, {}, (3, 4), ExportError),
    "the shape does not fit": (torch.tanh, {}, (3, 5), ExportError),
    "no tensor comes out": (lambda _values: None, {}, (3, 4), ExportError),
    "the outputs are not those described": (
        torch.tanh,
        {"output_tensors": (OutputTensorSpec(name="scores", shape=(3, 5), dtype="float32"),)},
        (3, 4),
        UsageError,
    ),
    "a torch module is unknown": (torch.tanh, {"torch_module": ("Linaer",)}, (3, 4), UsageError),
    "the exporter lacks the operator": (torch.special.bessel_j0, {}, (3, 4), ExportError),
    "the operator needs a newer opset": (
        lambda values: torch.nn.functional.grid_sample(values[None, None], values[None, :, :2, None].swapaxes(2, 3)),
        {"opset_version": 11},
        (3, 4),
        ExportError,
    ),
    "the graph is not the model": (differ_in_the_trace, {}, (3, 4), VerificationError),
    "the model is random": (lambda x: torch.bernoulli(torch.sigmoid(x)), {}, (3, 4), VerificationError),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failed_export_restores_module_and_folder(failure: str, tmp_path: Path) -> None:
    """After a failure in any step the module and earlier files are unchanged, and no new file is left."""
    then, options, shape, expected = FAILURES[failure]
    model = holder(then)
    earlier = tmp_path / "model.onnx"
    earlier.write_bytes(b"earlier")
    before = state_of(model)
    with pytest.raises(expected) as caught:
        export_pytorch(model, earlier, torch.randn(shape), config=WinMLExportConfig(**options), overwrite=True)
    assert before == state_of(model)
    assert [earlier] == list(tmp_path.iterdir())
    assert b"earlier" == earlier.read_bytes()
    assert caught.value.hint, "every failure says what to do next"
    assert caught.value.step.startswith("step "), "and in which step it came"


def test_interrupted_export_restores_the_module(tmp_path: Path) -> None:
    """Ctrl-C during a displayed step is not one of our errors; the state is restored all the same."""
    model = holder()
    before = state_of(model)
    for number in range(1, 9):

        def interrupt(event: Any, number: int = number) -> None:
            if event.number == number:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            export_pytorch(model, tmp_path / "model.onnx", torch.randn(3, 4), on_step=interrupt)
        assert before == state_of(model)
        assert [] == list(tmp_path.iterdir())


def test_export_unsupported_operator_names_operator_and_module(tmp_path: Path) -> None:
    """The error names the operator without ONNX conversion and its module."""
    with pytest.raises(ExportError, match=r"aten::special_bessel_j0 .* second .*17") as caught:
        export_pytorch(holder(torch.special.bessel_j0), tmp_path / "model.onnx", torch.randn(3, 4))
    assert ("aten::special_bessel_j0", "second") == (caught.value.operator, caught.value.module)


def test_export_shape_refused_names_the_module(tmp_path: Path) -> None:
    """The error names the module and its input shapes."""
    with pytest.raises(ExportError, match=r"float32\[3, 5\], .* first.linear") as caught:
        export_pytorch(holder(), tmp_path / "model.onnx", torch.randn(3, 5))
    assert "first.linear" == caught.value.module


def test_export_decision_in_python_is_detected_by_the_second_draw(tmp_path: Path) -> None:
    """A branch frozen by the trace has wrong outputs for other inputs, and no file is written."""
    torch.manual_seed(3)
    model = holder(choose)
    values = torch.randn(3, 4)
    with pytest.raises(VerificationError, match="not equal"):
        export_pytorch(model, tmp_path / "model.onnx", values, seed=_seed_of_other_branch(model, values))
    assert [] == list(tmp_path.iterdir())


def _seed_of_other_branch(model: Holder, values: torch.Tensor) -> int:
    """Return a seed for which the second draw takes the other branch than ``values``."""
    from winml.modelkit import InputTensorSpec
    from winml.modelkit.ort.feeds import make_feeds

    spec = InputTensorSpec(name="values", shape=(3, 4), dtype="float32")
    model.second.then = lambda hidden: hidden.argmax() % 2
    flags = {path: module.training for path, module in model.named_modules()}
    model.eval()
    with torch.no_grad():
        first = int(model(values))
        seed = next(
            seed
            for seed in range(100)
            if int(model(torch.from_numpy(make_feeds([spec], seed=seed + 2)["values"]))) != first
        )
    for path, module in model.named_modules():
        module.training = flags[path]
    model.second.then = choose
    return seed
