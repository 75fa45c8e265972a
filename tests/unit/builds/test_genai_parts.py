"""The description of several parts for onnxruntime-genai, by their inputs and outputs: audio, and images."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from winml.modelkit.builds.layouts.genai import genai_texts
from winml.modelkit.errors import UsageError

CROSS = [1, 4, 1500, 8]
OWN = [1, 4, "past", 8]
SIDES = ("key", "value")


def save(path: Path, inputs: dict[str, list[int | str]], outputs: dict[str, list[int | str]]) -> tuple[Path, str]:
    """Write a graph with the declared inputs and outputs alone, which are all that is read of it."""
    values = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in given.items()]
        for given in (inputs, outputs)
    ]
    onnx.save(helper.make_model(helper.make_graph([], "graph", *values)), path)
    return path, path.name


def parts(folder: Path, frames: int = 3000, **further: list[int | str]) -> dict[str, tuple[Path, str]]:
    """Return an audio encoder and its decoder; ``further`` are inputs of the decoder."""
    names = [f"{layer}.{{}}.{kind}" for layer in range(2) for kind in SIDES]
    answered = {f"present.{name.format('encoder')}": CROSS for name in names}
    cross = {f"past_key_values.{name.format('encoder')}": CROSS for name in names}
    own = {f"past_key_values.{name.format('decoder')}": OWN for name in names}
    written = {f"present.{name.format('decoder')}": OWN for name in names}
    return {
        "encoder": save(
            folder / "encoder.onnx",
            {"input_features": [1, 80, frames]},
            {"last_hidden_state": [1, 1500, 32], **answered},
        ),
        "decoder": save(
            folder / "decoder.onnx",
            {"input_ids": [1, "tokens"], **own, **cross, **further},
            {"logits": [1, "tokens", 99], **written},
        ),
    }


def test_parts_are_described_by_their_names(tmp_path: Path) -> None:
    """Sizes are read from the graphs, positions and tokens from the checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps({"max_target_positions": 64, "eos_token_id": 2}))
    extractor = {"n_fft": 400, "hop_length": 160, "chunk_length": 30, "feature_size": 80}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(extractor))
    sources = {name: tmp_path / name for name in ("config.json", "preprocessor_config.json")}
    texts = {name: json.loads(text) for name, text in genai_texts(parts(tmp_path), sources).items()}
    model = texts["genai_config.json"]["model"]
    keys = ("type", "vocab_size", "context_length", "eos_token_id")
    assert ("whisper", 99, 64, 2) == tuple(model[key] for key in keys)
    decoder, encoder = model["decoder"], model["encoder"]
    for part in (decoder, encoder):
        keys = ("num_hidden_layers", "num_attention_heads", "head_size", "hidden_size")
        assert (2, 4, 8, 32) == tuple(part[key] for key in keys)
    assert ("encoder.onnx", "decoder.onnx") == (encoder["filename"], decoder["filename"])
    assert "present.%d.encoder.value" == encoder["outputs"]["cross_present_value_names"]
    assert "past_key_values.%d.encoder.key" == decoder["inputs"]["cross_past_key_names"]
    assert "past_key_values.%d.decoder.key" == decoder["inputs"]["past_key_names"]
    operations = texts["audio_processor_config.json"]["feature_extraction"]["sequence"]
    assert 80 == operations[-1]["operation"]["attrs"]["n_mel"]


def test_recordings_without_a_known_extractor_have_no_processor(tmp_path: Path) -> None:
    """Without a processor, the caller of the model computes the features."""
    (tmp_path / "config.json").write_text(json.dumps({"max_target_positions": 64}))
    assert ["genai_config.json"] == list(genai_texts(parts(tmp_path), {"config.json": tmp_path / "config.json"}))


