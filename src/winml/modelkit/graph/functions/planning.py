"""Which modules of a graph can become functions, and which nodes does each hold?

A function is a set of nodes that one node can stand for: no other node lies between two of them. Functions lie inside
one another or apart. Builds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from winml.modelkit.graph.cutting import FEW, Cutter, Refusal, node_words
from winml.modelkit.graph.module_parts import ModuleParts
from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.selector import HasAddress

__all__ = ["FunctionPart", "FunctionPlan", "NotAFunction", "plan_functions"]

_BETWEEN = "{} lies outside, but between its nodes: it reads their outputs and they read its output"


@dataclass(eq=False)
class FunctionPart:
    """One call of a module that becomes one call of a function."""

    module: HasAddress
    nodes: frozenset[ir.Node]
    parent: FunctionPart | None
    """The function it lies in; None for the main graph."""
    outside: tuple[ir.Node, ...] = ()
    """Nodes of the module that are not in the function, in graph order."""
    children: list[FunctionPart] = field(default_factory=list)


@dataclass(frozen=True)
class NotAFunction:
    """A module that does not become a function."""

    module: HasAddress
    reason: str


@dataclass(frozen=True)
class FunctionPlan:
    """What becomes of the modules that were asked for."""

    parts: tuple[FunctionPart, ...]
    """Those in the main graph."""
    all_parts: tuple[FunctionPart, ...]
    """All of them, each after the one it lies in."""
    left_out: tuple[NotAFunction, ...]


def plan_functions(model: ir.Model, modules: Iterable[HasAddress]) -> FunctionPlan:
    """Decide which calls of modules become functions.

    Args:
        model: A tagged model in topological order.
        modules: The modules that are asked for. The root is the graph itself, and left out.
    """
    parts = ModuleParts(model)
    planner = _Planner(Cutter(model))
    wished: list[tuple[HasAddress, list[ir.Node]]] = []
    for module in modules:
        if address.depth(module.tag) == 1:
            planner.leave_out(module, "it is the root: the graph itself stands for it")
            continue
        calls = parts.calls(module.tag)
        if isinstance(calls, Refusal):
            planner.leave_out(module, calls.reason)
        elif not calls:
            planner.leave_out(module, "it has no node of its own: fused into another, or only a container")
        else:
            wished += [(module, nodes) for nodes in calls]
    # A function is found before those in it: it has more nodes, or as many and stands above.
    wished.sort(key=lambda wish: (-len(wish[1]), address.depth(wish[0].tag)))
    for module, nodes in wished:
        planner.add(module, nodes)
    return planner.plan()


class _Planner:
    def __init__(self, cutter: Cutter) -> None:
        self._cutter = cutter
        self._innermost: dict[ir.Node, FunctionPart] = {}
        self._parts: list[FunctionPart] = []
        self._left_out: list[NotAFunction] = []

    def plan(self) -> FunctionPlan:
        top = tuple(part for part in self._parts if part.parent is None)
        return FunctionPlan(top, tuple(self._parts), tuple(self._left_out))

    def leave_out(self, module: HasAddress, reason: str) -> None:
        self._left_out.append(NotAFunction(module, reason))

    def add(self, module: HasAddress, nodes: Sequence[ir.Node]) -> None:
        """Make a function of these nodes, or of most of them; else say why there is none."""
        parents = {self._innermost.get(node) for node in nodes}
        if len(parents) != 1:
            self.leave_out(module, "its nodes lie inside and outside of another function")
            return
        (parent,) = parents
        kept = frozenset(nodes)
        if between := self._between(kept, parent):
            kept = self._without_blocked(kept, between, parent)
            if len(kept) < (1 - FEW) * len(nodes) or self._between(kept, parent):
                first = min(between, key=self._cutter.position.__getitem__)
                self.leave_out(module, _BETWEEN.format(node_words(first)))
                return
        if not self._is_read(kept):
            self.leave_out(module, "nothing outside reads what it makes")
            return
        if not self._reads_outside(kept):
            self.leave_out(module, "it reads nothing from outside: its result is a constant")
            return
        outside = tuple(node for node in nodes if node not in kept)
        part = FunctionPart(module, kept, parent, outside)
        self._parts.append(part)
        if parent is not None:
            parent.children.append(part)
        self._innermost.update(dict.fromkeys(kept, part))

    def _is_read(self, nodes: Collection[ir.Node]) -> bool:
        return any(
            value.is_graph_output() or any(reader not in nodes for reader in self._cutter.readers(value))
            for node in nodes
            for value in node.outputs
        )

    def _reads_outside(self, nodes: Collection[ir.Node]) -> bool:
        return any(value.producer() not in nodes for node in nodes for value in self._cutter.reads(node))

    def _between(self, nodes: frozenset[ir.Node], parent: FunctionPart | None) -> set[ir.Node]:
        """Return the nodes outside on a way from one of the nodes to another, functions taken as one node each."""
        after = self._reached(nodes, self._readers, parent, apart=nodes)
        return after & self._reached(nodes, self._makers, parent, apart=nodes) if after else after

    def _without_blocked(
        self, nodes: frozenset[ir.Node], between: set[ir.Node], parent: FunctionPart | None
    ) -> frozenset[ir.Node]:
        """Return the most nodes that have none between: without those before the ones between, or those after."""
        needed = self._reached(between, self._makers, parent, apart=between)
        fed = self._reached(between, self._readers, parent, apart=between)
        return max(nodes - needed, nodes - fed, key=len)

    def _reached(
        self,
        start: Collection[ir.Node],
        neighbours: Callable[[ir.Node], Iterable[ir.Node]],
        parent: FunctionPart | None,
        *,
        apart: Collection[ir.Node],
    ) -> set[ir.Node]:
        """Return all nodes of the parent that are reached; those of a function in it all at once."""
        reached: set[ir.Node] = set()
        pending = list(start)
        while pending:
            for node in neighbours(pending.pop()):
                if node in reached or node in apart or (parent is not None and node not in parent.nodes):
                    continue
                together = self._together(node, parent) - reached
                reached |= together
                pending += together
        return reached

    def _together(self, node: ir.Node, parent: FunctionPart | None) -> frozenset[ir.Node]:
        part = self._innermost.get(node)
        if part is parent or part is None:
            return frozenset((node,))
        while part.parent is not parent and part.parent is not None:
            part = part.parent
        return part.nodes

    def _readers(self, node: ir.Node) -> Iterable[ir.Node]:
        return (reader for value in node.outputs for reader in self._cutter.readers(value))

    def _makers(self, node: ir.Node) -> Iterable[ir.Node]:
        return (maker for value in self._cutter.reads(node) if (maker := value.producer()) is not None)
