"""Extraction of a part of a graph as a separate model.

A part is a set of nodes of the main graph. Its inputs are values from outside, its outputs are values read outside.
Nodes independent of model inputs are constants: a part contains a copy of each constant instead of an input. Weights
are shared by reference and never read. ``module_parts`` decides the nodes of a module.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import onnx_ir as ir

from winml.modelkit.errors import UsageError
from winml.modelkit.onnx.fingerprint import OPERAND_LIMIT_ELEMENTS
from winml.modelkit.onnx.operators import is_operator
from winml.modelkit.tags import address
from winml.modelkit.tags.carry.original_graph import RANDOM_OPERATORS
from winml.modelkit.tags.selector import ModuleAddress, nearest_paths, recorded_modules, select
from winml.modelkit.tags.tagging import node_graphs, read_tag

_DATA_MOVEMENT = frozenset(
    {
        "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Shape", "Size", "Slice", "Split",
        "Squeeze", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Operators that move values and compute none."""

_ELEMENTWISE = frozenset(
    {
        "Add", "And", "Clip", "Div", "Equal", "Greater", "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual", "Max", "Min",
        "Mul", "Neg", "Not", "Or", "Sub", "Where", "Xor",
    }
)  # fmt: skip
"""Operators that cost one pass over their values, such as operators of masks and positions."""

FEW = 0.25
"""Maximum share of its nodes that a part may omit. Chosen: an optimizer shares a node or two between modules; omitting
more would make it a different part.
"""

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, eq=False)
class Cut:
    """A part of a graph and its boundary; values and nodes belong to the whole graph."""

    nodes: tuple[ir.Node, ...]
    """All nodes computed in the part, in graph order: its own nodes, nodes drawn in, and constants."""
    drawn_in: tuple[ir.Node, ...]
    """Nodes from outside that lie between two of its own and are cheap to compute."""
    left_out: tuple[ir.Node, ...]
    """Nodes of its own that outside nodes need before the part can run; their outputs become inputs of the part."""
    inputs: tuple[ir.Value, ...]
    """In the order of first use."""
    outputs: tuple[ir.Value, ...]
    """In the order of their producers."""
    initializers: tuple[ir.Value, ...]
    """In the order of first use."""


@dataclass(frozen=True)
class Refusal:
    """Reason why a part cannot be extracted."""

    reason: str


