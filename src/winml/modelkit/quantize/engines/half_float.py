"""Computes nodes in float16, or keeps their weights in 16-bit floating point.

Works on the graph alone; each weight is converted when the result is written. Before / After, for a node in float16
between nodes that stay float32::

    x32 → MatMul → y32                      x32 → Cast → x16 → MatMul → y16 → Cast → y32
    weight32 → MatMul                       weight16 → MatMul

and for bfloat16, for which ONNX Runtime's CPU provider has few kernels::

    weight32 → MatMul                       weightb16 → Cast → weight32 → MatMul

Inputs and outputs of the graph stay as they are. ``onnxruntime.transformers.float16`` is not used: it needs the values
of the weights, and if two nodes that stay float32 read one value, it writes two nodes with one output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.fresh_names import FreshNames, cast_node
from winml.modelkit.onnx.weights import add_initializer
from winml.modelkit.quantize.engines.block_quantizers import values_in_file
from winml.modelkit.quantize.engines.half_precision_nodes import HALF_END, half_precision_nodes
from winml.modelkit.quantize.engines.integer_weights import WeightUse
from winml.modelkit.quantize.planning import EngineTask

_HALF_STEP = float(np.finfo(np.float16).smallest_subnormal)


class _HalfTensor(ir.LazyTensor):
    """A float32 tensor as float16 or bfloat16; nothing is read until it is written.

    A finite value beyond the range of float16 becomes the end of the range, and a value that would round to zero the
    smallest subnormal, so that masks stay finite and no divisor is zero. Infinity, which masks contain, stays; a weight
    with NaN is refused while it is written.
    """

    def __init__(self, tensor: ir.TensorProtocol, dtype: ir.DataType, name: str, use: WeightUse) -> None:
        """Refer to the tensor; ``use`` says of which weight, for messages."""
        super().__init__(self._read, dtype, ir.Shape(tensor.shape.numpy(), frozen=True), name=name)
        self._tensor32 = tensor
        self._use = use
        self.clipped = 0
        """How many values were beyond the range when the tensor was read last."""

    def tofile(self, file: BinaryIO) -> None:
        """Write the bytes of all values, one piece in memory at a time where they lie in a file.

        Raises:
            QuantizeError: there is NaN among them.
        """
        self.clipped = 0
        for piece in self._pieces():
            file.write(np.ascontiguousarray(self._narrowed(piece)).view(np.uint8).data)

    def _pieces(self) -> Iterator[Array]:
        stored = values_in_file(self._tensor32)
        if stored is None:
            yield self._tensor32.numpy().reshape(-1)
        else:
            yield from (piece.astype(np.float32, copy=False) for piece in stored.pieces())

    def _read(self) -> ir.TensorProtocol:
        self.clipped = 0
        values = self._narrowed(self._tensor32.numpy())
        return ir.Tensor(np.ascontiguousarray(values), dtype=self.dtype, name=self.name)

    def _narrowed(self, values: Array) -> Array:
        if self._tensor32.size > 1:  # a single one may stand for what is missing
            self._use.refuse_nan(values)
        if self.dtype == ir.DataType.BFLOAT16:
            return values.astype(self.dtype.numpy())  # the range of float32
        beyond = np.isfinite(values) & (np.abs(values) > HALF_END)
        self.clipped += int(np.count_nonzero(beyond))
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        halves[beyond] = np.copysign(HALF_END, values[beyond])
        vanished = (halves == 0) & (values != 0)
        halves[vanished] = np.copysign(_HALF_STEP, values[vanished])
        return halves


def clipped_values(model: ir.Model) -> int:
    """Return how many weights of a model that was written were beyond the range of float16."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.clipped for tensor in tensors if isinstance(tensor, _HalfTensor))


_FLOAT, _HALF, _BRAIN = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
_SMALL_BYTES = 4096
"""Tensors below this size are stored twice where nodes of both kinds read them, and stay float32 beside bfloat16.
Chosen: a Cast costs more than they do."""


def convert_floats(model: ir.Model, task: EngineTask) -> ir.Model:
    """Return the model with the named nodes in 16-bit floating point; the given model is not changed."""
    converted = model.clone()
    if ir.DataType[task.precision.float_type] == _BRAIN:
        _keep_weights_in_brain_floats(converted.graph, task.nodes)
    else:
        _Halving(converted, task.nodes).run()
    return converted


