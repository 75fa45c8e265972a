"""Scopes of traced nodes, and the private names of torch behind them."""

from __future__ import annotations

import io
import warnings
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.onnx._internal.torchscript_exporter import utils as exporter

from winml.modelkit.export.torchscript.tracing import ModuleScopes, operator_of_error


def _branch_on_sum(values: torch.Tensor) -> torch.Tensor:
    if bool(values.sum() > 0):
        values = torch.tanh(values)
    else:
        values = torch.sigmoid(values)
    return values


with warnings.catch_warnings():
    # torch announces the retirement of scripting, which people's models still hold.
    warnings.simplefilter("ignore", DeprecationWarning)
    either = torch.jit.script(_branch_on_sum)


class Leaf(nn.Module):
    """A leaf that applies ReLU to the output of a function."""

    def __init__(self, make: Any = torch.tanh) -> None:
        super().__init__()
        self.make = make
        self.linear = nn.Linear(3, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Apply the function and ReLU."""
        return torch.relu(self.make(self.linear(values)))


class Caller(nn.Module):
    """A model that calls a list of leaves, the first of them twice."""

    def __init__(self, *leaves: Leaf) -> None:
        super().__init__()
        self.leaves = nn.ModuleList(leaves)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call the leaves."""
        for leaf in (*self.leaves, self.leaves[0]):
            values = leaf(values)
        return torch.sigmoid(values)


def exported(model: nn.Module, scopes: ModuleScopes, **options: Any) -> list[onnx.NodeProto]:
    """Export with patched scopes and return the nodes."""
    buffer = io.BytesIO()
    with scopes.patched_exporter(), torch.no_grad():
        torch.onnx.export(
            model.eval(), (torch.ones(1, 3),), buffer, opset_version=17, dynamo=False, export_params=False,
            do_constant_folding=False, keep_initializers_as_inputs=True, **options,
        )  # fmt: skip
    return list(onnx.load_model_from_string(buffer.getvalue()).graph.node)


def stacks(nodes: list[onnx.NodeProto], scopes: ModuleScopes) -> list[tuple[str, tuple[str, ...]]]:
    """Return operator and scope of each node other than constants."""
    return [(node.op_type, scopes.read(node.name)) for node in nodes if node.op_type != "Constant"]


def private_places() -> tuple[Any, ...]:
    """Return the attributes and settings of torch that an export replaces."""
    return (
        exporter._setup_trace_module_map,
        exporter.setup_onnx_logging,
        torch.jit._get_trace_graph,  # type: ignore[attr-defined]
        torch._C._jit_pass_onnx_graph_shape_type_inference,
        torch._C._jit_get_inline_everything_mode(),
        torch._C._jit_is_onnx_log_enabled(),
    )


def test_scopes_read_back_the_exact_call_stack() -> None:
    """Every node's name splits into the paths of its modules, a second call included."""
    scopes = ModuleScopes(model := Caller(Leaf(), Leaf()))
    scope_stacks = stacks(exported(model, scopes), scopes)
    inside = [
        (operator, stack)
        for leaf in ("leaves.0", "leaves.1", "leaves.0")
        for operator, stack in [
            ("Gemm", ("", leaf, f"{leaf}.linear")),
            ("Tanh", ("", leaf)),
            ("Relu", ("", leaf)),
        ]
    ]
    assert [*inside, ("Sigmoid", ("",))] == scope_stacks


def test_scopes_of_many_modules_are_distinguished() -> None:
    """The names of module 1 and module 11 are not mixed up."""
    scopes = ModuleScopes(model := Caller(*(Leaf() for _ in range(12))))
    scope_stacks = [stack[-1] for operator, stack in stacks(exported(model, scopes), scopes) if operator == "Gemm"]
    assert [*(f"leaves.{number}.linear" for number in range(12)), "leaves.0.linear"] == scope_stacks


def test_scopes_scripted_function_keeps_its_callers_scope() -> None:
    """An If, the condition and the branches ran in the module that called the function."""
    scopes = ModuleScopes(model := Caller(Leaf(), Leaf(either)))
    nodes = exported(model, scopes)
    (choice,) = [node for node in nodes if node.op_type == "If"]
    assert ("", "leaves.1") == scopes.read(choice.name)
    inner = [each for attribute in choice.attribute for each in attribute.g.node]
    assert {"Tanh", "Sigmoid"} == {each.op_type for each in inner}
    assert {("", "leaves.1")} == {scopes.read(each.name) for each in inner}
    (total,) = [node for node in nodes if node.op_type == "ReduceSum"]
    assert ("", "leaves.1") == scopes.read(total.name)


def test_scopes_after_a_scripted_call_are_their_own_again() -> None:
    """The scope of a call ends with the call."""
    scopes = ModuleScopes(model := Caller(Leaf(either)))
    scope_stacks = stacks(exported(model, scopes), scopes)
    assert ("Sigmoid", ("",)) == scope_stacks[-1]
    assert ("Gemm", ("", "leaves.0", "leaves.0.linear")) == scope_stacks[0]


def test_decode_ignores_foreign_scopes() -> None:
    """Other names give no scope."""
    scopes = ModuleScopes(Caller(Leaf()))
    assert ("", "leaves.0") == scopes.decode(["m0", "other", "m2_1"])
    assert () == scopes.read("Constant_12")
    assert () == scopes.read("")
    assert ("",) == scopes.read("/m0/Constant_12")


def test_applied_puts_torch_back() -> None:
    """The private attributes of torch are replaced inside the block only."""
    before = private_places()
    with ModuleScopes(Leaf()).patched_exporter():
        inside = private_places()
    assert before == private_places()
    assert not any(first is second for first, second in zip(before[:4], inside[:4], strict=True))
    assert inside[4] is False


@pytest.mark.parametrize("inlines", [True, False])
@pytest.mark.parametrize("logs", [True, False])
def test_applied_puts_torch_back_after_an_error(inlines: bool, logs: bool) -> None:
    """The settings of torch, default or not, are restored also after an error."""
    initial = torch._C._jit_get_inline_everything_mode(), torch._C._jit_is_onnx_log_enabled()
    torch._C._jit_set_inline_everything_mode(inlines)
    torch._C._jit_set_onnx_log_enabled(logs)
    try:
        before = private_places()
        with pytest.raises(ZeroDivisionError), ModuleScopes(Leaf()).patched_exporter():
            raise ZeroDivisionError
        assert before == private_places()
    finally:
        torch._C._jit_set_inline_everything_mode(initial[0])
        torch._C._jit_set_onnx_log_enabled(initial[1])


@pytest.mark.filterwarnings("ignore:The feature will be removed:DeprecationWarning")
def test_applied_patch_leaves_ordinary_exports_unchanged() -> None:
    """An export after ours writes torch's own scopes."""
    model = Caller(Leaf())
    exported(model, ModuleScopes(model))
    buffer = io.BytesIO()
    torch.onnx.export(model, (torch.ones(1, 3),), buffer, dynamo=False, opset_version=17)
    names = [node.name for node in onnx.load_model_from_string(buffer.getvalue()).graph.node]
    assert any(name.startswith("/leaves.0/") for name in names)


def test_applied_prints_nothing_with_verbose(capfd: pytest.CaptureFixture[str]) -> None:
    """Nodes keep source lines, and no graph is printed."""
    scopes = ModuleScopes(model := Caller(Leaf()))
    nodes = exported(model, scopes, verbose=True)
    assert any(__file__ in node.doc_string for node in nodes)
    assert ("", "") == capfd.readouterr()


def test_operator_of_error_names_operator_and_module(capfd: pytest.CaptureFixture[str]) -> None:
    """The error contains the unsupported node, and the graph is not printed."""
    scopes = ModuleScopes(model := Caller(Leaf(), Leaf(torch.special.bessel_j0)))
    with pytest.raises(torch.onnx.errors.UnsupportedOperatorError) as caught:
        exported(model, scopes)
    assert ("aten::special_bessel_j0", "leaves.1") == operator_of_error(caught.value, scopes)
    assert ("", "") == capfd.readouterr()


def test_operator_of_error_is_empty_for_other_errors() -> None:
    """An error outside of the conversion of a node names no operator."""
    scopes = ModuleScopes(model := Caller(Leaf()))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 5))
    assert operator_of_error(caught.value, scopes) is None