class Cutter:
    """Extracts parts of one graph; indexes the graph once for any number of parts.

    Attributes:
        position: Index of each node of the main graph.
        owners: Node of a subgraph → the node of the main graph that contains the subgraph.
    """

    def __init__(self, model: ir.Model) -> None:
        """Index the main graph; it must be in topological order, as every valid file is."""
        self.graph = model.graph
        self._nodes = tuple(model.graph)
        self.position = {node: number for number, node in enumerate(self._nodes)}
        self.owners: dict[ir.Node, ir.Node] = {}
        self._reads: dict[ir.Node, tuple[ir.Value, ...]] = {}
        self._random: dict[ir.Node, ir.Node] = {}
        for node in model.graph:
            self._index_node(node)
        self._changing = self._find_changing()

    def _index_node(self, node: ir.Node) -> None:
        """Record the values read by a node and its subgraphs, the owner of inner nodes, and random operators."""
        reads = dict.fromkeys(value for value in node.inputs if value is not None)
        for inner in (inner for graph in node_graphs(node) for inner in graph.all_nodes()):
            self.owners[inner] = node
            # A subgraph reads its own values and values of the enclosing graphs.
            captured = (value for value in inner.inputs if value is not None and value.graph is self.graph)
            reads.update(dict.fromkeys(captured))
            if inner.op_type in RANDOM_OPERATORS:
                self._random[node] = inner
        if node.op_type in RANDOM_OPERATORS:
            self._random[node] = node
        self._reads[node] = tuple(reads)

    def _find_changing(self) -> frozenset[ir.Node]:
        """Return the nodes with a random result, or a result that depends on the inputs of the model."""
        changing: set[ir.Node] = set()
        for node in self.graph:
            if node in self._random or any(self._is_changing_value(value, changing) for value in self._reads[node]):
                changing.add(node)
        return frozenset(changing)

    @staticmethod
    def _is_changing_value(value: ir.Value, changing: Iterable[ir.Node]) -> bool:
        """Return True if a value depends on an input of the model, or on a node in ``changing``."""
        producer = value.producer()
        return producer in changing if producer is not None else not value.is_initializer()

    def is_constant(self, node: ir.Node) -> bool:
        """Return True if the result of a node of the main graph is independent of the inputs of the model."""
        return node not in self._changing

    def node_range(self, first_node: ir.Node, last_node: ir.Node) -> Sequence[ir.Node]:
        """Return two nodes of the main graph and all nodes between them, in graph order."""
        return self._nodes[self.position[first_node] : self.position[last_node] + 1]

    def reads(self, node: ir.Node) -> tuple[ir.Value, ...]:
        """Return the values of the main graph that a node reads, including values captured by its subgraphs."""
        return self._reads[node]

    def readers(self, value: ir.Value) -> Iterator[ir.Node]:
        """Yield the nodes of the main graph that read a value."""
        for use in value.uses():
            yield self.owners.get(use.node, use.node)

    def crossing(self) -> list[int]:
        """Return for each node the number of values produced up to the node and read later."""
        change = [0] * (len(self._nodes) + 1)
        for index, node in enumerate(self._nodes):
            for value in node.outputs:
                last = max((self.position[reader] for reader in self.readers(value)), default=index)
                change[index] += 1
                change[last] -= 1
        return list(accumulate(change[:-1]))

    def cut(self, part_nodes: Sequence[ir.Node], *, may_join: Iterable[ir.Node] = ()) -> Cut | Refusal:
        """Find the boundary of a part.

        Args:
            part_nodes: Nodes of the part, of the main graph, in graph order. Constants belong to the part that reads
                them.
            may_join: Expensive nodes that may be drawn in.

        Returns:
            The cut, or a refusal: an expensive outside node lies between two nodes of the part, the part draws random
            values, or no node reads its outputs.
        """
        core = {node for node in part_nodes if node in self._changing}
        if not core:
            return Refusal("it depends on no input of the model, so its result is a constant")
        joinable = set(may_join)
        between = self._find_nodes_between(core)
        left_out: list[ir.Node] = []
        if blocking := [node for node in between if node not in joinable and not _is_cheap(node)]:
            left_out = self._find_needed_core_nodes(blocking, core)
            if len(left_out) > FEW * len(core) or not all(map(_is_light, left_out)):
                return Refusal(
                    f"{node_words(blocking[0])} of another module lies between its nodes: it reads their outputs and "
                    "they read its output"
                )
            core.difference_update(left_out)
            between = self._find_nodes_between(core)
        inside = core.union(between)
        for node in inside:
            if node in self._random:
                return Refusal(f"{node_words(self._random[node])} generates random values in each run")
        return self._find_boundary(core, inside, tuple(between), tuple(left_out))

    def cut_exactly(self, part_nodes: Iterable[ir.Node]) -> Cut:
        """Return the boundary of exactly the given nodes, regardless of nodes in between.

        Values read from other nodes are inputs, including constants.

        Args:
            part_nodes: Nodes of the main graph.
        """
        inside = set(part_nodes)
        nodes = self._sort_nodes(inside)
        outer = dict.fromkeys(value for node in nodes for value in self._reads[node] if value.producer() not in inside)
        return Cut(
            nodes,
            drawn_in=(),
            left_out=(),
            inputs=tuple(value for value in outer if not value.is_initializer()),
            outputs=self._find_outputs(nodes, inside),
            initializers=tuple(value for value in outer if value.is_initializer()),
        )

    def _find_outputs(self, nodes: Iterable[ir.Node], inside: set[ir.Node]) -> tuple[ir.Value, ...]:
        """Return the values of nodes read outside, and outputs of the graph."""
        return tuple(
            value
            for node in nodes
            for value in node.outputs
            if value.is_graph_output() or any(reader not in inside for reader in self.readers(value))
        )

    def _find_needed_core_nodes(self, nodes: Sequence[ir.Node], core: set[ir.Node]) -> list[ir.Node]:
        """Return the nodes of the core needed by ``nodes``, in graph order."""
        first_position = min(self.position[node] for node in core)
        needed_nodes = set(nodes)
        for node in reversed(self._nodes[first_position : self.position[nodes[-1]]]):
            if any(reader in needed_nodes for value in node.outputs for reader in self.readers(value)):
                needed_nodes.add(node)
        return [node for node in self._sort_nodes(needed_nodes) if node in core]

    def _find_nodes_between(self, core: set[ir.Node]) -> list[ir.Node]:
        """Return the outside nodes on a path between two nodes of the core, in graph order.

        All such nodes lie between the first and the last core node in graph order; only this window is searched.
        """
        positions = [self.position[node] for node in core]
        first_position, last_position = min(positions), max(positions)
        if last_position - first_position + 1 == len(core):
            return []
        window = [
            node for node in self._nodes[first_position:last_position] if node not in core and node in self._changing
        ]
        below_core: set[ir.Node] = set()
        for node in window:
            if any(value.producer() in core or value.producer() in below_core for value in self._reads[node]):
                below_core.add(node)
        above_core: set[ir.Node] = set()
        for node in reversed(window):
            readers = (reader for value in node.outputs for reader in self.readers(value))
            if any(reader in core or reader in above_core for reader in readers):
                above_core.add(node)
        return [node for node in window if node in below_core and node in above_core]

    def _find_boundary(
        self, core: set[ir.Node], inside: set[ir.Node], drawn_in: tuple[ir.Node, ...], left_out: tuple[ir.Node, ...]
    ) -> Cut | Refusal:
        """Return the cut of a part with all needed constants.

        A part without read outputs, or with boundary values other than tensors, is refused.

        Args:
            core: Nodes of the module.
            inside: Nodes of the part.
            drawn_in: Nodes of other modules in the part.
            left_out: Nodes of the module outside the part.
        """
        inputs: dict[ir.Value, None] = {}
        initializers: dict[ir.Value, None] = {}
        nodes = set(inside)
        pending = [value for node in self._sort_nodes(inside) for value in self._reads[node]][::-1]
        while pending:
            value = pending.pop()
            producer = value.producer()
            if value.is_initializer():
                initializers[value] = None
            elif producer is None or (producer not in nodes and producer in self._changing):
                inputs[value] = None
            elif producer not in nodes:
                nodes.add(producer)
                pending.extend(reversed(self._reads[producer]))
        outputs = self._find_outputs(self._sort_nodes(core), inside)
        if not outputs:
            return Refusal("its outputs are not read outside")
        for value in (*inputs, *outputs):
            if value.type is not None and not isinstance(value.type, ir.TensorType):
                return Refusal(f"value {value.name} on its boundary is {value.type}, not a tensor")
        return Cut(self._sort_nodes(nodes), drawn_in, left_out, tuple(inputs), outputs, tuple(initializers))

    def _sort_nodes(self, nodes: Iterable[ir.Node]) -> tuple[ir.Node, ...]:
        """Sort nodes of the main graph in graph order."""
        return tuple(sorted(nodes, key=self.position.__getitem__))


