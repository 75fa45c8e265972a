"""Fuses the operators of an attention into one MultiHeadAttention.

Matches the graph that torch's exporters write for ``scaled_dot_product_attention`` in transformers' layout. ONNX
Runtime's and onnxscript's own attention fusions match older forms and find none of these (measured with ONNX Runtime
1.31 and onnxscript 0.7 on exports of ``bert``, ``vit`` and ``gpt2`` models).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from winml.modelkit.graph.stage import GraphPass
from winml.modelkit.optimize.graph_matching import (
    behind_nan_guard,
    constant_number,
    has_one_use,
    is_operator,
    only_user,
    permutation_of,
    rank_of,
    same_shape,
    same_size,
    without_scale,
)

CONTRIB = "com.microsoft"

_TO_HEADS, _TO_KEYS, _SWAPPED = (0, 2, 1, 3), (0, 2, 3, 1), (0, 1, 3, 2)
"""Specified by the operator's layout, permutations of [batch, sequence, heads, size]: heads before the sequence; the
same with the keys transposed for the product; the transposition of the keys alone."""


@dataclass(frozen=True)
class _Heads:
    """A value of shape [batch, sequence, heads · size] that is split into heads."""

    value: ir.Value
    count: int
    size: int
    scale: float
    """Factor it is multiplied by before the product."""


@dataclass(frozen=True)
class _Attention:
    """The parts of one matched attention."""

    query: _Heads
    key: _Heads
    value: _Heads
    scale: float
    mask: ir.Value | None
    is_guarded: bool
    """Whether rows that are NaN, since every position is masked, are set to zero."""
    zeroed: ir.Value | None
    """Rows to set to zero behind the product with the values, of shape [batch, 1, sequence, 1]; None for none."""
    output: ir.Node
    """The reshape that joins the heads."""


class AttentionFusionPass(GraphPass):
    """Replace the operators of an attention by ONNX Runtime's ``MultiHeadAttention``. Works in place.

    Before / After::

        q → Reshape → Transpose → Mul ┐
        k → Reshape → Transpose → Mul ┴ MatMul → Add(mask) → Softmax → [zero where NaN] ┐       q ┐
        v → Reshape → Transpose ────────────────────────────────────────────────────── MatMul   k ┼ MultiHeadAttention
                        → [zero where fully masked] → Transpose → Reshape → y            v ┘ → [zero where …]

    Must not fire when:
        1. scores, probabilities or the unjoined heads are used elsewhere, or are outputs of the graph;
        2. heads are not in the operator's layout, their number is unknown, or queries and keys have different numbers
           of heads;
        3. the mask's last two dimensions are not known to equal those of the scores: the operator does not broadcast
           them;
        4. which rows are set to zero behind the product differs by head;
        5. values are not float32: ONNX Runtime's CPU provider has no other kernel.

    Tags: creates. The pipeline carries them: the new node stands for all nodes it replaced.

    Why it is safe: the operator computes the same product, softmax and product. The softmax of a fully masked row is
    NaN; the guard that sets such rows to zero moves behind the operator, where it finds the same rows. The result
    differs only for queries, keys or values that are NaN or infinite, which no working model has.
    """

    tags = "drops"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuse every attention."""
        count = 0
        for node in [node for graph in model.graphs() for node in graph if is_operator(node, "Softmax")]:
            # One by one: an attention may read the output of the one before it.
            match = _match_attention(node)
            if match is not None:
                _replace_attention(match)
                count += 1
        if count:
            model.opset_imports.setdefault(CONTRIB, 1)
        return ir.passes.PassResult(model, bool(count))


