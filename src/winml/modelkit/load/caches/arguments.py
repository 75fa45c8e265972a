"""How do the flat tensors of a graph become the cache a forward takes, and the cache it returns outputs?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from winml.modelkit.load.caches.layout import CacheLayout, EncoderDecoderLayout
from winml.modelkit.load.inputs.nested_arguments import NestedArguments

__all__ = [
    "DECODER_TOKENS",
    "ENCODER_MASK",
    "TOKENS",
    "arguments_with_cache",
    "decoder_arguments",
    "empty_states",
    "encoder_arguments",
]

DECODER_TOKENS, _MASK = "decoder_input_ids", "attention_mask"
"""Specified: how encoder-decoders of transformers call the tokens of the decoder, and the mask over the encoder's."""
TOKENS, ENCODER_MASK = "input_ids", "encoder_attention_mask"
"""Specified: what other readers of a graph of the decoder call these."""


def arguments_with_cache(layout: CacheLayout, names: Sequence[str]) -> NestedArguments:
    """Return how inputs become the arguments of a forward with a cache, and its result outputs.

    Args:
        layout: The cache.
        names: Names of the other inputs, each an argument.
    """

    def build(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {**{name: tensors[name] for name in names}, layout.argument: _cache_of(layout, tensors)}

    def results(outputs: Any) -> dict[str, Any]:
        kept = {name: value for name, value in outputs.items() if name != layout.argument}
        return {**kept, **_states_of(layout, outputs[layout.argument])}

    return NestedArguments((*names, layout.argument), {}, build, results)


def encoder_arguments(layout: EncoderDecoderLayout, names: Sequence[str], start: int) -> NestedArguments:
    """Return how the inputs of an encoder become the arguments of the whole forward, and its result its outputs.

    The decoder runs on one token, for the keys and values that it computes from what the encoder answers. Nothing else
    that it computes is an output, so nothing else of it is left in the graph.

    Args:
        layout: What the model keeps.
        names: Names of the inputs, each an argument.
        start: A token of the decoder.
    """

    def build(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        first = tensors[names[0]]
        tokens = torch.full((first.shape[0], 1), start, dtype=torch.int64, device=first.device)
        return {**{name: tensors[name] for name in names}, DECODER_TOKENS: tokens}

    def results(outputs: Any) -> dict[str, Any]:
        cross = outputs[layout.cross.argument].cross_attention_cache
        return {"last_hidden_state": outputs["encoder_last_hidden_state"], **_states_of(layout.cross, cross)}

    return NestedArguments((*names, DECODER_TOKENS), {}, build, results)


def decoder_arguments(layout: EncoderDecoderLayout, *, has_mask: bool) -> NestedArguments:
    """Return how the inputs of a decoder become the arguments of the whole forward, and its result its outputs.

    What the encoder answered is given with its sizes alone: the keys and values from it are in the cache.

    Args:
        layout: What the model keeps.
        has_mask: Whether the forward takes a mask over the tokens of the encoder.
    """

    def build(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        from transformers.modeling_outputs import BaseModelOutput

        keys = tensors[layout.cross.states[0].input]
        hidden = keys.new_zeros((1, 1, layout.hidden_size)).expand(keys.shape[0], keys.shape[2], layout.hidden_size)
        mask = {_MASK: tensors[ENCODER_MASK]} if has_mask else {}
        return {
            **mask,
            DECODER_TOKENS: tensors[TOKENS],
            "encoder_outputs": BaseModelOutput(last_hidden_state=hidden),
            layout.own.argument: _both_caches(layout, tensors),
        }

    def results(outputs: Any) -> dict[str, Any]:
        own = outputs[layout.own.argument].self_attention_cache
        return {"logits": outputs["logits"], **_states_of(layout.own, own)}

    names = (*([_MASK] if has_mask else []), DECODER_TOKENS, "encoder_outputs", layout.own.argument)
    return NestedArguments(names, {}, build, results)


def empty_states(layout: CacheLayout, batch: int) -> dict[str, torch.Tensor]:
    """Return the cache before the first token: no keys and values, and states of zero; by the names of the inputs."""
    return {
        state.input: torch.zeros(state.shape(batch, 0), dtype=getattr(torch, state.dtype)) for state in layout.states
    }


def _cache_of(layout: CacheLayout, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return a new cache that holds these tensors."""
    from transformers.cache_utils import DynamicCache

    from winml.modelkit.load.caches.traced_layers import EMPTY_LAYER, LAYER_CLASSES, EmptyLayer

    classes = {EMPTY_LAYER: EmptyLayer, **{item.__name__: traced for item, traced in LAYER_CLASSES.items()}}
    cache = DynamicCache()
    cache.layers = [
        classes[name]({place: tensors[state.input] for place, state in layout.states_of(layer).items()})
        for layer, name in enumerate(layout.layer_classes)
    ]
    return cache


def _both_caches(layout: EncoderDecoderLayout, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return a new cache of an encoder-decoder that holds these tensors."""
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    cache: Any = EncoderDecoderCache(DynamicCache(), DynamicCache())
    cache.self_attention_cache = _cache_of(layout.own, tensors)
    cache.cross_attention_cache = _cache_of(layout.cross, tensors)
    # Else asked of sizes, which a trace would keep.
    cache.is_updated = dict.fromkeys(range(len(layout.cross.layer_classes)), True)
    return cache


def _states_of(layout: CacheLayout, cache: Any) -> dict[str, torch.Tensor]:
    """Return the states of a cache by the names of the outputs."""
    from winml.modelkit.load.caches.traced_layers import layer_tensors

    held = [layer_tensors(layer) for layer in cache.layers]
    return {state.output: held[state.layer][state.kind, state.index] for state in layout.states}
