"""Sizes and values for one run of a decoder with a cache: a prompt, or a step after it.

Knows names and sizes of inputs, and the mapping of outputs to inputs; does not run graphs or choose tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.errors import InputError, UsageError, opt
from winml.modelkit.metadata_keys import PART_KEY
from winml.modelkit.onnx.specs import PAST_PREFIX, STATE_PREFIXES, InputTensorSpec
from winml.modelkit.options import load_metadata
from winml.modelkit.ort.default_sizes import TOKENS
from winml.modelkit.ort.graph_inputs import (
    Size,
    bounds_by_name,
    default_size_notes,
    described_inputs,
    draw_feeds,
    settle_sizes,
    sizes_by_key,
)
from winml.modelkit.records import Record

if TYPE_CHECKING:
    from winml.modelkit.ort.sessions import Session

TOKEN_IDS, TOKEN_VECTORS = "input_ids", "inputs_embeds"
MASK, POSITIONS, TOKEN_TYPES = "attention_mask", "position_ids", "token_type_ids"
SCORES = "logits"
"""Specified: names of the decoder inputs that are no state, and of the scores, in transformers, optimum and
onnxruntime-genai.
"""
_TOKEN_INPUTS = (TOKEN_IDS, TOKEN_VECTORS, "decoder_input_ids")
_PROMPT = 16
"""Chosen: tokens of a prompt before the step that is compared."""
_GROWING = ("key", "value")
"""Kinds of states that hold something of each token."""
_CARRIED = ("conv", "recurrent")
"""Kinds of states of one size, which a run replaces."""


class DecoderRun(Record):
    """One run of a decoder with a cache."""

    tokens: int
    """Tokens fed in this run."""
    cached: int
    """Tokens in the cache before the run."""

    def halve(self) -> DecoderRun:
        """Return a run with half of the tokens, at least one."""
        return DecoderRun(max(self.tokens // 2, 1), self.cached // 2)

    @property
    def words(self) -> str:
        """Description for messages: a prompt if the cache is empty."""
        if not self.cached:
            return f"a prompt of {self.tokens} token{'' if self.tokens == 1 else 's'}"
        return f"{self.tokens} token{'' if self.tokens == 1 else 's'} after {self.cached}"


@dataclass(frozen=True)
class _Axes:
    """Names of a decoder's dynamic axes in the file."""

    tokens: str
    past: tuple[str, ...]
    """Names of the cache length; ``()`` if states do not grow."""
    total: str | None
    """Size of the mask, if it is a separate dimension."""


def inputs_of_file(path: Path) -> tuple[InputTensorSpec, ...]:
    """Return the inputs of a graph with names, types, sizes and metadata, without a session.

    Raises:
        ModelPathError: the file does not exist.
        InputError: the file is no ONNX file.
    """
    # Late: text generation with an open session does not need onnx.
    import onnx

    from winml.modelkit.onnx.contents import declared_shape
    from winml.modelkit.onnx.files.reading import read_structure, required_inputs

    proto = read_structure(path)
    inputs = required_inputs(proto.graph)
    shapes = {value.name: declared_shape(value.type) for value in inputs}
    names = {value.name: onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower() for value in inputs}
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    return described_inputs({name: f"tensor({type_name})" for name, type_name in names.items()}, shapes, metadata)


def decoder_run(inputs: Sequence[InputTensorSpec], requested: Mapping[str, int]) -> DecoderRun | None:
    """Return the run to measure a decoder with: a step, or a prompt if the prompt length is requested. `None` without a
    cache.

    Args:
        inputs: The inputs of the graph.
        requested: The user's sizes, as for ``settle_sizes``.

    Raises:
        UsageError: as :func:`decoder_tokens`.
    """
    tokens = decoder_tokens(inputs, requested)
    axes = _open_axes(inputs)
    if tokens is None or axes is None:
        return None
    return DecoderRun(tokens, 0) if axes.tokens in sizes_by_key(inputs, requested) else DecoderRun(1, tokens)


def decoder_tokens(inputs: Sequence[InputTensorSpec], requested: Mapping[str, int]) -> int | None:
    """Return the number of tokens to measure a decoder with, in a prompt or in the cache before a step.

    Args:
        inputs: The inputs of the graph.
        requested: The user's sizes, as for ``settle_sizes``.

    Returns:
        The user's size for either, else 128 or the model's maximum position. None if the graph has no cache, takes a
        fixed number of tokens, or the user requested both sizes.

    Raises:
        UsageError: an unknown name, or more tokens than the model has positions.
    """
    axes = _open_axes(inputs)
    if axes is None:
        return None
    sizes = sizes_by_key(inputs, requested)
    tokens, past = sizes.get(axes.tokens), next((sizes[name] for name in axes.past if name in sizes), None)
    if tokens is not None and past is not None:
        return None
    positions = next((spec.value_range for spec in inputs if spec.name == POSITIONS), None)
    # The step after them takes one more position.
    limit = TOKENS if positions is None else int(positions[1])
    length = tokens if tokens is not None else past
    if length is None:
        bounds = bounds_by_name(inputs)
        limits = [bounds[name].max for name in (axes.tokens, *axes.past) if name in bounds]
        return max(min(TOKENS, limit, *(size for size in limits if size is not None)), 1)
    if positions is not None and length > limit:
        raise UsageError(
            f"{opt.shape_config}: {axes.tokens if tokens is not None else axes.past[0]} {length}: the model has "
            f"{limit + 1} positions, but a step after {length} tokens needs {length + 1}",
            hint=f"Use {limit} or fewer.",
        )
    return length


