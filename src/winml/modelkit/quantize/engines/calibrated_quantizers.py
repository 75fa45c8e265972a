"""Quantizes a matrix in blocks by what it is multiplied with: GPTQ and AWQ.

All that is held of the inputs of a product is their Gram matrix and the mean of their absolute values: the squared
error of the outputs of any other matrix follows from these. Knows arrays only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.errors import QuantizeError
from winml.modelkit.quantize.engines.block_quantizers import (
    BlockForm,
    Blocks,
    pack_blocks,
    quantize_blocks,
    unpack_blocks,
)


@dataclass(frozen=True)
class SolvedWeight:
    """A weight whose blocks were found with calibration data."""

    algorithm: str
    """What found them: a name, or several with a plus between them."""
    form: BlockForm
    read: Callable[[], Blocks]
    """Reads the blocks from where they are held."""
    input_scale: Array | None
    """float32, depth: what the inputs are divided by; None: nothing. Weights with the same inputs share the array."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Algorithm that was tried → squared error of the outputs of the products over their squared size."""


@dataclass
class InputStatistics:
    """Sums over the rows that a matrix was multiplied with."""

    gram: Array
    """float32, depth × depth: the sum of the products of each two inputs of a row, X^T X."""
    absolute: Array
    """float64, depth: the sum of the absolute values."""
    rows: int = 0

    @classmethod
    def of_depth(cls, depth: int) -> InputStatistics:
        """Return statistics of no rows."""
        return cls(np.zeros((depth, depth), np.float32), np.zeros(depth))

    def add(self, values: Array) -> None:
        """Add rows, in place; the last axis is the depth."""
        rows = values.reshape(-1, values.shape[-1]).astype(np.float32, copy=False)
        for start in range(0, len(self.gram), _PIECE):  # a product of the whole is as large as the sum
            self.gram[start : start + _PIECE] += rows[:, start : start + _PIECE].T @ rows
        self.absolute += np.abs(rows).sum(axis=0, dtype=np.float64)
        self.rows += len(rows)

    def scaled(self, scale: Array) -> InputStatistics:
        """Return the statistics of the inputs divided by a scale for each channel."""
        inverse = (1 / scale).astype(np.float32)
        return InputStatistics(self.gram * inverse * inverse[:, None], self.absolute * inverse, self.rows)


_PIECE = 1 << 10
"""Columns multiplied at a time. Chosen: a piece of the largest matrix of a 7 B model takes 60 MB."""


def output_error(difference: Array, statistics: InputStatistics) -> float:
    """Return the squared error of the outputs, summed over rows and columns, of a difference of depth × width."""
    total = 0.0
    for start in range(0, difference.shape[1], _PIECE):
        piece = difference[:, start : start + _PIECE]
        total += float(np.vdot(piece, statistics.gram @ piece))
    return max(total, 0.0)


def relative_error(difference: Array, matrix: Array, statistics: InputStatistics) -> float:
    """Return the squared error of the outputs over their squared size; 0 where the outputs are zero."""
    size = output_error(matrix, statistics)
    return output_error(difference, statistics) / size if size else 0.0


_DAMPING = 0.01
"""Added to the diagonal, as a share of its mean. Specified by the paper: it makes inputs that the calibration data
never varies count a little."""
_FACTORED = 512
"""Rows factored at a time. Chosen: the copies are small beside the matrix."""
_SHRINKS = tuple(1 - step * 0.025 for step in range(15))
"""Shares of the range of a block that are tried as its range: clipping its ends makes the steps finer. Chosen."""


def factor_in_place(gram: Array) -> Array:
    """Turn a positive definite matrix into its upper factor R with ``R R^T = gram``, in place, and return it.

    A Cholesky decomposition from the last row to the first, so that a matrix of a large model is in memory once.

    Raises:
        QuantizeError: it is not positive definite.
    """
    for stop in range(len(gram), 0, -_FACTORED):
        start = max(stop - _FACTORED, 0)
        try:
            corner = np.linalg.cholesky(gram[start:stop, start:stop][::-1, ::-1])[::-1, ::-1]
        except np.linalg.LinAlgError as error:
            raise QuantizeError(
                "the Hessian of the inputs on the calibration data has no Cholesky factorization",
                hint="Add calibration data, or use a different --algorithm.",
            ) from error
        gram[start:stop, start:stop] = corner
        gram[start:stop, :start] = 0
        if start:
            above = np.linalg.solve(corner, gram[:start, start:stop].T).T
            gram[:start, start:stop] = above
            for row in range(0, start, _FACTORED):  # by pieces: the product is as large as what is left
                rows = slice(row, min(row + _FACTORED, start))
                gram[rows, :start] -= above[rows] @ above.T
    return gram


