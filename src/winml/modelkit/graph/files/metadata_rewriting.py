"""Replaces the metadata of an ONNX file and leaves every other byte unchanged.

Copies the file field by field in its wire format and rewrites only the metadata of the model and its nodes, and where
asked for the names of its data files. Fields unknown to any library are preserved, and memory does not grow with the
weights.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import onnx

from winml.modelkit.errors import InternalError
from winml.modelkit.graph.files.reading import varint, walk_fields

__all__ = ["rewrite_metadata"]

CHUNK_BYTES = 1 << 24
"""Bytes copied at a time. Chosen: larger chunks are no faster."""

_LENGTH_DELIMITED = 2
"""Specified: the wire type of messages."""
_METADATA = "metadata_props"
_HOLDS_NODES = {
    onnx.ModelProto.DESCRIPTOR: ("graph", "functions"),
    onnx.GraphProto.DESCRIPTOR: ("node",),
    onnx.FunctionProto.DESCRIPTOR: ("node",),
    onnx.NodeProto.DESCRIPTOR: ("attribute",),
    onnx.AttributeProto.DESCRIPTOR: ("g", "graphs"),
}
"""Message → fields that contain nodes."""
_HOLDS_LOCATIONS = {
    onnx.GraphProto.DESCRIPTOR: ("initializer", "sparse_initializer"),
    onnx.AttributeProto.DESCRIPTOR: ("t", "tensors", "sparse_tensor", "sparse_tensors"),
    onnx.SparseTensorProto.DESCRIPTOR: ("values", "indices"),
    onnx.TensorProto.DESCRIPTOR: ("external_data",),
}
"""Message → fields that contain names of data files."""
_LOCATION = "location"
"""Specified: the key of a data file's name."""

Metadata = Mapping[str, str]
_Span = bytes | range
"""Bytes of our own, or a range of the file."""


def rewrite_metadata(
    original: Path,
    target: Path,
    model: Metadata,
    nodes: Iterable[Metadata],
    function_nodes: Iterable[Metadata] = (),
    *,
    locations: Mapping[str, str] | None = None,
) -> None:
    """Copy a model file and replace its metadata.

    Args:
        original: A file that ``read_structure`` reads.
        target: The file to write.
        model: The metadata of the model.
        nodes: That of every node of the graph, each before the nodes of its subgraphs.
        function_nodes: That of the nodes of functions, in the order of the file.
        locations: Name of a data file → its new name; None keeps all.

    Raises:
        OSError: a file cannot be read or written.
    """
    with original.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        rewriting = _Rewriting(data, model, iter(nodes), iter(function_nodes), locations or {})
        pieces = rewriting.pieces(0, len(data), onnx.ModelProto.DESCRIPTOR)
        if next(rewriting.nodes, None) is not None or next(rewriting.function_nodes, None) is not None:
            raise InternalError(f"{original} has fewer nodes than metadata was given for")
        with target.open("wb") as out:
            for piece in pieces:
                _copy_span(data, piece, out)


def _copy_span(data: mmap.mmap, piece: _Span, out: BinaryIO) -> None:
    if isinstance(piece, bytes):
        out.write(piece)
        return
    for start in range(piece.start, piece.stop, CHUNK_BYTES):
        out.write(data[start : min(start + CHUNK_BYTES, piece.stop)])


class _Rewriting:
    def __init__(
        self,
        data: mmap.mmap,
        model: Metadata,
        nodes: Iterator[Metadata],
        function_nodes: Iterator[Metadata],
        locations: Mapping[str, str],
    ) -> None:
        self.nodes = nodes
        self.function_nodes = function_nodes
        self._data = data
        self._model = model
        self._locations = locations

    def pieces(self, start: int, end: int, message: Any, *, in_function: bool = False) -> list[_Span]:
        """Return the message between two positions with its metadata replaced."""
        if message is onnx.StringStringEntryProto.DESCRIPTOR:
            return [self._renamed_entry(start, end)]
        new_metadata = self._new_metadata(message, in_function)
        holders = _HOLDS_NODES.get(message, ())
        if self._locations:
            holders += _HOLDS_LOCATIONS.get(message, ())
        fields = message.fields_by_number
        spans: list[_Span] = []
        copied = start
        for number, wire_type, at, value, stop in walk_fields(self._data, start, end):
            field = fields.get(number)
            if field is None or wire_type != _LENGTH_DELIMITED:
                continue
            if new_metadata is not None and field.name == _METADATA:
                spans.append(range(copied, at))
                copied = stop
            elif field.name in holders:
                inner = self.pieces(
                    value, stop, field.message_type, in_function=in_function or field.name == "functions"
                )
                size = sum(map(len, inner))
                spans += [range(copied, at), varint(number << 3 | _LENGTH_DELIMITED) + varint(size), *inner]
                copied = stop
        spans.append(range(copied, end))
        if new_metadata is not None:
            spans.append(new_metadata)
        return [span for span in spans if len(span)]

    def _renamed_entry(self, start: int, end: int) -> bytes:
        """Return an entry of a tensor's external data, with the new name of its file."""
        entry = onnx.StringStringEntryProto.FromString(self._data[start:end])
        if entry.key == _LOCATION:
            entry.value = self._locations.get(entry.value, entry.value)
        return bytes(entry.SerializeToString())

    def _new_metadata(self, message: object, in_function: bool) -> bytes | None:
        """Return the new metadata of a message in wire format; None where its metadata is kept."""
        if message is onnx.ModelProto.DESCRIPTOR:
            return _serialized_metadata(onnx.ModelProto(), self._model)
        if message is not onnx.NodeProto.DESCRIPTOR:
            return None
        metadata = next(self.function_nodes if in_function else self.nodes, None)
        if metadata is None:
            raise InternalError("the file has more nodes than metadata was given for")
        return _serialized_metadata(onnx.NodeProto(), metadata)


def _serialized_metadata(message: onnx.ModelProto | onnx.NodeProto, metadata: Metadata) -> bytes:
    for key, value in metadata.items():
        message.metadata_props.add(key=key, value=value)
    return bytes(message.SerializeToString())
