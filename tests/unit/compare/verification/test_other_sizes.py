"""Runs at other sizes that reveal a frozen dimension, and the error about the dimension."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.compare.verification.sizes import (
    Draw,
    DynamicProof,
    limited_by_tables,
    run_at_two_sizes,
    run_at_varied_sizes,
    with_reference_outputs,
)
from winml.modelkit.errors import ExportError, UsageError, VerificationError
from winml.modelkit.models.state_restoration import unchanged_attributes
from winml.modelkit.onnx.specs import DynamicDimension


def runner(accepts: Callable[[int], bool]) -> Callable[[Mapping[str, int]], Draw]:
    """Return a model with one output row per ``n``, at the accepted sizes."""

    def run(sizes: Mapping[str, int]) -> Draw:
        if not accepts(sizes["n"]):
            raise ExportError(f"the model refused {sizes['n']}")
        return Draw({"x": torch.zeros(sizes["n"])}, {"y": np.zeros((sizes["n"], 3))}, sizes)

    return run


@pytest.mark.parametrize(
    ("dimension", "accepts", "expected"),
    [
        (DynamicDimension(name="n", example=48), lambda n: n > 0, {1, 55, 385}),
        (DynamicDimension(name="n", example=2), lambda n: n > 0, {1, 3, 17}),
        (DynamicDimension(name="n", min=4, max=64, example=48), lambda n: n > 0, {4, 55, 64}),
        (DynamicDimension(name="n", max=48, example=48), lambda n: n > 0, {1, 47}),
        (DynamicDimension(name="n", example=224), lambda n: n % 32 == 0, {32, 256, 1792}),
        (DynamicDimension(name="n", example=48), lambda n: n >= 7, {7, 55, 385}),
    ],
)
def test_other_sizes_are_the_smallest_and_a_larger_one_the_model_accepts(
    dimension: DynamicDimension, accepts: Callable[[int], bool], expected: set[int]
) -> None:
    """Size 1 is included unless bounds or the model forbid it; the larger size is odd if possible."""
    traced = runner(accepts)({"n": dimension.example or 0})
    proof = run_at_varied_sizes(traced, [dimension], runner(accepts))
    assert expected == {draw.sizes["n"] for draw in (*proof.draws, *proof.far_draws)}
    assert {"y": ("n", 3)} == proof.output_shapes
    refused = min(expected) > dimension.min
    assert refused == any(f"rejects size {dimension.min}" in note for note in proof.notes)


@pytest.mark.parametrize(
    ("accepts", "rows", "expected"),
    [
        (lambda n, m: n + m > 0, lambda n, m: n + m, [(10, 15), (1, 0)]),
        (lambda n, m: n + m > 0, lambda n, m: n * m, []),
        (lambda n, m: n * m > 0, lambda n, m: n + m, []),
        (lambda n, m: n == m - 2, lambda n, m: n + m, []),
    ],
)
def test_two_sizes_explain_simple_shapes(
    accepts: Callable[[int, int], bool], rows: Callable[[int, int], int], expected: list[tuple[int, int]]
) -> None:
    """Sizes that the model refuses, sizes that depend on each other, and products are left to more runs."""

    def run(sizes: Mapping[str, int]) -> Draw:
        if not accepts(sizes["n"], sizes["m"]):
            raise ExportError("refused")
        return Draw({}, {"y": np.zeros((rows(sizes["n"], sizes["m"]), 3))}, sizes)

    dimensions = [DynamicDimension(name="n", example=5), DynamicDimension(name="m", min=0, example=7)]
    proof = run_at_two_sizes(run({"n": 5, "m": 7}), dimensions, run)
    assert expected == ([] if proof is None else [(draw.sizes["n"], draw.sizes["m"]) for draw in proof.draws])
    assert proof is None or {"y": ("n + m", 3)} == proof.output_shapes


def test_large_model_is_not_run_far_from_the_traced_size() -> None:
    """The far sizes take a second or two at most; with ten billion parameters there is none."""
    dimension = DynamicDimension(name="n", example=48)
    traced = runner(lambda n: n > 0)({"n": 48})
    for parameters, expected in ((10**8, {1, 55, 385}), (10**10, {1, 55})):
        proof = run_at_varied_sizes(traced, [dimension], runner(lambda n: n > 0), parameters)
        assert expected == {draw.sizes["n"] for draw in (*proof.draws, *proof.far_draws)}


@pytest.mark.parametrize(("largest", "parameters"), [(64, 0), (40, 0), (64, 10**15)])
def test_bounds_of_a_table_are_sizes_that_the_model_accepts(largest: int, parameters: int) -> None:
    """A shorter table that the graph does not show is found; too large a model is not run."""

    def accepts(size: int) -> bool:
        return 3 <= size <= largest

    traced = {"n": 5}
    proof = DynamicProof((runner(accepts)({"n": 3}), runner(accepts)({"n": 7})))
    extended, bounds = limited_by_tables(proof, traced, {"n": 64}, runner(accepts), parameters)
    assert {"n": (3, largest)} == bounds
    assert ([] if parameters else [{"n": largest}]) == [draw.sizes for draw in extended.far_draws]


def test_samples_far_away_or_of_several_sizes_are_dropped_if_only_values_refuse_them() -> None:
    """A table of 8 rows is read at the sum of two sizes; without values, every sum was accepted."""
    table = nn.Embedding(8, 2)

    def run(draw: Draw) -> Draw:
        try:
            rows = table(torch.arange(draw.sizes["n"] + draw.sizes["past"]))
        except IndexError as error:
            raise ExportError(str(error)) from error
        return replace(draw, reference={"y": rows.detach().numpy()})

    traced = {"n": 3, "past": 2}
    near, far = ({"n": 4, "past": 2}, {"n": 4, "past": 5}), ({"n": 5, "past": 2}, {"n": 7, "past": 2})
    samples = [tuple(Draw({}, {}, sizes) for sizes in several) for several in (near, far)]
    proof = with_reference_outputs(DynamicProof(*samples), traced, run)
    assert [(6, 2)] == [draw.reference["y"].shape for draw in proof.draws]
    assert [(7, 2)] == [draw.reference["y"].shape for draw in proof.far_draws]
    with pytest.raises(ExportError):
        with_reference_outputs(DynamicProof((Draw({}, {}, {"n": 3, "past": 6}),)), traced, run)


def test_dimension_the_model_cannot_vary_is_refused_with_its_reason() -> None:
    """A dimension that PyTorch refuses is no fault of the export."""
    run = runner(lambda n: n == 8)
    with pytest.raises(UsageError, match=r"n cannot.*8.*1"):
        run_at_varied_sizes(run({"n": 8}), [DynamicDimension(name="n", example=8)], run)


def test_notes_on_accepted_sizes_agree() -> None:
    """A model of two sizes has one note with both, although it also refuses the smallest size."""
    run = runner(lambda n: n in (32, 37))
    (note,) = run_at_varied_sizes(run({"n": 32}), [DynamicDimension(name="n", example=32)], run).notes
    assert note.startswith("n: ")
    assert "accepts 32 and 37 only" in note


def test_static_export_runs_no_further_forward() -> None:
    """A static export costs no further forward."""
    proof = run_at_varied_sizes(Draw({}, {}, {}), [], runner(lambda n: n < 0))
    assert () == proof.draws
    assert proof.output_shapes is None


class Inner(nn.Module):
    """A module that takes the length of its input as a Python number, which a trace keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Flatten with the number."""
        length = int(x.shape[1])
        return x.reshape(-1, length * 4)


class Reshaping(nn.Module):
    """A model that freezes a size in a child."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the child."""
        return self.inner(x * 2)


