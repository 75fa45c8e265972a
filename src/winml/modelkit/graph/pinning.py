"""How does a graph with open dimensions become one with fixed sizes?

Replaces names by numbers in the shapes a graph declares, in place. What follows from that inside the graph is inferred
anew by whoever asked (``normalize``); values are not touched.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

__all__ = ["open_dimensions", "pin_dimensions"]


def open_dimensions(graph: ir.Graph) -> dict[str, list[str]]:
    """Return the names in the shapes of the inputs, each with the inputs it stands in."""
    found: dict[str, list[str]] = {}
    for value in graph.inputs:
        if value.name in graph.initializers:
            continue  # a default for a weight, in files of old IR versions
        for size in value.shape or ():
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                found.setdefault(str(size.value), []).append(value.name or "")
    return found


def pin_dimensions(model: ir.Model, sizes: Mapping[str, int]) -> None:
    """Fix dimensions of the inputs, in place, and forget the shapes that followed from them.

    Expressions on outputs (``(samples - 80)//320``) are computed where every name in them is fixed.

    Args:
        model: The model; subgraphs included.
        sizes: Name → size.
    """
    for value in model.graph.inputs:
        value.shape = _pinned(value.shape, sizes)
    outputs = {value.name for value in model.graph.outputs}
    for node in model.graph.all_nodes():
        for value in node.outputs:
            # Inference states anew what follows; an output's expression is more than it can find out.
            value.shape = _pinned(value.shape, sizes) if value.name in outputs else None


def _pinned(shape: ir.Shape | None, sizes: Mapping[str, int]) -> ir.Shape | None:
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
        return name  # a foreign exporter's own words for a size
