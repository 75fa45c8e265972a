"""Quantization of a matrix in blocks: ONNX Runtime's algorithms, or algorithms that use input statistics (GPTQ, AWQ).

A block is a run of consecutive values of one output channel that share a scale. Only the Gram matrix and the mean
absolute values of the inputs of a product are stored: the squared output error of any other matrix follows from both.
Works on arrays only.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.errors import QuantizeError, opt
from winml.modelkit.onnx.coded_weights import pack_codes, unpack_codes
from winml.modelkit.onnx.files.stored_tensors import StoredTensor, StoredValues, is_exact, values_in_file
from winml.modelkit.onnx.weights import computed_tensor
from winml.modelkit.quantize.declared_options import Algorithm

PIECE_ELEMENTS = 1 << 16
"""Values computed at a time. Chosen: the values and their copies stay in the cache of one core."""
_SHORT_ROW = 64
"""Values of a row that is not halved. Chosen: from 128 on, halving is as fast."""
_ALMOST_HALF = np.nextafter(np.float32(0.5), np.float32(0))
"""Added before truncation: rounds halves away from zero like C's ``roundf``, and rounds nothing else up."""


def _iterate_pieces(matrix: Array, block_size: int) -> Iterator[tuple[slice, slice]]:
    """Yield (columns, blocks) in pieces of ``PIECE_ELEMENTS`` that are contiguous in memory."""
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


def _round_rows(rows: Array, bits: int, *, is_symmetric: bool) -> tuple[Array, Array, Array]:
    """Quantize rows, one block each; return steps (one per byte), scales and zero points."""
    maximum, middle = np.float32(2**bits - 1), np.float32(2 ** (bits - 1))
    low, high = _find_extremes(rows)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if is_symmetric:
            scales = np.where(np.abs(high) > np.abs(low), high, low) / -middle
            zero_points = np.broadcast_to(middle, scales.shape)
        else:
            low, high = np.minimum(low, 0), np.maximum(high, 0)
            scales = (high - low) / maximum
            exact = np.where(scales != 0, np.float32(0) - low / scales, low)
            zero_points = np.clip(np.trunc(exact + _ALMOST_HALF), 0, maximum)
        inverse = np.where(scales != 0, np.float32(1) / scales, np.float32(0))
        steps = rows * inverse
        if np.isinf(inverse).any():
            # Infinite inverse of a subnormal scale: zeros would become NaN.
            steps[rows == 0] = 0
        steps += zero_points
        steps += _ALMOST_HALF
        np.clip(steps, 0, maximum, out=steps)
    return steps.astype(np.uint8), scales, zero_points.astype(np.uint8)


def _find_extremes(rows: Array) -> tuple[Array, Array]:
    """Smallest and largest value of each row: long rows are halved, and short ones reduced as columns.

    Measured, 2048 rows of 32 values: 40 µs; 120 µs by halving alone, 220 µs by numpy's reduction of rows.
    """
    low = high = rows
    while low.shape[1] > _SHORT_ROW:
        half = low.shape[1] // 2
        low, high = np.minimum(low[:, :half], low[:, half:]), np.maximum(high[:, :half], high[:, half:])
    columns = np.ascontiguousarray(low.T)
    high_columns = columns if high is low else np.ascontiguousarray(high.T)
    return columns.min(axis=0)[:, None], high_columns.max(axis=0)[:, None]


