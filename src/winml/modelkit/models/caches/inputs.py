"""Which inputs does a graph with a cache take, and which of their sizes stay open?

Tokens, a mask over the tokens in the cache and these, positions where the forward takes them, and the tensors of the
cache. Rows, tokens and tokens in the cache are open unless the user gives a number: one graph then serves the prompt,
with nothing in the cache, and every step after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
"""Chosen: small, apart from each other, and neither a power of two nor a usual number of heads."""
_POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")
_USUAL_POSITIONS = 2048
"""Chosen: positions where no config says how many there are."""
_GROWING_ROTATIONS = ("dynamic", "longrope")
"""Specified by transformers: rotations that change, in Python, once a position is beyond those of the pretraining."""


@dataclass(frozen=True)
class _Sizes:
    """Sizes to begin with, open or not."""

    batch: int
    tokens: int
    past: int

    @classmethod
    def of_request(cls, passed: Mapping[str, int]) -> _Sizes:
        """Return those the user gave, by key of ``--shape-config``, and usual ones for the others."""
        tokens, past = passed.get(_SEQUENCE_KEY, _TRACED_TOKENS), passed.get(PAST_KEY, _TRACED_PAST)
        return cls(batch=passed.get("batch_size", 1), tokens=tokens, past=past)


def several_positions(inputs: Iterable[InputTensorSpec]) -> InputTensorSpec | None:
    """Return the input with several positions of each token, which lie before the rows; None: each has one."""
    return next((spec for spec in inputs if spec.name == _POSITIONS and len(spec.shape) > 2), None)


def with_cache_inputs(
    decision: InputDecision,
    layout: CacheLayout,
    parameters: Mapping[str, object],
    config: object,
    passed: Mapping[str, int],
) -> InputDecision:
    """Return the inputs of the graph with a cache.

    Args:
        decision: The inputs without one.
        layout: The cache.
        parameters: Those of the forward.
        config: Of the model; tells how many positions it has.
        passed: Key of ``--shape-config`` → number the user gave.

    Raises:
        UsageError: more tokens are asked for than the model has positions.
    """
    limit = first_int(config, _POSITION_LIMITS)
    bounds = dict(decision.meanings.bounds)
    usable = (bounds.get(_SEQUENCE_KEY) or SizeBounds()).max
    sizes = _Sizes.of_request(passed)
    refuse_beyond_positions(usable, passed)
    most = usable or limit or _USUAL_POSITIONS
    if layout.grows:
        bounds[PAST_KEY] = SizeBounds(min=0, max=None if usable is None else usable - 1)
    meanings = AxisMeanings(
        keys=dict(decision.meanings.keys),
        sizes={**decision.meanings.sizes, "batch_size": sizes.batch, _SEQUENCE_KEY: sizes.tokens, PAST_KEY: sizes.past},
        bounds=bounds,
    )
    keys: dict[str, tuple[str | None, ...]] = dict(meanings.keys)
    specs: list[InputTensorSpec] = []
    placed = several_positions(decision.inputs)
    streams = streams_of([spec for spec in decision.inputs if spec is not placed])
    for spec in decision.inputs:
        if spec is placed:
            places = (spec.shape[0], sizes.batch, sizes.tokens)
            specs.append(spec.model_copy(update={"shape": places, "value_range": (0, most - 1)}))
            continue
        if spec.name == MASK and not layout.is_masked:
            keys.pop(spec.name, None)
            continue
        is_longer = spec.name == MASK and layout.grows
        sized, keys[spec.name] = _of_tokens(spec, sizes, streams[spec.name], is_longer=is_longer)
        specs.append(sized)
    if _POSITIONS in parameters and _POSITIONS not in keys:
        keys[_POSITIONS] = ("batch_size", _SEQUENCE_KEY)
        highest = _held_rotation(config, most)[1] - 1
        shape = (sizes.batch, sizes.tokens)
        specs.append(InputTensorSpec(name=_POSITIONS, shape=shape, dtype="int64", value_range=(0, highest)))
    for state in layout.states:
        keys[state.input] = _state_keys(state)
        specs.append(_state_spec(state, sizes))
    return replace(
        decision,
        inputs=tuple(specs),
        meanings=replace(meanings, keys=keys),
        notes=(*decision.notes, *_rotation_notes(config, most)),
    )


def _of_tokens(
    spec: InputTensorSpec, sizes: _Sizes, streams: int, *, is_longer: bool
) -> tuple[InputTensorSpec, tuple[str | None, ...]]:
    """Return an input of the tokens of a run, or also of those before it, and the keys of its sizes."""
    tokens = sizes.past + sizes.tokens if is_longer else sizes.tokens
    others = spec.shape[2:]
    keys = ("batch_size" if streams == 1 else None, None if is_longer else _SEQUENCE_KEY, *(None for _ in others))
    return spec.model_copy(update={"shape": (sizes.batch * streams, tokens, *others)}), keys


def _state_spec(state: CacheState, sizes: _Sizes) -> InputTensorSpec:
    return InputTensorSpec(
        name=state.input,
        shape=state.shape(sizes.batch, sizes.past),
        dtype=state.dtype,
        value_range=state.value_range,
        cache=state.slot,
    )


def _state_keys(state: CacheState) -> tuple[str | None, ...]:
    keys: list[str | None] = ["batch_size", *(None for _ in state.sizes)]
    if state.token_axis is not None:
        keys.insert(state.token_axis, PAST_KEY)
    return tuple(keys)


def refuse_beyond_positions(usable: int | None, passed: Mapping[str, int], tokens_key: str = _SEQUENCE_KEY) -> None:
    """Refuse more tokens than there are positions.

    Args:
        usable: Number of positions; None: any.
        passed: Key of ``--shape-config`` → number the user gave.
        tokens_key: Key of the tokens that are read beside those in the cache.

    Raises:
        UsageError: names the sizes.
    """
    requested = {key: passed[key] for key in (PAST_KEY, tokens_key) if key in passed}
    if usable is not None and sum(requested.values()) > usable:
        words = " and ".join(f"{key} {size}" for key, size in requested.items())
        raise UsageError(
            f"{opt.shape_config}: {words}: the model has {usable} positions", hint="Pass sizes whose sum fits."
        )


def _rotation_notes(config: object, limit: int) -> tuple[str, ...]:
    """Return what is to be said of a rotation that the graph holds in one form."""
    kind, held = _held_rotation(config, limit)
    if not kind:
        return ()
    note = (
        f"RoPE scaling ({kind}) changes beyond {held} tokens: the graph contains that for shorter texts, and outputs "
        "for longer texts differ from PyTorch's."
    )
    return (note,)


def _held_rotation(config: object, limit: int) -> tuple[str, int]:
    """Return the kind of a rotation that changes with the length of a text, if it does, and up to which length it does
    not.
    """
    rotation = getattr(config, "rope_parameters", None)
    settings: Mapping[str, Any] = rotation if isinstance(rotation, dict) else {}
    kind = str(settings.get("rope_type"))
    if any(word in kind for word in _GROWING_ROTATIONS):
        original = settings.get("original_max_position_embeddings") or limit
        return kind, min(limit, int(original))
    return "", limit


def fixed_sizes_of(
    requested: Mapping[str, int], left_open: Collection[str], layout: CacheLayout
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the sizes that are fixed, by key, and what is to be said of them.

    A state that is computed from token to token takes one token in each run, unless the user says otherwise: a loop
    over tokens in Python has as many rounds in a graph as were traced.
    """
    passed = dict(requested)
    notes: tuple[str, ...] = ()
    if layout.is_of_one_row and "batch_size" not in passed:
        passed["batch_size"] = 1
        notes = ("The graph takes one row: the code of the model mixes up the tokens of several rows.",)
    if not layout.is_masked:
        reason = "after cached tokens, the code of the model hides the wrong tokens"
        notes = (*notes, f"The graph takes no {MASK}: {reason}. All rows of a run have the same length.")
    if layout.dropping_windows:
        window = min(layout.dropping_windows)
        dropped = (
            f"Read a prompt in one run: a layer with a window of {window} tokens attends to all tokens of a run and "
            f"the last {window - 1} before it, without a mask. In several runs, outputs for a longer prompt differ, in "
            "PyTorch as well."
        )
        notes = (*notes, dropped)
    if not layout.is_recurrent or _SEQUENCE_KEY in {*passed, *left_open}:
        return passed, notes
    layer = next(state.layer for state in layout.states if state.kind == "recurrent")
    note = (
        f"The graph reads one token per run, in the prompt as well: layer {layer} of the cache "
        f"({layout.class_of(layer)}) has a recurrent state."
    )
    return {**passed, _SEQUENCE_KEY: 1}, (note, *notes)


