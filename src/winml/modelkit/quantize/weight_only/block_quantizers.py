"""Quantizes a matrix in blocks with what the installed ONNX Runtime has for it.

A block is some consecutive values of one output channel that share a scale. Knows arrays only.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from winml.modelkit.quantize.options import Algorithm
from winml.modelkit.quantize.weight_only.nearest_steps import round_to_nearest_steps

__all__ = ["BlockForm", "Blocks", "quantize_blocks"]

Array = NDArray[Any]


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
    zero_points: Array | None
    """uint8, width × bytes of the zero points of a channel; or float32, width × blocks."""


def quantize_blocks(matrix: Array, form: BlockForm) -> Blocks:
    """Quantize a float32 matrix of depth × width, in any memory order."""
    if form.algorithm == "rtn" and matrix.shape[0] % form.block_size == 0:
        return _round_whole_blocks(matrix, form)
    return _ALGORITHMS[form.algorithm](np.ascontiguousarray(matrix), form)


def _round_whole_blocks(matrix: Array, form: BlockForm) -> Blocks:
    rounded = round_to_nearest_steps(matrix, form.bits, form.block_size, is_symmetric=form.is_symmetric)
    # ONNX Runtime fills the byte of an odd number of blocks with the middle, and here bytes are the same.
    zero_points = _packed_zero_points(rounded.zero_points, form, unused=2 ** (form.bits - 1))
    return Blocks(rounded.packed, rounded.scales, None if form.is_symmetric else zero_points)


def _round_to_nearest(matrix: Array, form: BlockForm) -> Blocks:
    """Round with ONNX Runtime's own function, which pads the last block."""
    with _logging_left_alone():
        from onnxruntime.quantization.matmul_nbits_quantizer import (
            DefaultWeightOnlyQuantConfig,
            DefaultWeightOnlyQuantizer,
        )
    config = DefaultWeightOnlyQuantConfig(block_size=form.block_size, is_symmetric=form.is_symmetric, bits=form.bits)
    packed, scales, zero_points = DefaultWeightOnlyQuantizer(config).qbits_block_quant(matrix)
    # Earlier versions of ONNX Runtime answer flat arrays.
    width = len(packed)
    return Blocks(
        packed, scales.reshape(width, -1), None if form.is_symmetric else np.asarray(zero_points).reshape(width, -1)
    )


def _half_quadratic(matrix: Array, form: BlockForm) -> Blocks:
    with _logging_left_alone():
        from onnxruntime.quantization.matmul_nbits_quantizer import HQQWeightOnlyQuantConfig, HQQWeightOnlyQuantizer
    config = HQQWeightOnlyQuantConfig(block_size=form.block_size, bits=form.bits)
    graph = onnx.GraphProto(initializer=[ir.serde.serialize_tensor(ir.tensor(matrix.copy(), name="w"))])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # and is not written
        (product,) = HQQWeightOnlyQuantizer(config).quantize(_product_node(), [graph])
    packed, scales, zero_points = _arrays(product, graph.initializer)
    return Blocks(packed, scales.reshape(packed.shape[:2]), zero_points.reshape(packed.shape[:2]))


def _k_quant(matrix: Array, form: BlockForm) -> Blocks:
    with _logging_left_alone():
        from onnxruntime.quantization.neural_compressor import weight_only

    depth, width = matrix.shape
    count = form.block_count(depth)
    padded = np.pad(matrix, ((0, count * form.block_size - depth), (0, 0)))
    rows = np.ascontiguousarray(padded.T).reshape(-1, form.block_size)
    values, scales, zero_points = weight_only.quant_tensor_k_quant_cpu(rows, form.bits, form.block_size)
    product, initializers = weight_only.make_matmul_weight_only_node(
        node=_product_node(),
        weight_shape=(depth, width),
        num_bits=form.bits,
        group_size=form.block_size,
        k_blocks=count,
        q_weight=values.astype(np.uint8),
        scale=scales.astype(np.float32),
        zero_point=None,  # it packs those of an odd number of blocks across output channels
    )
    packed, scales = _arrays(product, initializers)
    return Blocks(packed, scales, _packed_zero_points(zero_points.astype(np.uint8).reshape(width, count), form))


def _product_node() -> onnx.NodeProto:
    """Return the node whose weight these quantizers take."""
    return onnx.NodeProto(op_type="MatMul", name="product", input=["x", "w"], output=["y"])


def _arrays(product: onnx.NodeProto, initializers: Iterable[onnx.TensorProto]) -> list[Array]:
    arrays = {tensor.name: ir.serde.deserialize_tensor(tensor).numpy() for tensor in initializers}
    return [arrays[name] for name in product.input[1:]]


def _packed_zero_points(zero_points: Array, form: BlockForm, unused: int = 0) -> Array:
    """Return whole zero points of width × blocks with those of a channel in as few bytes as hold them.

    Args:
        zero_points: One in a byte.
        form: How many a byte holds.
        unused: What stands where an odd number of blocks leaves half a byte.
    """
    if form.values_per_byte == 1:
        return zero_points
    even = np.pad(zero_points, ((0, 0), (0, zero_points.shape[1] % 2)), constant_values=unused)
    packed: Array = even[:, ::2] | even[:, 1::2] << 4
    return packed


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
