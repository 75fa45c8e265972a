"""How far may two answers differ and still agree? Every threshold of a comparison, with its origin."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["CUT_MODULE_THRESHOLD", "MINIMUM_SCALE", "ROUNDING_FACTOR", "THRESHOLDS"]

THRESHOLDS: Mapping[str, float] = {
    "float64": 1e-7,
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
"""Largest accepted difference relative to the largest reference value, per dtype the output is computed in.

Chosen about a hundred times above what correct exports show (2e-6 for float32, measured over 36 architectures) and a
thousand times below what a wrong mask or a stray input does (0.9 to 1.4). Half precision: ten units in the last place
of ``float16`` (2**-11) and of ``bfloat16`` (2**-8), since both sides round after every operator, in different orders.
Integers and booleans must be equal.
"""

MINIMUM_SCALE = 1e-20
"""Below this a reference is nothing but rounding. Chosen well under any activation, over float32's smallest normal."""

ROUNDING_FACTOR = 10
"""How many times the threshold two files may differ as written and still be compared as ONNX Runtime runs them by
default, where rounding is done alike. Measured: 2 on resnet-50 with random weights, 50 convolutions deep; what a wrong
graph differs by is a thousand times the threshold and more (``THRESHOLDS``)."""

CUT_MODULE_THRESHOLD = 1e-6
"""Largest accepted difference of a module that was cut out from the same module in the whole model, relative to the
largest value. Chosen far below any dtype's own error: both run the same kernels on the same values, and every model
tried is equal bit for bit."""
