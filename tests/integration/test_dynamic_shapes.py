"""Every architecture with every dimension left open answers as PyTorch does at three shapes, masks padded.

The table of ``docs/guide/dynamic.md`` is made from what is listed here, and a test keeps it so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from checkpoints import save_checkpoint
from dynamic_matrix import CASES, Case, Refused
from winml.modelkit import HTPExporter, UsageError, WinMLExportConfig
from winml.modelkit.load.model import load_model
from winml.modelkit.load.records import LoadedModel
from winml.modelkit.load.source import ModelRequest
from winml.modelkit.runtime.feeds import make_feeds
from winml.modelkit.runtime.sessions import Session

RELATIVE = 1e-4
"""As in the verification of an export."""

FIXED = {"resnet": {"height": 64, "width": 64}, "wav2vec2": {"audio_length": 2000}, "t5": {"sequence_length": 16}}
"""Sizes of what is not left open, where those of the config would take long."""


def config_of(case: Case) -> WinMLExportConfig:
    """Return the options a case stands for."""
    return WinMLExportConfig.model_validate({f"dynamic_{name}": True for name in case.options})


def request_of(architecture: str, folder: Path) -> ModelRequest:
    """Return the request for a small checkpoint."""
    from winml.modelkit.load.input_options import ShapeConfig

    sizes = FIXED.get(architecture)
    return ModelRequest(str(folder), shape_config=ShapeConfig(**sizes) if sizes else None)


def expected_answers(loaded: LoadedModel, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Run PyTorch."""
    with torch.no_grad():
        outputs = loaded.model(
            **{name: torch.from_numpy(value) for name, value in feeds.items()}, **loaded.forward_kwargs
        )
    return {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}


def symbolic_shapes(values: Any) -> dict[str, list[int | str]]:
    """Return the declared shapes of graph inputs or outputs."""
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dynamic_export_answers_at_three_shapes(case: Case, tmp_path: Path) -> None:
    """Names stand in the file, and ONNX Runtime equals PyTorch at every shape, size 1 included where it can be."""
    folder = save_checkpoint(case.architecture, tmp_path / "checkpoint")
    request = request_of(case.architecture, folder)
    if isinstance(case.outcome, Refused):
        with pytest.raises(UsageError, match=case.outcome.reason):
            HTPExporter(config_of(case)).export_checkpoint(request, tmp_path / "model.onnx")
        return
    result = HTPExporter(config_of(case)).export_checkpoint(request, tmp_path / "model.onnx")

    graph = onnx.load(result.model_path).graph
    assert {spec.name: list(spec.shape) for spec in result.inputs} == symbolic_shapes(graph.input)
    assert set(case.outcome) == {dimension.name for dimension in result.dimensions}
    for name, shape in symbolic_shapes(graph.output).items():
        assert not any("_dim_" in str(size) or "unk" in str(size) for size in shape), (name, shape)
    for dimension in result.dimensions:
        checked = result.checked_sizes[dimension.name]
        assert 2 <= len(checked)
        assert dimension.min in checked

    loaded, session = load_model(request), Session(result.model_path)
    for number in range(3):
        sizes = {name: tried[number] for name, tried in case.outcome.items()}
        feeds = make_feeds(result.inputs, seed=10 + number, sizes=sizes)
        answers = session.run(feeds)
        for name, value in expected_answers(loaded, feeds).items():
            expected, actual = value.numpy(), answers[name]
            assert expected.shape == actual.shape
            assert RELATIVE * np.abs(expected).max() >= np.abs(expected - actual).max(), (name, sizes)


def test_axes_by_place_and_names_in_shapes_write_the_same_file(tmp_path: Path) -> None:
    """However a dimension is left open, the file carries the same names."""
    folder = save_checkpoint("bert", tmp_path / "checkpoint")
    by_place = WinMLExportConfig(dynamic_axes={"input_ids": {0: "batch", 1: "sequence"}})
    first = HTPExporter(by_place).export_checkpoint(ModelRequest(str(folder)), tmp_path / "place.onnx")
    by_shape = WinMLExportConfig(input_tensors=first.inputs)
    second = HTPExporter(by_shape).export_checkpoint(ModelRequest(str(folder)), tmp_path / "shape.onnx")
    by_meaning = WinMLExportConfig(dynamic_batch=True, dynamic_sequence=True)
    third = HTPExporter(by_meaning).export_checkpoint(ModelRequest(str(folder)), tmp_path / "meaning.onnx")
    assert first.inputs == second.inputs == third.inputs
    assert first.outputs == second.outputs == third.outputs
    assert first.dimensions == second.dimensions == third.dimensions
