"""Do small configs keep what has to fit together?"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from small_configs import WAYS, default_content, shrink


def build(content: dict[str, Any]) -> torch.nn.Module:
    """Build the base model of a config on the meta device."""
    config = transformers.AutoConfig.for_model(**content)
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


@pytest.mark.parametrize("model_type", ["bert", "llama", "t5", "vit", "resnet", "clip", "mixtral", "wav2vec2"])
def test_shrink_gives_a_model_of_a_hundredth_that_builds(model_type: str) -> None:
    """Widths, heads, layers and vocabulary fit together without a word about the model."""
    content = default_content(model_type)
    whole, small = build(content), build(shrink(content, WAYS[0]))
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (whole, small)]
    assert counts[1] < counts[0] / 50
    assert type(whole) is type(small)


def test_shrink_leaves_the_config_as_it_is() -> None:
    """The next way begins with the same content."""
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
    assert small == shrink(content, ["width", "heads"])
    assert {**small, "num_attention_heads": 12, "head_dim": 8} == shrink(content, ["width"])


def test_shrink_keeps_one_layer_of_each_kind() -> None:
    """What is said per layer, by index, or of the first or last ones, goes with the layers that stay."""
    content = {
        "num_hidden_layers": 6,
        "layer_types": ["linear", "linear", "full"] * 2,
        "cross_layers": [4],
        "first_k_dense_replace": 1,
        "per_layer_config": {"02": {"head_dim": 32}},
        "num_kv_shared_layers": 1,
        "stage_names": ["stem", "stage1"],
    }
    # Layer 0 is dense, 1 is linear, 2 and 4 are as no other; the fifth kind, 5, is one too many.
    assert {
        "num_hidden_layers": 4,
        "layer_types": ["linear", "linear", "full", "linear"],
        "cross_layers": [3],
        "first_k_dense_replace": 1,
        "per_layer_config": {"2": {"head_dim": 32}},
        "num_kv_shared_layers": 0,
    } == shrink(content, ["depth"])


def test_shrink_keeps_tokens_inside_the_vocabulary() -> None:
    """Distinct tokens stay distinct, and those inside stay where they are."""
    content = {"vocab_size": 32000, "pad_token_id": 0, "image_token_id": 31999, "audio_token_id": 31998}
    assert {"vocab_size": 512, "pad_token_id": 0, "image_token_id": 510, "audio_token_id": 511} == shrink(
        content, ["tokens"]
    )


def test_shrink_reaches_sub_configs() -> None:
    """Each part is cut by its own heads; what joins them stays equal."""
    part = {"model_type": "part", "hidden_size": 768, "num_attention_heads": 12}
    small = shrink({"text_config": part, "projection_dim": 768, "task": {"hidden_size": 64}}, ["width", "heads"])
    assert 96 == small["text_config"]["hidden_size"] == small["projection_dim"]
    assert 8 == small["task"]["hidden_size"]


def test_shrink_gives_images_four_patches_per_edge() -> None:
    """Where patches are small or none, images are of 64 pixels."""
    assert {"image_size": 64, "patch_size": 16} == shrink({"image_size": 224, "patch_size": 16}, ["image"])
    assert {"image_size": [64, 64], "patch_size": 4} == shrink({"image_size": [224, 224], "patch_size": 4}, ["image"])
    assert {"image_size": 32} == shrink({"image_size": 32}, ["image"])
