"""Sums of nodes, parameters, bytes and operations by module.

Nodes count for the module they belong to. A weight is charged once: to the module of the node that reads it, or with
several readers, to the deepest module that contains all of them. Nodes and weights of no module are summed separately,
so that the sums add up to the whole file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import field, replace

import onnx

from winml.modelkit.onnx.contents import Contents, PlacedNode, ShapeTable, Weight, read_value_types
from winml.modelkit.onnx.macs import count_macs, is_counted
from winml.modelkit.onnx.module_tree import OnnxTree
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.tags import address
from winml.modelkit.tags.selector import ModuleAddress


class Cost(Record):
    """Nodes, parameters, bytes and operations of a part of the graph; can be added."""

    nodes: int = 0
    parameters: int = 0
    """Elements of the initializers, including shapes and indices, and of constant weights; for quantized weights,
    elements of
    the floating-point model, so that scales count 0.
    """
    size_bytes: int = 0
    macs: int | None = 0
    """Multiply-accumulate operations of one run; None if the operations of any node are unknown."""
    weight_parameters: int = field(default=0, metadata=entry(skip=True))
    """Parameters without shapes, indices and masks."""
    weight_bytes: int = field(default=0, metadata=entry(skip=True))
    """Size of these, the scales of quantized weights included."""

    @property
    def bits(self) -> float | None:
        """Bits per parameter, including its share of scales and zero points; None without weights."""
        return 8 * self.weight_bytes / self.weight_parameters if self.weight_parameters else None

    def __add__(self, added: Cost) -> Cost:
        return Cost(
            self.nodes + added.nodes,
            self.parameters + added.parameters,
            self.size_bytes + added.size_bytes,
            None if self.macs is None or added.macs is None else self.macs + added.macs,
            self.weight_parameters + added.weight_parameters,
            self.weight_bytes + added.weight_bytes,
        )


class ModuleCost(ModuleAddress, Record):
    """The cost of one module."""

    class_name: str = field(metadata=entry("class", null_if_empty=True))
    own: Cost
    """Without the modules below it."""
    total: Cost
    """Cost including all modules below it."""

    @property
    @recorded(entry(before="own"))
    def bits(self) -> float | None:
        """Bits per parameter; None without weights."""
        return self.total.bits


def read_shapes(model: onnx.ModelProto, nodes: Iterable[PlacedNode]) -> tuple[ShapeTable, tuple[str, ...]]:
    """Return the shapes needed to count the operations of the main graph, and a note if inference failed.

    Args:
        model: The model, with or without the values of its weights.
        nodes: Its nodes.
    """
    protos = [node.proto for node in nodes if node.place == "graph" and is_counted(node.proto)]
    needed = {name for proto in protos for name in (*proto.input, *proto.output) if name}
    types, notes = read_value_types(model, needed, "some operations are not counted")
    return types.shapes, notes


def count_node_macs(contents: Contents, shapes: ShapeTable) -> list[int | None]:
    """Return the operations of each node in one run of the model; None if unknown.

    Nodes in subgraphs and functions, and calls of functions, are unknown unless they are zero: the file does not state
    how often they run.

    Args:
        contents: The nodes.
        shapes: Shapes of the values of the main graph.
    """
    functions = _counted_functions(contents)

    def node_macs(node: PlacedNode) -> int | None:
        """Return the operations of a node; `None` if unknown."""
        if node.place == "graph" and node.callee not in functions:
            return count_macs(node.proto, shapes)
        return None if functions.get(node.callee, is_counted(node.proto)) else 0

    return list(map(node_macs, contents.nodes))


def _counted_functions(contents: Contents) -> dict[tuple[str, str], bool]:
    """Return function → True if its body, or a called function, may have operations."""
    bodies: dict[tuple[str, str], list[PlacedNode]] = defaultdict(list)
    for node in contents.nodes:
        if node.function is not None:
            bodies[node.function].append(node)
    has_macs = {
        function: any(is_counted(node.proto) for node in body if node.callee not in bodies)
        for function, body in bodies.items()
    }
    for _ in bodies:
        # As many rounds as functions: enough to propagate to every caller.
        for function, body in bodies.items():
            has_macs[function] = has_macs[function] or any(has_macs.get(node.callee, False) for node in body)
    return has_macs


def charge_modules(tree: OnnxTree, contents: Contents, macs: Sequence[int | None]) -> tuple[list[ModuleCost], Cost]:
    """Charge nodes and weights to modules.

    Args:
        tree: The modules, and the tag of each node of ``contents``.
        contents: Nodes and weights.
        macs: Operations of each node.

    Returns:
        The modules in the order of the tree, and the cost outside modules: untagged nodes, and weights without a reader
        in
        a module.
    """
    own_costs: dict[str, Cost] = defaultdict(Cost)
    for tag, node_macs in zip(tree.tags, macs, strict=True):
        own_costs[tag] += Cost(nodes=1, macs=node_macs)
    for weight, owner in zip(contents.weights, weight_owners(tree, contents), strict=True):
        own_costs[owner] += _weight_cost(weight)
    totals: dict[str, Cost] = defaultdict(Cost)
    for module in tree.modules:
        for tag in address.lineage(module.tag):
            totals[tag] += own_costs[module.tag]
    modules = [
        ModuleCost(module.path, module.tag, module.class_name, own_costs[module.tag], totals[module.tag])
        for module in tree.modules
    ]
    return modules, own_costs[""]


def weights_cost(contents: Contents) -> Cost:
    """Return the total cost of all weights of a graph, including weights of no module."""
    return sum(map(_weight_cost, contents.weights), Cost())


def _weight_cost(weight: Weight) -> Cost:
    """Return the cost of a weight; scales and shapes count as bytes only."""
    cost = Cost(parameters=weight.parameters, size_bytes=weight.size_bytes or 0)
    if not weight.has_parameters:
        return cost
    return replace(cost, weight_parameters=cost.parameters, weight_bytes=cost.size_bytes)


def weight_owners(tree: OnnxTree, contents: Contents) -> list[str]:
    """Return the tag of the module charged for each weight, aligned with the weights; ``""`` without a module."""
    readers: list[set[str]] = [set() for _ in contents.weights]
    for node, tag in zip(contents.nodes, tree.tags, strict=True):
        for index in node.weights:
            if tag:
                readers[index].add(tag)
    for node, tag in zip(contents.nodes, tree.tags, strict=True):
        # A constant that directly leaves a subgraph has no reader there; its own tag gives its module.
        if node.held_weight is not None and tag and not readers[node.held_weight]:
            readers[node.held_weight].add(tag)
    return [address.common_ancestor(tags) for tags in readers]
