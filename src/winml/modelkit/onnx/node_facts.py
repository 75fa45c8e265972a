"""Properties of each node that decide whether a provider runs it: operator, element types, dynamic sizes, module."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from winml.modelkit.onnx.contents import Shape, declared_shape, read_contents, read_value_types
from winml.modelkit.onnx.module_tree import read_tree
from winml.modelkit.onnx.specs import stated_sums
from winml.modelkit.tags.dialects import name_scope, scope_path

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class NodeFacts:
    """Properties of one node."""

    name: str
    op_type: str
    domain: str
    """Empty for ONNX's own."""
    module: str
    """Dotted path of its module; its tag if the path is unknown, ``""`` if both are."""
    inputs: tuple[str | None, ...]
    """Element types with numpy's names; None if unknown."""
    outputs: tuple[str | None, ...]
    open_names: frozenset[str]
    """Dynamic dimensions of the inputs of the graph that its values depend on."""
    has_unknown_size: bool = False
    """True if a size of its values follows from no input dimension, as far as known: it depends on data."""

    @property
    def operator(self) -> str:
        """Operator with its domain, unless that is ONNX's."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type


@dataclass(frozen=True)
class GraphFacts:
    """The nodes of a graph, without constants."""

    nodes: tuple[NodeFacts, ...]
    open_places: Mapping[str, Sequence[str]]
    """Dynamic dimension of the inputs → its axes, as ``input:axis``."""
    sums: frozenset[str]
    """Dynamic dimensions that follow from others."""
    opsets: Mapping[str, int]
    """Domain (ONNX's own: empty) → version."""
    module_of_scope: Mapping[str, str]
    """Module path as node names have it → module."""
    notes: tuple[str, ...]
    module_of_value: Mapping[str, str] = field(default_factory=dict)
    """Name of a value → module of its producer; of an input or a weight, of its first reader."""

    def node_called(self, name: str, op_type: str, domain: str) -> NodeFacts:
        """Return a node by its name in ONNX Runtime; a new record for unknown or unnamed nodes."""
        if (node := self._by_name.get((name, op_type))) is not None:
            return node
        domain = "" if domain == "ai.onnx" else domain
        return NodeFacts(name, op_type, domain, self.module_of_name(name, op_type), (), (), frozenset())

    @functools.cached_property
    def _by_name(self) -> Mapping[tuple[str, str], NodeFacts]:
        counts = Counter(node.name for node in self.nodes)
        return {(node.name, node.op_type): node for node in self.nodes if node.name and counts[node.name] == 1}

    def module_of_name(self, name: str, op_type: str) -> str:
        """Return the module of a node created by ONNX Runtime, from the node's name; ``""`` without a module."""
        if not name:
            return ""
        path = scope_path(name_scope(name, op_type))
        return self.module_of_scope.get(path, path)


def read_facts(model: onnx.ModelProto) -> GraphFacts:
    """Read the nodes of a model; its weights are not needed.

    Args:
        model: The model, with or without the values of its weights.
    """
    contents = read_contents(model)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    tree = read_tree([node.proto for node in contents.nodes], metadata, model.graph.name.strip("/") or "graph")
    paths = {module.tag: module.path or module.tag for module in tree.modules}
    value_names = {name for node in contents.nodes if node.place == "graph" for name in node.proto.output if name}
    types, notes = read_value_types(model, value_names, "some types are unknown")
    axes_by_dimension = _find_open_axes(model.graph)
    nodes, functions = [], {(function.domain, function.name) for function in model.functions}
    scopes: dict[str, str] = {}
    module_of_value: dict[str, str] = {}
    for node, tag in zip(contents.nodes, tree.tags, strict=True):
        proto = node.proto
        module = paths.get(tag, tag)
        if proto.name:
            scopes.setdefault(scope_path(name_scope(proto.name, proto.op_type)), module)
        for name in (*proto.input, *proto.output):
            module_of_value.setdefault(name, module)
        # A session replaces a call by the nodes of the function, which are counted.
        if node.callee == ("", "Constant") or node.callee in functions:
            continue
        names = [name for name in (*proto.input, *proto.output) if name in types.dtypes]
        open_names, is_unknown = _find_open_dimensions(map(types.shapes.get, names), axes_by_dimension)
        nodes.append(
            NodeFacts(
                name=proto.name,
                op_type=proto.op_type,
                domain=proto.domain,
                module=module,
                inputs=tuple(map(types.dtypes.get, proto.input)),
                outputs=tuple(map(types.dtypes.get, proto.output)),
                open_names=frozenset(open_names),
                has_unknown_size=is_unknown,
            )
        )
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    sums = frozenset(stated_sums(metadata))
    return GraphFacts(tuple(nodes), axes_by_dimension, sums, opsets, scopes, notes, module_of_value)


def _find_open_axes(graph: onnx.GraphProto) -> dict[str, list[str]]:
    """Return dynamic dimension → its axes in the inputs, ``input:axis``."""
    weights = {tensor.name for tensor in graph.initializer}
    axes_by_dimension: dict[str, list[str]] = {}
    for value in graph.input:
        for axis, size in enumerate(declared_shape(value.type) or ()):
            if value.name not in weights and not isinstance(size, int):
                axis_name = f"{value.name}:{axis}"
                axes_by_dimension.setdefault(size or axis_name, []).append(axis_name)
    return axes_by_dimension


def _find_open_dimensions(
    shapes: Iterable[Shape | None], dimensions: Mapping[str, Sequence[str]]
) -> tuple[set[str], bool]:
    """Return the dynamic dimensions in shapes (all dimensions for an unknown size), and True if a size is unknown."""
    names: set[str] = set()
    is_unknown = False
    for shape in shapes:
        for size in (None,) if shape is None else shape:
            if isinstance(size, int):
                continue
            size_names = {size, *_IDENTIFIER.findall(size)} & dimensions.keys() if size else set()
            names |= size_names or dimensions.keys()
            is_unknown = is_unknown or not size_names
    return names, is_unknown
