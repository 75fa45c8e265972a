"""Decision of the inputs: accepted by the forward, with valid values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from checkpoints import CONFIGS, TEXT, build_model
from winml.modelkit.errors import CheckpointError, UsageError
from winml.modelkit.models.inputs.decision import check_input_specs, decide_inputs, forward_keywords
from winml.modelkit.models.inputs.options import ShapeConfig
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.feeds import make_feeds

WHISPER = {
    "vocab_size": 60,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_source_positions": 50,
    "max_target_positions": 30,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
SEQUENCE = {"input_ids": (1, 64), "attention_mask": (1, 64)}
EXPECTED: dict[str, dict[str, tuple[int, ...]]] = {
    "bert": {**SEQUENCE, "token_type_ids": (1, 64)},
    "roberta": {"input_ids": (1, 62), "attention_mask": (1, 62), "token_type_ids": (1, 62)},
    "distilbert": SEQUENCE,
    "albert": {**SEQUENCE, "token_type_ids": (1, 64)},
    "electra": {**SEQUENCE, "token_type_ids": (1, 64)},
    "gpt2": SEQUENCE,
    "llama": SEQUENCE,
    "t5": {"input_ids": (1, 128), "attention_mask": (1, 128), "decoder_input_ids": (1, 128)},
    "bart": {**SEQUENCE, "decoder_input_ids": (1, 64)},
    "vit": {"pixel_values": (1, 3, 32, 32)},
    "resnet": {"pixel_values": (1, 3, 224, 224)},
    "convnext": {"pixel_values": (1, 3, 64, 64)},
    "mobilenet_v2": {"pixel_values": (1, 3, 64, 64)},
    "segformer": {"pixel_values": (1, 3, 32, 32)},
    "yolos": {"pixel_values": (1, 3, 32, 32)},
    "clip": {**SEQUENCE, "pixel_values": (1, 3, 32, 32)},
    "wav2vec2": {"input_values": (1, 16000)},
}


def _run(model: Any, inputs: tuple[InputTensorSpec, ...]) -> Any:
    feeds = {name: torch.from_numpy(values) for name, values in make_feeds(inputs, 0).items()}
    with torch.no_grad():
        return model(**feeds, **forward_keywords(model))


def _shapes(inputs: tuple[InputTensorSpec, ...]) -> dict[str, tuple[int | str, ...]]:
    return {spec.name: spec.shape for spec in inputs}


def _whisper() -> Any:
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER)).eval()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_inputs_of_architecture_equal_its_forward(architecture: str) -> None:
    """Names, sizes and values come from signature and config, and a real forward accepts them."""
    model = build_model(architecture)
    decision = decide_inputs(model, model.config)
    assert EXPECTED[architecture] == _shapes(decision.inputs)
    assert () == decision.notes
    outputs = _run(model, decision.inputs)
    assert torch.isfinite(outputs[0]).all()


@pytest.mark.parametrize("architecture", ["bert", "clip", "vit", "bart", "resnet", "wav2vec2"])
def test_inputs_of_a_class_equal_the_inputs_of_its_instance(architecture: str) -> None:
    """A class and a config are enough: no weights are needed to decide."""
    model = build_model(architecture)
    decided = decide_inputs(type(model), model.config)
    assert decide_inputs(model, model.config) == decided


def test_inputs_of_whisper_are_features_and_decoder_tokens() -> None:
    """Frames follow from the encoder's positions, tokens from the decoder's."""
    model = _whisper()
    inputs = decide_inputs(model, model.config, task="automatic-speech-recognition").inputs
    assert {"input_features": (1, 80, 100), "decoder_input_ids": (1, 30)} == _shapes(inputs)
    assert (1, 30, 60) == tuple(_run(model, inputs)[0].shape)


def test_inputs_values_are_bounded_by_their_vocabulary() -> None:
    """Every index has its own range; a mask is a mask."""
    model = build_model("bert", type_vocab_size=3)
    ranges = {spec.name: spec.value_range for spec in decide_inputs(model, model.config).inputs}
    assert {"input_ids": (0, 119), "attention_mask": (0, 1), "token_type_ids": (0, 2)} == ranges


@pytest.mark.parametrize(("types", "has_types"), [(0, False), (1, False), (2, True)])
def test_inputs_token_types_need_two_types(types: int, has_types: bool) -> None:
    """A model with one type of token is not asked which."""
    config = transformers.BertConfig(**TEXT, type_vocab_size=types)
    assert has_types == ("token_type_ids" in _shapes(decide_inputs(transformers.BertModel, config).inputs))


def test_inputs_token_types_follow_the_tokenizer(tmp_path: Path) -> None:
    """The tokenizer's input names take precedence over the parameters of the model."""
    (tmp_path / "tokenizer_config.json").write_text('{"model_input_names": ["input_ids", "attention_mask"]}')
    model = build_model("bert")
    assert "token_type_ids" not in _shapes(decide_inputs(model, model.config, tmp_path).inputs)


