"""Reads what an ONNX file contains: its numbers, its module tree, and the module of each node.

Tries, in this order: our tags, the metadata of torch's dynamo exporter, that of onnxscript's builder, the namespace,
the scopes in node names. The first that any node has is used for the whole file and named in the result. A node without
it belongs to no module; nothing is guessed.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import onnx

from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.tagging import Coverage, name_scope, scope_path
from winml.modelkit.hierarchy.torch_modules import comes_with_torch, comes_with_transformers, hierarchy_paths
from winml.modelkit.metadata_keys import (
    BUILDER_CLASSES_KEY,
    BUILDER_SCOPES_KEY,
    CLASSES_KEY,
    MODULE_KEY,
    NAMESPACE_KEY,
    SCOPES_KEY,
    SOURCE_KEY,
    TAG_KEY,
    TREE_KEY,
)
from winml.modelkit.options import load_metadata
from winml.modelkit.records import Record, entry

TreeSource = Literal[
    "winml tags", "pkg.torch.onnx metadata", "pkg.onnxscript metadata", "namespace", "node names", "none"
]


Scope = tuple[tuple[str, str], ...]
"""Module path and class of the modules a node ran in, outermost first. A class has its package before its name where
that is known, and is ``""`` where it is unknown itself."""
Metadata = Mapping[str, str]


@dataclass(frozen=True)
class OnnxModule:
    """One module of the tree; a hierarchy module as far as the file tells."""

    path: str
    """Dotted module path; ``""`` for the root, and for a module of which only the tag is known."""
    tag: str
    class_name: str
    """``""`` where the tree is read from node names, which do not contain it."""


@dataclass(frozen=True)
class OnnxTree:
    """The modules, and the one each node belongs to."""

    source: TreeSource
    modules: tuple[OnnxModule, ...]
    """Parents before children; in the execution order stored in the file, else in the order of the nodes."""
    tags: tuple[str, ...]
    """Tag of each node, in the order the nodes were given; ``""`` where it has none."""
    coverage: Coverage
    """By source of our tags; for any other tree by the tree's source."""
    notes: tuple[str, ...] = ()


def read_tree(nodes: Sequence[onnx.NodeProto], metadata: Metadata, root: str) -> OnnxTree:
    """Read the module tree of a file.

    Args:
        nodes: Every node.
        metadata: The model's metadata.
        root: Name of the root where the tree is read from node names.
    """
    properties = [{item.key: item.value for item in node.metadata_props} for node in nodes]
    if any(TAG_KEY in node_metadata for node_metadata in properties):
        return _tagged_tree(properties, metadata)
    readers: tuple[tuple[TreeSource, Callable[[], list[Scope]]], ...] = (
        ("pkg.torch.onnx metadata", lambda: [_torch_scope(item) for item in properties]),
        ("pkg.onnxscript metadata", lambda: _absolute_scopes(map(_onnxscript_scope, properties))),
        ("namespace", lambda: _namespace_scopes([item.get(NAMESPACE_KEY, "") for item in properties])),
        ("node names", lambda: list(map(_name_scope, nodes))),
    )
    for tree_source, reader in readers:
        scopes = reader()
        if any(scopes) and (tree_source != "node names" or any(len(scope) > 1 for scope in scopes)):
            return _scoped_tree(tree_source, _hierarchy_scopes(scopes), root)
    return OnnxTree("none", (), ("",) * len(nodes), Coverage(len(nodes), 0, {}))


def _tagged_tree(properties: Sequence[Metadata], metadata: Metadata) -> OnnxTree:
    modules, notes = _recorded_modules(metadata.get(TREE_KEY))
    tags = []
    sources: Counter[str] = Counter()
    malformed = 0
    for node_metadata in properties:
        tag = node_metadata.get(TAG_KEY, "")
        if not _is_tag(tag):
            malformed += bool(tag)
            tag = ""
        tags.append(tag)
        if tag:
            sources[node_metadata.get(SOURCE_KEY) or "unknown"] += 1
            _add_module(modules, OnnxModule(node_metadata.get(MODULE_KEY, ""), tag, _class_of(tag)))
    if malformed:
        notes.append(f"{malformed} node(s) have an invalid tag and count as untagged")
    coverage = Coverage(len(tags), sources.total(), dict(sources), _count_at_root(tags))
    return OnnxTree("winml tags", tuple(modules.values()), tuple(tags), coverage, tuple(notes))


