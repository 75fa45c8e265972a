"""Fusion of the operators of an attention into one MultiHeadAttention.

Matches ``scaled_dot_product_attention`` in transformers' layout, as written by torch's exporters. ONNX
Runtime's and onnxscript's own attention fusions match older patterns and find no match (measured with ONNX Runtime
1.31 and onnxscript 0.7 on exports of ``bert``, ``vit`` and ``gpt2`` models).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from winml.modelkit.onnx.operators import is_operator, producer_of
from winml.modelkit.onnx.stage import GraphPass
from winml.modelkit.optimize import graph_matching

TO_KEYS = (0, 2, 3, 1)
"""Specified by the operator's layout: permutation of [batch, sequence, heads, size] that moves the heads before the
sequence, with the keys transposed for the product."""
_MASK = 5
"""Specified: position of the mask among the inputs of MultiHeadAttention."""
_MASK_DTYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
"""Those of the operator's kernels on devices."""
_OPSET_OF_AXES = 18
"""Specified: the first opset in which ReduceMax takes its axes as an input."""


@dataclass(frozen=True)
class _Heads:
    """A value [batch, sequence, heads · size], split into heads; of a cache, [batch, heads, sequence, size]."""

    value: ir.Value
    count: int
    size: int
    scale: float
    """Factor it is multiplied by before the product."""

    @property
    def is_single(self) -> bool:
        """True for a batch of 1."""
        return graph_matching.fixed_size(self.value, 0) == 1


@dataclass(frozen=True)
class _Attention:
    """The parts of one matched attention."""

    query: _Heads
    key: _Heads
    value: _Heads
    scale: float
    mask: ir.Value | None
    is_guarded: bool
    """True if rows that are NaN, since every position is masked, are set to zero."""
    join: graph_matching.HeadJoin
    """Rows are set to zero by a condition of shape [batch, 1, sequence, 1]."""


