"""Fuses root-mean-square normalizations, and the sum before them."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from winml.modelkit.onnx.operators import is_operator, producer_of
from winml.modelkit.onnx.stage import GraphPass
from winml.modelkit.optimize import graph_matching

_NORM = "SimplifiedLayerNormalization"
_COMPUTED_IN = 1
"""Specified: ``stash_type`` float32."""


class RootMeanSquareNormFusionPass(GraphPass):
    """Replace the operators of a root-mean-square normalization by ``SimplifiedLayerNormalization``. Works in place.

    Before / After::

        x → Pow(2) → ReduceMean(-1) → Add(epsilon) → Sqrt → 1 / ┐
        x ────────────────────────────────────────────────────  Mul → Mul(weight) → y

        x, weight → SimplifiedLayerNormalization → y

    Must not fire when:
        1. an intermediate value is read elsewhere or is an output of the graph;
        2. the mean is not over the last axis only, or does not keep it;
        3. the weight is no constant with one value for each element of the last axis;
        4. values are not float32.

    Tags: creates. The new node has the tag of the last replaced node; all of them are in one module.

    Why it is safe: it is the operator's definition. ONNX Runtime has it in the domain of ONNX itself, which
    ``onnx.checker`` does not know: the pass is for graphs that ONNX Runtime runs.
    """

    tags = "creates"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuse every normalization."""
        count = 0
        for node in [node for graph in model.graphs() for node in graph if is_operator(node, "ReduceMean")]:
            match = _match_norm(node)
            if match is not None:
                _replace_norm(match)
                count += 1
        return ir.passes.PassResult(model, bool(count))


@dataclass(frozen=True)
class _Norm:
    """A matched normalization."""

    source: ir.Value
    weight: ir.Value
    epsilon: float
    output: ir.Node


def _match_norm(mean: ir.Node) -> _Norm | None:
    """Match the normalization around a mean of squares; `None` in the cases of the pass."""
    squares = mean.inputs[0]
    if (
        squares is None
        or squares.dtype != ir.DataType.FLOAT
        or not graph_matching.has_one_use(squares)
        or not _averages_last_axis(mean)
    ):
        return None
    source = _find_squared(squares)
    shifted = graph_matching.only_user(mean.outputs[0], "Add")
    root = graph_matching.only_user(shifted.outputs[0], "Sqrt") if shifted is not None else None
    if source is None or shifted is None or root is None:
        return None
    epsilon = next(
        (graph_matching.constant_number(addend) for addend in shifted.inputs if addend is not mean.outputs[0]), None
    )
    scaled = _find_division(root.outputs[0], source)
    output = graph_matching.only_user(scaled.outputs[0], "Mul") if scaled is not None else None
    if epsilon is None or scaled is None or output is None:
        return None
    weight = next((value for value in output.inputs if value is not scaled.outputs[0]), None)
    return _Norm(source, weight, epsilon, output) if weight is not None and _is_weight(weight, source) else None


def _find_squared(value: ir.Value) -> ir.Value | None:
    """Return x if the value is the square of x; `None` otherwise."""
    if (power := producer_of(value, "Pow")) is not None:
        return power.inputs[0] if graph_matching.constant_number(power.inputs[1]) == 2.0 else None
    product = producer_of(value, "Mul")
    return product.inputs[0] if product is not None and product.inputs[0] is product.inputs[1] else None


def _averages_last_axis(mean: ir.Node) -> bool:
    rank = graph_matching.rank_of(mean.outputs[0])
    if mean.attributes.get_int("keepdims", 1) != 1 or rank is None:
        return False
    axes: list[float] = list(mean.attributes.get_ints("axes", ()))
    if len(mean.inputs) > 1:
        axes = graph_matching.constant_numbers(mean.inputs[1]) or []
    return axes in ([-1], [rank - 1])


