"""Location of weight values in an ONNX file, and comparison of them without loading.

Memory does not grow with the weights; values in data files are located by the references of the model. Values are read
in pieces, at most two at a time.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx

from winml.modelkit.errors import InputError
from winml.modelkit.onnx.contents import data_location
from winml.modelkit.onnx.contexts import proto_graphs, proto_nodes
from winml.modelkit.onnx.files.reading import check_data_file, read_referring
from winml.modelkit.progress import count_progress
from winml.modelkit.words import size_words

PIECE_BYTES = 1 << 22
"""Read and compared at a time. Chosen: larger pieces save no time."""


@dataclass(frozen=True)
class StoredBytes:
    """The bytes of one initializer, in a file."""

    path: Path
    start: int = 0
    length: int = 0
    """Offset of the values in the file."""
    inline: bytes = b""
    """The values themselves, if the file is not read for them."""

    @property
    def size_bytes(self) -> int:
        """Number of bytes."""
        return len(self.inline) + self.length

    def read(self) -> Iterator[bytes]:
        """Yield the bytes in pieces of ``PIECE_BYTES``, the last one shorter.

        Raises:
            InputError: the file is cut off.
        """
        if not self.length:
            yield self.inline
            return
        with self.path.open("rb") as file:
            file.seek(self.start)
            remaining = self.length
            while remaining:
                piece = file.read(min(remaining, PIECE_BYTES))
                if not piece:
                    raise InputError(
                        f"{self.path} is cut off: it ends before its last weight",
                        hint="Export or download the model again.",
                    )
                remaining -= len(piece)
                yield piece


def weight_tensors(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Yield name and tensor of initializers, and first output and tensor of constants and other nodes that hold one.

    Subgraphs and functions are included.
    """
    for graph in proto_graphs(model):
        yield from ((tensor.name, tensor) for tensor in graph.initializer)
    for node in proto_nodes(model):
        yield from ((node.output[0], entry.t) for entry in node.attribute if entry.HasField("t") and node.output)


def _locate_weights(path: Path) -> dict[str, list[StoredBytes]]:
    """Return name → locations of the values of :func:`weight_tensors`, several of which may have one name.

    Args:
        path: The ONNX file.

    Raises:
        InputError: a data file is missing, shorter than the model states, or outside of its folder.
    """
    places: defaultdict[str, list[StoredBytes]] = defaultdict(list)
    for name, tensor in weight_tensors(read_referring(path, initializers_only=True)):
        is_external = tensor.data_location == onnx.TensorProto.EXTERNAL
        places[name].append(
            locate_external(path, tensor) if is_external else StoredBytes(path, inline=_inline_bytes(tensor))
        )
    return places


def _inline_bytes(tensor: onnx.TensorProto) -> bytes:
    """Return the bytes of values inside the model; typed fields are serialized without name and documentation."""
    if tensor.HasField("raw_data"):
        raw: bytes = tensor.raw_data
        return raw
    if tensor.string_data:
        return b"".join(b"%d:%s" % (len(text), text) for text in tensor.string_data)
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    copy.ClearField("name")
    copy.ClearField("doc_string")
    content: bytes = copy.SerializeToString(deterministic=True)
    return content


def locate_external(path: Path, tensor: onnx.TensorProto) -> StoredBytes:
    """Return the location of the values of a tensor in a data file.

    Raises:
        InputError: the data file is missing, shorter than the model states, or outside of its folder.
    """
    location = data_location(tensor)
    if location.start < 0 or (location.length is not None and location.length < 0):
        raise InputError(
            f"{path}: the place of weight {tensor.name!r} in data file {location.file!r} is no number",
            hint="Create the file again.",
        )
    if location.file == path.name and location.length is not None:
        return StoredBytes(path, location.start, location.length)  # in the model itself
    data_file = check_data_file(path.parent, location.file, location.start + (location.length or 0))
    if data_file.problem is not None:
        raise InputError(
            f"{path}: data file {location.file!r} is {data_file.problem}",
            hint="Put the data file beside the model, as it was written.",
        )
    size = (data_file.size_bytes or 0) - location.start if location.length is None else location.length
    return StoredBytes(data_file.path, location.start, size)


def _have_equal_bytes(left: StoredBytes, right: StoredBytes) -> bool:
    """Return True if two initializers of equal type and shape have equal bytes; stops at the first difference."""
    if left == right:
        return True  # both models refer to one data file
    if left.size_bytes != right.size_bytes:
        return False
    if not left.length or not right.length:
        return b"".join(left.read()) == b"".join(right.read())
    return all(left_piece == right_piece for left_piece, right_piece in zip(left.read(), right.read(), strict=True))


def _bytes_digest(stored: StoredBytes) -> str:
    """Return a digest of the stored values."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in stored.read():
        digest.update(piece)
    return digest.hexdigest()


class WeightEquality:
    """Compares the weights of two files; for renamed weights, digests are cached."""

    def __init__(self, before: Path, after: Path) -> None:
        """Locate the weights of both files.

        Raises:
            InputError: a data file is missing, shorter than its model states, or outside of its folder.
        """
        self._before, self._after = _locate_weights(before), _locate_weights(after)
        self._digests: dict[StoredBytes, str] = {}
        located = (*self._before.values(), *self._after.values())
        self._total = sum(stored.size_bytes for several in located for stored in several)
        self._compared = 0

    def are_equal(self, before: str, after: str) -> bool:
        """Return True if two weights of one type and shape, by their names, have the same values."""
        left, right = self._before.get(before, []), self._after.get(after, [])
        if len(left) != len(right):
            return False
        compared, total = size_words(self._compared), size_words(self._total)
        count_progress(self._compared, self._total, f"{compared} of {total} compared")
        self._compared = min(self._compared + sum(stored.size_bytes for stored in (*left, *right)), self._total)
        if before == after:
            return all(map(_have_equal_bytes, left, right))
        pairs = zip(left, right, strict=True)
        return all(a.size_bytes == b.size_bytes and self._cached_digest(a) == self._cached_digest(b) for a, b in pairs)

    def _cached_digest(self, stored: StoredBytes) -> str:
        """Return the digest of stored values, computed once."""
        if stored not in self._digests:
            self._digests[stored] = _bytes_digest(stored)
        return self._digests[stored]
