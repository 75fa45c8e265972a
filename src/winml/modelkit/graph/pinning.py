"""Fixes the open dimensions of a graph.

Replaces names by numbers in the declared shapes, in place. The inner shapes are inferred again by the caller
(``normalize``). Values are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

__all__ = ["open_dimensions", "pin_dimensions"]


def open_dimensions(graph: ir.Graph) -> dict[str, list[str]]:
    """Return name of an open dimension → names of the inputs whose shapes contain it."""
    inputs_by_name: dict[str, list[str]] = {}
    for value in graph.inputs:
        if value.name in graph.initializers:
            continue  # a weight; files of IR version 3 list them as inputs as well
        for size in value.shape or ():
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                inputs_by_name.setdefault(str(size.value), []).append(value.name or "")
    return inputs_by_name


def pin_dimensions(model: ir.Model, sizes: Mapping[str, int]) -> None:
    """Fix dimensions of the inputs, in place, and remove the inner shapes, which depend on them.

    Expressions on outputs (``(samples - 80)//320``) are computed where every name in them is fixed.

    Args:
        model: The model; subgraphs included.
        sizes: Name → size.
    """
    for value in model.graph.inputs:
        value.shape = _pinned_shape(value.shape, sizes)
    outputs = {value.name for value in model.graph.outputs}
    for node in model.graph.all_nodes():
        for value in node.outputs:
            # Shape inference restores inner shapes; it could not restore the expression on an output.
            value.shape = _pinned_shape(value.shape, sizes) if value.name in outputs else None


def _pinned_shape(shape: ir.Shape | None, sizes: Mapping[str, int]) -> ir.Shape | None:
    return None if shape is None else ir.Shape([_pinned_size(size, sizes) for size in shape])


def _pinned_size(size: int | ir.SymbolicDim, sizes: Mapping[str, int]) -> int | str | None:
    if isinstance(size, int) or size.value is None:
        return size if isinstance(size, int) else None
    name = str(size.value)
    if name in sizes:
        return sizes[name]
    try:
        computed = size.evaluate(dict(sizes))
        return computed if isinstance(computed, int) else name
    except (ValueError, TypeError, SyntaxError, NotImplementedError):
        return name  # an expression of another exporter that cannot be evaluated
