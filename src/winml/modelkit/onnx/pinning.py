"""Fixing of the dynamic dimensions of a graph.

Replaces names by numbers in the declared shapes, in place. The caller infers the inner shapes again (``normalize``).
Values are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from winml.modelkit.onnx.specs import resolve_names


def open_dimensions(graph: ir.Graph) -> dict[str, list[str]]:
    """Return name of a dynamic dimension → its axes in the inputs, ``input:axis``.

    A dimension without a name is named by its axis.
    """
    axes_by_name: dict[str, list[str]] = {}
    for value in graph.inputs:
        if value.name in graph.initializers:
            continue  # a weight; files of IR version 3 list weights as inputs too
        for axis, size in enumerate(value.shape or ()):
            if isinstance(size, ir.SymbolicDim):
                axis_name = f"{value.name}:{axis}"
                axes_by_name.setdefault(axis_name if size.value is None else str(size.value), []).append(axis_name)
    return axes_by_name


def sizes_of_dimensions(graph: ir.Graph, sizes: Mapping[str, int]) -> dict[str, int]:
    """Resolve sizes to the names of the dynamic dimensions in the graph.

    Args:
        graph: The graph with the dimensions.
        sizes: By name, by ``input:axis``, or by key of ``--shape-config``.

    Raises:
        UsageError: a dimension is unknown, or has two sizes.
    """
    dimensions = open_dimensions(graph)
    places = {axis_name: name for name, at_places in dimensions.items() for axis_name in at_places}
    return resolve_names(sizes, dimensions, places)


def pin_dimensions(model: ir.Model, sizes: Mapping[str, int]) -> None:
    """Fix dimensions of the inputs, in place, and remove the inner shapes, which depend on the inputs.

    Expressions on outputs (``(samples - 80)//320``) are computed if every name in them is fixed.

    Args:
        model: The model; subgraphs included.
        sizes: Name → size; ``input:axis`` for a dimension without a name.
    """
    for value in model.graph.inputs:
        value.shape = _pin_shape(value.shape, sizes, value.name or "")
    outputs = {value.name for value in model.graph.outputs}
    for node in model.graph.all_nodes():
        for value in node.outputs:
            # Shape inference restores inner shapes; it could not restore the expression on an output.
            value.shape = _pin_shape(value.shape, sizes) if value.name in outputs else None


def _pin_shape(shape: ir.Shape | None, sizes: Mapping[str, int], input_name: str = "") -> ir.Shape | None:
    """Return a shape with fixed sizes; `None` stays."""
    if shape is None:
        return None
    return ir.Shape([_pin_size(size, sizes, f"{input_name}:{axis}") for axis, size in enumerate(shape)])


def _pin_size(size: int | ir.SymbolicDim, sizes: Mapping[str, int], axis_name: str) -> int | str | None:
    """Return the size of an axis: a number if fixed, or computed from fixed names; else the name."""
    if isinstance(size, int) or size.value is None:
        return size if isinstance(size, int) else sizes.get(axis_name)
    name = str(size.value)
    if name in sizes:
        return sizes[name]
    try:
        computed = size.evaluate(dict(sizes))
        return computed if isinstance(computed, int) else name
    except (ValueError, TypeError, SyntaxError, NotImplementedError):
        return name  # an expression of another exporter that cannot be evaluated
