"""How is a part of a graph cut out, so that it stands as a model of its own?

A part is a set of nodes of the main graph. Its inputs are the values it reads from outside, its outputs the values it
makes that are read outside. What depends on no input of the model is a constant: it crosses no boundary and is brought
along where it is read. Weights are shared by reference and never read. Which nodes make up a module is decided by
``module_parts``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

__all__ = ["Cut", "Cutter", "Refusal", "cut_model", "node_words"]

RANDOM_OPERATORS = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
"""Specified: ONNX's operators that answer differently in each run."""

_MOVES = frozenset(
    {
        "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Shape", "Size", "Slice", "Split",
        "Squeeze", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Operators that bring values to another place and compute none."""

_LIGHT = frozenset(
    {
        "Add", "And", "Clip", "Div", "Equal", "Greater", "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual", "Max", "Min",
        "Mul", "Neg", "Not", "Or", "Sub", "Where", "Xor",
    }
)  # fmt: skip
"""Operators that cost one pass over their values: what masks and positions are made with."""

FEW = 0.25
"""Largest share of its nodes a part may leave outside. Chosen: what an optimizer shares between modules is a node or
two; more would be another part."""

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, eq=False)
class Cut:
    """A part of a graph and its boundary; values and nodes are those of the whole graph."""

    nodes: tuple[ir.Node, ...]
    """Everything that is computed in the part, in the order of the graph: its own nodes, those drawn in, constants."""
    drawn_in: tuple[ir.Node, ...]
    """Nodes from outside that stand between two of its own and compute next to nothing."""
    left_out: tuple[ir.Node, ...]
    """Nodes of its own that others need before the rest can run, so that what they make is an input."""
    inputs: tuple[ir.Value, ...]
    """In the order they are first read."""
    outputs: tuple[ir.Value, ...]
    """In the order they are made."""
    initializers: tuple[ir.Value, ...]
    """In the order they are first read."""


@dataclass(frozen=True)
class Refusal:
    """Why something cannot be cut out."""

    reason: str


class Cutter:
    """What has to be known of a graph to cut parts out of it; found once, for any number of parts.

    Attributes:
        position: Place of each node of the main graph in it.
        owners: Node of the main graph each node of a subgraph stands in.
    """

    def __init__(self, model: ir.Model) -> None:
        """Look at the main graph; it must be in topological order, as every valid file is."""
        self.graph = model.graph
        self._nodes = tuple(model.graph)
        self.position = {node: number for number, node in enumerate(self._nodes)}
        self.owners: dict[ir.Node, ir.Node] = {}
        self._reads: dict[ir.Node, tuple[ir.Value, ...]] = {}
        self._random: dict[ir.Node, ir.Node] = {}
        for node in model.graph:
            self._index(node)
        self._changing = self._find_changing()

    def _index(self, node: ir.Node) -> None:
        reads = dict.fromkeys(value for value in node.inputs if value is not None)
        for inner in _inner_nodes(node):
            self.owners[inner] = node
            # A subgraph reads what it names: its own values, and those of the graphs around it.
            captured = (value for value in inner.inputs if value is not None and value.graph is self.graph)
            reads.update(dict.fromkeys(captured))
            if inner.op_type in RANDOM_OPERATORS:
                self._random[node] = inner
        if node.op_type in RANDOM_OPERATORS:
            self._random[node] = node
        self._reads[node] = tuple(reads)

    def _find_changing(self) -> frozenset[ir.Node]:
        """Return the nodes whose answer depends on the inputs of the model, or on chance."""
        changing: set[ir.Node] = set()
        for node in self.graph:
            if node in self._random or any(self._is_changing_value(value, changing) for value in self._reads[node]):
                changing.add(node)
        return frozenset(changing)

    @staticmethod
    def _is_changing_value(value: ir.Value, changing: Iterable[ir.Node]) -> bool:
        producer = value.producer()
        return producer in changing if producer is not None else not value.is_initializer()

    def is_constant(self, node: ir.Node) -> bool:
        """Say whether a node of the main graph answers the same whatever the inputs of the model are."""
        return node not in self._changing

    def between(self, first: ir.Node, last: ir.Node) -> Sequence[ir.Node]:
        """Return two nodes of the main graph and all that stand between them, in its order."""
        return self._nodes[self.position[first] : self.position[last] + 1]

    def reads(self, node: ir.Node) -> tuple[ir.Value, ...]:
        """Return the values of the main graph a node reads, those its subgraphs capture included."""
        return self._reads[node]

    def readers(self, value: ir.Value) -> Iterator[ir.Node]:
        """Yield the nodes of the main graph that read a value."""
        for use in value.uses():
            yield self.owners.get(use.node, use.node)

    def cut(self, own: Sequence[ir.Node], *, may_join: Iterable[ir.Node] = ()) -> Cut | Refusal:
        """Find the boundary of a part.

        Args:
            own: Its nodes, of the main graph, in the order of the graph; constants among them count where they are
                read.
            may_join: Nodes that may be drawn in although they compute something.

        Returns:
            The cut, or why there is none: an outside node that computes stands between two of its own, the part draws
            random values, or it makes nothing anybody reads.
        """
        core = {node for node in own if node in self._changing}
        if not core:
            return Refusal("it depends on no input of the model, so its result is a constant")
        allowed = set(may_join)
        between = self._passed_through(core)
        left_out: list[ir.Node] = []
        if blocking := [node for node in between if node not in allowed and not _is_cheap(node)]:
            left_out = self._needed_by(blocking, core)
            if len(left_out) > FEW * len(core) or not all(map(_is_light, left_out)):
                return Refusal(
                    f"{node_words(blocking[0])} lies outside, but between its nodes: it reads what they make and they "
                    "read what it makes"
                )
            core.difference_update(left_out)
            between = self._passed_through(core)
        inside = core.union(between)
        for node in inside:
            if node in self._random:
                return Refusal(f"{node_words(self._random[node])} draws other values in each run")
        return self._bounded(core, inside, tuple(between), tuple(left_out))

    def _needed_by(self, nodes: Sequence[ir.Node], core: set[ir.Node]) -> list[ir.Node]:
        """Return the nodes of the core that must run before one of these can, in the order of the graph."""
        first = min(self.position[node] for node in core)
        needed = set(nodes)
        for node in reversed(self._nodes[first : self.position[nodes[-1]]]):
            if any(reader in needed for value in node.outputs for reader in self.readers(value)):
                needed.add(node)
        return [node for node in self._ordered(needed) if node in core]

    def _passed_through(self, core: set[ir.Node]) -> list[ir.Node]:
        """Return the outside nodes on a way from one of the nodes to another, in the order of the graph.

        All of them stand between the first and the last in the order of the graph, so nothing else is looked at.
        """
        places = [self.position[node] for node in core]
        first, last = min(places), max(places)
        if last - first + 1 == len(core):
            return []
        window = [node for node in self._nodes[first:last] if node not in core and node in self._changing]
        after: set[ir.Node] = set()
        for node in window:
            if any(value.producer() in core or value.producer() in after for value in self._reads[node]):
                after.add(node)
        before: set[ir.Node] = set()
        for node in reversed(window):
            readers = (reader for value in node.outputs for reader in self.readers(value))
            if any(reader in core or reader in before for reader in readers):
                before.add(node)
        return [node for node in window if node in after and node in before]

    def _bounded(
        self, core: set[ir.Node], inside: set[ir.Node], drawn_in: tuple[ir.Node, ...], left_out: tuple[ir.Node, ...]
    ) -> Cut | Refusal:
        inputs: dict[ir.Value, None] = {}
        initializers: dict[ir.Value, None] = {}
        nodes = set(inside)
        pending = [value for node in self._ordered(inside) for value in self._reads[node]][::-1]
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
        outputs = [
            value
            for node in self._ordered(core)
            for value in node.outputs
            if value.is_graph_output() or any(reader not in inside for reader in self.readers(value))
        ]
        if not outputs:
            return Refusal("nothing outside reads what it makes")
        for value in (*inputs, *outputs):
            if value.type is not None and not isinstance(value.type, ir.TensorType):
                return Refusal(f"value {value.name} on its boundary is {value.type}, not a tensor")
        return Cut(self._ordered(nodes), drawn_in, left_out, tuple(inputs), tuple(outputs), tuple(initializers))

    def _ordered(self, nodes: Iterable[ir.Node]) -> tuple[ir.Node, ...]:
        return tuple(sorted(nodes, key=self.position.__getitem__))


def cut_model(model: ir.Model, cut: Cut) -> ir.Model:
    """Make a cut a model of its own; the whole model stays as it is.

    Nodes, values and their metadata are copied under their own names, tensors are shared. Open dimensions keep their
    names; an expression such as ``height - 2`` is a free size here, so it becomes a name, ``height_2``. Functions that
    are called come along. The metadata of the model does not: whoever cuts knows what to say.
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
    _name_dimensions(graph)
    return ir.Model(
        graph,
        # Before version 4 an initializer had to be an input as well.
        ir_version=max(model.ir_version, 4),
        producer_name=model.producer_name,
        producer_version=model.producer_version,
        functions=[function.clone() for function in _called_functions(model, graph)],
    )


def node_words(node: ir.Node) -> str:
    """Return what a node is called in sentences."""
    return f"node {node.name} ({node.op_type})" if node.name else f"a node {node.op_type}"


def _is_light(node: ir.Node) -> bool:
    """Say whether a node costs little whatever it is for: it moves values, or passes over them once."""
    return _is_cheap(node) or (node.op_type in _LIGHT and node.domain in ("", "ai.onnx"))


def _is_cheap(node: ir.Node) -> bool:
    """Say whether a node moves values or computes indices: shapes, positions, conditions."""
    if node.op_type in _MOVES and node.domain in ("", "ai.onnx"):
        return True
    dtypes = [value.dtype for value in node.outputs]
    return all(dtype is not None and (dtype.is_integer() or dtype == ir.DataType.BOOL) for dtype in dtypes)


def _inner_nodes(node: ir.Node) -> Iterator[ir.Node]:
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield from attribute.as_graph().all_nodes()
        elif attribute.type == ir.AttributeType.GRAPHS:
            for graph in attribute.as_graphs():
                yield from graph.all_nodes()


def _name_dimensions(graph: ir.Graph) -> None:
    """Give every open dimension of the boundary a name that is one; in place."""
    names: dict[str, str] = {}
    for value in graph.inputs:
        if value.shape is not None:
            for axis, size in enumerate(value.shape):
                if not isinstance(size, int):
                    text = size.value or f"{value.name}_dim_{axis}"
                    names[text] = _identifier(text)
                    value.shape[axis] = names[text]
    renamed = {text for text, name in names.items() if text != name}
    for node in graph.all_nodes() if renamed else ():
        for value in node.outputs:
            for axis, size in enumerate(value.shape or ()):
                if not isinstance(size, int) and size.value in renamed and value.shape is not None:
                    value.shape[axis] = names[size.value]


def _identifier(text: str) -> str:
    if _IDENTIFIER.fullmatch(text):
        return text
    name = re.sub(r"\W+", "_", text).strip("_")
    return name if _IDENTIFIER.fullmatch(name) else f"size_{name}"


def _called_functions(model: ir.Model, graph: ir.Graph) -> list[ir.Function]:
    """Return the functions a graph calls, and those they call."""
    found: dict[ir.OperatorIdentifier, ir.Function] = {}
    pending = list(graph.all_nodes()) if model.functions else []
    while pending:
        identifier = pending.pop().op_identifier()
        function = model.functions.get(identifier)
        if function is not None and identifier not in found:
            found[identifier] = function
            pending.extend(function.all_nodes())
    return list(found.values())
