"""Finds where the values of the initializers of an ONNX file lie, and compares them without holding them.

Walks the wire format of the file, so that memory does not grow with the weights; values in data files are found by what
the model says of them. Values are read in pieces, two at a time at most.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from winml.modelkit.errors import InputError
from winml.modelkit.graph.files.external_data import check_data_file
from winml.modelkit.graph.files.reading import walk_fields

__all__ = ["StoredBytes", "WeightEquality", "bytes_digest", "have_equal_bytes", "locate_initializers"]

PIECE_BYTES = 1 << 22
"""Read and compared at a time. Chosen: larger pieces save no time."""

_GRAPH = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = onnx.GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
_NAME = onnx.TensorProto.DESCRIPTOR.fields_by_name["name"].number
_RAW_DATA = onnx.TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number
_TYPED_DATA = {
    onnx.TensorProto.DESCRIPTOR.fields_by_name[name].number
    for name in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
}


@dataclass(frozen=True)
class StoredBytes:
    """The bytes of one initializer, in a file."""

    path: Path
    pieces: tuple[tuple[int, int], ...]
    """Start and length of what holds the values, in order; usually one."""
    is_raw: bool = True
    """Whether these are the values as in memory; otherwise as protobuf writes numbers."""

    @property
    def size_bytes(self) -> int:
        """Number of bytes."""
        return sum(length for _, length in self.pieces)

    def read(self) -> Iterator[bytes]:
        """Yield the bytes in pieces of ``PIECE_BYTES``, the last one shorter."""
        with self.path.open("rb") as file:
            for start, length in self.pieces:
                file.seek(start)
                left = length
                while left:
                    piece = file.read(min(left, PIECE_BYTES))
                    if not piece:
                        raise InputError(f"{self.path} is cut off: it ends before the weights it is to hold")
                    left -= len(piece)
                    yield piece


def locate_initializers(path: Path, structure: onnx.ModelProto) -> dict[str, StoredBytes]:
    """Return where the values of every initializer of the main graph lie, by name.

    Args:
        path: The ONNX file.
        structure: The same file, read without the values of its weights.

    Raises:
        InputError: a data file is missing, shorter than the model says, or outside of its folder.
    """
    places = _places_inside(path)
    for tensor in structure.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            places[tensor.name] = _place_outside(path, tensor)
    return places


def _places_inside(path: Path) -> dict[str, StoredBytes]:
    places: dict[str, StoredBytes] = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for number, _, _, start, stop in walk_fields(data, 0, len(data)):
            if number != _GRAPH:
                continue
            for inner, _, _, tensor_start, tensor_stop in walk_fields(data, start, stop):
                if inner == _INITIALIZER:
                    name, place = _place_of_tensor(path, data, tensor_start, tensor_stop)
                    places[name] = place
    return places


def _place_of_tensor(path: Path, data: mmap.mmap, start: int, stop: int) -> tuple[str, StoredBytes]:
    name, raw, typed = "", [], []
    for number, _, _, value, end in walk_fields(data, start, stop):
        if number == _NAME:
            name = data[value:end].decode()
        elif number == _RAW_DATA:
            raw.append((value, end - value))
        elif number in _TYPED_DATA:
            typed.append((value, end - value))
    return name, StoredBytes(path, tuple(raw or typed), is_raw=bool(raw) or not typed)


def _place_outside(path: Path, tensor: onnx.TensorProto) -> StoredBytes:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    offset = int(entries.get("offset") or 0)
    length = entries.get("length")
    found = check_data_file(path.parent, entries.get("location", ""), offset + int(length or 0))
    if found.problem is not None:
        raise InputError(
            f"{path}: data file {entries.get('location', '')!r} is {found.problem}",
            hint="Put the data file beside the model, as it was written.",
        )
    size = int(length) if length is not None else (found.size_bytes or 0) - offset
    return StoredBytes(found.path, ((offset, size),))


def have_equal_bytes(left: StoredBytes, right: StoredBytes) -> bool:
    """Say whether two initializers of one type and shape have the same values; stops at the first difference."""
    if left == right:
        return True  # both models name one data file
    if left.size_bytes != right.size_bytes or left.is_raw != right.is_raw:
        return False
    if len(left.pieces) != len(right.pieces):
        return bytes_digest(left) == bytes_digest(right)
    pairs = zip(left.read(), right.read(), strict=True)
    return all(
        np.array_equal(np.frombuffer(first, np.uint8), np.frombuffer(second, np.uint8)) for first, second in pairs
    )


def bytes_digest(place: StoredBytes) -> str:
    """Return a digest of the values as they are stored."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in place.read():
        digest.update(piece)
    return digest.hexdigest()


class WeightEquality:
    """Says which weights of two files have the same values; of one whose name changed a digest is kept."""

    def __init__(self, before: Mapping[str, StoredBytes], after: Mapping[str, StoredBytes]) -> None:
        """Take where the weights of both files lie, by name."""
        self._before, self._after = before, after
        self._digests: dict[StoredBytes, str] = {}

    def are_equal(self, before: str, after: str) -> bool:
        """Say whether two weights of one type and shape, by their names, have the same values."""
        left, right = self._before.get(before), self._after.get(after)
        if left is None or right is None:
            return left is right  # a weight of a subgraph or a constant: its node is compared
        if before == after:
            return have_equal_bytes(left, right)
        return left.size_bytes == right.size_bytes and self._digest(left) == self._digest(right)

    def _digest(self, place: StoredBytes) -> str:
        if place not in self._digests:
            self._digests[place] = bytes_digest(place)
        return self._digests[place]