def _match_attention(softmax: ir.Node) -> _Attention | None:
    if softmax.outputs[0].dtype != ir.DataType.FLOAT:
        return None
    scores = softmax.inputs[0]
    if scores is None or rank_of(scores) != 4 or softmax.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    probabilities, is_guarded = behind_nan_guard(softmax.outputs[0])
    head_join = _match_head_join(probabilities)
    scaled_scores = _match_scores(scores)
    if head_join is None or scaled_scores is None or (is_guarded and head_join[1] is not None):
        return None
    product, mask, scale = scaled_scores
    context, zeroed, output = head_join
    query, key = _match_heads(product.inputs[0], _TO_HEADS), _match_keys(product.inputs[1])
    value = _match_heads(context.inputs[1], _TO_HEADS)
    if query is None or key is None or value is None or value.scale != 1.0:
        return None
    if not (query.count == key.count == value.count and query.size == key.size):
        return None
    if not _fits_scores(mask, product.outputs[0]) or not _joins_all_heads(output, value):
        return None
    return _Attention(query, key, value, scale * query.scale * key.scale, mask, is_guarded, zeroed, output)


def _match_head_join(probabilities: ir.Value) -> tuple[ir.Node, ir.Value | None, ir.Node] | None:
    """Return the product with the values, the rows of it that are set to zero, and the reshape that joins the heads."""
    context = only_user(probabilities)
    if context is None or not is_operator(context, "MatMul") or context.inputs[0] is not probabilities:
        return None
    user, zeroed = only_user(context.outputs[0]), None
    if user is not None and is_operator(user, "Where"):
        zeroed = user.inputs[0]
        if (
            user.inputs[2] is not context.outputs[0]
            or constant_number(user.inputs[1]) != 0.0
            or not _is_of_rows(zeroed)
        ):
            return None
        user = only_user(user.outputs[0])
    if user is not None and is_operator(user, "Reshape") and same_shape(user.outputs[0], context.outputs[0]):
        user = only_user(user.outputs[0])
    if user is None or not is_operator(user, "Transpose") or permutation_of(user) != _TO_HEADS:
        return None
    output = only_user(user.outputs[0])
    return (context, zeroed, output) if output is not None and is_operator(output, "Reshape") else None


def _is_of_rows(condition: ir.Value | None) -> bool:
    """Say whether a condition is the same for all heads and all of a row (case 4)."""
    if condition is None or condition.shape is None or rank_of(condition) != 4:
        return False
    return condition.shape[1] == 1 and condition.shape[3] == 1


def _match_scores(scores: ir.Value) -> tuple[ir.Node, ir.Value | None, float] | None:
    """Return the product of queries and keys, the mask added to it, and the factor it is multiplied by."""
    mask: ir.Value | None = None
    node = scores.producer()
    if node is not None and is_operator(node, "Add") and has_one_use(scores):
        sides = [side for side in node.inputs if side is not None and _is_product(side)]
        if len(sides) != 1:
            return None
        mask = next((side for side in node.inputs if side is not sides[0]), None)
        scores = sides[0]
    if not has_one_use(scores):
        return None
    scores, scale = without_scale(scores)
    product = scores.producer()
    if product is None or not is_operator(product, "MatMul") or not has_one_use(scores):
        return None
    return product, mask, scale


def _is_product(value: ir.Value) -> bool:
    producer = without_scale(value)[0].producer()
    return producer is not None and is_operator(producer, "MatMul")


def _match_keys(value: ir.Value | None) -> _Heads | None:
    """Return the keys before their transposition for the product, which is one Transpose or two."""
    if (heads := _match_heads(value, _TO_KEYS)) is not None or value is None:
        return heads
    value, outer = without_scale(value)
    node = value.producer()
    if node is None or not is_operator(node, "Transpose") or permutation_of(node) != _SWAPPED:
        return None
    inner = _match_heads(node.inputs[0], _TO_HEADS)
    return inner and _Heads(inner.value, inner.count, inner.size, inner.scale * outer)


def _match_heads(value: ir.Value | None, permutation: tuple[int, ...]) -> _Heads | None:
    if value is None:
        return None
    value, scale = without_scale(value)
    transpose = value.producer()
    if transpose is None or not is_operator(transpose, "Transpose") or permutation_of(transpose) != permutation:
        return None
    split = transpose.inputs[0]
    reshape = split.producer() if split is not None else None
    if split is None or reshape is None or not is_operator(reshape, "Reshape"):
        return None
    hidden = reshape.inputs[0]
    if hidden is None or rank_of(hidden) != 3 or rank_of(split) != 4:
        return None
    assert split.shape is not None
    assert hidden.shape is not None
    count, size = split.shape[2], split.shape[3]
    if not isinstance(count, int) or not isinstance(size, int) or hidden.shape[2] != count * size:
        return None
    if not all(same_size(hidden.shape[axis], split.shape[axis]) for axis in (0, 1)):
        return None
    return _Heads(hidden, count, size, scale)


