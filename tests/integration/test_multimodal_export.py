"""Models of text and images without a cache: exported as one graph, with the valid input values in the metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winml.modelkit import HTPExporter
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.inspect.model_inspection import inspect_checkpoint
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.ort.graph_inputs import draw_feeds, graph_inputs
from winml.modelkit.ort.sessions import Session

pytestmark = pytest.mark.usefixtures("libraries_may_warn")

PART = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
TEXT = {**PART, "model_type": "llama", "vocab_size": 90, "max_position_embeddings": 64}
LLAVA = {
    "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "image_token_index": 7,
    "text_config": TEXT, "vision_feature_layer": -1,
    "vision_config": {**PART, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 4},
}  # fmt: skip


def test_export_of_text_and_image_is_one_graph_that_remembers_its_places(tmp_path: Path) -> None:
    """The file agrees with PyTorch, inspect lists its inputs, and drawn values contain the image placeholders."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAVA), encoding="utf-8")
    request = ModelRequest(str(config), random_weights=True, cache=False)

    exported = HTPExporter(WinMLExportConfig()).export_checkpoint(request, tmp_path / "model.onnx")

    assert exported.only_part.verification is not None
    assert exported.only_part.verification.is_verified
    assert ["input_ids", "pixel_values", "attention_mask"] == [spec.name for spec in exported.only_part.inputs]
    assert exported.only_part.inputs == inspect_checkpoint(ModelRequest(str(config), cache=False)).inputs
    assert any("16 placeholder tokens" in note for note in exported.notes), exported.notes
    session = Session(tmp_path / "model.onnx")
    written: list[dict[str, Any]] = json.loads(session.metadata["winml.io.inputs"])
    assert [[7, 16]] == written[0]["first_values"]
    feeds = draw_feeds(graph_inputs(session), {}, seed=5)
    assert [7] * 16 == feeds["input_ids"][0, :16].tolist()
    assert 7 not in feeds["input_ids"][0, 16:]
    pictures = {**feeds, "pixel_values": feeds["pixel_values"] + np.float32(1)}
    first, second = (session.run(values)["logits"] for values in (feeds, pictures))
    assert not np.allclose(first, second)
