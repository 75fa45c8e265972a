"""Fusion of the operators of an attention into one Attention of ONNX, with its cache if any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from winml.modelkit.onnx.operators import is_operator
from winml.modelkit.onnx.stage import GraphPass
from winml.modelkit.optimize.attention_fusion import TO_KEYS, is_row_condition, zero_masked_rows
from winml.modelkit.optimize.decoders.grouped_attention_fusion import (
    CacheUpdate,
    add_rotation,
    find_unrepeated,
    find_untransposed,
    join_heads,
    keeps_heads,
    match_update,
    only_computing_user,
)
from winml.modelkit.optimize.decoders.interface import DecoderInterface
from winml.modelkit.optimize.decoders.rotations import RotationFinder, RotationTables
from winml.modelkit.optimize.graph_matching import (
    TO_HEADS,
    HeadJoin,
    NodeBuilder,
    fixed_size,
    match_head_join,
    match_scores,
    rank_of,
    scope_of,
    shape_of,
    skip_full_slices,
    skip_nan_guard,
    split_scale,
    take_over,
    transpose_input,
)

_OPERATOR = "Attention"
_LOWEST = -3.4e38
"""Replaces the lowest float32 (-3.4028e38) in masks. Measured: ONNX Runtime 1.31 returns zero for rows whose mask is
the lowest float everywhere, where softmax has equal probabilities; larger values are computed as specified."""


class _LimitedMasks:
    """Masks without the lowest float, each made once."""

    def __init__(self) -> None:
        """Begin with no mask."""
        self._limited: dict[ir.Value, ir.Value] = {}

    def limit(self, builder: NodeBuilder, mask: ir.Value) -> ir.Value:
        """Return the mask with values of at least :data:`_LOWEST`; the first attention that reads it has the node."""
        if mask not in self._limited:
            lowest = builder.constant(np.array(_LOWEST, np.float32), "_Constant_Lowest")
            self._limited[mask] = builder.add("Max", [mask, lowest], "_Max", mask.dtype, mask.shape)
        return self._limited[mask]


class _Operand(NamedTuple):
    """Keys or values of an attention."""

    new: ir.Value
    """Batch × heads × tokens × size; without the cached tokens, if there is a cache."""
    heads: int
    size: int
    update: CacheUpdate | None
    """Concatenation with the cache; None without one."""


@dataclass(frozen=True)
class _Attention:
    """The parts of one attention."""

    query: ir.Value
    """Batch × heads × tokens × size, before any factor."""
    heads: int
    key: _Operand
    value: _Operand
    scale: float
    mask: ir.Value | None
    """The value added to the scores."""
    is_guarded: bool
    """True if rows that are NaN, since every position is masked, are set to zero."""
    product: ir.Node
    """Product of probabilities and values."""
    join: HeadJoin | None
    """Join of the heads; None if the heads stay apart, or are not all joined."""


class StandardAttentionFusionPass(GraphPass):
    """Replace the operators of an attention by ONNX's ``Attention``. Works in place.

    Before / After::

        q → [rotation] ──────────────────────────── Mul ┐
        k → [rotation] → [Concat(past)] → [repeat] ─────┴ MatMul → [Add(mask)] → Softmax → [zero] ┐
        v → [Concat(past)] → [repeat] ────────────────────────────────────────────────────────── MatMul → [join] → y

        q, k → [RotaryEmbedding] → Attention(q, k, v, mask, past) → [zero] → y, present

    Must not fire when:
        1. scores or probabilities are used elsewhere, or are outputs of the graph;
        2. the number of heads of queries, keys or values is unknown;
        3. the last two axes of the mask may differ from those of the scores: readers do not broadcast them;
        4. operators other than a mask and a factor change the scores, such as a limit by ``Tanh``;
        5. values are not float32;
        6. the factor of the scores is not positive, or queries have one head or one sample for several of the keys:
           the operator has no such form.

    Tags: creates. The new nodes have the tag of the last node of the attention.

    Why it is safe: the operator is defined as the same product, softmax and product. The mask stays as exported, so no
    reader's interpretation of causal attention matters. Readers differ in fully masked rows (NaN or zero), so the guard
    stays, and without one the mask is limited: ONNX Runtime returns zero for rows of the lowest float.
    """

    tags = "creates"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuse every attention."""
        count = 0
        interface = DecoderInterface.of(model)
        positions = interface.positions if interface is not None else None
        rotations = RotationFinder(positions, interface.position_count if interface is not None else None)
        tables, masks = RotationTables(model.graph), _LimitedMasks()
        for graph in model.graphs():
            for softmax in [node for node in graph if is_operator(node, "Softmax")]:
                # One by one: an attention may read the output of the previous attention.
                if (match := _match_attention(softmax)) is not None:
                    _replace_attention(match, rotations, tables, positions, masks)
                    count += 1
        return ir.passes.PassResult(model, bool(count))


