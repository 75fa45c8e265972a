"""Cache layers for transformers with the same code at every length, so that one trace serves all lengths.

transformers' own layers branch in Python on the number of cached tokens: a trace would fix the branch. Returned values
and stored states are the same. Import only to build a cache: this module loads transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from winml.modelkit.models.caches.layout import StateKind

EMPTY_LAYER = "DummyLayer"
"""Name of the layer class that keeps nothing."""
Tensors = Mapping[tuple[StateKind, int | None], torch.Tensor]
"""(kind, index) of each state → its tensor."""


# Typed Any: the declarations of these classes contradict each other, so that no class could derive from two of them.
_Attention: Any = DynamicLayer
_Indexed: Any = DynamicIndexedLayer
_Recurrent: Any = LinearAttentionLayer
# Since transformers 5.21, an empty layer has its own class; before, it is an empty layer of another class.
_Empty: Any = getattr(cache_utils, EMPTY_LAYER, DynamicLayer)


_ATTENDED_ATTRIBUTES: Mapping[StateKind, str] = {"key": "keys", "value": "values", "indexer": "indexer_keys"}
_RECURRENT_ATTRIBUTES: Mapping[StateKind, str] = {"conv": "conv_states", "recurrent": "recurrent_states"}
"""Kind of state → attribute of a layer; a recurrent layer may hold several states of a kind."""


class TracedAttentionLayer(_Attention):  # type: ignore[misc]
    """Keys and values of all tokens; also for a sliding window if the mask hides tokens beyond the window.

    A cache of one length serves readers with a single number of past tokens.
    """

    def __init__(self, tensors: Tensors) -> None:
        """Hold the keys and values of the tokens before this run, each of shape [batch, heads, tokens, head size]."""
        super().__init__()
        self.hold_attended(tensors)

    def hold_attended(self, tensors: Tensors) -> None:
        """Set keys and values."""
        self.keys, self.values = tensors["key", None], tensors["value", None]
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.is_initialized = True


class DroppingLayer(TracedAttentionLayer):
    """Keys and values of all tokens; the forward receives only the tokens that transformers' own layer still holds.

    Serves forwards with a mask that hides nothing: only the cache hides tokens beyond the window, by dropping them.
    """

    def __init__(self, tensors: Tensors, window: int) -> None:
        """Hold the keys and values before this run; the last ``window - 1`` are visible."""
        super().__init__(tensors)
        self._window = window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values of this run; return the visible cached tokens followed by the new tokens."""
        visible = [self._visible_part(past) for past in (self.keys, self.values)]
        super().update(key_states, value_states)
        return torch.cat([visible[0], key_states], dim=-2), torch.cat([visible[1], value_states], dim=-2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys for the forward and the number of keys before; both stay dynamic in a trace."""
        visible_count: int = self._visible_part(self.keys).shape[-2]
        return visible_count + query_length, self.get_seq_length() - visible_count

    def _visible_part(self, past: torch.Tensor) -> torch.Tensor:
        return past[:, :, 1 - self._window :]


class _TracedIndexedLayer(TracedAttentionLayer, _Indexed):  # type: ignore[misc]
    """Keys and values of all tokens, and the indexer keys by which a layer selects the tokens it attends to."""

    def __init__(self, tensors: Tensors) -> None:
        """Hold keys and values, and the indexer keys of shape [batch, tokens, head size]."""
        DynamicIndexedLayer.__init__(self)
        self.hold_attended(tensors)
        if ("indexer", None) in tensors:
            self.indexer_keys = tensors["indexer", None]
            self.is_indexer_initialized = True


class TracedRecurrentLayer(_Recurrent):  # type: ignore[misc]
    """States of convolutions and recurrences; zero before the first token."""

    def __init__(self, tensors: Tensors) -> None:
        """Hold the states after the previous run."""
        super().__init__(number_of_states=_state_count(tensors))
        self.hold_states(tensors)

    def hold_states(self, tensors: Tensors) -> None:
        """Set the states."""
        for (kind, index), value in tensors.items():
            position = index or 0
            if kind == "conv":
                self.conv_states[position] = value
                self.conv_kernel_size[position] = value.shape[-1]
                self.is_conv_states_initialized[position] = True
            elif kind == "recurrent":
                self.recurrent_states[position] = value
                self.is_recurrent_states_initialized[position] = True
            self.has_previous_state[position] = True
            self.device, self.dtype = value.device, value.dtype

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **_options: object) -> torch.Tensor:
        """Return the stored and the new columns; store as many of the last columns as before."""
        stored_columns = self.conv_states[state_idx]
        columns = torch.cat([stored_columns, conv_states], dim=-1)
        self.conv_states[state_idx] = columns[..., -stored_columns.shape[-1] :]
        return columns

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **_options: object
    ) -> torch.Tensor:
        """Store a recurrent state and return it."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class _TracedHybridLayer(TracedRecurrentLayer, TracedAttentionLayer):
    """Recurrent states and attended keys and values in one layer."""

    is_compileable = False

    def __init__(self, tensors: Tensors) -> None:
        """Hold keys, values and recurrent states."""
        DynamicLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=_state_count(tensors))
        self.hold_states({key: value for key, value in tensors.items() if key[0] in ("conv", "recurrent")})
        self.hold_attended(tensors)


class EmptyLayer(_Empty):  # type: ignore[misc]
    """Layer without states, such as a layer with attention to keys of an earlier layer."""

    def __init__(self, tensors: Tensors) -> None:
        """Start with an empty cache."""
        assert not tensors  # it keeps none
        super().__init__()
        self.is_initialized = False


class PromptCache(DynamicCache):
    """A cache that reports itself as empty: a forward then treats every run like a prompt.

    Forwards read the token types in the prompt only. The token types of a graph are neutral in every later run.
    """

    @property
    def is_initialized(self) -> bool:
        """Return False: no previous run."""
        return False


LAYER_CLASSES: Mapping[type, type] = {
    DynamicLayer: TracedAttentionLayer,
    DynamicIndexedLayer: _TracedIndexedLayer,
    DynamicSlidingWindowLayer: TracedAttentionLayer,
    LinearAttentionLayer: TracedRecurrentLayer,
    LinearAttentionAndFullAttentionLayer: _TracedHybridLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: _TracedHybridLayer,
    **({} if _Empty is DynamicLayer else {_Empty: EmptyLayer}),
}
"""Layer of transformers → its replacement in a graph.

Derived classes are not included: their additions would be lost.
"""


def layer_tensors(layer: Any) -> dict[tuple[StateKind, int | None], torch.Tensor]:
    """Return the states of a layer, by kind and index; `{}` for a layer that was not run."""
    tensors: dict[tuple[StateKind, int | None], torch.Tensor] = {}
    for kind, name in _ATTENDED_ATTRIBUTES.items():
        value = getattr(layer, name, None)
        if isinstance(value, torch.Tensor):
            tensors[kind, None] = value
    for kind, name in _RECURRENT_ATTRIBUTES.items():
        states = {index: value for index, value in getattr(layer, name, {}).items() if value is not None}
        tensors |= {(kind, None if layer.number_of_states == 1 else index): value for index, value in states.items()}
    return tensors


def _state_count(tensors: Tensors) -> int:
    return max((index or 0 for _, index in tensors), default=0) + 1