def _recorded_modules(text: str | None) -> tuple[dict[str, OnnxModule], list[str]]:
    """Return the modules in the model's metadata by tag, and notes on a damaged list."""
    if text is None:
        return {}, []
    modules: dict[str, OnnxModule] = {}
    try:
        for entry in load_metadata(text):
            if not _is_tag(entry["tag"]):
                raise ValueError("not a tag")
            _add_module(modules, OnnxModule(str(entry["path"]), entry["tag"], str(entry["class"])))
    except (ValueError, TypeError, KeyError):
        return {}, [f"{TREE_KEY} of the model is damaged; the tree was built from the node tags"]
    return modules, []


def _add_module(modules: dict[str, OnnxModule], module: OnnxModule) -> None:
    """Add a module, after the missing ones above it."""
    segments = address.parse_tag(module.tag)
    for depth in range(1, len(segments)):
        above = address.format_tag(segments[:depth])
        modules.setdefault(above, OnnxModule("", above, _class_of(above)))
    modules.setdefault(module.tag, module)


def _class_of(tag: str) -> str:
    return tag.rpartition(address.SEPARATOR)[2].partition(".")[0]


def _is_tag(text: Any) -> bool:
    return isinstance(text, str) and address.is_tag(text)


@dataclass(frozen=True)
class _ScopedModule:
    """A module as the scopes of nodes show it."""

    path: str
    qualified_class: str
    stack: tuple[str, ...]
    calls: int = 0

    @property
    def class_name(self) -> str:
        return self.qualified_class.rpartition(".")[2]

    @property
    def callers(self) -> tuple[str, ...]:
        return self.stack[-1:]

    @property
    def is_torch_nn(self) -> bool:
        return comes_with_torch(self.qualified_class.rpartition(".")[0])

    @property
    def is_transformers(self) -> bool:
        return comes_with_transformers(self.qualified_class.rpartition(".")[0])


def _hierarchy_scopes(scopes: Sequence[Scope]) -> list[Scope]:
    """Return the scopes without the modules that an export would not take into the hierarchy, and without packages."""
    modules: dict[str, _ScopedModule] = {}
    for scope in scopes:
        for position, (path, qualified_class) in enumerate(scope):
            stack = tuple(outer for outer, _ in scope[:position])
            modules.setdefault(path, _ScopedModule(path, qualified_class, stack))
    chosen = hierarchy_paths(modules.values(), "auto")
    return [tuple((path, modules[path].class_name) for path, _ in scope if path in chosen) for scope in scopes]


def _scoped_tree(tree_source: TreeSource, scopes: Sequence[Scope], root: str) -> OnnxTree:
    """Build the tree from scopes, by the same rules as tags."""
    classes: dict[str, str] = {}
    parents: dict[str, str | None] = {}
    for scope in scopes:
        above = None
        for path, class_name in scope:
            # The first call decides, as in a trace; a parent always comes before its children.
            classes.setdefault(path, class_name)
            parents.setdefault(path, above)
            above = path
    tags = _assign_tags(classes, parents, root)
    modules = tuple(OnnxModule(path, tags[path], class_name) for path, class_name in classes.items())
    node_tags = tuple(tags[scope[-1][0]] if scope else "" for scope in scopes)
    tagged = sum(map(bool, node_tags))
    sources: dict[str, int] = {tree_source: tagged} if tagged else {}
    coverage = Coverage(len(node_tags), tagged, sources, _count_at_root(node_tags))
    return OnnxTree(tree_source, modules, node_tags, coverage)


def _count_at_root(tags: Iterable[str]) -> int:
    return sum(address.depth(tag) == 1 for tag in tags if tag)