def decoder_feeds(
    inputs: Sequence[InputTensorSpec],
    run: DecoderRun,
    requested: Mapping[str, int],
    *,
    batch_size: int | None,
    seed: int,
) -> tuple[dict[str, Array], tuple[str, ...]]:
    """Draw the inputs of a run; return the inputs, and notes on default sizes.

    Tokens and states are random; no token is hidden, and positions continue from the cache.

    Args:
        inputs: The inputs of a decoder with a cache.
        run: Its length.
        requested: The user's sizes; sizes of tokens and cache come from the run.
        batch_size: Requested number of rows, or None.
        seed: Seed of the values.

    Raises:
        UsageError: sizes do not fit the inputs, or no values can be drawn.
    """
    axes = _open_axes(inputs)
    assert axes is not None  # a run exists only if decoder_tokens found one
    run_sizes = {axes.tokens: run.tokens, **dict.fromkeys(axes.past, run.cached)}
    if axes.total is not None:
        run_sizes[axes.total] = run.tokens + run.cached
    requested_sizes = sizes_by_key(inputs, requested)
    other_sizes = {name: size for name, size in requested_sizes.items() if name not in run_sizes}
    sizes = settle_sizes(inputs, {**other_sizes, **run_sizes}, batch_size=batch_size)
    chosen = dict(sizes.chosen)
    if not run_sizes.keys() & requested_sizes.keys():
        chosen |= dict.fromkeys(axes.past[:1], run.cached) if run.cached else {axes.tokens: run.tokens}
    feeds = draw_feeds(inputs, sizes.by_name, seed, with_padding=False)
    if POSITIONS in feeds:
        counted = np.arange(run.cached, run.cached + run.tokens)
        feeds[POSITIONS] = np.ascontiguousarray(
            np.broadcast_to(counted, feeds[POSITIONS].shape).astype(feeds[POSITIONS].dtype)
        )
    return feeds, default_size_notes(chosen)


def prompt_before(inputs: Sequence[InputTensorSpec], requested: Mapping[str, int], steps: int) -> DecoderRun:
    """Return the prompt before a number of steps of a decoder.

    Args:
        inputs: The inputs of the graph.
        requested: Sizes the user gave, as for ``settle_sizes``.
        steps: Steps after it.

    Raises:
        UsageError: the graph is no decoder with a cache that takes any number of tokens, or has too few positions.
    """
    axes = _open_axes(inputs)
    if axes is None:
        raise UsageError(
            f"{opt.step} {steps}: the model has no KV cache, or takes a fixed number of tokens",
            hint="Compare a decoder that was exported with a KV cache and dynamic sizes.",
        )
    sizes = sizes_by_key(inputs, requested)
    positions = next((spec.value_range for spec in inputs if spec.name == POSITIONS), None)
    room = _PROMPT + steps if positions is None else int(positions[1]) + 1
    tokens = sizes.get(axes.tokens, max(min(_PROMPT, room - steps), 1))
    if tokens + steps > room and positions is not None:
        raise UsageError(
            f"{opt.step} {steps}: after a prompt of {tokens} tokens the text has {tokens + steps} tokens, but the "
            f"model has {room} positions",
            hint=f"Use {opt.step} {max(room - tokens, 0)} or less.",
        )
    return DecoderRun(tokens, 0)


def next_feeds(
    feeds: Arrays,
    output: Arrays,
    states: Mapping[str, str],
    shapes: Mapping[str, Sequence[int | str | None]],
) -> dict[str, Array]:
    """Return the inputs of the next step: the token with the largest score, and the states of the previous run.

    Args:
        feeds: Inputs of the previous run, one array each; including token ids.
        output: Its outputs; including scores.
        states: Input → output with its next value.
        shapes: Input → sizes as the model states them. Inputs with the token axis get one entry for the new token;
            other inputs, such as the mask of an encoder, stay.
    """
    token = output[SCORES][:, -1].argmax(-1)[:, None]
    tokens_axis = shapes[TOKEN_IDS][1]
    following = dict(feeds)
    for name, array in feeds.items():
        if name in states:
            following[name] = output[states[name]]
        elif name == POSITIONS:
            following[name] = array[..., -1:] + 1
        elif name == MASK:
            last = np.ones_like(array[:, -1:])
            is_of_run = masks_run_alone(shapes, TOKEN_IDS, states)
            following[name] = last if is_of_run else np.concatenate([array, last], axis=1)
        elif name == TOKEN_IDS:
            following[name] = token.astype(array.dtype)
        elif isinstance(tokens_axis, str) and tuple(shapes[name][1:]) == (tokens_axis,):
            following[name] = np.zeros_like(token, array.dtype)
    return following


