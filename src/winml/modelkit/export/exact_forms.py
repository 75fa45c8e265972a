"""ONNX forms of operators that are accurate over the whole range of a float, for both exporters.

The forms of torch are accurate for values near 1, such as random inputs: they lose all digits near 0, or overflow
although the result does not (``log(exp(a) + exp(b))`` from 88 on). A form is written once, on a builder that each
exporter provides. ``torchscript/capturing.py`` and ``dynamo/operator_forms.py`` map torch's operators to forms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol


class GraphBuilder(Protocol):
    """Adds nodes to the graph of one exporter."""

    def op(self, operator: str, *inputs: Any, **attributes: int) -> Any:
        """Add a node of an ONNX operator with one output; return the output."""

    def number(self, value: float, like: Any, /) -> Any:
        """Return a constant of the dtype of ``like``."""

    def index(self, value: int) -> Any:
        """Return a constant of 64 bits."""


MOST_FACTORS = 16
"""Chosen: more integers than that overflow unless most are 1, and each takes two nodes."""
_ERFCX = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806,
    0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277,
)  # fmt: skip
"""Specified: ``erfcc`` of Numerical Recipes, relative error 1.2e-7 for every argument from 0 on."""
_ERFINV_MIDDLE = (
    1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087,
    -4.39150654e-06, -3.5233877e-06, 3.43273939e-07, 2.81022636e-08,
)  # fmt: skip
_ERFINV_OUTER = (
    2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773,
    -0.00367342844, 0.00134934322, 0.000100950558, -0.000200214257,
)  # fmt: skip
"""Specified: M. Giles, Approximating the erfinv function (GPU Computing Gems, 2012), in single precision."""


def expm1(builder: GraphBuilder, x: Any) -> Any:
    """``tanh(x / 2) * (exp(x) + 1)``: equal to ``exp(x) - 1``, and accurate near 0, where the difference cancels."""
    half = builder.op("Div", x, builder.number(2.0, x))
    raised = builder.op("Add", builder.op("Exp", x), builder.number(1.0, x))
    return builder.op("Mul", builder.op("Tanh", half), raised)


def log1p(builder: GraphBuilder, x: Any) -> Any:
    """``log(1 + x)``."""
    is_small = builder.op("Less", builder.op("Abs", x), builder.number(0.5, x))
    logarithm = builder.op("Log", builder.op("Add", x, builder.number(1.0, x)))
    return builder.op("Where", is_small, _log1p_near_zero(builder, x), logarithm)


def _log1p_near_zero(builder: GraphBuilder, x: Any) -> Any:
    """``x * log(u) / (u - 1)`` with ``u = 1 + x``: the rounding of ``u`` cancels."""
    one = builder.number(1.0, x)
    raised = builder.op("Add", x, one)
    slope = builder.op("Div", x, builder.op("Sub", raised, one))
    corrected = builder.op("Mul", builder.op("Log", raised), slope)
    return builder.op("Where", builder.op("Equal", raised, one), x, corrected)


def atan2(builder: GraphBuilder, y: Any, x: Any) -> Any:
    """The angle of each point, also of the origin and of zeros with a sign."""
    op = builder.op
    zero, pi, one = (builder.number(value, y) for value in (0.0, math.pi, 1.0))
    is_level, is_upright = op("Equal", y, zero), op("Equal", x, zero)
    angle = op("Atan", op("Div", y, op("Where", is_upright, op("Where", is_level, one, zero), x)))
    # Zeros have a sign of their own, which their reciprocals show.
    signed_y = op("Where", is_level, op("Div", one, y), y)
    signed_x = op("Where", is_upright, op("Div", one, x), x)
    turn = op("Where", op("Less", signed_y, zero), op("Neg", pi), pi)
    is_beside = op("Or", is_level, op("Not", is_upright))
    is_turned = op("And", op("Less", signed_x, zero), is_beside)
    return op("Where", is_turned, op("Add", angle, turn), angle)


def log_sigmoid(builder: GraphBuilder, x: Any) -> Any:
    """``min(x, 0) - log1p(exp(-|x|))``. ONNX Runtime's Sigmoid is 0 from -18 on."""
    decay = builder.op("Exp", builder.op("Neg", builder.op("Abs", x)))
    return builder.op("Sub", builder.op("Min", x, builder.number(0.0, x)), _log1p_near_zero(builder, decay))


def logaddexp(builder: GraphBuilder, a: Any, b: Any) -> Any:
    """``log(exp(a) + exp(b))``, as the larger one plus ``log1p(exp(-|a - b|))``."""
    decay = builder.op("Exp", builder.op("Neg", _absolute_difference(builder, a, b)))
    return builder.op("Add", builder.op("Max", a, b), _log1p_near_zero(builder, decay))


def logaddexp2(builder: GraphBuilder, a: Any, b: Any) -> Any:
    """``log2(2 ** a + 2 ** b)``, as the larger one plus ``log2(1 + 2 ** -|a - b|)``."""
    decay = builder.op("Pow", builder.number(2.0, a), builder.op("Neg", _absolute_difference(builder, a, b)))
    surplus = builder.op("Div", _log1p_near_zero(builder, decay), builder.number(math.log(2.0), a))
    return builder.op("Add", builder.op("Max", a, b), surplus)


def _absolute_difference(builder: GraphBuilder, a: Any, b: Any) -> Any:
    """``|a - b|``; 0 for equal infinities."""
    distance = builder.op("Abs", builder.op("Sub", a, b))
    return builder.op("Where", builder.op("Equal", a, b), builder.number(0.0, a), distance)