class Averaging(nn.Module):
    """A model that freezes a size without failing: the number is wrong, the shape is right."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Average with the number."""
        return x.sum(1) / float(x.shape[1])


class Shortening(nn.Module):
    """A model that rounds a size with a Python function, which only dynamo follows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep the first half of the tokens."""
        return x[:, : math.ceil(x.shape[1] / 2)] * 2


def export(model: nn.Module, folder: Path, **options: object) -> Path:
    """Export with dynamic axis 1."""
    config = WinMLExportConfig.model_validate({"dynamic_axes": {"x": {1: "tokens"}}, **options})
    path = folder / "model.onnx"
    HTPExporter(config).export(model, path, {"x": torch.randn(3, 6, 4)})
    return path


def test_axis_frozen_by_a_reshape_names_axis_input_and_module(tmp_path: Path) -> None:
    """The error, of exit code 3, names the lost dimension, the node and a remedy; no file is written."""
    with pytest.raises(VerificationError) as caught:
        export(Reshaping(), tmp_path, exporter="torchscript")
    text = str(caught.value)
    assert 3 == caught.value.exit_code
    assert "fails at tokens 1" in text
    assert "/inner/Reshape" in text
    assert "shape_config" in text
    assert "Without exporter='torchscript'" in text
    assert [] == list(tmp_path.iterdir())


def test_axis_that_torchscript_freezes_is_left_open_by_dynamo_unasked(tmp_path: Path) -> None:
    """Without a requested exporter, dynamo is chosen and the reason is stored."""
    config = WinMLExportConfig(dynamic_axes={"x": {1: "tokens"}})
    result = HTPExporter(config).export(Shortening(), tmp_path / "model.onnx", {"x": torch.randn(3, 6, 4)})
    assert "dynamo" == result.only_part.exporter
    assert "froze tokens" in result.only_part.exporter_reason
    assert {"tokens": (1, 7, 49)} == dict(result.only_part.checked_sizes)


