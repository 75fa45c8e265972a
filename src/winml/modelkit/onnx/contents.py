"""Collection of the content of an ONNX file: nodes and weights, including subgraphs, and the types of values."""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Literal

import onnx

from winml.modelkit.errors import first_line
from winml.modelkit.records import Record, entry

Shape = tuple[int | str | None, ...]
"""Sizes; a name or None for a dimension that is not static."""
ShapeTable = Mapping[str, Shape]
"""Shape of each value by its name; a value that is absent has an unknown rank."""
Place = Literal["graph", "subgraph", "function"]
"""Location of a node; the file does not state how often a node in a subgraph runs."""

VALUE_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")
"""Fields of a tensor that hold its values. Strings are always read: no other field states their size."""

_NUMPY_NAMES = {"float": "float32", "double": "float64"}
"""ONNX's names of two types → numpy's, which FORMATS uses; the other names are equal."""


_NUMBERS_OF_WEIGHTS = ("float", "bfloat", "complex", "int4", "uint4", "int2", "uint2", "int8", "uint8")
"""Prefixes of the type names that weights have. Constants of other types are shapes, axes and masks."""


@dataclass(frozen=True)
class DataLocation:
    """Location of a weight's values in an external data file."""

    file: str
    """File name as written in the model, relative to its folder."""
    start: int
    """Offset of the values in the file; negative if the model states no number."""
    length: int | None
    """Number of bytes; None if the model does not state it, negative if it states no number."""

    @property
    def end_bytes(self) -> int | None:
        """End of the values in the file; None if offset or length is not known."""
        return None if self.length is None or min(self.start, self.length) < 0 else self.start + self.length


class Weight(Record):
    """An initializer or constant, without its values."""

    name: str
    """Name; for a constant, the name of its node's output."""
    dtype: str
    shape: tuple[int, ...]
    elements: int = field(metadata=entry(skip=True))
    """Number of stored values; for a sparse tensor the nonzero ones."""
    size_bytes: int | None
    """None if the installed onnx does not know the type."""
    location: DataLocation | None = field(metadata=entry("file", attribute="file"))
    """None: inside the file."""
    parameters: int = field(default=0, metadata=entry(before="size_bytes"))
    """Number of parameters of the floating-point model that the weight represents: 0 for the scales of a quantized
    weight, and more than the stored values if values are packed.
    """
    kind: str = field(default="", metadata=entry(skip=True))
    """Type of a parameter in a quantized weight; ``""`` for other weights."""

    @property
    def has_parameters(self) -> bool:
        """True for a weight or its scales, False for a shape, an index or a mask."""
        return bool(self.kind) or not self.parameters or self.dtype.startswith(_NUMBERS_OF_WEIGHTS)


@dataclass(frozen=True)
class PlacedNode:
    """A node, its location, and the weights read by the node."""

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
        """Positions in ``Contents.weights`` of the weights that the node reads."""
        return tuple(index for _, index in self.weight_inputs)

    @property
    def callee(self) -> tuple[str, str]:
        """Domain and name of the called function, if the node is a call."""
        return self.proto.domain, self.proto.op_type

    @property
    def operator(self) -> str:
        """Operator with its domain, unless that is ONNX's: ``com.microsoft.FusedMatMul``."""
        return qualified_name(self.proto.domain, self.proto.op_type)


@dataclass
class Contents:
    """The nodes and weights of the graph, its subgraphs and the functions."""

    nodes: list[PlacedNode] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)


def read_contents(model: onnx.ModelProto) -> Contents:
    """Collect the nodes and weights of a model, including subgraphs and functions."""
    contents = Contents()
    _add_graph(contents, model.graph, {}, "graph")
    for function in model.functions:
        visible = _add_constant_weights(contents, function.node)
        for node in function.node:
            _add_node(contents, node, visible, "function", (function.domain, function.name))
    return contents


def _add_graph(
    contents: Contents,
    graph: onnx.GraphProto,
    outer: Mapping[str, int],
    location: Place,
    function: tuple[str, str] | None = None,
) -> None:
    """Append the weights and nodes of a graph with its subgraphs; ``outer`` maps visible outer weights to positions."""
    visible = dict(outer)
    for weight in _read_weights(graph):
        visible[weight.name] = len(contents.weights)
        contents.weights.append(weight)
    visible.update(_add_constant_weights(contents, graph.node))
    for node in graph.node:
        _add_node(contents, node, visible, location, function)


