"""Architectures with dynamic dimensions, compared with PyTorch at three shapes with padded masks.

The table of ``docs/reference/dynamic_dimensions.md`` is made from the cases, and a test compares them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from checkpoints import build_model, one_layer, save_checkpoint
from dynamic_matrix import CASES, Case, Refused
from winml.modelkit import HTPExporter, UsageError, WinMLExportConfig
from winml.modelkit.builds.config import WinMLBuildConfig, parse_build_config
from winml.modelkit.builds.config_resolution import resolve_build_config
from winml.modelkit.models.inputs.options import ShapeConfig
from winml.modelkit.models.model import load_model
from winml.modelkit.models.parts import LoadedModel
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.specs import DynamicDimension, DynamicRequest, InputTensorSpec
from winml.modelkit.ort.feeds import make_feeds
from winml.modelkit.ort.sessions import Session

RELATIVE = 1e-4
"""The tolerance of export verification."""

FIXED = {"resnet": {"height": 64, "width": 64}, "wav2vec2": {"audio_length": 2000}, "t5": {"sequence_length": 16}}
"""Small sizes of the fixed dimensions, for configs with large ones."""


def config_of(case: Case) -> WinMLExportConfig:
    """Return the export config of a case."""
    return WinMLExportConfig.model_validate({f"dynamic_{name}": True for name in case.options})


def request_of(architecture: str, folder: Path) -> ModelRequest:
    """Return the request for a small checkpoint."""
    sizes = FIXED.get(architecture)
    return ModelRequest(str(folder), cache=False, shape_config=ShapeConfig(**sizes) if sizes else None)


def expected_answers(loaded: LoadedModel, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outputs of PyTorch."""
    with torch.no_grad():
        outputs = loaded.model(
            **{name: torch.from_numpy(value) for name, value in feeds.items()}, **loaded.only_part.forward_kwargs
        )
    return {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}


def symbolic_shapes(values: Any) -> dict[str, list[int | str]]:
    """Return the declared shapes of graph inputs or outputs."""
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dynamic_export_equals_pytorch_at_three_shapes(case: Case, tmp_path: Path) -> None:
    """The file has the dimension names, and ONNX Runtime equals PyTorch at every shape, size 1 if possible."""
    folder = save_checkpoint(case.architecture, tmp_path / "checkpoint", **one_layer(case.architecture))
    request = request_of(case.architecture, folder)
    if isinstance(case.outcome, Refused):
        with pytest.raises(UsageError, match=case.outcome.reason):
            HTPExporter(config_of(case)).export_checkpoint(request, tmp_path / "model.onnx")
        return
    result = HTPExporter(config_of(case)).export_checkpoint(request, tmp_path / "model.onnx")

    graph = onnx.load(result.only_part.model_path).graph
    assert {spec.name: list(spec.shape) for spec in result.only_part.inputs} == symbolic_shapes(graph.input)
    assert set(case.outcome) == {dimension.name for dimension in result.only_part.dimensions}
    for name, shape in symbolic_shapes(graph.output).items():
        assert not any("_dim_" in str(size) or "unk" in str(size) for size in shape), (name, shape)
    for dimension in result.only_part.dimensions:
        checked = result.only_part.checked_sizes[dimension.name]
        assert 2 <= len(checked)
        assert dimension.min in checked

    loaded, session = load_model(request), Session(result.only_part.model_path)
    for number in range(3):
        sizes = {name: tried[number] for name, tried in case.outcome.items()}
        feeds = make_feeds(result.only_part.inputs, seed=10 + number, sizes=sizes)
        answers = session.run(feeds)
        for name, value in expected_answers(loaded, feeds).items():
            expected, actual = value.numpy(), answers[name]
            assert expected.shape == actual.shape
            assert RELATIVE * np.abs(expected).max() >= np.abs(expected - actual).max(), (name, sizes)


