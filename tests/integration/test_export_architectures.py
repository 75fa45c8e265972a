"""Exports of every architecture: verification, coverage, and tags compared with the forward pass."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import onnx
import pytest
import torch

from checkpoints import CONFIGS, one_layer, save_checkpoint
from oracle import ForwardOracle, observe
from schemas import sidecar_schema
from tag_checks import check_file
from winml.modelkit import HTPExporter
from winml.modelkit.models.model import load_model
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.ort.feeds import make_feeds


def observe_checkpoint(folder: Path) -> tuple[torch.nn.Module, ForwardOracle]:
    """Run the model of a checkpoint once under the oracle."""
    loaded = load_model(ModelRequest(str(folder), cache=False))
    feeds = {name: torch.from_numpy(value) for name, value in make_feeds(loaded.only_part.inputs, seed=1).items()}
    return loaded.model, observe(loaded.model, **feeds, **loaded.only_part.forward_kwargs)


_OF_TWO_LAYERS = {"bert", "albert", "t5", "resnet", "yolos"}
"""Architectures with two layers: their layers must differ, or be the same module, or have positions in between; one
layer is enough for the others.
"""


@pytest.mark.parametrize("architecture", CONFIGS)
def test_export_architecture_is_verified_and_tagged_by_execution(architecture: str, tmp_path: Path) -> None:
    """The file equals PyTorch on two draws, and its tags equal the modules seen by hooks, node by node."""
    sizes = {} if architecture in _OF_TWO_LAYERS else one_layer(architecture)
    folder = save_checkpoint(architecture, tmp_path / "checkpoint", **sizes)
    result = HTPExporter().export_checkpoint(
        ModelRequest(str(folder), cache=False), tmp_path / "model.onnx", with_report=True
    )

    assert result.only_part.verification is not None
    assert result.only_part.verification.is_verified
    assert 100.0 == result.only_part.coverage.percent
    assert {"direct", "parent", "root"} >= set(result.only_part.coverage.sources)
    check_file(result, *observe_checkpoint(folder))
    assert [spec.name for spec in result.only_part.inputs] == [
        value.name for value in onnx.load(result.only_part.model_path).graph.input
    ]

    sidecar = json.loads((tmp_path / "model_htp_metadata.json").read_text(encoding="utf-8"))
    jsonschema.validate(sidecar, sidecar_schema())
    written = {"model.onnx", "model_htp_export_report.md", "model_htp_metadata.json", *result.companions.names}
    assert "config.json" in written
    assert {"checkpoint", *written} == {path.name for path in tmp_path.iterdir()}
