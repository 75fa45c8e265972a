"""Which operators are one attention together?

Matches what torch's exporters make of ``scaled_dot_product_attention`` in transformers' layout. ONNX Runtime's and
onnxscript's own attention fusions know older forms of it and find none of these (measured with ONNX Runtime 1.31 and
onnxscript 0.7 on exports of ``bert``, ``vit`` and ``gpt2`` models).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

__all__ = ["AttentionFusionPass"]

CONTRIB = "com.microsoft"

_TO_HEADS, _TO_KEYS, _SWAPPED = (0, 2, 1, 3), (0, 2, 3, 1), (0, 1, 3, 2)
"""Specified by the operator's layout: [batch, sequence, heads, size] → heads before the sequence; the same with the
keys transposed for the product; and only that last step."""


@dataclass(frozen=True)
class _Heads:
    """A value [batch, sequence, heads · size] that is split into heads."""

    value: ir.Value
    count: int
    size: int
    scale: float
    """Factor it is multiplied by on the way."""


@dataclass(frozen=True)
class _Attention:
    """Everything of one attention."""

    query: _Heads
    key: _Heads
    value: _Heads
    scale: float
    mask: ir.Value | None
    is_guarded: bool
    """Whether rows in which everything is masked are set to zero."""
    output: ir.Node
    """The reshape that joins the heads again."""


class AttentionFusionPass(ir.passes.InPlacePass):
    """Replace the operators of an attention by ONNX Runtime's ``MultiHeadAttention``. Works in place.

    Before / After::

        q → Reshape → Transpose → Mul ┐
        k → Reshape → Transpose → Mul ┴ MatMul → Add(mask) → Softmax → [zero where NaN] ┐       q ┐
        v → Reshape → Transpose ────────────────────────────────────────────────────── MatMul   k ┼ MultiHeadAttention
                                                           → Transpose → Reshape → y            v ┘ → [zero where NaN]

    Must not fire when:
        1. scores, probabilities or the unjoined heads are used elsewhere, or are outputs of the graph;
        2. heads are not laid out as the operator wants them, their number is not known, or queries and keys have
           different numbers of heads;
        3. the mask's last two dimensions are not those of the scores, known to be the same: the operator does not
           broadcast them;
        4. numbers are not float32: ONNX Runtime's CPU provider has no other kernel.

    Tags: creates. The pipeline carries them: the new node stands for all it replaced.

    Why it is safe: the operator computes the same product, softmax and product. Where a row is masked as a whole, its
    softmax is NaN; the guard that sets such rows to zero moves behind the operator, where it finds the same rows. It
    differs for values that are NaN or infinite before that, which no working model has.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuse every attention."""
        count = 0
        for node in [node for graph in model.graphs() for node in graph if _is(node, "Softmax")]:
            # One by one: what an attention reads may be what the one before it made.
            match = _match(node)
            if match is not None:
                _replace(match)
                count += 1
        if count:
            model.opset_imports.setdefault(CONTRIB, 1)
        return ir.passes.PassResult(model, bool(count))


def _match(softmax: ir.Node) -> _Attention | None:
    if softmax.outputs[0].dtype != ir.DataType.FLOAT:
        return None
    scores = softmax.inputs[0]
    if scores is None or _rank(scores) != 4 or softmax.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    probabilities, is_guarded = _guarded(softmax.outputs[0])
    joined = _joined(probabilities)
    weighted = _weighted(scores)
    if joined is None or weighted is None:
        return None
    product, mask, scale = weighted
    context, output = joined
    query, key = _heads(product.inputs[0], _TO_HEADS), _keys(product.inputs[1])
    value = _heads(context.inputs[1], _TO_HEADS)
    if query is None or key is None or value is None or value.scale != 1.0:
        return None
    if not (query.count == key.count == value.count and query.size == key.size):
        return None
    if not _fits(mask, product.outputs[0]) or not _joins(output, value):
        return None
    return _Attention(query, key, value, scale * query.scale * key.scale, mask, is_guarded, output)


def _guarded(value: ir.Value) -> tuple[ir.Value, bool]:
    """Return the value behind ``Where(IsNaN(x), 0, x)``, and whether there is one."""
    users = list(value.consumers())
    nan = next((user for user in users if _is(user, "IsNaN")), None)
    where = next((user for user in users if _is(user, "Where")), None)
    if len(users) != 2 or nan is None or where is None or value.is_graph_output():
        return value, False
    is_zero = _constant(where.inputs[1]) == 0.0
    if where.inputs[0] is nan.outputs[0] and where.inputs[2] is value and is_zero and _has_one_use(nan.outputs[0]):
        return where.outputs[0], True
    return value, False


def _joined(probabilities: ir.Value) -> tuple[ir.Node, ir.Node] | None:
    """Return the product with the values, and the reshape behind it that joins the heads."""
    context = _only_user(probabilities)
    if context is None or not _is(context, "MatMul") or context.inputs[0] is not probabilities:
        return None
    user = _only_user(context.outputs[0])
    if user is not None and _is(user, "Reshape") and _same_shape(user.outputs[0], context.outputs[0]):
        user = _only_user(user.outputs[0])
    if user is None or not _is(user, "Transpose") or _permutation(user) != _TO_HEADS:
        return None
    output = _only_user(user.outputs[0])
    return (context, output) if output is not None and _is(output, "Reshape") else None


def _weighted(scores: ir.Value) -> tuple[ir.Node, ir.Value | None, float] | None:
    """Return the product of queries and keys, the mask added to it, and the factor it is multiplied by."""
    mask: ir.Value | None = None
    node = scores.producer()
    if node is not None and _is(node, "Add") and _has_one_use(scores):
        sides = [side for side in node.inputs if side is not None and _is_product(side)]
        if len(sides) != 1:
            return None
        mask = next((side for side in node.inputs if side is not sides[0]), None)
        scores = sides[0]
    if not _has_one_use(scores):
        return None
    scores, scale = _unscaled(scores)
    product = scores.producer()
    if product is None or not _is(product, "MatMul") or not _has_one_use(scores):
        return None
    return product, mask, scale


def _is_product(value: ir.Value) -> bool:
    producer = _unscaled(value)[0].producer()
    return producer is not None and _is(producer, "MatMul")


def _keys(value: ir.Value | None) -> _Heads | None:
    """Return the keys behind their transposition for the product, made in one step or in two."""
    if (heads := _heads(value, _TO_KEYS)) is not None or value is None:
        return heads
    value, outer = _unscaled(value)
    node = value.producer()
    if node is None or not _is(node, "Transpose") or _permutation(node) != _SWAPPED:
        return None
    inner = _heads(node.inputs[0], _TO_HEADS)
    return inner and _Heads(inner.value, inner.count, inner.size, inner.scale * outer)


def _heads(value: ir.Value | None, permutation: tuple[int, ...]) -> _Heads | None:
    if value is None:
        return None
    value, scale = _unscaled(value)
    transpose = value.producer()
    if transpose is None or not _is(transpose, "Transpose") or _permutation(transpose) != permutation:
        return None
    split = transpose.inputs[0]
    reshape = split.producer() if split is not None else None
    if split is None or reshape is None or not _is(reshape, "Reshape"):
        return None
    whole = reshape.inputs[0]
    if whole is None or _rank(whole) != 3 or _rank(split) != 4:
        return None
    assert split.shape is not None
    assert whole.shape is not None
    count, size = split.shape[2], split.shape[3]
    if not isinstance(count, int) or not isinstance(size, int) or whole.shape[2] != count * size:
        return None
    if not all(_same_size(whole.shape[axis], split.shape[axis]) for axis in (0, 1)):
        return None
    return _Heads(whole, count, size, scale)


def _joins(output: ir.Node, value: _Heads) -> bool:
    before, after = output.inputs[0], output.outputs[0]
    if before is None or before.shape is None or after.shape is None or _rank(after) != 3:
        return False
    return after.shape[2] == value.count * value.size and all(
        _same_size(before.shape[axis], after.shape[axis]) for axis in (0, 1)
    )


def _fits(mask: ir.Value | None, scores: ir.Value) -> bool:
    """Say whether the operator takes the mask as it is (case 3)."""
    if mask is None:
        return True
    if mask.shape is None or scores.shape is None or _rank(mask) != 4:
        return False
    return all(mask.shape[axis] == 1 or _same_size(mask.shape[axis], scores.shape[axis]) for axis in (0, 1)) and all(
        _same_size(mask.shape[axis], scores.shape[axis]) for axis in (2, 3)
    )


def _replace(match: _Attention) -> None:
    last = match.output
    graph = last.graph
    assert graph is not None
    scope = (last.name or "").rpartition("/")[0]
    inputs = [match.query.value, match.key.value, match.value.value]
    attention = ir.node(
        "MultiHeadAttention",
        [*inputs, None, None, match.mask] if match.mask is not None else inputs,
        {"num_heads": match.query.count, "scale": match.scale},
        domain=CONTRIB,
        name=f"{scope}/MultiHeadAttention",
    )
    new = [attention]
    if match.is_guarded:
        nan = ir.node("IsNaN", [attention.outputs[0]], name=f"{scope}/MultiHeadAttention_IsNaN")
        zero = ir.node("Constant", [], {"value": ir.tensor(np.float32(0))}, name=f"{scope}/MultiHeadAttention_Constant")
        chosen = [nan.outputs[0], zero.outputs[0], attention.outputs[0]]
        new += [nan, zero, ir.node("Where", chosen, name=f"{scope}/MultiHeadAttention_Where")]
    old = last.outputs[0]
    for node in new:
        node.outputs[0].type, node.outputs[0].shape = old.type, old.shape
        node.outputs[0].name = f"{node.name}_output"
    if match.is_guarded:
        nan.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
        zero.outputs[0].shape = ir.Shape(())
    graph.insert_after(last, new)
    result = new[-1].outputs[0]
    is_output, name = old.is_graph_output(), old.name
    old.replace_all_uses_with(result, replace_graph_outputs=is_output)
    result.name, old.name = name, f"{name}_joined"


def _is(node: ir.Node, operator: str) -> bool:
    return node.op_type == operator and node.domain in ("", "ai.onnx")


def _rank(value: ir.Value) -> int | None:
    return len(value.shape) if value.shape is not None else None


def _permutation(node: ir.Node) -> tuple[int, ...]:
    return tuple(node.attributes.get_ints("perm", ()))


def _unscaled(value: ir.Value) -> tuple[ir.Value, float]:
    """Return the value before it is multiplied or divided by a constant, and the factor."""
    node = value.producer()
    if node is None or not (_is(node, "Mul") or _is(node, "Div")):
        return value, 1.0
    left, right = node.inputs
    factor = _constant(right)
    if factor is None and _is(node, "Mul"):
        left, factor = right, _constant(left)
    if factor is None or left is None or factor == 0.0:
        return value, 1.0
    return left, 1.0 / factor if _is(node, "Div") else factor


def _constant(value: ir.Value | None) -> float | None:
    """Return the one number a constant holds, or None."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    if tensor is None or tensor.size != 1:
        return None
    return float(tensor.numpy().reshape(-1)[0])


def _has_one_use(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def _only_user(value: ir.Value) -> ir.Node | None:
    return next(iter(value.consumers())) if _has_one_use(value) else None


def _same_shape(left: ir.Value, right: ir.Value) -> bool:
    if left.shape is None or right.shape is None or len(left.shape) != len(right.shape):
        return False
    return all(_same_size(one, other) for one, other in zip(left.shape, right.shape, strict=True))


def _same_size(left: int | ir.SymbolicDim, right: int | ir.SymbolicDim) -> bool:
    """Say whether two sizes are known to be the same; a nameless one is not known."""
    return left == right and (isinstance(left, int) or left.value is not None)
