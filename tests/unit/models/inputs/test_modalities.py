"""Layout of image and recording inputs, and placeholder tokens in the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from winml.modelkit.errors import UsageError
from winml.modelkit.models.inputs.decision import InputDecision, decide_inputs, forward_keywords
from winml.modelkit.models.inputs.dynamic_axes import open_axes
from winml.modelkit.models.inputs.options import ShapeConfig
from winml.modelkit.onnx.specs import DynamicRequest, InputTensorSpec
from winml.modelkit.ort.feeds import make_feeds

TEXT = {
    "model_type": "llama", "vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256,
}  # fmt: skip
VISION = {
    "model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "image_size": 32, "patch_size": 8,
}  # fmt: skip
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
GRID = {
    "depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN_TEXT = {
    **TEXT, "model_type": "qwen2_vl_text",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}  # fmt: skip
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("LlavaModel", {"text_config": TEXT, "vision_config": VISION, "image_token_index": 7}),
    "tiles": (
        "LlavaNextModel",
        {"text_config": TEXT, "vision_config": VISION, "image_token_index": 88,
         "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
    ),
    "images per row": (
        "Idefics3Model",
        {"text_config": TEXT, "scale_factor": 2, "image_token_id": 40,
         "vision_config": {**VISION, "model_type": "idefics3_vision"}},
    ),
    "grid": (
        "Qwen2VLModel",
        {"text_config": QWEN_TEXT, "vision_config": GRID, "image_token_id": 80, "video_token_id": 81,
         "vision_start_token_id": 82, "vision_end_token_id": 83},
    ),
    "recording": (
        "AudioFlamingo3Model",
        {"text_config": {**TEXT, "model_type": "qwen2"}, "audio_token_id": 70,
         "audio_config": {"num_mel_bins": 16, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
                          "intermediate_size": 48, "max_source_positions": 20}},
    ),
}  # fmt: skip


def build(class_name: str, config: dict[str, Any]) -> Any:
    """Build a model, initialized, in evaluation mode."""
    torch.manual_seed(0)
    model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class(**config)).eval()


def run(model: Any, inputs: tuple[InputTensorSpec, ...], seed: int = 0) -> Any:
    """Run a model on random values for its inputs."""
    feeds = {name: torch.from_numpy(values) for name, values in make_feeds(inputs, seed).items()}
    with torch.no_grad():
        return model(**feeds, **forward_keywords(model))


def shapes(decision: InputDecision) -> dict[str, tuple[int | str, ...]]:
    """Return the sizes of inputs by name."""
    return {spec.name: spec.shape for spec in decision.inputs}


@pytest.mark.parametrize(
    ("kind", "expected", "places"),
    [
        ("llava", {"pixel_values": (2, 3, 32, 32), "input_ids": (2, 144), "attention_mask": (2, 144)}, (7, 16)),
        (
            "tiles",
            {"pixel_values": (2, 3, 3, 32, 32), "image_sizes": (2, 2), "input_ids": (2, 164),
             "attention_mask": (2, 164)},
            (88, 36),
        ),
        (
            "images per row",
            {"pixel_values": (2, 1, 3, 32, 32), "input_ids": (2, 132), "attention_mask": (2, 132)},
            (40, 4),
        ),
        (
            "grid",
            {"pixel_values": (6272, 96), "image_grid_thw": (2, 3), "position_ids": (3, 2, 912), "input_ids": (2, 912),
             "attention_mask": (2, 912)},
            (80, 784),
        ),
        (
            "recording",
            {"input_features": (2, 16, 40), "input_features_mask": (2, 40), "input_ids": (2, 138),
             "attention_mask": (2, 138)},
            (70, 10),
        ),
    ],
)  # fmt: skip
def test_media_hold_places_in_the_text(kind: str, expected: dict[str, Any], places: tuple[int, int]) -> None:
    """Each row begins with as many tokens as the model makes vectors, and a real forward takes every draw."""
    class_name, config = MULTIMODAL[kind]
    if kind == "grid":
        config = {**config, "text_config": {**QWEN_TEXT, "max_position_embeddings": 2048}}
    model = build(class_name, config)
    decision = decide_inputs(model, model.config, batch_size=2)
    assert expected == shapes(decision)
    ids = next(spec for spec in decision.inputs if spec.name == "input_ids")
    assert (places,) == ids.first_values
    assert any(f"each row begins with {places[1]} placeholder tokens" in note for note in decision.notes)
    for seed in (0, 1):
        assert torch.isfinite(run(model, decision.inputs, seed)[0]).all()


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_media_of_a_class_equal_the_media_of_its_instance(kind: str) -> None:
    """Places are counted without weights."""
    class_name, config = MULTIMODAL[kind]
    config = {**config, "text_config": {**config["text_config"], "max_position_embeddings": 2048}}
    model = build(class_name, config)
    assert decide_inputs(model, model.config) == decide_inputs(type(model), model.config)


def test_media_tokens_occur_only_in_their_positions() -> None:
    """Random text uses token ids from the longer range beside the placeholder tokens."""
    class_name, config = MULTIMODAL["llava"]
    model = build(class_name, config)
    ids = decide_inputs(model, model.config).inputs[0]
    assert (8, 89) == ids.value_range
    model.config.image_token_id = 88
    assert (0, 87) == decide_inputs(model, model.config).inputs[0].value_range


def test_media_size_decides_the_places() -> None:
    """A larger picture takes more tokens, and a real forward agrees."""
    class_name, config = MULTIMODAL["grid"]
    model = build(class_name, {**config, "text_config": {**QWEN_TEXT, "max_position_embeddings": 512}})
    decision = decide_inputs(model, model.config, shape=ShapeConfig(height=16, width=32))
    grid = next(spec for spec in decision.inputs if spec.name == "image_grid_thw")
    assert ((1, 1), (4, 1), (8, 1)) == grid.first_values
    assert ((80, 8),) == decision.inputs[0].first_values
    run(model, decision.inputs)


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        ("grid", {"height": 20}, "height 20:"),
        ("grid", {}, "784 tokens"),
        ("llava", {"sequence_length": 16}, "sequence_length 16:"),
    ],
)
def test_media_size_that_does_not_fit_is_refused(kind: str, shape: dict[str, int], words: str) -> None:
    """Impossible sizes are refused before a forward is tried."""
    class_name, config = MULTIMODAL[kind]
    model = build(class_name, config)
    with pytest.raises(UsageError) as caught:
        decide_inputs(model, model.config, shape=ShapeConfig(**shape))
    assert words in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("kind", "request_", "words"),
    [
        ("llava", DynamicRequest(image_size=True), "16 placeholder tokens"),
        ("recording", DynamicRequest(sequence=True), "num_frames"),
        ("grid", DynamicRequest(batch=True), "the patches"),
    ],
)
def test_media_size_that_fixes_the_places_cannot_be_left_open(kind: str, request_: DynamicRequest, words: str) -> None:
    """Another size would need other tokens in the text."""
    class_name, config = MULTIMODAL[kind]
    model = build(class_name, {**config, "text_config": {**config["text_config"], "max_position_embeddings": 2048}})
    with pytest.raises(UsageError, match=words):
        open_axes(decide_inputs(model, model.config), request_)


def test_media_without_a_model_part_are_no_input() -> None:
    """A sub-config of None switches its modality off."""
    class_name, config = MULTIMODAL["llava"]
    model = build(class_name, config)
    model.config.vision_config = None
    assert {"input_ids": (1, 128), "attention_mask": (1, 128)} == shapes(decide_inputs(model, model.config))


def test_media_without_room_for_text_can_be_made_smaller() -> None:
    """The hint offers --shape-config if no config declares the size of the image."""
    class_name, config = MULTIMODAL["grid"]
    model = build(class_name, config)
    with pytest.raises(UsageError) as caught:
        decide_inputs(model, model.config)
    assert "--shape-config" in (caught.value.hint or "")
    decide_inputs(model, model.config, shape=ShapeConfig(height=16, width=32))
    class_name, config = MULTIMODAL["llava"]
    model = build(class_name, {**config, "text_config": {**TEXT, "max_position_embeddings": 12}})
    with pytest.raises(UsageError) as caught:
        decide_inputs(model, model.config)
    assert "Describe all" in (caught.value.hint or "")


SPEECH = {"num_mel_bins": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
HEADS: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]], tuple[tuple[int, int], ...]]] = {
    "positions of the part": (
        "Qwen2VLForConditionalGeneration",
        {**MULTIMODAL["grid"][1], "text_config": {**QWEN_TEXT, "max_position_embeddings": 2048}},
        {"input_ids": (1, 912), "attention_mask": (1, 912), "position_ids": (3, 1, 912), "pixel_values": (3136, 96),
         "image_grid_thw": (1, 3)},
        ((80, 784),),
    ),
    "image marked by types": (
        "Gemma3ForConditionalGeneration",
        {"text_config": {**TEXT, "model_type": "gemma3_text", "head_dim": 8, "pad_token_id": 0},
         "vision_config": {**VISION, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4,
         "image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62},
        {"input_ids": (1, 132), "pixel_values": (1, 3, 32, 32), "attention_mask": (1, 132),
         "token_type_ids": (1, 132)},
        ((60, 4),),
    ),
    "features of the part": (
        "VoxtralForConditionalGeneration",
        {"text_config": TEXT, "audio_token_id": 70,
         "audio_config": {**SPEECH, "model_type": "voxtral_encoder", "hidden_size": 32, "intermediate_size": 128,
                          "max_source_positions": 16}},
        {"input_ids": (1, 132), "input_features": (1, 16, 32), "attention_mask": (1, 132)},
        ((70, 4),),
    ),
    "mask over features": (
        "GraniteSpeechForConditionalGeneration",
        {"text_config": {**TEXT, "model_type": "granite"}, "audio_token_index": 70, "has_lora_adapter": False,
         "window_size": 15, "downsample_rate": 5,
         "encoder_config": {"model_type": "granite_speech_encoder", "input_dim": 16, "num_layers": 1, "hidden_dim": 32,
                            "num_heads": 4, "dim_head": 8, "output_dim": 20, "context_size": 20, "max_pos_emb": 32},
         "projector_config": {"model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 1,
                              "num_attention_heads": 4, "intermediate_size": 48, "encoder_hidden_size": 32}},
        {"input_ids": (1, 182), "input_features": (1, 256, 16), "input_features_mask": (1, 54),
         "attention_mask": (1, 182)},
        ((70, 54),),
    ),
    "no method for features": (
        "Qwen2AudioForConditionalGeneration",
        {"text_config": {**TEXT, "model_type": "qwen2"}, "audio_token_index": 70,
         "audio_config": {"model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 1,
                          "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_mel_bins": 16,
                          "max_source_positions": 20}},
        {"input_ids": (1, 138), "input_features": (1, 16, 40), "attention_mask": (1, 138),
         "feature_attention_mask": (1, 40)},
        ((70, 10),),
    ),
    "places in a mask": (
        "Kosmos2ForConditionalGeneration",
        {"text_config": {"vocab_size": 90, "embed_dim": 32, "layers": 1, "ffn_dim": 48, "attention_heads": 4,
                         "max_position_embeddings": 256}, "vision_config": VISION, "latent_query_num": 4},
        {"pixel_values": (1, 3, 32, 32), "input_ids": (1, 132), "image_embeds_position_mask": (1, 132),
         "attention_mask": (1, 132)},
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADS)
def test_media_of_a_head_follow_its_base_model(kind: str) -> None:
    """Decisions that a head leaves to its base model are made for the base model; a real forward accepts every draw."""
    class_name, config, expected, places = HEADS[kind]
    model = build(class_name, config)
    decision = decide_inputs(model, model.config)
    assert expected == shapes(decision)
    assert places == next(spec for spec in decision.inputs if spec.name == "input_ids").first_values
    for seed in (0, 1):
        assert torch.isfinite(run(model, decision.inputs, seed)[0]).all()
    assert decision == decide_inputs(type(model), model.config)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("image marked by types", "token_type_ids"), ("places in a mask", "image_embeds_position_mask")],
)
def test_media_marks_are_at_the_image_positions(kind: str, name: str) -> None:
    """Text is 0, and the first tokens are 1."""
    class_name, config, _, _ = HEADS[kind]
    model = build(class_name, config)
    spec = next(spec for spec in decide_inputs(model, model.config).inputs if spec.name == name)
    assert (((1, 4),), (0, 0)) == (spec.first_values, spec.value_range)


def test_media_marks_by_token_types_are_independent_of_the_tokenizer(tmp_path: Path) -> None:
    """The processor decides which tokens belong to an image, independent of the tokenizer's input names."""
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"model_input_names": ["input_ids", "attention_mask"]}), encoding="utf-8"
    )
    class_name, config, expected, _ = HEADS["image marked by types"]
    model = build(class_name, config)
    assert expected == shapes(decide_inputs(model, model.config, tmp_path))


