"""Lets nodes compute in float16, or keeps their weights in bfloat16.

Works on the graph alone; each weight is converted when the result is written. Before / After, for a node that can and
is to compute in float16, between nodes that stay float32::

    x32 → MatMul → y32                      x32 → Cast → x16 → MatMul → y16 → Cast → y32
    weight32 → MatMul                       weight16 → MatMul

and for bfloat16, for which ONNX Runtime's CPU provider has few kernels::

    weight32 → MatMul                       weightb16 → Cast → weight32 → MatMul

Inputs and outputs of the graph stay as they are. ``onnxruntime.transformers.float16`` is not used: it needs the values
of the weights, and where two nodes that stay float32 read one value it writes two nodes with one output.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from winml.modelkit.graph.fresh_names import FreshNames
from winml.modelkit.quantize.engine_task import EngineTask
from winml.modelkit.quantize.half_floats.forms import half_nodes
from winml.modelkit.quantize.half_floats.tensors import HalfTensor
from winml.modelkit.quantize.weight_checks import WeightUse

__all__ = ["convert_floats"]

_FLOAT, _HALF, _BRAIN = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
SMALL_BYTES = 4096
"""Tensors below this size are stored twice where nodes of both kinds read them, and stay float32 beside bfloat16.
Chosen: a Cast costs more than they do."""


def convert_floats(model: ir.Model, task: EngineTask) -> ir.Model:
    """Return the model with the named nodes in 16-bit floating point; the given model is not changed."""
    converted = model.clone()
    if task.precision.name == "bf16":
        _keep_weights_in_brain_floats(converted.graph, task.nodes)
    else:
        _Halving(converted, task.nodes).run()
    return converted


def _keep_weights_in_brain_floats(graph: ir.Graph, names: frozenset[str]) -> None:
    """Store the weights that only the named nodes read in bfloat16, with a Cast behind each, in place."""
    first, fresh = next(iter(graph), None), FreshNames.of_graph(graph)
    for value in list(graph.initializers.values()):
        tensor, readers = value.const_value, [node for node, _ in value.uses()]
        if tensor is None or tensor.dtype != _FLOAT or tensor.nbytes < SMALL_BYTES or _has_fixed_type(value):
            continue
        if first is None or not readers or any(node.name not in names for node in readers):
            continue
        use = WeightUse.of(value, readers[0])
        narrow = _register(graph, HalfTensor(tensor, _BRAIN, fresh.take(f"{value.name}_bf16"), use))
        cast = _cast(narrow, _FLOAT, readers[0], fresh)
        graph.insert_before(first, cast)
        ir.convenience.replace_all_uses_with(value, cast.outputs[0])
        graph.initializers.pop(value.name or "")


class _Halving:
    """One model whose nodes are to compute in float16, in place."""

    def __init__(self, model: ir.Model, names: frozenset[str]) -> None:
        self._graph = model.graph
        self._halves = half_nodes(model, names)
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
        if len(inside) < len(readers) and tensor.nbytes >= SMALL_BYTES:
            self._redirect(value, _HALF, inside)  # stored once, in the precision that others need
            return
        use = WeightUse.of(value, inside[0])
        narrow = _register(self._graph, HalfTensor(tensor, _HALF, self._fresh.take(f"{value.name}_fp16"), use))
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
        cast = _cast(value, _FLOAT, maker, self._fresh, name)
        self._graph.insert_after(maker, cast)
        _replace_uses(value, cast.outputs[0], outside)
        for position, output in enumerate(self._graph.outputs):
            if output is value:
                self._graph.outputs[position] = cast.outputs[0]

    def _redirect(self, value: ir.Value, dtype: ir.DataType, readers: list[ir.Node]) -> None:
        """Let nodes read a value in another type."""
        maker = value.producer()
        assert self._first is not None
        cast = _cast(value, dtype, maker or readers[0], self._fresh)
        if maker is None:
            self._graph.insert_before(self._first, cast)
        else:
            self._graph.insert_after(maker, cast)
        _replace_uses(value, cast.outputs[0], readers)


def _cast(value: ir.Value, dtype: ir.DataType, owner: ir.Node, fresh: FreshNames, name: str | None = None) -> ir.Node:
    """Return a Cast of a value that belongs to the module of a node; its output has a fresh name or the given one."""
    output = name or fresh.take(f"{value.name}_as_{dtype.name.lower()}")
    cast = ir.node("Cast", [value], {"to": int(dtype)}, name=fresh.take(f"{output}/Cast"))
    cast.outputs[0].name = output
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), value.shape
    cast.metadata_props.update(owner.metadata_props)
    return cast


def _register(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    value = ir.Value(
        name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
    )
    graph.register_initializer(value)
    return value


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
        given = node.attributes.get("value")
        values = given.as_tensor().numpy() if given is not None else np.zeros(1, np.float32)
        half = np.clip(values, np.finfo(np.float16).min, np.finfo(np.float16).max).astype(np.float16)
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(half))
