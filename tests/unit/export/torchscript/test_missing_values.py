"""Traces of tensors without values, and their refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from winml.modelkit.errors import ExportError, InternalError
from winml.modelkit.export.capture import Capture, CaptureOptions
from winml.modelkit.export.torchscript.capturing import capture_torchscript
from winml.modelkit.export.torchscript.tracing import untraced_shape_computation
from winml.modelkit.models.preparation import prepared_for_export
from winml.modelkit.tags.torch_modules import record_calls
from winml.modelkit.tags.tree import build_tree

MODE = FakeTensorMode(allow_non_fake_inputs=True)


class Net(nn.Module):
    """A model that multiplies by a weight, adds real numbers, ties its weights, and calls a function on the product."""

    def __init__(self, then: Callable[[torch.Tensor, Any], torch.Tensor] = lambda values, _net: values.tanh()) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.register_buffer("scale", torch.tensor([2.0, 3.0, 4.0]), persistent=False)
        self.then = then
        self.second.weight = self.first.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Compute the product and call the function."""
        product = self.second(self.first(values) * self.scale + torch.arange(3, device=values.device))
        return self.then(product, self)


def remove_values(net: Net) -> Net:
    """Replace the parameters by fake ones of the same shape, tied ones once."""
    with MODE:
        weight, bias = nn.Parameter(torch.empty(3, 3)), nn.Parameter(torch.empty(3))
    net.first.weight = net.second.weight = weight
    net.first.bias = bias
    return net


def capture(net: Net, values: torch.Tensor, **options: Any) -> Capture:
    """Capture the model with a dynamic first dimension."""
    with prepared_for_export(net, ["values"]) as forward:
        with record_calls(net) as trace:
            net(values)
        tree = build_tree(trace, ("all",))
        options = {"dynamic_axes": {"values": {0: "rows"}}, **options}
        return capture_torchscript(net, {"values": values}, forward, tree, CaptureOptions(**options))


def fake(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of the same shape."""
    return MODE.from_tensor(tensor)


WEIGHTS: dict[str, ir.TensorProtocol] = {
    "first.weight": ir.tensor(np.eye(3, dtype=np.float32)),
    "first.bias": ir.tensor(np.ones(3, dtype=np.float32)),
}


def test_capture_without_values_is_that_with_values_and_refers_to_the_callers() -> None:
    """Nodes, names, scopes and known constants are equal; a missing weight is a bug of the caller."""
    captured = capture(remove_values(Net()), fake(torch.ones(2, 3)), weights=WEIGHTS)
    expected = capture(Net(), torch.ones(2, 3))

    def described(item: Capture) -> list[Any]:
        return [(node.name, node.op_type, [v and v.name for v in node.inputs], s) for node, s in item.scopes.items()]

    assert described(expected) == described(captured)
    initializers = captured.model.graph.initializers
    assert set(WEIGHTS) == {name for name in initializers if name.startswith(("first", "second"))}
    assert all(initializers[name].const_value is tensor for name, tensor in WEIGHTS.items())
    constants = [
        node.attributes["value"].as_tensor().numpy() for node in captured.model.graph if "value" in node.attributes
    ]
    assert any(np.array_equal([2, 3, 4], value) for value in constants), "the buffer has values"
    with pytest.raises(InternalError, match="bias"):
        capture(remove_values(Net()), fake(torch.ones(2, 3)), weights={"first.weight": WEIGHTS["first.weight"]})


_CONVOLUTIONS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "one axis": lambda values, net: nn.functional.conv1d(values[:, :, None], net.first.weight[..., None]) + 1,
    "two axes": lambda values, net: nn.functional.conv2d(
        values[:, :, None, None], net.first.weight[:, :1, None, None], net.first.bias, padding=1, groups=3
    ),
    "padded by name": lambda values, net: nn.functional.conv1d(
        values[:, None], net.first.weight[:, :1, None], padding="same", dilation=2
    ),
    "transposed": lambda values, net: nn.functional.conv_transpose1d(
        values[:, :, None], net.first.weight[..., None], stride=2, output_padding=1
    ),
}


@pytest.mark.parametrize("kind", _CONVOLUTIONS)
def test_convolution_without_values_is_captured_as_with_values(kind: str) -> None:
    """The convolution is a node that reads the weight, with the same attributes, names and scope."""
    then = _CONVOLUTIONS[kind]
    captured = capture(remove_values(Net(then)), fake(torch.ones(2, 3)), weights=WEIGHTS)
    expected = capture(Net(then), torch.ones(2, 3))

    def described(item: Capture) -> list[Any]:
        return [
            (node.name, node.op_type, [v and v.name for v in node.inputs], str(dict(node.attributes)), scope)
            for node, scope in item.scopes.items()
            if "value" not in node.attributes
        ]

    assert any(node.op_type.startswith("Conv") for node in captured.scopes)
    assert described(expected) == described(captured)


def _stored_apart(values: torch.Tensor, net: Net) -> torch.Tensor:
    if "kept" not in vars(net):
        object.__setattr__(net, "kept", [net.first.weight.detach() * 2])
    return values @ vars(net)["kept"][0]


REFUSED: dict[str, tuple[Callable[[torch.Tensor, Any], torch.Tensor], str]] = {
    "branch": (lambda values, _net: values if values.sum() > 0 else -values, "reads the value of a tensor in module"),
    "size": (lambda values, _net: values[values > 0], "reads the value of a tensor in module"),
    "computed before": (_stored_apart, r"recorded no computation of a tensor \[3, 3\]"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_capture_that_needs_values_is_refused(reason: str) -> None:
    """Neither a branch nor a constant is invented from unknown values."""
    then, words = REFUSED[reason]
    net = remove_values(Net(lambda values, _net: values))
    values = fake(torch.ones(2, 3))
    net(values)
    with prepared_for_export(net, ["values"]) as forward:
        with record_calls(net) as trace:
            net(values)
        net.then = then
        if reason == "computed before":
            then(net.first(values), net)
        tree = build_tree(trace)
        with pytest.raises(ExportError, match=words):
            capture_torchscript(net, {"values": values}, forward, tree, CaptureOptions(weights=WEIGHTS))


def test_shape_computation_is_hidden_from_traces_inside_the_block_only() -> None:
    """The patch is removed after the block, also after an error."""
    before = FakeTensorMode.dispatch
    with contextlib.suppress(ValueError), untraced_shape_computation():
        assert FakeTensorMode.dispatch is not before
        raise ValueError
    assert FakeTensorMode.dispatch is before
