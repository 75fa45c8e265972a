"""Recognizes the attention of a decoder with a cache among the operators of a graph. Changes nothing."""

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
from winml.modelkit.optimize.decoders.rotations import TO_HEADS, Probe, probe_between
from winml.modelkit.optimize.graph_matching import (
    behind_nan_guard,
    constant_number,
    constant_numbers,
    has_one_use,
    is_operator,
    permutation_of,
    producer_of,
    rank_of,
    tag_like,
    without_full_slices,
    without_scale,
)

_SWAPPED = (0, 1, 3, 2)
"""Permutation that exchanges sequence and size for the product of queries and keys."""
_REPEATED_AXIS = 2
"""Axis of [batch, heads, ·, sequence, size] along which heads are repeated."""


@dataclass(frozen=True)
class CacheUpdate:
    """Keys or values in the cache, and those of this run behind them."""

    past: ir.Value
    """Input of the graph: batch × heads × past × size."""
    new: ir.Value
    """Batch × heads × sequence × size."""
    present: ir.Value
    """Output of the graph: the two joined."""

    @property
    def heads(self) -> int:
        """Number of heads of keys and values."""
        return _fixed(self.past, 1)

    @property
    def size(self) -> int:
        """Size of a head."""
        return _fixed(self.past, 3)


@dataclass(frozen=True)
class CachedAttention:
    """The parts of one attention."""

    query: ir.Value
    """Batch × heads × sequence × size, before any factor."""
    heads: int
    """Number of heads of the queries, a multiple of that of the keys."""
    key: CacheUpdate
    value: CacheUpdate
    scale: float
    added: ir.Value
    """What is added to the scores."""
    is_guarded: bool
    """Whether tokens that attend to nothing are set to zero."""
    blind: ir.Value | None
    """Which tokens are, batch × 1 × sequence × 1; None where those are whose probabilities are no numbers."""
    output: ir.Node
    """The reshape that joins the heads: batch × sequence × heads · size."""


def match_cached_attention(softmax: ir.Node) -> CachedAttention | None:
    """Return the attention a softmax belongs to; None where it is of another kind."""
    scores = softmax.inputs[0]
    if scores is None or rank_of(scores) != 4 or softmax.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    probabilities, is_guarded = behind_nan_guard(softmax.outputs[0])
    joined = _match_head_join(probabilities)
    parts = _match_scores(scores)
    if joined is None or parts is None:
        return None
    product, added, scale = parts
    context, blind, output = joined
    if product.inputs[0] is None or product.inputs[1] is None or context.inputs[1] is None:
        return None
    query, query_scale = without_scale(product.inputs[0])
    keys, key_scale = _untransposed(product.inputs[1])
    if keys is None:
        return None
    key, value = _match_update(keys), _match_update(context.inputs[1])
    heads = _size_of(product.outputs[0], 1)
    if key is None or value is None or heads is None or rank_of(query) != 4:
        return None
    if (key.heads, key.size) != (value.heads, value.size) or heads % key.heads:
        return None
    return CachedAttention(
        query, heads, key, value, scale * query_scale * key_scale, added, is_guarded or blind is not None, blind, output
    )


def hidden_size_of(value: ir.Value) -> tuple[ir.Value, int] | None:
    """Return what was split into heads, batch × sequence × width, and its width, for [batch, sequence, heads, size].

    None where operators between do more than to split it.
    """
    node = producer_of(value, "Reshape")
    source = node.inputs[0] if node is not None else None
    if source is None or rank_of(source) != 3:
        return None
    width = _size_of(source, 2)
    return (source, width) if width is not None else None


def _match_head_join(probabilities: ir.Value) -> tuple[ir.Node, ir.Value | None, ir.Node] | None:
    """Return the product with the values, which of its tokens are set to zero, and the reshape that joins the heads."""
    context = _only_computing_user(probabilities)
    if context is None or not is_operator(context, "MatMul") or context.inputs[0] is not probabilities:
        return None
    user, blind = _only_computing_user(context.outputs[0]), None
    if user is not None and is_operator(user, "Where") and user.inputs[2] is context.outputs[0]:
        if constant_number(user.inputs[1]) != 0.0:
            return None
        blind, user = user.inputs[0], _only_computing_user(user.outputs[0])
    if user is not None and is_operator(user, "Reshape") and _keeps_heads(user):
        user = _only_computing_user(user.outputs[0])
    if user is None or not is_operator(user, "Transpose") or permutation_of(user) != TO_HEADS:
        return None
    output = _only_computing_user(user.outputs[0])
    if output is None or not is_operator(output, "Reshape") or rank_of(output.outputs[0]) != 3:
        return None
    return context, blind, output


