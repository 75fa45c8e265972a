"""Inputs of a graph with a cache, and their dynamic sizes.

The inputs are tokens, a mask over cached and new tokens, positions if the forward takes them, and the tensors of the
cache. The numbers of rows, tokens and cached tokens are dynamic unless the user gives a number: one graph then serves
the prompt, with an empty cache, and every later step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.models.caches.finding import MASK, no_cache_hint, streams_of
from winml.modelkit.models.caches.layout import EMBEDDED, CacheLayout, CacheState
from winml.modelkit.models.inputs.decision import AxisMeanings, InputDecision
from winml.modelkit.models.inputs.sizes import SizeBounds, first_int
from winml.modelkit.onnx.specs import InputTensorSpec, OpenSize

PAST_KEY = "past_sequence_length"
_SEQUENCE_KEY = "sequence_length"
_OPEN_KEYS = ("batch_size", _SEQUENCE_KEY, PAST_KEY)

_TOTAL_NAME = "total_sequence_length"
_POSITIONS = "position_ids"
_TRACED_TOKENS, _TRACED_PAST = 5, 7
"""Chosen: small, different from each other, and neither a power of two nor a usual number of heads."""
_POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")
_USUAL_POSITIONS = 2048
"""Chosen: number of positions if no config states one."""
_GROWING_ROTATIONS = ("dynamic", "longrope")
"""Specified by transformers: RoPE types that change, in Python code, at positions beyond those of the pretraining."""


@dataclass(frozen=True)
class _TraceSizes:
    """Sizes at tracing, dynamic or fixed."""

    batch: int
    tokens: int
    past: int

    @classmethod
    def of_request(cls, user_sizes: Mapping[str, int]) -> _TraceSizes:
        """Return the user's sizes, by key of ``--shape-config``, completed with the defaults."""
        tokens, past = user_sizes.get(_SEQUENCE_KEY, _TRACED_TOKENS), user_sizes.get(PAST_KEY, _TRACED_PAST)
        return cls(batch=user_sizes.get("batch_size", 1), tokens=tokens, past=past)


def several_positions(inputs: Iterable[InputTensorSpec]) -> InputTensorSpec | None:
    """Return the input with several positions per token, on an axis before the rows; `None` without such an input."""
    return next((spec for spec in inputs if spec.name == _POSITIONS and len(spec.shape) > 2), None)


def with_cache_inputs(
    decision: InputDecision,
    layout: CacheLayout,
    parameters: Mapping[str, object],
    config: object,
    user_sizes: Mapping[str, int],
) -> InputDecision:
    """Return the inputs of the graph with a cache.

    Args:
        decision: The inputs without a cache.
        layout: The cache.
        parameters: Parameters of the forward.
        config: Config of the model; states the number of positions.
        user_sizes: Key of ``--shape-config`` → number from the user.

    Raises:
        UsageError: more tokens are requested than the model has positions.
    """
    limit = first_int(config, _POSITION_LIMITS)
    bounds = dict(decision.meanings.bounds)
    usable = (bounds.get(_SEQUENCE_KEY) or SizeBounds()).max
    sizes = _TraceSizes.of_request(user_sizes)
    refuse_beyond_positions(usable, user_sizes)
    max_positions = usable or limit or _USUAL_POSITIONS
    if layout.grows:
        bounds[PAST_KEY] = SizeBounds(min=0, max=None if usable is None else usable - 1)
    meanings = AxisMeanings(
        keys=dict(decision.meanings.keys),
        sizes={**decision.meanings.sizes, "batch_size": sizes.batch, _SEQUENCE_KEY: sizes.tokens, PAST_KEY: sizes.past},
        bounds=bounds,
    )
    keys: dict[str, tuple[str | None, ...]] = dict(meanings.keys)
    specs: list[InputTensorSpec] = []
    positions = several_positions(decision.inputs)
    streams = streams_of([spec for spec in decision.inputs if spec is not positions])
    for spec in decision.inputs:
        if spec is positions:
            position_shape = (spec.shape[0], sizes.batch, sizes.tokens)
            specs.append(spec.model_copy(update={"shape": position_shape, "value_range": (0, max_positions - 1)}))
            continue
        if spec.name == MASK and not layout.is_masked:
            keys.pop(spec.name, None)
            continue
        is_longer = spec.name == MASK and layout.grows
        sized, keys[spec.name] = _size_token_input(spec, sizes, streams[spec.name], is_longer=is_longer)
        specs.append(sized)
    if _POSITIONS in parameters and _POSITIONS not in keys:
        keys[_POSITIONS] = ("batch_size", _SEQUENCE_KEY)
        highest = _constant_rotation(config, max_positions)[1] - 1
        shape = (sizes.batch, sizes.tokens)
        specs.append(InputTensorSpec(name=_POSITIONS, shape=shape, dtype="int64", value_range=(0, highest)))
    for state in layout.states:
        keys[state.input] = _state_keys(state)
        specs.append(_state_spec(state, sizes))
    return replace(
        decision,
        inputs=tuple(specs),
        meanings=replace(meanings, keys=keys),
        notes=(*decision.notes, *_rotation_notes(config, max_positions)),
    )


