"""Weight matrices of a graph, read slab by slab from wherever they lie.

A matrix of any size is read by plain reads of consecutive rows, so that neither memory nor the page accounting of a
memory map grows with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from winml.modelkit.graph.files.stored_tensors import StoredTensor, StoredValues

__all__ = ["Slab", "WeightMatrix"]

Array = NDArray[Any]

SLAB_ELEMENTS = 1 << 23
"""Chosen: 32 MB of float32 at a time; larger slabs save no time."""


class Slab(NamedTuple):
    """Some consecutive rows or columns of a matrix."""

    start: int
    """The first of them."""
    values: Array
    """The slab as it is multiplied from the left: depth × width, float32."""


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

    def slabs(self, multiple: int) -> Iterator[Slab]:
        """Yield the matrix in order.

        Args:
            multiple: Rows of each slab but the last are a multiple of it.
        """
        stored = _stored_order(self.tensor)
        if stored is None:
            whole = self.tensor.numpy().reshape(self._rows_and_columns).astype(np.float32, copy=False)
            yield Slab(0, np.ascontiguousarray(whole.T if self.is_transposed else whole))
            return
        by_depth = self.is_read_by_depth
        rows, columns = (self.depth, self.width) if by_depth else (self.width, self.depth)
        at_once = max(1, SLAB_ELEMENTS // max(1, columns) // multiple) * multiple
        for number, piece in enumerate(stored.values.pieces(at_once * columns)):
            values = piece.reshape(-1, columns).astype(np.float32, copy=False)
            yield Slab(number * at_once, values if by_depth else np.ascontiguousarray(values.T))
        assert rows * columns == stored.values.size


class _StoredOrder(NamedTuple):
    values: StoredValues
    is_transposed: bool
    """Whether the tensor has the axes of its stored values exchanged."""


def _stored_order(tensor: ir.TensorProtocol) -> _StoredOrder | None:
    """Return where the values of a matrix lie in a file, in the dtype they are read in; None where they are not."""
    if isinstance(tensor, StoredTensor):
        order = tensor.permutation
        is_matrix = len(tensor.shape) == 2
        return _StoredOrder(tensor.stored, order is not None) if is_matrix and _is_exact(tensor) else None
    if isinstance(tensor, ir.ExternalTensor):
        shape = tensor.shape.numpy()
        length = math.prod(shape) * tensor.dtype.itemsize
        if tensor.length is not None and tensor.length != length:
            return None  # onnx_ir says what is wrong with it
        values = StoredValues(Path(tensor.path), tensor.offset or 0, tensor.dtype, tuple(shape), tensor.name or "")
        return _StoredOrder(values, is_transposed=False)
    return None


def _is_exact(tensor: StoredTensor) -> bool:
    """Say whether the tensor has the values that are stored, and not some rounding of them."""
    return tensor.dtype.itemsize >= tensor.stored.dtype.itemsize