def _only_computing_user(value: ir.Value) -> ir.Node | None:
    """Return the one node that reads the numbers of a value; others may read its shape."""
    users = [user for user, _ in value.uses() if not is_operator(user, "Shape")]
    return users[0] if len(users) == 1 and not value.is_graph_output() else None


def _keeps_heads(reshape: ir.Node) -> bool:
    """Say whether a reshape leaves [batch, heads, sequence, size] as it is: batch, sequence and size stay in place."""
    before, after = reshape.inputs[0], reshape.outputs[0]
    if before is None or rank_of(before) != 4 or rank_of(after) != 4:
        return False
    size = _size_of(before, 3)
    return size is not None and _size_of(after, 3) == size and _size_of(after, 1) in (None, _size_of(before, 1))


def _match_scores(scores: ir.Value) -> tuple[ir.Node, ir.Value, float] | None:
    """Return the product of queries and keys, what is added to it, and the factor it is multiplied by."""
    node = producer_of(scores, "Add")
    if node is None or not has_one_use(scores):
        return None
    for side, added in (node.inputs, node.inputs[::-1]):
        if side is None or added is None or not has_one_use(side):
            continue
        unscaled, scale = without_scale(side)
        product = producer_of(unscaled, "MatMul")
        if product is not None and has_one_use(unscaled):
            return product, added, scale
    return None


def _untransposed(value: ir.Value) -> tuple[ir.Value | None, float]:
    """Return the keys before they are transposed for the product, and the factor they are multiplied by."""
    value, outer = without_scale(value)
    node = producer_of(value, "Transpose")
    if node is not None and permutation_of(node) == _SWAPPED and node.inputs[0] is not None:
        inner, scale = without_scale(node.inputs[0])
        return inner, outer * scale
    return _untransposed_flat(value), outer


def _untransposed_flat(value: ir.Value) -> ir.Value | None:
    """Return [batch, heads, sequence, size] where a value is the same transposed with batch and heads as one axis."""
    spread = producer_of(value, "Reshape")
    node = producer_of(spread.inputs[0], "Transpose") if spread is not None else None
    flat = producer_of(node.inputs[0], "Reshape") if node is not None and permutation_of(node) == (0, 2, 1) else None
    source = flat.inputs[0] if flat is not None else None
    if source is None or rank_of(source) != 4 or rank_of(value) != 4:
        return None
    heads, size = _size_of(source, 1), _size_of(source, 3)
    is_same = heads is not None and size is not None and (_size_of(value, 1), _size_of(value, 2)) == (heads, size)
    return source if is_same else None


def _match_update(value: ir.Value) -> CacheUpdate | None:
    """Return the update of the cache whose result a value is, heads repeated or not."""
    node = producer_of(without_full_slices(_unrepeated(value)), "Concat")
    if node is None or node.attributes.get_int("axis", 0) not in (2, -2) or len(node.inputs) != 2:
        return None
    past, new = node.inputs
    if past is None or new is None or not past.is_graph_input() or not node.outputs[0].is_graph_output():
        return None
    if rank_of(past) != 4 or _size_of(past, 1) is None or _size_of(past, 3) is None:
        return None
    return CacheUpdate(past, new, node.outputs[0])


def _unrepeated(value: ir.Value) -> ir.Value:
    """Return keys or values before each head was repeated for several of the queries."""
    reshape = producer_of(value, "Reshape")
    expand = producer_of(reshape.inputs[0], "Expand") if reshape is not None else None
    single = without_full_slices(expand.inputs[0]) if expand is not None and expand.inputs[0] is not None else None
    unsqueeze = producer_of(single, "Unsqueeze")
    if unsqueeze is None or len(unsqueeze.inputs) < 2 or rank_of(value) != 4 or unsqueeze.inputs[0] is None:
        return value
    return unsqueeze.inputs[0] if constant_numbers(unsqueeze.inputs[1]) == [_REPEATED_AXIS] else value


def _size_of(value: ir.Value, axis: int) -> int | None:
    if value.shape is None or len(value.shape) <= axis:
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None


