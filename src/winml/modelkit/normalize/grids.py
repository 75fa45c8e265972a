"""Tensors of whole numbers that count along their axes, as masks compute positions.

A mask is exported as arithmetic on positions: which row, which query, which key. With fixed sizes it is computed once;
with open ones the arithmetic stays. Most of it says nothing: every position is at least zero, and an element for every
position in order is the tensor itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from winml.modelkit.normalize.size_propagation import (
    KnownSizes,
    Shape,
    UnknownSizeError,
    casts_to_sizes,
    is_whole_slice,
)
from winml.modelkit.normalize.sizes import ONE, ZERO, Size, constant
from winml.modelkit.onnx.operators import is_operator

_COMPARISONS = ("GreaterOrEqual", "Greater", "LessOrEqual", "Less")


@dataclass(frozen=True)
class Grid:
    """A tensor whose element is ``start`` plus, for some axes, a step times the position on the axis."""

    steps: tuple[tuple[int, Size], ...]
    """Axis, counted from the last, which is -1, with its step."""
    start: Size

    def __add__(self, other: Grid) -> Grid:
        sums = dict(self.steps)
        for axis, step in other.steps:
            sums[axis] = sums.get(axis, ZERO) + step
        return Grid(tuple(sorted((axis, step) for axis, step in sums.items() if step.terms)), self.start + other.start)

    def times(self, factor: Size) -> Grid:
        """Return the grid multiplied by a size."""
        steps = tuple((axis, step * factor) for axis, step in self.steps) if factor.terms else ()
        return Grid(steps, self.start * factor)


@dataclass
class Grids:
    """What is known of grids."""

    known: KnownSizes
    grids: dict[ir.Value, Grid] = field(default_factory=dict)

    def learn(self, node: ir.Node) -> None:
        """Learn what a node of one output makes; those before it come first."""
        output = node.outputs[0]
        try:
            grid, shape = self._computed_grid(node), self.known.shape(output)
        except UnknownSizeError:
            return
        if grid is not None:
            # Along an axis of one element there is nothing to count.
            steps = tuple((axis, step) for axis, step in grid.steps if shape[axis] != ONE)
            self.grids[output] = Grid(steps, grid.start)

    def grid(self, value: ir.Value | None) -> Grid:
        """Return the grid a value is; raises UnknownSizeError if it is none."""
        grid = None if value is None else self.grids.get(value)
        if grid is None:
            scalar = self.known.find_scalar(value)
            if scalar is None:
                raise UnknownSizeError
            grid = Grid((), scalar)
        return grid

    def is_always_true(self, node: ir.Node) -> bool:
        """Say whether a comparison of two grids is true everywhere."""
        if not is_operator(node, *_COMPARISONS):
            return False
        try:
            left, right = self.grid(node.inputs[0]), self.grid(node.inputs[1])
        except UnknownSizeError:
            return False
        if node.op_type.startswith("Less"):
            left, right = right, left
        difference = left + right.times(constant(-1))
        least = difference.start if node.op_type.endswith("Equal") else difference.start - ONE
        return least.is_natural and all(step.is_natural for _, step in difference.steps)

    def _computed_grid(self, node: ir.Node) -> Grid | None:
        if is_operator(node, "Range"):
            start, step = self.known.find_scalar(node.inputs[0]), self.known.find_scalar(node.inputs[2])
            return Grid(((-1, ONE),), start) if start is not None and step == ONE else None
        if is_operator(node, "Add", "Sub", "Mul"):
            left, right = self.grid(node.inputs[0]), self.grid(node.inputs[1])
            if node.op_type == "Mul":
                if not right.steps:
                    return left.times(right.start)
                return right.times(left.start) if not left.steps else None
            return left + (right if node.op_type == "Add" else right.times(constant(-1)))
        if is_operator(node, "Unsqueeze", "Squeeze", "Reshape", "Transpose"):
            return self._moved(node, self.grid(node.inputs[0]))
        is_same = (
            is_operator(node, "Identity", "Expand")
            or (is_operator(node, "Cast") and casts_to_sizes(node))
            or (is_operator(node, "Slice") and is_whole_slice(self.known, node))
        )
        return self.grid(node.inputs[0]) if is_same else None

    def _moved(self, node: ir.Node, grid: Grid) -> Grid | None:
        """Return the grid after its axes have moved; None where they are not followed."""
        before, after = self.known.shape(node.inputs[0]), self.known.shape(node.outputs[0])
        if node.op_type == "Transpose":
            order = node.attributes.get_ints("perm", range(len(before) - 1, -1, -1))
            places = {old - len(before): new - len(after) for new, old in enumerate(order)}
        else:
            wide = [[axis for axis, size in enumerate(s, -len(s)) if size != ONE] for s in (before, after)]
            if [before[axis] for axis in wide[0]] != [after[axis] for axis in wide[1]]:
                return None
            places = dict(zip(*wide, strict=True))
        return Grid(tuple(sorted((places[axis], step) for axis, step in grid.steps)), grid.start)


def counts_through(indices: Sequence[Grid], shape: Shape, sizes: Shape) -> bool:
    """Say whether indices of each axis of a tensor name all its elements in order.

    Args:
        indices: For each axis of the tensor that is indexed, the grid of its indices.
        shape: Of the indices, which is the same for each.
        sizes: Of the axes that are indexed.
    """
    axes = []
    for grid, size in zip(indices, sizes, strict=True):
        if size == ONE and not grid.steps and grid.start == ZERO:
            continue
        if len(grid.steps) != 1 or grid.start != ZERO or grid.steps[0][1] != ONE:
            return False
        axis = grid.steps[0][0]
        if shape[axis] != size:
            return False
        axes.append(axis)
    others = [size for axis, size in enumerate(shape, -len(shape)) if axis not in axes]
    return axes == sorted(set(axes)) and all(size == ONE for size in others)


def counts_flat(grid: Grid, shape: Shape, size: Size) -> bool:
    """Say whether a grid of this shape is 0, 1, 2, … up to a size, in the order of its elements."""
    count = ONE
    steps = dict(grid.steps)
    for axis in range(-1, -len(shape) - 1, -1):
        if shape[axis] == ONE:
            continue
        if steps.get(axis) != count:
            return False
        count = count * shape[axis]
    return grid.start == ZERO and count == size
