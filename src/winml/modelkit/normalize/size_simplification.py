"""Removal of size computations whose results are known, in graphs with dynamic dimensions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from winml.modelkit.normalize.size_propagation import (
    ONE,
    ZERO,
    KnownSizes,
    Shape,
    Size,
    UnknownSizeError,
    casts_to_sizes,
    constant,
    is_whole_slice,
    learn_sizes,
    product,
    reduced_axes,
)
from winml.modelkit.onnx.operators import is_operator, producer_of
from winml.modelkit.onnx.weights import add_initializer
from winml.modelkit.tags.carry.original_graph import RANDOM_OPERATORS

_COMPARISONS = ("GreaterOrEqual", "Greater", "LessOrEqual", "Less")


@dataclass(frozen=True)
class _Grid:
    """A tensor whose element is ``start`` plus, for some axes, a step times the position on the axis."""

    steps: tuple[tuple[int, Size], ...]
    """Axis, counted from the last, which is -1, with its step."""
    start: Size

    def __add__(self, other: _Grid) -> _Grid:
        sums = dict(self.steps)
        for axis, step in other.steps:
            sums[axis] = sums.get(axis, ZERO) + step
        return _Grid(tuple(sorted((axis, step) for axis, step in sums.items() if step.terms)), self.start + other.start)

    def times(self, factor: Size) -> _Grid:
        """Return the grid multiplied by a size."""
        steps = tuple((axis, step * factor) for axis, step in self.steps) if factor.terms else ()
        return _Grid(steps, self.start * factor)


@dataclass
class Grids:
    """Known index grids of a graph."""

    known_sizes: KnownSizes
    grids: dict[ir.Value, _Grid] = field(default_factory=dict)

    def learn(self, node: ir.Node) -> None:
        """Record the grid made by a node of one output; its predecessors come first."""
        output = node.outputs[0]
        try:
            grid, shape = self._compute_grid(node), self.known_sizes.shape(output)
        except UnknownSizeError:
            return
        if grid is not None:
            # An axis of one element has no step.
            steps = tuple((axis, step) for axis, step in grid.steps if shape[axis] != ONE)
            self.grids[output] = _Grid(steps, grid.start)

    def grid(self, value: ir.Value | None) -> _Grid:
        """Return the grid of a value.

        Raises:
            UnknownSizeError: the value is no known grid.
        """
        grid = None if value is None else self.grids.get(value)
        if grid is None:
            scalar = self.known_sizes.find_scalar(value)
            if scalar is None:
                raise UnknownSizeError
            grid = _Grid((), scalar)
        return grid

    def is_always_true(self, node: ir.Node) -> bool:
        """Return True if a comparison of two grids is true everywhere."""
        if not is_operator(node, *_COMPARISONS):
            return False
        try:
            left, right = self.grid(node.inputs[0]), self.grid(node.inputs[1])
        except UnknownSizeError:
            return False
        if node.op_type.startswith("Less"):
            left, right = right, left
        difference = left + right.times(constant(-1))
        minimum = difference.start if node.op_type.endswith("Equal") else difference.start - ONE
        return minimum.is_natural and all(step.is_natural for _, step in difference.steps)

    def _compute_grid(self, node: ir.Node) -> _Grid | None:
        """Return the grid made by a node; `None` if its output is no grid.

        Raises:
            UnknownSizeError: an input is no known grid.
        """
        if is_operator(node, "Range"):
            start, step = self.known_sizes.find_scalar(node.inputs[0]), self.known_sizes.find_scalar(node.inputs[2])
            return _Grid(((-1, ONE),), start) if start is not None and step == ONE else None
        if is_operator(node, "Add", "Sub", "Mul"):
            left, right = self.grid(node.inputs[0]), self.grid(node.inputs[1])
            if node.op_type == "Mul":
                if not right.steps:
                    return left.times(right.start)
                return right.times(left.start) if not left.steps else None
            return left + (right if node.op_type == "Add" else right.times(constant(-1)))
        if is_operator(node, "Unsqueeze", "Squeeze", "Reshape", "Transpose"):
            return self._move_axes(node, self.grid(node.inputs[0]))
        is_same = (
            is_operator(node, "Identity", "Expand")
            or (is_operator(node, "Cast") and casts_to_sizes(node))
            or (is_operator(node, "Slice") and is_whole_slice(self.known_sizes, node))
        )
        return self.grid(node.inputs[0]) if is_same else None

    def _move_axes(self, node: ir.Node, grid: _Grid) -> _Grid | None:
        """Return the grid after a change of its axes; None if the axes cannot be followed."""
        before, after = self.known_sizes.shape(node.inputs[0]), self.known_sizes.shape(node.outputs[0])
        if node.op_type == "Transpose":
            order = node.attributes.get_ints("perm", range(len(before) - 1, -1, -1))
            places = {old - len(before): new - len(after) for new, old in enumerate(order)}
        else:
            wide = [[axis for axis, size in enumerate(s, -len(s)) if size != ONE] for s in (before, after)]
            if [before[axis] for axis in wide[0]] != [after[axis] for axis in wide[1]]:
                return None
            places = dict(zip(*wide, strict=True))
        return _Grid(tuple(sorted((places[axis], step) for axis, step in grid.steps)), grid.start)


def _counts_through(indices: Sequence[_Grid], shape: Shape, sizes: Shape) -> bool:
    """Return True if the indices of a tensor enumerate all its elements in order.

    Args:
        indices: For each indexed axis of the tensor, the grid of its indices.
        shape: Shape of the indices, equal for each axis.
        sizes: Sizes of the indexed axes.
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
    other_sizes = [size for axis, size in enumerate(shape, -len(shape)) if axis not in axes]
    return axes == sorted(set(axes)) and all(size == ONE for size in other_sizes)