def test_axis_frozen_by_both_exporters_is_reported_with_the_reason_of_dynamo(tmp_path: Path) -> None:
    """The hint does not propose an exporter that was tried."""
    with pytest.raises(VerificationError, match="froze tokens") as caught:
        export(Averaging(), tmp_path)
    assert "dynamo: tokens" in caught.value.hint
    assert "--no-dynamo" not in caught.value.hint


def test_axis_frozen_in_a_value_is_detected_by_wrong_outputs(tmp_path: Path) -> None:
    """A file that runs, but with wrong outputs at another size, has a frozen dimension."""
    with pytest.raises(VerificationError, match=r"froze tokens(.|\n)*'output'"):
        export(Averaging(), tmp_path, exporter="torchscript")


class Pieces(nn.Module):
    """A model with as many outputs as pairs of tokens."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split into pairs."""
        return (x * 2).split(2, 1)


class Squeezed(nn.Module):
    """A model that removes a dimension of the output for one token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Squeeze every dimension of size 1."""
        return (x * 2).squeeze()


@pytest.mark.parametrize("names", [None, ("a", "b", "c")], ids=["own names", "names of the user"])
def test_size_deciding_the_number_of_outputs_cannot_be_open(names: tuple[str, ...] | None, tmp_path: Path) -> None:
    """The error names the dimension, two sizes and the outputs at each, by the names of the user."""
    specs = names and tuple({"name": name, "shape": (3, 2, 4), "dtype": "float32"} for name in names)
    with pytest.raises(UsageError) as caught:
        export(Pieces(), tmp_path, output_tensors=specs)
    first = names[0] if names else "output_0"
    assert "tokens cannot" in caught.value.message
    assert f"at tokens 6: {first} float32[3, 2, 4]" in caught.value.message
    assert "at tokens 1: output_0 float32[3, 1, 4])" in caught.value.message
    assert "torch.stack" in caught.value.hint
    assert [] == list(tmp_path.iterdir())


class FixedPieces(nn.Module):
    """A model that cuts its input into pieces of 32, and averages each piece."""

    def __init__(self, by_index: bool) -> None:
        super().__init__()
        self.linear, self.by_index = nn.Linear(4, 4), by_index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an output of the input's shape."""
        pieces = [x[:, at : at + 32] for at in range(0, x.shape[1], 32)] if self.by_index else x.split(32, 1)
        return torch.cat([self.linear(piece) + piece.mean(1, keepdim=True) for piece in pieces], 1)


class RolledByHalf(nn.Module):
    """A model that rolls by half of its size, kept as a number: right at 1, and wrong between."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an output of the input's shape."""
        return torch.roll(x, x.shape[1] // 2, 1)


def test_size_correct_at_both_ends_only_is_no_range(tmp_path: Path) -> None:
    """A bounded dimension is also compared below the traced size."""
    config = WinMLExportConfig.model_validate({"dynamic_axes": {"x": {1: "n"}}, "exporter": "torchscript"})
    with pytest.raises(VerificationError) as caught:
        HTPExporter(config).export(RolledByHalf(), tmp_path / "a.onnx", {"x": torch.randn(2, 8)})
    assert ("n",) == caught.value.frozen
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(("by_index", "exporter"), [(True, "torchscript"), (False, "dynamo")])
def test_fixed_size_pieces_bound_a_dimension_traced_with_one_piece(
    tmp_path: Path, by_index: bool, exporter: str
) -> None:
    """A trace with 6 tokens has one piece, so the dimension ends at 32 in the record, the notes and the file."""
    config = WinMLExportConfig.model_validate({"dynamic_axes": {"x": {1: "tokens"}}, "exporter": exporter})
    part = HTPExporter(config).export(FixedPieces(by_index), tmp_path / "a.onnx", {"x": torch.randn(3, 6, 4)}).only_part
    assert (DynamicDimension(name="tokens", max=32, example=6),) == part.dimensions
    assert {"tokens": (1, 3, 5, 7, 32)} == dict(part.checked_sizes)
    assert any("tokens is limited to" in note for note in part.notes)
    metadata = {item.key: item.value for item in onnx.load(part.model_path).metadata_props}
    assert {"tokens": [1, 32]} == json.loads(metadata["winml.export"])["bounds"]


def test_size_that_decides_the_rank_of_an_output_can_be_left_open_within_bounds(tmp_path: Path) -> None:
    """A size of 1 is squeezed away; from 2 on the dimension is accepted."""
    with pytest.raises(UsageError, match="tokens 1: output"):
        export(Squeezed(), tmp_path)
    bounds = (DynamicDimension(name="tokens", min=2),)
    path = export(Squeezed(), tmp_path, dynamic_dimensions=bounds)
    assert "tokens" == onnx.load(path).graph.output[0].type.tensor_type.shape.dim[1].dim_param


def test_dimensions_that_decide_together_are_refused_together() -> None:
    """Each dimension alone gives the same outputs; both at once do not."""

    def run(sizes: Mapping[str, int]) -> Draw:
        count = 2 if min(sizes.values()) == 1 else 1
        return Draw({}, {f"y{position}": np.zeros(3) for position in range(count if len(sizes) > 1 else 1)}, sizes)

    dimensions = [DynamicDimension(name="n", min=1, example=4), DynamicDimension(name="m", min=2, example=4)]
    with pytest.raises(UsageError, match=r"n cannot.*outputs"):
        run_at_varied_sizes(run({"n": 4, "m": 4}), dimensions, run)


def test_frozen_axis_without_verification_is_written_and_noted(tmp_path: Path) -> None:
    """A note states the traced size, at which the file runs for certain."""
    config = WinMLExportConfig(dynamic_axes={"x": {1: "tokens"}}, verify=False)
    result = HTPExporter(config).export(Averaging(), tmp_path / "model.onnx", {"x": torch.randn(3, 6, 4)})
    assert any("traced tokens 6 only" in note for note in result.notes)
    assert {} == dict(result.only_part.checked_sizes)


def test_live_module_keeps_names_in_file_and_example_as_traced_size(tmp_path: Path) -> None:
    """The example tensors give the traced size, and the file has the names."""

    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x], dim=1).sum(-1)

    graph = onnx.load(export(Sums(), tmp_path)).graph
    assert [3, "tokens", 4] == [d.dim_param or d.dim_value for d in graph.input[0].type.tensor_type.shape.dim]
    assert [3, "2*tokens"] == [d.dim_param or d.dim_value for d in graph.output[0].type.tensor_type.shape.dim]


