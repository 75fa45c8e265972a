"""Conversion of modules to functions: one node per call, with the nodes of the module inside.

Works on a copy of the graph. The result is inlined once in memory and compared with the original graph; differences
are recorded in the file, so that reading the file restores the graph exactly.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any, Literal

import onnx_ir as ir

from winml.modelkit import metadata_keys
from winml.modelkit.onnx import function_inlining
from winml.modelkit.onnx.cutting import FEW, Cutter, ModuleParts, Refusal, node_words
from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.tags import address
from winml.modelkit.tags.selector import ModuleAddress
from winml.modelkit.tags.tagging import NodeTag, all_nodes, node_graphs, write_tag

_BETWEEN = "{} of another module lies between its nodes: it reads their outputs and they read its output"


@dataclass(eq=False)
class FunctionPart:
    """One call of a module that becomes a call of a function."""

    module: ModuleAddress
    nodes: frozenset[ir.Node]
    parent: FunctionPart | None
    """The enclosing function; None for the main graph."""
    outside: tuple[ir.Node, ...] = ()
    """Nodes of the module that are not in the function, in graph order."""
    children: list[FunctionPart] = field(default_factory=list)


@dataclass(frozen=True)
class NotAFunction:
    """A module that does not become a function."""

    module: ModuleAddress
    reason: str


@dataclass(frozen=True)
class FunctionPlan:
    """Decision for the requested modules."""

    parts: tuple[FunctionPart, ...]
    """Parts in the main graph."""
    all_parts: tuple[FunctionPart, ...]
    """All parts, each after its enclosing part."""
    left_out: tuple[NotAFunction, ...]


def _plan_functions(model: ir.Model, modules: Iterable[ModuleAddress]) -> FunctionPlan:
    """Decide which calls of modules become functions.

    A function is a set of nodes replaceable by one node: no outside node lies between two nodes. Functions are nested
    or disjoint.

    Args:
        model: A tagged model in topological order.
        modules: The requested modules. The root is the graph itself and is omitted.
    """
    parts = ModuleParts(model)
    planner = _Planner(Cutter(model))
    wished: list[tuple[ModuleAddress, list[ir.Node]]] = []
    for module in modules:
        if address.depth(module.tag) == 1:
            planner.leave_out(module, "it is the root, which is the graph itself")
            continue
        calls = parts.calls(module.tag)
        if isinstance(calls, Refusal):
            planner.leave_out(module, calls.reason)
        elif not calls:
            planner.leave_out(module, "it has no nodes: fused into another, or a container only")
        else:
            wished += [(module, nodes) for nodes in calls]
    # A function is found before its inner functions: it has more nodes, or as many and a shorter path.
    wished.sort(key=lambda wish: (-len(wish[1]), address.depth(wish[0].tag)))
    for module, nodes in wished:
        planner.add(module, nodes)
    return planner.plan()


class _Planner:
    """Decides which modules of a graph become functions; modules are added from the largest."""

    def __init__(self, cutter: Cutter) -> None:
        self._cutter = cutter
        self._innermost: dict[ir.Node, FunctionPart] = {}
        self._parts: list[FunctionPart] = []
        self._left_out: list[NotAFunction] = []

    def plan(self) -> FunctionPlan:
        """Return the functions, and the modules left out."""
        top = tuple(part for part in self._parts if part.parent is None)
        return FunctionPlan(top, tuple(self._parts), tuple(self._left_out))

    def leave_out(self, module: ModuleAddress, reason: str) -> None:
        """Record a module left out, with the reason."""
        self._left_out.append(NotAFunction(module, reason))

    def add(self, module: ModuleAddress, nodes: Sequence[ir.Node]) -> None:
        """Make a function of all or most nodes; otherwise record the reason to leave the module out."""
        parents = {self._innermost.get(node) for node in nodes}
        if len(parents) != 1:
            self.leave_out(module, "its nodes lie inside and outside of another function")
            return
        (parent,) = parents
        function_nodes = frozenset(nodes)
        if between := self._find_between(function_nodes, parent):
            function_nodes = self._drop_blocked(function_nodes, between, parent)
            if len(function_nodes) < (1 - FEW) * len(nodes) or self._find_between(function_nodes, parent):
                blocking_node = min(between, key=self._cutter.position.__getitem__)
                self.leave_out(module, _BETWEEN.format(node_words(blocking_node)))
                return
        if not self._is_read_elsewhere(function_nodes):
            self.leave_out(module, "its outputs are not read outside")
            return
        if not self._reads_outside(function_nodes):
            self.leave_out(module, "it reads nothing from outside: its result is a constant")
            return
        outside = tuple(node for node in nodes if node not in function_nodes)
        part = FunctionPart(module, function_nodes, parent, outside)
        self._parts.append(part)
        if parent is not None:
            parent.children.append(part)
        self._innermost.update(dict.fromkeys(function_nodes, part))

    def _is_read_elsewhere(self, nodes: Collection[ir.Node]) -> bool:
        """Return True if an output of the nodes is read by another node, or is an output of the graph."""
        return any(
            value.is_graph_output() or any(reader not in nodes for reader in self._cutter.readers(value))
            for node in nodes
            for value in node.outputs
        )

    def _reads_outside(self, nodes: Collection[ir.Node]) -> bool:
        """Return True if one of the nodes reads a value of another node, a weight or an input."""
        return any(value.producer() not in nodes for node in nodes for value in self._cutter.reads(node))

    def _find_between(self, nodes: frozenset[ir.Node], parent: FunctionPart | None) -> set[ir.Node]:
        """Return the outside nodes on a path between two of the nodes; a function counts as one node."""
        after = self._find_reachable(nodes, self._reader_nodes, parent, apart=nodes)
        return after & self._find_reachable(nodes, self._producer_nodes, parent, apart=nodes) if after else after

    def _drop_blocked(
        self, nodes: frozenset[ir.Node], between: set[ir.Node], parent: FunctionPart | None
    ) -> frozenset[ir.Node]:
        """Return the larger set without the nodes before, or without the nodes after, the nodes in between."""
        needed = self._find_reachable(between, self._producer_nodes, parent, apart=between)
        fed = self._find_reachable(between, self._reader_nodes, parent, apart=between)
        return max(nodes - needed, nodes - fed, key=len)

    def _find_reachable(
        self,
        start: Collection[ir.Node],
        neighbours: Callable[[ir.Node], Iterable[ir.Node]],
        parent: FunctionPart | None,
        *,
        apart: Collection[ir.Node],
    ) -> set[ir.Node]:
        """Return all reachable nodes of the parent; the nodes of a function are reached together.

        Args:
            start: Nodes to start from; part of the result only if reached again.
            neighbours: Node → next nodes.
            parent: The function that contains the nodes; `None`: the graph.
            apart: Nodes at which the walk stops.
        """
        reached: set[ir.Node] = set()
        pending = list(start)
        while pending:
            for node in neighbours(pending.pop()):
                if node in reached or node in apart or (parent is not None and node not in parent.nodes):
                    continue
                together = self._expand_to_function(node, parent) - reached
                reached |= together
                pending += together
        return reached

    def _expand_to_function(self, node: ir.Node, parent: FunctionPart | None) -> frozenset[ir.Node]:
        """Return all nodes of the outermost function of a node below ``parent``; without a function, the node alone."""
        part = self._innermost.get(node)
        if part is parent or part is None:
            return frozenset((node,))
        while part.parent is not parent and part.parent is not None:
            part = part.parent
        return part.nodes

    def _reader_nodes(self, node: ir.Node) -> Iterable[ir.Node]:
        """Yield the readers of a node's outputs."""
        return (reader for value in node.outputs for reader in self._cutter.readers(value))

    def _producer_nodes(self, node: ir.Node) -> Iterable[ir.Node]:
        """Yield the producers of the values read by a node."""
        return (maker for value in self._cutter.reads(node) if (maker := value.producer()) is not None)


