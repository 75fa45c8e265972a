"""The records of a cache: which tensors a model stores between two runs, and their names in its graph.

Names are those other readers of such graphs expect: ``past_key_values.N.key`` becomes ``present.N.key`` in optimum,
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
from winml.modelkit.onnx.specs import CacheSlot

EMBEDDED = "inputs_embeds"
"""Specified by transformers: the input that takes the vectors of tokens, in place of the tokens."""
StateKind = Literal["key", "value", "indexer", "conv", "recurrent"]
Side = Literal["encoder", "decoder"]

Way = tuple[str | int, ...]
"""Attributes, keys and positions that lead to a tensor inside a cache."""

_TOKEN_AXES: Mapping[str, int] = {"key": 2, "value": 2, "indexer": 1}
"""Kind that holds one entry for every token → the axis that counts them."""


@dataclass(frozen=True)
class CacheState:
    """One tensor of the cache."""

    layer: int
    """Position in the cache, from 0."""
    kind: StateKind
    sizes: tuple[int, ...]
    """Sizes but for the batch, which comes first, and the tokens: of keys and values those of heads and head."""
    dtype: str
    window: int | None = None
    """How many of the last tokens are ever attended to, where a layer does not see all of them."""
    index: int | None = None
    """Which of several states of this kind in the layer; None where there is one."""
    side: Side | None = None
    """Of an encoder-decoder: whose tokens it holds an entry for."""
    value_range: tuple[float, float] | None = None
    """Valid values, where not every value is."""

    @property
    def token_axis(self) -> int | None:
        """Which axis counts the tokens; None where its size is always the same."""
        return _TOKEN_AXES.get(self.kind)

    @property
    def grows(self) -> bool:
        """Whether it holds one entry for every token."""
        return self.token_axis is not None

    @property
    def input(self) -> str:
        """Name of the input that takes it."""
        return f"past_key_values.{self._slot_name}" if self.grows else f"past_{self._place}"

    @property
    def output(self) -> str:
        """Name of the output that becomes it in the next run."""
        return f"present.{self._slot_name}" if self.grows else f"present_{self._place}"

    @property
    def slot(self) -> CacheSlot:
        """What the file says of the input."""
        return CacheSlot(layer=self.layer, kind=self.kind, window=self.window, side=self.side)

    @property
    def _slot_name(self) -> str:
        return ".".join([str(self.layer), *([self.side] if self.side else []), self.kind])

    @property
    def _place(self) -> str:
        return f"{self.kind}.{self.layer}" + ("" if self.index is None else f".{self.index}")

    def shape(self, batch: int, tokens: int) -> tuple[int, ...]:
        """Return its shape with so many rows, after so many tokens."""
        sizes = [batch, *self.sizes]
        if self.token_axis is not None:
            sizes.insert(self.token_axis, tokens)
        return tuple(sizes)


@dataclass(frozen=True)
class ModuleState:
    """One attribute that a module keeps."""

    path: str
    """Of the module."""
    attribute: str
    class_name: str
    """Of the module."""
    state: CacheState


@dataclass(frozen=True)
class CacheLayout:
    """The cache of a model."""

    argument: str
    """Parameter of the forward that takes it, such as ``cache``; see :func:`argument_of`."""
    layer_classes: tuple[str, ...]
    """Class of every layer of the cache, in order; a layer may hold no state."""
    states: tuple[CacheState, ...]
    """At least one, in the order in which they are inputs."""
    template: Any = field(default=None, compare=False, repr=False)
    """A cache of a class that is not transformers' own, after a run on shapes; None for one of layers alone."""
    held: tuple[tuple[Way, CacheState], ...] = ()
    """Which tensors of the template are states."""
    of_modules: tuple[ModuleState, ...] = ()
    """Which states are attributes of modules."""
    is_of_one_row: bool = False
    """Whether the forward mixes up the rows, where it reads one token of several."""
    is_masked: bool = True
    """Whether the forward takes a mask over the tokens in the cache and those of a run."""
    dropping_windows: frozenset[int] = frozenset()
    """Windows of layers of which what is beyond is out of sight only since the cache drops it: no mask hides it."""

    @property
    def grows(self) -> bool:
        """Whether some layer holds one entry for every token."""
        return any(state.grows for state in self.states)

    @property
    def side(self) -> Side | None:
        """Of an encoder-decoder: whose tokens it holds entries for."""
        return self.states[0].side

    @property
    def is_recurrent(self) -> bool:
        """Whether some state is computed from token to token, so that a graph reads one of them in each run."""
        return any(state.kind == "recurrent" for state in self.states)

    def feeds_to(self, part: str) -> tuple[PartFeed, ...]:
        """Return which outputs become which inputs of a part; of the graph itself, in its next run."""
        return tuple(PartFeed(state.output, part, state.input) for state in self.states)

    @property
    def words(self) -> str:
        """What it holds, for people: ``2 layers, key and value``."""
        kinds = list(dict.fromkeys(state.kind for state in self.states))
        layers = len({state.layer for state in self.states})
        listed = " and ".join(filter(None, [", ".join(kinds[:-1]), *kinds[-1:]]))
        return f"{layers} layer{'' if layers == 1 else 's'}, {listed}"

    def class_of(self, layer: int) -> str:
        """Return the class that keeps the states of a layer."""
        for item in self.of_modules:
            if item.state.layer == layer:
                return item.class_name
        is_held = any(state.layer == layer for _, state in self.held)
        return type(self.template).__name__ if is_held else self.layer_classes[layer]


