"""Graphs with weights large enough to quantize, written as text; ``graphs.parse`` makes their values."""

from __future__ import annotations

import math


def weight(name: str, *shape: int, dtype: str = "float") -> str:
    """Return the text of an initializer: random values if its name begins with ``w``, else zeros."""
    return f"{dtype}[{', '.join(map(str, shape))}] {name} = {{{', '.join(['0'] * math.prod(shape))}}}"


_WEIGHTS = ", ".join([weight("w1", 64, 64), weight("w2", 64, 32), weight("w_b", 32)])
PERCEPTRON = f"""m (float[N, 64] x) => (float[N, 32] y) <{_WEIGHTS}>
    {{ a = MatMul (x, w1) r = Relu (a) y = Gemm (r, w2, w_b) }}"""
"""``MatMul``, ``Relu``, ``Gemm``; weights of 16 and 8 kB."""

CONVOLUTION = f"""m (float[N, 3, 16, 16] x) => (float[N, 8, 14, 14] y) <{weight("w", 8, 3, 3, 3)}>
    {{ y = Conv (x, w) }}"""
