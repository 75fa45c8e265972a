"""Modules that stay float32 in the smallest file of 16-bit floats, as selectors that every export shares."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import nn

from winml.modelkit import HTPExporter, WinMLExportConfig, quantization_sensitivity, quantize_onnx
from winml.modelkit.errors import UsageError, VerificationError
from winml.modelkit.ort.half_rounding import ROUNDING_NOTE

GAIN = 1e6
"""Inner values are about this large, beyond 65504."""


class Mlp(nn.Module):
    """A layer whose inner values overflow, and whose outputs do not."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.wide, self.narrow, self.gain = nn.Linear(48, 64), nn.Linear(64, 48), gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.relu(self.gain * self.wide(x)) / self.gain)


class Layer(nn.Module):
    """A residual layer; a gain of zero makes its sum overflow."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.mlp, self.norm = Mlp(gain or 1.0), nn.LayerNorm(48)
        self.is_large = not gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = x + self.mlp(self.norm(x))
        return (added + GAIN) - GAIN if self.is_large else added


class Net(nn.Module):
    """Residual layers, and a head so large that the bytes of conversions do not count."""

    def __init__(self, *gains: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(Layer(gain) for gain in gains), nn.Linear(48, 8000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def export(folder: Path, *gains: float, exporter: str = "torchscript") -> Path:
    """Export a network with these gains of its layers."""
    path = folder / f"{exporter}.onnx"
    config = WinMLExportConfig(exporter=exporter, verify=False)
    HTPExporter(config).export(Net(*gains).eval(), path, {"x": torch.randn(2, 5, 48)})
    return path


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exporter → the network whose second layer overflows."""
    folder = tmp_path_factory.mktemp("one")
    return {name: export(folder, 1, GAIN, 1, exporter=name) for name in ("torchscript", "dynamo")}


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_overflowing_module_is_named_by_its_path_in_every_export(one_layer: dict[str, Path], exporter: str) -> None:
    """Of all modules, only the one that overflows has to stay float32."""
    result = quantization_sensitivity(one_layer[exporter], precision="fp16", target="sqnr_db=40", iterations=1)
    listed = result.exclude_list
    assert result.whole.problem
    assert listed is not None
    assert listed.is_met
    assert {"layers.1.mlp": "fp32"} == listed.rules
    assert ROUNDING_NOTE in result.notes


def test_equal_modules_share_one_selector(tmp_path: Path) -> None:
    """If the same module of every layer overflows, a wildcard names all of them."""
    written = quantize_onnx(
        export(tmp_path, GAIN, GAIN, GAIN), tmp_path / "h.onnx", precision="fp16", budget="smallest", min_sqnr_db=40
    )
    assert written.budget is not None
    assert {"layers.*.mlp": "fp32"} == written.budget.rules
    assert {"fp16", "fp32"} == {module.actual for module in written.modules}
    assert 16 < written.budget.mean_bits < 32
    assert written.fidelity is not None
    assert written.fidelity.worst.lower_db >= 40
    types = {value.const_value.dtype for value in ir.load(tmp_path / "h.onnx").graph.initializers.values()}
    assert {ir.DataType.FLOAT16, ir.DataType.FLOAT} <= types


class Lookup(nn.Module):
    """A table with most bytes, and layers with most noise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layers = nn.Embedding(4000, 48), nn.ModuleList(Layer(1) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def lookup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported table with its layers."""
    path = tmp_path_factory.mktemp("lookup") / "lookup.onnx"
    config = WinMLExportConfig(verify=False)
    HTPExporter(config).export(Lookup().eval(), path, {"ids": torch.randint(0, 4000, (2, 8))})
    return path


