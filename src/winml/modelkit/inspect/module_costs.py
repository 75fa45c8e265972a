"""What does each module of an ONNX file hold and cost?

Nodes count for the module they belong to. A weight is charged once: to the module of the node that reads it, and where
several read it, to the deepest module that contains all of them. What no module claims is kept apart, so that the parts
always add up to the whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from winml.modelkit.hierarchy import address
from winml.modelkit.inspect.macs import ShapeTable, count_macs, is_counted
from winml.modelkit.inspect.onnx_contents import Contents, PlacedNode
from winml.modelkit.inspect.onnx_tree import OnnxModule, OnnxTree

__all__ = ["Cost", "ModuleCost", "charge_modules", "count_node_macs"]


@dataclass(frozen=True)
class Cost:
    """What a part of the graph holds and takes; adds up."""

    nodes: int = 0
    parameters: int = 0
    """Values of the initializers, those that are no weights (shapes, indices) included."""
    size_bytes: int = 0
    macs: int | None = 0
    """Multiply-accumulate operations of one run; None where those of any of its nodes are not known."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.nodes + other.nodes,
            self.parameters + other.parameters,
            self.size_bytes + other.size_bytes,
            None if self.macs is None or other.macs is None else self.macs + other.macs,
        )

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready record: sizes in bytes, unknown operations as null."""
        return {
            "nodes": self.nodes,
            "parameters": self.parameters,
            "size_bytes": self.size_bytes,
            "macs": self.macs,
        }


@dataclass(frozen=True)
class ModuleCost:
    """One module with what it holds."""

    path: str
    tag: str
    class_name: str
    own: Cost
    """Without the modules below it."""
    total: Cost
    """With all modules below it."""

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready record."""
        return {
            "path": self.path,
            "tag": self.tag,
            "class": self.class_name or None,
            "own": self.own.as_record(),
            "total": self.total.as_record(),
        }


def count_node_macs(contents: Contents, shapes: ShapeTable) -> list[int | None]:
    """Return the operations each node takes in one run of the model; None where they are not known.

    How often a subgraph or the body of a function runs is not known from its nodes, so neither is their count; nor is
    that of a call.

    Args:
        contents: The nodes.
        shapes: Shapes of the values of the main graph.
    """
    functions = _counted_functions(contents)
    macs: list[int | None] = []
    for node in contents.nodes:
        if node.callee in functions:
            macs.append(None if functions[node.callee] else 0)
        elif node.place == "graph":
            macs.append(count_macs(node.proto, shapes))
        else:
            macs.append(None if is_counted(node.proto) else 0)
    return macs


def _counted_functions(contents: Contents) -> dict[tuple[str, str], bool]:
    """Say for each function whether its body, and what that calls, takes such operations."""
    bodies: dict[tuple[str, str], list[PlacedNode]] = defaultdict(list)
    for node in contents.nodes:
        if node.function is not None:
            bodies[node.function].append(node)
    counted = {
        function: any(is_counted(node.proto) for node in body if node.callee not in bodies)
        for function, body in bodies.items()
    }
    for _ in bodies:
        # Once per function is enough for what is called to reach every caller.
        for function, body in bodies.items():
            counted[function] = counted[function] or any(counted.get(node.callee, False) for node in body)
    return counted


def charge_modules(tree: OnnxTree, contents: Contents, macs: Sequence[int | None]) -> tuple[list[ModuleCost], Cost]:
    """Charge nodes and weights to modules.

    Args:
        tree: The modules, and the tag of each node of ``contents``.
        contents: Nodes and weights.
        macs: Operations of each node.

    Returns:
        The modules in the order of the tree; and what belongs to none of them: nodes without a tag, and weights that
        are read by such nodes only, or by nobody.
    """
    own: dict[str, Cost] = defaultdict(Cost)
    for tag, operations in zip(tree.tags, macs, strict=True):
        own[tag] += Cost(nodes=1, macs=operations)
    for weight, owner in zip(contents.weights, _owners(tree, contents), strict=True):
        own[owner] += Cost(parameters=weight.elements, size_bytes=weight.size_bytes or 0)
    totals = _totals(tree.modules, own)
    modules = [
        ModuleCost(module.path, module.tag, module.class_name, own[module.tag], totals[module.tag])
        for module in tree.modules
    ]
    return modules, own[""]


def _owners(tree: OnnxTree, contents: Contents) -> list[str]:
    """Return the tag of the module each weight is charged to; the empty text where that is none."""
    readers: list[set[str]] = [set() for _ in contents.weights]
    for node, tag in zip(contents.nodes, tree.tags, strict=True):
        for index in node.weights:
            if tag:
                readers[index].add(tag)
    return [address.common_ancestor(tags) for tags in readers]


def _totals(modules: Sequence[OnnxModule], own: Mapping[str, Cost]) -> dict[str, Cost]:
    totals: dict[str, Cost] = defaultdict(Cost)
    for module in modules:
        segments = address.parse_tag(module.tag)
        for depth in range(1, len(segments) + 1):
            totals[address.format_tag(segments[:depth])] += own[module.tag]
    return totals
