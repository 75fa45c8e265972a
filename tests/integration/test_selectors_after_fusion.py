"""Selectors of modules in every command, after their operators were folded or fused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from winml.modelkit import HTPExporter, WinMLExportConfig, optimize_onnx
from winml.modelkit.errors import UsageError
from winml.modelkit.quantize.planning import constant_weight
from winml.modelkit.quantize.verb import quantize_onnx


class Block(nn.Module):
    """A convolution, its batch norm and its activation, as in ResNet."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.conv(x)))


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = Block(3, 16), Block(16, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The network with a tag for each module, as exported and after the optimizer."""
    folder = tmp_path_factory.mktemp("sources")
    paths = {name: folder / f"{name}.onnx" for name in ("exported", "basic", "extended")}
    config = WinMLExportConfig(exporter="torchscript", verify=False, torch_module="all")
    HTPExporter(config).export(Net().eval(), paths["exported"], {"x": torch.randn(1, 3, 8, 8)})
    for level in ("basic", "extended"):
        optimize_onnx(paths["exported"], paths[level], level=level)
    return paths


def weight_types(path: Path) -> dict[str, str]:
    """Return module → stored data type of its weight, for each node with a weight."""
    found = {}
    for node in ir.load(path).graph:
        for value in node.inputs[1:2]:
            maker = value.producer() if value is not None else None
            stored = maker.inputs[0] if maker is not None and maker.op_type in ("Cast", "DequantizeLinear") else value
            if stored is not None and stored.is_initializer() and len(stored.const_value.shape) >= 2:
                found[node.metadata_props["winml.hierarchy.module"]] = stored.const_value.dtype.name
    return found


def quantized(source: Path, target: Path, **options: Any) -> dict[str, str]:
    """Quantize a file and return module → data type of its weight."""
    quantize_onnx(source, target, verify=False, **options)
    onnx.checker.check_model(target)
    return weight_types(target)


@pytest.mark.parametrize("stage", ["exported", "basic", "extended"])
@pytest.mark.parametrize(
    "options", [{"exclude": ("first.conv",)}, {"per_module": {"first.conv": "fp32"}}, {"exclude": ("Block.first",)}]
)
def test_excluded_convolution_stays_float_when_its_batch_norm_is_folded(
    sources: dict[str, Path], tmp_path: Path, stage: str, options: dict[str, Any]
) -> None:
    """The weight of the excluded convolution is float in the file, and the other weights are integers."""
    found = quantized(sources[stage], tmp_path / "q.onnx", mode="qdq", **options)
    assert {"first.conv": "FLOAT", "second.conv": "INT8", "head": "INT8"} == found


@pytest.mark.parametrize("stage", ["exported", "basic", "extended"])
def test_included_convolution_alone_is_quantized(sources: dict[str, Path], tmp_path: Path, stage: str) -> None:
    """Other modules stay float, and the batch norm folded into the convolution does not count."""
    found = quantized(sources[stage], tmp_path / "q.onnx", mode="qdq", include=("second.conv",))
    assert {"first.conv": "FLOAT", "second.conv": "INT8", "head": "FLOAT"} == found


def test_excluded_convolution_stays_float_in_half_precision(sources: dict[str, Path], tmp_path: Path) -> None:
    """A convolution fused with its activation is a single node, and stays unchanged."""
    found = quantized(sources["extended"], tmp_path / "q.onnx", precision="fp16", exclude=("first.conv",))
    assert {"first.conv": "FLOAT", "second.conv": "FLOAT16", "head": "FLOAT16"} == found


def test_fused_convolution_belongs_to_the_convolution(sources: dict[str, Path]) -> None:
    """The node has the tag of the convolution, and a list of all fused modules."""
    fused = [node for node in ir.load(sources["extended"]).graph if node.op_type == "FusedConv"]
    assert ["first.conv", "second.conv"] == [node.metadata_props["winml.hierarchy.module"] for node in fused]
    assert '["first.act", "first.conv", "first.norm"]' == fused[0].metadata_props["winml.hierarchy.modules"]


@pytest.mark.parametrize(
    ("stage", "options", "named"),
    [
        ("exported", {"mode": "qdq", "exclude": ("first.norm",)}, "first.conv"),
        ("basic", {"precision": "fp16", "exclude": ("first.norm",)}, "first.conv"),
        ("basic", {"mode": "qdq", "include": ("head", "first.norm")}, "first.conv"),
        ("extended", {"mode": "qdq", "exclude": ("first.act",)}, "first.conv"),
        ("exported", {"mode": "dynamic", "exclude": ("first.conv",)}, "head"),
        ("exported", {"mode": "dynamic", "per_module": {"first": "fp32"}}, "head"),
    ],
)
def test_selector_without_effect_is_refused(
    sources: dict[str, Path], tmp_path: Path, stage: str, options: dict[str, Any], named: str
) -> None:
    """The error names the containing module, the operator, or the nearest module; nothing is written."""
    with pytest.raises(UsageError) as raised:
        quantize_onnx(sources[stage], tmp_path / "q.onnx", verify=False, **options)
    assert named in f"{raised.value.message} {raised.value.hint}"
    assert not (tmp_path / "q.onnx").exists()


def test_batch_norm_excluded_with_its_convolution_is_accepted(sources: dict[str, Path], tmp_path: Path) -> None:
    """The convolution that contains the batch norm stays float."""
    found = quantized(sources["exported"], tmp_path / "q.onnx", mode="qdq", exclude=("first.conv", "first.norm"))
    assert {"first.conv": "FLOAT", "second.conv": "INT8", "head": "INT8"} == found


def test_optimizer_refuses_a_module_fused_into_another(sources: dict[str, Path], tmp_path: Path) -> None:
    """The module has no node left to exclude."""
    with pytest.raises(UsageError, match=r"first\.conv"):
        optimize_onnx(sources["basic"], tmp_path / "o.onnx", level="extended", exclude=("first.norm",))


class Attention(nn.Module):
    """Attention with transposed keys, in a module for the transposition."""

    class Turn(nn.Module):
        """A transposition of keys."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.transpose(1, 2)

    class Scores(nn.Module):
        """A product of activations."""

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x @ y

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.scores = Attention.Turn(), Attention.Scores()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x, self.turn(x * 2))


def test_product_that_swallows_a_transposition_of_another_module_keeps_its_own(tmp_path: Path) -> None:
    """The FusedMatMul belongs to the product."""
    source, target = tmp_path / "source.onnx", tmp_path / "target.onnx"
    config = WinMLExportConfig(exporter="torchscript", verify=False)
    HTPExporter(config).export(Attention().eval(), source, {"x": torch.randn(1, 4, 8)})
    optimize_onnx(source, target, level="extended")
    (fused,) = [node for node in ir.load(target).graph if node.op_type == "FusedMatMul"]
    assert "scores" == fused.metadata_props["winml.hierarchy.module"]
    assert '["scores", "turn"]' == fused.metadata_props["winml.hierarchy.modules"]


def test_weights_that_stay_float_are_read_as_weights(sources: dict[str, Path]) -> None:
    """The check of the result identifies weights as the plan does."""
    assert 3 == sum(constant_weight(node) is not None for node in ir.load(sources["exported"]).graph)
