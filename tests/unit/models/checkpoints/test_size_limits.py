"""Refusal of absurd sizes before a model is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from winml.modelkit.errors import CheckpointError, InputError
from winml.modelkit.onnx.files.foreign_numbers import check_config_files, refuse_absurd_sizes

PATH = Path("config.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"n_layer": 10**5}, "n_layer is 100000"),
        ({"depths": [10**8, 2]}, "depths is 100000002"),
        ({"num_labels": 10**8}, "num_labels is 100000000"),
        ({"hidden_size": 10**18}, "hidden_size is 1e+18"),
        ({"hidden_size": -32}, "hidden_size is -32"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "text_config.num_hidden_layers is 1000000000"),
        ({"vocab_size": 10**400}, "vocab_size is"),
    ],
)
def test_refuse_absurd_sizes_names_the_key_and_the_limit(content: dict[str, Any], words: str) -> None:
    """The message names the file and the value."""
    with pytest.raises(CheckpointError) as caught:
        refuse_absurd_sizes(content, PATH)
    assert caught.value.message.startswith(f"config.json: {words}")


def test_refuse_absurd_sizes_lets_every_default_config_pass() -> None:
    """No architecture transformers knows is refused for its own defaults."""
    looked_at = 0
    for model_type in CONFIG_MAPPING:
        try:
            content = json.loads(CONFIG_MAPPING[model_type]().to_json_string())
        except (StrictDataclassError, ImportError, ValueError, TypeError, AttributeError):
            continue  # a config without defaults, or one that needs a package: nothing to look at
        refuse_absurd_sizes(content, Path(model_type))
        looked_at += 1
    assert looked_at > 100


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"size": {"height": 2**40, "width": 2**40}}, "size."),
        ({"size": 10**5}, "size is 100000"),
        ({"crop_size": {"height": 32, "width": 10**400}}, "crop_size.width"),
        ({"image_processor": {"size": {"shortest_edge": 10**5}}}, "image_processor.size.shortest_edge"),
        ({"size": {"shortest_edge": 3136, "longest_edge": 10**9}}, "size.longest_edge"),
        ({"feature_size": 2**31}, "feature_size is 2147483648"),
        ({"chunk_length": 10**9}, "chunk_length is 1000000000"),
    ],
)
def test_absurd_size_of_a_processor_is_refused(tmp_path: Path, content: dict[str, Any], words: str) -> None:
    """Images and filter banks of this size would fill the memory."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        check_config_files(tmp_path)
    assert f"preprocessor_config.json: {words}" in caught.value.message


@pytest.mark.parametrize(
    "content",
    [
        {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "max_pixels": 12845056},
        {"feature_size": 128, "n_samples": 480000, "nb_max_frames": 3000, "chunk_length": 30, "n_fft": 400},
        {"size": {"height": 2560, "width": 1920}, "crop_size": 224},
        [],
    ],
)
def test_sizes_of_known_processors_pass(tmp_path: Path, content: object) -> None:
    """Qwen3-VL, Whisper, Donut; a damaged file is for the library to name."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text("{")
    check_config_files(tmp_path)