def test_inputs_end_token_comes_from_the_config_if_inside_the_vocabulary() -> None:
    """Models that look for the end token find one; several end tokens, or none, cannot be placed."""

    def end(**others: Any) -> int | None:
        config = transformers.LlamaConfig(**{**CONFIGS["llama"][1], **others})
        return decide_inputs(transformers.LlamaForCausalLM, config).inputs[0].last_value

    assert [7, None, None] == [end(eos_token_id=7), end(eos_token_id=[7, 8]), end(eos_token_id=None)]


def test_inputs_of_classifying_encoder_decoder_leave_the_decoder_to_the_model() -> None:
    """The decoder's tokens are an input only if the user provides them."""
    model = build_model("bart", class_name="BartForSequenceClassification")
    inputs = decide_inputs(model, model.config, task="text-classification", batch_size=3).inputs
    assert ["input_ids", "attention_mask"] == list(_shapes(inputs))
    assert (3, 3) == tuple(_run(model, inputs).logits.shape)


def test_inputs_of_multiple_choice_have_a_dimension_of_choices() -> None:
    """The input has all choices of every question."""
    model = build_model("bert", class_name="BertForMultipleChoice")
    shape = ShapeConfig(num_choices=3, sequence_length=8)
    inputs = decide_inputs(model, model.config, task="multiple-choice", shape=shape, batch_size=2).inputs
    assert (2, 3, 8) == inputs[0].shape
    assert (2, 3) == tuple(_run(model, inputs).logits.shape)


def test_inputs_of_layout_model_are_boxes_in_order() -> None:
    """Boxes are within the page and their corners in order, or the forward would refuse them."""
    config = transformers.LayoutLMConfig(**TEXT, max_2d_position_embeddings=50)
    model = transformers.LayoutLMModel(config).eval()
    inputs = decide_inputs(model, config).inputs
    assert (1, 64, 4) == _shapes(inputs)["bbox"]
    assert torch.isfinite(_run(model, inputs)[0]).all()


