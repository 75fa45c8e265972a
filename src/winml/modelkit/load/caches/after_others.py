"""How does a forward read tokens after others? Found by running it once more on shapes, with a cache that holds some.

What is looked at: whether it reads several tokens at once, and whether it takes the mask as it is. Beside that, whether
any mask hides what a window does not reach. No model is known by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.load.caches.arguments import cache_of
from winml.modelkit.load.caches.layout import CacheLayout

__all__ = ["MASK", "MaskUse", "as_read_after", "streams_of", "window_masks"]

MASK = "attention_mask"
"""Specified by transformers: what says which tokens are no padding."""
_OVERLAYS = ("sliding_window_overlay", "chunked_overlay")
"""Specified by transformers: what makes the part of a mask that hides tokens beyond a window."""


class _CacheReached(Exception):  # noqa: N818  # no error, and none of those that mean a refusal
    """A forward put keys and values into the cache."""


class MaskUse(TorchFunctionMode):
    """Sees what is done with one tensor, the mask that a forward is given."""

    def __init__(self) -> None:
        """Have seen nothing."""
        super().__init__()
        self.mask: torch.Tensor | None = None
        self.is_joined = False
        """Whether further columns are put beside its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what is joined."""
        kwargs = kwargs or {}
        if func in (torch.cat, torch.concat):
            parts = args[0] if args else kwargs["tensors"]
            self.is_joined |= any(part is self.mask for part in parts)
        return func(*args, **kwargs)


def as_read_after(layout: CacheLayout, rows: int, past: int, run: Callable[..., Any]) -> CacheLayout | None:
    """Return a layout that says what the forward does with a mask after the tokens in the cache.

    Args:
        layout: The cache; layers of transformers' own.
        rows: Rows of a run.
        past: Tokens in the cache.
        run: Given rows, tokens, tokens in the cache, what looks at the mask and further arguments, what the forward
            returns.

    Returns:
        None where it reads one token after others and no more, so that no graph serves the prompt and the steps.
    """
    if not layout.grows:
        return layout

    def use_of_mask(tokens: int) -> MaskUse | None:
        use = MaskUse()
        try:
            outputs = run(rows, tokens, past=past, use=use, **{layout.argument: _cache_that_stops(layout, rows, past)})
        except _CacheReached:
            return use
        return None if outputs is None else use

    use = use_of_mask(1 if layout.is_recurrent else past)
    if use is None:
        # Where one token asks for values as well, what is written is compared.
        return layout if layout.is_recurrent or use_of_mask(1) is None else None
    return replace(layout, is_masked=not use.is_joined)


def _cache_that_stops(layout: CacheLayout, rows: int, past: int) -> Any:
    """Return a cache that ends a run where the first layer comes to it: masks are made before, once for all layers."""

    def stop(*_args: Any, **_arguments: Any) -> Any:
        raise _CacheReached

    states = {
        state.input: torch.empty(state.shape(rows, past), dtype=getattr(torch, state.dtype), device="meta")
        for state in layout.states
    }
    cache = cache_of(layout, states)
    for layer in cache.layers:
        layer.update = stop
    return cache


def streams_of(inputs: Sequence[InputTensorSpec]) -> Mapping[str, int]:
    """Return how many rows each input has for one row of the others: as many as there are streams of tokens."""
    fewest = min((int(spec.shape[0]) for spec in inputs), default=1)
    return {spec.name: int(spec.shape[0]) // fewest for spec in inputs}


@contextmanager
def window_masks(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of the functions of transformers that hide what a window does not reach, as they are called.

    Args:
        model: Its own files may have imported them.
    """
    from transformers import masking_utils

    called: list[str] = []
    own = {name: getattr(masking_utils, name) for name in _OVERLAYS}

    def seen(name: str) -> Callable[..., Any]:
        def call(*args: Any, **arguments: Any) -> Any:
            called.append(name)
            return own[name](*args, **arguments)

        return call

    files = {sys.modules.get(type(module).__module__) for module in model.modules()}
    places = [
        (file, name) for file in (masking_utils, *files) for name in own if getattr(file, name, None) is own[name]
    ]
    try:
        for file, name in places:
            setattr(file, name, seen(name))
        yield called
    finally:
        for file, name in places:
            setattr(file, name, own[name])