def _match_attention(softmax: ir.Node) -> _Attention | None:
    """Match the attention around a softmax of float32 scores; `None` in the cases of the pass."""
    scores = softmax.inputs[0]
    if (
        scores is None
        or softmax.outputs[0].dtype != ir.DataType.FLOAT
        or rank_of(scores) != 4
        or softmax.attributes.get_int("axis", -1) not in (-1, 3)
    ):
        return None
    probabilities, is_guarded = skip_nan_guard(softmax.outputs[0])
    product, parts = only_computing_user(probabilities), match_scores(scores)
    if product is None or not is_operator(product, "MatMul") or product.inputs[0] is not probabilities or parts is None:
        return None
    score_product, mask, scale = parts
    left, right, values = score_product.inputs[0], score_product.inputs[1], product.inputs[1]
    if left is None or right is None or values is None or not _fits_scores(mask, score_product.outputs[0]):
        return None
    query, query_scale = split_scale(left)
    keys, key_scale = _find_keys(right)
    heads = fixed_size(score_product.outputs[0], 1) or fixed_size(query, 1)
    if keys is None or heads is None or rank_of(query) != 4 or scale * query_scale * key_scale <= 0:
        return None
    if fixed_size(query, 1) not in (None, heads) or not _has_equal_batch(query, keys):
        return None
    key, value = _match_operand(keys), _match_operand(values)
    if (
        key is not None
        and value is not None
        and ((key.update is None) != (value.update is None) or key.heads != value.heads)
    ):
        key, value = _whole_operand(keys), _whole_operand(values)
    if key is None or value is None or key.heads != value.heads or heads % key.heads:
        return None
    join = match_head_join(probabilities, only_computing_user, keeps_heads)
    return _Attention(
        query,
        heads,
        key,
        value,
        scale * query_scale * key_scale,
        mask,
        is_guarded,
        product,
        join if join is not None and _is_replaceable(join, heads * value.size, is_guarded=is_guarded) else None,
    )


def _has_equal_batch(query: ir.Value, keys: ir.Value) -> bool:
    """Return False if the queries or the keys have a fixed batch size that the other does not have."""
    query_shape, key_shape = shape_of(query, 4), shape_of(keys, 4)
    if query_shape is None or key_shape is None:
        return True
    sizes = (query_shape[0], key_shape[0])
    return sizes[0] == sizes[1] or not any(isinstance(size, int) for size in sizes)


def _find_keys(value: ir.Value) -> tuple[ir.Value | None, float]:
    """Return the keys [batch, heads, tokens, size] before the transposition for the product, and a constant factor."""
    inner, scale = split_scale(value)
    split = transpose_input(inner, TO_KEYS)
    if split is None:
        return find_untransposed(value)
    # One Transpose that moves the heads first and exchanges sequence and size.
    maker = inner.producer()
    assert maker is not None
    assert maker.graph is not None
    builder = NodeBuilder(f"{scope_of(maker)}/")
    shape = None if split.shape is None else ir.Shape([split.shape[axis] for axis in TO_HEADS])
    keys = builder.add("Transpose", [split], "keys", inner.dtype, shape, perm=TO_HEADS)
    builder.tag(maker)
    maker.graph.insert_before(maker, builder.nodes)
    return keys, scale