def test_axes_by_place_and_names_in_shapes_write_the_same_file(tmp_path: Path) -> None:
    """Axes by position, names in shapes and the options by meaning write the same names."""
    folder = save_checkpoint("bert", tmp_path / "checkpoint")
    by_place = WinMLExportConfig(dynamic_axes={"input_ids": {0: "batch_size", 1: "sequence_length"}})
    first = HTPExporter(by_place).export_checkpoint(ModelRequest(str(folder)), tmp_path / "place.onnx")
    by_shape = WinMLExportConfig(input_tensors=first.only_part.inputs)
    second = HTPExporter(by_shape).export_checkpoint(ModelRequest(str(folder)), tmp_path / "shape.onnx")
    by_meaning = WinMLExportConfig(dynamic_batch=True, dynamic_sequence=True)
    third = HTPExporter(by_meaning).export_checkpoint(ModelRequest(str(folder)), tmp_path / "meaning.onnx")
    assert first.only_part.inputs == second.only_part.inputs == third.only_part.inputs
    assert first.only_part.outputs == second.only_part.outputs == third.only_part.outputs
    assert first.only_part.dimensions == second.only_part.dimensions == third.only_part.dimensions


def test_recorded_config_exports_the_same_dimensions(tmp_path: Path) -> None:
    """The output of ``winml config`` leads to the same names, bounds and traced sizes."""
    folder = save_checkpoint("bert", tmp_path / "checkpoint")
    shape = ShapeConfig.model_validate({"sequence_length": {"min": 2, "max": 40, "example": 20}})
    request = ModelRequest(str(folder), shape_config=shape, dynamic=DynamicRequest(batch=True))
    recorded = resolve_build_config(WinMLBuildConfig(), request)[0].as_record()
    config = parse_build_config(json.loads(json.dumps(recorded)), "config")[0].export
    assert config is not None
    result = HTPExporter(config).export_checkpoint(ModelRequest(str(folder)), tmp_path / "model.onnx")
    assert (
        DynamicDimension(name="batch_size", example=2),
        DynamicDimension(name="sequence_length", min=2, max=40, example=20),
    ) == result.only_part.dimensions
    assert {"batch_size": (1, 3, 17), "sequence_length": (2, 23, 40)} == dict(result.only_part.checked_sizes)


def test_live_transformers_model_knows_its_batch(tmp_path: Path) -> None:
    """A live model's own config names the axes of example tensors as well."""
    example = {"input_ids": torch.randint(0, 100, (1, 9)), "attention_mask": torch.ones(1, 9, dtype=torch.int64)}
    config = WinMLExportConfig(dynamic_sequence=True)
    result = HTPExporter(config).export(build_model("bert"), tmp_path / "model.onnx", example)
    assert {"input_ids": (1, "sequence_length"), "attention_mask": (1, "sequence_length")} == {
        spec.name: spec.shape for spec in result.only_part.inputs
    }
    assert (9,) == tuple(dimension.example for dimension in result.only_part.dimensions)


def test_random_weights_are_calibrated_at_the_traced_sizes(tmp_path: Path) -> None:
    """A model with random weights can be exported with every dimension dynamic."""
    folder = save_checkpoint("resnet", tmp_path / "checkpoint")
    sizes = ShapeConfig.model_validate({"height": {"example": 64}, "width": {"example": 96}})
    request = ModelRequest(str(folder / "config.json"), random_weights=True, shape_config=sizes)
    result = HTPExporter(WinMLExportConfig(dynamic_batch=True)).export_checkpoint(request, tmp_path / "model.onnx")
    assert {"batch_size": 2, "height": 64, "width": 96} == {d.name: d.example for d in result.only_part.dimensions}


class Masked(torch.nn.Module):
    """Concatenates rows with rows of a mask, in equal number."""

    def forward(self, values: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the concatenation."""
        return torch.cat((values @ weights, mask), 1)


def test_refused_size_names_the_second_axis_to_open(tmp_path: Path) -> None:
    """The message names the mask's axis and not the weights'; with that axis dynamic the export succeeds."""
    module, path = Masked().eval(), tmp_path / "model.onnx"

    def export(mask: list[str | int]) -> None:
        shapes = {"values": ["batch_size", 4], "weights": [4, 4], "mask": mask}
        specs = tuple(InputTensorSpec(name=name, shape=shape, dtype="float32") for name, shape in shapes.items())
        config = WinMLExportConfig(input_tensors=specs)
        HTPExporter(config).export(module, path)

    with pytest.raises(UsageError) as refusal:
        export([2, 4])
    assert ("batch_size",) == refusal.value.frozen
    assert "mask:0=batch_size" in refusal.value.hint
    assert "weights" not in refusal.value.hint
    export(["batch_size", 4])
    assert ["batch_size", "batch_size"] == [
        onnx.load(path).graph.input[at].type.tensor_type.shape.dim[0].dim_param for at in (0, 2)
    ]