def masks_run_alone(shapes: Mapping[str, Sequence[Size]], fed: str, states: Iterable[str]) -> bool:
    """Return True if the mask covers the tokens of a run only, as with states of constant size.

    Args:
        shapes: Input → sizes as the graph states them.
        fed: The input that takes tokens, or their vectors.
        states: The inputs that take states.
    """
    is_as_long = MASK in shapes and shapes[MASK][1] == shapes[fed][1]
    return is_as_long and not any(name.startswith(PAST_PREFIX) for name in states)


def plain_value(spec: InputTensorSpec) -> int:
    """Return the value of an unmarked token in an input, such as a token outside of images."""
    return int(spec.value_range[0]) if spec.value_range and spec.first_values else 0


def _open_axes(inputs: Sequence[InputTensorSpec]) -> _Axes | None:
    """Return the names of the token and cache axes; None if the graph is no decoder with a cache and dynamic tokens."""
    kinds = {spec.name: spec.cache.kind for spec in inputs if spec.cache is not None}
    shapes = {spec.name: spec.named_shape for spec in inputs}
    batch, tokens = next(
        (shapes[name][:2] for name in shapes if name in _TOKEN_INPUTS and len(shapes[name]) > 1), (0, 0)
    )
    if not kinds or not isinstance(tokens, str):
        return None
    summed = {term for spec in inputs for terms in spec.sums.values() for term in terms}
    axis_names = dict.fromkeys(
        size for name in kinds for size in shapes[name] if isinstance(size, str) and size != batch
    )
    past = tuple(name for name in axis_names if name in summed or "past" in name)
    if not past and any(kind in _GROWING for kind in kinds.values()):
        return None
    mask = next(iter(shapes.get(MASK, ())[1:]), None)
    is_own = isinstance(mask, str) and mask not in (tokens, *past)
    return _Axes(tokens, past, mask if is_own and isinstance(mask, str) else None)


def empty_state_sizes(spec: InputTensorSpec, batch: Size, rows: int) -> tuple[int, ...]:
    """Return the sizes of a cache state before the first token: dynamic axes other than the batch are 0.

    Args:
        spec: The state input.
        batch: First size of the tokens in the graph, a name if dynamic.
        rows: Size of the batch.
    """
    axis = batch_axis(spec, batch)
    return tuple(
        size if isinstance(size, int) else rows if position == axis else 0 for position, size in enumerate(spec.shape)
    )


def batch_axis(spec: InputTensorSpec, batch: Size) -> int:
    """Return the batch axis of a cache state; see :func:`empty_state_sizes`."""
    return spec.shape.index(batch) if isinstance(batch, str) and batch in spec.shape else 0


def constant_size_states(states: Iterable[InputTensorSpec], batch: Size) -> dict[str, int]:
    """Return input → batch axis, for states that summarize all earlier tokens: recurrent states and convolutions.

    Padding affects a state of constant size, because no mask hides the padding.

    Args:
        states: The inputs that take states.
        batch: First size of the tokens in the graph, a name if dynamic.
    """
    axes = {spec.name: batch_axis(spec, batch) for spec in states}
    return {
        spec.name: axes[spec.name]
        for spec in states
        if (spec.cache.kind in _CARRIED if spec.cache is not None else not spec.name.startswith(PAST_PREFIX))
        if all(isinstance(size, int) for axis, size in enumerate(spec.shape) if axis != axes[spec.name])
    }


def hold_hidden_rows(before: Array, after: Array, is_hidden: Array, axis: int) -> Array:
    """Merge a state after a run with the earlier state of rows with a masked token.

    Args:
        before: The state before the run.
        after: The state after the run.
        is_hidden: One flag for each row of the batch.
        axis: Axis of the batch.
    """
    flags = is_hidden.reshape([-1 if position == axis else 1 for position in range(after.ndim)])
    merged: Array = np.where(flags, before, after)
    return merged


def state_feeds(session: Session) -> dict[str, str]:
    """Return state input → output with its next value, in the order of the inputs.

    Raises:
        InputError: a cache input has no matching output.
    """
    feeds = _described_feeds(session) or _named_feeds(session)
    for name, output in feeds.items():
        if output not in session.outputs:
            raise InputError(
                f"{session.name} takes the KV cache {name!r} but does not return its next value {output!r}",
                hint="Export it with the KV cache as inputs and outputs.",
            )
    return feeds


def _described_feeds(session: Session) -> dict[str, str]:
    """Return the mapping stated in the file; ``{}`` for missing or damaged metadata."""
    try:
        record = load_metadata(session.metadata.get(PART_KEY) or "{}")
        feeds_by_input = {
            feed["input"]: feed["output"] for feed in record.get("feeds", ()) if feed["part"] == record["name"]
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {name: feeds_by_input[name] for name in session.inputs if name in feeds_by_input}


def _named_feeds(session: Session) -> dict[str, str]:
    """Return the mapping by the names used by other exporters; ``{}`` for other names."""
    return {
        name: present + name.removeprefix(past)
        for name in session.inputs
        for past, present in STATE_PREFIXES.items()
        if name.startswith(past)
    }