@pytest.mark.parametrize(
    ("class_name", "config", "shapes"),
    [
        ("ASTModel", {"max_length": 64, "num_mel_bins": 32}, {"input_values": (1, 64, 32)}),
        ("Wav2Vec2BertModel", {"feature_projection_input_dim": 40}, {"input_features": (1, 256, 40)}),
        ("VideoMAEModel", {"image_size": 32, "patch_size": 16, "num_frames": 4}, {"pixel_values": (1, 4, 3, 32, 32)}),
        ("SwinModel", {"image_size": 64, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]},
         {"pixel_values": (1, 3, 64, 64)}),
    ],
)  # fmt: skip
def test_inputs_of_other_kinds_follow_config_attributes(
    class_name: str, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Spectrograms, feature frames and videos are recognized by attributes of the config."""
    model_class = getattr(transformers, class_name)
    model_config = model_class.config_class(**config)
    assert shapes == _shapes(decide_inputs(model_class, model_config).inputs)


def test_inputs_image_size_of_processor_wins_unless_the_model_is_fixed(tmp_path: Path) -> None:
    """A CNN gets the size of its processor; a model with learned positions gets the size in its config."""
    content = {"size": {"shortest_edge": 96}, "crop_size": {"height": 80, "width": 88}, "do_center_crop": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    cnn, fixed = build_model("convnext"), build_model("vit")
    assert (1, 3, 80, 88) == decide_inputs(cnn, cnn.config, tmp_path).inputs[0].shape
    assert (1, 3, 32, 32) == decide_inputs(fixed, fixed.config, tmp_path).inputs[0].shape


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"size": 40}, (40, 40)),
        ({"size": {"shortest_edge": 48}}, (48, 48)),
        ({"size": {"height": 40, "width": 48}, "crop_size": 32, "do_center_crop": False}, (40, 48)),
        ({"image_processor": {"size": {"height": 40, "width": 56}}}, (40, 56)),
        ({"size": {"longest_edge": 48}}, (64, 64)),
    ],
)
def test_inputs_image_size_is_read_in_every_spelling(
    tmp_path: Path, content: dict[str, Any], expected: tuple[int, int]
) -> None:
    """Old and new processors write their sizes differently."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    model = build_model("convnext")
    assert expected == decide_inputs(model, model.config, tmp_path).inputs[0].shape[2:]


def test_inputs_audio_mask_exists_if_the_processor_makes_a_mask(tmp_path: Path) -> None:
    """Speech models differ in whether they were trained with a mask; the feature extractor knows."""
    (tmp_path / "preprocessor_config.json").write_text('{"return_attention_mask": true, "sampling_rate": 8000}')
    model = build_model("wav2vec2")
    inputs = decide_inputs(model, model.config, tmp_path).inputs
    assert {"input_values": (1, 8000), "attention_mask": (1, 8000)} == _shapes(inputs)
    assert torch.isfinite(_run(model, inputs)[0]).all()


def test_inputs_take_the_users_sizes() -> None:
    """Every key that means something is obeyed, and a real forward accepts the result."""
    model = build_model("clip")
    decision = decide_inputs(model, model.config, shape=ShapeConfig(sequence_length=9, height=32), batch_size=2)
    assert {"input_ids": (2, 9), "pixel_values": (2, 3, 32, 32), "attention_mask": (2, 9)} == _shapes(decision.inputs)
    assert (2, 2) == tuple(_run(model, decision.inputs).logits_per_image.shape)


def test_inputs_size_without_meaning_is_reported() -> None:
    """A note names a key that no input uses."""
    model = build_model("bert")
    (note,) = decide_inputs(model, model.config, shape=ShapeConfig(height=8)).notes
    assert "height 8" in note


def test_inputs_decoder_length_follows_the_text_by_default() -> None:
    """Encoder and decoder have one length unless the decoder's length is set."""
    model = build_model("t5")
    same = decide_inputs(model, model.config, shape=ShapeConfig(sequence_length=16)).inputs
    own = decide_inputs(model, model.config, shape=ShapeConfig(sequence_length=16, decoder_sequence_length=4)).inputs
    assert [(1, 16), (1, 4)] == [same[2].shape, own[2].shape]


@pytest.mark.parametrize(
    ("architecture", "shape", "words"),
    [
        ("bert", {"sequence_length": 65}, "sequence_length 65"),
        ("roberta", {"sequence_length": 63}, "sequence_length 63"),
        ("bart", {"decoder_sequence_length": 65}, "decoder_sequence_length 65"),
        ("clip", {"sequence_length": 65}, "64 positions"),
        ("vit", {"height": 40}, "32x32 pixels"),
        ("clip", {"width": 40}, "width 40"),
        ("resnet", {"num_channels": 1}, "num_channels 1"),
        ("wav2vec2", {"audio_length": 50}, "audio_length 50:"),
    ],
)
def test_inputs_size_the_model_refuses_is_a_usage_error(architecture: str, shape: dict[str, int], words: str) -> None:
    """Impossible sizes are refused before a forward is tried."""
    model = build_model(architecture)
    with pytest.raises(UsageError) as caught:
        decide_inputs(model, model.config, shape=ShapeConfig(**shape))
    assert words in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("architecture", ["bert", "roberta", "bart", "gpt2", "clip"])
def test_inputs_longest_row_is_really_accepted(architecture: str) -> None:
    """One position more exceeds the position table of the model."""
    model = build_model(architecture)
    inputs = decide_inputs(model, model.config).inputs
    longer = tuple(
        spec.model_copy(update={"shape": (1, spec.shape[1] + 1)}) if len(spec.shape) == 2 else spec for spec in inputs
    )
    _run(model, inputs)
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        _run(model, longer)


def test_inputs_beyond_rotary_positions_are_allowed_with_a_note() -> None:
    """Computed positions have no table to leave; the config's word is passed on."""
    model = build_model("llama")
    decision = decide_inputs(model, model.config, shape=ShapeConfig(sequence_length=70))
    assert ("--shape-config: sequence_length 70 is above the 64 declared in the config",) == decision.notes
    _run(model, decision.inputs)


def test_inputs_whisper_frames_cannot_be_chosen() -> None:
    """The encoder adds a position to every frame it was built for."""
    model = _whisper()
    with pytest.raises(UsageError, match=r"num_frames 90:.*100 only"):
        decide_inputs(model, model.config, shape=ShapeConfig(num_frames=90))


def test_inputs_unknown_to_us_ask_for_a_manifest() -> None:
    """Unknown inputs are not guessed; the hint asks for --input-specs."""
    config = transformers.TimeSeriesTransformerConfig(prediction_length=2)
    with pytest.raises(UsageError, match="past_values") as caught:
        decide_inputs(transformers.TimeSeriesTransformerModel, config)
    assert "--input-specs" in caught.value.hint


def test_inputs_malformed_processor_file_names_line_and_column(tmp_path: Path) -> None:
    """A broken file beside the config is not silently skipped."""
    (tmp_path / "preprocessor_config.json").write_text('{"size":\n 3')
    model = build_model("convnext")
    with pytest.raises(CheckpointError, match="line 2, column 3"):
        decide_inputs(model, model.config, tmp_path)


def test_inputs_float_dtype_equals_the_weights() -> None:
    """Pixels meet the weights in their own dtype."""
    model = build_model("vit").to(torch.float16)
    assert "float16" == decide_inputs(model, model.config).inputs[0].dtype


def _manifest(*names: str) -> list[InputTensorSpec]:
    return [InputTensorSpec(name=name, shape=(1, 4), dtype="int64") for name in names]


def test_unknown_manifest_name_is_refused_with_the_nearest_parameter() -> None:
    """Inputs are passed to forward by keyword, so each name must be a parameter."""
    check_input_specs(transformers.BertModel, _manifest("input_ids", "attention_mask"))
    with pytest.raises(UsageError, match="'input_id'") as caught:
        check_input_specs(transformers.BertModel, _manifest("input_id"))
    assert "'input_ids'" in caught.value.hint


def test_manifest_without_a_required_parameter_is_refused() -> None:
    """The manifest must describe every required parameter of forward."""
    with pytest.raises(UsageError, match="needs pixel_values"):
        check_input_specs(transformers.ResNetModel, [])


def test_forward_keywords_are_limited_to_its_parameters() -> None:
    """The keywords switch the cache off and ask for named outputs, if forward has such parameters."""
    assert {"use_cache": False} == forward_keywords(transformers.BertModel)
    assert {"return_dict": True} == forward_keywords(transformers.ResNetModel)
    assert {} == forward_keywords(torch.nn.Linear(1, 1))
