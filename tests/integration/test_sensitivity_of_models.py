"""Sensitivity of real architectures with a planted outlier, which leaves the outputs unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import build_model
from winml.modelkit import export_pytorch, quantization_sensitivity
from winml.modelkit.export.config import WinMLExportConfig

OUTLIER = 60.0


MODULE = "encoder.layer.1.attention.self"


def _exported(folder: Path, *, planted: bool) -> Path:
    import torch

    model = build_model("bert")
    if planted:
        attention = model.encoder.layer[1].attention.self
        with torch.no_grad():
            # Queries grow and keys shrink by one factor: their products stay, only the scales of the weights change.
            for parameter in (attention.query.weight[5], attention.query.bias[5:6]):
                parameter.mul_(OUTLIER)
            for parameter in (attention.key.weight[5], attention.key.bias[5:6]):
                parameter.div_(OUTLIER)
    tokens = torch.arange(24).reshape(2, 12) % 100
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    path = folder / f"{'planted' if planted else 'plain'}.onnx"
    return Path(export_pytorch(model, path, inputs, config=WinMLExportConfig(verify=False)).only_part.model_path)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with one query channel 60 times as large as the others, and a key channel smaller by that factor."""
    return _exported(tmp_path_factory.mktemp("planted"), planted=True)


def _sqnr_db(source: Path, *, per_channel: bool) -> float:
    (row,) = quantization_sensitivity(source, per_channel=per_channel, module=MODULE).modules
    assert row.sqnr_db is not None
    return row.sqnr_db


def test_planted_outlier_channel_is_the_worst_module(planted: Path, tmp_path: Path) -> None:
    """The outlier takes up the range of a per-tensor scale; a search for a target starts with its module."""
    plain = quantization_sensitivity(_exported(tmp_path, planted=False), per_channel=False)
    assert plain.whole.worst is not None
    target = f"sqnr_db={plain.whole.worst.lower_db - 4}"
    found = quantization_sensitivity(planted, per_channel=False, target=target, iterations=2)
    tags = [module.tag for module in found.measured]
    leaves = [module.path for module in found.measured if not any(tag.startswith(f"{module.tag}/") for tag in tags)]
    assert MODULE == leaves[0]
    assert found.exclude_list is not None
    assert found.exclude_list.is_met
    assert ["BertLayer.1/BertAttention/BertSelfAttention"] == [
        tag.partition("BertEncoder/")[2] for tag in found.exclude_list.excluded
    ]
    (before,) = (module.sqnr_db for module in plain.measured if module.path == MODULE)
    assert before is not None
    assert _sqnr_db(planted, per_channel=False) < before - 10


def test_scale_for_each_channel_takes_the_outlier_in(planted: Path) -> None:
    """The planted channel costs the module little with per-channel scales, the default."""
    assert _sqnr_db(planted, per_channel=True) > _sqnr_db(planted, per_channel=False) + 10
