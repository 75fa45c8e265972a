"""Graphs captured by the dynamo exporter, before normalization."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from checkpoints import make_distinct
from winml.modelkit.errors import ExportError, InternalError
from winml.modelkit.export.capture import Capture, CaptureOptions
from winml.modelkit.export.dynamo.capturing import ModuleStacks, capture_dynamo
from winml.modelkit.metadata_keys import CLASSES_KEY, SCOPES_KEY, STACK_TRACE_KEY
from winml.modelkit.models.preparation import prepared_for_export
from winml.modelkit.tags.torch_modules import record_calls
from winml.modelkit.tags.tree import build_tree


class Leaf(nn.Module):
    """A leaf that reduces along an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Apply the leaf."""
        return (self.linear(values) * 2.5).sum(-1, keepdim=True) + values


class Model(nn.Module):
    """A model that calls a leaf twice, counts its calls, writes into its first input, and ignores the second input."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.leaves = nn.ModuleList([Leaf()])
        self.other_name = self.leaves[0]
        self.register_buffer("count", torch.zeros(1))
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.leaves[0].linear.weight

    def forward(self, values: torch.Tensor, unheard: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call both names of the leaf, and the head."""
        self.count.add_(1)
        values.mul_(2)
        bent = torch.tanh(self.leaves[0](values))
        logits = self.head(self.other_name(bent))
        return logits, logits, values


class Inner(nn.Module):
    """A module that applies a function."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Apply the function."""
        return self.act(values)


def inputs_of() -> dict[str, torch.Tensor]:
    """Return two inputs, which the test names."""
    return {"values": torch.randn(2, 3), "unheard": torch.zeros(4, dtype=torch.int64)}


def capture(model: nn.Module, inputs: Mapping[str, torch.Tensor], **options: Any) -> Capture:
    """Capture a model."""
    with prepared_for_export(model, list(inputs)) as forward:
        with record_calls(model) as trace:
            model(*(tensor.clone() for tensor in inputs.values()))
        return capture_dynamo(model, inputs, forward, build_tree(trace), CaptureOptions(**options))


def test_capture_names_and_scopes_are_the_paths_of_the_modules_that_ran(capfd: pytest.CaptureFixture[str]) -> None:
    """A module called twice, under two names, keeps its first; nothing is printed."""
    model = Model()
    make_distinct(model)
    inputs = inputs_of()
    before = inputs["values"].clone()
    captured = capture(model, inputs)
    linears = [node for node in captured.model.graph if node.op_type in ("Gemm", "MatMul")]
    assert [("", "leaves.0", "leaves.0.linear")] * 2 + [("", "head")] == [captured.scopes[node] for node in linears]
    names = [node.name or "" for node in captured.model.graph]
    assert len(set(names)) == len(names)
    assert linears[0].name is not None
    assert linears[0].name.startswith("/leaves.0/linear/")
    assert "/Tanh" in names
    assert ["output_0", "output_1", "output_2"] == [value.name for value in captured.model.graph.outputs]
    assert ("unheard",) == captured.unused_inputs
    assert torch.equal(before, inputs["values"]), "a forward may write into its inputs; they stay"
    assert ("", "") == tuple(capfd.readouterr())


def test_capture_keeps_valid_scopes_and_no_local_path() -> None:
    """Metadata that other tools read stays.

    Local paths are removed from nodes, values and the graph unless requested.
    """
    model = Model()
    graph = capture(model, inputs_of()).model.graph
    for node in graph:
        scopes, classes = (ast.literal_eval(node.metadata_props[key]) for key in (SCOPES_KEY, CLASSES_KEY))
        assert len(scopes) == len(classes)
        assert {SCOPES_KEY, CLASSES_KEY, "namespace"} >= set(node.metadata_props)
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    assert not any(value.metadata_props for value in values)
    assert not graph.metadata_props
    kept = capture(model, inputs_of(), keep_stack_traces=True)
    assert any("test_capturing.py" in node.metadata_props.get(STACK_TRACE_KEY, "") for node in kept.model.graph)


def test_capture_refers_to_live_tensors_and_ties_shared_weights() -> None:
    """No weight is copied, and a weight that two modules share is one initializer."""
    model = Model()
    make_distinct(model)
    initializers = capture(model, inputs_of()).model.graph.initializers
    weights = [name for name in initializers if name.endswith("weight")]
    assert ["leaves.0.linear.weight"] == weights
    tensor = initializers[weights[0]].const_value
    assert tensor is not None
    assert np.shares_memory(tensor.numpy(), model.head.weight.detach().numpy())


def test_capture_without_values_gets_values_from_the_caller() -> None:
    """Fake parameters are never read and dynamic sizes work; a missing value of a parameter is a bug of the caller."""
    model = Model()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake = nn.Parameter(torch.empty(3, 3)), nn.Parameter(torch.empty(3))
    model.leaves[0].linear.weight = model.head.weight = fake[0]
    model.leaves[0].linear.bias = fake[1]
    inputs = {name: mode.from_tensor(tensor, static_shapes=True) for name, tensor in inputs_of().items()}
    tensors: dict[str, ir.TensorProtocol] = {
        "leaves.0.linear.weight": ir.tensor(np.eye(3, dtype=np.float32)),
        "leaves.0.linear.bias": ir.tensor(np.ones(3, dtype=np.float32)),
    }
    for _again in range(2):
        captured = capture(model, inputs, weights=tensors, dynamic_axes={"values": {0: "rows"}})
        initializers = captured.model.graph.initializers
        assert all(initializers[name].const_value is tensor for name, tensor in tensors.items())
        assert "[rows,3]" in str(captured.model.graph.inputs[0])
    with pytest.raises(InternalError, match="bias"):
        capture(model, inputs, weights={"leaves.0.linear.weight": tensors["leaves.0.linear.weight"]})


class Cast(nn.Module):
    """A module with a forward that casts a layer to its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Cast and apply the layer."""
        return self.layer.to(values.dtype)(values)


def test_layer_cast_to_its_own_dtype_is_captured() -> None:
    """The cast changes nothing, and torch is unpatched afterwards."""
    cast = nn.Module.to
    assert "Gemm" in [node.op_type for node in capture(Cast(), {"values": torch.randn(2, 3)}).model.graph]
    assert nn.Module.to is cast


FAILURES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str, str | None]] = {
    "operator": (torch.special.bessel_j0, "no ONNX form of prims::bessel_j0 in module 1", "prims::bessel_j0"),
    "complex": (
        lambda x: torch.view_as_real(torch.view_as_complex(torch.stack([x, x], -1)).cumsum(1)),
        "no ONNX form of aten::cumsum on complex numbers in module 1",
        "aten::cumsum",
    ),
    "branch": (
        lambda x: x + 1 if x.sum() > 0 else x,
        r"by the value of a tensor in module 1 \(test_capturing.py:",
        None,
    ),
    "size": (
        lambda x: x + (1 if x.shape[0] == 2 else 2),
        r"rows \(axis 0 of my values\) cannot be dynamic .* takes it for a constant",
        None,
    ),
    "mistake": (lambda x: x if not torch.compiler.is_exporting() else x.nothing, "in module 1 .*AttributeError", None),
}


