"""Tensors whose values remain in a file until they are read or written.

A stored tensor holds a reference: file, offset, and a cast or transposition to apply. Values are read by plain reads in
pieces, so that neither memory nor the page accounting of a memory map grows with the weights. Independent of file
formats.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.errors import CheckpointError

PIECE_ELEMENTS = 1 << 20
"""Values read, cast and written at a time. Chosen: a few MB; larger pieces save no time."""
_STRIP, _ALIASED_STRIP = 32, 16
"""Columns of the copy, which are rows of the file, transposed at a time; the second number for rows of the copy that
share sets of the processor's cache. Measured, bfloat16: 151,936 × 896 110 ms, 320 ms with 8; 4096 × 4096 13 ms, 18 ms
with 32. All at once, numpy copies column by column: 50 ms for 4096 × 2048."""
_ALIASING_BYTES = 4096
"""Rows at multiples of this share cache sets. Specified: 64 sets of 64 bytes, of the first level."""


class _ValueSource(Protocol):
    """Values that a tensor refers to."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""

    @property
    def dtype(self) -> ir.DataType:
        """Element type in which the values are read."""


_SourceT = TypeVar("_SourceT", bound=_ValueSource)
_TensorT = TypeVar("_TensorT", bound="ReferringTensor[Any]")


@dataclass(frozen=True)
class StoredValues:
    """The location of a tensor's values in a file."""

    path: Path
    offset: int
    """Byte of the file at which they start."""
    dtype: ir.DataType
    shape: tuple[int, ...]
    """Row-major, without gaps."""
    key: str = ""
    """Name of the tensor in the file, for messages."""

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Number of bytes that they take."""
        return self.size * self.dtype.numpy().itemsize

    def read(self) -> Array:
        """Return all values in a new array.

        Raises:
            CheckpointError: the file became shorter.
        """
        return self.part(0, self.size).reshape(self.shape)

    def part(self, start: int, count: int) -> Array:
        """Return ``count`` values, beginning with value ``start``, in a new flat array.

        Raises:
            CheckpointError: the file became shorter.
        """
        values: Array = np.empty(count, self.dtype.numpy())
        self.read_into(values, start)
        return values

    def copy_to(self, file: BinaryIO) -> None:
        """Write the bytes of all values to ``file``, copied by the operating system if supported.

        Raises:
            CheckpointError: the file became shorter.
        """
        if self.offset + self.size_bytes > self.path.stat().st_size:
            raise self._truncation_error()
        shape = ir.Shape(self.shape)
        ir.ExternalTensor(str(self.path), self.offset, self.size_bytes, self.dtype, shape=shape, name=self.key).tofile(
            file
        )

    def pieces(self, elements: int = PIECE_ELEMENTS) -> Iterator[Array]:
        """Yield the values in order as flat arrays of at most ``elements``.

        Raises:
            CheckpointError: the file became shorter.
        """
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            for start in range(0, self.size, elements):
                piece: Array = np.empty(min(elements, self.size - start), self.dtype.numpy())
                self._fill_from(piece, file)
                yield piece

    def read_into(self, values: Array, start: int = 0) -> None:
        """Read values, beginning with value ``start``, into an existing flat array of their type.

        Raises:
            CheckpointError: the file became shorter.
        """
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset + start * values.itemsize)
            self._fill_from(values, file)

    def _fill_from(self, values: Array, file: RawIOBase) -> None:
        """Fill an array with the next bytes of a file.

        Raises:
            CheckpointError: the file ends too early.
        """
        view = values.view(np.uint8).data
        while view:
            count = file.readinto(view)
            if not count:
                raise self._truncation_error()
            view = view[count:]

    def _truncation_error(self) -> CheckpointError:
        """Return the error for a file that ends inside the tensor."""
        return CheckpointError(
            f"{self.path}: ends inside tensor {self.key!r}, but was complete when the command began",
            hint="It may have been replaced: download or save the checkpoint again.",
        )


class ReferringTensor(ir.LazyTensor, Generic[_SourceT]):
    """A tensor with values read from a source on demand, cast, and with permuted axes.

    Args:
        source: The values. dtype: Element type of the tensor; None: the source's type. permutation: Order of the
            source's axes in the tensor; None: unchanged. name: Name in the graph.
    """

    def __init__(
        self,
        source: _SourceT,
        *,
        dtype: ir.DataType | None = None,
        permutation: Sequence[int] | None = None,
        name: str | None = None,
    ) -> None:
        """Refer to the values without reading them."""
        order = tuple(permutation) if permutation is not None else tuple(range(len(source.shape)))
        shape = ir.Shape([source.shape[axis] for axis in order], frozen=True)
        super().__init__(self._read_values, dtype or source.dtype, shape, name=name)
        self.source = source
        self.permutation: tuple[int, ...] | None = None if order == tuple(sorted(order)) else order
        """Order of the source's axes in the tensor; None: unchanged."""

    def named(self: _TensorT, name: str) -> _TensorT:  # noqa: PYI019 - typing has Self from Python 3.11 on
        """Return the same values under another name."""
        return type(self)(self.source, dtype=self.dtype, permutation=self.permutation, name=name)

    def cast(self: _TensorT, dtype: ir.DataType) -> _TensorT:  # noqa: PYI019 - typing has Self from Python 3.11 on
        """Return the values in another element type; the tensor must still have the type of the source."""
        assert self.dtype == self.source.dtype  # else a rounding would be lost
        return type(self)(self.source, dtype=dtype, permutation=self.permutation, name=self.name)

    def transposed(self: _TensorT, permutation: Sequence[int], name: str | None) -> _TensorT:  # noqa: PYI019 - typing has Self from Python 3.11 on
        """Return the values with their axes in another order."""
        current = self.permutation or tuple(range(len(self.shape)))
        order = [current[axis] for axis in permutation]
        return type(self)(self.source, dtype=self.dtype, permutation=order, name=name)

    @abc.abstractmethod
    def _source_values(self) -> Array:
        """Read all values of the source."""

    def _read_values(self) -> ir.TensorProtocol:
        """Read the values of the source, with permuted axes, in the element type of the tensor."""
        values = self._source_values()
        if self.permutation is not None:
            values = _contiguous_copy(values.transpose(self.permutation))
        return ir.Tensor(self._cast_values(values), dtype=self.dtype, name=self.name)

    def _cast_values(self, values: Array) -> Array:
        """Convert values to the element type of the tensor, row-major; numbers out of range become infinite."""
        # A number too large for the type becomes infinite, as in torch; verification reports it.
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(values, dtype=self.dtype.numpy(), order="C")