def gptq_blocks(matrix: Array, statistics: InputStatistics, form: BlockForm) -> Blocks:
    """Round a matrix so that the error of its outputs is small, not that of its values.

    GPTQ (Frantar et al., ICLR 2023), in the form of Babai's nearest-plane algorithm (Chen et al., "The Geometry of LLM
    Quantization", 2025). With the Gram matrix H = R R^T, R upper triangular, the error of the outputs is the squared
    size of R^T (W - Q). Row i of it depends on the rows up to i of W - Q only, so rows are rounded in order, each to
    the value with the smallest own term. The paper computes the same with the Cholesky factor of the inverse.

    Args:
        matrix: float32, depth × width.
        statistics: Of its inputs; its Gram matrix is used up.
        form: How values are kept; zero points are whole numbers.
    """
    depth, width = matrix.shape
    factor = statistics.gram
    diagonal = np.diagonal(factor)
    damping = _DAMPING * float(diagonal.mean()) or 1.0
    factor[np.diag_indices(depth)] += damping
    factor = factor_in_place(factor)
    importance = np.diagonal(factor) ** 2
    count = form.block_count(depth)
    steps = np.full((count * form.block_size, width), 2 ** (form.bits - 1), np.uint8)
    scales = np.empty((count, width), np.float32)
    zero_points = np.empty((count, width), np.float32)
    most = np.float32(2**form.bits - 1)
    errors = np.zeros_like(matrix)
    for number in range(count):
        start, stop = number * form.block_size, min((number + 1) * form.block_size, depth)
        block = factor[start:stop, start:stop]
        carried = factor[:start, start:stop].T @ errors[:start]
        targets = matrix[start:stop] + carried / np.diagonal(block)[:, None]
        scale, zero_point = _best_grid(targets, importance[start:stop], form)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        for row in range(stop - start):
            target = matrix[start + row] + (carried[row] / block[row, row])
            rounded = np.clip(np.rint(target * inverse) + zero_point, 0, most)
            steps[start + row] = rounded
            error = matrix[start + row] - (rounded - zero_point) * scale
            errors[start + row] = error
            carried[row + 1 :] += block[row, row + 1 :, None] * error
        scales[number], zero_points[number] = scale, zero_point
    return pack_blocks(steps.T.reshape(width, count, -1), scales.T, zero_points.T.astype(np.uint8), form)


def _best_grid(targets: Array, importance: Array, form: BlockForm) -> tuple[Array, Array]:
    """Return scale and zero point of each column of a block: of those tried, with the smallest weighted error."""
    most, middle = np.float32(2**form.bits - 1), np.float32(2 ** (form.bits - 1))
    low, high = np.minimum(targets.min(axis=0), 0), np.maximum(targets.max(axis=0), 0)
    if form.is_symmetric:
        largest = np.where(high > -low, high, low)
    weights = (importance / max(float(importance.mean()), 1e-30)).astype(np.float32)[:, None]
    best = np.full(targets.shape[1], np.inf, np.float32)
    best_scale, best_zero = np.zeros_like(best), np.zeros_like(best)
    for shrink in _SHRINKS:
        if form.is_symmetric:
            scale = largest * np.float32(shrink) / -middle
            zero = np.full_like(scale, middle)
        else:
            scale = (high - low) * np.float32(shrink) / most
            exact = np.divide(-low * np.float32(shrink), scale, out=np.zeros_like(scale), where=scale != 0)
            zero = np.clip(np.rint(exact), 0, most)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        steps = np.clip(np.rint(targets * inverse) + zero, 0, most)
        difference = (steps - zero) * scale - targets
        error = (weights * difference * difference).sum(axis=0)
        is_better = error < best
        best = np.where(is_better, error, best)
        best_scale, best_zero = np.where(is_better, scale, best_scale), np.where(is_better, zero, best_zero)
    return best_scale, best_zero


_POWERS = tuple(step / 20 for step in range(1, 20))
"""Powers that are tried. Specified by the paper's code: a grid of 20."""


_SEARCHED_COLUMNS = 256
"""Output channels that powers are tried on, evenly spaced. Chosen: the error is a sum over them, so some hundred say
which power is best."""


def awq_scale(matrices: Sequence[Array], statistics: InputStatistics, forms: Sequence[BlockForm]) -> Array | None:
    """Return the divisor of the inputs of matrices by AWQ; `None` if no scale makes the outputs better.

    AWQ (Lin et al., MLSys 2024): inputs that are large on the data are divided by a scale and their rows of the matrix
    multiplied with it, so that they are rounded more finely. The scale is a power of the mean absolute input, the one
    with the smallest error of the outputs. The paper measures the error on samples; here it follows from the Gram
    matrix.

    Args:
        matrices: float32, depth × width; all are multiplied with the same inputs.
        statistics: Of these inputs.
        forms: How the values of each are kept.
    """
    size = np.maximum(statistics.absolute / max(statistics.rows, 1), 1e-8)
    tried_on = [np.ascontiguousarray(matrix[:, :: -(-matrix.shape[1] // _SEARCHED_COLUMNS)]) for matrix in matrices]

    def error(scale: Array | None) -> float:
        return sum(
            output_error(_scaled_difference(matrix, scale, form), statistics)
            for matrix, form in zip(tried_on, forms, strict=True)
        )

    best, found = error(None), None
    for power in _POWERS:
        scale = size**power
        scale = (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)
        if (tried := error(scale)) < best:
            best, found = tried, scale
    return found


def _scaled_difference(matrix: Array, scale: Array | None, form: BlockForm) -> Array:
    scaled = matrix if scale is None else matrix * scale[:, None]
    rounded = unpack_blocks(quantize_blocks(scaled, form), form, len(matrix))
    return (rounded if scale is None else rounded / scale[:, None]) - matrix