def _counts_flat(grid: _Grid, shape: Shape, size: Size) -> bool:
    """Return True if a grid of this shape enumerates 0, 1, 2, … up to a size, in element order."""
    count = ONE
    steps = dict(grid.steps)
    for axis in range(-1, -len(shape) - 1, -1):
        if shape[axis] == ONE:
            continue
        if steps.get(axis) != count:
            return False
        count = count * shape[axis]
    return grid.start == ZERO and count == size


_MOST_READ = 1 << 16
"""Elements. Chosen: a mask of 256 tokens; a weight is not read."""
_READ = (ir.DataType.BOOL, ir.DataType.INT64, ir.DataType.INT32)
_READ_ALONE = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
_MOVES = ("Unsqueeze", "Squeeze", "Reshape", "Flatten", "Transpose", "Slice", "Expand", "Identity")
_COMPUTED = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "And": np.logical_and,
    "Or": np.logical_or, "Not": np.logical_not, "Less": np.less, "LessOrEqual": np.less_equal,
    "Greater": np.greater, "GreaterOrEqual": np.greater_equal, "Equal": np.equal,
}  # fmt: skip
"""Operator → function applied to each element."""


@dataclass
class _Uniforms:
    """Known tensors that hold one number everywhere."""

    known_sizes: KnownSizes
    grids: Grids
    numbers: dict[ir.Value, Any] = field(default_factory=dict)
    """Value → its number; None for a constant that holds several numbers."""

    def learn(self, node: ir.Node) -> None:
        """Record the number made by a node of one output; its predecessors come first."""
        try:
            number = self._compute_number(node)
        except UnknownSizeError:
            return
        if number is not None and node.outputs[0].dtype is not None:
            self.numbers[node.outputs[0]] = number.astype(node.outputs[0].dtype.numpy())

    def number(self, value: ir.Value | None) -> Any:
        """Return the number that a tensor holds everywhere; `None` if unknown."""
        if value is None:
            return None
        if value not in self.numbers and value.const_value is not None:
            self.numbers[value] = _read_uniform_number(value.const_value)
        return self.numbers.get(value)

    def _compute_number(self, node: ir.Node) -> Any:
        """Return the number that a node's output holds everywhere; `None` if unknown."""
        if self.grids.is_always_true(node):
            return np.bool_(True)
        if not node.inputs:
            return None
        numbers = [self.number(value) for value in node.inputs]
        if is_operator(node, *_MOVES, "Cast"):
            return numbers[0]
        if is_operator(node, *_COMPUTED) and None not in numbers:
            with np.errstate(all="ignore"):
                return np.asarray(_COMPUTED[node.op_type](*numbers))[()]
        if is_operator(node, "ReduceSum") and numbers[0] is not None:
            shape = self.known_sizes.shape(node.inputs[0])
            count = product(shape[axis] for axis in reduced_axes(self.known_sizes, node)).number
            return None if count is None else np.asarray(numbers[0] * count)[()]
        return None


