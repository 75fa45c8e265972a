"""Consistency of small configs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from winml.modelkit.sweep.small_configs import WAYS, default_content, shrink


def build(content: dict[str, Any]) -> torch.nn.Module:
    """Build the base model of a config on the meta device."""
    config = transformers.AutoConfig.for_model(**content)
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


@pytest.mark.parametrize("model_type", ["bert", "llama", "t5", "vit", "resnet", "clip", "mixtral", "wav2vec2"])
def test_shrink_gives_a_model_of_a_hundredth_that_builds(model_type: str) -> None:
    """Widths, heads, layers and vocabulary stay consistent in models of every type."""
    content = default_content(model_type)
    default_model, small_model = build(content), build(shrink(content, WAYS[0]))
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (default_model, small_model)]
    assert counts[1] < counts[0] / 50
    assert type(default_model) is type(small_model)


def test_shrink_leaves_the_config_unchanged() -> None:
    """The next attempt to shrink begins with the same content."""
    content = default_content("clip")
    before = copy.deepcopy(content)
    for way in WAYS:
        shrink(content, way)
    assert before == content
    assert content == shrink(content, WAYS[-1])


def test_shrink_divides_widths_alike_by_fewer_and_narrower_heads() -> None:
    """Twelve heads become three of half the width, and all widths an eighth."""
    content = {"hidden_size": 768, "num_attention_heads": 12, "head_dim": 64, "intermediate_size": 3072}
    small = {"hidden_size": 96, "num_attention_heads": 3, "head_dim": 32, "intermediate_size": 384}
    assert small == shrink(content, ["width", "heads", "head size", "gaps"])
    assert {**small, "num_attention_heads": 12, "head_dim": 8} == shrink(content, ["width", "head size", "gaps"])


def test_shrink_may_leave_the_size_of_a_head() -> None:
    """All sizes are divided by the ratio of heads; the heads of keys and values may become one."""
    content = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    small = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    assert small == shrink(content, ["width", "heads", "gaps"])


def test_shrink_adds_keys_missing_in_a_default() -> None:
    """Keys of every checkpoint are added, existing values stay, and the number of heads divides the width."""
    content = {
        "hidden_size": 60,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "head_dim": None,
        "layer_types": None,
        "vocab_size": None,
        "pad_token_id": 3,
        "rope_parameters": {"rope_theta": 1.0},
        "text_config": {"model_type": "part", "hidden_size": 32},
        "vision_config": {"model_type": "part", "out_hidden_size": 48, "hidden_size": 16},
    }
    filled = shrink(content, [])
    assert {
        "num_attention_heads": 6,
        "head_dim": 10,
        "num_key_value_heads": 6,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "vocab_size": 512,
        "pad_token_id": 3,
        "rope_parameters": {"rope_theta": 1.0, "mrope_section": [1, 1, 1]},
    } == {key: value for key, value in filled.items() if key not in ("hidden_size", "text_config", "vision_config")}
    assert {"model_type": "part", "out_hidden_size": 32, "hidden_size": 16} == filled["vision_config"]
    assert content == shrink(content, ["gaps"])


@pytest.mark.parametrize("model_type", ["esm", "lfm2_moe", "hunyuan_v1_dense"])
def test_shrink_repairs_refused_defaults(model_type: str) -> None:
    """The class refuses its own default config, and accepts the filled one."""
    content = default_content(model_type)
    with pytest.raises((TypeError, ValueError)):
        build(content)
    assert isinstance(build(shrink(content, [aspect for aspect in WAYS[0] if aspect != "gaps"])), torch.nn.Module)


def test_shrink_keeps_groups_equal_to_the_divided_width() -> None:
    """A depthwise convolution has as many groups as channels, and a spectrogram keeps its bins."""
    content = {"hidden_size": 512, "upsample_groups": 512, "num_mel_bins": 80, "model_in_dim": 80}
    small = {"hidden_size": 64, "upsample_groups": 64, "num_mel_bins": 80, "model_in_dim": 80}
    assert small == shrink(content, ["width", "gaps"])


def test_shrink_takes_the_number_of_stages_for_no_depth() -> None:
    """Values per stage stay if the blocks of each stage are listed."""
    content = {"num_layers": 4, "depths": [2, 2, 6, 2], "out_features": ["stage4"]}
    assert {"num_layers": 4, "depths": [2, 2, 2, 2], "out_features": ["stage4"]} == shrink(content, ["depth", "gaps"])


def test_shrink_keeps_one_layer_of_each_kind() -> None:
    """Values per layer, by index, or of the first or last layers, follow the layers that stay."""
    content = {
        "num_hidden_layers": 6,
        "layer_types": ["linear", "linear", "full"] * 2,
        "cross_layers": [4],
        "first_k_dense_replace": 1,
        "per_layer_config": {"02": {"head_dim": 32}},
        "num_kv_shared_layers": 1,
        "stage_names": ["stem", "stage1"],
    }
    # Layer 0 is dense, 1 is linear, 2 and 4 differ from all others; the fifth kind, 5, exceeds the limit.
    assert {
        "num_hidden_layers": 4,
        "layer_types": ["linear", "linear", "full", "linear"],
        "cross_layers": [3],
        "first_k_dense_replace": 1,
        "per_layer_config": {"2": {"head_dim": 32}},
        "num_kv_shared_layers": 0,
    } == shrink(content, ["depth", "kinds", "gaps"])


def test_shrink_keeps_two_layers_of_each_kind_if_one_is_refused() -> None:
    """Layers of a kind may share weights, so a model needs two layers of each kind."""
    content = {"num_hidden_layers": 6, "layer_types": ["linear", "linear", "full"] * 2}
    small = shrink(content, ["depth", "gaps"])
    assert {"num_hidden_layers": 4, "layer_types": ["linear", "linear", "full", "full"]} == small
    assert ["linear", "full"] == shrink(content, ["depth", "kinds", "gaps"])["layer_types"]


def test_shrink_keeps_tokens_inside_the_vocabulary() -> None:
    """Distinct tokens stay distinct, and tokens inside the small vocabulary stay unchanged."""
    content = {"vocab_size": 32000, "pad_token_id": 0, "image_token_id": 31999, "audio_token_id": 31998}
    assert {"vocab_size": 512, "pad_token_id": 0, "image_token_id": 510, "audio_token_id": 511} == shrink(
        content, ["tokens", "gaps"]
    )


def test_shrink_gives_a_token_one_place_in_all_parts() -> None:
    """The end token differs from the image token, and positions leave room for an image."""
    text = {"model_type": "part", "vocab_size": 32000, "eos_token_id": 31000, "max_position_embeddings": 32768}
    small = shrink({"image_token_id": 31999, "text_config": text}, ["tokens", "gaps"])
    assert (510, 511) == (small["image_token_id"], small["text_config"]["eos_token_id"])
    assert 4096 == small["text_config"]["max_position_embeddings"]


def test_shrink_reaches_sub_configs() -> None:
    """Each sub-config is divided by its own heads; shared sizes stay equal."""
    part = {"model_type": "part", "hidden_size": 768, "num_attention_heads": 12}
    small = shrink({"text_config": part, "projection_dim": 768, "task": {"hidden_size": 64}}, WAYS[0])
    assert 96 == small["text_config"]["hidden_size"] == small["projection_dim"]
    assert 8 == small["task"]["hidden_size"]


def test_shrink_gives_images_four_patches_per_edge() -> None:
    """Images have 64 pixels at most if patches are small or absent."""
    assert {"image_size": 64, "patch_size": 16} == shrink({"image_size": 224, "patch_size": 16}, ["image", "gaps"])
    assert {"image_size": [64, 64], "patch_size": 4} == shrink(
        {"image_size": [224, 224], "patch_size": 4}, ["image", "gaps"]
    )
    assert {"image_size": 32} == shrink({"image_size": 32}, ["image", "gaps"])