class AttentionFusionPass(GraphPass):
    """Replace the operators of an attention by ONNX Runtime's ``MultiHeadAttention``. Works in place.

    Before / After::

        q → Reshape → Transpose → Mul ┐
        k → Reshape → Transpose → Mul ┴ MatMul → Add(mask) → Softmax → [zero where NaN] ┐       q ┐
        v → Reshape → Transpose ────────────────────────────────────────────────────── MatMul   k ┼ MultiHeadAttention
                        → [zero where fully masked] → Transpose → Reshape → y            v ┘ → [zero where …]

    Keys and values of a cache are passed as they are, heads before the sequence.

    Must not fire when:
        1. scores, probabilities or the unjoined heads are used elsewhere, or are outputs of the graph;
        2. heads are not in the operator's layout, their number is unknown, or queries and keys have different numbers
           of heads; or a cache has values of another size than keys;
        3. the mask's last two dimensions are not known to equal those of the scores: the operator does not broadcast
           them;
        4. the rows set to zero after the product differ by head;
        5. values are not float32: ONNX Runtime's CPU provider has no other kernel;
        6. queries, keys or values of a batch of 1 serve a larger batch: the operator does not broadcast them.

    Tags: creates. The pipeline transfers them: the new node replaces all fused nodes.

    Why it is safe: the operator computes the same product, softmax and product. The softmax of a fully masked row is
    NaN; the guard, which sets NaN rows to zero, moves behind the operator and finds the same rows. The result
    differs only for NaN or infinite queries, keys or values, which no working model has.
    """

    tags = "drops"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuse every attention."""
        count = 0
        for node in [node for graph in model.graphs() for node in graph if is_operator(node, "Softmax")]:
            # One by one: an attention may read the output of the previous attention.
            match = _match_attention(node)
            if match is not None:
                _replace_attention(match)
                count += 1
        return graph_matching.contrib_result(model, count)


def _match_attention(softmax: ir.Node) -> _Attention | None:
    """Match the attention around a softmax of float32 scores; `None` in the cases of the pass."""
    if softmax.outputs[0].dtype != ir.DataType.FLOAT:
        return None
    scores = softmax.inputs[0]
    if scores is None or graph_matching.rank_of(scores) != 4 or softmax.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    probabilities, is_guarded = graph_matching.skip_nan_guard(softmax.outputs[0])
    join = graph_matching.match_head_join(probabilities, graph_matching.only_user, _keeps_shape)
    scaled_scores = graph_matching.match_scores(scores)
    if join is None or scaled_scores is None:
        return None
    if not is_row_condition(join.zeroed) or (is_guarded and join.zeroed is not None):
        return None
    product, mask, scale = scaled_scores
    query, key = _match_heads(product.inputs[0], graph_matching.TO_HEADS), _match_keys(product.inputs[1])
    value = _match_heads(join.product.inputs[1], graph_matching.TO_HEADS)
    if key is None or value is None:
        key, value = _match_cached_keys(product.inputs[1]), _match_cache(join.product.inputs[1])
        if key is None or value is None or key.size != value.size:
            return None
    if query is None or value.scale != 1.0:
        return None
    if not (query.count == key.count == value.count and query.size == key.size):
        return None
    if not query.is_single == key.is_single == value.is_single:
        return None
    if not _fits_scores(mask, product.outputs[0]) or not _joins_all_heads(join.output, value):
        return None
    return _Attention(query, key, value, scale * query.scale * key.scale, mask, is_guarded, join)


def is_row_condition(condition: ir.Value | None) -> bool:
    """Return True if an optional condition is equal for all heads and all elements of a row (case 4)."""
    shape = graph_matching.shape_of(condition, 4)
    return condition is None or (shape is not None and shape[1] == 1 and shape[3] == 1)


def _keeps_shape(reshape: ir.Node) -> bool:
    """Return True if a reshape leaves the shape unchanged."""
    return reshape.inputs[0] is not None and graph_matching.same_shape(reshape.inputs[0], reshape.outputs[0])


def _match_keys(value: ir.Value | None) -> _Heads | None:
    """Return the keys before the transposition for the product, by one Transpose or two."""
    if (heads := _match_heads(value, TO_KEYS)) is not None or value is None:
        return heads
    value, outer = graph_matching.split_scale(value)
    inner = _match_heads(graph_matching.transpose_input(value, graph_matching.SWAPPED), graph_matching.TO_HEADS)
    return inner and replace(inner, scale=inner.scale * outer)


def _match_cached_keys(value: ir.Value | None) -> _Heads | None:
    """Return the keys of a cache before the transposition for the product."""
    if value is None:
        return None
    value, scale = graph_matching.split_scale(value)
    keys = _match_cache(graph_matching.transpose_input(value, graph_matching.SWAPPED))
    return keys and replace(keys, scale=keys.scale * scale)


def _match_cache(value: ir.Value | None) -> _Heads | None:
    """Match a value [batch, heads, sequence, size]; `None` if heads or size are unknown."""
    if value is None:
        return None
    value, scale = graph_matching.split_scale(value)
    shape = graph_matching.shape_of(value, 4)
    if shape is None or not isinstance(shape[1], int) or not isinstance(shape[3], int):
        return None
    return _Heads(value, shape[1], shape[3], scale)


def _match_heads(value: ir.Value | None, permutation: tuple[int, ...]) -> _Heads | None:
    """Match a value [batch, sequence, heads · size], reshaped and transposed by ``permutation``; `None` otherwise."""
    if value is None:
        return None
    value, scale = graph_matching.split_scale(value)
    split = graph_matching.transpose_input(value, permutation)
    reshape = producer_of(split, "Reshape")
    hidden = reshape.inputs[0] if reshape is not None else None
    joined_shape, split_shape = graph_matching.shape_of(hidden, 3), graph_matching.shape_of(split, 4)
    if hidden is None or joined_shape is None or split_shape is None:
        return None
    count, size = split_shape[2], split_shape[3]
    if not isinstance(count, int) or not isinstance(size, int) or joined_shape[2] != count * size:
        return None
    if not all(graph_matching.same_size(joined_shape[axis], split_shape[axis]) for axis in (0, 1)):
        return None
    return _Heads(hidden, count, size, scale)


def _joins_all_heads(output: ir.Node, value: _Heads) -> bool:
    """Return True if a reshape joins all heads of the values into one axis, batch and sequence unchanged."""
    before = output.inputs[0].shape if output.inputs[0] is not None else None
    after = graph_matching.shape_of(output.outputs[0], 3)
    if before is None or after is None or after[2] != value.count * value.size:
        return False
    return all(graph_matching.same_size(before[axis], after[axis]) for axis in (0, 1))


def _fits_scores(mask: ir.Value | None, scores: ir.Value) -> bool:
    """Return True if the operator accepts the shape of the mask (case 3)."""
    mask_shape, scores_shape = graph_matching.shape_of(mask, 4), graph_matching.shape_of(scores, 4)
    if mask is None or mask_shape is None or scores_shape is None:
        return mask is None
    return all(
        graph_matching.same_size(mask_shape[axis], scores_shape[axis]) or (axis < 2 and mask_shape[axis] == 1)
        for axis in range(4)
    )


def _replace_attention(match: _Attention) -> None:
    """Replace the matched nodes by MultiHeadAttention, in place, with a guard for masked rows where matched."""
    graph, old = match.join.output.graph, match.join.output.outputs[0]
    assert graph is not None
    inputs = [match.query.value, match.key.value, match.value.value]
    builder = graph_matching.NodeBuilder(f"{graph_matching.scope_of(match.join.output)}/MultiHeadAttention")
    result = builder.add(
        "MultiHeadAttention",
        [*inputs, None, None, match.mask] if match.mask is not None else inputs,
        "",
        old.dtype,
        old.shape,
        domain=graph_matching.CONTRIB_DOMAIN,
        num_heads=match.query.count,
        scale=match.scale,
    )
    result = zero_masked_rows(builder, result, match.join.zeroed, is_guarded=match.is_guarded)
    graph.insert_after(match.join.output, builder.nodes)
    graph_matching.take_over(old, result)


def guard_by_masks(model: ir.Model) -> bool:
    """Find the rows without a visible token in the masks of attentions instead of by ``IsNaN``, in place.

    Attentions with equal masks share these nodes. WebGPU has no kernel of IsNaN, and would copy the output of each
    attention to the CPU and back.

    Returns:
        True if the graph was changed.
    """
    rows: dict[ir.Value, ir.Value] = {}
    for node in [node for node in model.graph if is_operator(node, "IsNaN")]:
        attention = node.inputs[0].producer() if node.inputs[0] is not None else None
        is_fused = attention is not None and attention.op_type == "MultiHeadAttention"
        mask = attention.inputs[_MASK] if attention is not None and is_fused and len(attention.inputs) > _MASK else None
        shape = graph_matching.shape_of(mask, 4)
        if mask is None or mask.dtype not in _MASK_DTYPES or shape is None or shape[1] != 1:
            continue  # the rows differ by head
        if mask not in rows:
            rows[mask] = _insert_masked_rows(model, node, mask)
        node.outputs[0].replace_all_uses_with(rows[mask])
        model.graph.remove(node, safe=True)
    return bool(rows)


def _insert_masked_rows(model: ir.Model, before: ir.Node, mask: ir.Value) -> ir.Value:
    """Insert nodes that find the rows of a mask [batch, 1, rows, columns] with -inf only; return [batch, rows, 1]."""
    builder, dtype, shape = graph_matching.NodeBuilder(f"{before.name}_rows"), mask.dtype, mask.shape
    assert dtype is not None  # checked by the caller
    assert shape is not None
    row_shape, column_shape = ir.Shape([shape[0], 1, shape[2]]), ir.Shape([shape[0], shape[2], 1])
    if (model.opset_imports.get("") or 0) < _OPSET_OF_AXES:
        largest = builder.add("ReduceMax", [mask], "_ReduceMax", dtype, row_shape, axes=[-1], keepdims=0)
    else:
        axes = builder.constant(np.array([-1], np.int64), "_Axes")
        largest = builder.add("ReduceMax", [mask, axes], "_ReduceMax", dtype, row_shape, keepdims=0)
    column = builder.add("Transpose", [largest], "_Transpose", dtype, column_shape, perm=[0, 2, 1])
    hidden = builder.constant(np.array(-np.inf, dtype.numpy()), "_Hidden")
    rows = builder.add("Equal", [column, hidden], "_Equal", ir.DataType.BOOL, column_shape)
    builder.tag(before)
    model.graph.insert_before(before, builder.nodes)
    return rows


def zero_masked_rows(
    builder: graph_matching.NodeBuilder, result: ir.Value, condition: ir.Value | None, *, is_guarded: bool
) -> ir.Value:
    """Add nodes that set the rows of fully masked tokens to zero; return their output, or the result without them.

    Args:
        builder: Adds the nodes.
        result: Output of an attention: batch × sequence × heads · size.
        condition: True for these rows, of shape [batch, 1, sequence, 1]; None without one.
        is_guarded: True if these rows are NaN.
    """
    if is_guarded:
        is_zero = builder.add("IsNaN", [result], "_IsNaN", ir.DataType.BOOL)
    elif condition is not None:
        # Without the axis of the heads.
        shape = builder.constant(np.array([0, -1, 1], dtype=np.int64), "_Shape")
        is_zero = builder.add("Reshape", [condition, shape], "_Reshape", ir.DataType.BOOL)
    else:
        return result
    zero = builder.constant(np.array(0, np.float32), "_Constant")
    return builder.add("Where", [is_zero, zero, result], "_Where", result.dtype, result.shape)
