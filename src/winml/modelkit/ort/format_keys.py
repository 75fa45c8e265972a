"""Keys of quantized formats: one spelling for the graphs that ask a provider, its answers, and their readers."""

from __future__ import annotations

from typing import Final, Literal

WeightScales = Literal["tensor", "channel", "block"]
"""Values of a weight that share a scale."""

HALF_PRODUCT: Final = "MatMul/float16"
DYNAMIC_PRODUCT: Final = "MatMulInteger"
"""A product of 8-bit weights and activations that are quantized in each run."""


def product_key(weight_bits: int, activation_bits: int, scales: WeightScales, operator: str = "MatMul") -> str:
    """Return the key of an operator with a quantized weight and quantized activations.

    >>> product_key(8, 16, "channel")
    'MatMul/w8a16/channel'
    """
    return f"{operator}/w{weight_bits}a{activation_bits}/{scales}"


def block_product_key(bits: int, rank: int) -> str:
    """Return the key of ``MatMulNBits`` for an input of a number of dimensions.

    >>> block_product_key(4, 3)
    'MatMulNBits/4/rank 3'
    """
    return f"MatMulNBits/{bits}/rank {rank}"