def _assign_tags(classes: Mapping[str, str], parents: Mapping[str, str | None], root: str) -> dict[str, str]:
    families: dict[str | None, list[str]] = defaultdict(list)
    for path in classes:
        families[parents[path]].append(path)
    tags: dict[str, str] = {}
    for parent in [None, *classes]:
        family = families[parent]
        if all(classes[path] for path in family):
            segments = address.sibling_segments([(path, classes[path]) for path in family])
        else:
            # Without a class, the segment is the module's own name, which is unique under one parent.
            segments = [path.removeprefix(f"{parent}.").replace(address.SEPARATOR, "_") or root for path in family]
        for path, segment in zip(family, segments, strict=True):
            tags[path] = (tags[parent] if parent is not None else "") + address.format_tag([segment])
    return tags


def _torch_scope(metadata: Metadata) -> Scope:
    """Read torch's two lists; the last entry is the node itself."""
    scope = _listed_scope(metadata.get(SCOPES_KEY, ""), metadata.get(CLASSES_KEY, ""))[:-1]
    return tuple(level for level in scope if level[0] != _NO_MODULE)


_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""Specified: what torch's passes write where the module of a node is unknown (torch/_export/passes)."""


def _onnxscript_scope(metadata: Metadata) -> Scope:
    """Read the two lists of onnxscript's builder: the name of each module inside the one before, and its class."""
    return _listed_scope(metadata.get(BUILDER_SCOPES_KEY, ""), metadata.get(BUILDER_CLASSES_KEY, ""))


def _listed_scope(paths_text: str, classes_text: str) -> Scope:
    paths, classes = _python_list(paths_text), _python_list(classes_text)
    return tuple(zip(paths, classes, strict=True)) if len(paths) == len(classes) else ()


def _absolute_scopes(scopes: Iterable[Scope]) -> list[Scope]:
    """Return scopes with module paths instead of names; the outermost module that all nodes share is the root."""
    scopes = list(scopes)
    has_root = len({scope[0] for scope in scopes if scope}) == 1
    found: list[Scope] = []
    for scope in scopes:
        path, levels = "", [("", scope[0][1] if has_root else "")] if scope else []
        for name, class_name in scope[1:] if has_root else scope:
            path = f"{path}.{name}" if path and name else path or name
            if path and path != levels[-1][0]:
                levels.append((path, class_name))
        found.append(tuple(levels))
    return found


def _python_list(text: str) -> list[str]:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return [str(item) for item in value] if isinstance(value, list) else []


def _namespace_scopes(namespaces: Sequence[str]) -> list[Scope]:
    """Read the namespaces of torch or winml, which have paths, or of onnxscript's builder, which have names."""
    levels = [
        [_namespace_level(level) for level in text.split(address.SEPARATOR)] if text else [] for text in namespaces
    ]
    outermost = [node_levels[0] for node_levels in levels if node_levels]
    # torch writes the package before the class of the root, winml the class alone.
    is_relative = bool(outermost) and not any(name is None or (not name and "." in kind) for name, kind in outermost)
    if is_relative:
        return _absolute_scopes(tuple((name or "", kind) for name, kind in node_levels) for node_levels in levels)
    return list(map(_namespace_scope, levels))


def _namespace_level(text: str) -> tuple[str | None, str]:
    """Return name and class of a level such as ``encoder: BertEncoder``; the name is `None` if there is none."""
    name, separator, class_name = text.partition(": ")
    return (name, class_name) if separator else (None, text)


def _namespace_scope(levels: Sequence[tuple[str | None, str]]) -> Scope:
    """Read ``BertModel/encoder: BertEncoder``, or torch's ``: package.BertModel/…``, whose last level is the node."""
    scope = tuple((path, class_name) for path, class_name in levels if path is not None)
    if not levels or levels[0][0] == "":
        return tuple(level for level in scope[:-1] if level[0] != _NO_MODULE)
    return (("", levels[0][1]), *scope) if len(scope) == len(levels) - 1 else ()


def _name_scope(node: onnx.NodeProto) -> Scope:
    """Read ``/encoder/layer.0/Gelu`` as the modules ``encoder`` and ``encoder.layer.0``, under the root."""
    if address.SEPARATOR not in node.name:
        return ()
    segments = name_scope(node.name, node.op_type)
    return (("", ""), *((scope_path(segments[: depth + 1]), "") for depth in range(len(segments))))


Place = Literal["graph", "subgraph", "function"]
"""Where a node is; how often a node in a subgraph runs is unknown from the file."""