def cut_model(model: ir.Model, cut: Cut, *, keeps_sizes: bool = False) -> ir.Model:
    """Build a separate model from a cut; the original model is not changed.

    Nodes, values and their metadata are copied under the same names; tensors are shared. Dynamic dimensions retain
    their names. An expression such as ``height - 2`` is an independent size of the new model and becomes a name,
    ``height_2``. Called functions are copied. The caller writes the metadata of the model.

    Args:
        model: The whole model.
        cut: A part of it.
        keeps_sizes: Retain expressions, for a part that is inserted into the model again.
    """
    view = ir.GraphView(
        cut.inputs,
        cut.outputs,
        nodes=cut.nodes,
        initializers=cut.initializers,
        opset_imports=model.graph.opset_imports,
        name=model.graph.name,
    )
    graph = view.clone()
    if not keeps_sizes:
        _name_dimensions(graph)
    return ir.Model(
        graph,
        # Before IR version 4 an initializer also had to be an input.
        ir_version=max(model.ir_version, 4),
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        functions=[function.clone() for function in _called_functions(model, graph)],
    )


def node_words(node: ir.Node) -> str:
    """Return the words for a node in a message."""
    return f"node {node.name} ({node.op_type})" if node.name else f"a node {node.op_type}"


def _is_light(node: ir.Node) -> bool:
    """Return True if a node costs at most one pass over its values."""
    return _is_cheap(node) or is_operator(node, *_ELEMENTWISE)


