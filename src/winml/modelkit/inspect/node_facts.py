"""Reads what decides of each node whether a provider runs it: operator, element types, dynamic sizes, module."""

from __future__ import annotations

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from winml.modelkit.errors import first_line
from winml.modelkit.graph.specs import stated_sums
from winml.modelkit.hierarchy.tagging import name_scope, scope_path
from winml.modelkit.inspect.module_costs import Shape, ShapeTable, is_counted
from winml.modelkit.inspect.onnx_tree import PlacedNode, dtype_name, read_contents, read_tree


def read_shapes(model: onnx.ModelProto, nodes: Sequence[PlacedNode]) -> tuple[ShapeTable, list[str]]:
    """Return the shapes of the values of the main graph, and a note where inference failed.

    Args:
        model: The model, with or without the values of its weights.
        nodes: Its nodes.
    """
    shapes = _declared_shapes(model.graph)
    needed_names = {
        name
        for node in nodes
        if node.place == "graph" and is_counted(node.proto)
        for name in (*node.proto.input, *node.proto.output)
        if name
    }
    if needed_names <= shapes.keys():
        return shapes, []
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        return shapes, [f"ONNX's shape inference failed, so some operations are not counted: {first_line(error)}"]
    return {**_declared_shapes(inferred.graph), **shapes}, []


def _declared_shapes(graph: onnx.GraphProto) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    shapes.update({sparse.values.name: tuple(sparse.dims) for sparse in graph.sparse_initializer})
    values: Iterable[onnx.ValueInfoProto] = (*graph.input, *graph.output, *graph.value_info)
    for value in values:
        shape = declared_shape(value.type)
        if shape is not None:
            shapes[value.name] = shape
    return shapes


def declared_shape(declared: onnx.TypeProto) -> Shape | None:
    """Return the shape of a tensor type: sizes, names of open dimensions, None for an open dimension without a name.

    Returns:
        The shape; None where the rank is unknown, or it is no tensor.
    """
    kind = declared.WhichOneof("value")
    tensor = declared.sparse_tensor_type if kind == "sparse_tensor_type" else declared.tensor_type
    if kind not in ("tensor_type", "sparse_tensor_type") or not tensor.HasField("shape"):
        return None
    return tuple(
        dimension.dim_value if dimension.HasField("dim_value") else dimension.dim_param or None
        for dimension in tensor.shape.dim
    )


