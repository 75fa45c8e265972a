"""Execution of a decoder graph: tokens in, logits out, with the state of a run fed to the next run.

The file (``winml.part``) maps outputs to inputs; without this metadata, the names used by other exporters decide.
States of any kind are supported: keys and values, a sliding window, a recurrent state. Needs numpy and ONNX Runtime
only. Does not choose tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from winml.modelkit.arrays import Array, Arrays, numpy_dtype
from winml.modelkit.errors import InputError, UsageError, WinMLError, opt
from winml.modelkit.file_names import GENAI_CONFIG_NAME
from winml.modelkit.metadata_keys import PART_KEY
from winml.modelkit.onnx.bundle import TextTokens, model_record
from winml.modelkit.onnx.files.foreign_files import library_file
from winml.modelkit.onnx.files.wire_format import NodeSummary, WireError, node_summaries
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.options import load_metadata, read_json_file
from winml.modelkit.ort.decoding.inputs import (
    MASK,
    POSITIONS,
    SCORES,
    TOKEN_IDS,
    TOKEN_TYPES,
    batch_axis,
    constant_size_states,
    empty_state_sizes,
    hold_hidden_rows,
    masks_run_alone,
    plain_value,
    state_feeds,
)
from winml.modelkit.ort.graph_inputs import array_words, fitted_array, graph_inputs
from winml.modelkit.ort.ort_values import to_array, to_ort_value
from winml.modelkit.ort.sessions import InPlaceRun, Session

if TYPE_CHECKING:
    import onnxruntime

_ADDING = ("GroupQueryAttention", "com.microsoft")
"""Specified by ONNX Runtime: the operator that writes only the new entries if past and present share memory."""
_PRESENT_PLACES = {3: 1, 4: 2}
"""Specified: input position of the past → output position of the present."""
_BIAS_PLACE = 10
"""Specified: input position of the mask that is added to the scores."""
_TOKENS_AXIS = 2
"""Specified: its states are of shape [batch, heads, tokens, head size]."""
_SPARE_TOKENS = 128
"""Chosen: minimum extra capacity; otherwise half of the tokens, so that each token is copied about once."""


class GraphCache:
    """State of a graph after a number of tokens, in ONNX Runtime's memory.

    Holds a value for each state of the graph. A run replaces the values or, if an operator can extend them in place,
    writes after their content. A shallow copy is independent: shared memory is copied before a run writes.

    Attributes:
        values: By name of the graph input they are fed to.
        room: Capacity in tokens per row of values extended in place; None if a run replaces them.
        length: Tokens per row that the state represents.
        encoded: By name of the graph input, the encoder outputs; equal in every step.
    """

    is_compileable = False
    is_linear = (False,)
    """Read by transformers' generation: whether a step may be compiled, and which layers count no tokens."""

    def __init__(
        self,
        graph: DecoderGraph,
        values: Mapping[str, onnxruntime.OrtValue],
        length: int,
        encoded: Arrays | None = None,
    ) -> None:
        """Hold the values of one graph."""
        self._graph = graph
        self.values = dict(values)
        self.length = length
        self.room = length if graph.adds_in_place else None
        self.encoded = dict(encoded or {})
        self._is_shared = False
        self._run_in_place: InPlaceRun | None = None
        self._step: tuple[int, tuple[int, ...], dict[str, Array]] | None = None

    def keep_step(self, rows: int, feeds: Arrays) -> None:
        """Keep the inputs of the last run, of one token per row, with neither padding nor given positions."""
        self._step = self.length, (rows, 1), {name: array.copy() for name, array in feeds.items()}

    def follows_step(self, graph: DecoderGraph, sizes: tuple[int, ...]) -> bool:
        """Return True if the last run was a step of the graph with as many rows, and the next run is a step, too."""
        return self._graph is graph and self._step is not None and self._step[:2] == (self.length, sizes)

    def next_step(self, values: Array, value_input: str) -> dict[str, Array]:
        """Return the inputs of a step that follows a step.

        The arrays of the previous step are changed in place, and stay bound. Measured: building the inputs anew takes
        3 % of a step of 14 ms.

        Args:
            values: Token ids or embeddings, one per row.
            value_input: Name of their input.
        """
        assert self._step is not None
        feeds = self._step[2]
        self._step = self.length + 1, self._step[1], feeds
        feeds[value_input][...] = values
        if POSITIONS in feeds:
            feeds[POSITIONS] += 1
        if MASK in feeds:
            feeds[MASK] = np.ones((len(values), self.length + 1), feeds[MASK].dtype)
        return feeds

    def run_in_place(self, total: int) -> InPlaceRun:
        """Return a run that extends the values in place; values are copied if memory is shared or too small.

        Args:
            total: Tokens per row after the run.
        """
        room = self.room or 0
        if total > room:
            room = total + max(total // 2, _SPARE_TOKENS)
        if self._is_shared or room != self.room:
            self.room = room
            self.values = {
                name: _copy_with_room(to_array(value), self.length, room) for name, value in self.values.items()
            }
            self._is_shared, self._run_in_place = False, None
        if self._run_in_place is None:
            self._run_in_place = InPlaceRun(self._graph._session, self.values, self._graph.states)
        return self._run_in_place

    def rewind(self, earlier: GraphCache) -> None:
        """Restore the state of an earlier cache, in place; the cache is a copy of the earlier cache after further runs.

        Args:
            earlier: The earlier cache.
        """
        self.length = earlier.length
        if self.room is None:
            self.values = dict(earlier.values)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002  # transformers' signature
        """Return the number of tokens per row in the state."""
        return self.length

    def reorder_cache(self, beam_idx: Any) -> None:
        """Reorder the rows of the batch, in place: row ``beam_idx[i]`` becomes row i.

        Args:
            beam_idx: Integers, an array or tensor of shape [rows].
        """
        rows = [int(row) for row in beam_idx]
        if rows != list(range(len(rows))):
            self.values = {
                name: to_ort_value(np.take(to_array(value), rows, axis=self._graph.batch_axes[name]))
                for name, value in self.values.items()
            }
            self._is_shared, self._run_in_place, self._step = False, None, None

    def belongs_to(self, graph: DecoderGraph) -> bool:
        """Return True if a graph made the cache."""
        return self._graph is graph

    @property
    def graph_name(self) -> str:
        """The file of the cache's graph."""
        return self._graph.name

    def size_bytes(self) -> int:
        """Return the memory of the tokens in bytes, without spare capacity."""
        size = sum(int(value.tensor_size_in_bytes()) for value in self.values.values())
        return size * self.length // self.room if self.room else size

    def __copy__(self) -> GraphCache:
        copied = GraphCache(self._graph, self.values, self.length, self.encoded)
        copied.room = self.room
        copied._is_shared = self._is_shared = True
        return copied

    def __deepcopy__(self, _memo: Any) -> GraphCache:
        return self.__copy__()


def _copy_with_room(state: Array, length: int, room: int) -> onnxruntime.OrtValue:
    """Return a copy of the first tokens of a state, with zeroed capacity for further tokens."""
    sizes = [room if axis == _TOKENS_AXIS else size for axis, size in enumerate(state.shape)]
    roomy = np.zeros(sizes, state.dtype)
    roomy[:, :, :length] = state[:, :, :length]
    return to_ort_value(roomy)


def _hold_earlier_tokens(before: Array, after: Array, is_hidden: Array, axis: int) -> Array:
    """Return a growing state after a run, with the earlier tokens of the rows with a masked token restored."""
    held = after.copy()
    held[:, :, : before.shape[_TOKENS_AXIS]] = hold_hidden_rows(
        before, after[:, :, : before.shape[_TOKENS_AXIS]], is_hidden, axis
    )
    return held


def _last_entries(value: onnxruntime.OrtValue, count: int, axis: int) -> onnxruntime.OrtValue:
    """Return a copy of the last entries of an axis; the value itself if the axis is not longer."""
    array = to_array(value)
    start = array.shape[axis] - count
    return value if start <= 0 else to_ort_value(array[(slice(None),) * axis + (slice(start, None),)])


class DecoderGraph:
    """The graph of a decoder in a session.

    Attributes:
        inputs: Inputs of the graph, in order.
        states: State input → output with its next value; empty without a cache.
        batch_axes: State input → its batch axis.
        last_cache: Cache after the last run; None before the first run, and without a cache.
        position_rows: Number of positions per token, if several: frames, rows and columns; None: one.
        length: Fixed number of tokens per run, else None. With a cache, more tokens take several runs.
        held: Fixed number of cached tokens in every run, else None. The last tokens are valid.
        adds_in_place: True if a run writes new states into the memory of the old states.
        described: Description of the model in the metadata of the file (``winml.model``).
    """

    fed_input: ClassVar[str] = TOKEN_IDS
    """Name of the input that takes tokens, or their embeddings."""

    def __init__(
        self,
        session: Session,
        encoded: Collection[str] = (),
        values: Collection[str] = (),
        prompts: Iterable[Session] = (),
    ) -> None:
        """Inspect the inputs of the graph.

        Args:
            session: The graph.
            prompts: Graphs of the same model with a cache of the same fixed length that read several tokens per run;
                none: ``session`` also reads prompts.
            encoded: Inputs that are equal in every step: the encoder outputs.
            values: Inputs that share the last axis of the result of :meth:`token_values`; empty: a single input takes
                it.

        Raises:
            InputError: the graph does not map tokens to logits, or has an input of unknown meaning.
        """
        self._session = session
        self.described = model_record(session.metadata)
        self.name = session.name
        self.states = state_feeds(session)
        self.inputs: tuple[InputTensorSpec, ...] = _complete_head_sizes(graph_inputs(session), session, self.states)
        self._by_name = {spec.name: spec for spec in self.inputs}
        self.encoded = tuple(name for name in self._by_name if name in encoded)
        self._value_inputs = tuple(values) or (self.fed_input,)
        self._fed_inputs = tuple(spec for spec in self.inputs if spec.name not in {*self.states, *self.encoded})
        self._refuse_other_graphs()
        batch, sequence = self._by_name[self.fed_input].shape[:2]
        self.length = sequence if isinstance(sequence, int) else None
        self.last_cache: GraphCache | None = None
        self._step_outputs: dict[tuple[int, ...], Arrays] = {}
        """Rows and tokens of the last single-token step → its outputs."""
        self._masks_new_tokens = masks_run_alone(session.input_shapes, self.fed_input, self.states)
        self._plain_kind = plain_value(self._by_name[TOKEN_TYPES]) if TOKEN_TYPES in self._by_name else 0
        self.position_rows = _position_rows(self._by_name.get(POSITIONS))
        self.batch_axes = {name: batch_axis(self._by_name[name], batch) for name in self.states}
        self._growing_axes = _growing_axes(session, self.states)
        self._constant_states = {
            name: axis
            for name, axis in constant_size_states([self._by_name[name] for name in self.states], batch).items()
            if name not in self._growing_axes
        }
        self.held = _held_tokens(session, self._growing_axes)
        if self.held is not None and MASK not in self._by_name:
            raise InputError(
                f"{session.name} has a KV cache with a fixed {self.held} tokens and no {MASK} to mask the empty "
                "positions",
                hint="Build the model with a dynamic past_sequence_length.",
            )

        nodes = _read_nodes(session) if self.states else ()
        takes_in_place = self.held is None and session.takes_states_in_place
        self.adds_in_place = takes_in_place and _adds_in_place(nodes, self.states)
        self._pads_right = any(map(_hides_padding_by_lengths, nodes))
        self._has_plain_steps = (
            self.adds_in_place
            and len(self._value_inputs) == 1
            and TOKEN_TYPES not in self._by_name
            and not self._masks_new_tokens
        )
        """True if inputs of a step follow from those of the step before: one more position, and a longer mask."""
        self._prompts = sorted(map(DecoderGraph, prompts), key=lambda graph: graph.length or 0)
        for graph in self._prompts:
            if self.held is None or self.held != graph.held:
                raise InputError(
                    f"{session.name} holds {self.held or 'any number of'} tokens in its KV cache, but "
                    f"{graph.name} holds {graph.held or 'any number'}: these are not parts of one build",
                    hint="Build both parts again in one build.",
                )

    @property
    def longest_run(self) -> int | None:
        """Fixed number of tokens of a run of the longest prompt graph, else of this graph; None if dynamic."""
        return [self, *self._prompts][-1].length

    @property
    def has_cache(self) -> bool:
        """True if a run passes states to the next run."""
        return bool(self.states)

    def encode(self, inputs: Arrays) -> dict[str, Array]:  # noqa: ARG002  # read where others derive
        """Run the graphs before the decoder; return their outputs by decoder input, ``{}`` without such graphs.

        Args:
            inputs: Inputs of the first graph, by name.
        """
        return {}

    def start(self, inputs: Arrays, rows: int = 1) -> GraphCache:
        """Return the state before the first token; see :meth:`encode`.

        Args:
            inputs: Inputs of the graphs before the decoder, by name.
            rows: Size of the batch.
        """
        return self.empty_cache(rows, self.encode(inputs))

    def empty_cache(self, rows: int, encoded: Arrays | None = None) -> GraphCache:
        """Return the state before the first token.

        Args:
            rows: Size of the batch.
            encoded: Encoder outputs by name of the graph input.
        """
        batch = self._by_name[self.fed_input].shape[0]
        states = (self._by_name[name] for name in self.states)
        values = {
            spec.name: to_ort_value(np.zeros(empty_state_sizes(spec, batch, rows), numpy_dtype(spec.dtype)))
            for spec in states
        }
        return GraphCache(self, values, 0, encoded)

    def run(
        self,
        tokens: Array,
        mask: Array | None = None,
        positions: Array | None = None,
        cache: GraphCache | None = None,
    ) -> Array:
        """Compute the logits of tokens.

        Args:
            tokens: Integers of shape [batch, sequence]: the tokens after the cached tokens.
            mask: Integers of shape [batch, cached + sequence], 0 for padding; None: no padding.
            positions: Integers of shape [batch, sequence], or several rows of them; None: continued from the cache.
            cache: State of earlier runs; updated in place.

        Returns:
            Logits of shape [batch, sequence or 1, vocabulary].

        Raises:
            UsageError: the values do not fit the graph, or the cache belongs to another model.
            StageError: ONNX Runtime fails.
        """
        if (
            mask is None
            and positions is None
            and isinstance(cache, GraphCache)
            and cache.follows_step(self, tokens.shape)
        ):
            feeds = cache.next_step(self.token_values(tokens, cache), self._value_inputs[0])
            return self._run_in_place(feeds, tokens.shape, cache)
        self._refuse_foreign_cache(cache, len(tokens))
        if self.has_cache and cache is None:
            cache = self.empty_cache(len(tokens))
        # For all tokens at once: image embeddings are distributed over them.
        values = self.token_values(tokens, cache)
        if cache is None or not self.has_cache:
            feeds = self._build_feeds(values, mask, positions, None)
            return self._session.run(feeds, [SCORES])[SCORES][:, : tokens.shape[1]]
        past = cache.length
        if self._pads_right and mask is not None and not np.all(np.asarray(mask)[:, past:]):
            return self._run_left_aligned(values, np.asarray(mask), positions, cache)
        self._refuse_beyond_held(past + tokens.shape[1])
        logits = [
            graph._run_step(
                values[:, start:end],
                None if mask is None else mask[:, : past + end],
                None if positions is None else positions[..., start:end],
                cache,
            )
            for start, end, graph in self._split_runs(tokens.shape[1], past, self._padded_count(mask, tokens.shape[1]))
        ]
        self.last_cache = cache
        return logits[0] if len(logits) == 1 else np.concatenate(logits, axis=1)

    def _run_left_aligned(self, values: Array, mask: Array, positions: Array | None, cache: GraphCache) -> Array:
        """Compute the logits of tokens with their padding moved behind them, where the graph expects it.

        The number of visible tokens is the length of a row in the cache, so later runs need no other order. From the
        first column with padding, tokens are read singly if a state of constant size would include the padding.

        Raises:
            UsageError: the graph has a fixed number of tokens, which end at the last position.
        """
        if self.held is not None:
            raise UsageError(
                f"the texts differ in length, but {self.name} was built for a fixed number of tokens and hides no "
                "padding after them",
                hint="Pass one text at a time, or texts of as many tokens.",
            )
        past, count = cache.length, values.shape[1]
        order = np.argsort(mask[:, past:] == 0, axis=1, kind="stable")
        if positions is None:
            positions = np.broadcast_to(np.arange(past, past + count), order.shape)
        rows = np.arange(len(values))[:, None]
        hidden = np.concatenate([mask[:, :past], mask[:, past:][rows, order]], axis=1)
        values, positions = values[rows, order], np.asarray(positions)[..., rows, order]
        first = int(np.argmin(hidden[:, past:].all(axis=0))) if self._constant_states else count
        ends = [*([first] if first else []), *range(first + 1, count + 1)]
        steps = [
            self._run_step(values[:, start:end], hidden[:, : past + end], positions[..., start:end], cache)
            for start, end in itertools.pairwise([0, *ends])
        ]
        scores = steps[0] if len(steps) == 1 else np.concatenate(steps, axis=1)
        logits = np.empty_like(scores)
        logits[rows, order] = scores
        return logits

    def _padded_count(self, mask: Array | None, count: int) -> int:
        """Return the number of new tokens to read singly: up to the last padding token in any row.

        A run of several tokens cannot skip padding in a recurrent state.
        """
        slots = [self._by_name[name].cache for name in self._constant_states]
        if mask is None or all(slot is not None and slot.kind == "conv" for slot in slots):
            return 0
        return int(np.max(np.flatnonzero((np.asarray(mask)[:, -count:] == 0).any(axis=0)), initial=-1)) + 1

    def _split_runs(self, count: int, past: int, padded: int = 0) -> list[tuple[int, int, DecoderGraph]]:
        """Return start and end of the tokens of each run, and the graph; the first ``padded`` tokens are read singly.

        With an empty cache the first run may be filled up with padding before its tokens, in the shortest graph that
        takes them. Later runs are full: those of shorter graphs come first.

        Args:
            count: Number of new tokens.
            past: Number of tokens in the cache.
            padded: Number of first tokens up to the last hidden one of any row.

        Raises:
            UsageError: after cached tokens, the new ones are no multiple of the tokens that the graph reads per run.
        """
        readers = [self, *(self._prompts if count > 1 else ())]
        longest = readers[-1]
        step = longest.length or max(count, 1)
        if self.held is None or longest.length is None:
            single = [(token, token + 1, self) for token in range(padded if step > 1 else 0)]
            start = len(single)
            joined = [(start, min(start + step, count), self) for start in range(start, max(count, 1), step)]
            return [*single, *joined]
        remainder = count % step
        if remainder and past and self.length != 1:
            raise UsageError(
                f"got {count} tokens after {past} in the KV cache, but {self.name} reads {step} in every run",
                hint=f"Pass a multiple of {step} tokens, or build the model with {opt.prompt_length} {step}.",
            )
        runs: list[tuple[int, int, DecoderGraph]] = []
        if remainder and not past:
            runs.append((0, remainder, next(graph for graph in readers if (graph.length or 1) >= remainder)))
        elif remainder:
            start = 0
            for graph in reversed(readers):
                length = graph.length or 1
                runs += [(end - length, end, graph) for end in range(start + length, remainder + 1, length)]
                start = runs[-1][1] if runs else 0
        return [*runs, *((start, start + step, longest) for start in range(remainder, count, step))]

    def _refuse_beyond_held(self, count: int) -> None:
        """Refuse more tokens than fit in a fixed-size cache and a run.

        Raises:
            UsageError: states the maximum.
        """
        room = self.most_tokens
        if room is not None and count > room:
            raise UsageError(
                f"the text has {count} tokens, but {self.name} was built for {room}: {self.held} in the KV "
                f"cache and {self.length} per run",
                hint=f"Shorten the text, or build the model with a longer past_sequence_length ({opt.shape_config}).",
            )

    @property
    def most_tokens(self) -> int | None:
        """Maximum number of tokens of a text for a fixed-size cache and a run; `None` without fixed sizes."""
        return None if self.held is None else self.held + (self.length or 1)

    def _run_step(self, values: Array, mask: Array | None, positions: Array | None, cache: GraphCache) -> Array:
        """Compute the logits of one run from its input values, and update the cache."""
        past = cache.length
        is_hidden = np.zeros(len(values), bool)
        if mask is not None and values.shape[1] == 1 and self._constant_states:
            is_hidden = np.asarray(mask)[:, -1] == 0
            if self._masks_new_tokens:
                # The result for padding is dropped, so the graph reads no mask for which it was not verified.
                mask = np.ones_like(mask)
        feeds = {
            **self._build_feeds(values, mask, positions, cache),
            **{name: cache.encoded[name] for name in self.encoded},
        }
        if self.adds_in_place:
            scores = self._run_in_place(feeds, values.shape[:2], cache)
            if values.shape[1] == 1 and mask is None and positions is None and self._has_plain_steps:
                cache.keep_step(len(values), feeds)
            return scores
        before = cache.values
        arrays, states = self._session.run_with_states(feeds, before, {*self.states.values()})
        cache.values = {
            name: states[output]
            if name not in self._growing_axes
            else _last_entries(states[output], self.held or 0, self._growing_axes[name])
            for name, output in self.states.items()
        }
        if is_hidden.any():
            for name, axis in self._constant_states.items():
                merged = hold_hidden_rows(to_array(before[name]), to_array(cache.values[name]), is_hidden, axis)
                cache.values[name] = to_ort_value(merged)
            for name in self.states.keys() - self._constant_states if self._pads_right else ():
                # The operator writes padding over the last token of a row.
                cache.values[name] = to_ort_value(
                    _hold_earlier_tokens(
                        to_array(before[name]), to_array(cache.values[name]), is_hidden, self.batch_axes[name]
                    )
                )
        cache.length = past + values.shape[1]
        self.last_cache = cache
        scores = arrays[SCORES]
        return scores if self.held is None else scores[:, -values.shape[1] :]

    def _run_in_place(self, feeds: dict[str, Array], sizes: tuple[int, ...], cache: GraphCache) -> Array:
        """Compute the logits of rows and tokens of these sizes, and write their states after those of the cache."""
        arrays = cache.run_in_place(cache.length + sizes[1])(feeds, self._step_outputs.get(sizes, {}))
        cache.length += sizes[1]
        if sizes[1] == 1:
            self._step_outputs = {sizes: arrays}
        self.last_cache = cache
        return arrays[SCORES]

    def _build_feeds(
        self, values: Array, mask: Array | None, positions: Array | None, cache: GraphCache | None
    ) -> dict[str, Array]:
        """Return the graph inputs of one run, padded to fixed sizes.

        Raises:
            UsageError: there are too many tokens, or the mask has the wrong shape or hides tokens of a graph without a
                mask.
        """
        rows, count = values.shape[:2]
        past = cache.length if cache is not None else 0
        filled = count
        if self.length is not None and not self.has_cache:
            filled = self.length  # on the right, where no earlier token sees it
        if count > filled:
            raise UsageError(
                f"got {count} tokens, but {self.name} was built for {filled}",
                hint=f"Build the model with a dynamic sequence length: {opt.dynamic_seq_len}.",
            )
        mask = np.ones((rows, past + count), np.int64) if mask is None else np.asarray(mask)
        if mask.shape != (rows, past + count):
            raise UsageError(
                f"attention_mask is {array_words(mask)}; expected [{rows}, {past + count}]: {past} tokens in "
                f"the KV cache and {count} new ones"
            )
        if len(self._constant_states) < len(self.states) and MASK not in self._by_name:
            _refuse_padding(mask, self.name)
        if positions is None:
            positions = np.broadcast_to(np.arange(past, past + count), (rows, count))
        if self.held is not None:
            # The newest tokens are last; none between them are missing.
            filled = self.length or count
            mask = np.pad(mask, ((0, 0), (self.held + filled - past - count, 0)))
            positions = np.pad(positions, [(0, 0)] * (np.ndim(positions) - 1) + [(filled - count, 0)])
            values = np.pad(values, [(0, 0), (filled - count, 0), *[(0, 0)] * (values.ndim - 2)])
            past = self.held
        arrays = {
            **_split_last_axis(self._value_inputs, _pad_to_length(values, filled)),
            MASK: _pad_to_length(mask[:, past:], filled)
            if self._masks_new_tokens
            else _pad_to_length(mask, past + filled),
            POSITIONS: _all_positions(np.asarray(positions), self.position_rows, rows, filled),
        }
        if TOKEN_TYPES in self._by_name:
            arrays[TOKEN_TYPES] = _pad_to_length(self.token_kinds(values, cache), filled)
        hint = "Pass that many rows and tokens, or build the model with dynamic sizes."
        return {spec.name: fitted_array(spec, arrays[spec.name], self.name, hint) for spec in self._fed_inputs}

    def token_values(self, tokens: Array, cache: GraphCache | None) -> Array:  # noqa: ARG002  # read where others derive
        """Return the input values of tokens: the token ids.

        Args:
            tokens: Integers of shape [batch, sequence].
            cache: State of earlier runs.
        """
        return tokens

    def token_kinds(self, values: Array, cache: GraphCache | None) -> Array:  # noqa: ARG002  # read where others derive
        """Return the type of each token of a run, from their embeddings or ids: the type of text."""
        return np.full(values.shape[:2], self._plain_kind, np.int64)

    def _refuse_foreign_cache(self, cache: object, rows: int) -> None:
        """Refuse a cache of another graph, or with another number of rows.

        Raises:
            UsageError: the cache does not fit.
        """
        if cache is None:
            return
        if not isinstance(cache, GraphCache) or not cache.belongs_to(self):
            raise UsageError(
                f"cannot continue {_cache_words(cache)}: {self.name} accepts only a cache that it returned",
                hint="Start without a cache, then pass the one of the previous result.",
            )
        # All states have as many rows.
        for name, value in itertools.islice(cache.values.items(), 1):
            cached_rows = value.shape()[self.batch_axes[name]]
            if cached_rows != rows:
                raise UsageError(
                    f"got {rows} rows of tokens, but the KV cache has {cached_rows}",
                    hint="Start without a cache, or pass as many rows as before.",
                )

    def _refuse_other_graphs(self) -> None:
        """Refuse a graph without token input or scores, and a graph with an unknown input.

        Raises:
            InputError: the message names the inputs.
        """
        if self.fed_input not in self._by_name or SCORES not in self._session.outputs:
            raise InputError(
                f"{self.name} does not generate: it takes {', '.join(self._by_name) or 'nothing'} and returns "
                f"{', '.join(self._session.outputs)}; expected {self.fed_input} and {SCORES}",
                hint="Build its checkpoint for generation: winml build CHECKPOINT -o built --task text-generation",
            )
        _refuse_scores_of_texts(self._session)
        known_inputs = {*self._value_inputs, MASK, POSITIONS, TOKEN_TYPES, *self.states, *self.encoded}
        if unknown_inputs := [name for name in self._by_name if name not in known_inputs]:
            raise InputError(
                f"{self.name} takes {unknown_inputs[0]!r}, and the values for it are unknown",
                hint="If it is one part of a model, pass the folder. An encoder-decoder requires a KV cache to "
                f"generate: build it without {opt.no_cache}.",
            )


def _split_last_axis(names: Sequence[str], values: Array) -> dict[str, Array]:
    """Split the last axis evenly: input name → share."""
    if len(names) == 1:
        return {names[0]: values}
    return dict(zip(names, np.split(values, len(names), axis=-1), strict=True))


def _refuse_padding(mask: Array, name: str) -> None:
    """Refuse rows of different lengths for a graph without a mask of the padding.

    Raises:
        UsageError: the rows have different lengths.
    """
    if not mask.all():
        raise UsageError(
            f"the rows have different lengths, but {name} takes no attention_mask to mask the padding",
            hint="Pass rows of equal length, or one row at a time.",
        )


def _refuse_scores_of_texts(session: Session) -> None:
    """Refuse a graph with scores of the whole text.

    Raises:
        InputError: its scores are not per token.
    """
    shape = session.output_shapes[SCORES]
    if shape and len(shape) != 3:
        raise InputError(
            f"{session.name} does not generate: {SCORES} has shape {list(shape)}, scores of the whole text; "
            "expected scores of each token, [batch, tokens, vocabulary]",
            hint="Build its checkpoint for generation: winml build CHECKPOINT -o built --task text-generation",
        )


def _complete_head_sizes(
    inputs: Sequence[InputTensorSpec], session: Session, states: Collection[str]
) -> tuple[InputTensorSpec, ...]:
    """Return the inputs with fixed head sizes of states: genai's builder states the size in a config only.

    Raises:
        InputError: the config has no head size.
    """
    is_open = [spec.name in states and len(spec.shape) == 4 and not isinstance(spec.shape[-1], int) for spec in inputs]
    config = None if session.source_path is None else session.source_path.with_name(GENAI_CONFIG_NAME)
    if not any(is_open) or config is None or library_file(config.parent, config.name) is None:
        return tuple(inputs)
    try:
        size = read_json_file(config)["model"]["decoder"]["head_size"]
    except (WinMLError, OSError, ValueError, TypeError, KeyError):
        size = None
    if not isinstance(size, int):
        raise InputError(
            f"{config}: no model.decoder.head_size, and {session.name} does not say how large a state of its cache is",
            hint="Build the model again.",
        )
    return tuple(
        spec.model_copy(update={"shape": (*spec.shape[:-1], size)}) if is_open_here else spec
        for spec, is_open_here in zip(inputs, is_open, strict=True)
    )


def _growing_axes(session: Session, states: Mapping[str, str]) -> dict[str, int]:
    """Return state → axis along which a run appends its tokens, for states of fixed sizes."""
    return {
        name: axis
        for name, output in states.items()
        for axis, (before, after) in enumerate(
            zip(session.input_shapes[name], session.output_shapes[output], strict=False)
        )
        if isinstance(before, int) and isinstance(after, int) and after > before
    }


def _read_nodes(session: Session) -> Sequence[NodeSummary]:
    """Return the nodes of a graph; ``()`` without a file that can be read."""
    try:
        return () if session.source_path is None else tuple(node_summaries(session.source_path))
    except (OSError, WireError):
        return ()


def _hides_padding_by_lengths(node: NodeSummary) -> bool:
    """Return True for an attention over a cache without a mask: padding comes after the tokens of a row."""
    bias = node.inputs[_BIAS_PLACE] if len(node.inputs) > _BIAS_PLACE else ""
    return (node.operator, node.domain) == _ADDING and not bias


def _adds_in_place(nodes: Sequence[NodeSummary], states: Mapping[str, str]) -> bool:
    """Return True if the only reader of every state is an operator that extends the state in place, and returns it."""
    if not nodes:
        return False
    readers: dict[str, list[NodeSummary]] = {name: [] for name in states}
    for node in nodes:
        for name in readers.keys() & {*node.inputs}:
            readers[name].append(node)
    return all(
        len(nodes) == 1 and (nodes[0].operator, nodes[0].domain) == _ADDING and _is_next(nodes[0], name, output)
        for name, output in states.items()
        for nodes in [readers[name]]
    )


def _is_next(node: NodeSummary, past: str, present: str) -> bool:
    """Return True if a node reads a state once and returns its next value at the corresponding output."""
    input_index = node.inputs.index(past)
    if node.inputs.count(past) != 1 or input_index not in _PRESENT_PLACES:
        return False
    return node.outputs[_PRESENT_PLACES[input_index] : _PRESENT_PLACES[input_index] + 1] == (present,)


def _held_tokens(session: Session, axes: Mapping[str, int]) -> int | None:
    """Return the fixed number of cached tokens; `None` if dynamic."""
    return next(
        (int(size) for name, axis in axes.items() if isinstance(size := session.input_shapes[name][axis], int)), None
    )


def _position_rows(positions: InputTensorSpec | None) -> int | None:
    """Return the number of positions per token, such as frame, row and column; `None` for a single one."""
    shape = () if positions is None else positions.shape
    return shape[0] if len(shape) > 2 and isinstance(shape[0], int) else None


def _all_positions(positions: Array, several: int | None, rows: int, filled: int) -> Array:
    """Return positions padded to ``filled`` tokens: [rows, filled], or [several, rows, filled]."""
    if several is None:
        return _pad_to_length(positions, filled)
    each = np.broadcast_to(positions, (several, rows, positions.shape[-1]))
    return np.stack([_pad_to_length(axis_positions, filled) for axis_positions in each])


def _pad_to_length(array: Array, length: int) -> Array:
    """Pad axis 1 of an array with zeros to a length."""
    missing = length - array.shape[1]
    return np.pad(array, ((0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2))) if missing > 0 else array


def _cache_words(cache: Any) -> str:
    """Name a cache, or the type of any other object, for messages."""
    return f"the cache of {cache.graph_name}" if isinstance(cache, GraphCache) else f"a {type(cache).__name__}"


def rows_of(tokens: Sequence[int]) -> Array:
    """Return tokens as a batch with a single row: int64 of shape [1, tokens]."""
    return np.array([tokens], np.int64)


def feeds_between(giver: Session, taker: Session) -> dict[str, str]:
    """Return output → connected input of the next graph.

    Raises:
        InputError: the files do not connect the graphs, or belong to another model.
    """
    try:
        record = load_metadata(giver.metadata.get(PART_KEY) or "{}")
        name = load_metadata(taker.metadata.get(PART_KEY) or "{}").get("name")
        feeds = {feed["output"]: feed["input"] for feed in record.get("feeds", ()) if feed["part"] == name}
    except (ValueError, KeyError, TypeError, AttributeError):
        feeds = {}
    if not feeds or not set(feeds) <= set(giver.outputs) or not set(feeds.values()) <= set(taker.inputs):
        raise InputError(
            f"{giver.name} and {taker.name} have no metadata that connects them",
            hint="Build both again from one model with this version of winml.",
        )
    return feeds


def text_tokens(decoder: Session) -> TextTokens | None:
    """Return the start and end tokens in the metadata of a decoder; `None` if not stated.

    Raises:
        InputError: the metadata is damaged.
    """
    try:
        text = load_metadata(decoder.metadata.get(PART_KEY) or "{}").get("text")
        return None if text is None else TextTokens.from_fields(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{decoder.name}: {PART_KEY} is damaged", hint="Export the model again.") from error
