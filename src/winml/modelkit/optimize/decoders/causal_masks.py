"""Recognition of attention masks by probing their operators, and writing of equivalent masks.

A rewritten mask depends on the lengths of ``attention_mask`` and of the tokens only, never on the length of the cache:
runtimes with a preallocated cache of maximum length then get the same outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.errors import StageError
from winml.modelkit.optimize.decoders.interface import DecoderInterface
from winml.modelkit.optimize.decoders.probing import Probe, probe_between
from winml.modelkit.optimize.graph_matching import NodeBuilder, tag_like

_HIDDEN = -1e4
"""Chosen: a mask value of a hidden token is below this, in every dtype."""
_LOWEST = float(np.finfo(np.float16).min)
"""Chosen: gives probability zero beside any score, and is representable in every float type."""
_SIZES = ((2, 5, 7), (1, 1, 9), (2, 4, 0), (3, 1, 4))
"""Chosen: rows, tokens and tokens in the cache of the runs; a prompt, steps, and several tokens after a cache."""
_WIDEST_WINDOW = 1 << 16
"""Chosen: of a wider window the runs that show it would need too much memory."""
_SEED = 0
_INTEGER = ir.DataType.INT64
"""Type of ``attention_mask`` and of shapes."""


@dataclass(frozen=True)
class CausalMask:
    """A mask that hides later tokens, tokens hidden by ``attention_mask``, and tokens before the window."""

    window: int | None = None
    """Number of last tokens that are visible, including the current token; None: all."""

    def visible(self, mask: Array, tokens: int) -> Array:
        """Return True if a token counts: rows × 1 × tokens × all tokens."""
        total = mask.shape[1]
        now = np.arange(total - tokens, total)[:, None]
        past = np.arange(total)[None]
        is_seen = past <= now
        if self.window is not None:
            is_seen &= past > now - self.window
        output: Array = is_seen[None, None] & (mask[:, None, None] != 0)
        return output


def find_mask(value: ir.Value, interface: DecoderInterface, window: int | None) -> CausalMask | None:
    """Recognize the mask computed by a value added to the scores; `None` for an unknown mask.

    Args:
        value: Added to the scores: rows × heads or 1 × tokens × all tokens, or a shape that broadcasts to it.
        interface: The inputs of the graph.
        window: Window of the layer, as the file describes its cache.
    """
    probe = probe_between(value, interface.is_sized)
    if probe is None or interface.mask not in probe.leaves:
        return None
    for mask in dict.fromkeys((CausalMask(), CausalMask(window))):
        if (mask.window or 0) <= _WIDEST_WINDOW and _holds_for_samples(
            probe, interface, mask, partial(_matches_mask, probe, mask), window
        ):
            return mask
    return None


def _matches_mask(probe: Probe, mask: CausalMask, sample: _Sample) -> bool:
    """Return True if the output of a subgraph is 0 for visible tokens, and hides all other tokens."""
    visible = sample.visible(mask)
    added = probe.run(sample.feeds)
    if added.ndim != 4 or any(
        size not in (1, expected_size) for size, expected_size in zip(added.shape, visible.shape, strict=True)
    ):
        return False
    added = np.broadcast_to(added, visible.shape)
    return bool((added[visible] == 0).all() and (added[~visible] < _HIDDEN).all())


def is_blind(value: ir.Value, interface: DecoderInterface, mask: CausalMask) -> bool:
    """Return True if a value marks the tokens without a visible token: rows × 1 × tokens × 1.

    Args:
        value: The value.
        interface: The inputs of the graph.
        mask: Mask of the attention.
    """
    probe = probe_between(value, interface.is_sized)
    if probe is None:
        return False

    def marks_blind_tokens(sample: _Sample) -> bool:
        """Return True if a sample marks exactly the tokens without a visible token."""
        expected = ~sample.visible(mask).any(-1, keepdims=True)
        result = probe.run(sample.feeds)
        return result.ndim == 4 and result.dtype == np.bool_ and bool((result == expected).all())

    return _holds_for_samples(probe, interface, mask, marks_blind_tokens)


@dataclass(frozen=True)
class _Sample:
    """Sample inputs of a probed subgraph."""

    mask: Array
    tokens: int
    feeds: Mapping[ir.Value, Array]

    def visible(self, mask: CausalMask) -> Array:
        return mask.visible(self.mask, self.tokens)


def _holds_for_samples(
    probe: Probe,
    interface: DecoderInterface,
    mask: CausalMask,
    condition: Callable[[_Sample], bool],
    window: int | None = None,
) -> bool:
    """Return True if a condition holds for all samples; False if the subgraph does not run on a sample."""
    width = mask.window or window
    beyond = ((1, 3, width + 2),) if width is not None and width <= _WIDEST_WINDOW else ()
    samples = [_draw_sample(probe, interface, sizes) for sizes in (*_SIZES, *beyond)]
    try:
        return all(sample is not None and condition(sample) for sample in samples)
    except StageError:  # not a function of any number of tokens
        return False


def _draw_sample(probe: Probe, interface: DecoderInterface, sizes: tuple[int, int, int]) -> _Sample | None:
    """Draw a mask with hidden tokens in every row, and inputs of a subgraph; `None` if a size is unknown.

    Args:
        probe: The subgraph.
        interface: Inputs of the decoder.
        sizes: Rows, new tokens and cached tokens.
    """
    rows, tokens, past = sizes
    generator = np.random.default_rng(_SEED + sum(sizes))
    mask = np.ones((rows, past + tokens), np.int64)
    mask[0, : min(3, past + tokens - 1)] = 0
    if rows > 1:
        # Anything may be hidden but the last token.
        mask[1:, :-1] = generator.integers(0, 2, (rows - 1, past + tokens - 1))
    feeds = interface.feeds(probe.leaves, mask, tokens, generator)
    return _Sample(mask, tokens, feeds) if feeds is not None else None


@dataclass
class MaskWriter:
    """Writes the mask inputs of attention operators, once for all layers of a graph."""

    graph: ir.Graph
    interface: DecoderInterface
    _value_by_name: dict[str, ir.Value] = field(default_factory=dict)
    _tagged: ir.Node | None = None

    def __post_init__(self) -> None:
        self._builder = NodeBuilder("/attention/mask/")

    def tag_as(self, node: ir.Node | None) -> None:
        """Set the source of the tag of new nodes; only the first call counts."""
        self._tagged = self._tagged or node

    def bias(self, mask: CausalMask) -> ir.Value:
        """Return the value added to the scores: rows × 1 × tokens × all tokens. Later tokens are not hidden here.

        Computed in integers: GPU providers leave these to the CPU, which has the mask, and copy one value.
        """
        hidden = self._node_output("hidden", "Sub", [self.interface.mask, self._scalar_constant("one", 1, _INTEGER)])
        factor = self._scalar_constant("factor", -int(_LOWEST), _INTEGER)
        row = self._node_output("numbers", "Mul", [hidden, factor])
        plane = self._node_output("plane", "Unsqueeze", [row, self._vector_constant("middle", [1, 2])])
        name = "bias"
        if mask.window is not None:
            name = f"bias_{mask.window}"
            plane = self._node_output(f"windowed_{mask.window}", "Add", [plane, self._window_bias(mask.window)])
            # The sum of two of the lowest is beyond float16.
            whole = self._node_output(f"limited_{mask.window}", "Max", [plane, self._lowest_bias()])
        else:
            sizes = [self._vector_constant("single", [1, 1]), self._token_count(), self._vector_constant("last", [1])]
            shape = self._node_output("shape", "Concat", sizes, axis=0)
            whole = self._node_output("expanded", "Expand", [plane, shape])
        return self._node_output(name, "Cast", [whole], to=ir.DataType.FLOAT)

    def lengths(self) -> tuple[ir.Value, ir.Value]:
        """Return, as int32, the position of the last token in every row, and the number of all tokens."""
        last = self._node_output("last_place", "Sub", [self._total_length(), self._scalar_constant("one", 1, _INTEGER)])
        rows = self._node_output("rows", "Shape", [self.interface.mask], start=0, end=1)
        spread = self._node_output("spread", "Expand", [last, rows])
        return self._node_output("places", "Cast", [spread], to=ir.DataType.INT32), self._total_number()

    def row_lengths(self) -> tuple[ir.Value, ir.Value]:
        """Return, as int32, the position of the last visible token in every row, and the number of all tokens.

        Tokens are counted without gaps: the position is that among the visible tokens.
        """
        axes = self._vector_constant("last", [1])
        counted = self._node_output("visible_count", "ReduceSum", [self.interface.mask, axes], keepdims=0)
        last = self._node_output("last_visible", "Sub", [counted, self._scalar_constant("one", 1, _INTEGER)])
        return self._node_output("visible_places", "Cast", [last], to=ir.DataType.INT32), self._total_number()

    def sees_any(self, mask: CausalMask) -> ir.Value:
        """Return True for tokens with a visible token, inside the window if any: rows × tokens × 1."""
        counted, now = self._count_visible(), self._count_visible_now()
        start, axes = self._first_new_position(), self._vector_constant("last", [1])
        suffix = ""
        if mask.window is not None:
            suffix = f"_{mask.window}"
            shift = self._vector_constant(f"shift{suffix}", [0, mask.window, 0, 0])
            shifted = self._node_output(f"shifted{suffix}", "Pad", [counted, shift])
            before = self._node_output(f"before{suffix}", "Slice", [shifted, start, self._total_length(), axes])
            now = self._node_output(f"inside{suffix}", "Sub", [now, before])
        attends = self._node_output(
            f"seen{suffix}", "Greater", [now, self._scalar_constant("nothing", 0, ir.DataType.INT64)]
        )
        return self._node_output(f"seen_any{suffix}", "Unsqueeze", [attends, self._vector_constant("third", [2])])

    def zero(self) -> ir.Value:
        """Return the number 0."""
        return self._scalar_constant("zero", 0.0, ir.DataType.FLOAT)

    def insert(self) -> None:
        """Insert the nodes at the start of the graph, and tag them."""
        if self._tagged is not None:
            for node in self._builder.nodes:
                tag_like(node, self._tagged, "inherited")
        if self._builder.nodes:
            self.graph.insert_before(self.graph[0], self._builder.nodes)

    def _window_bias(self, window: int) -> ir.Value:
        """Return the bias of a window: lowest before the window, 0 elsewhere."""
        visible = self._scalar_constant("first", 0, _INTEGER)
        return self._node_output(f"far_{window}", "Where", [self._outside(window), self._lowest_bias(), visible])

    def _outside(self, window: int) -> ir.Value:
        """Return True before a window of cache positions, padding included: tokens × all tokens."""
        zero, one = (
            self._scalar_constant(name, number, ir.DataType.INT64) for name, number in (("first", 0), ("step", 1))
        )
        total = self._node_output("total_number", "Squeeze", [self._total_length()])
        tokens = self._node_output("tokens_number", "Squeeze", [self._token_count()])
        past = self._node_output("past_places", "Range", [zero, total, one])
        begin = self._node_output("first_place", "Sub", [total, tokens])
        now = self._node_output("now_places", "Range", [begin, total, one])
        column = self._node_output("now_column", "Unsqueeze", [now, self._vector_constant("last", [1])])
        width = self._scalar_constant(f"window_{window}", window, ir.DataType.INT64)
        reach = self._node_output(f"reach_{window}", "Sub", [column, width])
        return self._node_output(f"outside_{window}", "LessOrEqual", [past, reach])

    def _count_visible(self) -> ir.Value:
        """Return the number of visible tokens up to each position: rows × all tokens."""
        return self._node_output(
            "counted", "CumSum", [self.interface.mask, self._scalar_constant("axis", 1, ir.DataType.INT64)]
        )

    def _count_visible_now(self) -> ir.Value:
        """Return the number of visible tokens up to each new token: rows × tokens."""
        counted, start, axes = self._count_visible(), self._first_new_position(), self._vector_constant("last", [1])
        return self._node_output(
            "now", "Slice", [counted, start, self._vector_constant("ends", [np.iinfo(np.int64).max]), axes]
        )

    def _first_new_position(self) -> ir.Value:
        """Return the position of the first new token."""
        return self._node_output("start", "Sub", [self._total_length(), self._token_count()])

    def _lowest_bias(self) -> ir.Value:
        """Return the bias of a hidden token, as an integer."""
        return self._scalar_constant("lowest", int(_LOWEST), _INTEGER)

    def _total_number(self) -> ir.Value:
        """Return the number of all tokens, as int32."""
        total = self._node_output("total_number", "Squeeze", [self._total_length()])
        return self._node_output("count", "Cast", [total], to=ir.DataType.INT32)

    def _total_length(self) -> ir.Value:
        """Return the number of all tokens, including cached tokens."""
        return self._node_output("total", "Shape", [self.interface.mask], start=1, end=2)

    def _token_count(self) -> ir.Value:
        """Return the number of new tokens."""
        return self._node_output("tokens", "Shape", [self.interface.tokens], start=1, end=2)

    def _scalar_constant(self, name: str, number: float, dtype: ir.DataType) -> ir.Value:
        return self._add_constant(name, np.array(number, dtype.numpy()))

    def _vector_constant(self, name: str, numbers: list[int]) -> ir.Value:
        return self._add_constant(name, np.array(numbers, np.int64))

    def _add_constant(self, name: str, array: Array) -> ir.Value:
        """Return a constant; created once per name."""
        name = f"constant_{name}"
        if name not in self._value_by_name:
            self._value_by_name[name] = self._builder.constant(array, name)
        return self._value_by_name[name]

    def _node_output(self, name: str, operator: str, inputs: list[ir.Value], **attributes: Any) -> ir.Value:
        """Return the output of a node; created once per name."""
        if name not in self._value_by_name:
            dtype: ir.DataType | None = attributes.get("to") or inputs[1 if operator == "Where" else 0].dtype
            if operator in ("Greater", "LessOrEqual"):
                dtype = ir.DataType.BOOL
            elif operator == "Shape":
                dtype = ir.DataType.INT64
            self._value_by_name[name] = self._builder.add(operator, inputs, name, dtype, **attributes)
        return self._value_by_name[name]
