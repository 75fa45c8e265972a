"""Has ONNX forms of operators that torch's dynamo exporter lacks or has wrong.

* ``expm1``, ``log1p`` and ``atan2`` are exact near 0 and at zeros with a sign; they are those of TorchScript
  (``torchscript/capturing.py``), which say more.
* ``conv3d`` without a bias: onnxscript's form adds one of zeros with a wrong shape, which ONNX Runtime refuses.
* ``erf_inv`` and ``sym_numel``, the number of elements where values decide it, have no form in torch.
* ``squeeze`` leaves an axis that is longer than 1; onnxscript's form removes it, which ONNX Runtime refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["operator_forms"]

_MIDDLE = (
    (0.886226899, -1.645349621, 0.914624893, -0.140543331),
    (1.0, -2.118377725, 1.442710462, -0.329097515, 0.012229801),
)
_OUTER = ((-1.970840454, -1.624906493, 3.429567803, 1.641345311), (1.0, 3.543889200, 1.637067800))
"""Specified: the factors of PyTorch's ``calc_erfinv`` (aten/src/ATen/native/Math.h), numerator and denominator."""


def operator_forms() -> dict[Any, Callable[..., Any]]:
    """Return the forms, each in place of torch's own."""
    from onnxscript import opset18 as op

    def number(value: float, like: Any) -> Any:
        constant: Any = op.Constant(value_float=value)
        return op.CastLike(constant, like)

    def expm1(x: Any) -> Any:
        return op.Mul(op.Tanh(op.Div(x, number(2.0, x))), op.Add(op.Exp(x), number(1.0, x)))

    def log1p(x: Any) -> Any:
        one = number(1.0, x)
        raised = op.Add(x, one)
        logarithm = op.Log(raised)
        corrected = op.Mul(logarithm, op.Div(x, op.Sub(raised, one)))
        return op.Where(op.Equal(raised, one), x, op.Where(op.Less(op.Abs(x), number(0.5, x)), corrected, logarithm))

    def atan2(y: Any, x: Any) -> Any:
        zero, pi, one = number(0.0, y), number(math.pi, y), number(1.0, y)
        is_level, is_upright = op.Equal(y, zero), op.Equal(x, zero)
        angle = op.Atan(op.Div(y, op.Where(is_upright, op.Where(is_level, one, zero), x)))
        signed_y, signed_x = op.Where(is_level, op.Div(one, y), y), op.Where(is_upright, op.Div(one, x), x)
        turn = op.Where(op.Less(signed_y, zero), op.Neg(pi), pi)
        is_turned = op.And(op.Less(signed_x, zero), op.Or(is_level, op.Not(is_upright)))
        return op.Where(is_turned, op.Add(angle, turn), angle)

    def erf_inv(y: Any) -> Any:
        # As PyTorch computes it: a rational approximation, and two steps of Newton's method.
        one, size = number(1.0, y), op.Abs(y)
        square = op.Mul(y, y)
        middle = op.Div(op.Mul(y, polynomial(_MIDDLE[0], square)), polynomial(_MIDDLE[1], square))
        distance = op.Sqrt(op.Neg(op.Log(op.Div(op.Sub(one, size), number(2.0, y)))))
        outer = op.Div(op.Mul(op.Sign(y), polynomial(_OUTER[0], distance)), polynomial(_OUTER[1], distance))
        x = op.Where(op.LessOrEqual(size, number(0.7, y)), middle, outer)
        for _step in range(2):
            slope = op.Mul(number(2.0 / math.sqrt(math.pi), y), op.Exp(op.Neg(op.Mul(x, x))))
            x = op.Sub(x, op.Div(op.Sub(op.Erf(x), y), slope))
        return op.Where(op.Equal(size, one), op.Mul(y, number(math.inf, y)), x)

    def polynomial(factors: Sequence[float], x: Any) -> Any:
        *rest, total = (number(factor, x) for factor in factors)
        for factor in reversed(rest):
            total = op.Add(op.Mul(total, x), factor)
        return total

    def conv3d(
        x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> Any:
        strides, pads, dilations = (
            list(sizes) * (3 // len(sizes)) if isinstance(sizes, Sequence) else [sizes] * 3
            for sizes in (stride, padding, dilation)
        )
        return op.Conv(x, weight, bias, strides=strides, pads=[*pads, *pads], dilations=dilations, group=groups)

    def squeeze(x: Any, dim: int) -> Any:
        # Of a dynamic size torch traces one above 1.
        axes: Any = op.Constant(value_ints=[dim])
        return op.Squeeze(x, axes) if len(x.shape) and x.shape[dim] == 1 else op.Identity(x)

    aten = torch.ops.aten
    return {
        aten.atan2.default: atan2,
        aten.conv3d.default: conv3d,
        aten.expm1.default: expm1,
        aten.log1p.default: log1p,
        aten.squeeze.dim: squeeze,
        aten.sym_numel.default: op.Size,
        torch.ops.prims.erf_inv.default: erf_inv,
    }
