"""Reading and writing of protobuf's wire format: numbers, the fields of a message, and the nodes of an ONNX file.

Imports neither onnx nor protobuf: a program that runs a model lists its operators in milliseconds. Does
not interpret other content.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INLINE_LIMIT_BYTES = 2_000_000_000
"""Largest file with its weights inside. Specified: protobuf reads no message of 2**31 bytes. Chosen: 7 % less, so that
a later step can add to the file."""
_VARINT, _FIXED64, LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
"""Specified: the wire types of protobuf."""
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MODEL_GRAPH, _GRAPH_NODE = 7, 1
_NODE_INPUT, _NODE_OUTPUT, _NODE_OPERATOR, _NODE_DOMAIN = 1, 2, 4, 7
"""Specified by onnx.proto: numbers of fields."""


class WireError(ValueError):
    """The bytes are not a protobuf message.

    Attributes:
        cut_off: Whether a field of the model itself extends past the end of the file.
    """

    def __init__(self, *, cut_off: bool = False) -> None:
        """State whether the file ends too early."""
        super().__init__()
        self.cut_off = cut_off


@dataclass(frozen=True)
class NodeSummary:
    """Operator and values of a node."""

    operator: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def varint(number: int) -> bytes:
    """Return a number in protobuf's encoding: seven bits per byte, the lowest first, with the high bit except in the
    last.

    >>> varint(300).hex()
    'ac02'
    """
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def walk_fields(data: mmap.mmap | bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the fields of a message: number, wire type, start of the field, start and end of its value.

    The last field may extend past ``end``; the caller must check that.

    Raises:
        WireError: the bytes are no message.
    """
    position = start
    while position < end:
        key, value = _read_varint(data, position, end)
        number, wire_type = key >> 3, key & 7
        if number == 0:
            raise WireError
        if wire_type == _VARINT:
            stop = _read_varint(data, value, end)[1]
        elif wire_type == LENGTH_DELIMITED:
            length, value = _read_varint(data, value, end)
            stop = value + length
        elif wire_type in _FIXED_BYTES:
            stop = value + _FIXED_BYTES[wire_type]
        else:
            raise WireError
        yield number, wire_type, position, value, stop
        position = stop


