"""Optimization of a graph that computes in float16 or bfloat16, as the same graph in float32.

Exporters surround normalizations and attentions of such a graph with casts, and ONNX Runtime's CPU provider has few
float16 kernels, so no fusion matches. The graph is widened, optimized, and converted back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from winml.modelkit.onnx.operators import is_operator
from winml.modelkit.onnx.widening import DTYPE_ATTRIBUTES, WidenedTensor, computes_in, widen_floats

_FLOAT, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
_GELU_CONSTANTS = (math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715)
"""Specified: constants of GELU and of its approximation, which fusions compare with more digits than float16 has."""


@dataclass(frozen=True)
class Float32Twin:
    """A graph of a 16-bit type in float32, with what is needed to convert it back."""

    dtype: ir.DataType
    """The 16-bit type."""
    widened: ir.Model
    """Copy of the graph in float32."""
    interface: frozenset[str]
    """Names of the inputs and outputs that were of the type."""
    nodes: Mapping[str, bool]
    """Name of each node → True if it computed in the type, False if in float32."""
    wide_values: frozenset[str]
    """Names of the values that were float32, without constants and values that were only read in the type."""

    @classmethod
    def of(cls, model: ir.Model, dtype: ir.DataType = _HALF) -> Float32Twin | None:
        """Widen a copy of a graph that computes in a 16-bit type; `None` for a graph that cannot be converted back.

        Such graphs have functions, subgraphs, dtypes in attributes, or constants as outputs.

        Args:
            model: The graph.
            dtype: The type.
        """
        graph = model.graph
        if not computes_in(model, dtype) or model.functions or any(map(_is_without_producer, graph.outputs)):
            return None
        if any(_has_dtype_attribute(node, dtype) for node in graph):
            return None
        values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
        widened = model.clone()
        widen_floats(widened, dtype)
        _remove_identical_casts(widened.graph)
        _restore_gelu_constants(widened.graph)
        return cls(
            dtype,
            widened,
            frozenset(_name(value) for value in (*graph.inputs, *graph.outputs) if value.dtype == dtype),
            {node.name or "": not _computes_in_float32(node) for node in graph},
            frozenset(_name(value) for value in values if value.dtype == _FLOAT and not _is_read_as(dtype, value)),
        )

    def restore(self, model: ir.Model) -> None:
        """Convert the graph back to the 16-bit type, in place.

        Nodes that computed in float32 still do, and new nodes do if they read or create a value that was float32.
        """
        from winml.modelkit.ort.half_precision import convert_to_half

        wide_values = set(self.wide_values)
        names = set()
        for node in model.graph:
            name = node.name or ""
            values = [_name(value) for value in (*node.inputs, *node.outputs) if value is not None]
            is_wide = not wide_values.isdisjoint(values)
            if self.nodes.get(name, not is_wide):
                names.add(name)
            elif name not in self.nodes:
                wide_values.update(_name(value) for value in node.outputs)
        half_nodes = {name for name, is_half in self.nodes.items() if is_half}
        convert_to_half(model, names, interface=self.interface, unconditional=half_nodes, dtype=self.dtype)


def _name(value: ir.Value) -> str:
    return value.name or ""


def _is_without_producer(value: ir.Value) -> bool:
    """Return True for an output that is an input, an initializer or a constant."""
    producer = value.producer()
    return producer is None or producer.op_type == "Constant"


def _has_dtype_attribute(node: ir.Node, dtype: ir.DataType) -> bool:
    """Return True for a node with a subgraph, or with a type in an attribute other than that of a Cast."""
    if is_operator(node, "Cast"):
        return False
    return any(
        attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
        or (name in DTYPE_ATTRIBUTES and attribute.type == ir.AttributeType.INT and attribute.value == dtype)
        for name, attribute in node.attributes.items()
    )


def _computes_in_float32(node: ir.Node) -> bool:
    """Return True if a node reads or creates a float32 value."""
    return any(value is not None and value.dtype == _FLOAT for value in (*node.inputs, *node.outputs))


def _is_read_as(dtype: ir.DataType, value: ir.Value) -> bool:
    """Return True if every reader of a value is a Cast to a type."""
    users = list(value.consumers())
    return (
        bool(users)
        and not value.is_graph_output()
        and all(is_operator(user, "Cast") and user.outputs[0].dtype == dtype for user in users)
    )


def _remove_identical_casts(graph: ir.Graph) -> None:
    """Remove the casts from float32 to float32, in place."""
    for node in list(graph):
        source, cast = node.inputs[0] if node.inputs else None, node.outputs[0]
        if not is_operator(node, "Cast") or source is None or cast.is_graph_output():
            continue
        if source.dtype == cast.dtype == _FLOAT:
            ir.convenience.replace_all_uses_with(cast, source)
            graph.remove(node, safe=True)


def _restore_gelu_constants(graph: ir.Graph) -> None:
    """Replace widened constants that are a rounded constant of GELU by that constant, in place."""
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.size != 1 or not isinstance(tensor, WidenedTensor) or value.is_graph_input():
            continue
        for constant in _GELU_CONSTANTS:
            if tensor.original.dtype.numpy().type(constant) == tensor.numpy().item():
                exact = np.full(tensor.shape.numpy(), constant, np.float32)
                value.const_value = ir.tensor(exact, name=value.name)
