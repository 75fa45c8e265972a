"""Inputs of lists, dicts and dataclasses of tensors, exported with both exporters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from graphs import run_onnx
from winml.modelkit import WinMLExportConfig, export_pytorch
from winml.modelkit.errors import UsageError
from winml.modelkit.export.exporting import HTPExporter
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.specs import DynamicRequest, InputTensorSpec

ExporterName = Literal["torchscript", "dynamo"]
both_exporters = pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])


@dataclass
class Points:
    """A point prompt of a detector."""

    xy: torch.Tensor
    label: torch.Tensor


class Backbone(nn.Module):
    """A convolution for each image of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        """Return one row for each image."""
        return torch.stack([self.conv(image).mean((1, 2)) for image in images])


class Detector(nn.Module):
    """A detector of images of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(4, 2)

    def forward(self, images: list[torch.Tensor], points: Points | None = None, scale: float = 1.0) -> dict[str, Any]:
        """Return scores and boxes."""
        rows = self.head(self.backbone(images)) * scale
        if points is not None:
            rows = rows + points.xy.mean() * points.label.float().mean()
        return {"scores": rows, "boxes": [rows * 2, (rows + 1,)]}


def graph_names(path: Path) -> tuple[list[str], list[str]]:
    """Check a file and return the names of its inputs and outputs."""
    model = onnx.load(path)
    onnx.checker.check_model(model)
    return [value.name for value in model.graph.input], [value.name for value in model.graph.output]


@both_exporters
def test_detector_of_a_list_of_images_exports(exporter: ExporterName, tmp_path: Path) -> None:
    """Inputs and outputs are named by their paths; the file agrees with the module for other values too."""
    model = Detector().eval()
    images = [torch.randn(3, 8, 8), torch.randn(3, 9, 7)]
    inputs = {"images": images, "points": Points(torch.randn(5, 2), torch.arange(5)), "scale": 2.0}
    config = WinMLExportConfig(exporter=exporter, dynamic_axes={"images.0": {1: "height", 2: "width"}})
    result = export_pytorch(model, tmp_path / "o.onnx", inputs, config=config)
    names = ["images.0", "images.1", "points.xy", "points.label"]
    assert (names, ["scores", "boxes.0", "boxes.1.0"]) == graph_names(tmp_path / "o.onnx")
    told = {entry.key: json.loads(entry.value) for entry in onnx.load(tmp_path / "o.onnx").metadata_props}
    assert names == [spec["name"] for spec in told["winml.io.inputs"]]
    assert ["scores", "boxes.0", "boxes.1.0"] == [spec["name"] for spec in told["winml.io.outputs"]]
    part = result.parts[0]
    assert part.verification is not None
    assert {node.module for node in part.nodes} == {"", "backbone", "head"}
    assert any("constant 2.0" in note for note in part.notes)
    other = [torch.randn(3, 12, 5), torch.randn(3, 9, 7)]
    points = Points(torch.randn(5, 2), torch.arange(5) * 2)
    feeds = {"images.0": other[0], "images.1": other[1], "points.xy": points.xy, "points.label": points.label}
    answers = run_onnx(tmp_path / "o.onnx", {name: value.numpy() for name, value in feeds.items()})
    with torch.no_grad():
        expected = model(other, points, 2.0)
    np.testing.assert_allclose(expected["boxes"][1][0].numpy(), answers["boxes.1.0"], rtol=1e-4, atol=1e-5)


class Colliding(nn.Module):
    """Has parameters with the names of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(4)])
        self.encoder = nn.Linear(3, 3)

    def forward(self, images: list[torch.Tensor], encoder: dict[str, torch.Tensor], input_2: torch.Tensor) -> Any:
        """Weight every image with the parameter of the same name."""
        weighed = sum(image * parameter for image, parameter in zip(images, self.images, strict=False))
        return self.encoder(weighed) @ encoder["weight"] + input_2


@both_exporters
def test_inputs_named_like_parameters_keep_their_names(exporter: ExporterName, tmp_path: Path) -> None:
    """Parameters and inputs are not confused; the file is verified."""
    images = [torch.randn(2, 3) for _ in range(3)]
    inputs = {"images": images, "encoder": {"weight": torch.randn(3, 3)}, "input_2": torch.randn(2, 3)}
    config = WinMLExportConfig(exporter=exporter)
    result = export_pytorch(Colliding(), tmp_path / "o.onnx", inputs, config=config)
    assert result.parts[0].verification is not None
    names = ["images.0", "images.1", "images.2", "encoder.weight", "input_2"]
    assert names == graph_names(tmp_path / "o.onnx")[0]


def test_inputs_in_containers_are_described_without_an_example(tmp_path: Path) -> None:
    """Names and annotations suffice; -1 makes a size dynamic."""
    specs = (
        InputTensorSpec(name="images.0", shape=(3, -1, -1), dtype="float32"),
        InputTensorSpec(name="points.xy", shape=(-1, 2), dtype="float32"),
        InputTensorSpec(name="points.label", shape=(4,), dtype="int64", value_range=(0, 4)),
    )
    result = export_pytorch(Detector(), tmp_path / "o.onnx", config=WinMLExportConfig(input_tensors=specs))
    shapes = [spec.shape for spec in result.parts[0].inputs]
    assert [(3, "dim_1", "dim_2"), ("batch_size", 2), (4,)] == shapes