def _size_token_input(
    spec: InputTensorSpec, sizes: _TraceSizes, streams: int, *, is_longer: bool
) -> tuple[InputTensorSpec, tuple[str | None, ...]]:
    """Return a token input with the sizes of a run, cached tokens included if `is_longer`, and the keys of its axes."""
    tokens = sizes.past + sizes.tokens if is_longer else sizes.tokens
    other_sizes = spec.shape[2:]
    keys = ("batch_size" if streams == 1 else None, None if is_longer else _SEQUENCE_KEY, *(None for _ in other_sizes))
    return spec.model_copy(update={"shape": (sizes.batch * streams, tokens, *other_sizes)}), keys


def _state_spec(state: CacheState, sizes: _TraceSizes) -> InputTensorSpec:
    return InputTensorSpec(
        name=state.input,
        shape=state.shape(sizes.batch, sizes.past),
        dtype=state.dtype,
        value_range=state.value_range,
        cache=state.slot,
    )


def _state_keys(state: CacheState) -> tuple[str | None, ...]:
    """Return the key of ``--shape-config`` of each axis of a state; `None` for an axis of fixed size."""
    keys: list[str | None] = ["batch_size", *(None for _ in state.sizes)]
    if state.token_axis is not None:
        keys.insert(state.token_axis, PAST_KEY)
    return tuple(keys)


def refuse_beyond_positions(usable: int | None, user_sizes: Mapping[str, int], tokens_key: str = _SEQUENCE_KEY) -> None:
    """Refuse more tokens than the model has positions.

    Args:
        usable: Number of positions; `None`: unlimited.
        user_sizes: Key of ``--shape-config`` → number from the user.
        tokens_key: Key of the tokens read beside the cached tokens.

    Raises:
        UsageError: names the sizes.
    """
    token_sizes = {key: user_sizes[key] for key in (PAST_KEY, tokens_key) if key in user_sizes}
    if usable is not None and sum(token_sizes.values()) > usable:
        size_text = " and ".join(f"{key} {size}" for key, size in token_sizes.items())
        raise UsageError(
            f"{opt.shape_config}: {size_text}: the model has {usable} positions", hint="Pass sizes whose sum fits."
        )


def _rotation_notes(config: object, limit: int) -> Iterator[str]:
    """Yield a note if the graph contains a single form of a length-dependent RoPE scaling."""
    kind, length = _constant_rotation(config, limit)
    if kind:
        yield (
            f"RoPE scaling ({kind}) changes beyond {length} tokens: use the graph for shorter texts. For longer ones, "
            "outputs differ from PyTorch's, or ONNX Runtime rejects the positions."
        )


def _constant_rotation(config: object, limit: int) -> tuple[str, int]:
    """Return the type of a length-dependent RoPE scaling and the length up to which it is constant.

    Otherwise ``""`` and the limit.
    """
    rotation = getattr(config, "rope_parameters", None)
    settings: Mapping[str, Any] = rotation if isinstance(rotation, dict) else {}
    kind = str(settings.get("rope_type"))
    if any(growing_type in kind for growing_type in _GROWING_ROTATIONS):
        original = settings.get("original_max_position_embeddings") or limit
        return kind, min(limit, int(original))
    return "", limit