def _is_cheap(node: ir.Node) -> bool:
    """Return True if a node moves values or computes indices: shapes, positions, conditions."""
    if is_operator(node, *_DATA_MOVEMENT):
        return True
    dtypes = [value.dtype for value in node.outputs]
    return all(dtype is not None and (dtype.is_integer() or dtype == ir.DataType.BOOL) for dtype in dtypes)


def _name_dimensions(graph: ir.Graph) -> None:
    """Name every dynamic dimension of the boundary with a valid identifier, in place."""
    names: dict[str, str] = {}
    for value in graph.inputs:
        if value.shape is not None:
            for axis, size in enumerate(value.shape):
                if not isinstance(size, int):
                    text = size.value or f"{value.name}_dim_{axis}"
                    names[text] = _as_identifier(text)
                    value.shape[axis] = names[text]
    renamed = {text for text, name in names.items() if text != name}
    for node in graph.all_nodes() if renamed else ():
        for value in node.outputs:
            for axis, size in enumerate(value.shape or ()):
                if not isinstance(size, int) and size.value in renamed and value.shape is not None:
                    value.shape[axis] = names[size.value]


def _as_identifier(text: str) -> str:
    """Convert a text to a valid identifier."""
    if _IDENTIFIER.fullmatch(text):
        return text
    name = re.sub(r"\W+", "_", text).strip("_")
    return name if _IDENTIFIER.fullmatch(name) else f"size_{name}"


def _called_functions(model: ir.Model, graph: ir.Graph) -> list[ir.Function]:
    """Return the functions that a graph calls, directly or through other functions."""
    functions: dict[ir.OperatorIdentifier, ir.Function] = {}
    pending = list(graph.all_nodes()) if model.functions else []
    while pending:
        identifier = pending.pop().op_identifier()
        function = model.functions.get(identifier)
        if function is not None and identifier not in functions:
            functions[identifier] = function
            pending.extend(function.all_nodes())
    return list(functions.values())


Part = list[ir.Node]