def test_length_of_a_text_is_not_guessed(tmp_path: Path) -> None:
    """A config without the length is refused."""
    with pytest.raises(UsageError, match="max_target_positions"):
        genai_texts(parts(tmp_path), {})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"frames": 1500}, "1500 frames.*expected 3000"),
        ({"encoder_attention_mask": [1, 1500]}, "encoder_attention_mask"),
        ({"past_key_values.2.decoder.key": [1, 2, "past", 8]}, "several sizes"),
        ({"past_key_values.2.encoder.key": CROSS}, "present.2.encoder.key"),
    ],
)
def test_parts_of_another_kind_are_refused(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    """The message names the problem."""
    with pytest.raises(UsageError, match=f"--layout genai: .*{problem}"):
        genai_texts(parts(tmp_path, **changes), {})  # type: ignore[arg-type]  # shapes, or the number of frames


def test_other_parts_are_refused(tmp_path: Path) -> None:
    """Another pair of parts, such as a vision encoder and a decoder, is refused."""
    given = parts(tmp_path)
    with pytest.raises(UsageError, match="vision, decoder"):
        genai_texts({"vision": given["encoder"], "decoder": given["decoder"]}, {})


def vision_parts(folder: Path, *further: str) -> dict[str, tuple[Path, str]]:
    """Return the three graphs of a Qwen2.5-VL; ``further`` are inputs of the vision encoder."""
    caches = {f"{{}}.0.{kind}": [1, 4, "past", 8] for kind in SIDES}
    past = {name.format("past_key_values"): size for name, size in caches.items()}
    pixels: dict[str, list[int | str]] = {"pixel_values": ["patches", 24], "image_grid_thw": ["images", 3]}
    embeddings: dict[str, list[int | str]] = {"inputs_embeds": [1, "tokens", 32]}
    features: dict[str, list[int | str]] = {"image_features": ["rows", 32]}
    return {
        "vision": save(folder / "vision.onnx", {**pixels, **{name: [1] for name in further}}, features),
        "embedding": save(folder / "embedding.onnx", {"input_ids": [1, "tokens"], **features}, embeddings),
        "decoder": save(
            folder / "decoder.onnx",
            {**embeddings, "attention_mask": [1, "total"], "position_ids": [3, 1, "tokens"], **past},
            {"logits": [1, "tokens", 99], **{name.format("present"): size for name, size in caches.items()}},
        ),
    }


def test_vision_parts_and_their_image_processor_are_described(tmp_path: Path) -> None:
    """Signature and sizes come from the graphs and the config, operations from the processor of the checkpoint."""
    config = {
        "model_type": "qwen2_5_vl", "image_token_id": 5, "vision_start_token_id": 7,
        "vision_config": {"patch_size": 14}, "text_config": {"num_attention_heads": 4, "eos_token_id": 2},
    }  # fmt: skip
    # As published: without the filter and the factor, and with the number of pixels under older names.
    processor = {
        "min_pixels": 784, "max_pixels": 9408, "patch_size": 14, "do_resize": None,
        "image_mean": [0.5] * 3, "image_std": [0.25] * 3, "merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": processor}))
    sources = {name: tmp_path / name for name in ("config.json", "processor_config.json")}
    texts = {name: json.loads(text) for name, text in genai_texts(vision_parts(tmp_path), sources).items()}
    model = texts["genai_config.json"]["model"]
    assert ("qwen2_5_vl", 5, 7) == tuple(model[key] for key in ("type", "image_token_id", "vision_start_token_id"))
    assert (14, "image_processor.json") == (model["vision"]["patch_size"], model["vision"]["config_filename"])
    assert (32, "inputs_embeds") == (model["decoder"]["hidden_size"], model["decoder"]["inputs"]["inputs_embeds"])
    operations = [entry["operation"] for entry in texts["image_processor.json"]["processor"]["transforms"]]
    assert ["DecodeImage", "Resize", "Rescale", "Normalize", "PatchImage"] == [entry["type"] for entry in operations]
    resizing = operations[1]["attrs"]
    assert {"rescale_factor": 1 / 255} == operations[2]["attrs"]
    assert ("CUBIC", 784, 9408) == tuple(resizing[key] for key in ("interpolation", "min_pixels", "max_pixels"))
    (tmp_path / "processor_config.json").unlink()
    assert {"genai_config.json"} == set(genai_texts(vision_parts(tmp_path), {"config.json": tmp_path / "config.json"}))
    with pytest.raises(UsageError, match="image_mask"):
        genai_texts(vision_parts(tmp_path, "image_mask"), {"config.json": tmp_path / "config.json"})
