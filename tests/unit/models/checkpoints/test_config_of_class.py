"""Config of a decoder inside the config of the whole model."""

from __future__ import annotations

import transformers

from winml.modelkit.models.checkpoints.config import CheckpointConfig, with_config_of_class


def test_decoder_gets_the_inner_config() -> None:
    """The class names the inner config; files and notes stay."""
    whole = CheckpointConfig(transformers.Llama4Config(), None, {}, ("a note",))
    alone = with_config_of_class(whole, transformers.Llama4ForCausalLM)
    assert (whole.config.text_config, whole.notes) == (alone.config, alone.notes)
    assert with_config_of_class(whole, transformers.Llama4ForConditionalGeneration) is whole


def test_class_of_the_same_config_gets_the_whole_config() -> None:
    """The config is used without a search for an inner one."""
    checkpoint = CheckpointConfig(transformers.LlamaConfig(), None, {})
    assert with_config_of_class(checkpoint, transformers.LlamaForCausalLM) is checkpoint
