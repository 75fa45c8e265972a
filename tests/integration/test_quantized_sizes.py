"""A quantization that saves nothing fails, and its hint works when followed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from winml.modelkit import HTPExporter, WinMLExportConfig, optimize_onnx
from winml.modelkit.errors import QuantizeError
from winml.modelkit.verbs.quantize import quantize_onnx


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network whose weights are those of convolutions, but for a small head."""
    torch.manual_seed(0)
    layers = [
        layer
        for inputs in (3, 48, 48, 48)
        for layer in (nn.Conv2d(inputs, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU())
    ]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 3))
    path = tmp_path_factory.mktemp("source") / "model.onnx"
    config = WinMLExportConfig(exporter="torchscript", verify=False)
    HTPExporter(config).export(net.eval(), path, {"input": torch.randn(1, 3, 8, 8)})
    return path


def test_int8_that_leaves_the_convolutions_float_fails_and_names_the_mode(source: Path, tmp_path: Path) -> None:
    """The default mode takes products only; the named mode takes the convolutions."""
    target = tmp_path / "q.onnx"
    with pytest.raises(QuantizeError) as raised:
        quantize_onnx(source, target, precision="int8", verify=False)
    assert 1 == raised.value.exit_code
    assert "--mode qdq" in raised.value.hint
    assert not target.exists()
    quantize_onnx(source, target, precision="int8", mode="qdq", verify=False)
    assert target.stat().st_size < source.stat().st_size / 3


def test_convolutions_fused_with_their_activations_fail_and_name_the_level(source: Path, tmp_path: Path) -> None:
    """FusedConv has no integer form; the optimizer's level before it makes none."""
    full, basic, target = (tmp_path / name for name in ("full.onnx", "basic.onnx", "q.onnx"))
    optimize_onnx(source, full, level="full")
    with pytest.raises(QuantizeError) as raised:
        quantize_onnx(full, target, precision="int8", mode="qdq", verify=False)
    assert "--level basic" in raised.value.hint
    optimize_onnx(source, basic, level="basic")
    quantize_onnx(basic, target, precision="int8", mode="qdq", verify=False)
    assert target.stat().st_size < source.stat().st_size / 3
