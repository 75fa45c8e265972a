"""Merges the projections of queries, keys and values before an attention over a cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from winml.modelkit.metadata_keys import MODULES_KEY, QUANTIZATION_KEY
from winml.modelkit.onnx.coded_weights import CodedTensor
from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.onnx.operators import is_operator, producer_of
from winml.modelkit.onnx.stage import GraphPass
from winml.modelkit.onnx.weights import (
    add_initializer,
    computed_tensor,
    constant_tensor,
    drop_unused_initializers,
    read_once,
)
from winml.modelkit.optimize.graph_matching import (
    CONTRIB_DOMAIN,
    NodeBuilder,
    constant_numbers,
    fixed_size,
    has_one_use,
    rank_of,
    scope_of,
    tag_like,
    take_over,
)
from winml.modelkit.tags.tagging import read_tag

_ATTENTION, _BLOCK_PRODUCT, _NORM = "GroupQueryAttention", "MatMulNBits", "SimplifiedLayerNormalization"
_GROUP_INDEX = 4
"""Specified: input of ``MatMulNBits`` with the block of each row."""
_COLUMNS = "N"
"""Specified: attribute of ``MatMulNBits`` with the number of columns."""


class PackedProjectionPass(GraphPass):
    """Merge the products that compute queries, keys and values of an attention into one. Works in place.

    Before / After::

        x → MatMul(wq) → [Add(bq)] → q ┐
        x → MatMul(wk) → [Add(bk)] → k ┼ GroupQueryAttention → y
        x → MatMul(wv) → [Add(bv)] → v ┘

        x → MatMul([wq wk wv]) → [Add([bq bk bv])] → GroupQueryAttention → y

    A normalization of the heads of queries and keys stays, and a Split before it gives the parts.
    Products are ``MatMul`` or ``MatMulNBits``. Parts of one product, in the order q, k, v, are not divided.

    Must not fire when:
        1. an intermediate value is read elsewhere or is an output of the graph;
        2. the weights differ in type, bits, block size or zero points, or another node reads a weight;
        3. weights are still codes of a quantized checkpoint.

    Tags: creates. The product has the tag of the attention and names the modules of the weights; the addition as well.

    Why it is safe: each column of a product depends on its column of the weight only, and blocks of quantized weights
    are within a column. Weights are read when the file is written.
    """

    tags = "creates"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Merge the projections of every attention."""
        common.RemoveUnusedNodesPass()(model)  # nodes of an attention before its fusion read the products
        fresh, count = FreshNames.of_graph(model.graph), 0
        for node in [node for node in model.graph if _is_contrib(node, _ATTENTION)]:
            if (packed := _find_undivided(node.inputs[:3])) is not None:
                _read_packed(node, packed)
                count += 1
            else:
                count += _merge_projections(model.graph, node, fresh)
        if count:
            common.RemoveUnusedNodesPass()(model)  # a build quantizes first, and does not optimize again
        return ir.passes.PassResult(model, bool(count))


def _is_contrib(node: ir.Node, operator: str) -> bool:
    return node.domain == CONTRIB_DOMAIN and node.op_type == operator


def _find_undivided(parts: Sequence[ir.Value | None]) -> ir.Value | None:
    """Return the value whose adjacent slices along the last axis are the parts; `None` for other values."""
    split = producer_of(parts[0], "Split")
    if split is not None and tuple(split.outputs) == tuple(parts) and split.attributes.get_int("axis", 0) in (-1, 2):
        return split.inputs[0]
    slices = [producer_of(value, "Slice") for value in parts]
    sources = {node.inputs[0] for node in slices if node is not None}
    if None in slices or len(sources) != 1:
        return None
    source, position = sources.pop(), 0
    if source is None or rank_of(source) != 3 or source.shape is None:
        return None
    for node in filter(None, slices):
        starts, ends, axes = (constant_numbers(value) for value in node.inputs[1:4])
        steps = constant_numbers(node.inputs[4]) if len(node.inputs) > 4 else [1]
        if starts != [position] or ends is None or axes not in ([-1], [2]) or steps != [1]:
            return None
        position = int(ends[0])
    width = source.shape[-1]
    return source if isinstance(width, int) and position >= width else None