FIRST_IR_VERSION = 10
"""Specified: the first version of the format in which the nodes and values of functions have metadata and shapes."""

Sharing = Literal["none", "class"]
"""Modules that share a function if their graphs are equal: the calls of one module only, or modules of one class."""


@dataclass(frozen=True)
class FoldedModel:
    """A model whose modules are functions."""

    model: ir.Model
    plan: FunctionPlan
    functions: Mapping[str, int]
    """Function name → number of module calls."""
    written_nodes: int
    """Nodes in the file, including nodes of functions."""


def fold_modules(model: ir.Model, modules: Iterable[ModuleAddress], sharing: Sharing = "none") -> FoldedModel:
    """Convert modules of a model to functions; the original model is not changed and shares its weights.

    The result is inlined once in memory and compared with the original graph. The metadata records the
    differences, so that reading the file restores the graph exactly.

    Args:
        model: A tagged model.
        modules: The modules to convert, as far as possible.
        sharing: Modules that may share a function.
    """
    folded = model.clone()
    folder = _Folder(folded, _plan_functions(folded, modules), sharing)
    folder.fold()
    if folder.functions:
        folded.ir_version = max(folded.ir_version, FIRST_IR_VERSION)
        _record_differences(model, folded, folder.inlined_positions())
    return FoldedModel(
        model=folded,
        plan=folder.plan,
        functions={function.name: len(function.instances) for function in folder.functions},
        written_nodes=sum(1 for _ in all_nodes(folded)),
    )