def _read_uniform_number(tensor: ir.TensorProtocol) -> Any:
    """Return the number that a small constant holds everywhere; `None` for other constants."""
    # Parameters, such as a bias of zeros, are excluded: they are fractions with several elements.
    is_read = tensor.dtype in _READ or (tensor.dtype in _READ_ALONE and tensor.size == 1)
    if not is_read or not 0 < tensor.size <= _MOST_READ:
        return None
    elements = tensor.numpy().reshape(-1)
    number = elements[0]
    return number if bool((elements == number).all()) else None


_RESHAPES = ("Reshape", "Flatten", "Unsqueeze", "Squeeze")
"""Specified: operators that keep the elements in their order."""
_COUNTING_TYPES = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)

_PLAIN_ATTRIBUTES = (
    ir.AttributeType.INT, ir.AttributeType.INTS, ir.AttributeType.FLOAT, ir.AttributeType.FLOATS,
    ir.AttributeType.STRING,
)  # fmt: skip


class SizeSimplificationPass(ir.passes.InPlacePass):
    """Compute each size once, and known shapes not at all. Works in place.

    Before / After::

        x[b,s,128] → Reshape(Concat(Gather(Shape(x), 0), Gather(Shape(x), 1), [-1], [64]))   x → Reshape([0, 0, 2, 64])
        x[b,s] → Slice(0 … s) → Expand([b, s]) → y                                           x → y
        Shape(x) → Gather(1) → …; Shape(y) → Gather(1) → …                                   Shape(x) → Gather(1) → …
        k[b,h,s,d] → Reshape(b·h, s, d) → Transpose(0, 2, 1) → Reshape(b, h, d, s)            k → Transpose(0, 1, 3, 2)
        mask[b,s] → Flatten → Gather(row · s + column) → …                                   mask → Reshape → …

    Must not fire when:
        1. two sizes are equal for the traced sizes only: they are compared as polynomials of the names of the inputs'
           dimensions;
        2. a shape would need ``-1`` where an axis may be empty, as that of a cache is before the first token;
        3. the value is in a subgraph: its sizes may apply to one iteration of a loop;
        4. the value is an output of the graph.

    Tags: keeps. Nodes are removed or get other inputs; no node is new.

    Why it is safe: every value keeps elements and shape for all sizes of the inputs with which the graph runs.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Simplify the main graph."""
        known_sizes = learn_sizes(model.graph)
        work = _Simplification(model.graph, known_sizes, _find_possibly_empty(model.graph, known_sizes))
        changed = False
        for node in list(model.graph):
            if not node.domain and len(node.outputs) == 1:
                work.grids.learn(node)
                work.uniforms.learn(node)
            for general_rule in (_replace_known_content, _replace_repetition):
                with contextlib.suppress(UnknownSizeError):
                    changed |= general_rule(work, node)
            for operator, rule in _RULES:
                source = node.inputs[0] if is_operator(node, operator) else None
                if source is not None:
                    with contextlib.suppress(UnknownSizeError):
                        changed |= rule(work, node, source)
        changed |= _state_shapes(model.graph, known_sizes)
        return ir.passes.PassResult(model, changed)