def test_product_resembling_a_factor_near_the_traced_sizes_is_distinguished() -> None:
    """A far size is checked, too: ``(a // 14) * (b // 14)`` differs from ``a // 14``, even if b is small nearby."""

    def run(sizes: Mapping[str, int]) -> Draw:
        rows = (sizes["a"] // 14) * (sizes["b"] // 14)
        if not rows:
            raise ExportError("the model refused it")
        return Draw({}, {"y": np.zeros(rows)}, sizes)

    traced = {"a": 56, "b": 24}
    dimensions = [DynamicDimension(name=name, example=size) for name, size in traced.items()]
    assert {"y": ("y_dim_0",)} == run_at_varied_sizes(run(traced), dimensions, run).output_shapes


class Window(nn.Module):
    """A model that stores the smallest input size, as windowed attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.window = 4
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Cut the window to the input."""
        self.window = min(self.window, x.shape[1])
        self.seen = torch.ones(1)
        return x.sum(1) * 2


def test_unchanged_attributes_restores_stored_state() -> None:
    """Runs at other sizes do not change the model."""
    model = Window()
    with unchanged_attributes(model):
        model(torch.zeros(1, 2))
        assert 2 == model.window
    assert 4 == model.window
    assert 0 == int(model.seen)


def test_unchanged_attributes_puts_back_a_module_that_a_forward_replaced() -> None:
    """A forward may replace a layer for short texts, so the layer is restored."""

    class Switching(torch.nn.Module):
        """Switch to another layer for short texts from then on, as BigBird does."""

        def __init__(self) -> None:
            super().__init__()
            self.layer: torch.nn.Module = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Replace the layer."""
            self.layer = torch.nn.Identity()
            return x

    model = Switching()
    with unchanged_attributes(model):
        model(torch.zeros(1, 2))
        assert isinstance(model.layer, torch.nn.Identity)
    assert isinstance(model.layer, torch.nn.Linear)


def test_attribute_state_names_and_restores_unversioned_changes() -> None:
    """Lists, mappings, records and parameters written past autograd are state, as buffers are."""

    class Keeping(torch.nn.Module):
        """A model with state of every kind."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("mean", torch.zeros(2))
            self.inner = torch.nn.Identity()
            self.seen: list[int] = []
            self.tables: dict[int, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Write into each kind of state."""
            self.scale.data.mul_(2)
            self.mean = self.mean + 1
            self.inner.cached = x
            self.seen.append(len(x))
            self.tables[len(x)] = x
            return x

    model = Keeping()
    with unchanged_attributes(model) as state:
        assert () == state.changes()
        model(torch.zeros(1, 2))
        assert {"scale", "mean", "inner.cached", "seen", "tables"} == set(state.changes())
    assert ([1, 1], [0, 0]) == (model.scale.tolist(), model.mean.tolist())
    assert ([], {}, False) == (model.seen, model.tables, hasattr(model.inner, "cached"))