def node_summaries(path: Path) -> list[NodeSummary]:
    """Return the nodes of the main graph of an ONNX file, in order; bodies of functions and subgraphs are omitted.

    Raises:
        OSError: the file cannot be read.
        WireError: the file is no ONNX file.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return [_summarize_node(data, *node) for node in _find_messages(data, 0, len(data), _MODEL_GRAPH, _GRAPH_NODE)]


_HALF_FLOATS = (10, 16)
"""Specified by onnx.proto: FLOAT16 and BFLOAT16."""
_MODEL_FUNCTION, _FUNCTION_NODE = 25, 7
_GRAPH_INITIALIZER, _GRAPH_INPUT = 5, 11
_VALUE_TYPE, _TYPE_TENSOR, _TENSOR_ELEMENT = 2, 1, 1
_TENSOR_DATA_TYPE = 2
_NODE_ATTRIBUTE = 5
_ATTRIBUTE_NAME, _ATTRIBUTE_INT, _ATTRIBUTE_TENSOR, _ATTRIBUTE_GRAPH = 1, 3, 5, 6
_DTYPE_ATTRIBUTES = (b"to", b"dtype")
_HALF_FIELDS = tuple(
    bytes([number << 3, dtype]) for number in (_TENSOR_DATA_TYPE, _ATTRIBUTE_INT) for dtype in _HALF_FLOATS
)
"""Fields in which a node states one of the two half-precision types: in a tensor, or as an integer attribute."""


def has_half_floats(model: str | bytes) -> bool:
    """Return True if a tensor or value of a model is float16 or bfloat16; False for an unreadable model.

    Args:
        model: Path of an ONNX file, or its bytes.
    """
    try:
        if isinstance(model, bytes):
            return _model_has_halves(model)
        with Path(model).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _model_has_halves(data)
    except (OSError, ValueError, IndexError):  # a field may extend past the end
        return False


def _model_has_halves(data: mmap.mmap | bytes) -> bool:
    """Return True if a graph or a function of a model has half-precision values."""
    end = len(data)
    nodes = _find_messages(data, 0, end, _MODEL_FUNCTION, _FUNCTION_NODE)
    return any(_graph_has_halves(data, *graph) for graph in _find_messages(data, 0, end, _MODEL_GRAPH)) or any(
        _node_has_halves(data, *node) for node in nodes
    )


def _graph_has_halves(data: mmap.mmap | bytes, start: int, end: int) -> bool:
    """Return True if an initializer, an input or a node of a graph is half-precision."""
    weights = _find_messages(data, start, end, _GRAPH_INITIALIZER)
    inputs = _find_messages(data, start, end, _GRAPH_INPUT, _VALUE_TYPE, _TYPE_TENSOR)
    return (
        any(_find_varint(data, *weight, _TENSOR_DATA_TYPE) in _HALF_FLOATS for weight in weights)
        or any(_find_varint(data, *tensor, _TENSOR_ELEMENT) in _HALF_FLOATS for tensor in inputs)
        or any(_node_has_halves(data, *node) for node in _find_messages(data, start, end, _GRAPH_NODE))
    )


def _node_has_halves(data: mmap.mmap | bytes, start: int, end: int) -> bool:
    """Return True if a node creates half-precision values: by a dtype attribute, a constant, or in a subgraph."""
    if all(data.find(field, start, end) < 0 for field in _HALF_FIELDS):
        return False
    return any(
        _attribute_has_halves(data, *attribute) for attribute in _find_messages(data, start, end, _NODE_ATTRIBUTE)
    )


def _attribute_has_halves(data: mmap.mmap | bytes, start: int, end: int) -> bool:
    """Return True if an attribute has a half-precision dtype, tensor or subgraph."""
    name = next((data[value:stop] for value, stop in _find_messages(data, start, end, _ATTRIBUTE_NAME)), b"")
    return (
        (name in _DTYPE_ATTRIBUTES and _find_varint(data, start, end, _ATTRIBUTE_INT) in _HALF_FLOATS)
        or any(
            _find_varint(data, *tensor, _TENSOR_DATA_TYPE) in _HALF_FLOATS
            for tensor in _find_messages(data, start, end, _ATTRIBUTE_TENSOR)
        )
        or any(_graph_has_halves(data, *graph) for graph in _find_messages(data, start, end, _ATTRIBUTE_GRAPH))
    )


def _find_varint(data: mmap.mmap | bytes, start: int, end: int, requested: int) -> int | None:
    """Return the value of a varint field; ``None`` if the message does not have the field.

    Args:
        data: The file.
        start: First byte of the message.
        end: End of the message.
        requested: Number of the field.
    """
    fields = walk_fields(data, start, end)
    return next(
        (
            _read_varint(data, value, stop)[0]
            for number, wire_type, _, value, stop in fields
            if number == requested and wire_type == _VARINT
        ),
        None,
    )


def _find_messages(data: mmap.mmap | bytes, start: int, end: int, *path: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of the messages on a path of fields through a message."""
    number, *remaining_path = path
    for field_number, wire_type, _, value, stop in walk_fields(data, start, end):
        if field_number == number and wire_type == LENGTH_DELIMITED:
            if remaining_path:
                yield from _find_messages(data, value, stop, *remaining_path)
            else:
                yield value, stop


def _summarize_node(data: mmap.mmap | bytes, start: int, end: int) -> NodeSummary:
    """Parse operator, domain, inputs and outputs of a node."""
    texts: dict[int, list[str]] = {number: [] for number in (_NODE_INPUT, _NODE_OUTPUT, _NODE_OPERATOR, _NODE_DOMAIN)}
    for number, _, _, value, stop in walk_fields(data, start, end):
        if number in texts:
            texts[number].append(data[value:stop].decode("utf-8", "replace"))
    last = {number: next(reversed(texts[number]), "") for number in (_NODE_OPERATOR, _NODE_DOMAIN)}
    return NodeSummary(last[_NODE_OPERATOR], last[_NODE_DOMAIN], tuple(texts[_NODE_INPUT]), tuple(texts[_NODE_OUTPUT]))


def _read_varint(data: mmap.mmap | bytes, position: int, end: int) -> tuple[int, int]:
    """Return a number (seven bits per byte, the lowest first) and the next position.

    Raises:
        WireError: the number does not end, or is too long.
    """
    number = shift = 0
    while position < end:
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7
        if shift > 63:
            raise WireError
    raise WireError
