"""Optimization of a graph that computes in float16, as the same graph in float32.

Exporters surround normalizations and attentions of such a graph with casts, and ONNX Runtime's CPU provider has few
float16 kernels, so no fusion matches. The graph is widened, optimized, and converted back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from winml.modelkit.onnx.operators import is_operator
from winml.modelkit.onnx.widening import WidenedTensor, computes_in, widen_floats

_FLOAT, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
_GELU_CONSTANTS = (math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715)
"""Specified: constants of GELU and of its approximation, which fusions compare with more digits than float16 has."""


@dataclass(frozen=True)
class Float32Twin:
    """A float16 graph that was widened to float32, with what is needed to convert it back."""

    interface: frozenset[str]
    """Names of the inputs and outputs that were float16."""
    float32_nodes: frozenset[str]
    """Names of the nodes that computed in float32."""

    @classmethod
    def widen(cls, model: ir.Model) -> Float32Twin | None:
        """Widen a graph that computes in float16, in place; `None` for any other graph."""
        graph = model.graph
        if not computes_in(model, _HALF) or any(value.producer() is None for value in graph.outputs):
            return None
        interface = (*graph.inputs, *graph.outputs)
        twin = cls(
            frozenset(value.name or "" for value in interface if value.dtype == _HALF),
            frozenset(node.name or "" for node in graph if any(value.dtype == _FLOAT for value in node.outputs)),
        )
        widen_floats(model, _HALF)
        _remove_identical_casts(graph)
        _restore_gelu_constants(graph)
        return twin

    def restore(self, model: ir.Model) -> None:
        """Convert the graph back to float16, in place; nodes that computed in float32 still do."""
        from winml.modelkit.ort.half_precision import convert_to_half

        names = {node.name or "" for node in model.graph} - self.float32_nodes
        convert_to_half(model, names, interface=self.interface)


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
        if tensor is None or tensor.size != 1 or not isinstance(tensor, WidenedTensor):
            continue
        for constant in _GELU_CONSTANTS:
            if np.float16(constant) == tensor.numpy().item():
                exact = np.full(tensor.shape.numpy(), constant, np.float32)
                value.const_value = ir.tensor(exact, name=value.name)