def _joins_all_heads(output: ir.Node, value: _Heads) -> bool:
    joined_input, joined_output = output.inputs[0], output.outputs[0]
    if joined_input is None or joined_input.shape is None or joined_output.shape is None or rank_of(joined_output) != 3:
        return False
    return joined_output.shape[2] == value.count * value.size and all(
        same_size(joined_input.shape[axis], joined_output.shape[axis]) for axis in (0, 1)
    )


def _fits_scores(mask: ir.Value | None, scores: ir.Value) -> bool:
    """Say whether the operator accepts the shape of the mask (case 3)."""
    if mask is None:
        return True
    if mask.shape is None or scores.shape is None or rank_of(mask) != 4:
        return False
    return all(mask.shape[axis] == 1 or same_size(mask.shape[axis], scores.shape[axis]) for axis in (0, 1)) and all(
        same_size(mask.shape[axis], scores.shape[axis]) for axis in (2, 3)
    )


def _replace_attention(match: _Attention) -> None:
    output_node = match.output
    graph = output_node.graph
    assert graph is not None
    scope = (output_node.name or "").rpartition("/")[0]
    inputs = [match.query.value, match.key.value, match.value.value]
    attention = ir.node(
        "MultiHeadAttention",
        [*inputs, None, None, match.mask] if match.mask is not None else inputs,
        {"num_heads": match.query.count, "scale": match.scale},
        domain=CONTRIB,
        name=f"{scope}/MultiHeadAttention",
    )
    new_nodes = [attention]
    old_output = output_node.outputs[0]
    if match.is_guarded:
        new_nodes += _zeroed_where_nan(attention.outputs[0], scope)
    elif match.zeroed is not None:
        new_nodes += _zeroed_rows(match.zeroed, attention.outputs[0], scope)
    for node in new_nodes:
        value = node.outputs[0]
        # Of the others type and shape are told where they are made.
        if value.type is None:
            value.type, value.shape = old_output.type, old_output.shape
        value.name = f"{node.name}_output"
    graph.insert_after(output_node, new_nodes)
    result = new_nodes[-1].outputs[0]
    is_output, name = old_output.is_graph_output(), old_output.name
    old_output.replace_all_uses_with(result, replace_graph_outputs=is_output)
    result.name, old_output.name = name, f"{name}_match_head_join"


def _zeroed_where_nan(value: ir.Value, scope: str) -> list[ir.Node]:
    nan = ir.node("IsNaN", [value], name=f"{scope}/MultiHeadAttention_IsNaN")
    nan.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
    zero = _constant(np.float32(0), f"{scope}/MultiHeadAttention_Constant")
    chosen = [nan.outputs[0], zero.outputs[0], value]
    return [nan, zero, ir.node("Where", chosen, name=f"{scope}/MultiHeadAttention_Where")]


def _zeroed_rows(condition: ir.Value, value: ir.Value, scope: str) -> list[ir.Node]:
    """Return nodes that set rows of [batch, sequence, hidden] to zero by a condition [batch, 1, sequence, 1]."""
    # Without the axis of the heads.
    shape = _constant(np.array([0, -1, 1], dtype=np.int64), f"{scope}/MultiHeadAttention_Shape")
    rows = ir.node("Reshape", [condition, shape.outputs[0]], name=f"{scope}/MultiHeadAttention_Reshape")
    rows.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
    zero = _constant(np.float32(0), f"{scope}/MultiHeadAttention_Constant")
    chosen = [rows.outputs[0], zero.outputs[0], value]
    return [shape, rows, zero, ir.node("Where", chosen, name=f"{scope}/MultiHeadAttention_Where")]


def _constant(number: np.generic | np.ndarray[Any, Any], name: str) -> ir.Node:
    tensor = ir.tensor(number)
    node = ir.node("Constant", [], {"value": tensor}, name=name)
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
    return node
