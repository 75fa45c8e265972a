"""Tensors of whole numbers that count along their axes, as masks compute positions.

A mask is exported as arithmetic on positions: which row, which query, which key. With fixed sizes it is computed once;
with open ones the arithmetic stays. Most of it says nothing: every position is at least zero, and an element for every
position in order is the tensor itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from winml.modelkit.normalize.sizes.expressions import ONE, ZERO, Size, constant
from winml.modelkit.normalize.sizes.propagation import KnownSizes, Shape, is_standard, slice_ranges, takes_all

__all__ = ["Grid", "Grids"]

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
        """Learn what a node makes; those before it come first."""
        if node.domain not in ("", "ai.onnx") or len(node.outputs) != 1:
            return
        output = node.outputs[0]
        grid = self._grid_made(node)
        shape = self.known.shape(output)
        if grid is not None and shape is not None:
            # Along an axis of one element there is nothing to count.
            steps = tuple((axis, step) for axis, step in grid.steps if shape[axis] != ONE)
            self.grids[output] = Grid(steps, grid.start)

    def grid(self, value: ir.Value | None) -> Grid | None:
        """Return the grid a value is, or None."""
        if value is None:
            return None
        if value not in self.grids and (scalar := self.known.scalar(value)) is not None:
            return Grid((), scalar)
        return self.grids.get(value)

    def is_always_true(self, node: ir.Node) -> bool:
        """Say whether a comparison of two grids is true everywhere."""
        if not is_standard(node, *_COMPARISONS):
            return False
        left, right = self.grid(node.inputs[0]), self.grid(node.inputs[1])
        if left is None or right is None:
            return False
        if node.op_type.startswith("Less"):
            left, right = right, left
        difference = left + right.times(constant(-1))
        least = difference.start if node.op_type.endswith("Equal") else difference.start - ONE
        return least.is_natural and all(step.is_natural for _, step in difference.steps)

    def counts_through(self, indices: Sequence[Grid], shape: Shape, sizes: Shape) -> bool:
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

    def counts_flat(self, grid: Grid, shape: Shape, size: Size) -> bool:
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

    def _grid_made(self, node: ir.Node) -> Grid | None:
        if is_standard(node, "Range"):
            start, step = self.known.scalar(node.inputs[0]), self.known.scalar(node.inputs[2])
            return Grid(((-1, ONE),), start) if start is not None and step == ONE else None
        if is_standard(node, "Add", "Sub", "Mul"):
            return self._arithmetic(node)
        grid = self.grid(node.inputs[0]) if node.inputs else None
        if grid is None:
            return None
        if is_standard(node, "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Slice"):
            return self._moved(node, grid)
        if is_standard(node, "Cast"):
            kinds = (int(ir.DataType.INT64), int(ir.DataType.INT32))
            return grid if node.attributes.get_int("to", 0) in kinds else None
        return grid if is_standard(node, "Identity", "Expand") else None

    def _arithmetic(self, node: ir.Node) -> Grid | None:
        left, right = self.grid(node.inputs[0]), self.grid(node.inputs[1])
        if left is None or right is None:
            return None
        if is_standard(node, "Mul"):
            if not right.steps:
                return left.times(right.start)
            return right.times(left.start) if not left.steps else None
        return left + (right if is_standard(node, "Add") else right.times(constant(-1)))

    def _moved(self, node: ir.Node, grid: Grid) -> Grid | None:
        """Return the grid after its axes have moved; None where they are not followed."""
        before, after = self.known.shape(node.inputs[0]), self.known.shape(node.outputs[0])
        if before is None or after is None:
            return None
        if is_standard(node, "Slice"):
            ranges = slice_ranges(self.known, node)
            whole = ranges is not None and all(
                step == 1 and start == ZERO and takes_all(before[axis], end)
                for axis, (start, end, step) in ranges.items()
            )
            return grid if whole else None
        if is_standard(node, "Transpose"):
            order = node.attributes.get_ints("perm", range(len(before) - 1, -1, -1))
            places = {old - len(before): new - len(after) for new, old in enumerate(order)}
        else:
            wide = [[axis for axis, size in enumerate(s, -len(s)) if size != ONE] for s in (before, after)]
            if [before[axis] for axis in wide[0]] != [after[axis] for axis in wide[1]]:
                return None
            places = dict(zip(*wide, strict=True))
        return Grid(tuple(sorted((places[axis], step) for axis, step in grid.steps)), grid.start)