def _keep_weights_in_brain_floats(graph: ir.Graph, names: frozenset[str]) -> None:
    """Store the weights that only the named nodes read in bfloat16, with a Cast behind each, in place."""
    first, fresh = next(iter(graph), None), FreshNames.of_graph(graph)
    for value in list(graph.initializers.values()):
        tensor, readers = value.const_value, [node for node, _ in value.uses()]
        if tensor is None or tensor.dtype != _FLOAT or tensor.nbytes < _SMALL_BYTES or _has_fixed_type(value):
            continue
        if first is None or not readers or any(node.name not in names for node in readers):
            continue
        use = WeightUse.of(value, readers[0])
        narrow = add_initializer(graph, _HalfTensor(tensor, _BRAIN, fresh.take(f"{value.name}_bf16"), use))
        cast = cast_node(narrow, _FLOAT, readers[0], fresh)
        graph.insert_before(first, cast)
        ir.convenience.replace_all_uses_with(value, cast.outputs[0])
        graph.initializers.pop(value.name or "")


class _Halving:
    """One model whose nodes are to compute in float16, in place."""

    def __init__(self, model: ir.Model, names: frozenset[str]) -> None:
        self._graph = model.graph
        self._halves = half_precision_nodes(model, names)
        self._first = next(iter(model.graph), None)
        self._fresh = FreshNames.of_graph(model.graph)

    def run(self) -> None:
        """Convert weights, inputs and outputs of the nodes, with a Cast wherever float32 and float16 meet."""
        values = {value: None for node in self._halves for value in node.inputs if value is not None}
        for node in self._halves:
            _set_attributes(node)
        for value in sorted(values, key=lambda value: value.name or ""):
            if value.dtype != _FLOAT or value.producer() in self._halves:
                continue
            if value.is_initializer() and not _has_fixed_type(value):
                self._convert_weight(value)
            else:
                self._redirect(value, _HALF, [node for node, _ in value.uses() if node in self._halves])
        for node in [node for node in self._graph if node in self._halves]:
            for value in node.outputs:
                if value.dtype == _FLOAT:
                    self._convert_output(value)

    def _convert_weight(self, value: ir.Value) -> None:
        tensor = value.const_value
        assert tensor is not None
        readers = [node for node, _ in value.uses()]
        inside = [node for node in readers if node in self._halves]
        if len(inside) < len(readers) and tensor.nbytes >= _SMALL_BYTES:
            self._redirect(value, _HALF, inside)  # stored once, in the precision that others need
            return
        use = WeightUse.of(value, inside[0])
        narrow = add_initializer(self._graph, _HalfTensor(tensor, _HALF, self._fresh.take(f"{value.name}_fp16"), use))
        _replace_uses(value, narrow, inside)
        if len(inside) == len(readers):
            self._graph.initializers.pop(value.name or "")

    def _convert_output(self, value: ir.Value) -> None:
        """Give an output of a node in float16 its type, and everything else that reads it a Cast of it."""
        value.type = ir.TensorType(_HALF)
        outside = [node for node, _ in value.uses() if node not in self._halves]
        maker = value.producer()
        assert maker is not None
        if not outside and not value.is_graph_output():
            return
        name = value.name or ""
        value.name = self._fresh.take(f"{name}_fp16")
        cast = cast_node(value, _FLOAT, maker, self._fresh, name)
        self._graph.insert_after(maker, cast)
        _replace_uses(value, cast.outputs[0], outside)
        for position, output in enumerate(self._graph.outputs):
            if output is value:
                self._graph.outputs[position] = cast.outputs[0]

    def _redirect(self, value: ir.Value, dtype: ir.DataType, readers: list[ir.Node]) -> None:
        """Let nodes read a value in another type."""
        maker = value.producer()
        assert self._first is not None
        cast = cast_node(value, dtype, maker or readers[0], self._fresh)
        if maker is None:
            self._graph.insert_before(self._first, cast)
        else:
            self._graph.insert_after(maker, cast)
        _replace_uses(value, cast.outputs[0], readers)


def _replace_uses(value: ir.Value, other: ir.Value, readers: Iterable[ir.Node]) -> None:
    chosen = set(readers)
    for node, position in list(value.uses()):
        if node in chosen:
            node.replace_input_with(position, other)


def _has_fixed_type(value: ir.Value) -> bool:
    return value.is_graph_input() or value.is_graph_output()


def _set_attributes(node: ir.Node) -> None:
    """Let a node whose type an attribute says make float16."""
    if node.op_type == "Cast":
        node.attributes["to"] = ir.AttrInt64("to", int(_HALF))
    elif node.op_type == "ConstantOfShape":
        passed = node.attributes.get("value")
        values = passed.as_tensor().numpy() if passed is not None else np.zeros(1, np.float32)
        half = np.clip(values, np.finfo(np.float16).min, np.finfo(np.float16).max).astype(np.float16)
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(half))