def _find_division(root: ir.Value, source: ir.Value) -> ir.Node | None:
    """Return the node that computes source / root, by division or by multiplication with the inverse; `None` without
    it.
    """
    node = graph_matching.only_user(root, "Div", "Reciprocal")
    if node is None:
        return None
    if node.op_type == "Div" and node.inputs[0] is source:
        return node
    if node.op_type == "Div" and (node.inputs[1] is not root or graph_matching.constant_number(node.inputs[0]) != 1.0):
        return None
    product = graph_matching.only_user(node.outputs[0], "Mul")
    return product if product is not None and source in product.inputs else None


def _is_weight(weight: ir.Value, source: ir.Value) -> bool:
    """Return True for a float32 constant with an element for each element of the source's last axis."""
    shape = graph_matching.shape_of(weight, 1)
    if weight.const_value is None or weight.dtype != ir.DataType.FLOAT or shape is None or source.shape is None:
        return False
    return shape[0] == source.shape[-1]


def _replace_norm(match: _Norm) -> None:
    """Replace the matched nodes by SimplifiedLayerNormalization, in place."""
    node = ir.node(
        _NORM,
        [match.source, match.weight],
        {"axis": -1, "epsilon": match.epsilon, "stash_type": _COMPUTED_IN},
        name=f"{graph_matching.scope_of(match.output)}/{_NORM}",
    )
    _insert_after(match.output, node)
    graph_matching.take_over(match.output.outputs[0], node.outputs[0])


class SkipNormFusionPass(GraphPass):
    """Merge a ``SimplifiedLayerNormalization`` with the preceding sum. Works in place.

    Before / After::

        x ┐                                                x ┐
        r ┴ Add → s → SimplifiedLayerNormalization → y     r ┴ SkipSimplifiedLayerNormalization → y, s

    Must not fire when:
        1. x and r are not known to have the same shape: the operator does not broadcast;
        2. values have other than three axes, which ONNX Runtime's kernel refuses, or are not float32;
        3. the sum is read by two normalizations: the second stays.

    Tags: creates. The new node has the tag of the normalization, which is most of its work.

    Why it is safe: it is the operator's definition; the sum stays a value of the graph.
    """

    tags = "creates"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuse every sum with one normalization."""
        count = 0
        for node in [node for graph in model.graphs() for node in graph if is_operator(node, _NORM)]:
            total = node.inputs[0].producer() if node.inputs[0] is not None else None
            if total is not None and _is_skip(total):
                _replace_sum_and_norm(total, node)
                count += 1
        return graph_matching.contrib_result(model, count)


def _is_skip(total: ir.Node) -> bool:
    """Return True if a node adds two computed float32 values of equal shape, with three axes."""
    if not is_operator(total, "Add") or total.outputs[0].is_graph_output():
        return False
    first_addend, second_addend = total.inputs
    if (
        first_addend is None
        or second_addend is None
        or first_addend.dtype != ir.DataType.FLOAT
        or graph_matching.rank_of(first_addend) != 3
    ):
        return False
    return (
        graph_matching.same_shape(first_addend, second_addend)
        and first_addend.const_value is None
        and second_addend.const_value is None
    )


def _replace_sum_and_norm(total: ir.Node, norm: ir.Node) -> None:
    """Replace a sum and a normalization by SkipSimplifiedLayerNormalization, in place."""
    node = ir.node(
        f"Skip{_NORM}",
        [*total.inputs, norm.inputs[1]],
        {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
        num_outputs=4,
        domain=graph_matching.CONTRIB_DOMAIN,
        name=f"{graph_matching.scope_of(norm)}/Skip{_NORM}",
    )
    for empty in node.outputs[1:3]:
        empty.name = ""
    _insert_after(norm, node)
    graph_matching.take_over(norm.outputs[0], node.outputs[0])
    graph_matching.take_over(total.outputs[0], node.outputs[3])


def _insert_after(anchor: ir.Node, node: ir.Node) -> None:
    """Insert ``node`` after ``anchor``, with the tag of ``anchor``."""
    graph = anchor.graph
    assert graph is not None
    graph_matching.tag_like(node, anchor, "merged")
    graph.insert_after(anchor, node)
