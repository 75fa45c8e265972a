"""How do the flat tensors of a graph become the cache a forward takes, and the cache it returns outputs?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from winml.modelkit.load.caches.held_states import held_tensors, with_tensors
from winml.modelkit.load.caches.layout import CacheLayout
from winml.modelkit.load.inputs.nested_arguments import NestedArguments

__all__ = ["arguments_with_cache", "empty_states"]


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
    held = {state for _, state in layout.held}
    layers = [
        classes[name](
            {place: tensors[item.input] for place, item in layout.states_of(layer).items() if item not in held}
        )
        for layer, name in enumerate(layout.layer_classes)
    ]
    if layout.template is not None:
        return with_tensors(layout.template, {way: tensors[state.input] for way, state in layout.held}, layers)
    cache = DynamicCache()
    cache.layers = layers
    return cache


def _states_of(layout: CacheLayout, cache: Any) -> dict[str, torch.Tensor]:
    """Return the states of a cache by the names of the outputs."""
    from winml.modelkit.load.caches.traced_layers import layer_tensors

    if layout.template is not None:
        tensors = held_tensors(cache)
        found = {state: tensors[way] for way, state in layout.held}
    else:
        found = {}
    layers = [layer_tensors(layer) for layer in getattr(cache, "layers", ())]
    return {
        state.output: found[state] if state in found else layers[state.layer][state.kind, state.index]
        for state in layout.states
    }
