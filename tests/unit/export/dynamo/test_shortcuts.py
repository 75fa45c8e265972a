"""Shortcuts in torch's exporter: equal graphs, and no shortcut after the block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch._prims_common
from onnxscript import TracedOnnxFunction
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.onnx._internal.exporter import _fx_passes
from torch.onnx._internal.fx.passes import type_promotion

from installed_versions import STACK_TRACE_SETTING
from winml.modelkit.export.dynamo.shortcuts import shortcuts
from winml.modelkit.models.state_restoration import quiet_torch
from winml.modelkit.normalize.pipeline import normalize


class Plain(nn.Module):
    """A model with the operators that map to one ONNX operator each, and some others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Compute with every operator."""
        first, second = self.drop(self.layer(values)).split(2, dim=-1)
        shown = (first > 0) & (second > 0) | (first.to(torch.int64) > 0)
        rows = torch.min(first, second).transpose(0, 1).contiguous().reshape(2, -1)
        return torch.max(rows, shown.to(values.dtype).reshape(2, -1)).flatten(0).to("cpu")


class Writing(Plain):
    """A model that writes into a tensor."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Add to the result in place."""
        result = super().forward(values)
        result += 1
        return result


class Residual(nn.Module):
    """A model that adds in place to a tensor that nothing else reads, as ResNet does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv1d(1, 1, 3, padding=1), nn.BatchNorm1d(1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Add the input to the normalized values, and clip them in place."""
        states: torch.Tensor = self.norm(self.conv(values[:, None]))
        states += values[:, None]
        states.relu_()
        return nn.functional.adaptive_avg_pool2d(states[..., None], 1)


class Remembering(Plain):
    """A model that reads a tensor by another name after writing into it."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Write into a view of a result."""
        first: torch.Tensor = self.layer(values)
        second = first.view(-1)
        second += 1
        return first * 2


class Widening(Plain):
    """A model that writes values of another type into a tensor."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Add floats of 64 bits in place, which leaves 32 bits."""
        states: torch.Tensor = self.layer(values)
        states += values.double() / 3
        return states


class Promoting(nn.Module):
    """A model that combines types, and divides integers."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Add integers, a flag and a number to floats."""
        counts = (values > 0).to(torch.int64)
        halves = counts.sum(-1, keepdim=True) / 2
        return torch.where(counts > 0, values * counts + halves, 1) + (values > 1) + torch.rsqrt(counts + 1)


class Viewing(nn.Module):
    """A model that reshapes a tensor that cannot be viewed."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Transpose and flatten."""
        return values.t().reshape(-1)


def exported(model: nn.Module) -> ir.Model:
    """Export a model with torch, and normalize it."""
    with quiet_torch():
        program = torch.export.export(model.eval(), (torch.randn(3, 4),), strict=False)
        converted = torch.onnx.export(program, optimize=False, verbose=False)
    assert converted is not None
    return normalize(converted.model).model


def nodes_of(model: ir.Model) -> list[tuple[str, list[str]]]:
    """Return operators and output shapes, in order."""
    return [(node.op_type, [str(value.shape) for value in node.outputs]) for node in model.graph]


@pytest.fixture
def traced_again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the programs that torch traces again."""
    traced: list[str] = []
    original: Callable[..., Any] = torch.export.ExportedProgram.run_decompositions

    def run_decompositions(program: Any, *args: Any, **options: Any) -> Any:
        traced.append(str(program))
        return original(program, *args, **options)

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", run_decompositions)
    return traced


@pytest.mark.parametrize(
    ("model_class", "is_traced_again"),
    [
        (Plain, False),
        (Promoting, False),
        (Residual, False),
        (Writing, True),
        (Remembering, True),
        (Widening, True),
        (Viewing, True),
    ],
)
def test_graph_equals_the_graph_of_torch(
    model_class: type[nn.Module], is_traced_again: bool, traced_again: list[str]
) -> None:
    """A program is traced again only if it reads what it writes; the graph is the same node by node."""
    expected = nodes_of(exported(model_class()))
    traced_again.clear()
    with shortcuts(keep_stack_traces=False):
        actual = nodes_of(exported(model_class()))
    assert (actual, bool(traced_again)) == (expected, is_traced_again)


def test_node_of_unknown_shape_is_traced_again(traced_again: list[str]) -> None:
    """T5Gemma has such a node, which reads a constant made in the forward."""
    with quiet_torch(), shortcuts(keep_stack_traces=False):
        program = torch.export.export(Plain().eval(), (torch.randn(3, 4),), strict=False)
        traced_again.clear()
        next(node for node in program.graph.nodes if node.op == "call_function").meta.pop("val")
        torch.onnx.export(program, optimize=False, verbose=False)
    assert traced_again


def test_layout_of_dynamic_sizes_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with dynamic sizes is the same, after fewer comparisons of sizes and strides."""
    compare, compared = torch._prims_common.check_contiguous_sizes_strides, list[object]()

    def counted(*args: Any, **options: Any) -> bool:
        compared.append(args)
        return compare(*args, **options)

    def traced() -> str:
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)).eval()
        sizes = ({0: torch.export.Dim("rows"), 1: torch.export.Dim("columns")},)
        program = torch.export.export(model, (torch.ones(3, 5, 4),), dynamic_shapes=sizes, strict=False)
        return str(program.graph_module.code) + str(program.range_constraints)

    monkeypatch.setattr(torch._prims_common, "check_contiguous_sizes_strides", counted)
    expected, count = traced(), len(compared)
    compared.clear()
    with shortcuts(keep_stack_traces=True):
        actual = traced()
    assert actual == expected
    assert 2 * len(compared) < count


def places() -> tuple[object, ...]:
    """Return the patched attributes of torch."""
    return (
        vars(TracedOnnxFunction)["function_ir"],
        _fx_passes.decompose_with_registry,
        vars(type_promotion._TypePromotionInterpreter)["run_node"],
        vars(FakeTensorMode)["_cached_dispatch_impl"],
        torch._prims_common.check_contiguous_sizes_strides,
        proxy_tensor.proxy_call,
        vars(proxy_tensor)["_extract_tensor_metadata"],
        vars(ir.schemas.OpSignature)["from_op_schema"],
        getattr(torch.fx.config, "do_not_emit_stack_traces", None),
    )


def test_places_are_as_before_after_the_block() -> None:
    """Each attribute is replaced inside the block."""
    before = places()
    with shortcuts(keep_stack_traces=False):
        assert all(one is not other for one, other in zip(places(), before, strict=True))
    assert before == places()


@pytest.mark.parametrize("keeps", [pytest.param(False, marks=STACK_TRACE_SETTING), True])
def test_python_lines_are_read_from_stack_traces(keeps: bool) -> None:
    """Nodes have source lines only if stack traces are kept."""
    with shortcuts(keep_stack_traces=keeps):
        program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),), strict=False)
    assert keeps == any(node.meta.get("stack_trace") for node in program.graph.nodes)
