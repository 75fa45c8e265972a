"""Engine for block-quantized weights of 2, 4 or 8 bits with float activations.

Works on the graph alone: each weight is read and quantized when the result is written. Before / After::

    x, weight[K,N] → MatMul                 x, values, scales, zero points → MatMulNBits
    x, weight, bias → Gemm                  the same with the bias
    table[V,K], indices → Gather            values, indices, scales, zero points → GatherBlockQuantized
    the same, 8 bits by row                 Gather (integers) → Cast → Mul; Gather (scales) → Mul
    table → Transpose → MatMul (tied)       the values of the table, for both
    x, scores, weights of experts → MoE     x, scores, values, scales, zero points → QMoE

With standard operators, products read a DequantizeLinear of the same values, and tables are quantized by row.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.onnx.coded_weights import unpack_codes
from winml.modelkit.onnx.files.writing import ReshapedTensor
from winml.modelkit.onnx.fresh_names import FreshNames, cast_node
from winml.modelkit.onnx.weights import add_initializer, computed_tensor, drop_unused_initializers
from winml.modelkit.ort.format_keys import block_product_key
from winml.modelkit.quantize.declared_options import DATA_ALGORITHMS, INTEGER_ALGORITHMS, Algorithm
from winml.modelkit.quantize.engines import block_quantizers
from winml.modelkit.quantize.engines.integer_weights import (
    IntegerRange,
    WeightUse,
    measure_scales,
    quantized_tensor,
)
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.planning import EngineTask, WeightKey, constant_weight
from winml.modelkit.quantize.precisions import INT8, PRODUCT_AND_SUM
from winml.modelkit.words import count_noun

_QUANTIZING_THREADS = min(4, os.cpu_count() or 1)
"""Chosen: each thread holds a slab, and more threads do not outrun a single writer."""
_HELD_WEIGHTS = 2
"""Chosen: while the last part of a weight is written, the next weight is quantized."""

_PACKED, _PACKED_SCALES, _PACKED_ZERO_POINTS = "packed", "scales", "zero_points"
"""Fields of :class:`Blocks`."""


class PackingDesk:
    """Cache of the most recently quantized weights; each part is dropped after its first read.

    Several threads may write weights; one weight is quantized at a time, by all threads.
    """

    def __init__(self) -> None:
        """Start with an empty cache."""
        self._held: dict[PackedWeight, dict[str, Array]] = {}
        self._lock = threading.Lock()

    def take(self, weight: PackedWeight, part: str) -> Array:
        """Return a part of a weight; quantize the weight unless the part is cached."""
        with self._lock:
            if part not in self._held.get(weight, {}):
                self._held.pop(weight, None)
                while len(self._held) >= _HELD_WEIGHTS:
                    del self._held[next(iter(self._held))]
                self._held[weight] = weight.compute()
            values = self._held[weight].pop(part)
            if not self._held[weight]:
                del self._held[weight]
            return values


class PackedWeight:
    """A weight matrix in blocks of few bits, as tensors that are computed when read.

    Packed values, scales and zero points come from one computation. They are adjacent in the list of initializers and
    written in this order, so that few weights are in memory.
    """

    def __init__(
        self,
        matrix: block_quantizers.WeightMatrix,
        fmt: block_quantizers.BlockFormat,
        use: WeightUse,
        desk: PackingDesk,
        *,
        is_table_only: bool = False,
        experts: int | None = None,
        is_standard: bool = False,
        solved: block_quantizers.SolvedWeight | None = None,
    ) -> None:
        """Store the matrix reference; nothing is read.

        Args:
            matrix: The weight.
            fmt: Format of the blocks.
            use: Weight and reading node, for messages.
            desk: Cache of recently quantized weights.
            is_table_only: True if only row lookups read the weight. Its packed values then have two axes, as
                ``GatherBlockQuantized`` requires, instead of the three of ``MatMulNBits``.
            experts: Number of matrices below each other in the weight, which become the first axis of all parts.
            is_standard: True for the parts of a ``DequantizeLinear``: depth × width, integers of few bits.
            solved: Blocks solved with calibration data, if any.
        """
        self.solved = solved
        self.is_table_only, self._experts, self._is_standard = is_table_only, experts, is_standard
        self.matrix, self.block_format, self._use, self._desk = matrix, fmt, use, desk
        self._scale_dtype = matrix.tensor.dtype

    def compute(self) -> dict[str, Array]:
        """Quantize the weight: part name → array.

        Raises:
            QuantizeError: a value of the weight is NaN or infinite.
        """
        if self.solved is not None:
            return self._cast_parts(self.solved.read())
        by_depth = self.matrix.is_read_by_depth
        slabs = self.matrix.slabs(self.block_format.block_size * self.block_format.values_per_byte if by_depth else 1)
        if len(slabs) == 1:
            return self._cast_parts(self._quantize_slab(slabs[0])[1])
        parts: dict[str, Array] = {}
        # Algorithms that search for scales warn and log, which is not thread-safe.
        with ThreadPoolExecutor(_QUANTIZING_THREADS if self.block_format.algorithm == "rtn" else 1) as threads:
            for start, blocks in threads.map(self._quantize_slab, slabs):
                for name, values in blocks._asdict().items():
                    if values is None:
                        continue
                    if name not in parts:
                        parts[name] = np.empty(self._part_shapes[name], values.dtype)
                    step = parts[name].shape[1] / self._block_grid[1] if name == _PACKED_ZERO_POINTS else 1
                    begin = round(start // self.block_format.block_size * step) if by_depth else start
                    span = np.s_[:, begin : begin + values.shape[1]] if by_depth else np.s_[begin : begin + len(values)]
                    parts[name][span] = values
        return self._cast_parts(block_quantizers.Blocks(**parts))

    def _quantize_slab(self, read_slab: Callable[[], block_quantizers.Slab]) -> tuple[int, block_quantizers.Blocks]:
        """Read and quantize a slab; return its start and its blocks.

        Raises:
            QuantizeError: a value is NaN or infinite.
        """
        slab = read_slab()
        self._use.refuse_non_finite(slab.values)
        return slab.start, block_quantizers.quantize_blocks(slab.values, self.block_format)

    def tensors(self) -> tuple[ir.TensorProtocol, ...]:
        """Packed values, scales and, if the format has them, zero points; named after the weight."""
        dtypes = {_PACKED: ir.DataType.UINT8, _PACKED_SCALES: self._scale_dtype, _PACKED_ZERO_POINTS: ir.DataType.UINT8}
        if self.block_format.has_float_zero_points:
            dtypes[_PACKED_ZERO_POINTS] = self._scale_dtype
        names = {_PACKED: f"{self._use.weight}_Q{self.block_format.bits}", _PACKED_SCALES: f"{self._use.weight}_scales",
                 _PACKED_ZERO_POINTS: f"{self._use.weight}_zero_points"}  # fmt: skip
        if self._is_standard:
            sign = "UINT" if self.block_format.has_zero_points else "INT"
            dtypes[_PACKED] = dtypes[_PACKED_ZERO_POINTS] = ir.DataType[f"{sign}{self.block_format.bits}"]
            return tuple(self._make_standard_tensor(part, dtypes[part], names[part]) for part in self._part_shapes)
        return tuple(self._make_part_tensor(part, dtypes[part], names[part]) for part in self._part_shapes)

    def _make_standard_tensor(self, part: str, dtype: ir.DataType, name: str) -> ir.LazyTensor:
        """Create the lazy tensor of a part of a ``DequantizeLinear`` with blocks along the first axis."""
        width, bits = self.matrix.width, self.block_format.bits
        rows = self.matrix.depth if part == _PACKED else self._block_grid[1]

        def read() -> Array:
            values = self._desk.take(self, part).reshape(width, -1)
            if part == _PACKED_SCALES:
                return values.T
            codes = unpack_codes(values, bits, rows)
            if not self.block_format.has_zero_points:
                codes = codes.astype(np.int8) - np.int8(2 ** (bits - 1)) if bits < 8 else (codes ^ 128).view(np.int8)
            return codes.T.astype(dtype.numpy())

        return computed_tensor(read, dtype, (rows, width), name)

    @property
    def _block_grid(self) -> tuple[int, int]:
        """(rows of the packed matrix, blocks per row)."""
        return self.matrix.width, self.block_format.block_count(self.matrix.depth)

    @property
    def _part_shapes(self) -> dict[str, tuple[int, ...]]:
        """Packed part → shape."""
        width, count = self._block_grid
        shapes: dict[str, tuple[int, ...]] = {
            _PACKED: (width, count, self.block_format.block_size // self.block_format.values_per_byte),
            _PACKED_SCALES: (width, count),
        }
        if self.block_format.has_zero_points:
            per_byte = 1 if self.block_format.has_float_zero_points else self.block_format.values_per_byte
            shapes[_PACKED_ZERO_POINTS] = (width, math.ceil(count / per_byte))
        return shapes

    def _cast_parts(self, blocks: block_quantizers.Blocks) -> dict[str, Array]:
        """Part name → array, floats cast to the type of the weight."""
        scale_type = self._scale_dtype.numpy()
        return {
            name: values if values.dtype == np.uint8 else values.astype(scale_type, copy=False)
            for name, values in blocks._asdict().items()
            if values is not None
        }

    def _make_part_tensor(self, part: str, dtype: ir.DataType, name: str) -> ir.LazyTensor:
        """Create the lazy tensor of a packed part."""
        computed = self._part_shapes[part]
        shape = (computed[0], math.prod(computed[1:])) if self.is_table_only else computed
        if self._experts is not None:
            shape = (self._experts, computed[0] // self._experts, math.prod(computed[1:]))

        def read() -> Array:
            values = self._desk.take(self, part)
            assert values.shape == computed
            return values.reshape(shape)

        return computed_tensor(read, dtype, shape, name)


DOMAIN = "com.microsoft"
COMPUTE_IN_INT8 = 4
"""Specified: ``accuracy_level`` of ``MatMulNBits`` at which activations are rounded to 8 bits, block by block.
Measured with ONNX Runtime 1.31 (VNNI, one thread, one row): 4.8 instead of 2.2 times as fast as float32 in 4 bits, 1.9
instead of 0.04 in 8; 0.1 dB less in 4 bits."""
_BLOCK_SIZES = {2: 32, 4: 32, 8: 64}
"""Bits → default block size. Measured on MiniLM with real sentences: in 4 bits, 16 costs a fifth of the size for 2.6 dB
more, and 64 is smaller by less than a tenth; in 8 bits, 128 loses 4 dB compared with 32, which is 11 % larger."""
LEAST_BLOCK_SIZE = 16
"""Specified: minimum of ``MatMulNBits`` and ``GatherBlockQuantized``."""
_BLOCK_OPERATORS = ("MatMulNBits", "GatherBlockQuantized")
_SCALES, _ZERO_POINTS = 2, 3
"""Specified: input positions of both operators."""
EXPERTS_OPERATOR = "MoE"
_SCALE_PART = 1
"""Position of the scales among the parts of a weight."""
_EXPERT_WEIGHTS = (2, 4)
"""Specified: input positions of the weights of ``MoE``; the bias of each follows."""
_EXPERT_BITS = (4, 8)
"""Bits of ``QMoE`` on the CPU. Measured with ONNX Runtime 1.32: in 2 bits, it expects other shapes than documented."""


def quantize_weights(model: ir.Model, task: EngineTask) -> ir.Model:
    """Return a copy of the model with block-quantized weights of the selected nodes."""
    return quantize_by(Packing, model, task)


def quantize_by(packing_class: type[Packing], model: ir.Model, task: EngineTask) -> ir.Model:
    """Return a copy of the model whose selected nodes are replaced by a packing."""
    quantized = model.clone()
    packing = packing_class(quantized.graph, task)
    for node in list(quantized.graph.all_nodes()):
        if node.name in task.nodes:
            packing.replace_reader(node)
    packing.remove_unused()
    quantized.opset_imports.setdefault(DOMAIN, 1)
    return quantized


def algorithm_notes(quantized: ir.Model, options: QuantizeOptions) -> Iterator[str]:
    """Note the weights whose scales come from another algorithm than requested, with the reason.

    Algorithms with calibration data: note the selected algorithms.
    """
    if options.algorithm in DATA_ALGORITHMS:
        yield from _solved_notes(quantized, options)
    if options.algorithm != "hqq":
        return
    searched: dict[ir.Value | None, bool] = {}
    for node in quantized.graph:
        if node.domain == DOMAIN and node.op_type in _BLOCK_OPERATORS:
            zero_points = node.inputs[_ZERO_POINTS] if len(node.inputs) > _ZERO_POINTS else None
            searched[node.inputs[_SCALES]] = zero_points is not None and zero_points.dtype != ir.DataType.UINT8
    if rounded := sum(not is_searched for is_searched in searched.values()):
        yield (
            f"{rounded} of {len(searched)} weights were rounded to nearest (rtn) instead of hqq: ONNX Runtime has "
            "kernels for fractional zero points in 4 bits only, and not for embedding lookups."
        )


def _solved_notes(quantized: ir.Model, options: QuantizeOptions) -> Iterator[str]:
    """Note the selected algorithms, and the number of tables rounded to nearest."""
    products = (node for node in quantized.graph if node.domain == DOMAIN and node.op_type == "MatMulNBits")
    records = (json.loads(node.metadata_props.get(QUANTIZATION_KEY, "{}")) for node in products)
    counts = Counter(record["algorithm"] for record in records if "algorithm" in record)
    tables = sum(node.domain == DOMAIN and node.op_type == "GatherBlockQuantized" for node in quantized.graph)
    if counts and set(counts) != {options.algorithm}:
        algorithm_counts = ", ".join(f"{name} {count}" for name, count in counts.most_common())
        yield f"MatMuls by quantization algorithm: {algorithm_counts}."
    if tables:
        table_count = count_noun(tables, "table", "were")
        yield f"{table_count} rounded to nearest (rtn), since rows are looked up, not multiplied."


@dataclass(frozen=True)
class Operand:
    """Weight of a node, and its orientation."""

    value: ir.Value
    """The initializer."""
    is_transposed: bool
    """True if the shape is width × depth."""

    @property
    def key(self) -> WeightKey:
        """Name and orientation of the weight."""
        return WeightKey(self.value.name or "", self.is_transposed)


class _PackedParts(NamedTuple):
    """A block-quantized weight and its initializers."""

    weight: PackedWeight
    parts: tuple[ir.Value, ...]
    """Packed values, scales and, if present, zero points."""


class Packing:
    """Replace nodes of one graph and its subgraphs by operators with block-quantized weights, in place.

    The weights are initializers of the graph.
    """

    def __init__(self, graph: ir.Graph, task: EngineTask) -> None:
        """Store the graph and the task; nothing is changed yet."""
        self._graph = graph
        self._task = task
        self._desk = PackingDesk()
        self._fresh = FreshNames.of_graph(graph)
        self._packed: dict[WeightKey, _PackedParts] = {}
        """Weight → its block-quantized parts."""
        self._divided: dict[tuple[ir.Value, int], ir.Value] = {}
        """(value, identity of the scale) → the divided value."""
        self._row_tables: dict[str, tuple[ir.Value, ir.Value]] = {}
        """Name of a table → its integers and the scale of each row."""
        self._tables: dict[tuple[str, ir.Graph | ir.Function], ir.Value] = {}
        """(name of the packed values, graph of the lookup) → the same values with two axes, as a Gather requires."""
        self._replaced: list[ir.Value] = []

    def replace_reader(self, node: ir.Node) -> ir.Node | None:
        """Replace a node and return the new node; ``None`` if the node has no block-quantized operator."""
        operand = operand_of(node)
        if node.op_type == EXPERTS_OPERATOR:
            new = self._make_experts(node)
        elif operand is None:
            return None
        else:
            new = self._make_product(node, operand) if node.op_type != "Gather" else self._make_lookup(node, operand)
        if new is None:
            return None
        self._replace_node(node, new)
        return new

    def _replace_node(self, node: ir.Node, new: ir.Node) -> None:
        """Replace a node by a new node with the same module and output name."""
        new.metadata_props.update({**node.metadata_props, **new.metadata_props})
        new.outputs[0].type, new.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        self._replaced += [value for value in node.inputs if value is not None]
        name = node.outputs[0].name
        graph = _graph_of(node)
        graph.insert_before(node, new)
        ir.convenience.replace_all_uses_with(node.outputs[0], new.outputs[0], replace_graph_outputs=True)
        graph.remove(node, safe=True)
        new.outputs[0].name = name

    def _insert_before(self, node: ir.Node, new: ir.Node, name: str, like: ir.Value) -> ir.Value:
        """Insert a new node before a node of the same module; return its output, with type and shape of ``like``."""
        new.metadata_props.update(node.metadata_props)
        output = new.outputs[0]
        output.name, output.type, output.shape = self._fresh.take(name), like.type, like.shape
        _graph_of(node).insert_before(node, new)
        return output

    def remove_unused(self) -> None:
        """Remove weights without readers, their Transpose nodes, and unused blocks."""
        for packed in self._packed.values():
            drop_unused_initializers(self._graph, packed.parts)
        for value in self._replaced:
            maker = value.producer()
            if maker is not None and maker.op_type == "Transpose" and not value.uses() and not value.is_graph_output():
                weight = maker.inputs[0]
                if maker.graph is not None:
                    maker.graph.remove(maker, safe=True)
                value = weight if weight is not None else value
            drop_unused_initializers(self._graph, [value])

    def _make_product(self, node: ir.Node, operand: Operand) -> ir.Node:
        """Create the product with a packed weight."""
        packed = self._packed_weight(node, operand)
        if self._is_standard:
            return self._make_standard_product(node, packed)
        matrix, parts = packed.weight.matrix, packed.parts
        bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
        solved = packed.weight.solved
        scale = None if solved is None else solved.input_scale
        assert node.inputs[0] is not None  # a product has two inputs
        inputs: list[ir.Value | None] = [
            node.inputs[0] if scale is None else self._divide_input(node, node.inputs[0], scale),
            *parts,
        ]
        if bias is not None:
            inputs += [None] * (5 - len(inputs)) + [bias]
        attributes = {
            "K": matrix.depth,
            "N": matrix.width,
            "bits": packed.weight.block_format.bits,
            "block_size": packed.weight.block_format.block_size,
            "accuracy_level": self._accuracy_level(packed.weight),
        }
        product = ir.node("MatMulNBits", inputs, attributes, domain=DOMAIN, name=node.name)
        if solved is not None:
            record = {
                "precision": self._task.precision.name,
                "kind": "operator",
                "block_size": packed.weight.block_format.block_size,
                "algorithm": solved.algorithm,
            }
            product.metadata_props[QUANTIZATION_KEY] = json.dumps(record)
        return self._add_batch(node, product) if self._needs_batch(node) else product

    @property
    def _is_standard(self) -> bool:
        """True if products and lookups are operators of ONNX."""
        return self._task.options.weight_operators == "standard"

    def _make_standard_product(self, node: ir.Node, packed: _PackedParts) -> ir.Node:
        """Create the product with dequantized blocks as its weight."""
        matrix, fmt, solved = packed.weight.matrix, packed.weight.block_format, packed.weight.solved
        data = node.inputs[0]
        assert data is not None  # a product has two inputs
        if solved is not None and solved.input_scale is not None:
            data = self._divide_input(node, data, solved.input_scale)
        dequantize = ir.node(
            "DequantizeLinear",
            packed.parts,
            {"axis": 0, "block_size": fmt.block_size},
            name=self._fresh.take(f"{node.name}/DequantizeLinear"),
        )
        dtype = packed.parts[_SCALE_PART].dtype
        weight = ir.Value(
            type=None if dtype is None else ir.TensorType(dtype), shape=ir.Shape([matrix.depth, matrix.width])
        )
        weight = self._insert_before(node, dequantize, f"{packed.parts[0].name}_dequantized", weight)
        attributes = {name: item for name, item in node.attributes.items() if name != "transB"}
        return ir.node(node.op_type, [data, weight, *node.inputs[2:]], attributes, name=node.name)

    def _make_experts(self, node: ir.Node) -> ir.Node | None:
        """Create the mixture of experts with packed weights.

        ``None`` for bits or sizes without a kernel, and for experts with a third weight.
        """
        bits = self._task.precision.weight_bits
        matrices = [node.inputs[index] for index in _EXPERT_WEIGHTS]
        sizes = [value.const_value.shape.numpy() for value in matrices if value is not None and value.const_value]
        has_third = any(value is not None for value in node.inputs[_EXPERT_WEIGHTS[-1] + 2 :])
        if bits not in _EXPERT_BITS or len(sizes) != len(matrices) or has_third or self._is_standard:
            return None
        depth = math.gcd(*(size[-1] for size in sizes))
        fmt = _make_block_format(self._task, node, depth, is_table=True)
        if depth % fmt.block_size:
            return None
        parts = []
        for value, (experts, rows, columns) in zip(matrices, sizes, strict=True):
            assert value is not None
            rows_of_all = ReshapedTensor(_get_tensor(value), (experts * rows, columns), value.name or "")
            matrix = block_quantizers.WeightMatrix(rows_of_all, is_transposed=True)
            weight = PackedWeight(matrix, fmt, WeightUse.of(value, node), self._desk, experts=experts)
            added = [self._add_tensor(tensor) for tensor in weight.tensors()]
            parts.append((*added, None, None)[:3])
        (up, up_scales, up_zeros), (down, down_scales, down_zeros) = parts
        scores = node.inputs[1]
        up_bias, down_bias = (next(iter(node.inputs[index + 1 : index + 2]), None) for index in _EXPERT_WEIGHTS)
        products = [up, up_scales, up_bias, down, down_scales, down_bias]
        inputs = [node.inputs[0], scores, *products, *[None] * 3, up_zeros, down_zeros]
        attributes = {name: item.value for name, item in node.attributes.items()}
        if not attributes.get("normalize_routing_weights"):
            # The kernel of the CPU provider normalizes the softmax of the selected scores regardless of the attribute.
            assert scores is not None
            softmax = ir.node("Softmax", [scores], {"axis": -1}, name=self._fresh.take(f"{node.name}/Softmax"))
            inputs += [None, self._insert_before(node, softmax, f"{scores.name}_shares", scores)]
        attributes |= {"expert_weight_bits": bits, "block_size": fmt.block_size}
        if self._task.options.ep == "cuda":
            attributes["weights_prepacked"] = 0  # otherwise in the order of one generation of GPUs
        return ir.node(f"Q{EXPERTS_OPERATOR}", inputs, attributes, domain=DOMAIN, name=node.name)

    def _needs_batch(self, node: ir.Node) -> bool:
        """Return True if the provider runs products of three dimensions only, and the input has two."""
        data, bits = node.inputs[0], self._task.precision.weight_bits
        two, three = (self._task.provider.is_run(block_product_key(bits, rank)) for rank in (2, 3))
        return data is not None and data.shape is not None and len(data.shape) == 2 and three and not two

    def _add_batch(self, node: ir.Node, product: ir.Node) -> ir.Node:
        """Insert a product of three dimensions for a node of two; return the node that removes the third."""
        data, output = product.inputs[0], node.outputs[0]
        assert data is not None  # a product has two inputs
        axes = self._add_tensor(ir.tensor(np.array([0], np.int64), name=f"{node.name}_batch_axis"))
        unsqueeze = ir.node("Unsqueeze", [data, axes], name=self._fresh.take(f"{node.name}/Unsqueeze"))
        rows = self._insert_before(node, unsqueeze, f"{data.name}_batch", data)
        rows.shape = None if data.shape is None else ir.Shape([1, *data.shape])
        product.replace_input_with(0, rows)
        products = self._insert_before(node, product, f"{output.name}_batch", output)
        products.shape = None if output.shape is None else ir.Shape([1, *output.shape])
        return ir.node("Squeeze", [products, axes], name=self._fresh.take(f"{node.name}/Squeeze"))

    def _divide_input(self, node: ir.Node, value: ir.Value, scale: Array) -> ir.Value:
        """Divide an input of products by a scale per channel.

        If exact, the scale is folded into the weight of the normalization that produces the value; else a ``Mul`` is
        inserted before the products.
        """
        key = (value, id(scale))
        if key not in self._divided:
            inverse = (1 / scale).astype(scale.dtype if value.dtype is None else value.dtype.numpy())
            if not self._divide_normalization(value, scale):
                factor = self._add_tensor(ir.tensor(inverse, name=f"{value.name}_inverse_scale"))
                product = ir.node("Mul", [value, factor], name=self._fresh.take(f"{node.name}/Mul"))
                value = self._insert_before(node, product, f"{value.name}_divided", value)
            self._divided[key] = value
        return self._divided[key]

    def _divide_normalization(self, value: ir.Value, scale: Array) -> bool:
        """Fold the division of a value by a channel scale into its producer, in place; False if this is not exact.

        Must not fire when the value has readers other than products of the divided value.
        """
        maker = value.producer()
        if maker is None or value.is_graph_output() or maker.outputs[0] is not value:
            return False
        for reader, _ in value.uses():
            operand = operand_of(reader) if reader.name in self._task.nodes and reader.op_type != "Gather" else None
            solved = None if operand is None else self._task.solved.get(operand.key)
            if solved is None or solved.input_scale is not scale or reader.inputs[0] is not value:
                return False
        slots = _CHANNEL_WEIGHTS.get(maker.op_type, ())
        weights = [(index, gain) for index, gain in enumerate(maker.inputs) if index in slots and gain is not None]
        # The operands of a Mul are a value and a weight, in either order.
        weights = [(index, gain) for index, gain in weights if maker.op_type != "Mul" or gain.is_initializer()]
        if not weights or not all(_is_channel_weight(gain, len(scale)) for _, gain in weights):
            return False
        for index, gain in weights:
            assert gain.const_value is not None  # checked above
            numbers = gain.const_value.numpy()
            divided = ir.tensor((numbers / scale).astype(numbers.dtype), name=f"{gain.name}_divided")
            maker.replace_input_with(index, self._add_tensor(divided))
            drop_unused_initializers(self._graph, [gain])
        return True

    def _accuracy_level(self, weight: PackedWeight) -> int:
        """``accuracy_level`` of products with a weight."""
        del weight
        return COMPUTE_IN_INT8

    def _make_lookup(self, node: ir.Node, operand: Operand) -> ir.Node | None:
        """Create the lookup in a packed table; ``None`` if no block size divides its rows."""
        if self._task.options.tables == "rows" or self._is_standard:
            return self._make_row_lookup(node, operand)
        packed = self._packed_weight(node, operand)
        fmt = packed.weight.block_format
        if packed.weight.matrix.depth % fmt.block_size:
            return None  # no block size divides its rows, and rows are not padded
        values, *scale_parts = packed.parts
        table = self._make_table(node, values, packed.weight)
        attributes = {
            "gather_axis": 0,
            "quantize_axis": 1,
            "bits": fmt.bits,
            "block_size": fmt.block_size,
        }
        return ir.node(
            "GatherBlockQuantized", [table, node.inputs[1], *scale_parts], attributes, domain=DOMAIN, name=node.name
        )

    def _make_row_lookup(self, node: ir.Node, operand: Operand) -> ir.Node:
        """Create the lookup in a table of 8-bit integers with one scale per row, by operators of ONNX."""
        integers, scales = self._row_table(operand)
        rows, dtype = node.outputs[0], _get_tensor(operand.value).dtype
        lookup = ir.node("Gather", [integers, node.inputs[1]], name=node.name)
        lookup.metadata_props[QUANTIZATION_KEY] = json.dumps({"precision": INT8, "kind": "operator"})
        found = self._insert_before(node, lookup, f"{rows.name}_integers", rows)
        found.type = ir.TensorType(ir.DataType.INT8)
        cast = cast_node(found, dtype, node, self._fresh)
        _graph_of(node).insert_before(node, cast)
        scale = ir.Value(type=ir.TensorType(dtype))
        scale_lookup = ir.node("Gather", [scales, node.inputs[1]], name=self._fresh.take(f"{node.name}/scale"))
        scale = self._insert_before(node, scale_lookup, f"{rows.name}_scale", scale)
        return ir.node("Mul", [cast.outputs[0], scale], name=self._fresh.take(f"{node.name}/Mul"))

    def _row_table(self, operand: Operand) -> tuple[ir.Value, ir.Value]:
        """Integers and scales of a table, shared by its lookups."""
        tensor, name = _get_tensor(operand.value), operand.value.name or ""
        if name not in self._row_tables:
            measured = measure_scales(tensor, 0, IntegerRange(ir.DataType.INT8, -127, 127, is_symmetric=True))
            integers = quantized_tensor(tensor, measured, f"{name}_Q8")
            scales = ir.tensor(measured.scales.reshape(-1, 1), name=f"{name}_row_scales")
            self._row_tables[name] = self._add_tensor(integers), self._add_tensor(scales)
        return self._row_tables[name]

    def _packed_weight(self, node: ir.Node, operand: Operand) -> _PackedParts:
        """Block-quantized weight of a node, shared with other readers."""
        key = operand.key
        if key not in self._packed:
            readers = {reader.op_type for reader in _find_readers(operand, self._task)}
            weight = self._pack_weight(node, operand, readers)
            self._packed[key] = _PackedParts(weight, tuple(self._add_tensor(tensor) for tensor in weight.tensors()))
        return self._packed[key]

    def _pack_weight(self, node: ir.Node, operand: Operand, readers: set[str]) -> PackedWeight:
        """Build the block-quantized weight of a node.

        Args:
            node: The first node that reads it.
            operand: The weight.
            readers: Operators of the nodes that read it.
        """
        matrix = block_quantizers.WeightMatrix(_get_tensor(operand.value), operand.is_transposed)
        solved = self._task.solved.get(operand.key)
        fmt = _make_block_format(self._task, node, matrix.depth, is_table="Gather" in readers)
        fmt = fmt if solved is None else solved.block_format
        use = WeightUse.of(operand.value, node)
        is_table_only = readers == {"Gather"}
        return PackedWeight(
            matrix, fmt, use, self._desk, is_table_only=is_table_only, is_standard=self._is_standard, solved=solved
        )

    def _make_table(self, node: ir.Node, values: ir.Value, weight: PackedWeight) -> ir.Value:
        """Return the packed values with two axes.

        Products read the same values with three axes. A shared weight therefore gets a ``Reshape``, which ONNX Runtime
        folds when it loads the file. If the execution provider accepts constants only, it gets a second initializer of
        the same bytes.
        """
        if weight.is_table_only:
            return values
        name = values.name or ""
        key = name, _graph_of(node)
        sizes = [weight.matrix.width, weight.matrix.depth // weight.block_format.values_per_byte]
        if key not in self._tables and self._task.options.takes_constant_tables:
            assert values.const_value is not None  # registered with its tensor
            self._tables[key] = self._add_tensor(ReshapedTensor(values.const_value, sizes, f"{name}_table"))
        if key not in self._tables:
            shape = self._add_tensor(ir.tensor(sizes, ir.DataType.INT64, name=f"{name}_shape"))
            reshape = ir.node("Reshape", [values, shape], name=self._fresh.take(f"{node.name}/Reshape"))
            table = ir.Value(type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape(sizes))
            self._tables[key] = self._insert_before(node, reshape, f"{name}_table", table)
        return self._tables[key]

    def _add_tensor(self, tensor: ir.TensorProtocol) -> ir.Value:
        """Add a tensor as an initializer with a unique name."""
        return add_initializer(self._graph, tensor, self._fresh.take(tensor.name or ""))


def _make_block_format(task: EngineTask, node: ir.Node, depth: int, *, is_table: bool) -> block_quantizers.BlockFormat:
    """Block format of a weight in a task.

    Args:
        task: The task.
        node: The first node that reads the weight.
        depth: Number of values that each output channel is summed from; for a table, the size of its rows.
        is_table: True if rows of the weight are looked up. Blocks then divide the rows. Zero points are whole, or
            omitted if the blocks of a row do not fill bytes.
    """
    bits, algorithm = task.precision.weight_bits, task.algorithm_of(node)
    if algorithm in DATA_ALGORITHMS:
        algorithm = "rtn"  # solved weights: the format; tables, which are not solved: the algorithm
    size: int = task.block_sizes.get(node.name or "") or task.options.block_size or _BLOCK_SIZES[bits]
    # Readers of standard operators, such as OpenVINO, refuse a part of a block.
    if is_table or task.options.weight_operators == "standard":
        while depth % size and size > LEAST_BLOCK_SIZE:
            size //= 2
    if algorithm == "hqq" and (is_table or bits != 4 or task.options.weight_operators == "standard"):
        algorithm = "rtn"  # neither ONNX Runtime's kernels nor DequantizeLinear take fractional zero points there
    is_symmetric = bool(task.options.symmetric)
    if is_table and depth // size % (8 // bits):
        # Measured: for an odd number of blocks, ONNX Runtime 1.23 reads the zero points without the half byte that pads
        # a row, unlike later versions and MatMulNBits. Without zero points, all versions compute the same outputs.
        is_symmetric, algorithm = True, "rtn"
    return block_quantizers.BlockFormat(bits, size, is_symmetric=is_symmetric, algorithm=algorithm)


def _make_integer_format(task: EngineTask, node: ir.Node, depth: int) -> block_quantizers.BlockFormat | None:
    """Format of a weight in integers of a DequantizeLinear; ``None`` with one scale, or with more than 8 bits."""
    bits = task.precision.weight_bits
    if task.placement.is_by_unit:
        placed = (constant for constant in task.placement.constants if constant.node == node.name)
        weight = next((constant for constant in placed if constant.role == "weight"), None)
        has_scales, block_size = weight is not None and weight.axis is not None, weight and weight.block_size
    else:
        blocks = task.scaling.block_axis(node, 1)
        has_scales, block_size = task.is_per_channel, blocks and blocks[1]
    if bits > 8 or not has_scales:
        return None
    size = block_size or depth + depth % (8 // bits)
    return block_quantizers.BlockFormat(bits, size, is_symmetric=True, algorithm="rtn", has_positive_scales=True)


def _graph_of(node: ir.Node) -> ir.Graph | ir.Function:
    """Return the graph or subgraph of a node."""
    assert node.graph is not None
    return node.graph


def operand_of(node: ir.Node) -> Operand | None:
    """Weight of a node that has a block-quantized operator; ``None`` for other nodes."""
    weight = constant_weight(node)
    if weight is None or len(weight.const_value.shape) != 2 or weight.is_graph_input():  # type: ignore[union-attr]
        return None
    if node.op_type == "Gather":
        axis = node.attributes.get("axis")
        on_rows = axis is None or axis.as_int() == 0
        return Operand(weight, is_transposed=True) if on_rows and node.inputs[0] is weight else None
    right_operand = node.inputs[1]
    is_transposed = right_operand is not weight  # read through a Transpose
    if node.op_type == "Gemm":
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        if any(attributes.get(name, value) != value for name, value in PRODUCT_AND_SUM.items()) or not _has_plain_bias(
            node
        ):
            return None
        is_transposed ^= bool(attributes.get("transB", 0))
    maker = right_operand.producer() if right_operand is not None else None
    is_read = right_operand is weight or (maker is not None and maker.inputs[0] is weight)
    return Operand(weight, is_transposed) if is_read else None


def _has_plain_bias(node: ir.Node) -> bool:
    """Return True if a Gemm has no bias, or one bias value per output channel."""
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    return bias is None or (bias.shape is not None and len(bias.shape) == 1 and bias.shape[0] != 1)


_CHANNEL_WEIGHTS = {
    "Mul": (0, 1),
    "LayerNormalization": (1, 2),
    "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,),
    "SkipSimplifiedLayerNormalization": (2,),
    "SkipLayerNormalization": (2, 3),
}
"""Operators whose first output is scaled per channel → input positions of the scale and of summands added afterwards.
The bias of ``SkipLayerNormalization``, its fifth input, is added before."""


def _is_channel_weight(value: ir.Value, size: int) -> bool:
    """Return True if a value is a per-channel constant with a single reader that is neither graph input nor output."""
    tensor = value.const_value
    is_free = value.is_initializer() and not value.is_graph_input() and not value.is_graph_output()
    return is_free and tensor is not None and tuple(tensor.shape.numpy()) == (size,) and len(value.uses()) == 1


def _find_readers(operand: Operand, task: EngineTask) -> tuple[ir.Node, ...]:
    """Nodes of a task that read a weight in this orientation, without duplicates."""
    direct = [node for node, _ in operand.value.uses()]
    behind = [user for node in direct if node.op_type == "Transpose" for user, _ in node.outputs[0].uses()]
    readers = (node for node in (*direct, *behind) if node.name in task.nodes and operand_of(node) == operand)
    return tuple(dict.fromkeys(readers))


@dataclass(frozen=True)
class BlockWeight:
    """A weight to be quantized in blocks or channels, and the products that read it."""

    key: WeightKey
    matrix: block_quantizers.WeightMatrix
    block_format: block_quantizers.BlockFormat
    algorithm: Algorithm
    """Algorithm that solves the blocks."""
    products: tuple[ir.Node, ...]
    """Products in graph order; lookups of rows of the weight are not included."""

    @property
    def request(self) -> tuple[WeightKey, block_quantizers.BlockFormat, Algorithm]:
        """The weight with its requested format and algorithm."""
        return self.key, self.block_format, self.algorithm

    @property
    def inputs(self) -> tuple[ir.Value, ...]:
        """First inputs of the products, without duplicates."""
        return tuple(dict.fromkeys(value for node in self.products if (value := node.inputs[0]) is not None))


def block_weights(graph: ir.Graph, task: EngineTask) -> tuple[BlockWeight, ...]:
    """Weights of a task that products read, in graph order."""
    weights: dict[WeightKey, BlockWeight] = {}
    for node in graph:
        operand = operand_of(node) if node.name in task.nodes else None
        if operand is None or operand.key in weights:
            continue
        readers = _find_readers(operand, task)
        products = tuple(reader for reader in readers if reader.op_type != "Gather")
        if not products:
            continue
        matrix = block_quantizers.WeightMatrix(_get_tensor(operand.value), operand.is_transposed)
        algorithm = task.algorithm_of(node)
        if task.mode == "qdq":
            integers = _make_integer_format(task, node, matrix.depth)
            if integers is None or algorithm not in INTEGER_ALGORITHMS:
                continue
            fmt = integers
        else:
            fmt = _make_block_format(task, node, matrix.depth, is_table=len(products) < len(readers))
            algorithm = algorithm if algorithm in DATA_ALGORITHMS else fmt.algorithm
        weights[operand.key] = BlockWeight(operand.key, matrix, fmt, algorithm, products)
    return tuple(weights.values())


def _get_tensor(value: ir.Value) -> ir.TensorProtocol:
    """Return the tensor of an initializer."""
    assert value.const_value is not None
    return value.const_value
