"""Layers of transformers' cache whose code is the same at every length, so that it can be traced once for all of them.

transformers' own layers decide in Python by the number of tokens they hold, which a graph would keep as it was traced.
What a layer returns, and what it holds afterwards, is the same. Imported by those who build a cache only: it loads
transformers.
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
"""Name of a layer that keeps nothing."""
Tensors = Mapping[tuple[StateKind, int | None], torch.Tensor]
"""Kind and index of each state → its value."""


# Their declarations contradict each other, so that no class could derive from two of them.
_Attention: Any = DynamicLayer
_Indexed: Any = DynamicIndexedLayer
_Recurrent: Any = LinearAttentionLayer
# A layer that keeps nothing has a class of its own since transformers 5.21; before, it is an empty layer of another.
_Empty: Any = getattr(cache_utils, EMPTY_LAYER, DynamicLayer)


_ATTENDED: Mapping[StateKind, str] = {"key": "keys", "value": "values", "indexer": "indexer_keys"}
_CARRIED: Mapping[StateKind, str] = {"conv": "conv_states", "recurrent": "recurrent_states"}
"""Kind of state → attribute of a layer that holds it; of the second there may be several."""


class TracedAttentionLayer(_Attention):  # type: ignore[misc]
    """Keys and values of all tokens; of a sliding window as well, where the mask hides what the window does not reach.

    A cache of one length serves readers that know one number of past tokens only.
    """

    def __init__(self, tensors: Tensors) -> None:
        """Hold the keys and values of the tokens before this run; each is batch, heads, tokens, head."""
        super().__init__()
        self.hold_attended(tensors)

    def hold_attended(self, tensors: Tensors) -> None:
        """Take keys and values."""
        self.keys, self.values = tensors["key", None], tensors["value", None]
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.is_initialized = True


class DroppingLayer(TracedAttentionLayer):
    """Keys and values of all tokens, of which a forward is given those that transformers' own layer still holds.

    For a forward whose mask hides nothing: what a window does not reach is out of its sight since it was dropped.
    """

    def __init__(self, tensors: Tensors, window: int) -> None:
        """Hold the keys and values before this run, of which the last ``window - 1`` are seen in it."""
        super().__init__(tensors)
        self._window = window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep those of this run, and return them after those that are seen."""
        seen = [self._seen(past) for past in (self.keys, self.values)]
        super().update(key_states, value_states)
        return torch.cat([seen[0], key_states], dim=-2), torch.cat([seen[1], value_states], dim=-2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a forward is given, and how many are before them; traced, both stay open."""
        seen: int = self._seen(self.keys).shape[-2]
        return seen + query_length, self.get_seq_length() - seen

    def _seen(self, past: torch.Tensor) -> torch.Tensor:
        return past[:, :, 1 - self._window :]


class _TracedIndexedLayer(TracedAttentionLayer, _Indexed):  # type: ignore[misc]
    """Keys and values of all tokens, and the keys by which a layer chooses which of them it attends to."""

    def __init__(self, tensors: Tensors) -> None:
        """Hold keys and values, and the keys of the indexer; these are batch, tokens, head."""
        DynamicIndexedLayer.__init__(self)
        self.hold_attended(tensors)
        if ("indexer", None) in tensors:
            self.indexer_keys = tensors["indexer", None]
            self.is_indexer_initialized = True


class TracedRecurrentLayer(_Recurrent):  # type: ignore[misc]
    """States of convolutions and recurrences; before the first token they are zero."""

    def __init__(self, tensors: Tensors) -> None:
        """Hold the states after the run before this one."""
        super().__init__(number_of_states=_state_count(tensors))
        self.hold_states(tensors)

    def hold_states(self, tensors: Tensors) -> None:
        """Take the states."""
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
        """Return the columns before this run and those of it; keep as many of the last as there were."""
        retained = self.conv_states[state_idx]
        columns = torch.cat([retained, conv_states], dim=-1)
        self.conv_states[state_idx] = columns[..., -retained.shape[-1] :]
        return columns

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **_options: object
    ) -> torch.Tensor:
        """Keep a state and return it."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class _TracedHybridLayer(TracedRecurrentLayer, TracedAttentionLayer):
    """Both in one layer."""

    is_compileable = False

    def __init__(self, tensors: Tensors) -> None:
        """Hold keys, values and states."""
        DynamicLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=_state_count(tensors))
        self.hold_states({place: value for place, value in tensors.items() if place[0] in ("conv", "recurrent")})
        self.hold_attended(tensors)


class EmptyLayer(_Empty):  # type: ignore[misc]
    """A layer that keeps nothing, such as one that attends to the keys of another."""

    def __init__(self, tensors: Tensors) -> None:
        """Start with an empty cache."""
        assert not tensors  # it keeps none
        super().__init__()
        self.is_initialized = False


class PromptCache(DynamicCache):
    """A cache that says it holds nothing yet, so that a forward does what it does with a prompt.

    Forwards read what is said of the kinds of tokens in the prompt alone. A graph is told a kind that says nothing in
    every later run.
    """

    @property
    def is_initialized(self) -> bool:
        """Say that no run was before this one."""
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
"""Layer of transformers → the one that stands for it in a graph. A class derived from one of them is none of them: what
it adds would be lost."""


def layer_tensors(layer: Any) -> dict[tuple[StateKind, int | None], torch.Tensor]:
    """Return what a layer holds, by kind and index; a layer that was not run holds nothing."""
    tensors: dict[tuple[StateKind, int | None], torch.Tensor] = {}
    for kind, name in _ATTENDED.items():
        value = getattr(layer, name, None)
        if isinstance(value, torch.Tensor):
            tensors[kind, None] = value
    for kind, name in _CARRIED.items():
        states = {index: value for index, value in getattr(layer, name, {}).items() if value is not None}
        tensors |= {(kind, None if layer.number_of_states == 1 else index): value for index, value in states.items()}
    return tensors


def _state_count(tensors: Tensors) -> int:
    return max((index or 0 for _, index in tensors), default=0) + 1
