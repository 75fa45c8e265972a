"""Kernels of execution providers for the operators that fusions create, by element type.

Data only, taken from ONNX Runtime's kernel registries (``fused_operators.json``). No heavy imports.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_TABLE = Path(__file__).with_name("fused_operators.json")


@functools.cache
def _load_table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return table


def kernel_types(operator: str) -> Mapping[str, tuple[str, ...]]:
    """Return short name of a provider → float types of its kernels, for one operator; `{}` for an unknown operator.

    Args:
        operator: Operator with its domain unless ONNX's (``com.microsoft:Gelu``). A row of the table may also require
            an optional input: ``com.microsoft:GroupQueryAttention(attention_bias)``.

    >>> kernel_types("com.microsoft:FusedConv")["cuda"]
    ('float32',)
    """
    row: Mapping[str, str] = _load_table()["operators"].get(operator, {})
    return {provider: tuple(types.split()) for provider, types in row.items()}


def providers_in_table() -> tuple[str, ...]:
    """Return the short names of the providers in the table."""
    return tuple(_load_table()["sources"])


def providers_with_kernels(operators: Sequence[str]) -> tuple[str, ...]:
    """Return the short names of the providers with kernels for all operators; `()` for no operators.

    >>> providers_with_kernels(["com.microsoft:FusedGemm"])
    ('cpu',)
    """
    rows = list(map(kernel_types, operators))
    return tuple(provider for provider in providers_in_table() if rows and all(provider in row for row in rows))