@dataclass(frozen=True)
class BlockFormat:
    """Format of a block-quantized weight."""

    bits: int
    block_size: int
    """Values that share a scale: a power of two, at least 16; for integers of a DequantizeLinear, up to all values of
    an output channel."""
    is_symmetric: bool
    """True if blocks have no zero point."""
    algorithm: Algorithm
    has_positive_scales: bool = False
    """True for symmetric blocks with positive scales, as a DequantizeLinear requires, and without the smallest
    integer."""

    def block_count(self, depth: int) -> int:
        """Number of blocks of an output channel."""
        return -(-depth // self.block_size)

    @property
    def values_per_byte(self) -> int:
        """Number of quantized values in a byte."""
        return 8 // self.bits

    @property
    def smallest_step(self) -> int:
        """Smallest quantized value before the zero point is subtracted."""
        return 1 if self.has_positive_scales else 0

    @property
    def has_float_zero_points(self) -> bool:
        """True if zero points are fractional."""
        return self.algorithm == "hqq"

    @property
    def has_zero_points(self) -> bool:
        """True if blocks have zero points."""
        return self.algorithm != "rtn" or not self.is_symmetric


class Blocks(NamedTuple):
    """A quantized matrix, in the layout of ``MatMulNBits``."""

    packed: Array
    """uint8, width × blocks × bytes of a block."""
    scales: Array
    """float32, width × blocks."""
    zero_points: Array | None = None
    """uint8, width × bytes of the zero points of a channel; or float32, width × blocks; `None`: symmetric."""


def quantize_blocks(matrix: Array, fmt: BlockFormat) -> Blocks:
    """Quantize a float32 matrix of depth × width, in any memory order."""
    return _ALGORITHMS[fmt.algorithm](matrix, fmt)


def _round_to_nearest(matrix: Array, fmt: BlockFormat) -> Blocks:
    """Round a matrix to the nearest step of each block, byte-identical to ONNX Runtime's own function.

    ONNX Runtime's function has no 2 bits before 1.24, accepts float32 of depth × width only, reads it in strides, and
    blocks other threads. Checkpoints store width × depth: here rows are read in stored order, in pieces that stay in
    the processor's cache. Measured, 8 million values of 4096 × 2048 in bfloat16, computing time: 0.19 s transposed and
    with ONNX Runtime's function, 0.08 s here.
    """
    bits, block_size = fmt.bits, fmt.block_size
    missing = -matrix.shape[0] % block_size
    if missing:
        matrix = np.pad(matrix, ((0, missing), (0, 0)))
    width, count = matrix.shape[1], matrix.shape[0] // block_size
    packed = np.empty((width, count, block_size // fmt.values_per_byte), np.uint8)
    scales = np.empty((width, count), np.float32)
    zero_points = np.empty((width, count), np.uint8)
    for columns, blocks in _iterate_pieces(matrix, block_size):
        values = np.ascontiguousarray(matrix[blocks.start * block_size : blocks.stop * block_size, columns].T)
        steps, scale, zero_point = _round_rows(values.reshape(-1, block_size), bits, is_symmetric=fmt.is_symmetric)
        shape = (columns.stop - columns.start, blocks.stop - blocks.start)
        packed[columns, blocks] = pack_codes(steps, bits).reshape(*shape, -1)
        scales[columns, blocks] = scale.reshape(shape)
        zero_points[columns, blocks] = zero_point.reshape(shape)
    if missing:
        last = unpack_codes(packed[:, -1], bits, block_size).copy()
        last[:, -missing:] = 0
        packed[:, -1] = pack_codes(last, bits)
    if fmt.is_symmetric:
        return Blocks(packed, scales, None)
    # ONNX Runtime pads the byte of an odd number of blocks with the middle; bytes are identical here.
    return Blocks(packed, scales, pack_codes(zero_points, bits, fill=2 ** (bits - 1)))


def _quantize_hqq(matrix: Array, fmt: BlockFormat) -> Blocks:
    """Quantize a matrix with HQQ of ONNX Runtime (half-quadratic optimization of zero points)."""
    with _preserve_logging():
        from onnxruntime.quantization.matmul_nbits_quantizer import HQQWeightOnlyQuantConfig, HQQWeightOnlyQuantizer
    config = HQQWeightOnlyQuantConfig(block_size=fmt.block_size, bits=fmt.bits)
    node = onnx.NodeProto(op_type="MatMul", name="product", input=["x", "w"], output=["y"])
    graph = onnx.GraphProto(initializer=[ir.serde.serialize_tensor(ir.tensor(matrix.copy(order="C"), name="w"))])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is not written
        (product,) = HQQWeightOnlyQuantizer(config).quantize(node, [graph])
    arrays = {tensor.name: ir.serde.deserialize_tensor(tensor).numpy() for tensor in graph.initializer}
    packed, scales, zero_points = (arrays[name] for name in product.input[1:])
    return Blocks(packed, scales.reshape(packed.shape[:2]), zero_points.reshape(packed.shape[:2]))


def _quantize_k_quant(matrix: Array, fmt: BlockFormat) -> Blocks:
    """Quantize a matrix with k-quant of ONNX Runtime (search for scales and zero points)."""
    with _preserve_logging():
        from onnxruntime.quantization.neural_compressor import weight_only

    depth, width = matrix.shape
    count = fmt.block_count(depth)
    padded = np.pad(matrix, ((0, count * fmt.block_size - depth), (0, 0)))
    rows = np.ascontiguousarray(padded.T).reshape(-1, fmt.block_size)
    values, scales, zero_points = weight_only.quant_tensor_k_quant_cpu(rows, fmt.bits, fmt.block_size)
    steps = values.astype(np.uint8).reshape(width, count, fmt.block_size)
    zero_points = zero_points.astype(np.uint8).reshape(width, count)
    return pack_blocks(steps, scales.astype(np.float32).reshape(width, count), zero_points, fmt)


def pack_blocks(steps: Array, scales: Array, zero_points: Array, fmt: BlockFormat) -> Blocks:
    """Pack quantized values, scales and zero points into blocks.

    Args:
        steps: uint8, width × blocks × values of a block, one per byte.
        scales: float32, width × blocks.
        zero_points: uint8, width × blocks; the middle for a symmetric format.
        fmt: Format of the blocks.
    """
    packed = pack_codes(zero_points, fmt.bits) if fmt.has_zero_points else None
    return Blocks(pack_codes(steps, fmt.bits), np.ascontiguousarray(scales), packed)


def unpack_blocks(blocks: Blocks, fmt: BlockFormat, depth: int) -> Array:
    """Dequantize blocks: float32, depth × width."""
    steps = unpack_codes(blocks.packed, fmt.bits, fmt.block_size).astype(np.float32)
    width, count = steps.shape[:2]
    if blocks.zero_points is None:
        steps -= np.float32(2 ** (fmt.bits - 1))
    elif blocks.zero_points.dtype == np.uint8:
        steps -= unpack_codes(blocks.zero_points, fmt.bits, count)[:, :, None]
    else:
        steps -= blocks.zero_points[:, :, None]
    steps *= blocks.scales[:, :, None]
    return steps.reshape(width, -1)[:, :depth].T


_ALGORITHMS: Mapping[Algorithm, Callable[[Array, BlockFormat], Blocks]] = {
    "rtn": _round_to_nearest,
    "hqq": _quantize_hqq,
    "k_quant": _quantize_k_quant,
}


@contextlib.contextmanager
def _preserve_logging() -> Iterator[None]:
    """Restore the root logger after an import: ONNX Runtime's quantizers set a handler and a level."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


SLAB_ELEMENTS = 1 << 21
"""Chosen: 8 MB of float32 at a time per thread; larger slabs save no time."""


class Slab(NamedTuple):
    """Consecutive rows or columns of a matrix."""

    start: int
    """Index of the first row or column."""
    values: Array
    """float32, depth × width, in stored memory order."""


@dataclass(frozen=True)
class WeightMatrix:
    """A weight as the right operand of a product: depth (summed over) × width (output channels)."""

    tensor: ir.TensorProtocol
    is_transposed: bool
    """True if the tensor is width × depth."""

    # Read by consecutive rows, slab by slab: neither memory nor the page accounting of a memory map grows.

    @property
    def depth(self) -> int:
        """Number of values that each output is summed from."""
        return self._rows_and_columns[int(self.is_transposed)]

    @property
    def width(self) -> int:
        """Number of output channels."""
        return self._rows_and_columns[int(not self.is_transposed)]

    @property
    def _rows_and_columns(self) -> tuple[int, int]:
        """Sizes of the last two axes of the tensor."""
        rows, columns = self.tensor.shape.numpy()[-2:]
        return rows, columns

    @property
    def is_read_by_depth(self) -> bool:
        """True if a slab spans the whole width and part of the depth; False for the whole depth and part of the
        width.
        """
        stored = _find_stored_order(self.tensor)
        return self.is_transposed if stored is not None and stored.is_transposed else not self.is_transposed

    def slabs(self, multiple: int) -> list[Callable[[], Slab]]:
        """Create readers of the slabs, in order; each may run in a separate thread.

        Args:
            multiple: The number of rows of each slab except the last is a multiple of this.
        """
        stored = _find_stored_order(self.tensor)
        if stored is None:
            return [lambda: Slab(0, self.values())]
        by_depth = self.is_read_by_depth
        rows, columns = (self.depth, self.width) if by_depth else (self.width, self.depth)
        at_once = max(1, SLAB_ELEMENTS // max(1, columns) // multiple) * multiple

        def read(start: int) -> Slab:
            count = min(at_once, rows - start)
            values = stored.values.part(start * columns, count * columns).reshape(count, columns)
            values = values.astype(np.float32, copy=False)
            return Slab(start, values if by_depth else values.T)

        return [partial(read, start) for start in range(0, rows, at_once)]

    def values(self) -> Array:
        """Return the whole matrix: depth × width, float32."""
        matrix = self.tensor.numpy().reshape(self._rows_and_columns).astype(np.float32, copy=False)
        return matrix.T if self.is_transposed else matrix


class _StoredOrder(NamedTuple):
    values: StoredValues
    is_transposed: bool
    """True if the axes of the tensor are the reverse of the stored axes."""


def _find_stored_order(tensor: ir.TensorProtocol) -> _StoredOrder | None:
    """Storage of a matrix's values in a file; ``None`` if not in a file or rounded."""
    if isinstance(tensor, StoredTensor) and tensor.permutation is not None:
        is_readable = len(tensor.shape) == 2 and is_exact(tensor)
        return _StoredOrder(tensor.stored, is_transposed=True) if is_readable else None
    values = values_in_file(tensor)
    return _StoredOrder(values, is_transposed=False) if values is not None else None


@dataclass(frozen=True)
class SolvedWeight:
    """A weight with blocks solved on calibration data."""

    algorithm: str
    """Algorithm of the blocks, or several joined by a plus."""
    block_format: BlockFormat
    read: Callable[[], Blocks]
    """Reads the blocks from storage."""
    input_scale: Array | None
    """float32, depth: divisor of the inputs; ``None``: no division. Weights with the same inputs share the array."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Algorithm → squared error of the products' outputs relative to their squared size, for all tried algorithms."""


def dequantized_tensor(weight: ir.TensorProtocol, solved: SolvedWeight, *, is_transposed: bool) -> ir.LazyTensor:
    """Return a weight whose values are dequantized from its solved blocks at each read.

    Args:
        weight: The weight, whose type, shape and name the result has.
        solved: Its blocks.
        is_transposed: True if the shape is width × depth.
    """
    shape = weight.shape.numpy()

    def read() -> Array:
        matrix = unpack_blocks(solved.read(), solved.block_format, shape[-1 if is_transposed else -2])
        if solved.input_scale is not None:
            matrix = matrix / solved.input_scale[:, None]
        whole = np.ascontiguousarray(matrix.T if is_transposed else matrix).reshape(shape)
        return whole.astype(weight.dtype.numpy(), copy=False)

    return computed_tensor(read, weight.dtype, shape, weight.name or "")


@dataclass
class InputStatistics:
    """Sums over the input rows of a product."""

    gram: Array
    """float32, depth × depth: Gram matrix X^T X of the rows."""
    absolute: Array
    """float64, depth: sum of the absolute values."""
    rows: int = 0

    @classmethod
    def of_depth(cls, depth: int) -> InputStatistics:
        """Statistics without rows."""
        return cls(np.zeros((depth, depth), np.float32), np.zeros(depth))

    def add(self, values: Array) -> None:
        """Add rows, in place; the last axis is the depth."""
        rows = values.reshape(-1, values.shape[-1]).astype(np.float32, copy=False)
        for start in range(0, len(self.gram), _PIECE):  # a product of all rows is as large as the sum
            self.gram[start : start + _PIECE] += rows[:, start : start + _PIECE].T @ rows
        self.absolute += np.abs(rows).sum(axis=0, dtype=np.float64)
        self.rows += len(rows)

    def scaled(self, scale: Array) -> InputStatistics:
        """Statistics of the inputs divided by a scale per channel."""
        inverse = (1 / scale).astype(np.float32)
        return InputStatistics(self.gram * inverse * inverse[:, None], self.absolute * inverse, self.rows)


_PIECE = 1 << 10
"""Columns multiplied at a time. Chosen: a piece of the largest matrix of a 7 B model takes 60 MB."""


def output_error(difference: Array, statistics: InputStatistics) -> float:
    """Squared error of the outputs, summed over rows and columns, of a weight difference of depth × width."""
    total = 0.0
    for start in range(0, difference.shape[1], _PIECE):
        piece = difference[:, start : start + _PIECE]
        total += float(np.vdot(piece, statistics.gram @ piece))
    return max(total, 0.0)


def relative_error(difference: Array, matrix: Array, statistics: InputStatistics) -> float:
    """Squared error of the outputs relative to their squared size; 0 if the outputs are zero."""
    size = output_error(matrix, statistics)
    return output_error(difference, statistics) / size if size else 0.0


_DAMPING = 0.01
"""Added to the diagonal, as a share of its mean. Specified by the paper: inputs that are constant in the calibration
data keep a small weight."""
_FACTORED = 512
"""Rows factored at a time. Chosen: the copies are small beside the matrix."""
_ROWS = 256
"""Rows of a block whose errors are added row by row. Chosen: the largest block with several blocks in a channel; the
errors of earlier rows are added by one product."""
_SHRINKS = tuple(1 - step * 0.025 for step in range(15))
"""Shares of the range of a block that are tried as its range: clipping makes the steps finer. Chosen."""


def factor_in_place(gram: Array) -> Array:
    """Factor a positive definite matrix into an upper R with ``R R^T = gram``, in place, and return R.

    A Cholesky decomposition from the last row to the first, so that the matrix of a large model is in memory only once.

    Raises:
        QuantizeError: the matrix is not positive definite.
    """
    for stop in range(len(gram), 0, -_FACTORED):
        start = max(stop - _FACTORED, 0)
        try:
            corner = np.linalg.cholesky(gram[start:stop, start:stop][::-1, ::-1])[::-1, ::-1]
        except np.linalg.LinAlgError as error:
            raise QuantizeError(
                "the Hessian of the inputs on the calibration data has no Cholesky factorization",
                hint=f"Add calibration data, or use a different {opt.algorithm}.",
            ) from error
        gram[start:stop, start:stop] = corner
        gram[start:stop, :start] = 0
        if start:
            above = np.linalg.solve(corner, gram[:start, start:stop].T).T
            gram[:start, start:stop] = above
            for row in range(0, start, _FACTORED):  # by pieces: the product is as large as the remaining matrix
                rows = slice(row, min(row + _FACTORED, start))
                gram[rows, :start] -= above[rows] @ above.T
    return gram


def gptq_blocks(matrix: Array, statistics: InputStatistics, fmt: BlockFormat) -> Blocks:
    """Round a matrix with a small error of its outputs instead of its values.

    GPTQ (Frantar et al., ICLR 2023), in the form of Babai's nearest-plane algorithm (Chen et al., "The Geometry of LLM
    Quantization", 2025). With the Gram matrix H = R R^T, R upper triangular, the error of the outputs is the squared
    size of R^T (W - Q). Its row i depends only on the rows up to i of W - Q, so rows are rounded in order, each with
    the smallest term. The paper uses the equivalent Cholesky factor of the inverse.

    Args:
        matrix: float32, depth × width.
        statistics: Statistics of the inputs; the Gram matrix is overwritten.
        fmt: Format of the blocks; zero points are whole numbers.
    """
    depth, width = matrix.shape
    factor = statistics.gram
    diagonal = np.diagonal(factor)
    damping = _DAMPING * float(diagonal.mean()) or 1.0
    factor[np.diag_indices(depth)] += damping
    factor = factor_in_place(factor)
    importance = np.diagonal(factor) ** 2
    count = fmt.block_count(depth)
    steps = np.full((count * fmt.block_size, width), 2 ** (fmt.bits - 1), np.uint8)
    scales = np.empty((count, width), np.float32)
    zero_points = np.empty((count, width), np.float32)
    maximum = np.float32(2**fmt.bits - 1)
    errors = np.zeros_like(matrix)
    for number in range(count):
        start, stop = number * fmt.block_size, min((number + 1) * fmt.block_size, depth)
        correction = factor[:start, start:stop].T @ errors[:start]
        targets = matrix[start:stop] + correction / np.diagonal(factor)[start:stop, None]
        scale, zero_point = _find_best_grid(targets, importance[start:stop], fmt)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        for first in range(start, stop, _ROWS):
            last = min(first + _ROWS, stop)
            block = factor[first:last, first:last]
            if first > start:
                correction = factor[:first, first:last].T @ errors[:first]
            for row in range(last - first):
                target = matrix[first + row] + (correction[row] / block[row, row])
                rounded = np.clip(np.rint(target * inverse) + zero_point, fmt.smallest_step, maximum)
                steps[first + row] = rounded
                error = matrix[first + row] - (rounded - zero_point) * scale
                errors[first + row] = error
                correction[row + 1 : last - first] += block[row, row + 1 :, None] * error
        scales[number], zero_points[number] = scale, zero_point
    return pack_blocks(steps.T.reshape(width, count, -1), scales.T, zero_points.T.astype(np.uint8), fmt)


def _find_best_grid(targets: Array, importance: Array, fmt: BlockFormat) -> tuple[Array, Array]:
    """Scale and zero point of each column of a block with the smallest weighted error among the tried shrinks."""
    maximum, middle = np.float32(2**fmt.bits - 1), np.float32(2 ** (fmt.bits - 1))
    low, high = np.minimum(targets.min(axis=0), 0), np.maximum(targets.max(axis=0), 0)
    if fmt.is_symmetric:
        largest = np.where(high > -low, high, low) / -middle
        if fmt.has_positive_scales:
            largest = np.maximum(high, -low) / (middle - 1)
    weights = (importance / max(float(importance.mean()), 1e-30)).astype(np.float32)[:, None]
    best = np.full(targets.shape[1], np.inf, np.float32)
    best_scale, best_zero = np.zeros_like(best), np.zeros_like(best)
    for shrink in _SHRINKS:
        if fmt.is_symmetric:
            scale = largest * np.float32(shrink)
            zero = np.full_like(scale, middle)
        else:
            scale = (high - low) * np.float32(shrink) / maximum
            exact = np.divide(-low * np.float32(shrink), scale, out=np.zeros_like(scale), where=scale != 0)
            zero = np.clip(np.rint(exact), 0, maximum)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        steps = np.clip(np.rint(targets * inverse) + zero, fmt.smallest_step, maximum)
        difference = (steps - zero) * scale - targets
        error = (weights * difference * difference).sum(axis=0)
        is_better = error < best
        best = np.where(is_better, error, best)
        best_scale, best_zero = np.where(is_better, scale, best_scale), np.where(is_better, zero, best_zero)
    return best_scale, best_zero


_POWERS = tuple(step / 20 for step in range(1, 20))
"""Powers tried. Specified by the paper's code: a grid of 20."""


_SEARCHED_COLUMNS = 256
"""Number of output channels that powers are tried on, evenly spaced. Chosen: the error is a sum over channels, so some
hundred determine the best power."""


def awq_scale(matrices: Sequence[Array], statistics: InputStatistics, formats: Sequence[BlockFormat]) -> Array | None:
    """Compute the divisor of the inputs of matrices by AWQ; `None` if no scale reduces the output error.

    AWQ (Lin et al., MLSys 2024): inputs that are large on the data are divided by a scale and their matrix rows
    multiplied by the scale, for finer rounding. The scale is the power of the mean absolute input with the smallest
    output error. The paper measures the error on samples; here the Gram matrix determines the error.

    Args:
        matrices: float32, depth × width; all are multiplied with the same inputs.
        statistics: Statistics of these inputs.
        formats: Block format of each matrix.
    """
    size = np.maximum(statistics.absolute / max(statistics.rows, 1), 1e-8)
    tried_on = [np.ascontiguousarray(matrix[:, :: -(-matrix.shape[1] // _SEARCHED_COLUMNS)]) for matrix in matrices]

    def error(scale: Array | None) -> float:
        """Output error of all matrices with inputs divided by a scale."""
        return sum(
            output_error(_scaled_difference(matrix, scale, fmt), statistics)
            for matrix, fmt in zip(tried_on, formats, strict=True)
        )

    best, best_scale = error(None), None
    for power in _POWERS:
        scale = size**power
        scale = (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)
        if (tried := error(scale)) < best:
            best, best_scale = tried, scale
    return best_scale


def _scaled_difference(matrix: Array, scale: Array | None, fmt: BlockFormat) -> Array:
    """Return the rounding error of a matrix whose inputs are divided by a scale."""
    scaled = matrix if scale is None else matrix * scale[:, None]
    rounded = unpack_blocks(quantize_blocks(scaled, fmt), fmt, len(matrix))
    return (rounded if scale is None else rounded / scale[:, None]) - matrix
