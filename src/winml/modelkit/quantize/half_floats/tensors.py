"""Tensors that become 16-bit floating point when they are written.

A finite value beyond the range of float16 becomes the end of the range, and one that would round to zero the nearest
that is not, so that masks stay finite and nothing is divided by zero. How many were beyond the range is counted.
Infinity, which masks are made of, stays; a weight with NaN is refused while it is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from winml.modelkit.quantize.weight_checks import WeightUse
from winml.modelkit.quantize.weight_only.weight_matrices import values_in_file

__all__ = ["HalfTensor", "clipped_values"]

Array = NDArray[Any]

HALF_END = float(np.finfo(np.float16).max)
HALF_STEP = float(np.finfo(np.float16).smallest_subnormal)


class HalfTensor(ir.LazyTensor):
    """A float32 tensor as float16 or bfloat16; nothing is read until it is written."""

    def __init__(self, tensor: ir.TensorProtocol, dtype: ir.DataType, name: str, use: WeightUse) -> None:
        """Refer to the tensor; ``use`` says of which weight, for messages."""
        super().__init__(self._read, dtype, ir.Shape(tensor.shape.numpy(), frozen=True), name=name)
        self._tensor32 = tensor
        self._use = use
        self.clipped = 0
        """How many values were beyond the range when the tensor was read last."""

    def tofile(self, file: BinaryIO) -> None:
        """Write the bytes of all values, one piece in memory at a time where they lie in a file.

        Raises:
            QuantizeError: there is NaN among them.
        """
        self.clipped = 0
        for piece in self._pieces():
            file.write(np.ascontiguousarray(self._narrowed(piece)).view(np.uint8).data)

    def _pieces(self) -> Iterator[Array]:
        stored = values_in_file(self._tensor32)
        if stored is None:
            yield self._tensor32.numpy().reshape(-1)
        else:
            yield from (piece.astype(np.float32, copy=False) for piece in stored.pieces())

    def _read(self) -> ir.TensorProtocol:
        self.clipped = 0
        values = self._narrowed(self._tensor32.numpy())
        return ir.Tensor(np.ascontiguousarray(values), dtype=self.dtype, name=self.name)

    def _narrowed(self, values: Array) -> Array:
        if self._tensor32.size > 1:  # a single one may stand for what is missing
            self._use.refuse_nan(values)
        if self.dtype == ir.DataType.BFLOAT16:
            return values.astype(self.dtype.numpy())  # the range of float32
        beyond = np.isfinite(values) & (np.abs(values) > HALF_END)
        self.clipped += int(np.count_nonzero(beyond))
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        halves[beyond] = np.copysign(HALF_END, values[beyond])
        vanished = (halves == 0) & (values != 0)
        halves[vanished] = np.copysign(HALF_STEP, values[vanished])
        return halves


def clipped_values(model: ir.Model) -> int:
    """Return how many weights of a model that was written were beyond the range of float16."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.clipped for tensor in tensors if isinstance(tensor, HalfTensor))