def _add_node(
    contents: Contents,
    node: onnx.NodeProto,
    visible: Mapping[str, int],
    location: Place,
    function: tuple[str, str] | None = None,
) -> None:
    """Append a node, then the nodes of its subgraphs; ``visible`` maps visible weights to positions."""
    weight_inputs = tuple((position, visible[name]) for position, name in enumerate(node.input) if name in visible)
    held_weight = visible.get(node.output[0]) if _is_constant(node) else None
    contents.nodes.append(PlacedNode(node, location, weight_inputs, held_weight, function))
    for graph in subgraphs(node):
        _add_graph(contents, graph, visible, "function" if function else "subgraph", function)


def _add_constant_weights(contents: Contents, nodes: Iterable[onnx.NodeProto]) -> dict[str, int]:
    """Add the constants among nodes that are weights; return their positions by name."""
    added: dict[str, int] = {}
    for node in nodes:
        weight = _constant_weight(node) if _is_constant(node) else None
        if weight is not None:
            added[weight.name] = len(contents.weights)
            contents.weights.append(weight)
    return added


def _is_constant(node: onnx.NodeProto) -> bool:
    return node.op_type == "Constant" and not node.domain and len(node.output) > 0


def _constant_weight(node: onnx.NodeProto) -> Weight | None:
    """Return the weight in a ``Constant``: several values of a weight type; `None` for other constants."""
    weight = None
    for attribute in node.attribute:
        if attribute.name == "value_floats":
            count = len(attribute.floats)
            weight = Weight(node.output[0], "float32", (count,), count, 4 * count, None, count)
        elif attribute.name == "value":
            tensor = attribute.t
            weight = _read_weight(tensor, tuple(tensor.dims), _size_bytes(tensor))
        elif attribute.name == "sparse_value":
            weight = _read_sparse_weight(attribute.sparse_tensor)
    if weight is None or weight.elements < 2 or not weight.dtype.startswith(_NUMBERS_OF_WEIGHTS):
        return None
    return replace(weight, name=node.output[0])


def _read_weights(graph: onnx.GraphProto) -> Iterator[Weight]:
    """Yield the initializers of a graph, dense and sparse."""
    for tensor in graph.initializer:
        size = _size_bytes(tensor)
        yield _read_weight(tensor, tuple(tensor.dims), size)
    for sparse in graph.sparse_initializer:
        yield _read_sparse_weight(sparse)


def _read_sparse_weight(sparse: onnx.SparseTensorProto) -> Weight:
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
        location=data_location(tensor) if tensor.data_location == onnx.TensorProto.EXTERNAL else None,
        parameters=math.prod(tensor.dims),
    )


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs among the attributes of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def qualified_name(domain: str, name: str) -> str:
    """Return the name of an operator or function with its domain, unless that is ONNX's own.

    >>> qualified_name("", "Gemm"), qualified_name("com.microsoft", "FusedGemm")
    ('Gemm', 'com.microsoft.FusedGemm')
    """
    return f"{domain}.{name}" if domain else name


def dtype_name(data_type: int) -> str:
    """Return numpy's name of an element type; ``type 99`` for a type unknown to the installed onnx."""
    try:
        name: str = onnx.TensorProto.DataType.Name(data_type).lower()
    except ValueError:
        return f"type {data_type}"
    return _NUMPY_NAMES.get(name, name)


def _size_bytes(tensor: onnx.TensorProto) -> int | None:
    """Return the size of the stored values: dimensions times bits, rounded up to bytes; `None` for an unknown type."""
    if tensor.data_type == onnx.TensorProto.STRING:
        return sum(len(text) for text in tensor.string_data)
    dtype = dtype_name(tensor.data_type)
    if dtype.startswith("type "):
        return None
    # The first number in the name is the width: float16, uint4, float8e4m3fn. bool has none and takes a byte.
    width = re.search(r"\d+", dtype)
    bits: int = math.prod(tensor.dims) * (int(width[0]) if width else 8)
    return (bits + 7) // 8


