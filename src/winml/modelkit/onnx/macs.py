"""Number of multiply-accumulate operations of a node.

Counts matrix products, convolutions and recurrent cells from static shapes, as is customary; additions, activations,
normalizations and data movement count as zero. If a dimension or the operator is unknown, the result is unknown, never
zero. Does not run the graph.

Formulas follow from the definitions of the operators (https://onnx.ai/onnx/operators and
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md): one operation per accumulated product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import onnx

from winml.modelkit.onnx.contents import ShapeTable


class _UnknownError(Exception):
    """A shape needed for the count is not static."""


def count_macs(node: onnx.NodeProto, shapes: ShapeTable) -> int | None:
    """Return the number of multiply-accumulate operations in a run of a node; `None` if unknown.

    Args:
        node: The node.
        shapes: Known shapes of its inputs and outputs.
    """
    formula = _find_formula(node)
    try:
        return None if formula is None else formula(_Operands(node, shapes))
    except _UnknownError:
        return None


def is_counted(node: onnx.NodeProto) -> bool:
    """Return True if a node may take multiply-accumulate operations; False where the count is zero for all shapes."""
    return _find_formula(node) is not _no_macs


class _Operands:
    """The operands of a formula: static shapes of inputs and outputs, and attributes."""

    def __init__(self, node: onnx.NodeProto, shapes: ShapeTable) -> None:
        self._node = node
        self._shapes = shapes

    def input(self, index: int) -> tuple[int, ...]:
        """Return the shape of an input.

        Raises:
            _UnknownError: it is absent or not static.
        """
        return self._static_shape(self._node.input, index)

    def output(self, index: int = 0) -> tuple[int, ...]:
        return self._static_shape(self._node.output, index)

    def has_input(self, index: int) -> bool:
        return len(self._node.input) > index and bool(self._node.input[index])

    def number(self, name: str, default: int = 0) -> int:
        """Return an integer attribute."""
        return next((int(attribute.i) for attribute in self._node.attribute if attribute.name == name), default)

    def numbers(self, name: str) -> list[int]:
        """Return an attribute with integers; ``[]`` if absent."""
        return next((list(attribute.ints) for attribute in self._node.attribute if attribute.name == name), [])

    def text(self, name: str) -> str:
        """Return a text attribute; ``""`` if absent."""
        return next(
            (attribute.s.decode(errors="replace") for attribute in self._node.attribute if attribute.name == name), ""
        )

    @property
    def input_count(self) -> int:
        return len(self._node.input)

    def _static_shape(self, names: Sequence[str], index: int) -> tuple[int, ...]:
        """Return the shape of a value.

        Raises:
            _UnknownError: the value is absent, or its shape is not static.
        """
        shape = self._shapes.get(names[index]) if len(names) > index else None
        if shape is None:
            raise _UnknownError
        sizes = tuple(size for size in shape if isinstance(size, int) and size >= 0)
        if len(sizes) != len(shape):
            raise _UnknownError
        return sizes


_Formula = Callable[[_Operands], int]


def _no_macs(_: _Operands) -> int:
    return 0


def _matrix_product_formula(left_input: int = 0, right_input: int = 1) -> _Formula:
    """Batches × M × N × K, from the operands: a vector is a matrix of one row or column, batches broadcast."""

    def formula(operands: _Operands) -> int:
        a, b = operands.input(left_input), operands.input(right_input)
        if not a or not b:
            raise _UnknownError
        rows, inner = (a[-2], a[-1]) if len(a) > 1 else (1, a[0])
        columns = b[-1] if len(b) > 1 else 1
        if operands.number("transA") and len(a) > 1:
            rows, inner = inner, rows
        if operands.number("transB") and len(b) > 1:
            columns = b[-2]
        batch_sizes = zip_longest(reversed(a[:-2]), reversed(b[:-2]), fillvalue=1)
        batches = math.prod(right_size if left_size == 1 else left_size for left_size, right_size in batch_sizes)
        return batches * rows * columns * inner

    return formula


def _convolution_formula(weight: int = 1) -> _Formula:
    """Every output value accumulates one window: output × (channels in / group) × kernel, which are the weight's
    dimensions after the first.
    """
    return lambda operands: math.prod(operands.output()) * math.prod(operands.input(weight)[1:])


def _transposed_convolution_macs(operands: _Operands) -> int:
    """Every input value is spread over one window: input × (channels out / group) × kernel."""
    return math.prod(operands.input(0)) * math.prod(operands.input(1)[1:])


def _packed_matrix_product_macs(operands: _Operands) -> int:
    """Weights packed in blocks of few bits: N (an attribute) columns for each input value."""
    return math.prod(operands.input(0)) * operands.number("N")


def _experts_formula(gate_and_up: int, third: int) -> _Formula:
    """com.microsoft: every token multiplies with the weights of the ``k`` experts that it is routed to.

    Args:
        gate_and_up: Position of the first weight among the inputs, experts × rows × packed inputs.
        third: Position of the optional third weight; with it, the operations are unknown.
    """

    def formula(operands: _Operands) -> int:
        *tokens, width = operands.input(0)
        if operands.has_input(third):
            raise _UnknownError
        rows = operands.input(gate_and_up)[1]
        inner = rows // 2 if operands.number("swiglu_fusion") else rows
        return math.prod(tokens) * operands.number("k", 1) * width * (rows + inner)

    return formula


def _recurrence_macs(operands: _Operands) -> int:
    """Every time step multiplies with all of W and R; X starts with the dimensions steps and batch, in either order."""
    steps_and_batch = math.prod(operands.input(0)[:2])
    return steps_and_batch * (math.prod(operands.input(1)) + math.prod(operands.input(2)))


def _einsum_macs(operands: _Operands) -> int:
    """One product per combination of all indices; unknown for three or more operands, whose order is undefined.

    Raises:
        _UnknownError: there are three or more operands, or a shape is not static.
    """
    terms = operands.text("equation").replace(" ", "").partition("->")[0].split(",")
    if len(terms) > 2 or len(terms) != operands.input_count or any("." in term for term in terms):
        raise _UnknownError
    if len(terms) == 1:
        return 0
    sizes: dict[str, int] = {}
    for index, term in enumerate(terms):
        shape = operands.input(index)
        if len(shape) != len(term):
            raise _UnknownError
        for letter, size in zip(term, shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    return math.prod(sizes.values())


def _attention_macs(operands: _Operands) -> int:
    """Scores and their product with the values: batch × query length × key length × (query width + output width).

    Raises:
        _UnknownError: the ranks differ, or a shape is unknown.
    """
    query, key, output = operands.input(0), operands.input(1), operands.output()
    past = operands.input(4)[-2] if operands.has_input(4) else 0
    if len(query) not in (3, 4) or len(key) != len(query) or len(output) != len(query):
        raise _UnknownError
    widths = query[-1] + output[-1]
    return math.prod(query[:-1]) * (key[-2] + past) * widths


def _multi_head_attention_macs(operands: _Operands) -> int:
    """com.microsoft: as :func:`_attention_macs`, heads packed into the last dimension; unknown with a past.

    Raises:
        _UnknownError: there is a past, packed inputs, or a shape is not static.
    """
    query, key, output = operands.input(0), operands.input(1), operands.output()
    if operands.has_input(6) or not len(query) == len(key) == len(output) == 3:
        raise _UnknownError
    return query[0] * query[1] * key[1] * (query[2] + output[2])


def _projected_attention_formula(past: int) -> _Formula:
    """com.microsoft: projection of the input to queries, keys and values, and :func:`_attention_macs` of these.

    Args:
        past: Position of the cached keys and values among the inputs; with cached inputs the operations are unknown.
    """

    def formula(operands: _Operands) -> int:
        shape, weight = operands.input(0), operands.input(1)
        if operands.has_input(past) or len(shape) != 3 or len(weight) != 2:
            raise _UnknownError
        batch, length, features = shape
        sizes = operands.numbers("qkv_hidden_sizes") or [weight[1] // 3] * 3
        if len(sizes) != 3:
            raise _UnknownError
        return batch * length * (features * weight[1] + length * (sizes[0] + sizes[2]))

    return formula


_ONNX: Mapping[str, _Formula | None] = {
    **dict.fromkeys(("MatMul", "MatMulInteger", "Gemm"), _matrix_product_formula()),
    "QLinearMatMul": _matrix_product_formula(0, 3),
    **dict.fromkeys(("Conv", "ConvInteger", "DeformConv"), _convolution_formula()),
    "QLinearConv": _convolution_formula(3),
    "ConvTranspose": _transposed_convolution_macs,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrence_macs),
    "Einsum": _einsum_macs,
    "Attention": _attention_macs,
    # These multiply, but no formula is implemented.
    **dict.fromkeys(("CausalConvWithState", "DFT", "LinearAttention", "STFT")),
}
_MICROSOFT: Mapping[str, _Formula | None] = {
    **dict.fromkeys(
        (
            "DynamicQuantizeMatMul", "FusedGemm", "FusedMatMul", "FusedMatMulActivation", "MatMulInteger16",
            "MatMulIntegerToFloat",
        ),
        _matrix_product_formula(),
    ),
    "Attention": _projected_attention_formula(past=4),
    "DynamicQuantizeLSTM": _recurrence_macs,
    "FusedConv": _convolution_formula(),
    "MatMulBnb4": _packed_matrix_product_macs,
    "MatMulNBits": _packed_matrix_product_macs,
    "MoE": _experts_formula(gate_and_up=2, third=6),
    "MultiHeadAttention": _multi_head_attention_macs,
    "QAttention": _projected_attention_formula(past=8),
    "QGemm": _matrix_product_formula(0, 3),
    "QLinearConv": _convolution_formula(3),
    "QMoE": _experts_formula(gate_and_up=2, third=8),
    **dict.fromkeys(
        (
            "BiasAdd", "BiasDropout", "BiasGelu", "BiasSoftmax", "BiasSplitGelu", "DequantizeLinear",
            "EmbedLayerNormalization", "FastGelu", "GatherBlockQuantized", "Gelu", "GroupNorm", "NhwcMaxPool",
            "QEmbedLayerNormalization", "QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearGlobalAveragePool",
            "QLinearLeakyRelu", "QLinearMul", "QLinearReduceMean", "QLinearSigmoid", "QLinearSoftmax", "QuantizeLinear",
            "QuickGelu", "RotaryEmbedding", "SkipGroupNorm", "SkipLayerNormalization",
            "SkipSimplifiedLayerNormalization",
        ),
        _no_macs,
    ),
}  # fmt: skip
_FORMULAS: Mapping[str, Mapping[str, _Formula | None]] = {"": _ONNX, "com.microsoft": _MICROSOFT}
_ORT_STANDARD = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
"""Operators of ONNX Runtime in ONNX's domain that ONNX does not define at every opset."""


def _find_formula(node: onnx.NodeProto) -> _Formula | None:
    """Return the formula of a node's operator; `None` if unknown."""
    formulas = _FORMULAS.get(node.domain, {})
    if node.op_type in formulas:
        return formulas[node.op_type]
    if formulas is _ONNX and (node.op_type in _ORT_STANDARD or onnx.defs.has(node.op_type)):
        return _no_macs
    return None