_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class NodeFacts:
    """What is known of one node."""

    name: str
    op_type: str
    domain: str
    """Empty for ONNX's own."""
    module: str
    """Dotted path of its module; its tag where the path is unknown, and empty where both are."""
    inputs: tuple[str | None, ...]
    """Element types as numpy calls them; None where one is unknown."""
    outputs: tuple[str | None, ...]
    open_names: frozenset[str]
    """Dynamic dimensions of the inputs of the graph that its values depend on."""
    has_unknown_size: bool = False
    """Whether a size of its values follows from no dimension of the inputs: from data, as far as is known."""

    @property
    def operator(self) -> str:
        """Operator, with its domain where that is not ONNX's own."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type


@dataclass(frozen=True)
class GraphFacts:
    """The nodes of a graph, without those that hold constants."""

    nodes: tuple[NodeFacts, ...]
    open_places: Mapping[str, Sequence[str]]
    """Dynamic dimension of the inputs → where they have it, ``input:axis``."""
    sums: frozenset[str]
    """Those of them that follow from others."""
    opsets: Mapping[str, int]
    """Domain (ONNX's own: empty) → version."""
    module_of_scope: Mapping[str, str]
    """Module path as node names have it → module."""
    notes: tuple[str, ...]

    def node_called(self, name: str, op_type: str, domain: str) -> NodeFacts:
        """Return a node as ONNX Runtime names it; one that is not of the file, or has no name of its own, is made."""
        if (node := self._by_name.get((name, op_type))) is not None:
            return node
        domain = "" if domain == "ai.onnx" else domain
        return NodeFacts(name, op_type, domain, self.module_of_name(name, op_type), (), (), frozenset())

    @functools.cached_property
    def _by_name(self) -> Mapping[tuple[str, str], NodeFacts]:
        counts = Counter(node.name for node in self.nodes)
        return {(node.name, node.op_type): node for node in self.nodes if node.name and counts[node.name] == 1}

    def module_of_name(self, name: str, op_type: str) -> str:
        """Return the module of a node that ONNX Runtime made, by its name; empty where that says nothing."""
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
    metadata = {item.key: item.value for item in model.metadata_props}
    tree = read_tree([node.proto for node in contents.nodes], metadata, model.graph.name.strip("/") or "graph")
    paths = {module.tag: module.path or module.tag for module in tree.modules}
    types, shapes, notes = _values(model, contents.nodes)
    places = _open_places(model.graph)
    nodes = []
    scopes: dict[str, str] = {}
    for node, tag in zip(contents.nodes, tree.tags, strict=True):
        proto = node.proto
        module = paths.get(tag, tag)
        if proto.name:
            scopes.setdefault(scope_path(name_scope(proto.name, proto.op_type)), module)
        if proto.op_type == "Constant" and proto.domain in ("", "ai.onnx"):
            continue
        open_names, is_unknown = _open_names((shapes.get(name, ()) for name in (*proto.input, *proto.output)), places)
        nodes.append(
            NodeFacts(
                name=proto.name,
                op_type=proto.op_type,
                domain="" if proto.domain == "ai.onnx" else proto.domain,
                module=module,
                inputs=tuple(types.get(name) for name in proto.input),
                outputs=tuple(types.get(name) for name in proto.output),
                open_names=frozenset(open_names),
                has_unknown_size=is_unknown,
            )
        )
    opsets = {"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in model.opset_import}
    sums = frozenset(stated_sums(metadata))
    return GraphFacts(tuple(nodes), places, sums, opsets, scopes, tuple(notes))


def _values(
    model: onnx.ModelProto, nodes: Iterable[PlacedNode]
) -> tuple[dict[str, str], dict[str, Shape | None], list[str]]:
    """Return element types and shapes of the values of the main graph, and a note where inference failed."""
    types, shapes = _declared(model.graph)
    requested = {name for node in nodes if node.place == "graph" for name in node.proto.output if name}
    if requested <= types.keys():
        return types, shapes, []
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        return types, shapes, [f"ONNX's shape inference failed, so some types are unknown: {first_line(error)}"]
    more_types, more_shapes = _declared(inferred.graph)
    return {**more_types, **types}, {**more_shapes, **shapes}, []


def _declared(graph: onnx.GraphProto) -> tuple[dict[str, str], dict[str, Shape | None]]:
    types = {tensor.name: dtype_name(tensor.data_type) for tensor in graph.initializer}
    shapes: dict[str, Shape | None] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.WhichOneof("value") == "tensor_type" and value.name not in types:
            types[value.name] = dtype_name(value.type.tensor_type.elem_type)
            shapes[value.name] = declared_shape(value.type)
    return types, shapes


def _open_places(graph: onnx.GraphProto) -> dict[str, list[str]]:
    weights = {tensor.name for tensor in graph.initializer}
    places: dict[str, list[str]] = {}
    for value in graph.input:
        for axis, size in enumerate(declared_shape(value.type) or ()):
            if value.name not in weights and not isinstance(size, int):
                place = f"{value.name}:{axis}"
                places.setdefault(size or place, []).append(place)
    return places


def _open_names(shapes: Iterable[Shape | None], places: Mapping[str, Sequence[str]]) -> tuple[set[str], bool]:
    """Return the dynamic dimensions that shapes depend on, all of them where a size is unknown; and whether one is."""
    names: set[str] = set()
    is_unknown = False
    for shape in shapes:
        for size in (None,) if shape is None else shape:
            if isinstance(size, int):
                continue
            found = {size, *_IDENTIFIER.findall(size)} & places.keys() if size else set()
            names |= found or places.keys()
            is_unknown = is_unknown or not found
    return names, is_unknown


# --- What does a node compute, apart from what it reads? Its operator with its attributes, in a form to compare.


def node_signature(node: PlacedNode) -> str:
    """Return the operator with a digest of its attributes; graphs count by the nodes in them, defaults not at all."""
    digest = hashlib.blake2b(digest_size=8)
    defaults = _default_attributes(node.proto.op_type, node.proto.domain)
    for attribute in sorted(node.proto.attribute, key=lambda item: item.name):
        if attribute.HasField("g") or attribute.graphs:
            digest.update(attribute.name.encode())
        elif defaults.get(attribute.name) != (text := _attribute_bytes(attribute)):
            digest.update(text)
    return f"{node.operator} {digest.hexdigest()}"


@functools.cache
def _default_attributes(operator: str, domain: str) -> Mapping[str, bytes]:
    """Return the attributes of an operator that may be left out, as they are then."""
    try:
        schema = onnx.defs.get_schema(operator, domain=domain)
    except onnx.defs.SchemaError:
        return {}
    return {name: _attribute_bytes(attribute.default_value) for name, attribute in schema.attributes.items()}


def _attribute_bytes(attribute: onnx.AttributeProto) -> bytes:
    plain = onnx.AttributeProto()
    plain.CopyFrom(attribute)
    plain.ClearField("doc_string")
    content: bytes = plain.SerializeToString(deterministic=True)
    return content