class StoredTensor(ReferringTensor[StoredValues]):
    """A tensor with values in a file."""

    @property
    def stored(self) -> StoredValues:
        """Location of the values."""
        return self.source

    @property
    def identity(self) -> tuple[object, ...]:
        """A key equal for tensors with equal bytes, regardless of names."""
        return (self.source, self.dtype, self.permutation)

    def _source_values(self) -> Array:
        return self.source.read()

    def tofile(self, file: BinaryIO) -> None:
        """Write the bytes of all values. One piece is in memory at a time; a transposition needs the whole tensor."""
        if self.dtype == self.source.dtype and self.permutation is None:
            self.source.copy_to(file)
            return
        for piece in self.source.pieces() if self.permutation is None else self._transposed_pieces(self.permutation):
            file.write(self._cast_values(piece).reshape(-1).view(np.uint8).data)

    def _transposed_pieces(self, permutation: Sequence[int]) -> Iterator[Array]:
        """Yield row-major pieces of the values with permuted axes; the whole source is read."""
        values = self.source.read().transpose(permutation)
        # At least a cache line of each row of the file.
        rows = max(64, PIECE_ELEMENTS // max(1, math.prod(values.shape[1:])))
        for start in range(0, values.shape[0], rows):
            yield _contiguous_copy(values[start : start + rows])


def _contiguous_copy(values: Array) -> Array:
    """Return a row-major copy."""
    if values.ndim != 2:
        return np.ascontiguousarray(values)
    copy = np.empty_like(values, order="C")
    # As unsigned integers: numpy copies values of types it does not know, such as bfloat16, one by one.
    word_type = np.dtype(f"u{values.itemsize}") if values.itemsize <= 8 else values.dtype
    source, target = values.view(word_type), copy.view(word_type)
    width = _STRIP if copy.strides[0] % _ALIASING_BYTES else _ALIASED_STRIP
    for column in range(0, values.shape[1], width):
        strip = np.s_[:, column : column + width]
        target[strip] = source[strip]
    return copy


def values_in_file(tensor: ir.TensorProtocol) -> StoredValues | None:
    """Storage of a tensor's values in a file, contiguous in tensor order and not rounded.

    The stored dtype may be narrower. ``None`` if the values are in no file, or in another order.
    """
    if isinstance(tensor, StoredTensor):
        return tensor.stored if tensor.permutation is None and is_exact(tensor) else None
    if not isinstance(tensor, ir.ExternalTensor):
        return None
    shape = tensor.shape.numpy()
    if tensor.length is not None and tensor.length != math.prod(shape) * tensor.dtype.itemsize:
        return None  # onnx_ir reports the error
    return StoredValues(Path(tensor.path), tensor.offset or 0, tensor.dtype, tuple(shape), tensor.name or "")


def is_exact(tensor: StoredTensor) -> bool:
    """Return True if the tensor equals the stored values without rounding."""
    return tensor.dtype.itemsize >= tensor.stored.dtype.itemsize
