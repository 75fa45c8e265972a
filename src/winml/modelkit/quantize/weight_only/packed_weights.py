"""Weights that are quantized when they are written, one at a time.

The parts of a quantized weight come from one computation: values, scales and zero points stand together in the list of
initializers and are written in its order. Only the weights whose turn it is stay in memory.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from winml.modelkit.quantize.weight_checks import WeightUse
from winml.modelkit.quantize.weight_only.block_quantizers import BlockForm, Blocks, quantize_blocks
from winml.modelkit.quantize.weight_only.weight_matrices import Slab, WeightMatrix

__all__ = ["PackedWeight", "PackingDesk"]

Array = NDArray[Any]

QUANTIZING_THREADS = min(4, os.cpu_count() or 1)
"""Chosen: each holds a slab, and more do not outrun one that writes."""
HELD_WEIGHTS = 2
"""Chosen: while the last part of a weight is written, the next one is quantized."""

_PACKED, _SCALES, _ZERO_POINTS = "packed", "scales", "zero_points"


class PackingDesk:
    """Holds the parts of the weights that were quantized last, until each was read once.

    Threads may write several weights; one is quantized at a time, by all of them.
    """

    def __init__(self) -> None:
        """Hold nothing."""
        self._held: dict[PackedWeight, dict[str, Array]] = {}
        self._lock = threading.Lock()

    def take(self, weight: PackedWeight, part: str) -> Array:
        """Return a part of a weight; it is quantized now unless it was a late one and the part was not read yet."""
        with self._lock:
            if part not in self._held.get(weight, {}):
                self._held.pop(weight, None)
                while len(self._held) >= HELD_WEIGHTS:
                    del self._held[next(iter(self._held))]
                self._held[weight] = weight.compute()
            values = self._held[weight].pop(part)
            if not self._held[weight]:
                del self._held[weight]
            return values


class PackedWeight:
    """A weight matrix in blocks of few bits, as tensors whose values are computed when they are read."""

    def __init__(
        self, matrix: WeightMatrix, form: BlockForm, use: WeightUse, desk: PackingDesk, *, is_table_only: bool = False
    ) -> None:
        """Refer to the matrix; nothing is read.

        Args:
            matrix: The weight.
            form: How its values are kept.
            use: Where it is read, for messages.
            desk: Holds the parts that were quantized last.
            is_table_only: Whether rows are looked up in it and nothing else reads it. Its values then have two axes, as
                ``GatherBlockQuantized`` wants them, instead of the three of ``MatMulNBits``.
        """
        self.is_table_only = is_table_only
        self.matrix, self.form, self._use, self._desk = matrix, form, use, desk
        self._scale_dtype = matrix.tensor.dtype

    def compute(self) -> dict[str, Array]:
        """Return all parts by name.

        Raises:
            QuantizeError: a value of the weight is NaN or infinite.
        """
        by_depth = self.matrix.is_read_by_depth
        slabs = self.matrix.slabs(self.form.block_size * self.form.values_per_byte if by_depth else 1)
        if len(slabs) == 1:
            return self._finished(_by_name(self._quantized(slabs[0])[1]))
        parts: dict[str, Array] = {}
        # What searches for scales warns and logs, which is not for threads.
        with ThreadPoolExecutor(QUANTIZING_THREADS if self.form.algorithm == "rtn" else 1) as threads:
            for start, blocks in threads.map(self._quantized, slabs):
                for name, values in _by_name(blocks).items():
                    if name not in parts:
                        parts[name] = np.empty(self._shapes[name], values.dtype)
                    step = parts[name].shape[1] / self._blocks[1] if name == _ZERO_POINTS else 1
                    first = round(start // self.form.block_size * step) if by_depth else start
                    place = (
                        np.s_[:, first : first + values.shape[1]] if by_depth else np.s_[first : first + len(values)]
                    )
                    parts[name][place] = values
        return self._finished(parts)

    def _quantized(self, read: Callable[[], Slab]) -> tuple[int, Blocks]:
        slab = read()
        self._use.refuse_non_finite(slab.values)
        return slab.start, quantize_blocks(slab.values, self.form)

    def tensors(self) -> tuple[ir.TensorProtocol, ...]:
        """Return values, scales and, where the form has them, zero points, named after the weight."""
        dtypes = {_PACKED: ir.DataType.UINT8, _SCALES: self._scale_dtype, _ZERO_POINTS: ir.DataType.UINT8}
        if self.form.has_float_zero_points:
            dtypes[_ZERO_POINTS] = self._scale_dtype
        names = {_PACKED: f"{self._use.weight}_Q{self.form.bits}", _SCALES: f"{self._use.weight}_scales",
                 _ZERO_POINTS: f"{self._use.weight}_zero_points"}  # fmt: skip
        return tuple(self._tensor(part, dtypes[part], names[part]) for part in self._shapes)

    @property
    def _blocks(self) -> tuple[int, int]:
        return self.matrix.width, self.form.block_count(self.matrix.depth)

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        width, count = self._blocks
        shapes: dict[str, tuple[int, ...]] = {
            _PACKED: (width, count, self.form.block_size // self.form.values_per_byte),
            _SCALES: (width, count),
        }
        if self.form.has_zero_points:
            per_byte = 1 if self.form.has_float_zero_points else self.form.values_per_byte
            shapes[_ZERO_POINTS] = (width, math.ceil(count / per_byte))
        return shapes

    def _finished(self, parts: dict[str, Array]) -> dict[str, Array]:
        scale_type = self._scale_dtype.numpy()
        return {
            name: values if values.dtype == np.uint8 else values.astype(scale_type, copy=False)
            for name, values in parts.items()
        }

    def _tensor(self, part: str, dtype: ir.DataType, name: str) -> ir.LazyTensor:
        computed = self._shapes[part]
        shape = (computed[0], math.prod(computed[1:])) if self.is_table_only else computed

        def read() -> ir.TensorProtocol:
            values = self._desk.take(self, part)
            assert values.shape == computed
            return ir.Tensor(values.reshape(shape), dtype=dtype, name=name)

        return ir.LazyTensor(read, dtype, ir.Shape(shape, frozen=True), name=name)


def _by_name(blocks: Blocks) -> dict[str, Array]:
    parts = {_PACKED: blocks.packed, _SCALES: blocks.scales}
    return parts if blocks.zero_points is None else {**parts, _ZERO_POINTS: blocks.zero_points}