@dataclass(frozen=True)
class EncoderDecoderLayout:
    """What an encoder-decoder keeps: of the decoder's own tokens, and of what the encoder answered."""

    own: CacheLayout
    """Grows with every token."""
    cross: CacheLayout
    """Is computed once for each text."""
    hidden_size: int
    """Of what the encoder answers for each of its tokens."""
    encoder_length: int
    """How many entries it answered on inputs of the sizes that were tried."""
    answer_class: Callable[..., Any]
    """Makes a record of what the encoder answers, such as transformers' ``BaseModelOutput``."""
    mask_dtype: str | None = None
    """Element type of the mask that this record holds beside the states; None: the decoder reads the encoder's mask."""

    @property
    def both(self) -> CacheLayout:
        """The states of both, for a graph that feeds both to itself."""
        return replace(self.own, states=(*self.own.states, *self.cross.states))


CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Specified by transformers: arguments of a forward, and fields of its result, that hold the cache, the newest first.

``cache`` is the name since transformers 5.24. The forward of a checkpoint with code of its own may have an older name
than the installed version, which then renames the field of its result. So no version is asked for: names are looked up
in the signature, the result and the generation loop. Names of graph inputs (``past_key_values.N.key``) do not depend on
it."""


def cache_argument(names: Collection[str]) -> str | None:
    """Return which of the names of a cache is among parameters or fields; None: none is."""
    return next((name for name in CACHE_ARGUMENTS if name in names), None)


def argument_of(field: str, parameters: Collection[str]) -> str | None:
    """Return the parameter of a forward that takes what its result has in a field; None: none does."""
    if field in parameters:
        return field
    return cache_argument(parameters) if field in CACHE_ARGUMENTS else None


def cache_field(outputs: Mapping[str, Any], argument: str) -> str:
    """Return the field of a result that an argument of the next call takes; see :func:`argument_of`."""
    # A list: records of transformers warn where they are asked for an older name.
    fields = list(outputs)
    return argument if argument in fields else cache_argument(fields) or argument


@functools.cache
def loop_cache_name() -> str:
    """Return what the generation loop of the installed transformers calls a cache, and its records do."""
    from transformers import GenerationMixin

    name = cache_argument(inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters)
    assert name is not None
    return name
