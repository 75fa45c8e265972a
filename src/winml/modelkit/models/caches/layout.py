"""Records of a cache: the tensors that a model stores between two runs, and their names in its graph.

Names follow other readers of such graphs: ``past_key_values.N.key`` becomes ``present.N.key`` in optimum,
transformers.js and onnxruntime-genai, ``past_conv.N`` becomes ``present_conv.N`` in transformers.js. Imports neither
torch nor transformers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from winml.modelkit.onnx.bundle import PartFeed
from winml.modelkit.onnx.specs import PAST_PREFIX, PRESENT_PREFIX, CacheSlot

EMBEDDED = "inputs_embeds"
"""Specified by transformers: input that takes the embeddings of tokens instead of the tokens."""
StateKind = Literal["key", "value", "indexer", "conv", "recurrent"]
Side = Literal["encoder", "decoder"]

AccessPath = tuple[str | int, ...]
"""Access path of a tensor inside a cache: attributes, keys and positions."""

_TOKEN_AXES: Mapping[str, int] = {"key": 2, "value": 2, "indexer": 1}
"""Kind of state with one entry per token → its token axis."""


@dataclass(frozen=True)
class CacheState:
    """One tensor of the cache."""

    layer: int
    """Position in the cache, from 0."""
    kind: StateKind
    sizes: tuple[int, ...]
    """Sizes without the batch, which comes first, and the tokens; for keys and values: heads and head size."""
    dtype: str
    window: int | None = None
    """Number of last tokens a layer with a sliding window attends to; `None`: all tokens."""
    index: int | None = None
    """Number among several states of this kind in the layer; `None` for a single state."""
    side: Side | None = None
    """Side of an encoder-decoder: the state has entries for the tokens of this side."""
    value_range: tuple[float, float] | None = None
    """Range of valid values; `None`: any value."""

    @property
    def token_axis(self) -> int | None:
        """Axis that counts the tokens; `None` if the size is constant."""
        return _TOKEN_AXES.get(self.kind)

    @property
    def grows(self) -> bool:
        """True if the tensor holds one entry per token."""
        return self.token_axis is not None

    @property
    def input(self) -> str:
        """Name of the graph input for the tensor."""
        return f"{PAST_PREFIX}{self._slot_name}" if self.grows else f"past_{self._indexed_name}"

    @property
    def output(self) -> str:
        """Name of the graph output that is the tensor of the next run."""
        return f"{PRESENT_PREFIX}{self._slot_name}" if self.grows else f"present_{self._indexed_name}"

    @property
    def slot(self) -> CacheSlot:
        """Metadata of the graph input."""
        return CacheSlot(layer=self.layer, kind=self.kind, window=self.window, side=self.side)

    @property
    def _slot_name(self) -> str:
        return ".".join([str(self.layer), *([self.side] if self.side else []), self.kind])

    @property
    def _indexed_name(self) -> str:
        return f"{self.kind}.{self.layer}" + ("" if self.index is None else f".{self.index}")

    def shape(self, batch: int, tokens: int) -> tuple[int, ...]:
        """Return the shape for a number of rows after a number of tokens."""
        sizes = [batch, *self.sizes]
        if self.token_axis is not None:
            sizes.insert(self.token_axis, tokens)
        return tuple(sizes)


@dataclass(frozen=True)
class ModuleState:
    """State kept as an attribute of a module."""

    path: str
    """Path of the module."""
    attribute: str
    class_name: str
    """Class of the module."""
    state: CacheState


@dataclass(frozen=True)
class CacheLayout:
    """The cache of a model."""

    argument: str
    """Parameter of the forward that takes the cache, such as ``cache``; see :func:`argument_of`."""
    layer_classes: tuple[str, ...]
    """Class of every layer of the cache, in order; a layer may hold no state."""
    states: tuple[CacheState, ...]
    """States (at least one), in the order of the inputs."""
    template: Any = field(default=None, compare=False, repr=False)
    """Instance of a custom cache class after a run on shapes; `None` for a cache of transformers' layers alone."""
    held: tuple[tuple[AccessPath, CacheState], ...] = ()
    """Tensors of the template that are states, with their access paths."""
    of_modules: tuple[ModuleState, ...] = ()
    """States that are attributes of modules."""
    is_of_one_row: bool = False
    """True if the forward mixes the rows when it reads one token of several rows."""
    is_masked: bool = True
    """True if the forward takes a mask over cached and new tokens."""
    dropping_windows: frozenset[int] = frozenset()
    """Windows enforced only by dropping tokens from the cache: no mask hides the tokens beyond them."""

    @property
    def grows(self) -> bool:
        """True if a state holds one entry per token."""
        return any(state.grows for state in self.states)

    @property
    def side(self) -> Side | None:
        """Side of an encoder-decoder: the cache has entries for the tokens of this side."""
        return self.states[0].side

    @property
    def is_recurrent(self) -> bool:
        """True if a state is computed from token to token, so that a graph reads one token per run."""
        return any(state.kind == "recurrent" for state in self.states)

    def feeds_to(self, part: str) -> tuple[PartFeed, ...]:
        """Return the connections of outputs to inputs of a part, or of the graph itself in its next run."""
        return tuple(PartFeed(state.output, part, state.input) for state in self.states)

    @property
    def words(self) -> str:
        """Text for reports: ``2 layers, key and value``."""
        kinds = list(dict.fromkeys(state.kind for state in self.states))
        layers = len({state.layer for state in self.states})
        listed = " and ".join(filter(None, [", ".join(kinds[:-1]), *kinds[-1:]]))
        return f"{layers} layer{'' if layers == 1 else 's'}, {listed}"

    def class_of(self, layer: int) -> str:
        """Return the name of the class that keeps the states of a layer."""
        for module_state in self.of_modules:
            if module_state.state.layer == layer:
                return module_state.class_name
        is_held = any(state.layer == layer for _, state in self.held)
        return type(self.template).__name__ if is_held else self.layer_classes[layer]


