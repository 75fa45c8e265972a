"""How many multiply-accumulate operations does a node take?

Counts those of matrix products, convolutions and recurrent cells from static shapes, as is customary; additions,
activations, normalizations and data movement count none. Where a dimension is not known, or an operator is foreign, the
answer is "unknown", never zero. Runs nothing.

Formulas follow from the definitions of the operators (https://onnx.ai/onnx/operators and
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md): one operation for each product that is
added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import onnx

__all__ = ["Shape", "ShapeTable", "count_macs", "is_counted"]

Shape = tuple[int | str | None, ...]
"""Sizes; a name or None where a dimension is not static."""
ShapeTable = Mapping[str, Shape]
"""Shape of each value by its name; a value that is absent has an unknown rank."""


class _UnknownError(Exception):
    """A shape that the count needs is not static."""


def count_macs(node: onnx.NodeProto, shapes: ShapeTable) -> int | None:
    """Return the multiply-accumulate operations of one run of a node; None where they are not known.

    Args:
        node: The node.
        shapes: Shapes of the values it reads and makes, as far as they are known.
    """
    formula = _formula(node)
    if formula is None:
        return None
    try:
        return formula(_Operands(node, shapes))
    except _UnknownError:
        return None


def is_counted(node: onnx.NodeProto) -> bool:
    """Say whether a node takes such operations, or may: whatever its shapes, the count is not plainly zero."""
    return _formula(node) is not _nothing


class _Operands:
    """What a formula looks at: static sizes of inputs and outputs, and attributes."""

    def __init__(self, node: onnx.NodeProto, shapes: ShapeTable) -> None:
        self._node = node
        self._shapes = shapes

    def input(self, index: int) -> tuple[int, ...]:
        """Return the shape of an input.

        Raises:
            _UnknownError: it is absent or not static.
        """
        return self._static(self._node.input, index)

    def output(self, index: int = 0) -> tuple[int, ...]:
        return self._static(self._node.output, index)

    def has_input(self, index: int) -> bool:
        return len(self._node.input) > index and bool(self._node.input[index])

    def number(self, name: str, default: int = 0) -> int:
        return next((int(item.i) for item in self._node.attribute if item.name == name), default)

    def numbers(self, name: str) -> list[int]:
        return next((list(item.ints) for item in self._node.attribute if item.name == name), [])

    def text(self, name: str) -> str:
        return next((item.s.decode(errors="replace") for item in self._node.attribute if item.name == name), "")

    @property
    def input_count(self) -> int:
        return len(self._node.input)

    def _static(self, names: Sequence[str], index: int) -> tuple[int, ...]:
        shape = self._shapes.get(names[index]) if len(names) > index else None
        if shape is None:
            raise _UnknownError
        sizes = tuple(size for size in shape if isinstance(size, int) and size >= 0)
        if len(sizes) != len(shape):
            raise _UnknownError
        return sizes


_Formula = Callable[[_Operands], int]


def _nothing(_: _Operands) -> int:
    return 0


def _matrix_product(left: int = 0, right: int = 1) -> _Formula:
    """Batches × M × N × K, from the operands: a vector is a matrix of one row or column, batches broadcast."""

    def formula(operands: _Operands) -> int:
        a, b = operands.input(left), operands.input(right)
        if not a or not b:
            raise _UnknownError
        rows, inner = (a[-2], a[-1]) if len(a) > 1 else (1, a[0])
        columns = b[-1] if len(b) > 1 else 1
        if operands.number("transA") and len(a) > 1:
            rows, inner = inner, rows
        if operands.number("transB") and len(b) > 1:
            columns = b[-2]
        return _broadcast(a[:-2], b[:-2]) * rows * columns * inner

    return formula


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    return math.prod(second if first == 1 else first for first, second in pairs)


def _convolution(weight: int = 1) -> _Formula:
    """Every output value adds up one window: output × (channels in / group) × kernel, the weight's shape behind its
    first dimension.
    """
    return lambda operands: math.prod(operands.output()) * math.prod(operands.input(weight)[1:])


def _transposed_convolution(operands: _Operands) -> int:
    """Every input value is spread over one window: input × (channels out / group) × kernel."""
    return math.prod(operands.input(0)) * math.prod(operands.input(1)[1:])


def _packed_matrix_product(operands: _Operands) -> int:
    """Weights in blocks of few bits: the attribute N columns for each input value."""
    return math.prod(operands.input(0)) * operands.number("N")


def _recurrence(operands: _Operands) -> int:
    """Every step multiplies with all of W and R; X is (steps, batch, features), whichever of the first two comes
    first.
    """
    steps_and_batch = math.prod(operands.input(0)[:2])
    return steps_and_batch * (math.prod(operands.input(1)) + math.prod(operands.input(2)))


def _einsum(operands: _Operands) -> int:
    """One product for every combination of all indices, as for two operands; more are left open, since the order in
    which they are multiplied is.
    """
    left = operands.text("equation").replace(" ", "").partition("->")[0].split(",")
    if len(left) > 2 or len(left) != operands.input_count or any("." in term for term in left):
        raise _UnknownError
    if len(left) == 1:
        return 0
    sizes: dict[str, int] = {}
    for index, term in enumerate(left):
        shape = operands.input(index)
        if len(shape) != len(term):
            raise _UnknownError
        for letter, size in zip(term, shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    return math.prod(sizes.values())


def _attention(operands: _Operands) -> int:
    """Scores and their product with the values: batch × query length × key length × (query width + output width)."""
    query, key, output = operands.input(0), operands.input(1), operands.output()
    past = operands.input(4)[-2] if operands.has_input(4) else 0
    if len(query) not in (3, 4) or len(key) != len(query) or len(output) != len(query):
        raise _UnknownError
    widths = query[-1] + output[-1]
    return math.prod(query[:-1]) * (key[-2] + past) * widths


def _multi_head_attention(operands: _Operands) -> int:
    """com.microsoft: as :func:`_attention`, heads packed into the last dimension; what comes with a past is left
    open.
    """
    query, key, output = operands.input(0), operands.input(1), operands.output()
    if operands.has_input(6) or not len(query) == len(key) == len(output) == 3:
        raise _UnknownError
    return query[0] * query[1] * key[1] * (query[2] + output[2])


def _projected_attention(operands: _Operands) -> int:
    """com.microsoft: the projection of the input to queries, keys and values, and :func:`_attention` on these."""
    (batch, length, features), weight = _three(operands.input(0)), operands.input(1)
    if operands.has_input(4) or len(weight) != 2:
        raise _UnknownError
    sizes = operands.numbers("qkv_hidden_sizes") or [weight[1] // 3] * 3
    if len(sizes) != 3:
        raise _UnknownError
    return batch * length * (features * weight[1] + length * (sizes[0] + sizes[2]))


def _three(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise _UnknownError
    return shape[0], shape[1], shape[2]


_ONNX: Mapping[str, _Formula | None] = {
    "MatMul": _matrix_product(),
    "MatMulInteger": _matrix_product(),
    "QLinearMatMul": _matrix_product(0, 3),
    "Gemm": _matrix_product(),
    "Conv": _convolution(),
    "ConvInteger": _convolution(),
    "QLinearConv": _convolution(3),
    "DeformConv": _convolution(),
    "ConvTranspose": _transposed_convolution,
    "LSTM": _recurrence,
    "GRU": _recurrence,
    "RNN": _recurrence,
    "Einsum": _einsum,
    "Attention": _attention,
    # They multiply, and how much is not written down here.
    "CausalConvWithState": None,
    "DFT": None,
    "LinearAttention": None,
    "STFT": None,
}
_MICROSOFT: Mapping[str, _Formula | None] = {
    "Attention": _projected_attention,
    "DynamicQuantizeMatMul": _matrix_product(),
    "FusedConv": _convolution(),
    "FusedGemm": _matrix_product(),
    "FusedMatMul": _matrix_product(),
    "FusedMatMulActivation": _matrix_product(),
    "MatMulBnb4": _packed_matrix_product,
    "MatMulInteger16": _matrix_product(),
    "MatMulIntegerToFloat": _matrix_product(),
    "MatMulNBits": _packed_matrix_product,
    "MultiHeadAttention": _multi_head_attention,
    "QGemm": _matrix_product(0, 3),
    **dict.fromkeys(
        (
            "BiasAdd", "BiasDropout", "BiasGelu", "BiasSoftmax", "BiasSplitGelu", "DequantizeLinear",
            "EmbedLayerNormalization", "FastGelu", "Gelu", "GroupNorm", "QLinearAdd", "QLinearAveragePool",
            "QLinearConcat", "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid",
            "QLinearSoftmax", "QuantizeLinear", "QuickGelu", "RotaryEmbedding", "SkipGroupNorm",
            "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
        ),
        _nothing,
    ),
}  # fmt: skip
_FORMULAS: Mapping[str, Mapping[str, _Formula | None]] = {"": _ONNX, "ai.onnx": _ONNX, "com.microsoft": _MICROSOFT}
_ORT_STANDARD = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
"""Operators ONNX Runtime keeps in ONNX's own domain without ONNX knowing them at every opset."""


def _formula(node: onnx.NodeProto) -> _Formula | None:
    """Return how to count for a node; None where nobody knows."""
    known = _FORMULAS.get(node.domain, {})
    if node.op_type in known:
        return known[node.op_type]
    if known is _ONNX and (node.op_type in _ORT_STANDARD or onnx.defs.has(node.op_type)):
        return _nothing
    return None
