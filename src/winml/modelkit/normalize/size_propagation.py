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
        return _polynomial([*self.terms, *other.terms])

    def __sub__(self, other: Size) -> Size:
        return _polynomial([*self.terms, *((names, -coefficient) for names, coefficient in other.terms)])

    def __mul__(self, other: Size) -> Size:
        return _polynomial(
            (tuple(sorted((*left, *right))), a * b) for left, a in self.terms for right, b in other.terms
        )

    def divided_by(self, other: Size) -> Size | None:
        """Return the exact quotient, or None if there is a remainder."""
        if not other.terms:
            return None
        lead, coefficient = other.terms[-1]
        rest, quotient = self, ZERO
        # Each iteration removes the last term, and adds none after it.
        while rest.terms:
            names, number = rest.terms[-1]
            factors = _divide_names(names, lead)
            if factors is None or number % coefficient:
                return None
            part = Size(((factors, number // coefficient),))
            rest, quotient = rest - part * other, quotient + part
        return quotient

    def __str__(self) -> str:
        return " + ".join(_term_words(names, coefficient) for names, coefficient in self.terms) or "0"


def constant(number: int) -> Size:
    """Return a number as a size."""
    return Size((((), number),)) if number else ZERO


def symbol(name: str) -> Size:
    """Return a name as a size."""
    return Size((((name,), 1),))


def product(sizes: Iterable[Size]) -> Size:
    """Return the product; 1 of none."""
    return reduce(Size.__mul__, sizes, ONE)


def _polynomial(terms: Iterable[tuple[_Monomial, int]]) -> Size:
    sums: dict[_Monomial, int] = {}
    for names, coefficient in terms:
        sums[names] = sums.get(names, 0) + coefficient
    # By degree, then by names: an order that multiplication keeps, as division needs.
    ordered = sorted(((names, number) for names, number in sums.items() if number), key=_order)
    return Size(tuple(ordered))


def _order(term: tuple[_Monomial, int]) -> tuple[int, _Monomial]:
    return len(term[0]), term[0]


def _divide_names(names: _Monomial, divisor: _Monomial) -> _Monomial | None:
    remaining = list(names)
    for name in divisor:
        if name not in remaining:
            return None
        remaining.remove(name)
    return tuple(remaining)


def _term_words(names: _Monomial, coefficient: int) -> str:
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
    """A shape or a number that a rule needs is unknown, so that the rule does not apply."""


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
        """Return the sizes of a value, or None."""
        return None if value is None else self.shapes.get(value)

    def shape(self, value: ir.Value | None) -> Shape:
        """Return the sizes of a value; raises UnknownSizeError if they are unknown."""
        return _known(self.find_shape(value))

    def find_content(self, value: ir.Value | None) -> tuple[Size, ...] | None:
        """Return the elements of a small tensor of whole numbers, or None."""
        if value is None:
            return None
        if value not in self.contents and (numbers := _constant_content(value)) is not None:
            self.contents[value] = numbers
        return self.contents.get(value)

    def content(self, value: ir.Value | None) -> tuple[Size, ...]:
        """Return the elements of a small tensor of whole numbers; raises UnknownSizeError if they are unknown."""
        return _known(self.find_content(value))

    def numbers(self, value: ir.Value | None) -> list[int]:
        """Return the elements; raises UnknownSizeError unless all of them are numbers."""
        return [_known(size.number) for size in self.content(value)]

    def find_scalar(self, value: ir.Value | None) -> Size | None:
        """Return the element of a tensor with one element, or None."""
        content = self.find_content(value)
        return content[0] if content is not None and len(content) == 1 else None


def _known(found: _T | None) -> _T:
    if found is None:
        raise UnknownSizeError
    return found


def learn_sizes(graph: ir.Graph) -> KnownSizes:
    """Collect the known sizes of the values of a graph; the graph is not changed."""
    dimensions = [size for value in graph.inputs for size in value.shape or () if isinstance(size, ir.SymbolicDim)]
    known = KnownSizes(frozenset(size.value for size in dimensions if size.value is not None))
    for value in (*graph.inputs, *graph.initializers.values()):
        _record_stated(known, value)
    for node in graph:
        for value_in in node.inputs:
            # A value of an enclosing graph, or an initializer outside the graph's list.
            if value_in is not None and value_in not in known.shapes:
                _record_stated(known, value_in)
        _record_sizes(known, node)
    return known


def table_limits(graph: ir.Graph) -> dict[str, int]:
    """Return dynamic dimension → rows of the shortest table that is indexed by its size.

    A table is a constant that is sliced to the size (``positions[:length]``), or that has a row for each element of a
    ``Range`` up to the size (``nn.Embedding(64, 8)(torch.arange(length))``). Tables of one row are broadcast.
    """
    known, limits = learn_sizes(graph), dict[str, int]()
    for node in graph:
        for end, rows in _table_reads(known, node):
            if end.name in known.names and rows.number is not None and rows.number > 1:
                limits[end.name] = min(rows.number, limits.get(end.name, rows.number))
    return limits


def _table_reads(known: KnownSizes, node: ir.Node) -> Iterator[tuple[Size, Size]]:
    """Yield the end of each read of a table from its first row, and the number of rows of the table."""
    shape = known.find_shape(node.inputs[0]) if node.inputs else None
    if not shape:
        return
    if is_operator(node, "Slice"):
        with contextlib.suppress(UnknownSizeError):
            for axis, (start, end, step) in _slice_ranges(known, node).items():
                if start == ZERO and step == 1:
                    yield end, shape[axis]
    elif is_operator(node, "Gather"):
        counting = node.inputs[1].producer() if node.inputs[1] is not None else None
        if counting is not None and is_operator(counting, "Range"):
            first, limit, delta = (known.find_scalar(value) for value in counting.inputs)
            if limit is not None and first == ZERO and delta == ONE:
                yield limit, shape[node.attributes.get_int("axis", 0) % len(shape)]


def broadcast(known: KnownSizes, shapes: Sequence[Shape]) -> tuple[Size | None, ...]:
    """Return the shape that values of several shapes have together; None for an axis that is unknown."""
    rank = max(map(len, shapes))
    padded = [(ONE,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(_joint(known, sizes) for sizes in zip(*padded, strict=True))


def _joint(known: KnownSizes, sizes: tuple[Size, ...]) -> Size | None:
    wide = {size for size in sizes if size != ONE}
    # A table is as long as the size it was sliced to, or has one row: with fewer rows the graph does not run.
    wide -= {size for size in wide if size.name in known.cut and known.cut[size.name or ""] in wide}
    if len(wide) < 2:
        return next(iter(wide), ONE)
    # A dynamic size broadcast with a number above one equals that number or one.
    numbers = {size for size in wide if size.number is not None}
    return numbers.pop() if len(numbers) == 1 else None


def _record_stated(known: KnownSizes, value: ir.Value) -> None:
    """Learn the shape a value states; an axis without a name of the inputs is a size of its own."""
    if value.shape is None:
        return
    known.shapes[value] = tuple(
        constant(size)
        if isinstance(size, int)
        else symbol(size.value if size.value in known.names else _own_name(value, axis))
        for axis, size in enumerate(value.shape)
    )


def _own_name(value: ir.Value, axis: int) -> str:
    return f"{value.name}#{axis}"


def _record_sizes(known: KnownSizes, node: ir.Node) -> None:
    """Record shapes and contents of the outputs of a node."""
    for value in node.outputs:
        _record_stated(known, value)
    if node.domain or not node.outputs:
        return
    output = node.outputs[0]
    shape = _apply(_SHAPES.get(node.op_type), known, node)
    if shape is not None:
        _record_shape(known, output, shape)
    if node.op_type == "Split":
        for value, part in zip(node.outputs, _parts_of_split(known, node), strict=False):
            _record_shape(known, value, part)
    content = _apply(_CONTENTS.get(node.op_type), known, node)
    created = known.find_shape(output)
    # Contents have no axes: for more than one element, two tensors of equal elements may differ in shape.
    if content is not None and created is not None and len(created) < 2 and product(created).number == len(content):
        known.contents[output] = content


def _apply(rule: Callable[[KnownSizes, ir.Node], _T | None] | None, known: KnownSizes, node: ir.Node) -> _T | None:
    try:
        return None if rule is None else rule(known, node)
    except UnknownSizeError:
        return None


def _record_shape(known: KnownSizes, value: ir.Value, shape: _PartialShape) -> None:
    """Record a shape that follows from the graph, combined with the stated shape."""
    declared = known.shapes.get(value)
    if declared is None or len(declared) == len(shape):
        known.shapes[value] = tuple(
            _choose_size(known, size, declared[axis] if declared is not None else symbol(_own_name(value, axis)))
            for axis, size in enumerate(shape)
        )


def _choose_size(known: KnownSizes, size: Size | None, stated: Size) -> Size:
    """Return the more precise of the propagated and the stated size.

    A file may state sizes that were true before its inputs became dynamic.
    """
    if size is None:
        return stated
    is_of_inputs = all(name in known.names for names, _ in size.terms for name in names)
    return stated if stated.number is not None and not is_of_inputs else size


def _constant_content(value: ir.Value) -> tuple[Size, ...] | None:
    tensor = value.const_value
    if tensor is None or tensor.size > _MOST_ELEMENTS or len(tensor.shape) > 1:
        return None
    if tensor.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        return None
    return tuple(constant(int(number)) for number in tensor.numpy().reshape(-1))


_ShapeRule = Callable[[KnownSizes, ir.Node], "_PartialShape | None"]
"""Returns the shape of the first output of a node (None for an unknown axis); None if the shape is unknown."""


def _shape_of_all(known: KnownSizes, node: ir.Node) -> _PartialShape:
    return broadcast(known, [known.shape(value) for value in node.inputs if value is not None])


def _shape_of_first(known: KnownSizes, node: ir.Node) -> _PartialShape:
    return known.shape(node.inputs[0])


def _shape_of_product(known: KnownSizes, node: ir.Node) -> _PartialShape | None:
    left, right = known.shape(node.inputs[0]), known.shape(node.inputs[1])
    if len(left) < 2 or len(right) < 2:
        return None
    return (*broadcast(known, [left[:-2], right[:-2]]), left[-2], right[-1])


def _shape_of_gemm(known: KnownSizes, node: ir.Node) -> _PartialShape:
    left, right = known.shape(node.inputs[0]), known.shape(node.inputs[1])
    return (
        left[1 if node.attributes.get_int("transA", 0) else 0],
        right[0 if node.attributes.get_int("transB", 0) else 1],
    )


def _shape_of_transpose(known: KnownSizes, node: ir.Node) -> _PartialShape:
    shape = known.shape(node.inputs[0])
    order = node.attributes.get_ints("perm", range(len(shape) - 1, -1, -1))
    return tuple(shape[axis] for axis in order)


def _shape_of_gather(known: KnownSizes, node: ir.Node) -> _PartialShape:
    data, indices = known.shape(node.inputs[0]), known.shape(node.inputs[1])
    axis = node.attributes.get_int("axis", 0) % max(len(data), 1)
    return (*data[:axis], *indices, *data[axis + 1 :])


def _shape_of_gather_nd(known: KnownSizes, node: ir.Node) -> _PartialShape | None:
    data, indices = known.shape(node.inputs[0]), known.shape(node.inputs[1])
    count = indices[-1].number if indices else None
    if count is None:
        return None
    return (*indices[:-1], *data[node.attributes.get_int("batch_dims", 0) + count :])


def _shape_of_concat(known: KnownSizes, node: ir.Node) -> _PartialShape | None:
    shapes = [known.shape(value) for value in node.inputs]
    if not all(shapes):
        return None
    axis = node.attributes.get_int("axis", 0) % len(shapes[0])
    # The other axes are equal; a number is most precise.
    joint = [
        next((shape[place] for shape in shapes if shape[place].number is not None), size)
        for place, size in enumerate(shapes[0])
    ]
    joint[axis] = sum((shape[axis] for shape in shapes), ZERO)
    return tuple(joint)


def _shape_of_unsqueeze(known: KnownSizes, node: ir.Node) -> _PartialShape:
    shape, axes = known.shape(node.inputs[0]), _axes(known, node)
    rank = len(shape) + len(axes)
    places = {axis % rank for axis in axes}
    rest = iter(shape)
    return tuple(ONE if place in places else next(rest) for place in range(rank))


def _shape_of_squeeze(known: KnownSizes, node: ir.Node) -> _PartialShape:
    shape, axes = known.shape(node.inputs[0]), _axes(known, node)
    places = {axis % len(shape) for axis in axes}
    return tuple(size for place, size in enumerate(shape) if place not in places)


def _axes(known: KnownSizes, node: ir.Node) -> list[int]:
    if len(node.inputs) > 1:
        return known.numbers(node.inputs[1])
    # An attribute before opset 13.
    return _known(list(node.attributes.get_ints("axes", ())) or None)


def _shape_of_reshape(known: KnownSizes, node: ir.Node) -> _PartialShape:
    shape, target = known.find_shape(node.inputs[0]), known.content(node.inputs[1])
    is_zero_copied = not node.attributes.get_int("allowzero", 0)
    sizes: list[Size | None] = []
    for place, size in enumerate(target):
        if size.number == 0 and is_zero_copied:
            sizes.append(shape[place] if shape is not None and place < len(shape) else None)
        else:
            sizes.append(None if size.number == -1 else size)
    unknown = [place for place, size in enumerate(sizes) if size is None]
    if len(unknown) == 1 and shape is not None:
        others = product(size for size in sizes if size is not None)
        sizes[unknown[0]] = product(shape).divided_by(others)
    return tuple(sizes)


def _shape_of_expand(known: KnownSizes, node: ir.Node) -> _PartialShape:
    return broadcast(known, [known.shape(node.inputs[0]), known.content(node.inputs[1])])


def _shape_of_tile(known: KnownSizes, node: ir.Node) -> _PartialShape:
    shape, repeats = known.shape(node.inputs[0]), known.content(node.inputs[1])
    return tuple(size * count for size, count in zip(shape, repeats, strict=True))


def _shape_of_slice(known: KnownSizes, node: ir.Node) -> _PartialShape:
    shape = known.shape(node.inputs[0])
    sizes: list[Size | None] = list(shape)
    for axis, (start, end, step) in _slice_ranges(known, node).items():
        sizes[axis] = _slice_size(shape[axis], start, end, step)
        if sizes[axis] is None and start == ZERO and step == 1 and shape[axis].number is not None and end.is_natural:
            name = f"min({end}, {shape[axis]})"
            known.cut[name] = end
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


def is_whole_slice(known: KnownSizes, node: ir.Node) -> bool:
    """Return True if a Slice takes all elements of its input, in order."""
    shape = known.shape(node.inputs[0])
    return all(
        step == 1 and start == ZERO and takes_all(shape[axis], end)
        for axis, (start, end, step) in _slice_ranges(known, node).items()
    )


def _slice_ranges(known: KnownSizes, node: ir.Node) -> dict[int, tuple[Size, Size, int]]:
    """Return axis → start, end and step of a slice.

    Raises:
        UnknownSizeError: the rank or a range is unknown.
    """
    shape = known.shape(node.inputs[0])
    if len(node.inputs) < 3:
        raise UnknownSizeError
    starts, ends = known.content(node.inputs[1]), known.content(node.inputs[2])
    has_axes, has_steps = (len(node.inputs) > place and node.inputs[place] is not None for place in (3, 4))
    axes = known.numbers(node.inputs[3]) if has_axes else list(range(len(starts)))
    steps = known.numbers(node.inputs[4]) if has_steps else [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise UnknownSizeError
    return {
        axis % len(shape): (start, end, step) for axis, start, end, step in zip(axes, starts, ends, steps, strict=True)
    }


def _shape_of_range(known: KnownSizes, node: ir.Node) -> _PartialShape | None:
    start, limit, step = (known.find_scalar(value) for value in node.inputs)
    if start is None or limit is None or step != ONE or not (limit - start).is_natural:
        return None
    return (limit - start,)


def _shape_of_shape(known: KnownSizes, node: ir.Node) -> _PartialShape:
    return (constant(len(_content_of_shape(known, node))),)


def _shape_of_flatten(known: KnownSizes, node: ir.Node) -> _PartialShape:
    shape = known.shape(node.inputs[0])
    axis = node.attributes.get_int("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return product(shape[:axis]), product(shape[axis:])


def _shape_of_reduction(known: KnownSizes, node: ir.Node) -> _PartialShape:
    shape, places = known.shape(node.inputs[0]), reduced_axes(known, node)
    if node.attributes.get_int("keepdims", 1):
        return tuple(ONE if axis in places else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in places)


def reduced_axes(known: KnownSizes, node: ir.Node) -> frozenset[int]:
    """Return the axes a reduction takes away, counted from the first; raises UnknownSizeError if they are unknown."""
    shape, axes = known.shape(node.inputs[0]), _axes(known, node)
    return frozenset(axis % len(shape) for axis in _known(axes or None))


def _parts_of_split(known: KnownSizes, node: ir.Node) -> list[_PartialShape]:
    shape = known.find_shape(node.inputs[0])
    if not shape:
        return []
    axis = node.attributes.get_int("axis", 0) % len(shape)
    sizes = node.attributes.get_ints("split", ())
    is_stated = bool(sizes) or len(node.inputs) > 1
    parts = tuple(map(constant, sizes)) or (known.find_content(node.inputs[1]) if len(node.inputs) > 1 else None)
    if parts is None:
        equal = None if is_stated else shape[axis].divided_by(constant(len(node.outputs)))
        return [(*shape[:axis], equal, *shape[axis + 1 :])] * len(node.outputs)
    return [(*shape[:axis], size, *shape[axis + 1 :]) for size in parts]


def _shape_of_content(known: KnownSizes, node: ir.Node) -> _PartialShape:
    return known.content(node.inputs[0])


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
    **dict.fromkeys(_ELEMENTWISE, _shape_of_all),
    **dict.fromkeys(_OF_FIRST, _shape_of_first),
    **dict.fromkeys(_REDUCTIONS, _shape_of_reduction),
    "MatMul": _shape_of_product,
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
    "ConstantOfShape": _shape_of_content,
}
"""Operator → rule for the shape of its first output; other operators use the shape inferred by onnx."""


_Content = tuple[Size, ...]
_ContentRule = Callable[[KnownSizes, ir.Node], "_Content | None"]
"""Returns the elements of the first output of a node; None if unknown."""


def _content_of_shape(known: KnownSizes, node: ir.Node) -> _Content:
    shape = known.shape(node.inputs[0])
    return shape[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(shape))]


def _content_of_first(known: KnownSizes, node: ir.Node) -> _Content:
    return known.content(node.inputs[0])


def casts_to_sizes(node: ir.Node) -> bool:
    """Return True if a Cast preserves integers."""
    return node.attributes.get_int("to", 0) in (int(ir.DataType.INT64), int(ir.DataType.INT32))


def _content_of_cast(known: KnownSizes, node: ir.Node) -> _Content | None:
    return known.content(node.inputs[0]) if casts_to_sizes(node) else None


def _content_of_gather(known: KnownSizes, node: ir.Node) -> _Content | None:
    content, places = known.content(node.inputs[0]), known.numbers(node.inputs[1])
    if len(known.shape(node.inputs[0])) != 1 or not all(-len(content) <= place < len(content) for place in places):
        return None
    return tuple(content[place] for place in places)


def _content_of_slice(known: KnownSizes, node: ir.Node) -> _Content | None:
    content, ranges = known.content(node.inputs[0]), _slice_ranges(known, node)
    if set(ranges) != {0}:
        return None
    start, end, step = ranges[0]
    if start.number is None or end.number is None:
        return None
    return content[start.number : end.number : step]


def _content_of_concat(known: KnownSizes, node: ir.Node) -> _Content | None:
    if any(len(known.shape(value)) != 1 for value in node.inputs):
        return None
    return tuple(size for value in node.inputs for size in known.content(value))


def _elementwise(known: KnownSizes, node: ir.Node, compute: Callable[[Size, Size], Size | None]) -> _Content | None:
    left, right = known.content(node.inputs[0]), known.content(node.inputs[1])
    if len(left) != len(right) and 1 not in (len(left), len(right)):
        return None
    count = max(len(left), len(right))
    pairs = zip(left * (count // len(left)), right * (count // len(right)), strict=True)
    return tuple(_known(compute(one, other)) for one, other in pairs)


def _content_of_choice(known: KnownSizes, node: ir.Node) -> _Content | None:
    """Return the elements of Where(Equal(sizes, constants), then, otherwise), as exported for Expand with -1."""
    condition, then, otherwise = node.inputs
    equal = producer_of(condition, "Equal")
    if equal is None:
        return None
    contents = [known.content(value) for value in (*equal.inputs, then, otherwise)]
    if len({len(content) for content in contents}) > 1:
        return None
    chosen: list[Size] = []
    for left, right, size, other in zip(*contents, strict=True):
        difference = left - right
        if difference.terms and not _is_never_zero(difference):
            return None
        chosen.append(other if difference.terms else size)
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
    **dict.fromkeys(("Identity", "Unsqueeze", "Squeeze", "Reshape"), _content_of_first),
    "Add": partial(_elementwise, compute=operator.add),
    "Sub": partial(_elementwise, compute=operator.sub),
    "Mul": partial(_elementwise, compute=operator.mul),
    "Div": partial(_elementwise, compute=Size.divided_by),
    "Where": _content_of_choice,
}
"""Operator → rule for the elements of a small tensor of whole numbers that it makes."""