@dataclass(frozen=True)
class _Projection:
    """A product with a constant weight, and the addition of a constant after it."""

    output: ir.Value
    product: ir.Node
    addition: ir.Node | None
    bias: ir.Value | None

    @property
    def weights(self) -> tuple[ir.Value | None, ...]:
        """Inputs of the product after the multiplied value."""
        return tuple(self.product.inputs[1:])

    @property
    def kind(self) -> tuple[object, ...]:
        """Key equal for projections that may be merged."""
        attributes = {name: item.value for name, item in self.product.attributes.items() if name != _COLUMNS}
        return (
            self.product.inputs[0],
            self.product.op_identifier(),
            sorted(attributes.items()),
            [None if value is None else (value.dtype, rank_of(value)) for value in self.weights],
            None if self.bias is None else self.bias.dtype,
            self.product.metadata_props.get(QUANTIZATION_KEY),
        )


def _match_projection(value: ir.Value | None) -> _Projection | None:
    """Match the product that computes a value; `None` for a value of other nodes."""
    if value is None or not has_one_use(value):
        return None
    output, addition, bias = value, producer_of(value, "Add"), None
    if addition is not None:
        terms = [term for term in addition.inputs if term is not None and _is_own_constant(term, rank=1)]
        bias = terms[0] if len(terms) == 1 else None
        value = next((term for term in addition.inputs if term is not None and term is not bias), value)
    product = value.producer()
    if product is None or not has_one_use(value) or (addition is not None and bias is None):
        return None
    is_plain, is_blocked = is_operator(product, "MatMul"), _is_contrib(product, _BLOCK_PRODUCT)
    weights = product.inputs[1:]
    has_groups = is_blocked and len(weights) >= _GROUP_INDEX and weights[_GROUP_INDEX - 1] is not None
    if not (is_plain or is_blocked) or has_groups or (is_plain and rank_of(product.outputs[0]) != 3):
        return None
    if not all(weight is None or _is_own_constant(weight, rank=2 if is_plain else None) for weight in weights):
        return None
    return _Projection(output, product, addition, bias)


def _before_norm(value: ir.Value | None) -> ir.Value | None:
    """Return queries or keys before the normalization of their heads; the value itself without one."""
    joined = producer_of(value, "Reshape")
    norm = producer_of(joined.inputs[0], _NORM) if joined is not None else None
    split = producer_of(norm.inputs[0], "Reshape") if norm is not None else None
    return value if split is None else split.inputs[0]


def _is_own_constant(value: ir.Value, rank: int | None) -> bool:
    """Return True for an initializer that one node reads, with values and a number of axes."""
    tensor = constant_tensor(value)
    is_free = tensor is not None and has_one_use(value) and not isinstance(tensor, CodedTensor)
    return is_free and rank in (None, rank_of(value))


def _merge_projections(graph: ir.Graph, attention: ir.Node, fresh: FreshNames) -> bool:
    """Merge the projections of an attention, in place; return False if they differ."""
    read_values = attention.inputs[:3]
    projected = [_before_norm(value) for value in read_values]
    projections = [part for value in projected if (part := _match_projection(value)) is not None]
    if len(projections) != 3 or any(part.kind != projections[0].kind for part in projections[1:]):
        return False
    builder = NodeBuilder(f"{scope_of(attention)}/packed_qkv/")
    packed = _add_packed_projection(graph, builder, projections, fresh)
    is_direct = projected == list(read_values)
    splits = [] if is_direct else _add_split(graph, builder, packed, [part.output for part in projections], fresh)
    modules = sorted({tag.module for part in projections if (tag := read_tag(part.product)) is not None})
    for node in builder.nodes:
        tag_like(node, attention, "merged")
        node.metadata_props.pop(QUANTIZATION_KEY, None)
        if len(modules) > 1:
            node.metadata_props[MODULES_KEY] = json.dumps(modules, ensure_ascii=False)
    if (record := projections[0].product.metadata_props.get(QUANTIZATION_KEY)) is not None:
        builder.nodes[0].metadata_props[QUANTIZATION_KEY] = record
    source = projections[0].product.inputs[0]
    maker = source.producer() if source is not None else None
    # Before all readers of the parts.
    graph.insert_before(graph[0], builder.nodes) if maker is None else graph.insert_after(maker, builder.nodes)
    for part, split in zip(projections, splits, strict=bool(splits)):
        take_over(part.output, split)
    if is_direct:
        _read_packed(attention, packed)
    replaced = [node for part in projections for node in (part.addition, part.product) if node is not None]
    weights = [value for node in replaced for value in node.inputs if value is not None]
    graph.remove(replaced, safe=True)
    drop_unused_initializers(graph, weights)
    return True