def fixed_sizes_of(
    requested: Mapping[str, int], left_open: Collection[str], layout: CacheLayout
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the fixed sizes by key, and notes on them.

    A graph with a recurrent state reads one token per run unless the user gives a length: a Python loop over tokens has
    as many iterations in a graph as were traced.

    Args:
        requested: Key → size in the user's request.
        left_open: Keys that the user requests as dynamic.
        layout: The layout of the cache.
    """
    sizes = dict(requested)
    notes: tuple[str, ...] = ()
    if layout.is_of_one_row and "batch_size" not in sizes:
        sizes["batch_size"] = 1
        notes = ("The graph takes one row: the code of the model mixes up the tokens of several rows.",)
    if not layout.is_masked:
        reason = "after cached tokens, the code of the model hides the wrong tokens"
        notes = (*notes, f"The graph takes no {MASK}: {reason}. All rows of a run have the same length.")
    if layout.dropping_windows:
        window = min(layout.dropping_windows)
        window_note = (
            f"Read a prompt in one run: a layer with a window of {window} tokens attends to all tokens of a run and "
            f"the last {window - 1} before it, without a mask. In several runs, outputs for a longer prompt differ, in "
            "PyTorch as well."
        )
        notes = (*notes, window_note)
    if not layout.is_recurrent or _SEQUENCE_KEY in {*sizes, *left_open}:
        return sizes, notes
    layer = next(state.layer for state in layout.states if state.kind == "recurrent")
    note = (
        f"The graph reads one token per run, in the prompt as well: layer {layer} of the cache "
        f"({layout.class_of(layer)}) has a recurrent state."
    )
    return {**sizes, _SEQUENCE_KEY: 1}, (note, *notes)


def refuse_several_rows(inputs: Sequence[InputTensorSpec], layout: CacheLayout) -> None:
    """Refuse several rows, or a dynamic number of rows, if the forward mixes the rows.

    Args:
        inputs: Inputs of the graph as requested.
        layout: The cache.

    Raises:
        UsageError: names the input and its rows.
    """
    several = [spec for spec in inputs if spec.shape[0] != 1]
    if layout.is_of_one_row and several:
        raise UsageError(
            f"{several[0].name} of {several[0].shape[0]} rows: with a cache, the code of the model mixes up the tokens "
            "of several rows; expected 1",
            hint=f"Remove the number of rows ({opt.batch_size}, {opt.shape_config}). {no_cache_hint()}",
        )


def open_by_default(
    left_open: Mapping[str, OpenSize], user_sizes: Mapping[str, int], layout: CacheLayout, meanings: AxisMeanings
) -> dict[str, OpenSize]:
    """Return the dynamic sizes: rows, tokens and cached tokens without a number from the user, and requested ones.

    Args:
        left_open: Sizes that the user leaves dynamic, with names and bounds.
        user_sizes: Key → number.
        layout: The cache; only a growing cache has a length.
        meanings: Meanings of the axes; state which sizes are fixed.
    """
    keys = [key for key in _OPEN_KEYS if key != PAST_KEY or layout.grows]
    keys = [key for key in keys if not meanings.bounds.get(key, SizeBounds()).fixed]
    return {**{key: OpenSize() for key in keys if key not in user_sizes}, **left_open}


def with_sums(decision: InputDecision) -> InputDecision:
    """Declare the mask length as the sum of the numbers of cached and new tokens.

    The inputs must already have the names of dynamic sizes in their shapes.
    """
    shapes = {spec.name: spec.shape for spec in decision.inputs}
    past = next(
        (spec.shape[2] for spec in decision.inputs if spec.cache is not None and spec.cache.kind == "key"), None
    )
    if MASK not in shapes or past is None:
        return decision
    tokens = shapes["input_ids" if "input_ids" in shapes else EMBEDDED][1]
    total: int | str
    if isinstance(past, int) and isinstance(tokens, int):
        total, sums = past + tokens, {}
    else:
        own_name = shapes[MASK][1]
        total = own_name if isinstance(own_name, str) else _TOTAL_NAME
        sums = {total: (past, tokens)}
    inputs = tuple(
        spec.model_copy(update={"shape": (spec.shape[0], total), "sums": sums}) if spec.name == MASK else spec
        for spec in decision.inputs
    )
    dimensions = tuple(dimension for dimension in decision.dimensions if dimension.name not in sums)
    return replace(decision, inputs=inputs, dimensions=dimensions)