@dataclass(frozen=True)
class _Anchors:
    """Values of a call, to which metadata and names of its nodes may be relative."""

    name: str
    tag: str
    module: str
    namespace: str

    def relative_metadata(self, props: Mapping[str, str]) -> dict[str, str]:
        """Return the metadata that depends on the call, relative to the call."""
        relative = {}
        for key, value in props.items():
            text = value
            if key == metadata_keys.TAG_KEY:
                text = text.replace(self.tag, function_inlining.TAG, 1)
            elif key == metadata_keys.NAMESPACE_KEY and self.namespace:
                text = text.replace(self.namespace, function_inlining.NAMESPACE, 1)
            if key != metadata_keys.TAG_KEY and self.module:
                text = text.replace(self.module, function_inlining.MODULE)
            # Other inliners copy the metadata of the call to a node; the depth belongs to the tag.
            if text != value or key == metadata_keys.DEPTH_KEY:
                relative[key] = text
        return relative

    def weight_name(self, name: str) -> str:
        """Return the name of a weight inside the module, such as ``output.dense.bias``; empty for other values."""
        return name.removeprefix(f"{self.module}.") if self.module and name.startswith(f"{self.module}.") else ""

    def relative_name(self, name: str) -> str:
        """Return the remainder of a name after the name of the call; other names are returned unchanged."""
        remainder = name.removeprefix(self.name)
        return (
            remainder
            if self.name and remainder != name and remainder.startswith(function_inlining.SCOPE_START)
            else name
        )


@dataclass(eq=False)
class _Function:
    """A function, and the implemented module calls."""

    name: str
    signature: object
    anchors: _Anchors
    body: list[ir.Node]
    inputs: list[ir.Value]
    outputs: list[ir.Value]
    instances: list[ir.Node] = field(default_factory=list)


