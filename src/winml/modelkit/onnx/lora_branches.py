"""LoRA as a branch beside a module: definition, and addition to a graph.

A branch is used if an adapter cannot be merged: for a quantized weight, and for adapters switched at run time. The base
weight is unchanged. Before / After::

    x, weight → MatMul → y             x, weight → MatMul ──────────────────────→ Add → y
                                       x, lora_A → MatMul → · , lora_B → MatMul ──┘
    ids, table → Gather → y            the same, with ids, lora_A → Gather in place of the first product

``lora_A`` is input channels × rank, ``lora_B`` rank × output channels, and holds the scaling. For a swappable adapter
both are graph inputs with a default of rank 0, so that the graph without an adapter returns the outputs of the base
model.

Tags: creates. New nodes belong to the module of the parallel node.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.errors import ExportError, opt
from winml.modelkit.metadata_keys import ADAPTERS_KEY
from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.onnx.weights import add_initializer, computed_tensor
from winml.modelkit.tags.dialects import name_scope, scope_path


@dataclass(frozen=True)
class LoraBranch:
    """LoRA of one module of a graph."""

    path: str
    """Path of the module."""
    inputs: int
    """Input channels, or rows of a table."""
    outputs: int
    """Output channels, or columns of a table."""
    is_table: bool
    """True if the module is an embedding."""
    a: ir.TensorProtocol | None = None
    """Input channels × rank; None if adapters are switched at run time."""
    b: ir.TensorProtocol | None = None
    """Rank × output channels, scaled."""


def lora_names(path: str) -> tuple[str, str]:
    """Return the names of the two inputs of a module with adapters switched at run time."""
    return f"{path}.lora_A.weight", f"{path}.lora_B.weight"


def add_branches(model: ir.Model, branches: Sequence[LoraBranch], names: Sequence[str], *, is_whole: bool) -> None:
    """Add branches to a tagged, normalized graph, in place.

    Args:
        model: The model.
        branches: One per module and merged adapter; one per module changed by swappable adapters.
        names: Names of the swappable adapters.
        is_whole: True if the graph is the whole model. A part lacks modules of other parts.

    Raises:
        ExportError: a module has no product of its own to which a branch can be added.
    """
    adder = _BranchAdder(model.graph)
    adder.reserve(name for branch in branches if branch.a is None for name in lora_names(branch.path))
    paths = []
    for branch in branches:
        nodes = list(adder.products(branch))
        if not nodes and not is_whole and not adder.has_module(branch.path):
            continue
        if not nodes:
            raise ExportError(
                f"{branch.path}: the graph has no separate product for this module, so LoRA cannot be added to it",
                hint=f"Merge the adapter: {opt.adapter} PATH. For quantized weights, remove it from the adapter.",
                module=branch.path,
            )
        adder.add(branch, nodes)
        if branch.a is None:
            paths.append(branch.path)
    if paths:
        record = {"names": list(names), "modules": paths}
        model.metadata_props[ADAPTERS_KEY] = json.dumps(record, ensure_ascii=False)


class _BranchAdder:
    """Adds branches to one graph, in place."""

    def __init__(self, graph: ir.Graph) -> None:
        """Sort the nodes of the graph by their modules."""
        self._graph, self._fresh = graph, FreshNames.of_graph(graph)
        self._nodes: dict[str, list[ir.Node]] = defaultdict(list)
        for node in graph:
            # Named by the export: the name contains every module, tags only modules that are no layers of torch.nn.
            self._nodes[scope_path(name_scope(node.name or "", node.op_type))].append(node)

    def reserve(self, names: Iterable[str]) -> None:
        """Reserve names for inputs: a merged adapter of the same module takes other names."""
        for name in names:
            self._fresh.take(name)

    def has_module(self, path: str) -> bool:
        """Return True if the graph holds a node of a module."""
        return bool(self._nodes.get(path))

    def products(self, branch: LoraBranch) -> Iterator[ir.Node]:
        """Yield the nodes in which a module reads its weight."""
        for node in self._nodes.get(branch.path, ()):
            if branch.is_table:
                is_own = node.op_type == "Gather" and _is_constant(node.inputs[0])
            else:
                is_own = node.op_type in ("MatMul", "Gemm") and _is_constant(node.inputs[1])
            if is_own:
                yield node

    def add(self, branch: LoraBranch, nodes: Sequence[ir.Node]) -> None:
        """Add a branch in parallel to each of the nodes."""
        dtype = nodes[0].outputs[0].dtype or ir.DataType.FLOAT
        a, b = self._add_weights(branch, dtype)
        for node in nodes:
            self._add_parallel_nodes(node, branch, a, b)

    def _add_weights(self, branch: LoraBranch, dtype: ir.DataType) -> tuple[ir.Value, ir.Value]:
        """Return the two weights of a branch: initializers, or inputs with an empty default."""
        name_a, name_b = lora_names(branch.path)
        if branch.a is not None and branch.b is not None:
            return self._add_constant(name_a, branch.a, dtype), self._add_constant(name_b, branch.b, dtype)
        rank = f"{branch.path}.rank"
        return (
            self._add_input(name_a, [branch.inputs, rank], np.zeros((branch.inputs, 0), dtype.numpy()), dtype),
            self._add_input(name_b, [rank, branch.outputs], np.zeros((0, branch.outputs), dtype.numpy()), dtype),
        )

    def _add_constant(self, wish: str, tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.Value:
        """Add an initializer, cast to ``dtype``."""
        name = self._fresh.take(wish)
        cast = computed_tensor(lambda: tensor.numpy().astype(dtype.numpy()), dtype, tensor.shape.numpy(), name)
        return add_initializer(self._graph, cast)

    def _add_input(self, name: str, shape: Sequence[int | str], default: Array, dtype: ir.DataType) -> ir.Value:
        """Add an input of the graph with a default."""
        value = add_initializer(self._graph, ir.Tensor(default, dtype=dtype, name=name))
        value.shape = ir.Shape(shape)
        self._graph.inputs.append(value)
        return value

    def _add_parallel_nodes(self, node: ir.Node, branch: LoraBranch, a: ir.Value, b: ir.Value) -> None:
        """Add the nodes of a branch in parallel to a node, which then feeds a sum; tags and output names are kept."""
        base = node.outputs[0]
        name = base.name or ""
        if branch.is_table:
            first_product = ir.node("Gather", [a, node.inputs[1]], name=self._fresh.take(f"{node.name}/lora_A"))
        else:
            first_product = ir.node("MatMul", [node.inputs[0], a], name=self._fresh.take(f"{node.name}/lora_A"))
        second_product = ir.node("MatMul", [first_product.outputs[0], b], name=self._fresh.take(f"{node.name}/lora_B"))
        total = ir.node("Add", [base, second_product.outputs[0]], name=self._fresh.take(f"{node.name}/lora_sum"))
        leading = None if base.shape is None else list(base.shape)[:-1]
        rank = a.shape[1] if a.shape is not None else None
        for new, last in ((first_product, rank), (second_product, branch.outputs), (total, branch.outputs)):
            new.metadata_props.update(node.metadata_props)
            new.outputs[0].name = self._fresh.take(f"{new.name}_output")
            new.outputs[0].type = ir.TensorType(base.dtype or ir.DataType.FLOAT)
            new.outputs[0].shape = None if leading is None else ir.Shape([*leading, last])
        is_output = base.is_graph_output()
        base.replace_all_uses_with(total.outputs[0], replace_graph_outputs=is_output)
        total.replace_input_with(0, base)
        self._graph.insert_after(node, [first_product, second_product, total])
        if is_output:  # its name is the caller's
            base.name = self._fresh.take(f"{name}_base")
            total.outputs[0].name = name


def _is_constant(value: ir.Value | None) -> bool:
    """Return True if a value is a weight or a transposed weight."""
    maker = value.producer() if value is not None else None
    if maker is not None and maker.op_type == "Transpose":
        value = maker.inputs[0]
    return value is not None and value.is_initializer()
