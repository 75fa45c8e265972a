"""Weight matrices of a graph, read slab by slab from wherever they lie.

A matrix of any size is read by plain reads of consecutive rows, so that neither memory nor the page accounting of a
memory map grows with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from winml.modelkit.graph.files.stored_tensors import StoredTensor, StoredValues

__all__ = ["Slab", "WeightMatrix", "values_in_file"]

Array = NDArray[Any]

SLAB_ELEMENTS = 1 << 21
"""Chosen: 8 MB of float32 at a time in each thread; larger slabs save no time."""


class Slab(NamedTuple):
    """Some consecutive rows or columns of a matrix."""

    start: int
    """The first of them."""
    values: Array
    """The slab as it is multiplied from the left: depth × width, float32, in the memory order it is stored in."""


@dataclass(frozen=True)
class WeightMatrix:
    """A weight as it is multiplied from the left: depth (summed over) × width (output channels)."""

    tensor: ir.TensorProtocol
    is_transposed: bool
    """Whether the tensor has width × depth."""

    @property
    def depth(self) -> int:
        """Number of values each output is summed from."""
        return self._rows_and_columns[int(self.is_transposed)]

    @property
    def width(self) -> int:
        """Number of output channels."""
        return self._rows_and_columns[int(not self.is_transposed)]

    @property
    def _rows_and_columns(self) -> tuple[int, int]:
        rows, columns = self.tensor.shape.numpy()[-2:]
        return rows, columns

    @property
    def is_read_by_depth(self) -> bool:
        """Whether a slab holds some of the depth for all of the width, rather than all of the depth for some width."""
        stored = _stored_order(self.tensor)
        return self.is_transposed if stored is not None and stored.is_transposed else not self.is_transposed

    def slabs(self, multiple: int) -> list[Callable[[], Slab]]:
        """Return what reads the slabs of the matrix, in order; each may be called in a thread of its own.

        Args:
            multiple: Rows of each slab but the last are a multiple of it.
        """
        stored = _stored_order(self.tensor)
        if stored is None:
            return [self._whole]
        by_depth = self.is_read_by_depth
        rows, columns = (self.depth, self.width) if by_depth else (self.width, self.depth)
        at_once = max(1, SLAB_ELEMENTS // max(1, columns) // multiple) * multiple

        def read(start: int) -> Slab:
            count = min(at_once, rows - start)
            values = stored.values.part(start * columns, count * columns).reshape(count, columns)
            values = values.astype(np.float32, copy=False)
            return Slab(start, values if by_depth else values.T)

        return [partial(read, start) for start in range(0, rows, at_once)]

    def _whole(self) -> Slab:
        whole = self.tensor.numpy().reshape(self._rows_and_columns).astype(np.float32, copy=False)
        return Slab(0, whole.T if self.is_transposed else whole)


class _StoredOrder(NamedTuple):
    values: StoredValues
    is_transposed: bool
    """Whether the tensor has the axes of its stored values exchanged."""


def _stored_order(tensor: ir.TensorProtocol) -> _StoredOrder | None:
    """Return where the values of a matrix lie in a file; None where they lie in none, or are rounded."""
    if isinstance(tensor, StoredTensor) and tensor.permutation is not None:
        is_readable = len(tensor.shape) == 2 and _is_exact(tensor)
        return _StoredOrder(tensor.stored, is_transposed=True) if is_readable else None
    values = values_in_file(tensor)
    return _StoredOrder(values, is_transposed=False) if values is not None else None


def values_in_file(tensor: ir.TensorProtocol) -> StoredValues | None:
    """Return where the values of a tensor lie in a file, one after the other in its order and not rounded.

    Their dtype may be a narrower one. None where they lie in no file, or in another order.
    """
    if isinstance(tensor, StoredTensor):
        return tensor.stored if tensor.permutation is None and _is_exact(tensor) else None
    if not isinstance(tensor, ir.ExternalTensor):
        return None
    shape = tensor.shape.numpy()
    if tensor.length is not None and tensor.length != math.prod(shape) * tensor.dtype.itemsize:
        return None  # onnx_ir says what is wrong with it
    return StoredValues(Path(tensor.path), tensor.offset or 0, tensor.dtype, tuple(shape), tensor.name or "")


def _is_exact(tensor: StoredTensor) -> bool:
    """Say whether the tensor has the values that are stored, and not some rounding of them."""
    return tensor.dtype.itemsize >= tensor.stored.dtype.itemsize