def _fixed(value: ir.Value, axis: int) -> int:
    size = _size_of(value, axis)
    assert size is not None  # matched
    return size


# --- Which tokens may a token attend to? Read from the operators that make the mask, by probing, and written anew.
#
# A mask written anew needs the lengths of ``attention_mask`` and of the tokens only, never that of the cache: readers
# that give the cache a buffer of the greatest length then get the same answer.


_HIDDEN = -1e4
"""Chosen: what is added to a score that does not count is below, in every dtype."""
_LOWEST = float(np.finfo(np.float16).min)
"""Chosen: a probability of zero beside any score, and a number in every float there is."""
_SIZES = ((2, 5, 7), (1, 1, 9), (2, 4, 0), (3, 1, 4))
"""Chosen: rows, tokens and tokens in the cache of the runs; a prompt, steps, and several tokens after a cache."""
_WIDEST_WINDOW = 1 << 16
"""Chosen: of a wider window the runs that show it would need too much memory."""
_SEED = 0


@dataclass(frozen=True)
class CausalMask:
    """No token after it, none that ``attention_mask`` hides, and none before the window."""

    window: int | None = None
    """How many of the last tokens count, this one included; None: all."""

    def visible(self, mask: Array, tokens: int) -> Array:
        """Return whether a token counts: rows × 1 × tokens × all tokens."""
        total = mask.shape[1]
        now = np.arange(total - tokens, total)[:, None]
        past = np.arange(total)[None]
        is_seen = past <= now
        if self.window is not None:
            is_seen &= past > now - self.window
        output: Array = is_seen[None, None] & (mask[:, None, None] != 0)
        return output


def find_mask(value: ir.Value, interface: DecoderInterface, window: int | None) -> CausalMask | None:
    """Return what a value that is added to the scores says; None where it says something else.

    Args:
        value: Added to the scores: rows × heads or 1 × tokens × all tokens, or what broadcasts to it.
        interface: The inputs of the graph.
        window: Of the layer, as the file describes its cache.
    """
    probe = probe_between(value, interface.is_sized)
    if probe is None or interface.mask not in probe.leaves:
        return None
    for mask in dict.fromkeys((CausalMask(), CausalMask(window))):
        if (mask.window or 0) <= _WIDEST_WINDOW and _all(probe, interface, mask, partial(_hides, probe, mask), window):
            return mask
    return None


def _hides(probe: Probe, mask: CausalMask, draw: _Draw) -> bool:
    visible = draw.visible(mask)
    added = probe.run(draw.feeds)
    if added.ndim != 4 or any(left not in (1, right) for left, right in zip(added.shape, visible.shape, strict=True)):
        return False
    added = np.broadcast_to(added, visible.shape)
    return bool((added[visible] == 0).all() and (added[~visible] < _HIDDEN).all())


def is_blind(value: ir.Value, interface: DecoderInterface, mask: CausalMask) -> bool:
    """Say whether a value tells which tokens attend to nothing: rows × 1 × tokens × 1.

    Args:
        value: The value.
        interface: The inputs of the graph.
        mask: What the tokens attend to.
    """
    probe = probe_between(value, interface.is_sized)
    if probe is None:
        return False

    def says(draw: _Draw) -> bool:
        expected = ~draw.visible(mask).any(-1, keepdims=True)
        found = probe.run(draw.feeds)
        return found.ndim == 4 and found.dtype == np.bool_ and bool((found == expected).all())

    return _all(probe, interface, mask, says)


@dataclass(frozen=True)
class _Draw:
    """What a part of the graph is run on."""

    mask: Array
    tokens: int
    feeds: Mapping[ir.Value, Array]

    def visible(self, mask: CausalMask) -> Array:
        return mask.visible(self.mask, self.tokens)


def _all(
    probe: Probe,
    interface: DecoderInterface,
    mask: CausalMask,
    says: Callable[[_Draw], bool],
    window: int | None = None,
) -> bool:
    """Say whether something holds of all draws; where the part of the graph does not run, nothing does."""
    width = mask.window or window
    beyond = ((1, 3, width + 2),) if width is not None and width <= _WIDEST_WINDOW else ()
    draws = [_draw(probe, interface, sizes) for sizes in (*_SIZES, *beyond)]
    try:
        return all(draw is not None and says(draw) for draw in draws)
    except StageError:  # not a function of any number of tokens
        return False


