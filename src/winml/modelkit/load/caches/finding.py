"""Which cache does a model keep? Found by running its forward once, on shapes alone.

What the forward returns says it: the parameter that takes the cache again, its layers and their tensors. No model is
known by name. A cache that cannot be flattened is refused with the layer and the class that stop it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from winml.modelkit.errors import UsageError
from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.load.caches.layout import EMBEDDED, CacheLayout, CacheState, Side
from winml.modelkit.load.inputs.shape_run import run_on_shapes

__all__ = ["NO_CACHE_HINT", "RUN_ROWS", "RUN_TOKENS", "cache_refusal", "find_cache", "layout_of"]

NO_CACHE_HINT = "--no-cache writes the graph that reads all tokens in every run."

RUN_ROWS, RUN_TOKENS = 2, 3
"""Chosen: the smallest sizes that are neither 1 nor equal."""


def find_cache(
    model: torch.nn.Module, inputs: tuple[InputTensorSpec, ...], keywords: Mapping[str, Any]
) -> CacheLayout | str:
    """Return the cache that a model keeps, or as a clause why there is none.

    Args:
        model: The model; its parameters may be on the ``meta`` device.
        inputs: What its forward takes without a cache.
        keywords: Further arguments of the forward, among them the one that asks for a cache.

    Raises:
        UsageError: the cache is of a kind that no graph can take; names layer and class.
    """
    name = type(model).__name__
    others = [spec.name for spec in inputs if spec.name != EMBEDDED and (len(spec.shape), spec.dtype) != (2, "int64")]
    if others:
        return f"{name} takes {others[0]} beside tokens"
    parameters = inspect.signature(model.forward).parameters
    specs = {spec.name: spec.model_copy(update={"shape": (RUN_ROWS, RUN_TOKENS, *spec.shape[2:])}) for spec in inputs}
    outputs = run_on_shapes(lambda **tensors: model(**tensors, **keywords), specs)
    if outputs is None:
        return f"{name} does not run with one"
    if not isinstance(outputs, Mapping):
        return f"{name} returns no names"
    from transformers.cache_utils import Cache

    for argument, value in outputs.items():
        if argument not in parameters or value is None or isinstance(value, torch.Tensor):
            continue
        if not isinstance(value, Cache):
            raise cache_refusal(name, f"{argument} is a {type(value).__name__}")
        return layout_of(name, argument, value) or f"the cache of {name} stays empty"
    return f"{name} returns none"


def layout_of(
    model_name: str, argument: str, cache: Any, *, tokens: int = RUN_TOKENS, side: Side | None = None
) -> CacheLayout | None:
    """Return the layout of a cache after one run; None where it holds nothing.

    Args:
        model_name: Whose it is, for messages.
        argument: Parameter of the forward that takes it.
        cache: What the forward returned.
        tokens: How many tokens it stands for.
        side: Of an encoder-decoder: whose tokens these are.

    Raises:
        UsageError: a layer cannot be expressed.
    """
    from transformers.cache_utils import DynamicCache

    from winml.modelkit.load.caches.traced_layers import EMPTY_LAYER, LAYER_CLASSES, layer_tensors

    if type(cache) is not DynamicCache:
        raise cache_refusal(model_name, f"{argument} is a {type(cache).__name__}")
    states: list[CacheState] = []
    classes = {item: item.__name__ for item in LAYER_CLASSES}
    names: list[str] = []
    for number, layer in enumerate(cache.layers):
        tensors = layer_tensors(layer)
        if type(layer) not in classes:
            raise cache_refusal(model_name, f"layer {number} of {argument} is a {type(layer).__name__}")
        # A layer that nothing was written to keeps nothing.
        names.append(classes[type(layer)] if tensors else EMPTY_LAYER)
        window = getattr(layer, "sliding_window", None)
        for (kind, index), value in tensors.items():
            state = _state(CacheState(number, kind, (), "", window, index, side), value, tokens)
            if state is None:
                shape = list(value.shape)
                raise cache_refusal(
                    model_name, f"layer {number} of {argument} ({type(layer).__name__}) holds {kind} {shape}"
                )
            states.append(state)
    return CacheLayout(argument, tuple(names), tuple(states)) if states else None


def _state(state: CacheState, value: torch.Tensor, tokens: int) -> CacheState | None:
    """Return a state with what its tensor says; None where rows and tokens are not where every other cache has them."""
    dtype = str(value.dtype).removeprefix("torch.")
    sizes = list(value.shape)
    is_attended = state.kind in ("key", "value")
    if len(sizes) < 2 or (is_attended and len(sizes) != 4) or sizes.pop(0) != RUN_ROWS:
        return None
    if state.token_axis is not None and sizes.pop(state.token_axis - 1) != tokens:
        return None
    return replace(state, sizes=tuple(sizes), dtype=dtype, window=state.window if is_attended else None)


def cache_refusal(model_name: str, what: str) -> UsageError:
    """Return the error for a cache that cannot be flattened, which says what stops it."""
    return UsageError(f"{model_name} keeps a cache that no graph can take: {what}", hint=NO_CACHE_HINT)