def _read_packed(attention: ir.Node, packed: ir.Value) -> None:
    """Set the input of an attention with queries, keys and values in one tensor, in place."""
    for position, value in enumerate((packed, None, None)):
        attention.replace_input_with(position, value)


def _add_packed_projection(
    graph: ir.Graph, builder: NodeBuilder, projections: Sequence[_Projection], fresh: FreshNames
) -> ir.Value:
    """Add one product, and one addition if there are biases; return the output."""
    first, products = projections[0], [part.product for part in projections]
    # The columns of a matrix, and the rows of values in blocks.
    axis = 1 if first.product.op_type == "MatMul" else 0
    merged = [
        None if values[0] is None else _concatenate(graph, list(filter(None, values)), axis, fresh)
        for values in zip(*(part.weights for part in projections), strict=True)
    ]
    attributes = {name: item.value for name, item in first.product.attributes.items()}
    if _COLUMNS in attributes:
        attributes[_COLUMNS] = sum(product.attributes.get_int(_COLUMNS, 0) for product in products)
    operator, dtype = first.product.op_type, first.product.outputs[0].dtype
    inputs = [first.product.inputs[0], *merged]
    shape = _joined_shape([product.outputs[0] for product in products])
    packed = builder.add(operator, inputs, operator, dtype, shape, domain=first.product.domain, **attributes)
    biases = [part.bias for part in projections if part.bias is not None]
    if not biases:
        return packed
    return builder.add("Add", [packed, _concatenate(graph, biases, 0, fresh)], "Add", dtype, shape)


def _add_split(
    graph: ir.Graph, builder: NodeBuilder, packed: ir.Value, parts: Sequence[ir.Value], fresh: FreshNames
) -> Sequence[ir.Value]:
    """Add a Split of packed queries, keys and values with the sizes of the parts; return its outputs."""
    sizes = [fixed_size(part, 2) or 0 for part in parts]
    tensor = ir.tensor(np.array(sizes, np.int64), name=fresh.take(f"{packed.name}_sizes"))
    split = ir.node(
        "Split", [packed, add_initializer(graph, tensor)], {"axis": -1}, num_outputs=3, name=f"{packed.name}/Split"
    )
    builder.nodes.append(split)
    return split.outputs


def _joined_shape(values: Sequence[ir.Value]) -> ir.Shape | None:
    """Return the shape of values joined along the last axis; `None` if unknown."""
    shapes = [list(value.shape) for value in values if value.shape is not None]
    widths = [shape[-1] for shape in shapes if isinstance(shape[-1], int)]
    return ir.Shape([*shapes[0][:-1], sum(widths)]) if len(widths) == len(values) else None


def _concatenate(graph: ir.Graph, values: Sequence[ir.Value], axis: int, fresh: FreshNames) -> ir.Value:
    """Add an initializer with the constants of some values along an axis; they are read when it is."""
    tensors = [tensor for value in values if (tensor := constant_tensor(value)) is not None]
    shape = list(tensors[0].shape.numpy())
    shape[axis] = sum(tensor.shape.numpy()[axis] for tensor in tensors)
    name = fresh.take(f"{values[0].name}_packed")
    joined = computed_tensor(
        lambda: np.concatenate([read_once(tensor) for tensor in tensors], axis), tensors[0].dtype, shape, name
    )
    return add_initializer(graph, joined)