class Rows(nn.Module):
    """Several outputs, one with a size different from the input's."""

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the rows, every second column, and a fixed size."""
        values = ids.float() * 1.5
        return {"rows": values, "half": values[:, ::2], "fixed": values.sum()[None]}


def test_dynamic_axes_of_outputs_name_open_dimensions(tmp_path: Path) -> None:
    """An expression gets the name, as in torch.onnx.export; other requests become notes."""
    axes: Any = {"ids": [0, 1], "half": {0: "rows", 1: "pairs"}, "fixed": [0], "rows": [0]}
    config = WinMLExportConfig(dynamic_axes=axes)
    result = export_pytorch(Rows(), tmp_path / "o.onnx", torch.randn(3, 8), config=config)
    part = result.parts[0]
    shapes = {spec.name: spec.shape for spec in part.outputs}
    assert {"rows": ("batch_size", "dim_1"), "half": ("batch_size", "pairs"), "fixed": (1,)} == shapes
    assert "dynamic_axes: axis 0 of half equals batch_size and has this name instead of rows." in part.notes
    assert "dynamic_axes: axis 0 of fixed is always 1: it depends on no dynamic dimension of the inputs." in part.notes


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"ids": [0], "hlaf": [0]}, "dynamic_axes: the model has no input or output 'hlaf'"),
        ({"ids": [0], "half": [2]}, "dynamic_axes: output half has no axis 2; it has 2, counted from 0"),
    ],
)
def test_dynamic_axes_of_unknown_outputs_are_refused(axes: Any, words: str, tmp_path: Path) -> None:
    """The error lists the existing outputs."""
    with pytest.raises(UsageError) as caught:
        export_pytorch(Rows(), tmp_path / "o.onnx", torch.randn(3, 8), config=WinMLExportConfig(dynamic_axes=axes))
    assert words == caught.value.message
    assert caught.value.hint


SENTENCES = """
import torch

def build():
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer({folder!r}, device="cpu")

def example_inputs_build():
    ids = torch.arange(1000, 1032).reshape(2, 16)
    return {{"input": {{"input_ids": ids, "attention_mask": torch.ones_like(ids)}}}}
"""


@both_exporters
def test_sentence_transformer_takes_its_features(exporter: ExporterName, minilm_folder: Path, tmp_path: Path) -> None:
    """The dict of features becomes flat inputs, real weights are verified, and every module has its nodes."""
    script = tmp_path / "sentences.py"
    script.write_text(SENTENCES.format(folder=str(minilm_folder)), encoding="utf-8")
    dynamic = DynamicRequest(axes={"input.input_ids": {0: "batch", 1: "sequence"}} if exporter == "torchscript" else {})
    request = ModelRequest(f"{script}:build", dynamic=dynamic)
    result = HTPExporter(WinMLExportConfig(exporter=exporter)).export_checkpoint(request, tmp_path / "o.onnx")
    part = result.parts[0]
    sizes = ("batch", "sequence") if exporter == "torchscript" else (2, 16)
    expected = {"input.input_ids": sizes, "input.attention_mask": sizes}
    assert expected == {spec.name: spec.shape for spec in part.inputs}
    assert part.verification is not None
    modules = {node.module for node in part.nodes}
    assert {"0.model.embeddings", "0.model.encoder.layer.5.attention.self", "1", "2"} <= modules
    assert "sentence_embedding" in {spec.name for spec in part.outputs}


class Cached(nn.Module):
    """Appends to a cache."""

    def forward(self, values: torch.Tensor, past: torch.Tensor) -> Any:
        """Return the sum of all entries, and the cache."""
        cache = torch.cat([past, values.tanh()], 2)
        return cache.sum(2), cache


@pytest.mark.parametrize("dynamic", [False, True])
def test_example_with_an_empty_cache_is_exported(dynamic: bool, tmp_path: Path) -> None:
    """A size of 0 stays 0; a dynamic dimension is traced with entries, and may be 0."""
    config = WinMLExportConfig(dynamic_axes={"past": {2: "entries"}} if dynamic else {})
    example = (torch.randn(1, 2, 3, 8), torch.zeros(1, 2, 0, 8))
    part = export_pytorch(Cached().eval(), tmp_path / "model.onnx", example, config=config).only_part
    assert part.verification is not None
    assert part.verification.is_verified
    assert (1, 2, "entries" if dynamic else 0, 8) == part.inputs[1].shape
    assert ([0] if dynamic else []) == [item.min for item in part.dimensions]
    feeds = {"values": example[0].numpy(), "past": example[1].numpy()}
    _, cache = run_onnx(part.model_path, feeds).values()
    np.testing.assert_allclose(cache, example[0].tanh().numpy(), atol=1e-6)