def test_small_modules_stay_float32_instead_of_a_large_one(lookup: Path, tmp_path: Path) -> None:
    """The bytes of the file count, not the number of modules: the table has 16 bits."""
    output = tmp_path / "h.onnx"
    all_half = quantize_onnx(lookup, output, precision="fp16", min_sqnr_db=40).fidelity
    assert all_half is not None
    least_db = all_half.worst.lower_db + 3
    written = quantize_onnx(lookup, output, precision="fp16", budget="smallest", min_sqnr_db=least_db, overwrite=True)
    assert written.fidelity is not None
    assert written.fidelity.worst.lower_db >= least_db
    actual = {module.tag: module.actual for module in written.modules}
    assert "fp16" == actual["/Lookup/Embedding"]
    assert written.budget is not None
    assert len(written.budget.rules) > 1
    # Only the table alone in float32 reaches the quality with fewer modules.
    assert output.stat().st_size < 0.65 * lookup.stat().st_size


def test_target_that_only_the_float_model_reaches_is_not_met(lookup: Path) -> None:
    """A list of all modules quantizes nothing, and is no answer."""
    result = quantization_sensitivity(lookup, precision="fp16", target="sqnr_db=140", iterations=1)
    assert result.exclude_list is not None
    assert not result.exclude_list.is_met
    assert result.exclude_list.form.weight_bytes < result.float_bytes


def test_nodes_without_weights_stay_float32_alone(tmp_path: Path) -> None:
    """A sum that overflows is excluded, and the layer inside its module is not."""
    source = export(tmp_path, 1, 0, 1)
    written = quantize_onnx(source, tmp_path / "h.onnx", precision="fp16", budget="smallest", min_sqnr_db=40)
    assert written.budget is not None
    assert {"layers.1": "fp32", "layers.1.mlp": "fp16"} == written.budget.rules
    assert {"fp16"} == {module.actual for module in written.modules}


def test_model_within_the_quality_excludes_nothing(tmp_path: Path) -> None:
    """Nothing overflows: every module has 16 bits."""
    source = export(tmp_path, 1)
    for precision in ("fp16", "bf16"):
        output = tmp_path / f"{precision}.onnx"
        written = quantize_onnx(source, output, precision=precision, budget="smallest", min_sqnr_db=35)
        assert written.budget is not None
        assert {} == written.budget.rules
        assert precision == written.precision
        assert (precision == "fp16") is (ROUNDING_NOTE in written.notes)


def test_overflow_of_the_only_included_module_is_named(one_layer: dict[str, Path], tmp_path: Path) -> None:
    """No limit helps against NaN or infinity, so none is suggested."""
    with pytest.raises(VerificationError, match="NaN or infinity") as refusal:
        quantize_onnx(
            one_layer["torchscript"],
            tmp_path / "h.onnx",
            precision="fp16",
            budget="smallest",
            min_sqnr_db=-150,
            include=("layers.1.mlp",),
        )
    assert "layers.1.mlp" in refusal.value.message
    assert "min-sqnr" not in refusal.value.hint


def test_unreachable_quality_is_refused(one_layer: dict[str, Path], tmp_path: Path) -> None:
    """No list of modules reaches 300 dB while anything has 16 bits."""
    with pytest.raises(VerificationError, match="300"):
        quantize_onnx(
            one_layer["torchscript"], tmp_path / "h.onnx", precision="fp16", budget="smallest", min_sqnr_db=300
        )
    assert not (tmp_path / "h.onnx").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "int8", "budget": "smallest", "min_sqnr_db": 20},
        {"precision": "fp16", "budget": "20bits"},
        {"precision": "fp16", "max_size": "1MB"},
        {"precision": "fp16", "budget": "smallest"},
        {"precision": "fp16", "budget": "smallest", "min_sqnr_db": 40, "per_module": {"head": "fp32"}},
    ],
    ids=str,
)
def test_contradicting_limits_are_refused(
    one_layer: dict[str, Path], tmp_path: Path, options: dict[str, object]
) -> None:
    """A search for modules in float32 needs 16-bit floats and a quality."""
    with pytest.raises(UsageError):
        quantize_onnx(one_layer["torchscript"], tmp_path / "h.onnx", **options)