class _Folder:
    """Replaces the planned modules of a graph by calls of functions."""

    def __init__(self, model: ir.Model, plan: FunctionPlan, sharing: Sharing) -> None:
        self.plan = plan
        self.functions: list[_Function] = []
        self._model = model
        self._graph = model.graph
        self._sharing = sharing
        self._original = list(model.graph)
        self._position = {node: number for number, node in enumerate(self._original)}
        self._owner = {inner: node for node in self._original for inner in function_inlining.walk_nodes([node])}
        self._bodies: dict[ir.Node, list[ir.Node]] = {}
        self._similar: dict[str, list[_Function]] = {}
        self._node_names = FreshNames(node.name for node in self._owner)
        self._function_names = FreshNames(())

    def fold(self) -> None:
        """Replace the modules by calls, in place."""
        calls = [self._fold_part(part) for part in self.plan.parts]
        folded = {node for part in self.plan.parts for node in part.nodes}
        nodes = self._sort_topologically([*(node for node in self._original if node not in folded), *calls])
        self._graph.remove(list(self._graph))
        self._graph.extend(nodes)
        for function in self.functions:
            self._add_function(function)
        if self.functions:
            self._model.opset_imports[metadata_keys.FUNCTION_DOMAIN] = 1

    def inlined_positions(self) -> list[int]:
        """Return the original positions of the nodes, in the order after inlining."""
        return [self._position[node] for node in self._expand_calls(list(self._graph))]

    def _expand_calls(self, nodes: Sequence[ir.Node]) -> Iterator[ir.Node]:
        """Yield nodes, with calls replaced by the nodes of their functions."""
        for node in nodes:
            if node in self._bodies:
                yield from self._expand_calls(self._bodies[node])
            else:
                yield node

    def _fold_part(self, part: FunctionPart) -> ir.Node:
        """Replace the nodes of a part by a call, inner functions first; return the call."""
        inner = [self._fold_part(child) for child in part.children]
        folded = {node for child in part.children for node in child.nodes}
        body = self._sort_topologically([*(node for node in part.nodes if node not in folded), *inner])
        members = set(body)
        created = {value for node in body for value in node.outputs}
        inputs = [
            value for value in dict.fromkeys(v for node in body for v in _read_values(node)) if value not in created
        ]
        outputs = [value for node in body for value in node.outputs if self._is_read_outside(value, members)]
        call = ir.Node(metadata_keys.FUNCTION_DOMAIN, "", inputs, num_outputs=len(outputs))
        call.name = self._node_names.take(_call_name(part.module.path, (node.name or "" for node in body)))
        self._position[call] = min(self._position[node] for node in body)
        self._owner[call] = call
        self._bodies[call] = body
        write_tag(call, NodeTag(part.module.tag, part.module.path, "direct"))
        if namespace := _find_namespace(part.module.path, body):
            call.metadata_props[metadata_keys.NAMESPACE_KEY] = namespace
        for old, new in zip(outputs, call.outputs, strict=True):
            self._replace_outside(old, new, members)
        function = self._find_or_create_function(part, call, body, self._replace_outer_values(body, inputs), outputs)
        call.op_type = function.name
        function.instances.append(call)
        return call

    def _is_read_outside(self, value: ir.Value, members: set[ir.Node]) -> bool:
        return value.is_graph_output() or any(
            self._owner.get(use.node, use.node) not in members for use in value.uses()
        )

    def _replace_outside(self, old: ir.Value, new: ir.Value, members: set[ir.Node]) -> None:
        """Redirect readers outside a part to the output of its call, in place; outputs of the graph as well.

        Args:
            old: Value inside the part.
            new: Output of the call; takes over name, type and shape.
            members: Nodes of the part.
        """
        new.name, new.type, new.doc_string = old.name, old.type, old.doc_string
        new.shape = None if old.shape is None else old.shape.copy()
        for use in list(old.uses()):
            if self._owner.get(use.node, use.node) not in members:
                use.node.replace_input_with(use.idx, new)
        for index, value in enumerate(self._graph.outputs):
            if value is old:
                self._graph.outputs[index] = new

    def _replace_outer_values(self, body: Sequence[ir.Node], outer: Sequence[ir.Value]) -> list[ir.Value]:
        """Replace outside values by new inputs in the nodes of a part; return the inputs."""
        new_inputs = {
            value: ir.Value(name=value.name, type=value.type, shape=None if value.shape is None else value.shape.copy())
            for value in outer
        }
        for node in function_inlining.walk_nodes(body):
            for index, value in enumerate(node.inputs):
                if value in new_inputs:
                    node.replace_input_with(index, new_inputs[value])
        return list(new_inputs.values())

    def _find_or_create_function(
        self,
        part: FunctionPart,
        call: ir.Node,
        body: list[ir.Node],
        inputs: list[ir.Value],
        outputs: list[ir.Value],
    ) -> _Function:
        """Return the function of a call: an existing equal function, or a new one, which is added to ``functions``."""
        tag, class_name = part.module.tag, part.module.class_name or address.parse_tag(part.module.tag)[-1]
        key = class_name if self._sharing == "class" else tag
        signature = _function_signature(body, inputs, outputs)
        for candidate in self._similar.setdefault(key, []):
            if candidate.signature == signature:
                return candidate
        wish = class_name if self._sharing == "class" else tag.strip("/").replace("/", ".")
        anchors = _Anchors(
            call.name or "", tag, part.module.path, call.metadata_props.get(metadata_keys.NAMESPACE_KEY, "")
        )
        function = _Function(self._function_names.take(wish), signature, anchors, body, inputs, outputs)
        self._similar[key].append(function)
        self.functions.append(function)
        return function

    def _sort_topologically(self, nodes: Sequence[ir.Node]) -> list[ir.Node]:
        """Return nodes in topological order, preferably in the order of the graph."""
        makers = {value: node for node in nodes for value in node.outputs}
        needed = {node: [makers[value] for value in _read_values(node) if value in makers] for node in nodes}
        sorter = TopologicalSorter(needed)
        sorter.prepare()
        numbered = {self._position[node]: node for node in nodes}
        ready: list[int] = []
        ordered = []
        while sorter.is_active():
            for node in sorter.get_ready():
                heapq.heappush(ready, self._position[node])
            ordered.append(numbered[heapq.heappop(ready)])
            sorter.done(ordered[-1])
        return ordered

    def _add_function(self, function: _Function) -> None:
        """Add a function to the model; a function with several calls is made relative to its call."""
        if len(function.instances) > 1:
            _make_relative(function)
        domains = {node.domain for node in function_inlining.walk_nodes(function.body)} - {
            metadata_keys.FUNCTION_DOMAIN
        }
        opsets = {name: version for name, version in self._model.opset_imports.items() if name in domains | {""}}
        if any(node.domain == metadata_keys.FUNCTION_DOMAIN for node in function_inlining.walk_nodes(function.body)):
            opsets[metadata_keys.FUNCTION_DOMAIN] = 1
        graph = ir.Graph(function.inputs, function.outputs, nodes=function.body, opset_imports=opsets)
        defined = ir.Function(metadata_keys.FUNCTION_DOMAIN, function.name, graph=graph, attributes=[])
        self._model.functions[defined.identifier()] = defined


