"""Sums nodes, parameters, bytes and operations by module.

Nodes count for the module they belong to. A weight is charged once: to the module of the node that reads it, or where
several read it, to the deepest module that contains all of them. Nodes and weights of no module are summed apart, so
that the sums add up to the whole file.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from winml.modelkit.hierarchy import address
from winml.modelkit.inspect.onnx_tree import Contents, OnnxModule, OnnxTree, PlacedNode, Weight
from winml.modelkit.records import Record, entry, recorded

# --- Counts the multiply-accumulate operations of a node.
#
# Counts matrix products, convolutions and recurrent cells from static shapes, as is customary; additions, activations,
# normalizations and data movement count as zero. Where a dimension or the operator is unknown, the result is unknown,
# never zero. Runs nothing.
#
# Formulas follow from the definitions of the operators (https://onnx.ai/onnx/operators and
# https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md): one operation for each product that is
# accumulated.


Shape = tuple[int | str | None, ...]
"""Sizes; a name or None where a dimension is not static."""
ShapeTable = Mapping[str, Shape]
"""Shape of each value by its name; a value that is absent has an unknown rank."""


class _UnknownError(Exception):
    """A shape that the count needs is not static."""


def count_macs(node: onnx.NodeProto, shapes: ShapeTable) -> int | None:
    """Return the multiply-accumulate operations of one run of a node; None where they are unknown.

    Args:
        node: The node.
        shapes: Known shapes of its inputs and outputs.
    """
    formula = _formula_for(node)
    if formula is None:
        return None
    try:
        return formula(_Operands(node, shapes))
    except _UnknownError:
        return None


def is_counted(node: onnx.NodeProto) -> bool:
    """Say whether a node may take multiply-accumulate operations; False where the count is zero for all shapes."""
    return _formula_for(node) is not _no_macs


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
        return next((int(item.i) for item in self._node.attribute if item.name == name), default)

    def numbers(self, name: str) -> list[int]:
        return next((list(item.ints) for item in self._node.attribute if item.name == name), [])

    def text(self, name: str) -> str:
        return next((item.s.decode(errors="replace") for item in self._node.attribute if item.name == name), "")

    @property
    def input_count(self) -> int:
        return len(self._node.input)

    def _static_shape(self, names: Sequence[str], index: int) -> tuple[int, ...]:
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


def _matrix_product_formula(left: int = 0, right: int = 1) -> _Formula:
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
        return _broadcast_size(a[:-2], b[:-2]) * rows * columns * inner

    return formula


def _broadcast_size(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    return math.prod(second_size if first_size == 1 else first_size for first_size, second_size in pairs)


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


def _recurrence_macs(operands: _Operands) -> int:
    """Every time step multiplies with all of W and R; X starts with the dimensions steps and batch, in either order."""
    steps_and_batch = math.prod(operands.input(0)[:2])
    return steps_and_batch * (math.prod(operands.input(1)) + math.prod(operands.input(2)))


def _einsum_macs(operands: _Operands) -> int:
    """One product for every combination of all indices; unknown for more than two operands, whose order is open."""
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
    """Scores and their product with the values: batch × query length × key length × (query width + output width)."""
    query, key, output = operands.input(0), operands.input(1), operands.output()
    past = operands.input(4)[-2] if operands.has_input(4) else 0
    if len(query) not in (3, 4) or len(key) != len(query) or len(output) != len(query):
        raise _UnknownError
    widths = query[-1] + output[-1]
    return math.prod(query[:-1]) * (key[-2] + past) * widths


def _multi_head_attention_macs(operands: _Operands) -> int:
    """com.microsoft: as :func:`_attention_macs`, heads packed into the last dimension; unknown with a past."""
    query, key, output = operands.input(0), operands.input(1), operands.output()
    if operands.has_input(6) or not len(query) == len(key) == len(output) == 3:
        raise _UnknownError
    return query[0] * query[1] * key[1] * (query[2] + output[2])


def _projected_attention_macs(operands: _Operands) -> int:
    """com.microsoft: the projection of the input to queries, keys and values, and :func:`_attention_macs` on these."""
    (batch, length, features), weight = _require_rank_3(operands.input(0)), operands.input(1)
    if operands.has_input(4) or len(weight) != 2:
        raise _UnknownError
    sizes = operands.numbers("qkv_hidden_sizes") or [weight[1] // 3] * 3
    if len(sizes) != 3:
        raise _UnknownError
    return batch * length * (features * weight[1] + length * (sizes[0] + sizes[2]))


def _quantized_attention_macs(operands: _Operands) -> int:
    """com.microsoft: as :func:`_projected_attention_macs`, with scales and zero points among the inputs."""
    (batch, length, features), weight = _require_rank_3(operands.input(0)), operands.input(1)
    if operands.has_input(8) or len(weight) != 2:
        raise _UnknownError
    width = weight[1] // 3
    return batch * length * (features * weight[1] + length * 2 * width)


def _require_rank_3(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise _UnknownError
    return shape[0], shape[1], shape[2]


_ONNX: Mapping[str, _Formula | None] = {
    "MatMul": _matrix_product_formula(),
    "MatMulInteger": _matrix_product_formula(),
    "QLinearMatMul": _matrix_product_formula(0, 3),
    "Gemm": _matrix_product_formula(),
    "Conv": _convolution_formula(),
    "ConvInteger": _convolution_formula(),
    "QLinearConv": _convolution_formula(3),
    "DeformConv": _convolution_formula(),
    "ConvTranspose": _transposed_convolution_macs,
    "LSTM": _recurrence_macs,
    "GRU": _recurrence_macs,
    "RNN": _recurrence_macs,
    "Einsum": _einsum_macs,
    "Attention": _attention_macs,
    # These multiply, but no formula is implemented.
    "CausalConvWithState": None,
    "DFT": None,
    "LinearAttention": None,
    "STFT": None,
}
_MICROSOFT: Mapping[str, _Formula | None] = {
    "Attention": _projected_attention_macs,
    "DynamicQuantizeLSTM": _recurrence_macs,
    "DynamicQuantizeMatMul": _matrix_product_formula(),
    "FusedConv": _convolution_formula(),
    "FusedGemm": _matrix_product_formula(),
    "FusedMatMul": _matrix_product_formula(),
    "FusedMatMulActivation": _matrix_product_formula(),
    "MatMulBnb4": _packed_matrix_product_macs,
    "MatMulInteger16": _matrix_product_formula(),
    "MatMulIntegerToFloat": _matrix_product_formula(),
    "MatMulNBits": _packed_matrix_product_macs,
    "MultiHeadAttention": _multi_head_attention_macs,
    "QAttention": _quantized_attention_macs,
    "QGemm": _matrix_product_formula(0, 3),
    "QLinearConv": _convolution_formula(3),
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
_FORMULAS: Mapping[str, Mapping[str, _Formula | None]] = {"": _ONNX, "ai.onnx": _ONNX, "com.microsoft": _MICROSOFT}
_ORT_STANDARD = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
"""Operators ONNX Runtime keeps in ONNX's own domain without ONNX knowing them at every opset."""