class Signature(NamedTuple):
    """Properties equal in corresponding nodes of two calls."""

    domain: str
    op_type: str
    tag: str
    inputs: int
    weights: tuple[str, ...]


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: its cut or refusal."""

    call: int
    """Number of the call, from 1."""
    calls: int
    """Number of calls in the graph."""
    result: Cut | Refusal


@dataclass(frozen=True)
class GraphModules:
    """Module of each node, read from tags or, without tags, from node names."""

    modules: Sequence[ModuleAddress]
    tag_of: Mapping[str, str]
    """Node name → tag of its module; ``""`` if unknown."""
    source: str = "winml tags"
    """Source of the tags, for messages."""
    contained_tags: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Name of a node that operators of several modules were fused into → their tags."""

    def selected_tags(self, selector: str) -> frozenset[str]:
        """Return the tags of the modules matched by a selector.

        Raises:
            UsageError: no module matches; the nearest addresses are listed.
        """
        if not self.modules:
            raise UsageError(
                f"no module matches {selector!r}: no node of the graph has a module tag",
                hint="Remove the selector, or restore the tags of the export first: winml retag EXPORT FILE.",
            )
        return frozenset(module.tag for module in select(self.modules, selector, self.tag_of))

    def does_work_of(self, name: str, tags: Collection[str]) -> bool:
        """Return True if a node computes for a module with one of the tags, or for a submodule."""
        return any(_is_within_any(tag, tags) for tag in self._working_tags(name))

    def works_only_for(self, name: str, tags: Collection[str]) -> bool:
        """Return True if a node computes only for modules with the tags, or for submodules."""
        return all(_is_within_any(tag, tags) for tag in self._working_tags(name))

    def contains_any(self, name: str, tags: Collection[str]) -> bool:
        """Return True if a node contains fused operators of a module with one of the tags."""
        return any(_is_within_any(tag, tags) for tag in self.contained_tags.get(name, ()))

    def owners_of_fused(self, tags: Collection[str], names: Iterable[str] | None = None) -> list[str]:
        """Return the paths of the modules with nodes that contain operators of the tagged modules.

        Args:
            tags: Tags of the fused modules.
            names: Names of the nodes; None: all nodes.
        """
        nodes = self.contained_tags if names is None else names
        owners = {self.tag_of.get(name, "") for name in nodes if self.contains_any(name, tags)}
        return [module.path or module.tag for module in self.modules if module.tag in owners]

    def refuse_idle(
        self, option: str, selector: str, changed: Collection[str], reason: str, owners: Container[str] | None = None
    ) -> None:
        """Refuse a selector of modules without any of the nodes that a verb changes.

        Args:
            option: The option with the selector.
            selector: The selector.
            changed: Names of the nodes that the verb changes, or would change without the selector.
            reason: Clause of the error, such as ``no node of it can be quantized``.
            owners: Tags of the modules to suggest; None: the modules of the changed nodes.

        Raises:
            UsageError: the selector matches no module, or none of the nodes does its work; names the nearest modules.
        """
        tags = self.selected_tags(selector)
        if any(self.does_work_of(name, tags) for name in changed):
            return
        if fused := self.owners_of_fused(tags, changed):
            raise fused_error(f"{option} {selector}", fused)
        owners = {self.tag_of.get(name, "") for name in changed} if owners is None else owners
        nearest = nearest_paths(selector, [module for module in self.modules if module.tag in owners])
        raise UsageError(
            f"{option} {selector}: {reason}",
            hint=f"Omit it, or select another module: {', '.join(nearest)}." if nearest else "Omit it.",
        )

    def _working_tags(self, name: str) -> Collection[str]:
        """Return the tags of the modules with weights possibly in a node.

        A node that contains its own module, and no module inside it, belongs to its module, as a convolution with a
        fused batch norm. Otherwise each contained module counts, as query, key and value in an Attention node.
        """
        owner, contained = self.tag_of.get(name, ""), self.contained_tags.get(name, frozenset())
        is_owned = owner in contained and not any(address.is_within(tag, owner) for tag in contained - {owner})
        return (owner,) if is_owned or not contained else contained


def fused_error(option: str, owners: Sequence[str]) -> UsageError:
    """Return the error for a selected module with all operators fused into nodes of other modules.

    Args:
        option: The option with the selector.
        owners: Paths of the other modules.
    """
    return UsageError(
        f"{option}: this module is fused into {', '.join(owners)}",
        hint="Select the module that it is fused into, or omit it.",
    )


def _is_within_any(tag: str, tags: Collection[str]) -> bool:
    return any(address.is_within(tag, ancestor) for ancestor in tags)