def _read_values(node: ir.Node) -> list[ir.Value]:
    """Return the values a node reads, including values captured by its subgraphs."""
    nodes = list(function_inlining.walk_nodes([node]))
    inner_values = {value for inner in nodes[1:] for value in inner.outputs}
    for graph in (graph for inner in nodes for graph in node_graphs(inner)):
        inner_values |= {*graph.inputs, *graph.initializers.values()}
    values = (value for each in nodes for value in each.inputs)
    return list(dict.fromkeys(value for value in values if value is not None and value not in inner_values))


def _call_name(path: str, names: Iterable[str]) -> str:
    """Return the name of a call: the common prefix of a module's node names, such as ``/encoder/layer.0``."""
    for name in names:
        head = name[: len(path) + 1]
        if head.replace("/", ".") == f".{path}" and name[len(head) :].startswith(function_inlining.SCOPE_START):
            return head
    return f"{function_inlining.SCOPE_START}{path.replace('.', '/')}"


def _find_namespace(path: str, body: Sequence[ir.Node]) -> str:
    """Return the namespace of a module, from the namespace of an inner node; ``""`` if unknown."""
    for node in body:
        segments = node.metadata_props.get(metadata_keys.NAMESPACE_KEY, "").split("/")
        for number, segment in enumerate(segments, start=1):
            if segment.startswith(f"{path}: "):
                return "/".join(segments[:number])
    return ""