def _formula_for(node: onnx.NodeProto) -> _Formula | None:
    """Return the formula of a node's operator; None where it is unknown."""
    formulas = _FORMULAS.get(node.domain, {})
    if node.op_type in formulas:
        return formulas[node.op_type]
    if formulas is _ONNX and (node.op_type in _ORT_STANDARD or onnx.defs.has(node.op_type)):
        return _no_macs
    return None


@dataclass(frozen=True)
class Cost(Record):
    """Nodes, parameters, bytes and operations of a part of the graph; can be added."""

    nodes: int = 0
    parameters: int = 0
    """Elements of the initializers, shapes and indices included, and of constants that are weights; of quantized
    weights those of the floating-point model, so that scales count 0."""
    size_bytes: int = 0
    macs: int | None = 0
    """Multiply-accumulate operations of one run; None where those of any node are unknown."""
    weight_parameters: int = field(default=0, metadata=entry(skip=True))
    """Parameters without shapes, indices and masks."""
    weight_bytes: int = field(default=0, metadata=entry(skip=True))
    """Size of these, the scales of quantized weights included."""

    @property
    def bits(self) -> float | None:
        """Bits a parameter takes, its share of scales and zero points included; None where there are no weights."""
        return 8 * self.weight_bytes / self.weight_parameters if self.weight_parameters else None

    def __add__(self, added: Cost) -> Cost:
        return Cost(
            self.nodes + added.nodes,
            self.parameters + added.parameters,
            self.size_bytes + added.size_bytes,
            None if self.macs is None or added.macs is None else self.macs + added.macs,
            self.weight_parameters + added.weight_parameters,
            self.weight_bytes + added.weight_bytes,
        )


