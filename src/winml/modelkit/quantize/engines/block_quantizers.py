"""Quantizes a matrix in blocks with what the installed ONNX Runtime has for it.

A block is some consecutive values of one output channel that share a scale. Knows arrays only.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.coded_weights import pack_codes, unpack_codes
from winml.modelkit.onnx.files.stored_tensors import StoredTensor, StoredValues
from winml.modelkit.quantize.declared_options import Algorithm

PIECE_ELEMENTS = 1 << 16
"""Values computed at a time. Chosen: they and their copies stay in the cache of one core."""
_ALMOST_HALF = np.nextafter(np.float32(0.5), np.float32(0))
"""Added before the fraction is dropped, it rounds halves away from zero as C's ``roundf`` does, and nothing else up."""


def _pieces(matrix: Array, block_size: int) -> Iterator[tuple[slice, slice]]:
    """Yield columns and blocks in pieces of ``PIECE_ELEMENTS`` that lie together in memory."""
    depth, width = matrix.shape
    count = depth // block_size
    if matrix.flags.c_contiguous:
        at_once = min(width, max(64, PIECE_ELEMENTS // block_size))
        step = max(1, PIECE_ELEMENTS // (at_once * block_size))
    else:
        at_once, step = max(1, PIECE_ELEMENTS // depth), count
    for start in range(0, count, step):
        for column in range(0, width, at_once):
            yield slice(column, min(column + at_once, width)), slice(start, min(start + step, count))


def _rounded(rows: Array, bits: int, *, is_symmetric: bool) -> tuple[Array, Array, Array]:
    """Return the steps of blocks, which are the rows, one in a byte, and of each its scale and its zero point."""
    most, middle = np.float32(2**bits - 1), np.float32(2 ** (bits - 1))
    low, high = _extremes(rows)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if is_symmetric:
            scales = np.where(np.abs(high) > np.abs(low), high, low) / -middle
            zero_points = np.full_like(scales, middle)
        else:
            low, high = np.minimum(low, 0), np.maximum(high, 0)
            scales = (high - low) / most
            exact = np.where(scales != 0, np.float32(0) - low / scales, low)
            zero_points = np.clip(np.trunc(exact + _ALMOST_HALF), 0, most)
        inverse = np.where(scales != 0, np.float32(1) / scales, np.float32(0))
        steps = rows * inverse
        if np.isinf(inverse).any():
            # Of a subnormal scale; a zero is none of its NaN.
            steps[rows == 0] = 0
        steps += zero_points
        steps += _ALMOST_HALF
        np.clip(steps, 0, most, out=steps)
    return steps.astype(np.uint8), scales, zero_points.astype(np.uint8)


def _extremes(rows: Array) -> tuple[Array, Array]:
    """Return smallest and largest value of each row, by halves: numpy reduces short rows slowly."""
    low = high = rows
    while low.shape[1] > 1:
        half = low.shape[1] // 2
        low, high = np.minimum(low[:, :half], low[:, half:]), np.maximum(high[:, :half], high[:, half:])
    return low, high


@dataclass(frozen=True)
class BlockForm:
    """How the values of a weight are kept."""

    bits: int
    block_size: int
    """Values that share a scale; a power of two, at least 16."""
    is_symmetric: bool
    """Whether blocks have no zero point."""
    algorithm: Algorithm

    def block_count(self, depth: int) -> int:
        """Return how many blocks an output channel has."""
        return -(-depth // self.block_size)

    @property
    def values_per_byte(self) -> int:
        """Number of quantized values in a byte."""
        return 8 // self.bits

    @property
    def has_float_zero_points(self) -> bool:
        """Whether zero points lie between the steps."""
        return self.algorithm == "hqq"

    @property
    def has_zero_points(self) -> bool:
        """Whether there are any."""
        return self.algorithm != "rtn" or not self.is_symmetric


class Blocks(NamedTuple):
    """A quantized matrix, in the layout of ``MatMulNBits``."""

    packed: Array
    """uint8, width × blocks × bytes of a block."""
    scales: Array
    """float32, width × blocks."""
    zero_points: Array | None = None
    """uint8, width × bytes of the zero points of a channel; or float32, width × blocks; `None`: symmetric."""


def quantize_blocks(matrix: Array, form: BlockForm) -> Blocks:
    """Quantize a float32 matrix of depth × width, in any memory order."""
    return _ALGORITHMS[form.algorithm](matrix, form)


def _round_to_nearest(matrix: Array, form: BlockForm) -> Blocks:
    """Round a matrix to the nearest step of each block, to the bytes that ONNX Runtime's own function returns.

    That function has no 2 bits before 1.24, takes float32 of depth × width only, reads it in strides, and keeps other
    threads waiting. Checkpoints store width × depth: here rows are read as they lie, in pieces that stay in the
    processor's cache. Measured, 8 million values of 4096 × 2048 in bfloat16, computing time: 0.19 s transposed and with
    its function, 0.08 s here.
    """
    bits, block_size = form.bits, form.block_size
    missing = -matrix.shape[0] % block_size
    if missing:
        matrix = np.pad(matrix, ((0, missing), (0, 0)))
    width, count = matrix.shape[1], matrix.shape[0] // block_size
    packed = np.empty((width, count, block_size // form.values_per_byte), np.uint8)
    scales = np.empty((width, count), np.float32)
    zero_points = np.empty((width, count), np.uint8)
    for columns, blocks in _pieces(matrix, block_size):
        values = np.ascontiguousarray(matrix[blocks.start * block_size : blocks.stop * block_size, columns].T)
        steps, scale, zero_point = _rounded(values.reshape(-1, block_size), bits, is_symmetric=form.is_symmetric)
        shape = (columns.stop - columns.start, blocks.stop - blocks.start)
        packed[columns, blocks] = pack_codes(steps, bits).reshape(*shape, -1)
        scales[columns, blocks] = scale.reshape(shape)
        zero_points[columns, blocks] = zero_point.reshape(shape)
    if missing:
        last = unpack_codes(packed[:, -1], bits, block_size).copy()
        last[:, -missing:] = 0
        packed[:, -1] = pack_codes(last, bits)
    if form.is_symmetric:
        return Blocks(packed, scales, None)
    # ONNX Runtime fills the byte of an odd number of blocks with the middle, and here bytes are the same.
    return Blocks(packed, scales, pack_codes(zero_points, bits, fill=2 ** (bits - 1)))


def _half_quadratic(matrix: Array, form: BlockForm) -> Blocks:
    with _logging_left_alone():
        from onnxruntime.quantization.matmul_nbits_quantizer import HQQWeightOnlyQuantConfig, HQQWeightOnlyQuantizer
    config = HQQWeightOnlyQuantConfig(block_size=form.block_size, bits=form.bits)
    node = onnx.NodeProto(op_type="MatMul", name="product", input=["x", "w"], output=["y"])
    graph = onnx.GraphProto(initializer=[ir.serde.serialize_tensor(ir.tensor(matrix.copy(order="C"), name="w"))])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # and is not written
        (product,) = HQQWeightOnlyQuantizer(config).quantize(node, [graph])
    arrays = {tensor.name: ir.serde.deserialize_tensor(tensor).numpy() for tensor in graph.initializer}
    packed, scales, zero_points = (arrays[name] for name in product.input[1:])
    return Blocks(packed, scales.reshape(packed.shape[:2]), zero_points.reshape(packed.shape[:2]))


def _k_quant(matrix: Array, form: BlockForm) -> Blocks:
    with _logging_left_alone():
        from onnxruntime.quantization.neural_compressor import weight_only

    depth, width = matrix.shape
    count = form.block_count(depth)
    padded = np.pad(matrix, ((0, count * form.block_size - depth), (0, 0)))
    rows = np.ascontiguousarray(padded.T).reshape(-1, form.block_size)
    values, scales, zero_points = weight_only.quant_tensor_k_quant_cpu(rows, form.bits, form.block_size)
    steps = values.astype(np.uint8).reshape(width, count, form.block_size)
    zero_points = zero_points.astype(np.uint8).reshape(width, count)
    return pack_blocks(steps, scales.astype(np.float32).reshape(width, count), zero_points, form)


def pack_blocks(steps: Array, scales: Array, zero_points: Array, form: BlockForm) -> Blocks:
    """Return blocks of what a quantizer found.

    Args:
        steps: uint8, width × blocks × values of a block, one in a byte.
        scales: float32, width × blocks.
        zero_points: uint8, width × blocks; the middle where the form is symmetric.
        form: How the values are kept.
    """
    packed = pack_codes(zero_points, form.bits) if form.has_zero_points else None
    return Blocks(pack_codes(steps, form.bits), np.ascontiguousarray(scales), packed)


def unpack_blocks(blocks: Blocks, form: BlockForm, depth: int) -> Array:
    """Return what blocks stand for: float32, depth × width."""
    steps = unpack_codes(blocks.packed, form.bits, form.block_size).astype(np.float32)
    width, count = steps.shape[:2]
    if blocks.zero_points is None:
        steps -= np.float32(2 ** (form.bits - 1))
    elif blocks.zero_points.dtype == np.uint8:
        steps -= unpack_codes(blocks.zero_points, form.bits, count)[:, :, None]
    else:
        steps -= blocks.zero_points[:, :, None]
    steps *= blocks.scales[:, :, None]
    return steps.reshape(width, -1)[:, :depth].T


_ALGORITHMS: Mapping[Algorithm, Callable[[Array, BlockForm], Blocks]] = {
    "rtn": _round_to_nearest,
    "hqq": _half_quadratic,
    "k_quant": _k_quant,
}


@contextlib.contextmanager
def _logging_left_alone() -> Iterator[None]:
    """Undo what an import does to the root logger: ONNX Runtime's quantizers give it a handler and a level."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


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

    # Read by consecutive rows, slab by slab: neither memory nor the page accounting of a memory map grows with it.

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
        complete = self.tensor.numpy().reshape(self._rows_and_columns).astype(np.float32, copy=False)
        return Slab(0, complete.T if self.is_transposed else complete)


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