def erfcx(builder: GraphBuilder, x: Any) -> Any:
    """``exp(x ** 2) * erfc(x)``, which decreases slowly although one factor overflows; below 0 by reflection."""
    scaled = _scaled_erfc(builder, x)
    square = builder.op("Exp", builder.op("Mul", x, x))
    reflected = builder.op("Sub", builder.op("Mul", builder.number(2.0, x), square), scaled)
    return builder.op("Where", builder.op("Less", x, builder.number(0.0, x)), reflected, scaled)


def erfc(builder: GraphBuilder, x: Any) -> Any:
    """``1 - erf(x)``, which cancels from 0.5 on; there ``exp(-x ** 2) * erfcx(x)``."""
    difference = builder.op("Sub", builder.number(1.0, x), builder.op("Erf", x))
    tail = builder.op("Mul", builder.op("Exp", builder.op("Neg", builder.op("Mul", x, x))), _scaled_erfc(builder, x))
    return builder.op("Where", builder.op("Less", x, builder.number(0.5, x)), difference, tail)


def _scaled_erfc(builder: GraphBuilder, x: Any) -> Any:
    """``erfcx(|x|)``."""
    one = builder.number(1.0, x)
    half = builder.op("Mul", builder.op("Abs", x), builder.number(0.5, x))
    t = builder.op("Div", one, builder.op("Add", one, half))
    return builder.op("Mul", t, builder.op("Exp", _evaluate_polynomial(builder, _ERFCX, t)))


def erfinv(builder: GraphBuilder, y: Any, *, newton_steps: int = 0) -> Any:
    """The inverse of ``erf``, by a polynomial of ``-log(1 - y ** 2)``.

    Args:
        builder: Adds the nodes.
        y: The argument.
        newton_steps: Steps of Newton's method, for a dtype with more digits than the polynomial's seven.
    """
    op, one = builder.op, builder.number(1.0, y)
    # The factors are exact near 1, where 1 - y ** 2 is not.
    depth = op("Neg", op("Log", op("Mul", op("Sub", one, y), op("Add", one, y))))
    middle = _evaluate_polynomial(builder, _ERFINV_MIDDLE, op("Sub", depth, builder.number(2.5, y)))
    outer = _evaluate_polynomial(builder, _ERFINV_OUTER, op("Sub", op("Sqrt", depth), builder.number(3.0, y)))
    x = op("Mul", y, op("Where", op("Less", depth, builder.number(5.0, y)), middle, outer))
    for _step in range(newton_steps):
        slope = op("Mul", builder.number(2.0 / math.sqrt(math.pi), y), op("Exp", op("Neg", op("Mul", x, x))))
        x = op("Sub", x, op("Div", op("Sub", op("Erf", x), y), slope))
    is_end = op("Equal", op("Abs", y), one)
    return op("Where", is_end, op("Mul", y, builder.number(math.inf, y)), x)


def _evaluate_polynomial(builder: GraphBuilder, factors: Sequence[float], x: Any) -> Any:
    """Evaluate a polynomial; its factors begin with the constant term."""
    *lower_factors, total = (builder.number(factor, x) for factor in factors)
    for factor in reversed(lower_factors):
        total = builder.op("Add", builder.op("Mul", total, x), factor)
    return total


def remainder(builder: GraphBuilder, a: Any, b: Any) -> Any:
    """``a % b`` of floats, with the sign of ``b``: ``a - floor(a / b) * b`` is wrong where ``a / b`` is rounded up."""
    residue, is_opposite = _signed_remainder(builder, a, b)
    return builder.op("Where", is_opposite, builder.op("Add", residue, b), residue)


def floor_divide(builder: GraphBuilder, a: Any, b: Any) -> Any:
    """``a // b`` of floats, by the exact remainder, as Python and torch compute it."""
    residue, is_opposite = _signed_remainder(builder, a, b)
    quotient = builder.op("Div", builder.op("Sub", a, residue), b)
    below = builder.op("Sub", quotient, builder.number(1.0, a))
    # A whole number but for rounding.
    whole = builder.op("Round", builder.op("Where", is_opposite, below, quotient))
    is_by_zero = builder.op("Equal", b, builder.number(0.0, a))
    return builder.op("Where", is_by_zero, builder.op("Div", a, b), whole)


def _signed_remainder(builder: GraphBuilder, a: Any, b: Any) -> tuple[Any, Any]:
    """Return the remainder with the sign of ``a``, and True if it is not 0 and ``b`` has the other sign."""
    zero, residue = builder.number(0.0, a), builder.op("Mod", a, b, fmod=1)
    has_other_sign = builder.op("Xor", builder.op("Less", residue, zero), builder.op("Less", b, zero))
    return residue, builder.op("And", builder.op("Not", builder.op("Equal", residue, zero)), has_other_sign)


def trunc_divide(builder: GraphBuilder, a: Any, b: Any) -> Any:
    """The quotient of floats, rounded towards 0."""
    quotient = builder.op("Div", a, b)
    is_negative = builder.op("Less", quotient, builder.number(0.0, a))
    return builder.op("Where", is_negative, builder.op("Ceil", quotient), builder.op("Floor", quotient))


def product(builder: GraphBuilder, x: Any, axis: int, count: int) -> Any:
    """The product along an axis of integers, modulo ``2 ** 64``; ONNX Runtime's ReduceProd computes in float64.

    Args:
        builder: Adds the nodes.
        x: The factors.
        axis: Removed.
        count: Size of the axis, at least 1.
    """
    total, *factors = (builder.op("Gather", x, builder.index(position), axis=axis) for position in range(count))
    for factor in factors:
        total = builder.op("Mul", total, factor)
    return total