def _match_operand(value: ir.Value) -> _Operand | None:
    """Match keys or values [batch, heads, tokens, size], with their cache or without; `None` for unknown heads."""
    update = match_update(value)
    if update is not None:
        return _Operand(update.new, update.heads, update.size, update)
    return _whole_operand(skip_full_slices(find_unrepeated(value)))


def _whole_operand(value: ir.Value) -> _Operand | None:
    """Return keys or values as computed; `None` if the number or the size of their heads is unknown."""
    heads, size = fixed_size(value, 1), fixed_size(value, 3)
    return None if heads is None or size is None or rank_of(value) != 4 else _Operand(value, heads, size, None)


def _is_replaceable(join: HeadJoin, hidden_size: int, *, is_guarded: bool) -> bool:
    """Return True if the heads are joined into one axis, and rows are set to zero by token, in one place."""
    joined = join.output.outputs[0]
    is_whole = rank_of(joined) == 3 and fixed_size(joined, 2) == hidden_size
    return is_whole and is_row_condition(join.zeroed) and not (is_guarded and join.zeroed is not None)


def _fits_scores(mask: ir.Value | None, scores: ir.Value) -> bool:
    """Return True if the last two axes of the mask are those of the scores (case 3)."""
    mask_shape, scores_shape = shape_of(mask, 4), shape_of(scores, 4)
    if mask is None or mask_shape is None:
        return mask is None
    # A size of the mask without a number is that of the tokens, which the exporter gave another name.
    return all(
        not isinstance(mask_shape[axis], int) or (scores_shape is not None and mask_shape[axis] == scores_shape[axis])
        for axis in (2, 3)
    )


def _replace_attention(
    match: _Attention,
    rotations: RotationFinder,
    tables: RotationTables,
    positions: ir.Value | None,
    masks: _LimitedMasks,
) -> None:
    """Replace the matched nodes by Attention, in place, with nodes for rotations and a guard where matched."""
    query, key, rotation = rotations.find_both(match.query, match.heads, match.key.new, match.key.heads, match.key.size)
    is_split = all(transpose_input(value, TO_HEADS) is not None for value in (query, key, match.value.new))
    # Without the axis of the heads if no node is needed for it.
    is_joined = match.join is not None and (is_split or rotation is not None)
    last = match.join.output if match.join is not None and is_joined else match.product
    old = last.outputs[0]
    builder = NodeBuilder(f"{scope_of(last)}/{_OPERATOR}")
    operands = [match.query, match.key.new, match.value.new]
    attributes: dict[str, float] = {"scale": match.scale}
    if is_joined:
        operands = [
            join_heads(builder, query, match.heads, match.key.size, "_query"),
            join_heads(builder, key, match.key.heads, match.key.size, "_key"),
            join_heads(builder, match.value.new, match.value.heads, match.value.size, "_value"),
        ]
        attributes |= {"q_num_heads": match.heads, "kv_num_heads": match.key.heads}
        if rotation is not None:
            by_position = (*tables.of(rotation), positions)
            operands[0] = add_rotation(builder, operands[0], by_position, rotation, match.heads, "_query", "")
            operands[1] = add_rotation(builder, operands[1], by_position, rotation, match.key.heads, "_key", "")
    updates = [operand.update for operand in (match.key, match.value) if operand.update is not None]
    mask = match.mask if match.mask is None or match.is_guarded else masks.limit(builder, match.mask)
    inputs = [*operands, mask, *(update.past for update in updates)]
    attention = ir.node(
        _OPERATOR,
        inputs if inputs[-1] is not None else inputs[:-1],
        attributes,
        num_outputs=1 + len(updates),
        name=f"{scope_of(last)}/{_OPERATOR}",
    )
    for number, output in enumerate(attention.outputs):
        output.name = f"{attention.name}_output_{number}"
    builder.nodes.append(attention)
    result = attention.outputs[0]
    result.type, result.shape = old.type, old.shape
    zeroed = match.join.zeroed if match.join is not None and is_joined else None
    result = zero_masked_rows(builder, result, zeroed, is_guarded=match.is_guarded)
    builder.tag(last)
    assert last.graph is not None
    last.graph.insert_after(last, builder.nodes)
    for update, present in zip(updates, attention.outputs[1:], strict=True):
        take_over(update.present, present)
    take_over(old, result)
