"""How does a forward read tokens after others? Found by running it once more on shapes, with a cache that holds some.

What is looked at: whether it reads several tokens at once, and whether it takes the mask as it is. Beside that, which
windows masks know, so that what these do not reach is hidden. No model is known by name.
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


_CONTRACTING = frozenset(
    {torch.matmul, torch.bmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.__matmul__, nn.functional.linear}
)
"""Functions whose answer has other columns than what they are given."""

_ALLOCATING = frozenset(getattr(torch.Tensor, f"new_{kind}") for kind in ("empty", "full", "ones", "tensor", "zeros"))
"""Functions that take nothing but dtype and device of what they are given."""


class _CacheReached(Exception):  # noqa: N818  # no error, and none of those that mean a refusal
    """A forward put keys and values into the cache."""


class MaskUse(TorchFunctionMode):
    """Sees what is done with one tensor, the mask that a forward is given, and with what is made of it.

    Whatever function does it: tensors whose last axis still counts the tokens of the mask are followed, and one of them
    is widened where only that axis becomes longer, or where it is written into a longer one.
    """

    def __init__(self) -> None:
        """Have seen nothing."""
        super().__init__()
        self.is_widened = False
        """Whether further columns are put beside its own."""
        self._followed: dict[int, torch.Tensor] = {}
        self._columns = 0

    def follow(self, mask: torch.Tensor | None) -> None:
        """Begin with a mask of shape [rows, tokens]; None: there is none."""
        self._followed = {} if mask is None else {id(mask): mask}
        self._columns = 0 if mask is None else mask.shape[-1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what is made of the mask."""
        answer = func(*args, **(kwargs or {}))
        given = [value for value in _tensors_in((args, kwargs)) if id(value) in self._followed]
        if given and func not in _CONTRACTING | _ALLOCATING:
            for made in _tensors_in((answer, _written_into(func, args, answer))):
                self.is_widened |= any(_is_wider(made, mask) for mask in given)
                if made.dim() and made.shape[-1] == self._columns:
                    # Kept, so that no other tensor gets its id.
                    self._followed[id(made)] = made
        return answer


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or in an answer."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors_in(value)
    elif isinstance(values, Mapping):
        yield from _tensors_in(list(values.values()))


def _written_into(func: Any, args: Any, answer: Any) -> torch.Tensor | None:
    """Return the tensor that a function changed by writing into it, or into a view of it; None where it did not."""
    if func is torch.Tensor.__setitem__:
        target: torch.Tensor = args[0]
        return target
    return answer._base if isinstance(answer, torch.Tensor) and args and answer is args[0] else None


def _is_wider(made: torch.Tensor, mask: torch.Tensor) -> bool:
    """Say whether a tensor is as a mask but for more columns; none is made of one column by repeating it."""
    return made.shape[:-1] == mask.shape[:-1] and 1 < mask.shape[-1] < made.shape[-1]


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
    return replace(layout, is_masked=not use.is_widened)


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
def window_masks(model: nn.Module) -> Iterator[set[int]]:
    """Collect the windows beyond which masks hide tokens, as the functions of transformers that make these are called.

    Args:
        model: Its own files may have imported them.
    """
    from transformers import masking_utils

    windows: set[int] = set()
    own = {name: getattr(masking_utils, name) for name in _OVERLAYS}

    def seen(name: str) -> Callable[..., Any]:
        def call(*args: Any, **arguments: Any) -> Any:
            # Specified: the first parameter of each is how many tokens are seen.
            windows.add(int(next(iter((*args, *arguments.values())))))
            return own[name](*args, **arguments)

        return call

    files = {sys.modules.get(type(module).__module__) for module in model.modules()}
    places = [
        (file, name) for file in (masking_utils, *files) for name in own if getattr(file, name, None) is own[name]
    ]
    try:
        for file, name in places:
            setattr(file, name, seen(name))
        yield windows
    finally:
        for file, name in places:
            setattr(file, name, own[name])
