"""Propagation of axis sizes, and of the numbers in small tensors that hold sizes.

Goes through a graph once, from its inputs on. For operators without a rule, the shapes inferred by onnx are used; a
size unknown to onnx too is a separate size, equal to no other.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TypeVar

import onnx_ir as ir

from winml.modelkit.onnx.operators import is_operator, producer_of

_Monomial = tuple[str, ...]
"""Multiplied names, in order; a name is repeated as often as its power."""


@dataclass(frozen=True)
class Size:
    """A polynomial with integer coefficients, such as ``batch·heads`` or ``past + sequence``.

    The representation is unique: sizes that are equal for every value of the names compare equal.
    """

    terms: tuple[tuple[_Monomial, int], ...]
    """Products of names, each with its coefficient, which is not zero; in order."""

    @property
    def number(self) -> int | None:
        """The value of a constant size; None if it contains a name."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def name(self) -> str | None:
        """The name of a size that is a single name; None for any other size."""
        if len(self.terms) == 1 and len(self.terms[0][0]) == 1 and self.terms[0][1] == 1:
            return self.terms[0][0][0]
        return None

    @property
    def is_natural(self) -> bool:
        """True if the size is known to be at least zero for all values of the names."""
        return all(coefficient > 0 for _, coefficient in self.terms)

    def __add__(self, other: Size) -> Size:
        return _make_polynomial([*self.terms, *other.terms])

    def __sub__(self, other: Size) -> Size:
        return _make_polynomial([*self.terms, *((names, -coefficient) for names, coefficient in other.terms)])

    def __mul__(self, other: Size) -> Size:
        return _make_polynomial(
            (tuple(sorted((*names, *factors))), a * b) for names, a in self.terms for factors, b in other.terms
        )

    def divide_exactly(self, divisor: Size) -> Size | None:
        """Return the exact quotient; `None` in case of a remainder."""
        if not divisor.terms:
            return None
        lead, coefficient = divisor.terms[-1]
        remainder, quotient = self, ZERO
        # Each iteration removes the last term, and adds none after it.
        while remainder.terms:
            names, number = remainder.terms[-1]
            factors = _divide_names(names, lead)
            if factors is None or number % coefficient:
                return None
            part = Size(((factors, number // coefficient),))
            remainder, quotient = remainder - part * divisor, quotient + part
        return quotient

    def __str__(self) -> str:
        return " + ".join(_format_term(names, coefficient) for names, coefficient in self.terms) or "0"


def constant(number: int) -> Size:
    """Return a number as a size."""
    return Size((((), number),)) if number else ZERO


def symbol(name: str) -> Size:
    """Return a name as a size."""
    return Size((((name,), 1),))


def product(sizes: Iterable[Size]) -> Size:
    """Return the product; 1 of none."""
    return reduce(Size.__mul__, sizes, ONE)


def _make_polynomial(terms: Iterable[tuple[_Monomial, int]]) -> Size:
    """Return the sum of terms as a size, in its unique representation."""
    sums: dict[_Monomial, int] = {}
    for names, coefficient in terms:
        sums[names] = sums.get(names, 0) + coefficient
    # By degree, then by names: an order that multiplication keeps, as division needs.
    present = [(names, number) for names, number in sums.items() if number]
    return Size(tuple(sorted(present, key=lambda term: (len(term[0]), term[0]))))


def _divide_names(names: _Monomial, divisor: _Monomial) -> _Monomial | None:
    remaining = list(names)
    for name in divisor:
        if name not in remaining:
            return None
        remaining.remove(name)
    return tuple(remaining)


def _format_term(names: _Monomial, coefficient: int) -> str:
    factors = [*([] if coefficient == 1 and names else [str(coefficient)]), *names]
    return "*".join(factors)


ZERO = Size(())
ONE = constant(1)


_T = TypeVar("_T")
Shape = tuple[Size, ...]
_PartialShape = tuple["Size | None", ...]

_MOST_ELEMENTS = 16
"""Chosen: no tensor of sizes has more elements."""
_LARGEST_END = 2**31 - 1
"""Chosen: exporters write an end this large for a slice without an end; no axis of a model is as long."""


class UnknownSizeError(Exception):
    """A shape or a number for a rule is unknown; the rule does not apply."""


@dataclass
class KnownSizes:
    """Known sizes of the values of a graph."""

    names: frozenset[str] = frozenset()
    """Names of the dynamic dimensions of the inputs."""
    shapes: dict[ir.Value, Shape] = field(default_factory=dict)
    """Value → size of each axis."""
    contents: dict[ir.Value, tuple[Size, ...]] = field(default_factory=dict)
    """Small integer tensor of rank 0 or 1 → its elements."""
    cut: dict[str, Size] = field(default_factory=dict)
    """Name of the size of a table that was cut to a dynamic size, which may be less → that size."""

    def find_shape(self, value: ir.Value | None) -> Shape | None:
        """Return the sizes of a value; `None` if unknown."""
        return None if value is None else self.shapes.get(value)

    def shape(self, value: ir.Value | None) -> Shape:
        """Return the sizes of a value; raises UnknownSizeError if they are unknown."""
        return _require_known(self.find_shape(value))

    def find_content(self, value: ir.Value | None) -> tuple[Size, ...] | None:
        """Return the elements of a small tensor of whole numbers, or None."""
        if value is None:
            return None
        if value not in self.contents and (numbers := _read_constant(value)) is not None:
            self.contents[value] = numbers
        return self.contents.get(value)

    def content(self, value: ir.Value | None) -> tuple[Size, ...]:
        """Return the elements of a small tensor of whole numbers; raises UnknownSizeError if they are unknown."""
        return _require_known(self.find_content(value))

    def numbers(self, value: ir.Value | None) -> list[int]:
        """Return the elements; raises UnknownSizeError unless all of them are numbers."""
        return [_require_known(size.number) for size in self.content(value)]

    def find_scalar(self, value: ir.Value | None) -> Size | None:
        """Return the element of a tensor with one element; `None` for other tensors."""
        content = self.find_content(value)
        return content[0] if content is not None and len(content) == 1 else None


def _require_known(value: _T | None) -> _T:
    if value is None:
        raise UnknownSizeError
    return value


def learn_sizes(graph: ir.Graph) -> KnownSizes:
    """Collect the known sizes of the values of a graph; the graph is not changed."""
    dimensions = [size for value in graph.inputs for size in value.shape or () if isinstance(size, ir.SymbolicDim)]
    known_sizes = KnownSizes(frozenset(size.value for size in dimensions if size.value is not None))
    for value in (*graph.inputs, *graph.initializers.values()):
        _record_stated_shape(known_sizes, value)
    for node in graph:
        for value_in in node.inputs:
            # A value of an enclosing graph, or an initializer outside the graph's list.
            if value_in is not None and value_in not in known_sizes.shapes:
                _record_stated_shape(known_sizes, value_in)
        _record_sizes(known_sizes, node)
    return known_sizes


def table_limits(graph: ir.Graph) -> dict[str, int]:
    """Return dynamic dimension → rows of the shortest table that is indexed by its size.

    A table is a constant that is sliced to the size (``positions[:length]``), or that has a row for each element of a
    ``Range`` up to the size (``nn.Embedding(64, 8)(torch.arange(length))``). Tables of one row are broadcast.
    """
    known_sizes, limits = learn_sizes(graph), dict[str, int]()
    for node in graph:
        for end, rows in _find_table_reads(known_sizes, node):
            if end.name in known_sizes.names and rows.number is not None and rows.number > 1:
                limits[end.name] = min(rows.number, limits.get(end.name, rows.number))
    return limits


def _find_table_reads(known_sizes: KnownSizes, node: ir.Node) -> Iterator[tuple[Size, Size]]:
    """Yield the end of each read of a table from its first row, and the number of rows of the table."""
    shape = known_sizes.find_shape(node.inputs[0]) if node.inputs else None
    if not shape:
        return
    if is_operator(node, "Slice"):
        with contextlib.suppress(UnknownSizeError):
            for axis, (start, end, step) in _slice_ranges(known_sizes, node).items():
                if start == ZERO and step == 1:
                    yield end, shape[axis]
    elif is_operator(node, "Gather"):
        counting = node.inputs[1].producer() if node.inputs[1] is not None else None
        if counting is not None and is_operator(counting, "Range"):
            range_start, limit, delta = (known_sizes.find_scalar(value) for value in counting.inputs)
            if limit is not None and range_start == ZERO and delta == ONE:
                yield limit, shape[node.attributes.get_int("axis", 0) % len(shape)]


def broadcast(known_sizes: KnownSizes, shapes: Sequence[Shape]) -> tuple[Size | None, ...]:
    """Return the shape that values of several shapes have together; None for an axis that is unknown."""
    rank = max(map(len, shapes))
    padded = [(ONE,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(_broadcast_axis(known_sizes, sizes) for sizes in zip(*padded, strict=True))


def _broadcast_axis(known_sizes: KnownSizes, sizes: tuple[Size, ...]) -> Size | None:
    """Return the common size of one axis of several shapes; `None` if unknown."""
    wide = {size for size in sizes if size != ONE}
    # A table is as long as the size it was sliced to, or has one row: with fewer rows the graph does not run.
    wide -= {size for size in wide if size.name in known_sizes.cut and known_sizes.cut[size.name or ""] in wide}
    if len(wide) < 2:
        return next(iter(wide), ONE)
    # A dynamic size broadcast with a number above one equals that number or one.
    numbers = {size for size in wide if size.number is not None}
    return numbers.pop() if len(numbers) == 1 else None


def _record_stated_shape(known_sizes: KnownSizes, value: ir.Value) -> None:
    """Learn the shape a value states; an axis without a name of the inputs is a size of its own."""
    if value.shape is None:
        return
    known_sizes.shapes[value] = tuple(
        constant(size)
        if isinstance(size, int)
        else symbol(size.value if size.value in known_sizes.names else _axis_name(value, axis))
        for axis, size in enumerate(value.shape)
    )


def _axis_name(value: ir.Value, axis: int) -> str:
    return f"{value.name}#{axis}"


def _record_sizes(known_sizes: KnownSizes, node: ir.Node) -> None:
    """Record shapes and contents of the outputs of a node."""
    for value in node.outputs:
        _record_stated_shape(known_sizes, value)
    if node.domain or not node.outputs:
        return
    output = node.outputs[0]
    shape = _apply_rule(_SHAPES.get(node.op_type), known_sizes, node)
    if shape is not None:
        _record_shape(known_sizes, output, shape)
    if node.op_type == "Split":
        for value, part in zip(node.outputs, _shapes_of_split(known_sizes, node), strict=False):
            _record_shape(known_sizes, value, part)
    content = _apply_rule(_CONTENTS.get(node.op_type), known_sizes, node)
    created = known_sizes.find_shape(output)
    # Contents have no axes: for more than one element, two tensors of equal elements may differ in shape.
    if content is not None and created is not None and len(created) < 2 and product(created).number == len(content):
        known_sizes.contents[output] = content


def _apply_rule(
    rule: Callable[[KnownSizes, ir.Node], _T | None] | None, known_sizes: KnownSizes, node: ir.Node
) -> _T | None:
    """Return the result of a rule for a node; `None` without a rule, or if a size that the rule needs is unknown."""
    try:
        return None if rule is None else rule(known_sizes, node)
    except UnknownSizeError:
        return None


def _record_shape(known_sizes: KnownSizes, value: ir.Value, shape: _PartialShape) -> None:
    """Record a shape that follows from the graph, combined with the stated shape."""
    declared = known_sizes.shapes.get(value)
    if declared is None or len(declared) == len(shape):
        known_sizes.shapes[value] = tuple(
            _choose_size(known_sizes, size, declared[axis] if declared is not None else symbol(_axis_name(value, axis)))
            for axis, size in enumerate(shape)
        )


def _choose_size(known_sizes: KnownSizes, size: Size | None, stated_size: Size) -> Size:
    """Return the more precise of the propagated and the stated size.

    A file may state sizes that were true before its inputs became dynamic.
    """
    if size is None:
        return stated_size
    is_of_inputs = all(name in known_sizes.names for names, _ in size.terms for name in names)
    return stated_size if stated_size.number is not None and not is_of_inputs else size


def _read_constant(value: ir.Value) -> tuple[Size, ...] | None:
    """Return the elements of a small constant of integers as sizes; `None` for other values."""
    tensor = value.const_value
    if tensor is None or tensor.size > _MOST_ELEMENTS or len(tensor.shape) > 1:
        return None
    if tensor.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        return None
    return tuple(constant(int(number)) for number in tensor.numpy().reshape(-1))


_ShapeRule = Callable[[KnownSizes, ir.Node], "_PartialShape | None"]
"""Returns the shape of the first output of a node (None for an unknown axis); None if the shape is unknown."""


def _broadcast_inputs(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape:
    return broadcast(known_sizes, [known_sizes.shape(value) for value in node.inputs if value is not None])


def _shape_of_first_input(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape:
    return known_sizes.shape(node.inputs[0])


def _shape_of_matmul(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape | None:
    left, right = known_sizes.shape(node.inputs[0]), known_sizes.shape(node.inputs[1])
    if len(left) < 2 or len(right) < 2:
        return None
    return (*broadcast(known_sizes, [left[:-2], right[:-2]]), left[-2], right[-1])


def _shape_of_gemm(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape:
    left, right = known_sizes.shape(node.inputs[0]), known_sizes.shape(node.inputs[1])
    return (
        left[1 if node.attributes.get_int("transA", 0) else 0],
        right[0 if node.attributes.get_int("transB", 0) else 1],
    )


def _shape_of_transpose(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape:
    shape = known_sizes.shape(node.inputs[0])
    order = node.attributes.get_ints("perm", range(len(shape) - 1, -1, -1))
    return tuple(shape[axis] for axis in order)


def _shape_of_gather(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape:
    data, indices = known_sizes.shape(node.inputs[0]), known_sizes.shape(node.inputs[1])
    axis = node.attributes.get_int("axis", 0) % max(len(data), 1)
    return (*data[:axis], *indices, *data[axis + 1 :])


def _shape_of_gather_nd(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape | None:
    data, indices = known_sizes.shape(node.inputs[0]), known_sizes.shape(node.inputs[1])
    count = indices[-1].number if indices else None
    if count is None:
        return None
    return (*indices[:-1], *data[node.attributes.get_int("batch_dims", 0) + count :])


def _shape_of_concat(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape | None:
    shapes = [known_sizes.shape(value) for value in node.inputs]
    if not all(shapes):
        return None
    axis = node.attributes.get_int("axis", 0) % len(shapes[0])
    # The other axes are equal; a number is most precise.
    joint = [
        next((shape[position] for shape in shapes if shape[position].number is not None), size)
        for position, size in enumerate(shapes[0])
    ]
    joint[axis] = sum((shape[axis] for shape in shapes), ZERO)
    return tuple(joint)


def _shape_of_unsqueeze(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape:
    shape, axes = known_sizes.shape(node.inputs[0]), _read_axes(known_sizes, node)
    rank = len(shape) + len(axes)
    positions = {axis % rank for axis in axes}
    remaining = iter(shape)
    return tuple(ONE if position in positions else next(remaining) for position in range(rank))


def _shape_of_squeeze(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape:
    shape, axes = known_sizes.shape(node.inputs[0]), _read_axes(known_sizes, node)
    positions = {axis % len(shape) for axis in axes}
    return tuple(size for position, size in enumerate(shape) if position not in positions)


def _read_axes(known_sizes: KnownSizes, node: ir.Node) -> list[int]:
    """Return the axes of a node, from its second input or its attribute.

    Raises:
        UnknownSizeError: the node states no axes, or computes them.
    """
    if len(node.inputs) > 1:
        return known_sizes.numbers(node.inputs[1])
    # An attribute before opset 13.
    return _require_known(list(node.attributes.get_ints("axes", ())) or None)


def _shape_of_reshape(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape:
    shape, target = known_sizes.find_shape(node.inputs[0]), known_sizes.content(node.inputs[1])
    is_zero_copied = not node.attributes.get_int("allowzero", 0)
    sizes: list[Size | None] = []
    for position, size in enumerate(target):
        if size.number == 0 and is_zero_copied:
            sizes.append(shape[position] if shape is not None and position < len(shape) else None)
        else:
            sizes.append(None if size.number == -1 else size)
    unknown = [position for position, size in enumerate(sizes) if size is None]
    if len(unknown) == 1 and shape is not None:
        stated_product = product(size for size in sizes if size is not None)
        sizes[unknown[0]] = product(shape).divide_exactly(stated_product)
    return tuple(sizes)


def _shape_of_expand(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape:
    return broadcast(known_sizes, [known_sizes.shape(node.inputs[0]), known_sizes.content(node.inputs[1])])


def _shape_of_tile(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape:
    shape, repeats = known_sizes.shape(node.inputs[0]), known_sizes.content(node.inputs[1])
    return tuple(size * count for size, count in zip(shape, repeats, strict=True))


def _shape_of_slice(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape:
    """Return the shape of a Slice; a size cut at an unknown end is a new symbol, noted in ``known_sizes``."""
    shape = known_sizes.shape(node.inputs[0])
    sizes: list[Size | None] = list(shape)
    for axis, (start, end, step) in _slice_ranges(known_sizes, node).items():
        sizes[axis] = _slice_size(shape[axis], start, end, step)
        if sizes[axis] is None and start == ZERO and step == 1 and shape[axis].number is not None and end.is_natural:
            name = f"min({end}, {shape[axis]})"
            known_sizes.cut[name] = end
            sizes[axis] = symbol(name)
    return tuple(sizes)


def _slice_size(size: Size, start: Size, end: Size, step: int) -> Size | None:
    """Return the size of a slice, or None if unknown."""
    if step != 1:
        return None
    if size.number is not None and start.number is not None and end.number is not None:
        return constant(len(range(size.number)[start.number : end.number]))
    return size if start == ZERO and takes_all(size, end) else None


def takes_all(size: Size, end: Size) -> bool:
    """Return True if a slice with this end extends to the end of an axis of this size."""
    return end == size or (end.number is not None and end.number >= _LARGEST_END)


def is_whole_slice(known_sizes: KnownSizes, node: ir.Node) -> bool:
    """Return True if a Slice takes all elements of its input, in order."""
    shape = known_sizes.shape(node.inputs[0])
    return all(
        step == 1 and start == ZERO and takes_all(shape[axis], end)
        for axis, (start, end, step) in _slice_ranges(known_sizes, node).items()
    )


def _slice_ranges(known_sizes: KnownSizes, node: ir.Node) -> dict[int, tuple[Size, Size, int]]:
    """Return axis → start, end and step of a slice.

    Raises:
        UnknownSizeError: the rank or a range is unknown.
    """
    shape = known_sizes.shape(node.inputs[0])
    if len(node.inputs) < 3:
        raise UnknownSizeError
    starts, ends = known_sizes.content(node.inputs[1]), known_sizes.content(node.inputs[2])
    has_axes, has_steps = (len(node.inputs) > position and node.inputs[position] is not None for position in (3, 4))
    axes = known_sizes.numbers(node.inputs[3]) if has_axes else list(range(len(starts)))
    steps = known_sizes.numbers(node.inputs[4]) if has_steps else [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise UnknownSizeError
    return {
        axis % len(shape): (start, end, step) for axis, start, end, step in zip(axes, starts, ends, steps, strict=True)
    }


def _shape_of_range(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape | None:
    start, limit, step = (known_sizes.find_scalar(value) for value in node.inputs)
    if start is None or limit is None or step != ONE or not (limit - start).is_natural:
        return None
    return (limit - start,)


def _shape_of_shape(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape:
    return (constant(len(_content_of_shape(known_sizes, node))),)


def _shape_of_flatten(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape:
    shape = known_sizes.shape(node.inputs[0])
    axis = node.attributes.get_int("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return product(shape[:axis]), product(shape[axis:])


def _shape_of_reduction(known_sizes: KnownSizes, node: ir.Node) -> _PartialShape:
    shape, places = known_sizes.shape(node.inputs[0]), reduced_axes(known_sizes, node)
    if node.attributes.get_int("keepdims", 1):
        return tuple(ONE if axis in places else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in places)


def reduced_axes(known_sizes: KnownSizes, node: ir.Node) -> frozenset[int]:
    """Return the axes a reduction takes away, counted from the first; raises UnknownSizeError if they are unknown."""
    shape, axes = known_sizes.shape(node.inputs[0]), _read_axes(known_sizes, node)
    return frozenset(axis % len(shape) for axis in _require_known(axes or None))


def _shapes_of_split(known_sizes: KnownSizes, node: ir.Node) -> list[_PartialShape]:
    """Return the shape of each output of a ``Split``; `[]` if the shape of its input is unknown."""
    shape = known_sizes.find_shape(node.inputs[0])
    if not shape:
        return []
    axis = node.attributes.get_int("axis", 0) % len(shape)
    sizes = node.attributes.get_ints("split", ())
    is_stated = bool(sizes) or len(node.inputs) > 1
    parts = tuple(map(constant, sizes)) or (known_sizes.find_content(node.inputs[1]) if len(node.inputs) > 1 else None)
    if parts is None:
        equal = None if is_stated else shape[axis].divide_exactly(constant(len(node.outputs)))
        return [(*shape[:axis], equal, *shape[axis + 1 :])] * len(node.outputs)
    return [(*shape[:axis], size, *shape[axis + 1 :]) for size in parts]


def _content_of_first_input(known_sizes: KnownSizes, node: ir.Node) -> _Content:
    return known_sizes.content(node.inputs[0])


_ELEMENTWISE = (
    "Add", "Sub", "Mul", "Div", "Mod", "Pow", "Min", "Max", "Sum", "Mean", "And", "Or", "Xor", "Equal", "Greater",
    "GreaterOrEqual", "Less", "LessOrEqual", "Where", "PRelu", "BitShift", "BitwiseAnd", "BitwiseOr",
)  # fmt: skip
_OF_FIRST = (
    "Abs", "Neg", "Not", "Cast", "CastLike", "Identity", "Sqrt", "Exp", "Log", "Erf", "Tanh", "Sigmoid", "Relu", "Gelu",
    "LeakyRelu", "Elu", "Selu", "Softplus", "Softsign", "HardSigmoid", "HardSwish", "Mish", "Ceil", "Floor", "Round",
    "Sign", "Sin", "Cos", "Tan", "Reciprocal", "IsNaN", "IsInf", "Clip", "Softmax", "LogSoftmax", "CumSum",
    "LayerNormalization", "RMSNormalization", "BatchNormalization", "InstanceNormalization", "GroupNormalization",
    "LpNormalization", "Dropout", "Trilu", "QuantizeLinear", "DequantizeLinear", "ScatterND", "ScatterElements",
)  # fmt: skip
"""Specified: operators whose first output has the shape of their first input."""
_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2", "ReduceSumSquare")

_SHAPES: Mapping[str, _ShapeRule] = {
    **dict.fromkeys(_ELEMENTWISE, _broadcast_inputs),
    **dict.fromkeys(_OF_FIRST, _shape_of_first_input),
    **dict.fromkeys(_REDUCTIONS, _shape_of_reduction),
    "MatMul": _shape_of_matmul,
    "Gemm": _shape_of_gemm,
    "Transpose": _shape_of_transpose,
    "Gather": _shape_of_gather,
    "GatherND": _shape_of_gather_nd,
    "Concat": _shape_of_concat,
    "Unsqueeze": _shape_of_unsqueeze,
    "Squeeze": _shape_of_squeeze,
    "Reshape": _shape_of_reshape,
    "Expand": _shape_of_expand,
    "Tile": _shape_of_tile,
    "Slice": _shape_of_slice,
    "Range": _shape_of_range,
    "Shape": _shape_of_shape,
    "Flatten": _shape_of_flatten,
    "ConstantOfShape": _content_of_first_input,
}
"""Operator → rule for the shape of its first output; other operators use the shape inferred by onnx."""


_Content = tuple[Size, ...]
_ContentRule = Callable[[KnownSizes, ir.Node], "_Content | None"]
"""Returns the elements of the first output of a node; None if unknown."""


def _content_of_shape(known_sizes: KnownSizes, node: ir.Node) -> _Content:
    shape = known_sizes.shape(node.inputs[0])
    return shape[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(shape))]


def casts_to_sizes(node: ir.Node) -> bool:
    """Return True if a Cast preserves integers."""
    return node.attributes.get_int("to", 0) in (int(ir.DataType.INT64), int(ir.DataType.INT32))


def _content_of_cast(known_sizes: KnownSizes, node: ir.Node) -> _Content | None:
    return known_sizes.content(node.inputs[0]) if casts_to_sizes(node) else None


def _content_of_gather(known_sizes: KnownSizes, node: ir.Node) -> _Content | None:
    content, positions = known_sizes.content(node.inputs[0]), known_sizes.numbers(node.inputs[1])
    if len(known_sizes.shape(node.inputs[0])) != 1 or not all(
        -len(content) <= position < len(content) for position in positions
    ):
        return None
    return tuple(content[position] for position in positions)


def _content_of_slice(known_sizes: KnownSizes, node: ir.Node) -> _Content | None:
    content, ranges = known_sizes.content(node.inputs[0]), _slice_ranges(known_sizes, node)
    if set(ranges) != {0}:
        return None
    start, end, step = ranges[0]
    if start.number is None or end.number is None:
        return None
    return content[start.number : end.number : step]


def _content_of_concat(known_sizes: KnownSizes, node: ir.Node) -> _Content | None:
    if any(len(known_sizes.shape(value)) != 1 for value in node.inputs):
        return None
    return tuple(size for value in node.inputs for size in known_sizes.content(value))


def _compute_elements(
    known_sizes: KnownSizes, node: ir.Node, compute: Callable[[Size, Size], Size | None]
) -> _Content | None:
    """Compute a binary operator on the elements of two small tensors; a single element is broadcast.

    `None` if the numbers of elements differ otherwise.

    Raises:
        UnknownSizeError: an element is unknown.
    """
    left, right = known_sizes.content(node.inputs[0]), known_sizes.content(node.inputs[1])
    if len(left) != len(right) and 1 not in (len(left), len(right)):
        return None
    count = max(len(left), len(right))
    pairs = zip(left * (count // len(left)), right * (count // len(right)), strict=True)
    return tuple(_require_known(compute(a, b)) for a, b in pairs)


def _content_of_where(known_sizes: KnownSizes, node: ir.Node) -> _Content | None:
    """Return the elements of Where(Equal(sizes, constants), then, otherwise), as exported for Expand with -1.

    `None` for other conditions, or if a size may equal the constant.
    """
    condition, then, otherwise = node.inputs
    equal = producer_of(condition, "Equal")
    if equal is None:
        return None
    contents = [known_sizes.content(value) for value in (*equal.inputs, then, otherwise)]
    if len({len(content) for content in contents}) > 1:
        return None
    chosen: list[Size] = []
    for left, right, size, alternative in zip(*contents, strict=True):
        difference = left - right
        if difference.terms and not _is_never_zero(difference):
            return None
        chosen.append(alternative if difference.terms else size)
    return tuple(chosen)


def _is_never_zero(size: Size) -> bool:
    """Return True if a size is known to be nonzero; names are zero or more."""
    return (size - ONE).is_natural or (constant(-1) - size).is_natural


_CONTENTS: Mapping[str, _ContentRule] = {
    "Shape": _content_of_shape,
    "Gather": _content_of_gather,
    "Slice": _content_of_slice,
    "Concat": _content_of_concat,
    "Cast": _content_of_cast,
    **dict.fromkeys(("Identity", "Unsqueeze", "Squeeze", "Reshape"), _content_of_first_input),
    "Add": partial(_compute_elements, compute=operator.add),
    "Sub": partial(_compute_elements, compute=operator.sub),
    "Mul": partial(_compute_elements, compute=operator.mul),
    "Div": partial(_compute_elements, compute=Size.divide_exactly),
    "Where": _content_of_where,
}
"""Operator → rule for the elements of a small tensor of whole numbers that it makes."""