def _draw(probe: Probe, interface: DecoderInterface, sizes: tuple[int, int, int]) -> _Draw | None:
    rows, tokens, past = sizes
    generator = np.random.default_rng(_SEED + sum(sizes))
    passed = np.ones((rows, past + tokens), np.int64)
    passed[0, : min(3, past + tokens - 1)] = 0
    if rows > 1:
        # Anything may be hidden but the last token.
        passed[1:, :-1] = generator.integers(0, 2, (rows - 1, past + tokens - 1))
    feeds = interface.feeds(probe.leaves, passed, tokens, generator)
    return _Draw(passed, tokens, feeds) if feeds is not None else None


@dataclass
class MaskWriter:
    """Writes what an attention asks of the mask, once for all layers of a graph."""

    graph: ir.Graph
    interface: DecoderInterface
    scope: str
    """Start of the names of its nodes."""
    counts_tokens: bool = False
    """Whether a window counts the tokens that ``attention_mask`` shows; else the places of the cache, padding too."""
    _made: dict[str, ir.Value] = field(default_factory=dict)
    _nodes: list[ir.Node] = field(default_factory=list)
    _tagged: ir.Node | None = None

    def tag_as(self, node: ir.Node | None) -> None:
        """Give the nodes the tag of another one; the first that is given counts."""
        self._tagged = self._tagged or node

    def bias(self, mask: CausalMask) -> ir.Value:
        """Return what is added to the scores: rows × 1 × tokens × all tokens. What comes later is not hidden here."""
        hidden = self._of("hidden", "Sub", [self._number("one", 1.0, ir.DataType.FLOAT), self._float_mask()])
        row = self._of("row", "Mul", [hidden, self._number("lowest", _LOWEST, ir.DataType.FLOAT)])
        plane = self._of("plane", "Unsqueeze", [row, self._numbers("middle", [1, 2])])
        if mask.window is not None:
            plane = self._of(f"windowed_{mask.window}", "Add", [plane, self._window(mask.window)])
            # Two of the lowest would be infinite, and a row of them no number.
            least = self._number("lowest", _LOWEST, ir.DataType.FLOAT)
            return self._of(f"bias_{mask.window}", "Max", [plane, least])
        ones = [self._numbers("single", [1, 1]), self._tokens(), self._numbers("last", [1])]
        shape = self._of("shape", "Concat", ones, axis=0)
        return self._of("bias", "Expand", [plane, shape])

    def lengths(self) -> tuple[ir.Value, ir.Value]:
        """Return, as int32, the place of the last token in every row, and the number of all tokens."""
        total = self._of("total_int", "Cast", [self._total()], to=ir.DataType.INT32)
        last = self._of("last_place", "Sub", [total, self._number("one_int", 1, ir.DataType.INT32)])
        rows = self._of("rows", "Shape", [self.interface.mask], start=0, end=1)
        return self._of("places", "Expand", [last, rows]), self._of("count", "Squeeze", [total])

    def sees_any(self, mask: CausalMask) -> ir.Value:
        """Return whether a token attends to anything at all, inside its window where it has one: rows × tokens × 1."""
        counted, now = self._counted(), self._counted_now()
        start, axes = self._start(), self._numbers("last", [1])
        suffix = ""
        # The last token that is shown lies in every window of tokens.
        if mask.window is not None and not self.counts_tokens:
            suffix = f"_{mask.window}"
            shift = self._numbers(f"shift{suffix}", [0, mask.window, 0, 0])
            shifted = self._of(f"shifted{suffix}", "Pad", [counted, shift])
            before = self._of(f"before{suffix}", "Slice", [shifted, start, self._total(), axes])
            now = self._of(f"inside{suffix}", "Sub", [now, before])
        seen = self._of(f"seen{suffix}", "Greater", [now, self._number("nothing", 0, ir.DataType.INT64)])
        return self._of(f"seen_any{suffix}", "Unsqueeze", [seen, self._numbers("third", [2])])

    def zero(self) -> ir.Value:
        """Return the number 0."""
        return self._number("zero", 0.0, ir.DataType.FLOAT)

    def insert(self) -> None:
        """Put the nodes before all others."""
        if self._tagged is not None:
            for node in self._nodes:
                tag_like(node, self._tagged, "inherited")
        if self._nodes:
            self.graph.insert_before(self.graph[0], self._nodes)
            self._nodes = []

    def _window(self, window: int) -> ir.Value:
        """Return what is added where a token lies before the window, and is 0 elsewhere."""
        outside = self._before_tokens(window) if self.counts_tokens else self._before_places(window)
        return self._of(
            f"far_{window}", "Where", [outside, self._number("lowest", _LOWEST, ir.DataType.FLOAT), self.zero()]
        )

    def _before_tokens(self, window: int) -> ir.Value:
        """Return rows × 1 × tokens × all tokens."""
        past = self._of("past_tokens", "Unsqueeze", [self._counted(), self._numbers("middle", [1, 2])])
        now = self._of("now_tokens", "Unsqueeze", [self._counted_now(), self._numbers("outer", [1, 3])])
        width = self._number(f"window_{window}", window, ir.DataType.INT64)
        return self._of(f"outside_{window}", "LessOrEqual", [past, self._of(f"reach_{window}", "Sub", [now, width])])

    def _before_places(self, window: int) -> ir.Value:
        """Return tokens × all tokens."""
        zero, one = (self._number(name, number, ir.DataType.INT64) for name, number in (("first", 0), ("step", 1)))
        total = self._of("total_number", "Squeeze", [self._total()])
        tokens = self._of("tokens_number", "Squeeze", [self._tokens()])
        past = self._of("past_places", "Range", [zero, total, one])
        begin = self._of("first_place", "Sub", [total, tokens])
        now = self._of("now_places", "Range", [begin, total, one])
        column = self._of("now_column", "Unsqueeze", [now, self._numbers("last", [1])])
        width = self._number(f"window_{window}", window, ir.DataType.INT64)
        reach = self._of(f"reach_{window}", "Sub", [column, width])
        return self._of(f"outside_{window}", "LessOrEqual", [past, reach])

    def _counted(self) -> ir.Value:
        """Return how many tokens are shown up to each one: rows × all tokens."""
        return self._of("counted", "CumSum", [self.interface.mask, self._number("axis", 1, ir.DataType.INT64)])

    def _counted_now(self) -> ir.Value:
        """Return the same of the tokens of this run: rows × tokens."""
        counted, start, axes = self._counted(), self._start(), self._numbers("last", [1])
        return self._of("now", "Slice", [counted, start, self._numbers("ends", [np.iinfo(np.int64).max]), axes])

    def _start(self) -> ir.Value:
        return self._of("start", "Sub", [self._total(), self._tokens()])

    def _float_mask(self) -> ir.Value:
        return self._of("float", "Cast", [self.interface.mask], to=ir.DataType.FLOAT)

    def _total(self) -> ir.Value:
        return self._of("total", "Shape", [self.interface.mask], start=1, end=2)

    def _tokens(self) -> ir.Value:
        return self._of("tokens", "Shape", [self.interface.tokens], start=1, end=2)

    def _number(self, name: str, number: float, dtype: ir.DataType) -> ir.Value:
        return self._constant(name, np.array(number, dtype.numpy()))

    def _numbers(self, name: str, numbers: list[int]) -> ir.Value:
        return self._constant(name, np.array(numbers, np.int64))

    def _constant(self, name: str, array: Array) -> ir.Value:
        return self._of(f"constant_{name}", "Constant", [], value=ir.tensor(array))

    def _of(self, name: str, operator: str, inputs: list[ir.Value], **attributes: Any) -> ir.Value:
        """Return the output of a node; of the same name there is one."""
        if name not in self._made:
            node = ir.node(operator, inputs, attributes, name=f"{self.scope}/mask/{name}")
            node.outputs[0].name = f"{node.name}_output"
            node.outputs[0].type = ir.TensorType(_dtype_of(node))
            self._made[name] = node.outputs[0]
            self._nodes.append(node)
        return self._made[name]


def _dtype_of(node: ir.Node) -> ir.DataType:
    """Return the type of what one of these nodes makes."""
    if node.op_type == "Constant":
        return node.attributes["value"].as_tensor().dtype
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    if node.op_type == "Shape":
        return ir.DataType.INT64
    if node.op_type in ("Greater", "LessOrEqual"):
        return ir.DataType.BOOL
    first = node.inputs[1] if node.op_type == "Where" else node.inputs[0]
    assert first is not None
    assert first.dtype is not None
    return first.dtype
