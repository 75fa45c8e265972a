"""Captures by dynamo with example values where values decide, and of loops over positions found by values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn
from torch._subclasses import meta_utils
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

from expert_loops import Experts
from winml.modelkit.errors import ExportError
from winml.modelkit.export.capture import Capture, CaptureOptions
from winml.modelkit.export.dynamo.capturing import capture_dynamo
from winml.modelkit.models.preparation import prepared_for_export
from winml.modelkit.tags.torch_modules import record_calls
from winml.modelkit.tags.tree import build_tree

Tensors = Mapping[str, torch.Tensor]
Act = Callable[..., torch.Tensor]


class Deciding(nn.Module):
    """A module that calls a function with a layer and both inputs."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.act = act

    def forward(self, values: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Call the function."""
        return self.act(self.layer, values, sizes)


def capture(model: nn.Module, inputs: Tensors, *, takes_example_values: bool = True) -> Capture:
    """Capture a model with the values of its inputs."""
    with prepared_for_export(model, list(inputs)) as forward:
        with record_calls(model) as trace:
            model(*(tensor.clone() for tensor in inputs.values()))
        options = CaptureOptions(takes_example_values=takes_example_values)
        return capture_dynamo(model, inputs, forward, build_tree(trace), options)


def answer(captured: Capture, inputs: Tensors, folder: Path) -> torch.Tensor:
    """Run a graph of one output without optimization.

    ONNX Runtime before 1.24 fuses nodes that normalization would remove.
    """
    ir.save(captured.model, folder / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    names = {item.name for item in session.get_inputs()}
    return torch.from_numpy(
        session.run(None, {name: value.numpy() for name, value in inputs.items() if name in names})[0]
    )


def branch(layer: nn.Module, values: torch.Tensor, _sizes: torch.Tensor) -> torch.Tensor:
    """Branch on a computed value."""
    return layer(values) if values.sum() > 0 else values


def branch_on_weights(layer: nn.Linear, values: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Branch on a weight, and on the number of rows that a mask leaves."""
    kept = values[sizes.repeat_interleave(sizes) > 0]
    return layer(kept) if bool(layer.weight.abs().max() == LARGEST_WEIGHT) and kept.shape[0] > 1 else kept


def rounds(layer: nn.Module, values: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Apply the layer as often as an input says."""
    for _round in range(int(sizes[0])):
        values = layer(values)
    return values


LARGEST_WEIGHT = float(Deciding(branch).layer.weight.detach().abs().max())


def patched_places() -> tuple[object, ...]:
    """Return the patched attributes of torch."""
    taking = op_implementations_dict[torch.ops.aten._local_scalar_dense.default]
    laying_out = FakeTensorMode._maybe_infer_fake_kernel_from_pytree_out
    return taking, laying_out, torch.tensor, torch.Tensor.nonzero, meta_utils._safe_copy


INPUTS = {"values": torch.rand(5, 4), "sizes": torch.tensor([2, 3])}


@pytest.mark.parametrize("act", [branch, branch_on_weights, rounds])
def test_capture_with_example_values_follows_their_branches_and_names_the_line(act: Act, tmp_path: Path) -> None:
    """Without example values the capture is refused as decided by values; with them the graph equals PyTorch."""
    model = Deciding(act)
    before = patched_places()
    with pytest.raises(ExportError) as caught:
        capture(model, INPUTS, takes_example_values=False)
    assert caught.value.is_by_value
    captured = capture(model, INPUTS)
    assert before == patched_places()
    assert {(Path(__file__).name, "branch")} == {(item.file, item.kind) for item in captured.assumed}
    with torch.no_grad():
        expected = model(**INPUTS)
    # Four products of float32 around 1.
    torch.testing.assert_close(expected, answer(captured, INPUTS, tmp_path), rtol=1e-5, atol=1e-6)


def test_size_that_values_decide_stays_open(tmp_path: Path) -> None:
    """The number of rows that a mask leaves stays dynamic: no example value is taken unless one is needed."""

    def kept(layer: nn.Module, values: torch.Tensor, _sizes: torch.Tensor) -> torch.Tensor:
        rows = values[values[:, 0] > 0.5]
        return layer(rows) if rows.shape[0] > 1 else rows

    model = Deciding(kept)
    traced = {**INPUTS, "values": torch.tensor([0.9, 0.9, 0.1, 0.9, 0.1])[:, None] * torch.ones(5, 4)}
    captured = capture(model, traced)
    (line,) = captured.assumed
    assert (line.file, line.value) == (Path(__file__).name, "True")
    other = {**INPUTS, "values": traced["values"].flip(0) + 0.45}
    assert 5 == len(model(**other))
    with torch.no_grad():
        # Four products of float32 around 1.
        torch.testing.assert_close(model(**other), answer(captured, other, tmp_path), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", [Experts(3), Experts(3, skips=True), Experts(5)], ids=["all", "skipping", "too many"])
def test_loop_over_chosen_experts_has_a_round_for_each(model: nn.Module, tmp_path: Path) -> None:
    """Rows that choose other experts than those of the example are computed as in PyTorch, without example values.

    The mask may have positions beyond the experts, which no row chooses.
    """
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    captured = capture(model, {"rows": rows[:1].expand(6, 4).contiguous()}, takes_example_values=False)
    assert ("5 positions has 3" in "".join(captured.notes)) == (model.classes == 5)
    # float32 sums of four products: rounding is below 1e-6.
    torch.testing.assert_close(model(rows), answer(captured, {"rows": rows}, tmp_path), rtol=1e-5, atol=1e-6)


def index_by_name(layer: nn.Module, values: torch.Tensor, _sizes: torch.Tensor) -> torch.Tensor:
    """Look up a module by a name with the number of its position, at every position."""
    layers = {"layer_0": layer, "layer_1": nn.Identity(), "layer_2": layer, "layer_3": layer}
    chosen = (values.argmax(-1)[None] == torch.arange(4)[:, None]).sum(-1) > 0
    result = torch.zeros_like(values)
    for place in chosen.nonzero():
        rows = values.argmax(-1) == place
        result = result + layers[f"layer_{place[0]}"](values) * rows[:, None]
    return result


def written_in_rows(layer: nn.Module, values: torch.Tensor, _sizes: torch.Tensor) -> torch.Tensor:
    """Write at positions that are tuples of single numbers."""
    places = torch.stack([values[:, :2].argmax(-1), values.argmax(-1)], -1)
    rows, columns = zip(*places, strict=True)
    result = layer(values)
    result[rows, columns] = 0.0
    return result


@pytest.mark.parametrize("act", [index_by_name, written_in_rows])
def test_named_and_listed_positions_are_positions_of_other_inputs(act: Act, tmp_path: Path) -> None:
    """A name holds the number of a loop's position; a row of numbers indexes as one tensor."""
    model = Deciding(act)
    captured = capture(model, INPUTS, takes_example_values=False)
    other = {"values": torch.rand(5, 4), "sizes": torch.tensor([2, 3])}
    torch.testing.assert_close(answer(captured, other, tmp_path), model(**other))