@pytest.mark.parametrize("rows", [1, 2])
def test_media_of_codebooks_have_as_many_rows_for_each(rows: int) -> None:
    """Tokens of an audio codec come from several codebooks; a row of codebook tokens is not a sample."""
    config = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 48,
              "num_codebooks": 2, "max_position_embeddings": 64, "pad_token_id": 89, "bos_token_id": 89}  # fmt: skip
    model = build("MusicgenForCausalLM", config)
    decision = decide_inputs(model, model.config, batch_size=rows)
    assert {"input_ids": (2 * rows, 64), "attention_mask": (rows, 64)} == shapes(decision)
    assert (rows, 2, 64) == tuple(run(model, decision.inputs)[0].reshape(rows, 2, 64, -1).shape[:3])
    with pytest.raises(UsageError, match="every codebook"):
        open_axes(decision, DynamicRequest(batch=True))


def test_media_size_is_read_from_input_size() -> None:
    """The config calls the image size ``input_size``."""
    config = {**SMALL_ENCODER, "vocab_size": 90, "input_size": 32, "patch_size": 8, "coordinate_size": 6,
              "shape_size": 4, "max_2d_position_embeddings": 64, "max_position_embeddings": 64,
              "pad_token_id": 1}  # fmt: skip
    model = build("LayoutLMv3Model", config)
    decision = decide_inputs(model, model.config)
    assert (1, 3, 32, 32) == shapes(decision)["pixel_values"]
    run(model, decision.inputs)