@dataclass(frozen=True)
class EncoderDecoderLayout:
    """Caches of an encoder-decoder: for the decoder's own tokens, and for the encoder's hidden states."""

    own: CacheLayout
    """Self-attention cache; grows with every token."""
    cross: CacheLayout
    """Cross-attention cache; computed once per text."""
    hidden_size: int
    """Size of the encoder's hidden state per token."""
    encoder_length: int
    """Number of encoder tokens in the run on shapes."""
    answer_class: Callable[..., Any]
    """Class of the encoder's output record, such as transformers' ``BaseModelOutput``."""
    mask_dtype: str | None = None
    """Element type of the mask in this record beside the states; `None`: the decoder reads the encoder's mask."""

    @property
    def both(self) -> CacheLayout:
        """Self-attention and cross-attention states, for a graph that feeds both caches to itself."""
        return replace(self.own, states=(*self.own.states, *self.cross.states))


CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Specified by transformers: arguments of a forward, and fields of its result, that hold the cache, newest first.

``cache`` is the name since transformers 5.24. The forward of a checkpoint with its own code may have an older name
than the installed version, which then renames the field of its result. So no version is checked: names are looked up
in the signature, the result and the generation loop. Names of graph inputs (``past_key_values.N.key``) do not depend on
the name of the argument.
"""


def cache_argument(names: Collection[str]) -> str | None:
    """Return the first cache name among parameters or fields; `None` without a match."""
    return next((name for name in CACHE_ARGUMENTS if name in names), None)


def argument_of(field: str, parameters: Collection[str]) -> str | None:
    """Return the parameter of a forward that takes a field of its result; `None` without a match."""
    if field in parameters:
        return field
    return cache_argument(parameters) if field in CACHE_ARGUMENTS else None


def cache_field(outputs: Mapping[str, Any], argument: str) -> str:
    """Return the field of a result that an argument of the next call takes; see :func:`argument_of`."""
    # A list, because records of transformers warn when an older name is looked up.
    fields = list(outputs)
    return argument if argument in fields else cache_argument(fields) or argument


@functools.cache
def loop_cache_name() -> str:
    """Return the name of the cache in the generation loop and the records of the installed transformers."""
    from transformers import GenerationMixin

    name = cache_argument(inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters)
    assert name is not None
    return name
