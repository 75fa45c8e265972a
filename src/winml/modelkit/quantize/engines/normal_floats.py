"""Engine for weights in 4-bit normal floats (NF4), the type of bitsandbytes, with float activations.

Before / After::

    x, weight[K,N] → MatMul                 x, values, largest magnitudes of blocks → MatMulBnb4
"""

from __future__ import annotations

import math

import onnx
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.weights import computed_tensor
from winml.modelkit.quantize.engines.block_quantizers import WeightMatrix
from winml.modelkit.quantize.engines.integer_weights import WeightUse
from winml.modelkit.quantize.engines.weight_only import DOMAIN, Operand, Packing, quantize_by
from winml.modelkit.quantize.planning import EngineTask, WeightKey

_BLOCK_SIZE = 64
"""Specified by bitsandbytes: values of the flat weight, width × depth, that share a scale."""
_NORMAL_FLOATS = 1
"""Specified: ``quant_type`` of ``MatMulBnb4``."""


def quantize_to_normal_floats(model: ir.Model, task: EngineTask) -> ir.Model:
    """Return a copy of the model with 4-bit normal floats as weights of the selected products."""
    return quantize_by(_NormalFloatPacking, model, task)


class _NormalFloatPacking(Packing):
    """Replace products of one graph and its subgraphs by ``MatMulBnb4``, in place."""

    def __init__(self, graph: ir.Graph, task: EngineTask) -> None:
        """Store the graph and the task; nothing is changed yet."""
        super().__init__(graph, task)
        self._parts: dict[WeightKey, tuple[ir.Value, ir.Value]] = {}

    def _make_product(self, node: ir.Node, operand: Operand) -> ir.Node:
        """Create the product with a weight of normal floats, shared with other readers."""
        tensor = operand.value.const_value
        assert tensor is not None  # an operand has values
        matrix = WeightMatrix(tensor, operand.is_transposed)
        if operand.key not in self._parts:
            use, count, name = WeightUse.of(operand.value, node), matrix.depth * matrix.width, operand.value.name
            codes = computed_tensor(
                lambda: _quantize(matrix, use)[0], ir.DataType.UINT8, [math.ceil(count / 2)], f"{name}_NF4"
            )
            scales = computed_tensor(
                lambda: _quantize(matrix, use)[1].astype(tensor.dtype.numpy()),
                tensor.dtype,
                [math.ceil(count / _BLOCK_SIZE)],
                f"{name}_absmax",
            )
            self._parts[operand.key] = self._add_tensor(codes), self._add_tensor(scales)
        attributes = {"K": matrix.depth, "N": matrix.width, "block_size": _BLOCK_SIZE, "quant_type": _NORMAL_FLOATS}
        inputs = [node.inputs[0], *self._parts[operand.key]]
        return ir.node("MatMulBnb4", inputs, attributes, domain=DOMAIN, name=node.name)


def _quantize(matrix: WeightMatrix, use: WeightUse) -> tuple[Array, Array]:
    """Return two codes per byte, and the largest magnitude of each block.

    Raises:
        QuantizeError: a value of the weight is NaN or infinite.
    """
    from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer

    values = matrix.values()
    use.refuse_non_finite(values)
    quantizer = MatMulBnb4Quantizer(onnx.ModelProto(), _NORMAL_FLOATS, _BLOCK_SIZE)
    codes, scales = quantizer.bnb4_block_quant(values)
    return codes, scales