SMALL_ENCODER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}


@pytest.mark.parametrize(
    ("class_name", "config", "expected"),
    [
        ("ParakeetEncoder", {**SMALL_ENCODER, "num_mel_bins": 40, "subsampling_conv_channels": 8},
         {"input_features": (1, 256, 40)}),
        ("GlmAsrEncoder", {**SMALL_ENCODER, "num_mel_bins": 40}, {"input_features": (1, 40, 256)}),
        ("DacModel", {"encoder_hidden_size": 4, "decoder_hidden_size": 32, "downsampling_ratios": [2, 4],
                      "upsampling_ratios": [4, 2], "hidden_size": 16, "codebook_dim": 4, "n_codebooks": 2,
                      "codebook_size": 8}, {"input_values": (1, 1, 16000)}),
        ("Siglip2VisionModel", {**SMALL_ENCODER, "patch_size": 16, "num_patches": 256},
         {"pixel_values": (1, 196, 768), "pixel_attention_mask": (1, 196), "spatial_shapes": (1, 2)}),
        ("Gemma4VisionModel", {**SMALL_ENCODER, "head_dim": 16, "num_key_value_heads": 2, "patch_size": 16,
                               "pooling_kernel_size": 2},
         {"pixel_values": (1, 196, 768), "pixel_position_ids": (1, 196, 2)}),
    ],
)  # fmt: skip
def test_media_layout_follows_the_forward(
    class_name: str, config: dict[str, Any], expected: dict[str, tuple[int, ...]]
) -> None:
    """The chosen layout is one that the forward accepts, if the names allow several."""
    model = build(class_name, config)
    decision = decide_inputs(model, model.config)
    assert expected == shapes(decision)
    assert torch.isfinite(next(iter(run(model, decision.inputs).values())).float()).all()


def test_media_mask_has_the_length_of_the_chosen_recording_layout(tmp_path: Path) -> None:
    """The mask that a feature extractor makes has the frames of the layout the forward takes."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"return_attention_mask": True}), encoding="utf-8")
    model = build("ParakeetEncoder", {**SMALL_ENCODER, "num_mel_bins": 40, "subsampling_conv_channels": 8})
    decision = decide_inputs(model, model.config, tmp_path)
    assert {"input_features": (1, 256, 40), "attention_mask": (1, 256)} == shapes(decision)
    run(model, decision.inputs)


def test_media_without_a_known_layout_are_noted() -> None:
    """The usual layout is the fallback, and a note names the unknown number of placeholder tokens."""
    class_name, config = MULTIMODAL["llava"]
    model = build(class_name, config)
    model.config.vision_config.image_size = 32
    model.multi_modal_projector.linear_1 = torch.nn.Linear(5, 32)
    decision = decide_inputs(model, model.config)
    assert (1, 3, 32, 32) == shapes(decision)["pixel_values"]
    assert any("number of placeholder tokens" in note for note in decision.notes)
