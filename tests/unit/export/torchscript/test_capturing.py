"""Graphs captured by the TorchScript exporter, before normalization."""

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
    """A leaf that reduces along an axis and multiplies by a number, which the exporter writes as constants."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Apply the leaf."""
        return (self.linear(values) * 2.5).sum(-1, keepdim=True) + values


class Model(nn.Module):
    """A model that calls a leaf of a list twice, and ignores its second input."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves = nn.ModuleList([Leaf()])

    def forward(self, values: torch.Tensor, unheard: torch.Tensor) -> torch.Tensor:
        """Call the leaf twice."""
        return self.leaves[0](torch.tanh(self.leaves[0](values)))


def capture(model: nn.Module, dtype: torch.dtype = torch.float32, **options: Any) -> Capture:
    """Capture a model on two inputs."""
    make_distinct(model)
    inputs = {"values": torch.randn(2, 3, dtype=dtype), "unheard": torch.zeros(4, dtype=torch.int64)}
    with prepared_for_export(model, list(inputs)) as forward:
        with record_calls(model) as trace:
            model(*inputs.values())
        return capture_torchscript(model, inputs, forward, build_tree(trace), CaptureOptions(**options))


def test_capture_names_nodes_after_their_module() -> None:
    """A name is unique and starts with the scope, where a dot joins the container that is not called."""
    nodes = list(capture(Model()).model.graph)
    names = [node.name or "" for node in nodes]
    assert len(set(names)) == len(names)
    assert ["/leaves.0/linear/Gemm", "/leaves.0/linear/Gemm_1"] == [name for name in names if "Gemm" in name]
    assert "/Tanh" in names
    outputs = {value.name for node in nodes for value in node.outputs} - {"output"}
    assert all(name.rpartition("_output_")[0] in names for name in outputs if name)


def test_capture_constants_have_the_scope_of_their_reader() -> None:
    """The module of a node also has the axes and factors that the exporter writes beside the node."""
    captured = capture(Model())
    constants = [node for node in captured.model.graph if node.op_type == "Constant"]
    assert constants
    assert {("", "leaves.0")} == {captured.scopes[node] for node in constants}


def test_capture_every_node_has_a_scope() -> None:
    """No scope has to be guessed in a plain model."""
    captured = capture(Model())
    assert set(captured.model.graph.all_nodes()) == set(captured.scopes)
    assert all(captured.scopes.values())


def test_capture_refers_to_the_live_weights() -> None:
    """Initializers have the names and the memory of the parameters."""
    model = Model()
    initializers = capture(model).model.graph.initializers
    assert {"leaves.0.linear.weight", "leaves.0.linear.bias"} <= set(initializers)
    tensor = initializers["leaves.0.linear.weight"].const_value
    assert tensor is not None
    with torch.no_grad():
        model.leaves[0].linear.weight.fill_(7)  # type: ignore[union-attr, operator]
    assert {7.0} == set(tensor.numpy().ravel().tolist())


def test_capture_unread_input_is_declared_in_its_position() -> None:
    """The unused input keeps its shape and dtype, and is listed."""
    captured = capture(Model())
    assert ("unheard",) == captured.unused_inputs
    declared = [(value.name, value.dtype, value.shape) for value in captured.model.graph.inputs]
    assert [
        ("values", ir.DataType.FLOAT, ir.Shape([2, 3])),
        ("unheard", ir.DataType.INT64, ir.Shape([4])),
    ] == declared


def test_capture_keeps_source_lines_on_request_only() -> None:
    """Source lines are local paths, so they are metadata on request, and never doc strings."""
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
    """Torch writes a number of another type, and later values then have no known type."""

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
    """A float32 mask makes float32 scores, which nodes with 16-bit weights read: an invalid graph."""

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
    """A link that stores the progress of the running step when it is called."""

    def __init__(self, step: RunningStep, seen: list[tuple[float, str]]) -> None:
        super().__init__()
        self.step, self.seen = step, seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Store the progress."""
        self.seen.append((self.step.done, self.step.counted))
        return x + 1


class Chain(nn.Module):
    """A chain of three links."""

    def __init__(self, step: RunningStep, seen: list[tuple[float, str]]) -> None:
        super().__init__()
        self.links = nn.Sequential(*(Watching(step, seen) for _ in range(3)))

    def forward(self, values: torch.Tensor, unheard: torch.Tensor) -> torch.Tensor:
        """Call the links."""
        return self.links(values)


def test_progress_of_a_trace_is_counted() -> None:
    """The progress is counted by modules during the trace, then by operators during the conversion."""
    step, seen = RunningStep(), list[tuple[float, str]]()
    with running_step(step):
        capture(Chain(step, seen))
    # The last three calls are those of the trace; the chain and its list of links come first.
    assert [(number / 10, f"module {number} of 5 traced") for number in (3, 4, 5)] == seen[-3:]
    assert 0.5 < step.done < 1
    assert step.counted.endswith("converted")
