"""Models with an inner decoder module: encoder and decoder graphs, and the captions they generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from transformers import BlipForConditionalGeneration

from e2e.in_process import run_here
from vision_language import save_image, save_vision_language, vision_language_processor
from winml.modelkit import WinMLModelForImageTextToText, build_hf_model
from winml.modelkit.builds.manifest_records import BuildResult
from winml.modelkit.models.model import load_model
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.bundle import TextTokens, read_part_description
from winml.modelkit.onnx.specs import InputTensorSpec

pytestmark = pytest.mark.usefixtures("libraries_may_warn")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BLIP."""
    return save_vision_language(tmp_path_factory.mktemp("blip") / "checkpoint", "blip")


@pytest.fixture(scope="module")
def built(checkpoint: Path) -> BuildResult:
    """The BLIP model as two graphs."""
    config = {"export": {"exporter": "torchscript"}}
    return build_hf_model(checkpoint, checkpoint.parent / "built", config=config, task="image-to-text")


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    """The BLIP model in PyTorch."""
    return BlipForConditionalGeneration.from_pretrained(checkpoint).eval()


def test_parts_are_encoder_and_decoder_with_compared_text(built: BuildResult) -> None:
    """The decoder file states start and end tokens, which no file of the checkpoint contains."""
    encoder, decoder = built.part_paths.values()
    assert ["encoder", "decoder"] == list(built.part_paths)
    stage = built.manifest.parts[-1].stage("export")
    assert stage is not None
    assert "32 tokens" in stage.summary
    assert 100.0 == stage.coverage.percent if stage.coverage is not None else False
    described = read_part_description(decoder)
    assert described is not None
    assert TextTokens(0, (4,)) == described.text
    assert encoder.is_file()


@pytest.mark.parametrize("asked", [{}, {"num_beams": 2}], ids=str)
def test_generated_captions_equal_pytorch(built: BuildResult, reference: Any, asked: dict[str, Any]) -> None:
    """Two images at once are captioned, with the end token requested by the model's own generate()."""
    pixels = torch.randn((2, 3, 16, 16), generator=torch.Generator().manual_seed(1))
    model: Any = WinMLModelForImageTextToText.from_pretrained(built.folder)
    settings = {"max_new_tokens": 8, **asked}
    expected = reference.generate(pixels, **settings)
    assert expected.tolist() == model.generate(pixel_values=pixels, **settings).tolist()


def test_caption_command_equals_pytorch(built: BuildResult, reference: Any, tmp_path: Path) -> None:
    """The image processor beside the graphs prepares the image."""
    picture = save_image(tmp_path / "noise.png")
    outcome = run_here("generate", built.folder, "--image", str(picture), "--max-new-tokens", "8", "--format", "json")
    assert 0 == outcome.code, outcome.err
    given = vision_language_processor("blip")(images=PIL.Image.open(picture), return_tensors="pt")
    written = reference.generate(given["pixel_values"], max_new_tokens=8)
    assert written[0, 1:].tolist() == json.loads(outcome.out)["tokens"]


def test_described_inputs_make_one_graph_with_a_single_reason(checkpoint: Path) -> None:
    """The model has an inner decoder, so no note denies it."""
    specs = (
        InputTensorSpec(name="pixel_values", shape=(1, 3, 16, 16), dtype="float32"),
        InputTensorSpec(name="input_ids", shape=(1, 5), dtype="int64", value_range=(0, 9)),
    )
    notes = load_model(ModelRequest(str(checkpoint), task="image-to-text", input_specs=specs)).only_part.notes
    assert ["describes it"] == [word for note in notes for word in ("describes it", "no inner decoder") if word in note]
