"""Reading of the header of a GGUF file: metadata and the table of tensors.

Every count, length and offset is compared with the size of the file before use: the libraries that read the file
afterwards use counts as loop limits and sizes of memory.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.errors import CheckpointError, UsageError
from winml.modelkit.onnx.files.foreign_names import ForeignNameError, refuse_special_file

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
"""Supported versions of the format, in the byte order of x86; transformers does not read other files either."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Specified: number of a type of metadata → its code in ``struct``."""
_STRING, _ARRAY = 8, 9
_LEAST_ENTRY_BYTES = {"metadata": 8 + 4 + 1, "tensors": 8 + 4 + 4 + 8}
"""Table → minimum bytes of an entry: the sum of its parts of fixed size."""
_MOST_AXES = 4
"""Specified: maximum axes of a tensor."""
_ALIGNMENT = 32
"""Specified: alignment of the values if ``general.alignment`` is not set."""


@dataclass(frozen=True)
class GgufTensor:
    """An entry of the table of tensors."""

    name: str
    shape: tuple[int, ...]
    """Shape in transformers' order: the contiguous axis is the last."""
    type_name: str
    """Name of the type, such as ``Q4_K``."""
    offset: int
    """Byte of the file at which the values start."""
    size_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The header of a file that contains every announced value."""

    metadata: Mapping[str, Any]
    """Key → number, text or bool; ``None`` for an array."""
    tensors: tuple[GgufTensor, ...]


class _Cursor:
    """A position in the header that never leaves the file."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self._content = content
        self._position = 0

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: not a GGUF file, or damaged: {problem}", hint="Download the file again.")

    @property
    def position(self) -> int:
        return self._position

    def skip(self, count: int, label: str) -> int:
        """Advance, and return the start of the skipped bytes.

        Raises:
            CheckpointError: the file ends before.
        """
        start = self._position
        if count > len(self._content) - start:
            raise self.error(f"{label} takes {count} bytes, but the file ends {len(self._content) - start} bytes later")
        self._position = start + count
        return start

    def read_number(self, code: str, label: str) -> Any:
        start = self.skip(struct.calcsize(code), label)
        return struct.unpack_from(f"<{code}", self._content, start)[0]

    def read_text(self, label: str) -> str:
        size = self.read_number("Q", label)
        start = self.skip(size, label)
        try:
            return self._content[start : start + size].decode()
        except UnicodeDecodeError:
            raise self.error(f"{label} is not UTF-8 text") from None

    def read_count(self, label: str, least_bytes: int) -> int:
        """Return a number of entries for which the rest of the file has room.

        Raises:
            CheckpointError: the rest of the file is shorter.
        """
        number: int = self.read_number("Q", label)
        if number * least_bytes > len(self._content) - self._position:
            raise self.error(f"{label} is {number}, for which a file of {len(self._content)} bytes has no room")
        return number

    def read_value(self, label: str) -> Any:
        """Return a value of the metadata; ``None`` for an array, which is skipped.

        Raises:
            CheckpointError: the type is unknown, or the file ends before.
        """
        kind = self.read_number("I", f"the type of {label}")
        if kind in _SCALARS:
            return self.read_number(_SCALARS[kind], label)
        if kind == _STRING:
            return self.read_text(label)
        if kind != _ARRAY:
            raise self.error(f"{label} has the unknown type {kind}")
        element_kind = self.read_number("I", f"the type of {label}")
        if element_kind in _SCALARS:
            size = struct.calcsize(_SCALARS[element_kind])
            self.skip(self.read_count(f"the length of {label}", size) * size, label)
        elif element_kind == _STRING:
            for _ in range(self.read_count(f"the length of {label}", 8)):
                self.skip(self.read_number("Q", label), label)
        else:
            raise self.error(f"{label} is an array of the type {element_kind}, expected numbers or texts")
        return None


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises:
        UsageError: the package ``gguf``, which lists the types of tensors, is not installed.
        CheckpointError: the file is damaged, or announces more values than it contains; names the key or tensor.
    """
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise UsageError(
            f"{path}: reading a GGUF file needs the package gguf, which is not installed",
            hint="pip install 'winml-modelkit[gguf]'",
        ) from error
    sizes = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    try:
        refuse_special_file(path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _parse_header(_Cursor(path, content), sizes, len(content))
    except (OSError, ForeignNameError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path}: not a GGUF file: {error}", hint="Download the file again.") from error


def _parse_header(cursor: _Cursor, sizes: Mapping[int, tuple[str, int, int]], file_size: int) -> GgufHeader:
    """Parse the header, and compare every announced value with the size of the file.

    Raises:
        CheckpointError: the header is malformed or truncated.
    """
    if (magic := struct.pack("<I", cursor.read_number("I", "the magic number"))) != _MAGIC:
        raise cursor.error(f"it begins with {magic!r}")
    if (version := cursor.read_number("I", "the version")) not in _VERSIONS:
        raise cursor.error(f"its version is {version}, expected {' or '.join(map(str, _VERSIONS))}")
    tensor_count = cursor.read_count("the number of tensors", _LEAST_ENTRY_BYTES["tensors"])
    metadata: dict[str, Any] = {}
    for _ in range(cursor.read_count("the number of metadata keys", _LEAST_ENTRY_BYTES["metadata"])):
        key = cursor.read_text("a metadata key")
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} occurs twice")
        metadata[key] = cursor.read_value(f"metadata key {key!r}")
    entries = [_read_entry(cursor, sizes) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {alignment!r}, expected a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        type_name, values, block_bytes = sizes[kind]
        count = math.prod(shape)
        size_bytes = count // values * block_bytes
        if name in tensors:
            raise cursor.error(f"tensor {name!r} occurs twice")
        if 0 in shape or not shape or shape[-1] % values:
            raise cursor.error(f"tensor {name!r} of shape {list(shape)} does not consist of {type_name} values")
        if start + offset + size_bytes > file_size:
            raise cursor.error(
                f"truncated: tensor {name!r} ends at byte {start + offset + size_bytes}, the file has {file_size}"
            )
        tensors[name] = GgufTensor(name, shape, type_name, start + offset, size_bytes)
    return GgufHeader(metadata, tuple(tensors.values()))


def _read_entry(cursor: _Cursor, sizes: Mapping[int, tuple[str, int, int]]) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape, number of the type and offset of the next tensor.

    Raises:
        CheckpointError: the rank or the type is unknown, or the file ends before.
    """
    name = cursor.read_text("the name of a tensor")
    axes = cursor.read_number("I", f"the rank of tensor {name!r}")
    if axes > _MOST_AXES:
        raise cursor.error(f"tensor {name!r} has {axes} axes, expected at most {_MOST_AXES}")
    shape = tuple(cursor.read_number("Q", f"the shape of tensor {name!r}") for _ in range(axes))
    kind = cursor.read_number("I", f"the type of tensor {name!r}")
    if kind not in sizes:
        raise cursor.error(f"tensor {name!r} has the unknown type {kind}")
    return name, tuple(reversed(shape)), kind, cursor.read_number("Q", f"the offset of tensor {name!r}")