def refuse_several_rows(inputs: Sequence[InputTensorSpec], layout: CacheLayout) -> None:
    """Refuse more rows than one, or an open number of them, where the forward mixes them up.

    Args:
        inputs: Those of the graph, as the user wants them.
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
    left_open: Mapping[str, OpenSize], passed: Mapping[str, int], layout: CacheLayout, meanings: AxisMeanings
) -> dict[str, OpenSize]:
    """Return what is left open: rows, tokens and the cache, as far as the user gave no number.

    Args:
        left_open: What the user leaves open, with names and bounds.
        passed: Key → number.
        layout: The cache; only one that grows has a length.
        meanings: Of the inputs; say what cannot vary.
    """
    keys = [key for key in _OPEN_KEYS if key != PAST_KEY or layout.grows]
    keys = [key for key in keys if not meanings.bounds.get(key, SizeBounds()).fixed]
    return {**{key: OpenSize() for key in keys if key not in passed}, **left_open}


def with_sums(decision: InputDecision) -> InputDecision:
    """Return the decision in which the length of the mask is that of the cache and of the tokens together.

    Takes the inputs once the names of dynamic sizes stand in their shapes.
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
    dimensions = tuple(item for item in decision.dimensions if item.name not in sums)
    return replace(decision, inputs=inputs, dimensions=dimensions)
