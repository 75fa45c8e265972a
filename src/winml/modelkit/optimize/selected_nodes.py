"""Rewriting of a part of a graph: the selected nodes are extracted, rewritten as a graph, and inserted again.

Nodes outside are not passed to the engine and stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from winml.modelkit.errors import OptimizeError, opt
from winml.modelkit.onnx.cutting import Cutter, cut_model
from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.onnx.weights import drop_unused_initializers
from winml.modelkit.optimize.graph_matching import take_over

Rewrite = Callable[[ir.Model], tuple[ir.Model, tuple[str, ...]]]
"""Rewrites a model, in place or not; returns the model and notes."""


def rewrite_selected(model: ir.Model, names: Collection[str], rewrite: Rewrite) -> tuple[str, ...]:
    """Rewrite the selected nodes of the main graph, in place; return notes. `()`, unchanged, if no node is selected.

    Nodes with subgraphs, and calls of functions, are unchanged.

    Args:
        model: The model; every node has a unique name.
        names: Names of the selected nodes.
        rewrite: Rewrites a model.

    Raises:
        OptimizeError: the type of a value that the selected nodes read is unknown, or rewriting fails.
    """
    nodes = [node for node in model.graph if node.name in names and _can_be_cut(node, model)]
    if not nodes:
        return ()
    part = _Part.cut(model, nodes)
    rewritten, notes = rewrite(part.model)
    part.put_back(rewritten)
    return notes


def _can_be_cut(node: ir.Node, model: ir.Model) -> bool:
    """Return True for a node without subgraphs that calls no function of the model."""
    if node.op_identifier() in model.functions:
        return False
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return not any(attribute.type in kinds for attribute in node.attributes.values())


@dataclass
class _Part:
    """Selected nodes of a graph, copied into a separate model."""

    original: ir.Model
    nodes: list[ir.Node]
    read: Mapping[str, ir.Value]
    """Values of the original that the nodes read and do not make: inputs and weights of the part."""
    outputs_by_name: Mapping[str, ir.Value]
    """Values of the original produced by the nodes and read outside: outputs of the part."""
    model: ir.Model

    @classmethod
    def cut(cls, original: ir.Model, nodes: list[ir.Node]) -> _Part:
        """Copy nodes into a model with the same weight tensors.

        Raises:
            OptimizeError: the type of an input is unknown.
        """
        cut = Cutter(original).cut_exactly(nodes)
        for value in cut.inputs:
            if value.type is None:
                raise OptimizeError(
                    f"the type of {value.name} is unknown, so the selected modules cannot be optimized separately",
                    hint=f"Optimize without {opt.module} and {opt.exclude}.",
                )
        model = cut_model(original, cut, keeps_sizes=True)
        model.metadata_props.update(original.metadata_props)
        read_values = {str(value.name): value for value in (*cut.inputs, *cut.initializers)}
        return cls(original, nodes, read_values, {str(value.name): value for value in cut.outputs}, model)

    def put_back(self, rewritten: ir.Model) -> None:
        """Replace the original nodes by the rewritten nodes, in place."""
        graph = self.original.graph
        outside = FreshNames.of_graph(graph, without=frozenset(self.nodes))
        values = {value: self.read[str(value.name)] for value in rewritten.graph.inputs if value.name in self.read}
        values |= {
            value: self._import_weight(name, value, outside) for name, value in rewritten.graph.initializers.items()
        }
        nodes, outputs = list(rewritten.graph), list(rewritten.graph.outputs)
        rewritten.graph.outputs.clear()
        rewritten.graph.remove(nodes)
        for inner, value in values.items():
            inner.replace_all_uses_with(value)
        for node in nodes:
            for value in node.outputs:
                if value.name and value.name not in self.outputs_by_name:
                    value.name = outside.take(value.name)
            node.name = outside.take(node.name or node.op_type)
        graph.insert_after(self.nodes[-1], nodes)
        for value in outputs:
            _replace_output(self.outputs_by_name[str(value.name)], values.get(value, value), graph)
        graph.remove(self.nodes, safe=True)
        drop_unused_initializers(graph, self.read.values())
        for domain, version in rewritten.opset_imports.items():
            self.original.opset_imports.setdefault(domain, version)

    def _import_weight(self, name: str, value: ir.Value, outside: FreshNames) -> ir.Value:
        """Return the original weight if the tensor is the same; else add a new initializer to the original graph.

        Args:
            name: Name of the weight in the rewritten graph.
            value: The weight there.
            outside: Names in use in the original graph; the new name is added.
        """
        original = self.read.get(name)
        if original is not None and _is_same_weight(original.const_value, value.const_value):
            return original
        graph = self.original.graph
        # The tensor bears the name that is written.
        new = ir.Value(name=outside.take(name), type=value.type, shape=value.shape, const_value=value.const_value)
        if new.const_value is not None:
            new.const_value.name = new.name
        graph.register_initializer(new)
        return new


def _is_same_weight(before: ir.TensorProtocol | None, after: ir.TensorProtocol | None) -> bool:
    """Return True for one tensor, or for equal tensors: an engine writes small weights again."""
    if before is after or before is None or after is None:
        return before is after
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        return False
    if before.dtype == ir.DataType.STRING:
        return bool(np.array_equal(before.numpy(), after.numpy()))
    return before.tobytes() == after.tobytes()


def _replace_output(old: ir.Value, new: ir.Value, graph: ir.Graph) -> None:
    """Redirect all readers of an original value to the new value, in place; names and graph outputs are kept."""
    if new.producer() is None or new.name != old.name:
        # The computed value is an existing value: an output of a graph still needs a separate name.
        if not old.is_graph_output():
            old.replace_all_uses_with(new)
            return
        identity = ir.node("Identity", [new], name=f"{old.name}_Identity")
        graph.append(identity)
        new = identity.outputs[0]
    take_over(old, new)
