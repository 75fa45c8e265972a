"""Tensors that hold one number everywhere, as the mask of a model that masks nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from winml.modelkit.normalize.sizes.expressions import product
from winml.modelkit.normalize.sizes.grids import Grids
from winml.modelkit.normalize.sizes.propagation import KnownSizes, is_standard, reduced_axes

__all__ = ["Uniforms"]

_MOST_READ = 1 << 16
"""Elements. Chosen: a mask of 256 tokens; a weight is not read."""
_READ = (ir.DataType.BOOL, ir.DataType.INT64, ir.DataType.INT32)
_READ_ALONE = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
_MOVES = ("Unsqueeze", "Squeeze", "Reshape", "Flatten", "Transpose", "Slice", "Expand", "Identity")
_COMPUTED = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "And": np.logical_and,
    "Or": np.logical_or, "Not": np.logical_not, "Less": np.less, "LessOrEqual": np.less_equal,
    "Greater": np.greater, "GreaterOrEqual": np.greater_equal, "Equal": np.equal,
}  # fmt: skip
"""Operator → what it does to each element."""


@dataclass
class Uniforms:
    """What is known of tensors that hold one number everywhere."""

    known: KnownSizes
    grids: Grids
    numbers: dict[ir.Value, Any] = field(default_factory=dict)
    """Value → its number; None where a constant was found to hold several."""

    def learn(self, node: ir.Node) -> None:
        """Learn what a node makes; those before it come first."""
        if node.domain not in ("", "ai.onnx") or len(node.outputs) != 1:
            return
        number = self._number_made(node)
        if number is not None and node.outputs[0].dtype is not None:
            self.numbers[node.outputs[0]] = number.astype(node.outputs[0].dtype.numpy())

    def number(self, value: ir.Value | None) -> Any:
        """Return the number a tensor holds everywhere, or None."""
        if value is None:
            return None
        if value not in self.numbers and value.const_value is not None:
            self.numbers[value] = _number_of(value.const_value)
        return self.numbers.get(value)

    def _number_made(self, node: ir.Node) -> Any:
        if self.grids.is_always_true(node):
            return np.bool_(True)
        if not node.inputs:
            return None
        numbers = [self.number(value) for value in node.inputs]
        if is_standard(node, *_MOVES, "Cast"):
            return numbers[0]
        if is_standard(node, *_COMPUTED) and None not in numbers:
            with np.errstate(all="ignore"):
                return np.asarray(_COMPUTED[node.op_type](*numbers))[()]
        if is_standard(node, "ReduceSum") and numbers[0] is not None:
            return self._sum(node, numbers[0])
        return None

    def _sum(self, node: ir.Node, number: Any) -> Any:
        shape, axes = self.known.shape(node.inputs[0]), reduced_axes(self.known, node)
        if shape is None or axes is None:
            return None
        count = product(shape[axis] for axis in axes).number
        return None if count is None else np.asarray(number * count)[()]


def _number_of(tensor: ir.TensorProtocol) -> Any:
    # Parameters are left alone, such as a bias of zeros: they are fractions, and several.
    is_read = tensor.dtype in _READ or (tensor.dtype in _READ_ALONE and tensor.size == 1)
    if not is_read or not 0 < tensor.size <= _MOST_READ:
        return None
    elements = tensor.numpy().reshape(-1)
    number = elements[0]
    return number if bool((elements == number).all()) else None
