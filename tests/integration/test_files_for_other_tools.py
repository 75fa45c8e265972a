"""Files of winml in other tools."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnxruntime import InferenceSession, SessionOptions
from torch import nn

from foreign_tools import dynamic_quantization
from winml.modelkit import export_pytorch, optimize_onnx


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with a last layer of more inputs than outputs, as usual."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    return export_pytorch(
        model, tmp_path_factory.mktemp("classifier") / "model.onnx", torch.randn(2, 8)
    ).only_part.model_path


def test_a_classifier_is_quantized_by_onnxruntime(classifier: Path, tmp_path: Path) -> None:
    """Dynamic quantization transposes the weights, and no entry of the file contradicts the new shape."""
    optimize_onnx(classifier, tmp_path / "optimized.onnx")
    feeds = {"input": np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)}
    answers = []
    exact = SessionOptions()
    exact.add_session_config_entry("session.x64quantprecision", "1")  # processors without VNNI saturate otherwise
    for source in (classifier, tmp_path / "optimized.onnx"):
        model = onnx.load(source)
        weights = {tensor.name for tensor in model.graph.initializer}
        assert weights
        assert weights.isdisjoint(info.name for info in model.graph.value_info)
        target = tmp_path / f"{source.stem}_int8.onnx"
        dynamic_quantization(source, target)
        assert "MatMulInteger" in {node.op_type for node in onnx.load(target).graph.node}
        answers += [
            InferenceSession(path, exact, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
            for path in (source, target)
        ]
    np.testing.assert_allclose(answers[1], answers[0], atol=0.05)
    np.testing.assert_allclose(answers[3], answers[2], atol=0.05)
