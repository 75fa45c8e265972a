"""Recognizes the attention of a decoder with a cache among the operators of a graph. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from winml.modelkit.onnx.operators import is_operator, producer_of
from winml.modelkit.optimize.graph_matching import (
    SWAPPED,
    HeadJoin,
    before_transpose,
    behind_nan_guard,
    constant_numbers,
    fixed_size,
    has_one_use,
    match_head_join,
    rank_of,
    without_full_slices,
    without_scale,
)

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
    heads: int
    """Number of heads of keys and values."""
    size: int
    """Size of a head."""


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
    join: HeadJoin
    """Its condition, batch × 1 × sequence × 1, says which tokens are zero; without one, those whose probabilities are
    no numbers. The output is batch × sequence × heads · size."""


def match_cached_attention(softmax: ir.Node) -> CachedAttention | None:
    """Return the attention a softmax belongs to; None where it is of another kind."""
    scores = softmax.inputs[0]
    if scores is None or rank_of(scores) != 4 or softmax.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    probabilities, is_guarded = behind_nan_guard(softmax.outputs[0])
    join = match_head_join(probabilities, _only_computing_user, _keeps_heads)
    parts = _match_scores(scores)
    if join is None or parts is None or rank_of(join.output.outputs[0]) != 3:
        return None
    product, added, scale = parts
    if product.inputs[0] is None or product.inputs[1] is None or join.product.inputs[1] is None:
        return None
    query, query_scale = without_scale(product.inputs[0])
    keys, key_scale = _untransposed(product.inputs[1])
    if keys is None:
        return None
    key, value = _match_update(keys), _match_update(join.product.inputs[1])
    heads = fixed_size(product.outputs[0], 1)
    if key is None or value is None or heads is None or rank_of(query) != 4:
        return None
    if (key.heads, key.size) != (value.heads, value.size) or heads % key.heads:
        return None
    scale, is_guarded = scale * query_scale * key_scale, is_guarded or join.zeroed is not None
    return CachedAttention(query, heads, key, value, scale, added, is_guarded, join)


def _only_computing_user(value: ir.Value) -> ir.Node | None:
    """Return the one node that reads the numbers of a value; others may read its shape."""
    users = [user for user, _ in value.uses() if not is_operator(user, "Shape")]
    return users[0] if len(users) == 1 and not value.is_graph_output() else None


def _keeps_heads(reshape: ir.Node) -> bool:
    """Say whether a reshape leaves [batch, heads, sequence, size] as it is: batch, sequence and size stay in place."""
    before, after = reshape.inputs[0], reshape.outputs[0]
    if before is None or rank_of(before) != 4 or rank_of(after) != 4:
        return False
    size = fixed_size(before, 3)
    return size is not None and fixed_size(after, 3) == size and fixed_size(after, 1) in (None, fixed_size(before, 1))


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
    transposed = before_transpose(value, SWAPPED)
    if transposed is not None:
        inner, scale = without_scale(transposed)
        return inner, outer * scale
    return _untransposed_flat(value), outer


def _untransposed_flat(value: ir.Value) -> ir.Value | None:
    """Return [batch, heads, sequence, size] where a value is the same transposed with batch and heads as one axis."""
    spread = producer_of(value, "Reshape")
    flat = producer_of(before_transpose(spread.inputs[0], (0, 2, 1)), "Reshape") if spread is not None else None
    source = flat.inputs[0] if flat is not None else None
    if source is None or rank_of(source) != 4 or rank_of(value) != 4:
        return None
    heads, size = fixed_size(source, 1), fixed_size(source, 3)
    is_same = heads is not None and size is not None and (fixed_size(value, 1), fixed_size(value, 2)) == (heads, size)
    return source if is_same else None


def _match_update(value: ir.Value) -> CacheUpdate | None:
    """Return the update of the cache whose result a value is, heads repeated or not."""
    node = producer_of(without_full_slices(_unrepeated(value)), "Concat")
    if node is None or node.attributes.get_int("axis", 0) not in (2, -2) or len(node.inputs) != 2:
        return None
    past, new = node.inputs
    if past is None or new is None or not past.is_graph_input() or not node.outputs[0].is_graph_output():
        return None
    heads, size = fixed_size(past, 1), fixed_size(past, 3)
    if rank_of(past) != 4 or heads is None or size is None:
        return None
    return CacheUpdate(past, new, node.outputs[0], heads, size)


def _unrepeated(value: ir.Value) -> ir.Value:
    """Return keys or values before each head was repeated for several of the queries."""
    reshape = producer_of(value, "Reshape")
    expand = producer_of(reshape.inputs[0], "Expand") if reshape is not None else None
    single = without_full_slices(expand.inputs[0]) if expand is not None and expand.inputs[0] is not None else None
    unsqueeze = producer_of(single, "Unsqueeze")
    if unsqueeze is None or len(unsqueeze.inputs) < 2 or rank_of(value) != 4 or unsqueeze.inputs[0] is None:
        return value
    return unsqueeze.inputs[0] if constant_numbers(unsqueeze.inputs[1]) == [_REPEATED_AXIS] else value