@dataclass(frozen=True)
class ModuleCost(Record):
    """The cost of one module."""

    path: str
    tag: str
    class_name: str = field(metadata=entry("class", null_if_empty=True))
    own: Cost
    """Without the modules below it."""
    total: Cost
    """With all modules below it."""

    @property
    @recorded(entry(before="own"))
    def bits(self) -> float | None:
        """Bits a parameter takes; None where there are no weights."""
        return self.total.bits


def count_node_macs(contents: Contents, shapes: ShapeTable) -> list[int | None]:
    """Return the operations of each node in one run of the model; None where they are unknown.

    Nodes in subgraphs and functions, and calls of functions, are unknown unless they are zero: the file does not tell
    how often they run.

    Args:
        contents: The nodes.
        shapes: Shapes of the values of the main graph.
    """
    functions = _counted_functions(contents)
    macs: list[int | None] = []
    for node in contents.nodes:
        if node.callee in functions:
            macs.append(None if functions[node.callee] else 0)
        elif node.place == "graph":
            macs.append(count_macs(node.proto, shapes))
        else:
            macs.append(None if is_counted(node.proto) else 0)
    return macs


def _counted_functions(contents: Contents) -> dict[tuple[str, str], bool]:
    """Return for each function whether its body, or a function it calls, may take operations."""
    bodies: dict[tuple[str, str], list[PlacedNode]] = defaultdict(list)
    for node in contents.nodes:
        if node.function is not None:
            bodies[node.function].append(node)
    has_macs = {
        function: any(is_counted(node.proto) for node in body if node.callee not in bodies)
        for function, body in bodies.items()
    }
    for _ in bodies:
        # As many rounds as functions: enough to propagate to every caller.
        for function, body in bodies.items():
            has_macs[function] = has_macs[function] or any(has_macs.get(node.callee, False) for node in body)
    return has_macs


def charge_modules(tree: OnnxTree, contents: Contents, macs: Sequence[int | None]) -> tuple[list[ModuleCost], Cost]:
    """Charge nodes and weights to modules.

    Args:
        tree: The modules, and the tag of each node of ``contents``.
        contents: Nodes and weights.
        macs: Operations of each node.

    Returns:
        The modules in the order of the tree, and the cost of no module: untagged nodes, and weights that only such
        nodes or no nodes read.
    """
    own_costs: dict[str, Cost] = defaultdict(Cost)
    for tag, node_macs in zip(tree.tags, macs, strict=True):
        own_costs[tag] += Cost(nodes=1, macs=node_macs)
    for weight, owner in zip(contents.weights, weight_owners(tree, contents), strict=True):
        own_costs[owner] += _weight_cost(weight)
    totals = _total_costs(tree.modules, own_costs)
    modules = [
        ModuleCost(module.path, module.tag, module.class_name, own_costs[module.tag], totals[module.tag])
        for module in tree.modules
    ]
    return modules, own_costs[""]


def weights_cost(contents: Contents) -> Cost:
    """Return the cost of all weights of a graph together, as the modules and what is in none add up to it."""
    return sum(map(_weight_cost, contents.weights), Cost())


def _weight_cost(weight: Weight) -> Cost:
    size_bytes = weight.size_bytes or 0
    if not weight.has_parameters:
        return Cost(parameters=weight.parameters, size_bytes=size_bytes)
    return Cost(
        parameters=weight.parameters,
        size_bytes=size_bytes,
        weight_parameters=weight.parameters,
        weight_bytes=size_bytes,
    )


def weight_owners(tree: OnnxTree, contents: Contents) -> list[str]:
    """Return the tag of the module each weight is charged to; ``""`` for none."""
    readers: list[set[str]] = [set() for _ in contents.weights]
    for node, tag in zip(contents.nodes, tree.tags, strict=True):
        for index in node.weights:
            if tag:
                readers[index].add(tag)
    for node, tag in zip(contents.nodes, tree.tags, strict=True):
        # What leaves a subgraph right away has no reader there; the constant itself says where it belongs.
        if node.held_weight is not None and tag and not readers[node.held_weight]:
            readers[node.held_weight].add(tag)
    return [address.common_ancestor(tags) for tags in readers]


def _total_costs(modules: Sequence[OnnxModule], own_costs: Mapping[str, Cost]) -> dict[str, Cost]:
    totals: dict[str, Cost] = defaultdict(Cost)
    for module in modules:
        segments = address.parse_tag(module.tag)
        for depth in range(1, len(segments) + 1):
            totals[address.format_tag(segments[:depth])] += own_costs[module.tag]
    return totals