@dataclass
class _Simplification:
    """A graph with its known sizes, and the values met so far."""

    graph: ir.Graph
    known_sizes: KnownSizes
    possibly_empty: frozenset[str]
    contents: dict[tuple[object, ...], ir.Value] = field(default_factory=dict)
    """Type, shape and elements of a tensor of sizes → the first that has them."""
    first_outputs: dict[tuple[object, ...], ir.Value] = field(default_factory=dict)
    """Operator, inputs and attributes → output of the first such node."""
    constants: dict[tuple[object, ...], ir.Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.grids = Grids(self.known_sizes)
        self.uniforms = _Uniforms(self.known_sizes, self.grids)

    def constant(self, numbers: Sequence[int], shape: Sequence[int], dtype: ir.DataType, name: str) -> ir.Value:
        """Return an initializer with these whole numbers; the first call for the numbers adds it to the graph.

        Args:
            numbers: The values.
            shape: Shape of the tensor.
            dtype: Type of the tensor.
            name: Preferred name of a new initializer.
        """
        key = (dtype, tuple(shape), tuple(numbers))
        if key not in self.constants:
            tensor = ir.tensor(np.array(numbers, dtype=dtype.numpy()).reshape(tuple(shape)), name=name)
            while name in self.graph.initializers:
                name = f"{name}_sizes"
            self.constants[key] = add_initializer(self.graph, tensor, name)
        return self.constants[key]

    def identity_of(self, value: ir.Value | None) -> object:
        """Return a key that is equal for equal values: small constants are compared by content."""
        if value is None or value.const_value is None:
            return value
        content = self.known_sizes.find_content(value)
        return value if content is None else (value.dtype, self.known_sizes.find_shape(value), content)

    def has_shape_of(self, value: ir.Value, node: ir.Node) -> bool:
        """Return True if a value has the shape of a node's output."""
        return self.known_sizes.shape(value) == self.known_sizes.shape(node.outputs[0])

    def pass_on(self, node: ir.Node, value: ir.Value) -> bool:
        """Turn a node into an Identity of a value."""
        _replace_operator(node, "Identity", [value])
        return True

    def reshape(self, node: ir.Node, source: ir.Value, target: Shape, open_places: Sequence[int] = ()) -> bool:
        """Turn a node into a constant Reshape of a value, or of the source of its reshapes, if possible.

        Args:
            node: The node; its output has the shape ``target``.
            source: Value with the same elements in the same order.
            target: The shape.
            open_places: Axes that the graph already leaves to the operator (``-1``).
        """
        sources = _trace_reshapes(source)
        shapes = {value: shape for value in sources if (shape := self.known_sizes.find_shape(value)) is not None}
        same = next((value for value, shape in reversed(shapes.items()) if shape == target), None)
        if same is not None:
            return self.pass_on(node, same)
        for value, shape in shapes.items():
            numbers = self._find_target_numbers(shape, target, open_places)
            if numbers is None:
                continue
            if is_operator(node, "Reshape") and value is node.inputs[0]:
                content = self.known_sizes.find_content(node.inputs[1])
                is_constant = content is not None and all(size.number is not None for size in content)
                if is_constant and content in (tuple(map(constant, numbers)), target):
                    return False
            shape_value = self.constant(numbers, [len(numbers)], ir.DataType.INT64, f"{node.outputs[0].name}_shape")
            _replace_operator(node, "Reshape", [value, shape_value])
            return True
        return False

    def _find_target_numbers(self, shape: Shape, target: Shape, open_places: Sequence[int]) -> list[int] | None:
        """Return a constant shape for a reshape; `None` if no constant shape is possible.

        Args:
            shape: Shape of the input.
            target: Shape of the output.
            open_places: Axes that the graph already leaves to the operator (``-1``).
        """
        numbers: list[int] = []
        copied: list[Size] = []
        for axis, size in enumerate(target):
            if size.number is not None and size.number > 0:
                numbers.append(size.number)
            elif axis < len(shape) and shape[axis] == size:
                numbers.append(0)
                copied.append(size)
            else:
                numbers.append(-1)
        if numbers.count(-1) > 1:
            return None
        is_sure = not any(name in self.possibly_empty for size in copied for name in _names_in(size))
        return numbers if -1 not in numbers or is_sure or numbers.index(-1) in open_places else None


def _replace_operator(node: ir.Node, operator: str, inputs: Sequence[ir.Value]) -> None:
    """Turn a node into another operator of the ONNX domain with these inputs, in place; its attributes are removed."""
    node.op_type = operator
    node.attributes.clear()
    node.resize_inputs(len(inputs))
    for position, value in enumerate(inputs):
        node.replace_input_with(position, value)


def _trace_reshapes(value: ir.Value) -> list[ir.Value]:
    """Return a value and the sources of its reshapes, the value first."""
    values = [value]
    while (node := values[-1].producer()) is not None and is_operator(node, *_RESHAPES) and node.inputs[0] is not None:
        values.append(node.inputs[0])
    return values


def _names_in(size: Size) -> frozenset[str]:
    """Return the names for which a size is zero if the named dimension is zero."""
    # A sum is zero only if all its terms are.
    parts = [frozenset(names) for names, _ in size.terms]
    return frozenset.intersection(*parts) if parts else frozenset()


def _find_possibly_empty(graph: ir.Graph, known_sizes: KnownSizes) -> frozenset[str]:
    """Return the names of axes that may be empty: axes of caches, which start without a token.

    Caches are concatenated along the named axis, or enter an operator of a foreign domain that concatenates.
    """
    names: frozenset[str] = frozenset()
    inputs = set(graph.inputs)
    for node in graph:
        shapes = [(value, known_sizes.find_shape(value)) for value in node.inputs]
        if is_operator(node, "Concat"):
            axis = node.attributes.get_int("axis", 0)
            names = names.union(*(_names_in(shape[axis]) for _, shape in shapes if shape))
        elif node.domain:
            names = names.union(
                *(_names_in(size) for value, shape in shapes if value in inputs for size in shape or ())
            )
    return names


def _is_free(node: ir.Node) -> bool:
    """Return True if a node has one output that is read by nodes only."""
    return len(node.outputs) == 1 and bool(node.outputs[0].uses()) and not node.outputs[0].is_graph_output()


def _replace_known_content(work: _Simplification, node: ir.Node) -> bool:
    """Replace a tensor of known elements by a constant, or by the first tensor with the same elements."""
    output = node.outputs[0]
    content, shape = work.known_sizes.contents.get(output), work.known_sizes.shape(output)
    if content is None or output.dtype is None or not _is_free(node):
        return False
    numbers = [size.number for size in content if size.number is not None]
    sizes = [size.number for size in shape if size.number is not None]
    if len(numbers) == len(content) and len(sizes) == len(shape):
        output.replace_all_uses_with(work.constant(numbers, sizes, output.dtype, f"{output.name}_known"))
        return True
    return _redirect_uses(work.contents.setdefault((output.dtype, shape, content), output), output)


def _replace_repetition(work: _Simplification, node: ir.Node) -> bool:
    """Redirect the readers of a counting tensor to the first tensor with the same computation."""
    if len(node.outputs) != 1 or node.outputs[0].dtype not in _COUNTING_TYPES or not _is_free(node):
        return False
    if node.domain or node.op_type in RANDOM_OPERATORS:
        return False
    if any(attribute.type not in _PLAIN_ATTRIBUTES for attribute in node.attributes.values()):
        return False
    attributes = tuple(sorted((name, str(attribute.value)) for name, attribute in node.attributes.items()))
    inputs = tuple(work.identity_of(value) for value in node.inputs)
    return _redirect_uses(
        work.first_outputs.setdefault((node.op_type, inputs, attributes), node.outputs[0]), node.outputs[0]
    )


def _redirect_uses(original: ir.Value, value: ir.Value) -> bool:
    """Redirect the readers of a value to an equal one; return False if both are the same value."""
    if original is value:
        return False
    value.replace_all_uses_with(original)
    return True


def _simplify_reshape(work: _Simplification, node: ir.Node, source: ir.Value) -> bool:
    requested = work.known_sizes.find_content(node.inputs[1]) or ()
    open_places = [axis for axis, size in enumerate(requested) if size.number == -1]
    return work.reshape(node, source, work.known_sizes.shape(node.outputs[0]), open_places)


def _simplify_unsqueeze(work: _Simplification, node: ir.Node, source: ir.Value) -> bool:
    """Merge an Unsqueeze with a preceding Unsqueeze."""
    inner = producer_of(source, "Unsqueeze")
    if inner is None or len(node.inputs) < 2 or len(inner.inputs) < 2 or inner.inputs[0] is None:
        return False
    positions: list[int | None] = list(range(len(work.known_sizes.shape(inner.inputs[0]))))
    for axes in (work.known_sizes.numbers(inner.inputs[1]), work.known_sizes.numbers(node.inputs[1])):
        rank = len(positions) + len(axes)
        new, remaining = {axis % rank for axis in axes}, iter(positions)
        positions = [None if position in new else next(remaining) for position in range(rank)]
    axes = [position for position, source_axis in enumerate(positions) if source_axis is None]
    value = work.constant(axes, [len(axes)], ir.DataType.INT64, f"{node.outputs[0].name}_axes")
    _replace_operator(node, "Unsqueeze", [inner.inputs[0], value])
    return True


def _remove_whole_slice(work: _Simplification, node: ir.Node, source: ir.Value) -> bool:
    return is_whole_slice(work.known_sizes, node) and work.pass_on(node, source)


def _remove_idle_expand(work: _Simplification, node: ir.Node, source: ir.Value) -> bool:
    return work.has_shape_of(source, node) and work.pass_on(node, source)


def _remove_idle_transpose(work: _Simplification, node: ir.Node, source: ir.Value) -> bool:
    order = list(node.attributes.get_ints("perm", ()))
    return bool(order) and order == sorted(order) and work.pass_on(node, source)


def _remove_zero_addition(work: _Simplification, node: ir.Node, _source: ir.Value) -> bool:
    """Remove an addition of zeros, unless the zero is a stored fraction."""
    for value, addend in (node.inputs, node.inputs[::-1]):
        number = work.uniforms.number(addend)
        if value is None or addend is None or number is None or number != 0:
            continue
        # A fraction that is stated stays: an optimizer may do that.
        if addend.producer() is not None or addend.dtype in _COUNTING_TYPES:
            return work.has_shape_of(value, node) and work.pass_on(node, value)
    return False


def _simplify_where(work: _Simplification, node: ir.Node, source: ir.Value) -> bool:
    """Replace a Where by the branch that its uniform condition selects."""
    condition = work.uniforms.number(source)
    chosen = None if condition is None else node.inputs[1 if condition else 2]
    return chosen is not None and work.has_shape_of(chosen, node) and work.pass_on(node, chosen)


def _simplify_and(work: _Simplification, node: ir.Node, _source: ir.Value) -> bool:
    """Leave out the side of an And that is true everywhere."""
    left, right = node.inputs
    operand = right if work.uniforms.number(left) else left if work.uniforms.number(right) else None
    shape = work.known_sizes.shape(node.outputs[0])
    if operand is None:
        return False
    if work.known_sizes.find_shape(operand) == shape:
        return work.pass_on(node, operand)
    # The next node broadcasts the value to its shape in any case.
    readers = list(node.outputs[0].consumers())
    if not _is_free(node) or not all(is_operator(reader, "Expand") for reader in readers):
        return False
    wide = [reader for reader in readers if _covers_shape(work.known_sizes.find_content(reader.inputs[1]), shape)]
    for reader in wide:
        reader.replace_input_with(0, operand)
    return bool(wide)


def _covers_shape(target: Shape | None, shape: Shape) -> bool:
    """Return True if an Expand to a shape depends on no size of its input."""
    if target is None or len(target) < len(shape):
        return False
    return all(size in (ONE, requested) for size, requested in zip(shape[::-1], target[::-1], strict=False))


def _simplify_gather(work: _Simplification, node: ir.Node, source: ir.Value) -> bool:
    """Turn a Gather of all elements in order into a reshape."""
    data, indices = work.known_sizes.shape(source), work.known_sizes.shape(node.inputs[1])
    grid, target = work.grids.grid(node.inputs[1]), work.known_sizes.shape(node.outputs[0])
    if node.attributes.get_int("axis", 0) != 0 or not data or not indices or not grid.steps:
        return False
    return _counts_flat(grid, indices, data[0]) and work.reshape(node, source, target)


def _simplify_gather_nd(work: _Simplification, node: ir.Node, source: ir.Value) -> bool:
    """Turn a GatherND of all elements in order into a reshape."""
    joined = producer_of(node.inputs[1], "Concat")
    data, indices = work.known_sizes.shape(source), work.known_sizes.shape(node.inputs[1])
    target = work.known_sizes.shape(node.outputs[0])
    if joined is None or len(joined.inputs) > len(data) or node.attributes.get_int("batch_dims", 0) != 0:
        return False
    if joined.attributes.get_int("axis", 0) not in (-1, len(indices) - 1):
        return False
    if any(work.known_sizes.shape(value)[-1:] != (ONE,) for value in joined.inputs):
        return False
    grids = [work.grids.grid(value) for value in joined.inputs]
    is_all = _counts_through(grids, (*indices[:-1], ONE), data[: len(grids)])
    return is_all and work.reshape(node, source, target)


def _join_transposition(work: _Simplification, outer: ir.Node, source: ir.Value) -> bool:
    """Merge Reshape, Transpose of the last two axes and Reshape into one Transpose, in place; return True if merged.

    Args:
        work: The simplification of the graph.
        outer: The second Reshape; becomes the Transpose.
        source: Its input.
    """
    middle = producer_of(source, "Transpose")
    inner = producer_of(middle.inputs[0], "Reshape") if middle is not None else None
    if middle is None or inner is None or inner.inputs[0] is None:
        return False
    shape, target = work.known_sizes.shape(inner.inputs[0]), work.known_sizes.shape(outer.outputs[0])
    merged = work.known_sizes.shape(inner.outputs[0])
    if len(merged) != 3 or list(middle.attributes.get_ints("perm", ())) != [0, 2, 1]:
        return False
    if len(shape) < 3 or merged[1:] != shape[-2:] or target != (*shape[:-2], shape[-1], shape[-2]):
        return False
    _replace_operator(outer, "Transpose", [inner.inputs[0]])
    rank = len(shape)
    outer.attributes["perm"] = ir.AttrInt64s("perm", [*range(rank - 2), rank - 1, rank - 2])
    return True


_RULES: tuple[tuple[str, Callable[[_Simplification, ir.Node, ir.Value], bool]], ...] = (
    ("Unsqueeze", _simplify_unsqueeze),
    ("Slice", _remove_whole_slice),
    ("Expand", _remove_idle_expand),
    ("Transpose", _remove_idle_transpose),
    ("Add", _remove_zero_addition),
    ("Where", _simplify_where),
    ("And", _simplify_and),
    ("Gather", _simplify_gather),
    ("GatherND", _simplify_gather_nd),
    ("Reshape", _join_transposition),
    ("Reshape", _simplify_reshape),
)
"""Operator → rule for its nodes, in order. A rule takes a node and its first input; it returns True if it changed the
graph.
"""


def _state_shapes(graph: ir.Graph, known_sizes: KnownSizes) -> bool:
    """Write the sizes known by names of input dimensions to the values; return True if a size is new."""
    changed = False
    for node in graph:
        for value in node.outputs:
            shape = known_sizes.shapes.get(value)
            if shape is None or value.is_graph_output() or (value.shape is not None and value.shape.is_static()):
                continue
            stated_sizes = [size.value if isinstance(size, ir.SymbolicDim) else size for size in value.shape or ()]
            stated_sizes = stated_sizes or [None] * len(shape)
            better = [_format_size(size, old, known_sizes.names) for size, old in zip(shape, stated_sizes, strict=True)]
            if better != stated_sizes:
                value.shape = ir.Shape(better)
                changed = True
    return changed


def _format_size(size: Size, old: int | str | None, names: frozenset[str]) -> int | str | None:
    """Return a size as a file states it: in the names of the inputs, else the stated size."""
    if size.number is not None:
        return size.number
    return str(size) if all(name in names for term, _ in size.terms for name in term) else old
