"""Engine for integer weights with activations quantized at run time.

Before / After::

    x, weight → MatMul → y             x → DynamicQuantizeLinear; both → MatMulInteger → Cast → Mul (scales) → y
    x, weight, bias → Gemm → y         the same, → Add (bias) → y
    table, indices → Gather → rows     integers, indices → Gather → DequantizeLinear → rows
    x, weights → LSTM → y              x, integers → DynamicQuantizeLSTM → y

Nodes, their names and the integers are those of ``onnxruntime.quantization.quantize_dynamic``. That function holds all
weights in memory, replaces a weight for all readers, and does not support Gemm. The nodes are therefore inserted here.

Must not fire for a Gemm with a factor other than 1 before product or addition, or a transposed activation.
Tags: the tag of a Gemm goes to its addition; other new nodes are tagged afterwards.
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
"""Specified: producer written by ``onnxruntime.quantization``, by which tools recognize its quantized graphs."""
_LOOKUP, _PRODUCT, _GATES = "lookup", "product", "gates"
"""Kinds of readers of a weight, with scales along different axes."""
_DOMAIN = "com.microsoft"
_LSTM_WEIGHTS = (1, 2)
"""Specified: positions of the input weights and the recurrent weights of an ``LSTM``."""
_LSTM_INPUTS = 8
"""Specified: number of inputs of an ``LSTM``; scales and zero points follow."""


class _Integers(NamedTuple):
    """An 8-bit value."""

    values: ir.Value
    scale: ir.Value
    zero_point: ir.Value


def quantize_dynamically(model: ir.Model, task: EngineTask) -> ir.Model:
    """Return a copy of the model with the selected nodes in 8 bits."""
    quantized = model.clone()
    weights.give_products_own_weights(quantized, task.nodes)
    fresh = FreshNames.of_graph(quantized.graph)
    for graph in (quantized.graph, *quantized.graph.subgraphs()):
        _Rewriting(quantized.graph, graph, task, fresh).run()
    quantized.opset_imports.setdefault(_DOMAIN, 1)
    quantized.producer_name, quantized.producer_version = _PRODUCER
    return quantized


class _Rewriting:
    """Quantization of the selected nodes of one graph or subgraph, in place."""

    def __init__(self, main: ir.Graph, graph: ir.Graph, task: EngineTask, fresh: FreshNames) -> None:
        self._main, self._graph, self._task, self._fresh = main, graph, task, fresh
        self._weights: dict[tuple[ir.Value, str, bool], _Integers] = {}
        """(weight, kind of readers, is_transposed) → its integers."""
        self._activations: dict[ir.Value, _Integers] = {}
        """Activation or looked-up rows → integers."""
        self._rows: dict[ir.Value, ir.Value] = {}
        """Integer rows of a table → float rows, computed on demand."""
        self._shares_activations = False

    def run(self) -> None:
        """Quantize the selected nodes, and give all other nodes float rows of quantized tables."""
        for node in list(self._graph):
            if node.name not in self._task.nodes or not _reads_weight(node):
                self._redirect_to_floats(node)
            elif node.op_type == "Gather":
                self._quantize_lookup(node)
            elif node.op_type == "LSTM":
                self._quantize_lstm(node)
            else:
                self._quantize_product(node)
        for index, output in enumerate(self._graph.outputs):
            if output in self._rows:
                self._graph.outputs[index] = self._dequantize_rows(output, None)
        if self._shares_activations:
            self._graph.sort()  # the earlier group may read the activation after this one

    def _quantize_product(self, node: ir.Node) -> None:
        """Replace a product by an integer product; a Gemm with a bias by a product and an addition."""
        activation, weight, *bias = node.inputs
        assert activation is not None  # a product has two inputs
        assert weight is not None
        data = self._quantize_activation(node, activation)
        is_transposed = bool(node.attributes.get_int("transB", 0))
        factor = self._quantize_weight(weight, _PRODUCT, is_transposed=is_transposed)
        # In a subgraph, the record of quantized nodes finds a node by its name.
        result, name = node.outputs[0], f"{node.name}_quant" if self._graph is self._main else node.name or ""
        product_name = self._fresh.take(f"{result.name}_product") if bias and bias[0] is not None else result.name
        integers = f"{product_name}_output_quantized"
        inputs = [data.values, factor.values, data.zero_point, factor.zero_point]
        product = self._make_node("MatMulInteger", inputs, name, integers)
        cast = self._make_node("Cast", product.outputs, f"{integers}_cast", f"{integers}_cast_output")
        cast.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
        scale = self._make_node("Mul", [data.scale, factor.scale], f"{name}_scales_mul", f"{name}_scales_mul:0")
        scaled = self._make_node("Mul", [cast.outputs[0], scale.outputs[0]], f"{name}_output_scale_mul", product_name)
        nodes = [product, cast, scale, scaled]
        if product_name != result.name:
            nodes.append(
                self._make_node("Add", [scaled.outputs[0], bias[0]], self._fresh.take(f"{node.name}_bias"), result.name)
            )
            nodes[-1].metadata_props.update(node.metadata_props)
        ir.convenience.replace_nodes_and_values(self._graph, node, [node], nodes, [result], nodes[-1].outputs)
        weights.drop_unused_initializers(self._main, [weight])

    def _quantize_lstm(self, node: ir.Node) -> None:
        """Replace an ``LSTM`` by ``DynamicQuantizeLSTM``, with scales by direction and gate unit, or by direction."""
        weighted = [node.inputs[position] for position in _LSTM_WEIGHTS]
        integers = [self._quantize_gates(value) for value in weighted if value is not None]
        inputs = [*node.inputs, *[None] * (_LSTM_INPUTS - len(node.inputs))]
        for position, gates in zip(_LSTM_WEIGHTS, integers, strict=True):
            inputs[position] = gates.values
            inputs += [gates.scale, gates.zero_point]
        attributes = [attribute for name, attribute in node.attributes.items() if name != "layout"]
        new = ir.Node(_DOMAIN, "DynamicQuantizeLSTM", inputs, attributes, num_outputs=len(node.outputs), name=node.name)
        new.metadata_props.update(node.metadata_props)
        for old, output in zip(node.outputs, new.outputs, strict=True):
            output.name, output.type, output.shape = old.name, old.type, old.shape
        ir.convenience.replace_nodes_and_values(self._graph, node, [node], [new], node.outputs, new.outputs)
        weights.drop_unused_initializers(self._main, [value for value in weighted if value is not None])

    def _quantize_gates(self, value: ir.Value) -> _Integers:
        """Quantize the weights of all gates of an ``LSTM`` to symmetric integers, and transpose them."""
        key = (value, _GATES, True)
        if key not in self._weights:
            tensor = value.const_value
            assert tensor is not None  # checked by _reads_weight
            directions, gates, width = tensor.shape.numpy()
            axis, rows = (0, gates) if self._task.is_per_channel else (0, 1)
            flat = weights.computed_tensor(
                lambda: weights.read_once(tensor).reshape(directions * rows, -1),
                tensor.dtype,
                (directions * rows, gates * width // rows),
                value.name or "",
            )
            scales = measure_scales(flat, axis, IntegerRange(ir.DataType.INT8, -127, 127, True))
            names = [self._fresh.take(f"{value.name}_{end}") for end in ("quantized", "scale", "zero_point")]
            stored = quantized_tensor(flat, scales, names[0])
            transposed = weights.computed_tensor(
                lambda: stored.numpy().reshape(directions, gates, width).transpose(0, 2, 1),
                ir.DataType.INT8,
                (directions, width, gates),
                names[0],
            )
            shape = (directions, gates) if self._task.is_per_channel else (directions,)
            self._weights[key] = _Integers(
                weights.add_initializer(self._main, transposed),
                weights.add_initializer(self._main, ir.Tensor(scales.scales.reshape(shape), name=names[1])),
                weights.add_initializer(self._main, ir.Tensor(scales.zero_points.reshape(shape), name=names[2])),
            )
        return self._weights[key]

    def _quantize_lookup(self, node: ir.Node) -> None:
        """Replace the table of a Gather by integers; its rows are dequantized for float readers."""
        table, rows = node.inputs[0], node.outputs[0]
        assert table is not None  # input 0 is the weight
        integers = self._quantize_weight(table, _LOOKUP)
        node.replace_input_with(0, integers.values)
        weights.drop_unused_initializers(self._main, [table])
        floats = ir.Value(name=rows.name, type=rows.type, shape=rows.shape)
        rows.name, rows.type, rows.shape = self._fresh.take(f"{rows.name}_quantized"), None, None
        self._rows[rows] = floats
        self._activations[rows] = _Integers(rows, integers.scale, integers.zero_point)

    def _redirect_to_floats(self, node: ir.Node) -> None:
        """Redirect an unquantized node, and the nodes of its subgraphs, to float rows."""
        for reader in (node, *(inner for graph in node_graphs(node) for inner in graph.all_nodes())):
            for index, value in enumerate(reader.inputs):
                if value in self._rows:
                    reader.replace_input_with(index, self._dequantize_rows(value, node))

    def _dequantize_rows(self, rows: ir.Value, reader: ir.Node | None) -> ir.Value:
        """Dequantize rows before their first reader, or at the end of the graph without a reader."""
        floats = self._rows[rows]
        if floats.producer() is None:
            name = f"{floats.name}_DequantizeLinear"
            node = ir.Node("", "DequantizeLinear", self._activations[rows], outputs=[floats], name=name)
            if reader is not None:
                self._graph.insert_before(reader, node)
            else:
                self._graph.append(node)
        return floats

    def _quantize_activation(self, node: ir.Node, value: ir.Value) -> _Integers:
        """Quantize an activation before its first reader, or reuse the activation of an earlier group."""
        if value.is_initializer():
            return self._quantize_weight(value, _LOOKUP)
        readers = (user for user, _ in value.uses() if user.graph is self._graph)  # not in another subgraph
        quantizers = (user for user in readers if user.op_type == "DynamicQuantizeLinear")
        if value not in self._activations and (maker := next(quantizers, None)) is not None:
            self._activations[value] = _Integers(*maker.outputs)
            self._shares_activations = True
        if value not in self._activations:
            ends = ("quantized", "scale", "zero_point")
            outputs = [ir.Value(name=self._fresh.take(f"{value.name}_{end}")) for end in ends]
            name = f"{value.name}_QuantizeLinear"
            self._graph.insert_before(node, ir.Node("", "DynamicQuantizeLinear", [value], outputs=outputs, name=name))
            self._activations[value] = _Integers(*outputs)
        return self._activations[value]

    def _quantize_weight(self, value: ir.Value, kind: str, *, is_transposed: bool = False) -> _Integers:
        """Quantize a weight to 8 bits, with per-channel scales for products and one scale for lookups."""
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
            scales = measure_scales(tensor, -1 if is_channel else None, self._integer_range(kind))
            names = [self._fresh.take(f"{name}_{end}") for end in ("quantized", "zero_point", "scale")]
            scale = weights.add_initializer(self._main, ir.Tensor(scales.scales, name=names[2]))
            zero_point = weights.add_initializer(self._main, ir.Tensor(scales.zero_points, name=names[1]))
            integers = weights.add_initializer(self._main, quantized_tensor(tensor, scales, names[0]))
            self._weights[key] = _Integers(integers, scale, zero_point)
        return self._weights[key]

    def _has_other_readers(self, value: ir.Value) -> bool:
        """Return True if unquantized nodes read a weight, or other quantized nodes share its integers."""
        is_known = any(weight == value for weight, _, _ in self._weights)
        is_float = any(node.name not in self._task.nodes or node.graph is not self._graph for node, _ in value.uses())
        return is_known or is_float or value.is_graph_output()

    def _integer_range(self, kind: str) -> IntegerRange:
        """Integer range required by ONNX Runtime: tables have the type of activations, which is unsigned."""
        is_signed = self._task.precision.signed_weights
        symmetric = is_signed if self._task.options.symmetric is None else self._task.options.symmetric
        if kind == _PRODUCT and is_signed:
            return IntegerRange(ir.DataType.INT8, -127 if symmetric else -128, 127, symmetric)
        is_weight = kind == _PRODUCT or not is_signed
        return IntegerRange(ir.DataType.UINT8, 0, 255, is_weight and symmetric)

    def _make_node(self, operator: str, inputs: Sequence[ir.Value | None], name: str, output: str | None) -> ir.Node:
        """Create a node with one output."""
        return ir.Node("", operator, inputs, outputs=[ir.Value(name=output)], name=name)


def _reads_weight(node: ir.Node) -> bool:
    """Return True for a lookup in an initializer, a product with one (a plain Gemm too), or an ``LSTM`` with two."""
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type == "LSTM":
        return all(
            (value := node.inputs[position]) is not None and value.is_initializer() for position in _LSTM_WEIGHTS
        )
    weight = node.inputs[0 if node.op_type == "Gather" else 1] if node.op_type in ("Gather", "MatMul", "Gemm") else None
    settings = {name: attribute.value for name, attribute in node.attributes.items()} if node.op_type == "Gemm" else {}
    is_plain = all(settings.get(name, value) == value for name, value in PRODUCT_AND_SUM.items())
    return is_plain and weight is not None and weight.is_initializer()