def data_location(tensor: onnx.TensorProto) -> DataLocation:
    """Return the location of the values of an external tensor, as stated in the model."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    start, length = (
        int(text) if text.isdecimal() else -1 for text in (entries.get("offset") or "0", entries.get("length", ""))
    )
    return DataLocation(entries.get("location", ""), start, length if "length" in entries else None)


@dataclass(frozen=True)
class ValueTypes:
    """Element types and shapes of the values of a main graph."""

    dtypes: dict[str, str]
    """Element type of each tensor by its name."""
    shapes: dict[str, Shape]
    """Shape of each tensor by its name; a tensor of unknown rank is absent."""


def read_value_types(
    model: onnx.ModelProto, needed: AbstractSet[str], consequence: str
) -> tuple[ValueTypes, tuple[str, ...]]:
    """Return the element types and shapes of the values of the main graph, and a note if inference failed.

    Args:
        model: The model, with or without the values of its weights.
        needed: Names of values; shapes are inferred if the file does not declare all of them.
        consequence: Consequence of a failed inference, for the note.
    """
    declared = _declared_types(model.graph)
    if needed <= declared.shapes.keys():
        return declared, ()
    try:
        inferred = _declared_types(onnx.shape_inference.infer_shapes(model, data_prop=True).graph)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError) as error:
        return declared, (f"ONNX's shape inference failed, so {consequence}: {first_line(error)}",)
    return ValueTypes(inferred.dtypes | declared.dtypes, inferred.shapes | declared.shapes), ()


def _declared_types(graph: onnx.GraphProto) -> ValueTypes:
    """Return the types and shapes declared in a graph, including initializers."""
    tensors = [(tensor, tensor.dims) for tensor in graph.initializer]
    tensors += [(sparse.values, sparse.dims) for sparse in graph.sparse_initializer]
    types = ValueTypes(
        {tensor.name: dtype_name(tensor.data_type) for tensor, _ in tensors},
        {tensor.name: tuple(dims) for tensor, dims in tensors},
    )
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.WhichOneof("value") == "tensor_type":
            types.dtypes.setdefault(value.name, dtype_name(value.type.tensor_type.elem_type))
        if (shape := declared_shape(value.type)) is not None:
            types.shapes[value.name] = shape
    return types


def declared_shape(declared: onnx.TypeProto) -> Shape | None:
    """Return the shape of a tensor type: sizes, names of dynamic dimensions, None for an unnamed dynamic dimension.

    Returns:
        The shape; None if the rank is unknown, or the type is no tensor type.
    """
    kind = declared.WhichOneof("value")
    tensor = declared.sparse_tensor_type if kind == "sparse_tensor_type" else declared.tensor_type
    if kind not in ("tensor_type", "sparse_tensor_type") or not tensor.HasField("shape"):
        return None
    return tuple(
        dimension.dim_value if dimension.HasField("dim_value") else dimension.dim_param or None
        for dimension in tensor.shape.dim
    )


def node_signature(node: PlacedNode, opsets: Mapping[str, int]) -> str:
    """Return the operator with a digest of its attributes; subgraphs count by their nodes, defaults are ignored.

    Args:
        node: The node.
        opsets: Domain → version, as imported by its file.
    """
    digest = hashlib.blake2b(digest_size=8)
    for attribute in sorted(stated_attributes(node.proto, opsets), key=lambda entry: entry.name):
        has_graphs = attribute.HasField("g") or attribute.graphs
        digest.update(attribute.name.encode() if has_graphs else _attribute_bytes(attribute))
    return f"{node.operator} {digest.hexdigest()}"


def stated_attributes(node: onnx.NodeProto, opsets: Mapping[str, int]) -> list[onnx.AttributeProto]:
    """Return the attributes of a node that are not the defaults of its operator."""
    defaults = _default_attributes(node.op_type, node.domain, opsets.get(node.domain))
    return [entry for entry in node.attribute if defaults.get(entry.name) != _attribute_bytes(entry)]


@functools.cache
def _default_attributes(operator: str, domain: str, version: int | None) -> Mapping[str, bytes]:
    """Return the default values of an operator's optional attributes; `{}` for an unknown operator."""
    try:
        schema = onnx.defs.get_schema(operator, version or onnx.defs.onnx_opset_version(), domain)
    except onnx.defs.SchemaError:
        return {}
    return {name: _attribute_bytes(attribute.default_value) for name, attribute in schema.attributes.items()}


def _attribute_bytes(attribute: onnx.AttributeProto) -> bytes:
    """Serialize an attribute without its documentation."""
    copy = onnx.AttributeProto()
    copy.CopyFrom(attribute)
    copy.ClearField("doc_string")
    content: bytes = copy.SerializeToString(deterministic=True)
    return content