_NUMPY_NAMES = {"float": "float32", "double": "float64"}
"""ONNX's names of two types → numpy's, which FORMATS uses; the other names are equal."""


_NUMBERS_OF_WEIGHTS = ("float", "bfloat", "complex", "int4", "uint4", "int2", "uint2", "int8", "uint8")
"""How the names of the types begin in which weights are kept. Constants of other types are shapes, axes and masks."""


@dataclass(frozen=True)
class DataLocation:
    """Location of a weight's values in an external data file."""

    file: str
    """As the model file writes it, relative to its own folder."""
    end_bytes: int | None
    """End of the values in the file; None where offset or length is not given."""


@dataclass(frozen=True)
class Weight(Record):
    """One initializer or constant, as its header describes it."""

    name: str
    """Of a constant: that of the value its node makes."""
    dtype: str
    shape: tuple[int, ...]
    elements: int = field(metadata=entry(skip=True))
    """Number of stored values; for a sparse tensor the nonzero ones."""
    size_bytes: int | None
    """None where the installed onnx does not know the type."""
    location: DataLocation | None = field(metadata=entry("file", attribute="file"))
    """None: inside the file."""
    parameters: int = field(default=0, metadata=entry(before="size_bytes"))
    """Number of parameters of the floating-point model it stands for: 0 for the scales of a quantized weight, and more
    than the stored values where one holds several."""
    kind: str = field(default="", metadata=entry(skip=True))
    """Type of a parameter in a quantized weight; of others empty."""

    @property
    def has_parameters(self) -> bool:
        """Whether it is a weight or its scales, rather than a shape, an index or a mask."""
        return bool(self.kind) or not self.parameters or self.dtype.startswith(_NUMBERS_OF_WEIGHTS)


@dataclass(frozen=True)
class PlacedNode:
    """One node, its place, and the weights it reads."""

    proto: onnx.NodeProto
    place: Place
    weight_inputs: tuple[tuple[int, int], ...]
    """Positions of the inputs that are weights, each with the position of the weight in ``Contents.weights``."""
    held_weight: int | None = None
    """Position of the weight that this node holds, which is a ``Constant`` then."""
    function: tuple[str, str] | None = None
    """Domain and name of the function that contains it, if any."""

    @property
    def weights(self) -> tuple[int, ...]:
        """Positions in ``Contents.weights`` of the weights among its inputs."""
        return tuple(index for _, index in self.weight_inputs)

    @property
    def callee(self) -> tuple[str, str]:
        """Domain and name of the function it calls, if it is a call."""
        return self.proto.domain, self.proto.op_type

    @property
    def operator(self) -> str:
        """Operator with its domain, where that is not ONNX's own: ``com.microsoft.FusedMatMul``."""
        return qualified_name(self.proto.domain, self.proto.op_type)


@dataclass
class Contents:
    """The nodes and weights of the graph, its subgraphs and the functions."""

    nodes: list[PlacedNode] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)


def read_contents(model: onnx.ModelProto) -> Contents:
    """Collect the nodes and weights of a model, those of subgraphs and functions included."""
    contents = Contents()
    _add_graph(contents, model.graph, {}, "graph")
    for function in model.functions:
        visible = _add_constants(contents, function.node)
        for node in function.node:
            _add_node(contents, node, visible, "function", (function.domain, function.name))
    return contents


def _add_graph(
    contents: Contents,
    graph: onnx.GraphProto,
    outer: Mapping[str, int],
    place: Place,
    function: tuple[str, str] | None = None,
) -> None:
    visible = dict(outer)
    for weight in _read_weights(graph):
        visible[weight.name] = len(contents.weights)
        contents.weights.append(weight)
    visible.update(_add_constants(contents, graph.node))
    for node in graph.node:
        _add_node(contents, node, visible, place, function)


def _add_node(
    contents: Contents,
    node: onnx.NodeProto,
    visible: Mapping[str, int],
    place: Place,
    function: tuple[str, str] | None = None,
) -> None:
    weight_inputs = tuple((position, visible[name]) for position, name in enumerate(node.input) if name in visible)
    held = visible.get(node.output[0]) if _is_constant(node) else None
    contents.nodes.append(PlacedNode(node, place, weight_inputs, held, function))
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            _add_graph(contents, graph, visible, "function" if function else "subgraph", function)


