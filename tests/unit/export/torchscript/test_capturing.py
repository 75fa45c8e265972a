"""Graphs as the TorchScript exporter captures them, before normalization."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from checkpoints import make_distinct
from winml.modelkit.export.capture import Capture, CaptureOptions
from winml.modelkit.export.torchscript.capturing import capture_torchscript
from winml.modelkit.metadata_keys import STACK_TRACE_KEY
from winml.modelkit.models.preparation import prepared_for_export
from winml.modelkit.progress import RunningStep, running_step
from winml.modelkit.tags.torch_modules import record_calls
from winml.modelkit.tags.tree import build_tree


class Leaf(nn.Module):
    """Reduces along an axis and multiplies by a number, which the exporter writes as constants."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        return (self.linear(values) * 2.5).sum(-1, keepdim=True) + values


class Model(nn.Module):
    """Calls a leaf of a list twice, and does not listen to its second input."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves = nn.ModuleList([Leaf()])

    def forward(self, values: torch.Tensor, unheard: torch.Tensor) -> torch.Tensor:
        """Call it."""
        return self.leaves[0](torch.tanh(self.leaves[0](values)))


def capture(model: nn.Module, dtype: torch.dtype = torch.float32, **options: Any) -> Capture:
    """Capture a model on two inputs."""
    make_distinct(model)
    inputs = {"values": torch.randn(2, 3, dtype=dtype), "unheard": torch.zeros(4, dtype=torch.int64)}
    with prepared_for_export(model, list(inputs)) as forward:
        with record_calls(model) as trace:
            model(*inputs.values())
        return capture_torchscript(model, inputs, forward, build_tree(trace), CaptureOptions(**options))


def test_capture_names_nodes_after_the_module_they_ran_in() -> None:
    """Names are unique, start with the scope, and a container that is not called is joined by a dot."""
    nodes = list(capture(Model()).model.graph)
    names = [node.name or "" for node in nodes]
    assert len(set(names)) == len(names)
    assert ["/leaves.0/linear/Gemm", "/leaves.0/linear/Gemm_1"] == [name for name in names if "Gemm" in name]
    assert "/Tanh" in names
    outputs = {value.name for node in nodes for value in node.outputs} - {"output"}
    assert all(name.rpartition("_output_")[0] in names for name in outputs if name)


def test_capture_constants_have_the_scope_they_were_made_for() -> None:
    """Axes and factors the exporter writes beside a node belong to the module of that node."""
    captured = capture(Model())
    constants = [node for node in captured.model.graph if node.op_type == "Constant"]
    assert constants
    assert {("", "leaves.0")} == {captured.scopes[node] for node in constants}


def test_capture_every_node_has_a_scope() -> None:
    """Nothing is left to guess in a model without oddities."""
    captured = capture(Model())
    assert set(captured.model.graph.all_nodes()) == set(captured.scopes)
    assert all(captured.scopes.values())


def test_capture_refers_to_the_live_weights() -> None:
    """Initializers bear the parameters' names and their memory."""
    model = Model()
    initializers = capture(model).model.graph.initializers
    assert {"leaves.0.linear.weight", "leaves.0.linear.bias"} <= set(initializers)
    tensor = initializers["leaves.0.linear.weight"].const_value
    assert tensor is not None
    with torch.no_grad():
        model.leaves[0].linear.weight.fill_(7)  # type: ignore[union-attr, operator]
    assert {7.0} == set(tensor.numpy().ravel().tolist())


def test_capture_input_nothing_reads_is_declared_in_its_place() -> None:
    """It keeps its shape and dtype, and is told."""
    captured = capture(Model())
    assert ("unheard",) == captured.unused_inputs
    declared = [(value.name, value.dtype, value.shape) for value in captured.model.graph.inputs]
    assert [
        ("values", ir.DataType.FLOAT, ir.Shape([2, 3])),
        ("unheard", ir.DataType.INT64, ir.Shape([4])),
    ] == declared


def test_capture_keeps_source_lines_only_when_asked() -> None:
    """They are local paths: kept as metadata on request, and never as doc strings."""
    for is_kept in (False, True):
        nodes = list(capture(Model(), keep_stack_traces=is_kept).model.graph.all_nodes())
        assert not any(node.doc_string for node in nodes)
        traces = [node.metadata_props[STACK_TRACE_KEY] for node in nodes if STACK_TRACE_KEY in node.metadata_props]
        assert is_kept == bool(traces)
        assert all(__file__ in trace for trace in traces)


def test_capture_does_not_change_the_examples() -> None:
    """A forward that writes into its inputs is traced on copies."""

    class Writer(nn.Module):
        def forward(self, values: torch.Tensor, unheard: torch.Tensor) -> torch.Tensor:
            return values.add_(1)

    model, values = Writer(), torch.zeros(2)
    inputs = {"values": values, "unheard": torch.zeros(1)}
    with prepared_for_export(model, list(inputs)) as forward:
        with record_calls(model) as trace:
            model(torch.zeros(2), torch.zeros(1))
        capture_torchscript(model, inputs, forward, build_tree(trace), CaptureOptions(opset_version=17))
    assert [0.0, 0.0] == values.tolist()


def test_attention_in_bfloat16_casts_its_scale_to_bfloat16() -> None:
    """Torch writes the number of another type, and leaves values whose type nobody knows."""

    class Attention(nn.Module):
        def forward(self, values: torch.Tensor, unheard: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(values, values, values, scale=0.5)

    graph = capture(Attention(), dtype=torch.bfloat16).model.graph
    casts = [node.attributes["to"].as_int() for node in graph if node.op_type == "Cast"]
    assert casts
    assert ir.DataType.COMPLEX128 not in casts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_of_attention_keep_scores_of_16_bits(dtype: torch.dtype, is_causal: bool) -> None:
    """A mask in float32 makes scores of it, and what follows reads them with weights of 16 bits: no valid graph."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(3)

        def forward(self, values: torch.Tensor, unheard: torch.Tensor) -> torch.Tensor:
            heads = values[None, None]
            mask = None if is_causal else heads @ heads.transpose(2, 3) > 0
            attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, mask, is_causal=is_causal)
            return self.norm(attended)

    model = capture(Attention().to(dtype), dtype=dtype).model
    onnx.shape_inference.infer_shapes(ir.to_proto(model), strict_mode=True, check_type=True)
    expected = {torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16}[dtype]
    assert [expected] == [value.dtype for value in model.graph.outputs]


class Watching(nn.Module):
    """Looks at how far the running step is when it is called."""

    def __init__(self, step: RunningStep, seen: list[tuple[float, str]]) -> None:
        super().__init__()
        self.step, self.seen = step, seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Note it."""
        self.seen.append((self.step.done, self.step.counted))
        return x + 1


class Chain(nn.Module):
    """Calls three of them."""

    def __init__(self, step: RunningStep, seen: list[tuple[float, str]]) -> None:
        super().__init__()
        self.links = nn.Sequential(*(Watching(step, seen) for _ in range(3)))

    def forward(self, values: torch.Tensor, unheard: torch.Tensor) -> torch.Tensor:
        """Call them."""
        return self.links(values)


def test_progress_of_a_trace_is_counted() -> None:
    """By modules while it is traced, then by operators while it is converted."""
    step, seen = RunningStep(), list[tuple[float, str]]()
    with running_step(step):
        capture(Chain(step, seen))
    # The last three calls are those of the trace; the chain and its list of links come first.
    assert [(number / 10, f"module {number} of 5 traced") for number in (3, 4, 5)] == seen[-3:]
    assert 0.5 < step.done < 1
    assert step.counted.endswith("converted")