@pytest.mark.parametrize("name", FAILURES)
def test_capture_that_fails_names_operator_size_line_and_module(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The error names the failure and its module, the forward is restored, and torch's own message is left out."""
    act, words, operator = FAILURES[name]
    model = nn.Sequential(nn.Linear(3, 3), Inner(act))
    inputs = {"my values": torch.randn(2, 3)}
    with prepared_for_export(model, ["input"]) as forward:
        forward.input_names = ("my values",)
        forward._is_by_name = False
        with record_calls(model) as trace:
            model(*inputs.values())
        options = CaptureOptions(dynamic_axes={"my values": {0: "rows"}})
        with pytest.raises(ExportError, match=words) as caught:
            capture_dynamo(model, inputs, forward, build_tree(trace), options)
        assert model.forward is forward
    assert operator == caught.value.operator
    assert caught.value.hint
    assert ("", "") == tuple(capfd.readouterr())


def test_module_stacks_read_counters_and_other_names() -> None:
    """The suffix of a second call and the second name of a module both lead to the first path."""
    stacks = ModuleStacks(Model())
    assert ("", "leaves.0", "leaves.0.linear") == stacks.decode(["", "other_name@1", "other_name.linear@1", "linear"])


class Endless(nn.Module):
    """A module with an export of half a minute and an immediate run."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Wait in small steps, as symbolic algebra does."""
        started = time.monotonic()
        while torch.compiler.is_exporting() and time.monotonic() - started < 30:
            time.sleep(0.001)
        return values * 2


def test_capture_beyond_its_time_is_stopped_without_remains() -> None:
    """The error names the limit; the next capture finds torch unchanged."""
    inputs = {"values": torch.randn(2, 3)}
    model = nn.Sequential(Endless())
    with pytest.raises(ExportError, match="1 s"):
        capture(model, inputs, time_limit_s=1.0)
    second_capture = capture(nn.Sequential(nn.ReLU()), inputs, time_limit_s=600.0)
    assert "Relu" in [node.op_type for node in second_capture.model.graph]