def _add_constants(contents: Contents, nodes: Iterable[onnx.NodeProto]) -> dict[str, int]:
    """Add the constants among nodes that are weights; return their positions by name."""
    added: dict[str, int] = {}
    for node in nodes:
        weight = _held_weight(node) if _is_constant(node) else None
        if weight is not None:
            added[weight.name] = len(contents.weights)
            contents.weights.append(weight)
    return added


def _is_constant(node: onnx.NodeProto) -> bool:
    return node.op_type == "Constant" and node.domain in ("", "ai.onnx") and len(node.output) > 0


def _held_weight(node: onnx.NodeProto) -> Weight | None:
    """Return what a ``Constant`` holds where that is a weight: more than one value, in a type that weights have."""
    weight = None
    for attribute in node.attribute:
        if attribute.name == "value_floats":
            count = len(attribute.floats)
            weight = Weight(node.output[0], "float32", (count,), count, 4 * count, None, count)
        elif attribute.name == "value":
            tensor = attribute.t
            weight = _read_weight(tensor, tuple(tensor.dims), _size_bytes(tensor))
        elif attribute.name == "sparse_value":
            weight = _read_sparse(attribute.sparse_tensor)
    if weight is None or weight.elements < 2 or not weight.dtype.startswith(_NUMBERS_OF_WEIGHTS):
        return None
    return replace(weight, name=node.output[0])


def _read_weights(graph: onnx.GraphProto) -> Iterator[Weight]:
    for tensor in graph.initializer:
        size = _size_bytes(tensor)
        yield _read_weight(tensor, tuple(tensor.dims), size)
    for sparse in graph.sparse_initializer:
        yield _read_sparse(sparse)


def _read_sparse(sparse: onnx.SparseTensorProto) -> Weight:
    sizes = (_size_bytes(sparse.values), _size_bytes(sparse.indices))
    size = None if sizes[0] is None or sizes[1] is None else sizes[0] + sizes[1]
    return _read_weight(sparse.values, tuple(sparse.dims), size)


def _read_weight(tensor: onnx.TensorProto, shape: tuple[int, ...], size_bytes: int | None) -> Weight:
    return Weight(
        name=tensor.name,
        dtype=dtype_name(tensor.data_type),
        shape=shape,
        elements=math.prod(tensor.dims),
        size_bytes=size_bytes,
        location=_data_location(tensor),
        parameters=math.prod(tensor.dims),
    )


def qualified_name(domain: str, name: str) -> str:
    """Return the name of an operator or function with its domain, unless that is ONNX's own.

    >>> qualified_name("", "Gemm"), qualified_name("com.microsoft", "FusedGemm")
    ('Gemm', 'com.microsoft.FusedGemm')
    """
    return name if domain in ("", "ai.onnx") else f"{domain}.{name}"


def dtype_name(data_type: int) -> str:
    """Return numpy's name of an element type; ``type 99`` for one the installed onnx does not know."""
    try:
        name: str = onnx.TensorProto.DataType.Name(data_type).lower()
    except ValueError:
        return f"type {data_type}"
    return _NUMPY_NAMES.get(name, name)


def _size_bytes(tensor: onnx.TensorProto) -> int | None:
    """Return the size of the stored values: dimensions times bits, rounded up to bytes."""
    if tensor.data_type == onnx.TensorProto.STRING:
        return sum(len(text) for text in tensor.string_data)
    dtype = dtype_name(tensor.data_type)
    if dtype.startswith("type "):
        return None
    # The first number in the name is the width: float16, uint4, float8e4m3fn. bool has none and takes a byte.
    width = re.search(r"\d+", dtype)
    bits: int = math.prod(tensor.dims) * (int(width[0]) if width else 8)
    return (bits + 7) // 8


def _data_location(tensor: onnx.TensorProto) -> DataLocation | None:
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    length, offset = entries.get("length", ""), entries.get("offset", "0")
    end = int(offset) + int(length) if length.isdecimal() and offset.isdecimal() else None
    return DataLocation(entries.get("location", ""), end)
