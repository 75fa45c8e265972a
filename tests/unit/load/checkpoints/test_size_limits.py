"""Sizes that no model has are refused before anything is built from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from winml.modelkit.errors import CheckpointError
from winml.modelkit.graph.files.foreign_numbers import refuse_absurd_sizes

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
    """The message says which value of which file."""
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
