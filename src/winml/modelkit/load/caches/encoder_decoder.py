"""Which caches does an encoder-decoder keep? Found by running its forward once, on shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.load.caches.arguments import DECODER_TOKENS
from winml.modelkit.load.caches.finding import RUN_ROWS, RUN_TOKENS, cache_refusal, layout_of
from winml.modelkit.load.caches.layout import EncoderDecoderLayout
from winml.modelkit.load.inputs.shape_run import run_on_shapes

__all__ = ["ENCODER_ANSWER", "find_encoder_decoder", "layout_of_both"]

ENCODER_ANSWER = "encoder_last_hidden_state"
"""Specified: how transformers calls what the encoder answered in the result of the whole."""


def find_encoder_decoder(
    model: torch.nn.Module, inputs: tuple[InputTensorSpec, ...], keywords: Mapping[str, Any]
) -> EncoderDecoderLayout | str:
    """Return what an encoder-decoder keeps, or as a clause why it cannot be divided.

    Args:
        model: The model; its parameters may be on the ``meta`` device.
        inputs: What its forward takes without a cache, of fixed sizes.
        keywords: Further arguments of the forward, among them the one that asks for a cache.

    Raises:
        UsageError: a cache is of a kind that no graph can take; names layer and class.
    """
    name = type(model).__name__
    specs = {spec.name: spec.model_copy(update={"shape": (RUN_ROWS, *spec.shape[1:])}) for spec in inputs}
    specs[DECODER_TOKENS] = specs[DECODER_TOKENS].model_copy(update={"shape": (RUN_ROWS, RUN_TOKENS)})
    outputs = run_on_shapes(lambda **tensors: model(**tensors, **keywords), specs)
    if not isinstance(outputs, Mapping):
        return f"{name} does not run with one"
    return layout_of_both(name, outputs)


def layout_of_both(name: str, outputs: Mapping[str, Any]) -> EncoderDecoderLayout | str:
    """Return what an encoder-decoder keeps, as its outputs hold it, or as a clause why it cannot be divided.

    Args:
        name: Of the model, for messages.
        outputs: Of a run on shapes, with :data:`~winml.modelkit.load.caches.finding.RUN_ROWS` rows and
            :data:`~winml.modelkit.load.caches.finding.RUN_TOKENS` tokens.

    Raises:
        UsageError: a cache is of a kind that no graph can take; names layer and class.
    """
    from transformers.cache_utils import EncoderDecoderCache

    found = ((key, value) for key, value in outputs.items() if isinstance(value, EncoderDecoderCache))
    argument, cache = next(found, ("", None))
    encoded = outputs.get(ENCODER_ANSWER)
    if cache is None or not isinstance(encoded, torch.Tensor) or encoded.dim() != 3:
        return f"{name} keeps none of what its encoder answers"
    length, hidden_size = encoded.shape[1:]
    own = layout_of(name, argument, cache.self_attention_cache, side="decoder")
    cross = layout_of(name, argument, cache.cross_attention_cache, tokens=length, side="encoder")
    if own is None or cross is None:
        raise cache_refusal(name, f"{argument} stays empty")
    return EncoderDecoderLayout(own, cross, int(hidden_size), int(length))