def _make_relative(function: _Function) -> None:
    """Write names and metadata of a function's nodes relative to its call, in place."""
    for node in function_inlining.walk_nodes(function.body):
        relative = function.anchors.relative_metadata(node.metadata_props)
        for key in relative:
            del node.metadata_props[key]
        node.metadata_props[metadata_keys.RELATIVE_KEY] = json.dumps(
            relative, ensure_ascii=False, separators=(",", ":")
        )
        node.name = function.anchors.relative_name(node.name or "")
        for value in node.outputs:
            value.name = function.anchors.relative_name(value.name or "")
    names = FreshNames(value.name for node in function_inlining.walk_nodes(function.body) for value in node.outputs)
    for number, value in enumerate(function.inputs):
        value.name = names.take(function.anchors.weight_name(value.name or "") or f"input_{number}")


def _function_signature(body: Sequence[ir.Node], inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> object:
    """Return a key equal for parts that can share a function."""
    value_keys: dict[ir.Value | None, object] = {value: number for number, value in enumerate(inputs)}
    nodes = []
    for index, node in enumerate(body):
        operands = tuple(None if value is None else value_keys[value] for value in node.inputs)
        attributes = sorted(
            ir.serde.serialize_attribute(attribute).SerializeToString() for attribute in node.attributes.values()
        )
        created = tuple(_describe_value(value) for value in node.outputs)
        nodes.append((node.op_identifier(), node.doc_string, tuple(attributes), operands, created))
        value_keys.update({value: (index, output) for output, value in enumerate(node.outputs)})
    return tuple(nodes), len(inputs), tuple(value_keys[value] for value in outputs)


def _describe_value(value: ir.Value) -> tuple[Any, ...]:
    """Return the properties of a value equal in all calls of a function."""
    shape = None if value.shape is None else tuple(map(str, value.shape))
    return str(value.type), shape, bool(value.name), value.doc_string, tuple(sorted(value.metadata_props.items()))


def _record_differences(original: ir.Model, folded: ir.Model, positions: Sequence[int]) -> None:
    """Record in the metadata of ``folded`` how its inlined graph differs from the original graph.

    Args:
        original: The model before folding.
        folded: The model with functions; its metadata is changed.
        positions: Position in the original graph of each node, in the order of the inlined graph.
    """
    flat = folded.clone()
    flat.metadata_props.pop(metadata_keys.FUNCTIONS_KEY, None)
    function_inlining.inline_calls(flat)
    function_inlining.restore_recorded(flat)
    originals = list(original.graph)
    expected = function_inlining.walk_nodes([originals[position] for position in positions])
    changes = {
        str(index): change
        for index, (node, requested) in enumerate(
            zip(function_inlining.walk_nodes(list(flat.graph)), expected, strict=True)
        )
        if (change := _find_changes(node, requested))
    }
    record: dict[str, object] = {"graph": function_inlining.graph_digest(flat)}
    if changes:
        record["changes"] = changes
    if list(positions) != list(range(len(originals))):
        record["order"] = _to_runs(positions)
    folded.metadata_props[metadata_keys.FUNCTIONS_KEY] = json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def _find_changes(node: ir.Node, requested: ir.Node) -> dict[str, object]:
    """Return the changes from an inlined node to the original node: name, outputs and metadata."""
    change: dict[str, object] = {}
    if node.name != requested.name:
        change["name"] = requested.name
    names = [value.name for value in requested.outputs]
    if [value.name for value in node.outputs] != names:
        change["outputs"] = names
    props, expected = node.metadata_props, requested.metadata_props
    if props != expected:
        different = {key for key in {*props, *expected} if props.get(key) != expected.get(key)}
        change["metadata"] = {key: expected.get(key) for key in sorted(different)}
    return change


def _to_runs(positions: Sequence[int]) -> list[list[int]]:
    """Return positions as runs of consecutive numbers: first number and length."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([position, 1])
    return runs
