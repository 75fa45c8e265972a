"""Quantizations that save no space: the failure, and the hint that leads to success."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from winml.modelkit import (
    HTPExporter,
    WinMLExportConfig,
    build_onnx_model,
    optimize_onnx,
    quantization_sensitivity,
)
from winml.modelkit.errors import QuantizeError, UsageError
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.records import QuantizedFile
from winml.modelkit.quantize.verb import QuantizeRequest, quantize_onnx


class Classifier(nn.Module):
    """Convolutions with batch norms and activations, and a linear layer with a small share of the weights."""

    def __init__(self, labels: int) -> None:
        super().__init__()
        sizes = [(3, 64), (64, 64), (64, 64), (64, 64)]
        self.stages = nn.ModuleList(nn.Sequential(Unit(*size), nn.ReLU()) for size in sizes)
        self.head = nn.Linear(64, labels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of images."""
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class Unit(nn.Module):
    """A convolution with its batch norm, in a class outside torch.nn."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized convolution."""
        return self.norm(self.conv(x))


def exported(folder: Path, labels: int = 3, torch_module: str = "all") -> Path:
    """Export a classifier, once for each folder."""
    torch.manual_seed(0)
    path = folder / f"{labels}-{torch_module}.onnx"
    if path.exists():
        return path
    config = WinMLExportConfig(exporter="torchscript", verify=False, torch_module=torch_module)
    HTPExporter(config).export(Classifier(labels).eval(), path, {"x": torch.randn(1, 3, 8, 8)})
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the exports."""
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def source(folder: Path) -> Path:
    """A classifier of three labels with tags on modules of torch.nn."""
    return exported(folder)


def quantized_modules(result: QuantizedFile) -> set[str]:
    """Return the tags of the modules with quantized nodes."""
    return {module.tag for module in result.modules if module.quantized}


@pytest.mark.parametrize("labels", [3, 100])
def test_int8_that_leaves_the_convolutions_float_fails_and_names_the_mode(
    folder: Path, tmp_path: Path, labels: int
) -> None:
    """The mode dynamic quantizes products only, so the file hardly shrinks; the named mode quantizes convolutions."""
    source, target = exported(folder, labels), tmp_path / "q.onnx"
    with pytest.raises(QuantizeError) as raised:
        quantize_onnx(source, target, precision="int8", mode="dynamic")
    assert 1 == raised.value.exit_code
    assert "mode qdq" in raised.value.hint
    assert "100%" in raised.value.hint
    assert " include head" in raised.value.hint
    assert not target.exists()
    static = quantize_onnx(source, target, precision="int8", mode="qdq")
    assert (5, {}) == (static.quantized, static.left)
    assert target.stat().st_size < source.stat().st_size / 3


@pytest.mark.parametrize("level", ["none", "full"])
def test_mode_without_a_request_is_that_of_the_convolutions(folder: Path, tmp_path: Path, level: str) -> None:
    """A convolutional network is quantized with qdq, also after fusions; a note states the reason and the option."""
    source, target = exported(folder, 100), tmp_path / "q.onnx"
    if level != "none":
        source = optimize_onnx(source, tmp_path / "optimized.onnx", level=level).model_path
    result = quantize_onnx(source, target, precision="int8")
    assert (("qdq",), 5, {}) == (result.modes, result.quantized, result.left)
    [note] = [note for note in result.notes if "mode qdq" in note]
    assert "Conv" in note
    assert "mode dynamic" in note
    assert target.stat().st_size < source.stat().st_size / 3


def test_sensitivity_takes_the_mode_of_the_convolutions(source: Path) -> None:
    """The measured variants are those that quantize would write."""
    result = quantization_sensitivity(source, precision="int8", samples=2)
    assert ("qdq",) == result.modes
    assert 4 == sum(module.form is not None for module in result.modules if module.tag.endswith("/Conv2d"))


def test_dry_run_states_the_mode_of_the_run(source: Path, tmp_path: Path) -> None:
    """The plan reads the graph, and names the mode that the run takes."""
    plan = QuantizeRequest(options=QuantizeOptions(), model=source, output=tmp_path / "q.onnx").plan()
    assert "int8 (qdq)" in [step.words for step in plan.steps]


def test_build_fuses_nothing_that_quantization_does_not_take(source: Path, tmp_path: Path) -> None:
    """Convolutions stay apart from their activations before qdq; a fusion that is enabled by name stays."""
    config = {"optim": {"level": "full"}, "quant": {"precision": "int8"}}
    build_onnx_model(source, tmp_path / "built", config=config)
    operators = {node.op_type for node in onnx.load(tmp_path / "built" / "optimized.onnx").graph.node}
    assert {"Conv", "Relu"} <= operators
    assert not {"FusedConv", "BatchNormalization"} & operators
    layers = [node for node in onnx.load(tmp_path / "built" / "model.onnx").graph.node if node.op_type == "Conv"]
    assert [True] * 4 == ["winml.quantization" in {entry.key for entry in node.metadata_props} for node in layers]


def test_selected_linear_layer_of_a_convolutional_network_is_quantized(folder: Path, tmp_path: Path) -> None:
    """The selected layer is quantized with the default mode; a note says that the file hardly shrinks."""
    result = quantize_onnx(exported(folder, 100), tmp_path / "q.onnx", precision="int8", include=("head",))
    assert ("dynamic",) == result.modes
    assert {"/Classifier/Linear"} == quantized_modules(result)
    assert result.after.size_bytes > 0.9 * result.before.size_bytes


def test_layers_fused_with_their_activations_are_quantized(source: Path, tmp_path: Path) -> None:
    """The same nodes are quantized as without fusion, and the last node of each layer keeps its output."""
    full, target = tmp_path / "full.onnx", tmp_path / "q.onnx"
    optimize_onnx(source, full, level="full")
    assert "FusedConv" in {node.op_type for node in onnx.load(full).graph.node}
    fused, plain = (quantize_onnx(path, target, mode="qdq", overwrite=True) for path in (full, source))
    assert (5, {}) == (fused.quantized, fused.left)
    assert quantized_modules(plain) == quantized_modules(fused)
    assert any("FusedConv 4" in note for note in fused.notes)
    assert fused.fidelity is not None
    assert fused.fidelity.worst.sqnr_db > 25


def test_excluded_fused_layer_stays_float(source: Path, tmp_path: Path) -> None:
    """A selector matches the convolution inside a fused layer, but not its activation."""
    full, target = tmp_path / "full.onnx", tmp_path / "q.onnx"
    optimize_onnx(source, full, level="full")
    result = quantize_onnx(full, target, mode="qdq", exclude=("stages.1.0.conv",))
    tags = {f"/Classifier/Sequential.{number}/Unit.0/Conv2d" for number in (0, 2, 3)}
    assert {*tags, "/Classifier/Linear"} == quantized_modules(result)
    with pytest.raises(UsageError, match=r"stages\.1\.0\.conv"):
        quantize_onnx(full, target, mode="qdq", exclude=("stages.1.1",), overwrite=True)


def test_untagged_convolution_is_excluded_after_tagging(folder: Path, source: Path, tmp_path: Path) -> None:
    """The error names the export option with which the selector works."""
    untagged, target, selector = exported(folder, torch_module="none"), tmp_path / "q.onnx", "stages.1.0.conv"
    with pytest.raises(UsageError) as raised:
        quantize_onnx(untagged, target, mode="qdq", exclude=(selector,))
    assert "torch_module all" in raised.value.hint
    assert {f"excluded by {selector}": 1} == quantize_onnx(source, target, mode="qdq", exclude=(selector,)).left
