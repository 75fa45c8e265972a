"""Quantizes weights beforehand and activations while the graph runs.

Before / After::

    x, weight → MatMul → y             x → DynamicQuantizeLinear; both → MatMulInteger → Cast → Mul (scales) → y
    x, weight, bias → Gemm → y         the same, → Add (bias) → y
    table, indices → Gather → rows     integers, indices → Gather → DequantizeLinear → rows

Nodes, their names and the integers are those of ``onnxruntime.quantization.quantize_dynamic``. That function holds
every weight, replaces a weight for all its readers, and takes a Gemm for no product; hence the nodes are placed here.

Must not fire for a Gemm with a factor other than 1 before product or addition, or a transposed activation.
Tags: those of a Gemm go to its addition; the other new nodes get theirs afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from winml.modelkit.onnx import weights
from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.quantize.engines.integer_weights import IntegerRange, measure_scales, quantized_tensor
from winml.modelkit.quantize.planning import EngineTask
from winml.modelkit.quantize.precisions import PRODUCT_AND_SUM
from winml.modelkit.tags.tagging import node_graphs

_PRODUCER = ("onnx.quantize", "0.1.0")
"""Specified: what ``onnxruntime.quantization`` writes, by which tools know its form of a quantized graph."""
_LOOKUP, _PRODUCT = "lookup", "product"
"""Readers of a weight; each has scales along another axis."""


class _Integers(NamedTuple):
    """A value in 8 bits."""

    values: ir.Value
    scale: ir.Value
    zero_point: ir.Value


def quantize_dynamically(model: ir.Model, task: EngineTask) -> ir.Model:
    """Return the model with the named nodes in 8 bits; the given model is not changed."""
    quantized = model.clone()
    weights.give_products_own_weights(quantized, task.nodes)
    _Rewriting(quantized.graph, task).run()
    quantized.producer_name, quantized.producer_version = _PRODUCER
    return quantized


class _Rewriting:
    """The named nodes of one graph, in place."""

    def __init__(self, graph: ir.Graph, task: EngineTask) -> None:
        self._graph, self._task = graph, task
        self._fresh = FreshNames.of_graph(graph)
        self._weights: dict[tuple[ir.Value, str, bool], _Integers] = {}
        """Weight, kind of its readers and whether they read it transposed → its integers."""
        self._activations: dict[ir.Value, _Integers] = {}
        """Activation, or rows of a table → its integers."""
        self._rows: dict[ir.Value, ir.Value] = {}
        """Rows of a table as integers → the same as floats, made where they are read."""
        self._shares_activations = False

    def run(self) -> None:
        for node in list(self._graph):
            if node.name not in self._task.nodes or not _reads_weight(node):
                self._read_floats(node)
            elif node.op_type == "Gather":
                self._quantize_lookup(node)
            else:
                self._quantize_product(node)
        for index, output in enumerate(self._graph.outputs):
            if output in self._rows:
                self._graph.outputs[index] = self._dequantized(output, None)
        if self._shares_activations:
            self._graph.sort()  # the earlier group may read the activation behind this one

    def _quantize_product(self, node: ir.Node) -> None:
        """Replace a product by one of integers; a Gemm with a bias by a product and an addition."""
        activation, weight, *bias = node.inputs
        assert activation is not None  # a product has two inputs
        assert weight is not None
        read = self._quantized_activation(node, activation)
        is_transposed = bool(node.attributes.get_int("transB", 0))
        taken = self._quantized_weight(weight, _PRODUCT, is_transposed=is_transposed)
        result, name = node.outputs[0], f"{node.name}_quant"
        product_name = self._fresh.take(f"{result.name}_product") if bias and bias[0] is not None else result.name
        integers = f"{product_name}_output_quantized"
        inputs = [read.values, taken.values, read.zero_point, taken.zero_point]
        product = self._node("MatMulInteger", inputs, name, integers)
        cast = self._node("Cast", product.outputs, f"{integers}_cast", f"{integers}_cast_output")
        cast.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
        scale = self._node("Mul", [read.scale, taken.scale], f"{name}_scales_mul", f"{name}_scales_mul:0")
        scaled = self._node("Mul", [cast.outputs[0], scale.outputs[0]], f"{name}_output_scale_mul", product_name)
        nodes = [product, cast, scale, scaled]
        if product_name != result.name:
            nodes.append(
                self._node("Add", [scaled.outputs[0], bias[0]], self._fresh.take(f"{node.name}_bias"), result.name)
            )
            nodes[-1].metadata_props.update(node.metadata_props)
        ir.convenience.replace_nodes_and_values(self._graph, node, [node], nodes, [result], nodes[-1].outputs)
        weights.drop_unused_initializers(self._graph, [weight])

    def _quantize_lookup(self, node: ir.Node) -> None:
        """Let a Gather read integers; its rows become floats where floats are read."""
        table, rows = node.inputs[0], node.outputs[0]
        assert table is not None  # it is the weight
        taken = self._quantized_weight(table, _LOOKUP)
        node.replace_input_with(0, taken.values)
        weights.drop_unused_initializers(self._graph, [table])
        floats = ir.Value(name=rows.name, type=rows.type, shape=rows.shape)
        rows.name, rows.type, rows.shape = self._fresh.take(f"{rows.name}_quantized"), None, None
        self._rows[rows] = floats
        self._activations[rows] = _Integers(rows, taken.scale, taken.zero_point)

    def _read_floats(self, node: ir.Node) -> None:
        """Let a node that stays, and the nodes of its subgraphs, read the rows of tables as floats."""
        for reader in (node, *(inner for graph in node_graphs(node) for inner in graph.all_nodes())):
            for index, value in enumerate(reader.inputs):
                if value in self._rows:
                    reader.replace_input_with(index, self._dequantized(value, node))

    def _dequantized(self, rows: ir.Value, reader: ir.Node | None) -> ir.Value:
        """Return rows as floats, made before their first reader; without one, at the end."""
        floats = self._rows[rows]
        if floats.producer() is None:
            name = f"{floats.name}_DequantizeLinear"
            node = ir.Node("", "DequantizeLinear", self._activations[rows], outputs=[floats], name=name)
            if reader is not None:
                self._graph.insert_before(reader, node)
            else:
                self._graph.append(node)
        return floats

    def _quantized_activation(self, node: ir.Node, value: ir.Value) -> _Integers:
        """Return an activation in 8 bits, made before its first reader; that of an earlier group serves as well."""
        if value.is_initializer():
            return self._quantized_weight(value, _LOOKUP)
        known = (user for user, _ in value.uses() if user.op_type == "DynamicQuantizeLinear")
        if value not in self._activations and (maker := next(known, None)) is not None:
            self._activations[value] = _Integers(*maker.outputs)
            self._shares_activations = True
        if value not in self._activations:
            ends = ("quantized", "scale", "zero_point")
            outputs = [ir.Value(name=self._fresh.take(f"{value.name}_{end}")) for end in ends]
            name = f"{value.name}_QuantizeLinear"
            self._graph.insert_before(node, ir.Node("", "DynamicQuantizeLinear", [value], outputs=outputs, name=name))
            self._activations[value] = _Integers(*outputs)
        return self._activations[value]

    def _quantized_weight(self, value: ir.Value, kind: str, *, is_transposed: bool = False) -> _Integers:
        """Return a weight in 8 bits: for products a scale for each channel, for lookups one."""
        key = (value, kind, is_transposed)
        if key not in self._weights:
            tensor = value.const_value
            assert tensor is not None  # a weight is an initializer
            name = value.name or ""
            if is_transposed:
                name = self._fresh.take(f"{name}_transposed")
                tensor = weights.transposed_tensor(tensor, name)
            elif self._has_other_readers(value):
                name = self._fresh.take(f"{name}.{kind}")
            is_channel = kind == _PRODUCT and self._task.is_per_channel
            scales = measure_scales(tensor, -1 if is_channel else None, self._integers_of(kind))
            names = [self._fresh.take(f"{name}_{end}") for end in ("quantized", "zero_point", "scale")]
            scale = weights.add_initializer(self._graph, ir.Tensor(scales.scales, name=names[2]))
            zero_point = weights.add_initializer(self._graph, ir.Tensor(scales.zero_points, name=names[1]))
            integers = weights.add_initializer(self._graph, quantized_tensor(tensor, scales, names[0]))
            self._weights[key] = _Integers(integers, scale, zero_point)
        return self._weights[key]

    def _has_other_readers(self, value: ir.Value) -> bool:
        """Return True if nodes that stay read a weight, or other quantized nodes have integers of it."""
        is_known = any(known == value for known, _, _ in self._weights)
        stays = any(node.name not in self._task.nodes or node.graph is not self._graph for node, _ in value.uses())
        return is_known or stays or value.is_graph_output()

    def _integers_of(self, kind: str) -> IntegerRange:
        """Return the integers that ONNX Runtime takes: tables become those of activations, which are unsigned."""
        is_signed = self._task.precision.signed_weights
        symmetric = is_signed if self._task.options.symmetric is None else self._task.options.symmetric
        if kind == _PRODUCT and is_signed:
            return IntegerRange(ir.DataType.INT8, -127 if symmetric else -128, 127, symmetric)
        is_weight = kind == _PRODUCT or not is_signed
        return IntegerRange(ir.DataType.UINT8, 0, 255, is_weight and symmetric)

    def _node(self, operator: str, inputs: Sequence[ir.Value | None], name: str, output: str | None) -> ir.Node:
        return ir.Node("", operator, inputs, outputs=[ir.Value(name=output)], name=name)


def _reads_weight(node: ir.Node) -> bool:
    """Return True for a lookup in an initializer, and for a product with one, with or without the sum of a Gemm."""
    weight = node.inputs[0 if node.op_type == "Gather" else 1] if node.op_type in ("Gather", "MatMul", "Gemm") else None
    settings = {name: attribute.value for name, attribute in node.attributes.items()} if node.op_type == "Gemm" else {}
    is_plain = all(settings.get(name, value) == value for name, value in PRODUCT_AND_SUM.items())
    return is_plain and weight is not None and weight.is_initializer() and node.domain in ("", "ai.onnx")