class ModuleParts:
    """The modules of one graph, ready for extraction.

    Nodes are selected by tag, including nodes of inner modules. All calls of a module share one tag, so the nodes are
    divided into calls: by the number of calls in the model's metadata, else by sequences that repeat with the same
    weights.
    """

    def __init__(self, model: ir.Model) -> None:
        """Index the graph once.

        Args:
            model: A tagged model; its weights are not read.
        """
        self._cutter = Cutter(model)
        modules = recorded_modules(model.metadata_props) or ()
        self._calls = {module.tag: module.calls for module in modules if module.calls}
        self._nodes_by_tag: dict[str, Part] = defaultdict(list)
        self._inner_owners: dict[str, ir.Node] = {}
        for node in self._cutter.position:
            if tag := read_tag(node):
                self._nodes_by_tag[tag.tag].append(node)
        for inner, owner in self._cutter.owners.items():
            if tag := read_tag(inner):
                self._inner_owners.setdefault(tag.tag, owner)
        for function in model.functions.values():
            for inner in function.all_nodes():
                if tag := read_tag(inner):
                    self._inner_owners.setdefault(tag.tag, inner)
        self._tags_below = _tags_within([*self._nodes_by_tag, *self._inner_owners])

    def cut(self, tag: str) -> tuple[ModuleCall, ...]:
        """Extract every call of the module with this tag.

        Returns:
            One entry per call, in execution order; ``()`` if the graph has no node of the module. A single entry with a
            refusal if the calls cannot be separated.
        """
        call_parts = self.calls(tag)
        if isinstance(call_parts, Refusal):
            return (ModuleCall(1, 1, call_parts),)
        shared = self._shared_nodes(tag)
        return tuple(
            ModuleCall(number, len(call_parts), self._cutter.cut(call_nodes, may_join=shared))
            for number, call_nodes in enumerate(call_parts, start=1)
        )

    def calls(self, tag: str) -> list[Part] | Refusal:
        """Return the nodes of every call of the module with this tag, in graph order.

        For a module with one call, constants are included. ``[]`` if the graph has no node of the module; a refusal if
        the calls cannot be separated, or if the module runs inside a node of another module.
        """
        module_nodes = self._nodes_of(tag)
        if hidden := self._hidden_part(tag, set(module_nodes)):
            return hidden
        if not module_nodes:
            return []
        changing = [node for node in module_nodes if not self._cutter.is_constant(node)]
        call_parts = self._divide_into_calls(changing, self._calls.get(tag)) if changing else [module_nodes]
        return [module_nodes] if not isinstance(call_parts, Refusal) and len(call_parts) == 1 else call_parts

    def _nodes_of(self, tag: str) -> Part:
        """Return the nodes of a module and its submodules, in graph order."""
        nodes = [node for below in self._tags_below.get(tag, ()) for node in self._nodes_by_tag.get(below, ())]
        return sorted(nodes, key=self._cutter.position.__getitem__)

    def _hidden_part(self, tag: str, module_nodes: set[ir.Node]) -> Refusal | None:
        """Return a refusal if a module runs inside a node of another module; otherwise `None`."""
        for below in self._tags_below.get(tag, ()):
            owner = self._inner_owners.get(below)
            if owner is None or owner in module_nodes:
                continue
            if owner in self._cutter.position:
                return Refusal(
                    f"it runs inside {node_words(owner)}, which belongs to another module; values inside a subgraph "
                    "cannot be recorded"
                )
            if not module_nodes:
                return Refusal(f"it runs inside a function of the model, at {node_words(owner)}")
        return None

    def _shared_nodes(self, tag: str) -> Part:
        """Return the nodes of other modules with several calls, possibly called by the module, too."""
        return [
            node
            for other_tag, nodes in self._nodes_by_tag.items()
            if self._calls.get(other_tag, 1) > 1 and not address.is_within(other_tag, tag)
            for node in nodes
        ]

    def _divide_into_calls(self, nodes: Part, calls: int | None) -> list[Part] | Refusal:
        """Divide the nodes of a module, in the order of the graph, into its calls."""
        if calls == 1:
            return [nodes]
        signatures = [self._signature_of(node) for node in nodes]
        if calls is None:
            return _equal_parts(nodes, signatures, _repetition_count(signatures)) or [nodes]
        division_methods: tuple[Callable[[], list[Part]], ...] = (
            lambda: _equal_parts(nodes, signatures, calls),
            lambda: self._split_at_gaps(nodes),
            lambda: self._split_by_connection(nodes),
        )
        for divide in division_methods:
            call_parts = divide()
            if len(call_parts) == calls and len({self._common_content(call_nodes) for call_nodes in call_parts}) == 1:
                return call_parts
        return Refusal(f"it is called {calls} times, and its nodes cannot be assigned to single calls")

    def _signature_of(self, node: ir.Node) -> Signature:
        """Return the signature of a node."""
        tag = read_tag(node)
        tensors = [(str(value.name), value.const_value) for value in self._cutter.reads(node) if value.is_initializer()]
        # Exporters write small constants once per call; a weight is the same tensor in all calls.
        weights = tuple(name for name, tensor in tensors if tensor and tensor.size > OPERAND_LIMIT_ELEMENTS)
        return Signature(node.domain, node.op_type, tag.tag if tag else "", len(node.inputs), weights)

    def _common_content(self, nodes: Part) -> frozenset[object]:
        """Return the content common to all calls of a module: weights, or operators of a module without weights."""
        signatures = [self._signature_of(node) for node in nodes]
        weights = frozenset(name for signature in signatures for name in signature.weights)
        return weights or frozenset(Counter(signature[:2] for signature in signatures).items())

    def _split_at_gaps(self, nodes: Part) -> list[Part]:
        """Divide at nodes of other modules, in graph order; constants do not divide."""
        call_parts: list[Part] = []
        members = set(nodes)
        in_run = False
        for node in self._cutter.node_range(nodes[0], nodes[-1]):
            if node in members:
                if not in_run:
                    call_parts.append([])
                call_parts[-1].append(node)
                in_run = True
            elif not self._cutter.is_constant(node):
                in_run = False
        return call_parts

    def _split_by_connection(self, nodes: Part) -> list[Part]:
        """Divide into connected parts, which exchange no values."""
        leader = {node: node for node in nodes}

        def find_leader(node: ir.Node) -> ir.Node:
            """Return the representative of a node's connected part; shortens paths on the way."""
            while leader[node] is not node:
                leader[node] = node = leader[leader[node]]
            return node

        for node in nodes:
            for value in self._cutter.reads(node):
                if (producer := value.producer()) in leader:
                    leader[find_leader(node)] = find_leader(producer)
        call_parts: dict[ir.Node, Part] = defaultdict(list)
        for node in nodes:
            call_parts[find_leader(node)].append(node)
        return list(call_parts.values())


def _tags_within(tags: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return tag → tags within it, including itself; ancestors of the tags are keys too."""
    tags_within: dict[str, dict[str, None]] = defaultdict(dict)
    for tag in tags:
        segments = address.parse_tag(tag)
        for depth in range(1, len(segments) + 1):
            tags_within[address.format_tag(segments[:depth])][tag] = None
    return {tag: tuple(below) for tag, below in tags_within.items()}


def _equal_parts(nodes: Part, signatures: Sequence[Signature], count: int) -> list[Part]:
    """Divide into ``count`` parts of equal length with equal signatures; `[]` if signatures differ."""
    if count < 2 or len(nodes) % count:
        return []
    length = len(nodes) // count
    if any(signatures[number] != signatures[number % length] for number in range(len(nodes))):
        return []
    return [nodes[start : start + length] for start in range(0, len(nodes), length)]


def _repetition_count(signatures: Sequence[Signature]) -> int:
    """Return the number of repetitions of nodes with weights: the greatest common divisor; 1 without such nodes."""
    counts = [count for signature, count in Counter(signatures).items() if signature.weights]
    return math.gcd(*counts) if counts else 1
