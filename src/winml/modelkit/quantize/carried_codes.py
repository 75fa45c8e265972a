"""Transfer of a checkpoint's quantized weights (codes) to operators that read the codes.

Each weight is read and rearranged when the file is written. Without an ONNX Runtime operator for a kind of codes, the
nearest format is written, and its error is measured while writing. Before / After::

    x, weight[K,N] → MatMul                    x, codes, scales, zero points → MatMulNBits
    the same, act-order                        x → Gather (input channels by group) → MatMulNBits
    x, weight of bitsandbytes' 4 bits          x, codes, scales → MatMulBnb4
    table[V,K], indices → Gather               codes, indices, scales, zero points → GatherBlockQuantized
    experts[E,K,N] → Gather (one) → MatMul     as a weight of its own
    weight in 16 bits → MatMul                 weight in 16 bits → Cast → MatMul
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.onnx import coded_weights
from winml.modelkit.onnx.files.stored_tensors import StoredTensor
from winml.modelkit.onnx.fresh_names import FreshNames, cast_node
from winml.modelkit.onnx.stage import StageResult
from winml.modelkit.onnx.weights import add_initializer, computed_tensor, drop_unused_initializers
from winml.modelkit.quantize.declared_options import Algorithm, BlockSize
from winml.modelkit.quantize.engines.block_quantizers import BlockFormat, Blocks, WeightMatrix, unpack_blocks
from winml.modelkit.quantize.engines.integer_weights import WeightUse
from winml.modelkit.quantize.engines.weight_only import (
    COMPUTE_IN_INT8,
    DOMAIN,
    Operand,
    PackedWeight,
    Packing,
    PackingDesk,
    operand_of,
)
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.planning import EngineTask, ModulePrecision, constant_weight, float_name
from winml.modelkit.quantize.precisions import INT8, PRECISIONS
from winml.modelkit.tags.tagging import measure_coverage, read_tag
from winml.modelkit.words import count_noun

_COMPUTE_IN_FLOAT = 1
"""Specified: ``accuracy_level`` of ``MatMulNBits`` at which activations stay float32. Measured with ONNX Runtime 1.31
(4096 × 4096, two threads, one row): 2.8 ms in 4 bits, 0.34 ms with activations in 8 bits. For 2 and 8 bits there is no
such kernel, and the weight would be dequantized in every run (100 ms)."""
_FLOAT_KERNEL_BITS = (4,)
_NEAREST_BLOCK_SIZE: BlockSize = 32
"""Block size of the nearest format in 8 bits. Measured: 45 dB of 8-bit floats remain."""
_LEAST_HALF_BYTES = 1 << 16
"""Minimum size of 16-bit weights that stay 16-bit in the file. Chosen: scales and biases are small anyway."""
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_EXACT_IN_8_BITS = ("float4_e2m1",)
"""Kinds of codes whose values are halves of small integers, exactly representable in 8-bit integers."""
_BNB_KINDS = {"bnb_fp4": 0, "nf4": 1}
"""Specified: kind of codes → ``quant_type`` of ``MatMulBnb4``."""


@dataclass(frozen=True)
class CarriedCodes(StageResult):
    """Result of the transfer of codes."""

    modules: tuple[ModulePrecision, ...] = ()
    """Modules with weights, in graph order."""
    nearest: tuple[NearestWeight, ...] = ()
    """Weights without an operator for their codes; their errors are known once the model is written."""


class _CarriedWeight(PackedWeight):
    """Codes of a weight in the layout of ``MatMulNBits`` and ``GatherBlockQuantized``."""

    def __init__(self, coded: coded_weights.CodedWeight, matrix: WeightMatrix, use: WeightUse, desk: PackingDesk, *,
                 is_table_only: bool) -> None:  # fmt: skip
        """Store the reference to the codes; nothing is read."""
        self.coded = coded
        bits = coded.bits if coded.kind == "integer" else 8
        algorithm: Algorithm = "hqq" if coded.has_float_zero_points else "rtn"  # the algorithm with float zero points
        fmt = BlockFormat(bits, coded.block_size, is_symmetric=not coded.has_zero_points, algorithm=algorithm)
        super().__init__(matrix, fmt, use, desk, is_table_only=is_table_only)

    def compute(self) -> dict[str, Array]:
        """Read the codes: part name → array.

        Raises:
            CheckpointError: the file is shorter than before.
        """
        parts, fmt = self.coded.read(), self.block_format
        codes, scales, middle = parts.codes, parts.scales, 1 << (fmt.bits - 1)
        if self.coded.kind in _EXACT_IN_8_BITS:
            codes, scales = _convert_to_integers(self.coded, parts)
        blocks = fmt.block_count(self.coded.depth)
        row_bytes = blocks * fmt.block_size // fmt.values_per_byte
        if missing := row_bytes - codes.shape[1]:
            codes = np.pad(codes, ((0, 0), (0, missing)))
        zero_points = parts.zero_points
        packed_points = zero_points
        if zero_points is not None and not fmt.has_float_zero_points:
            packed_points = coded_weights.pack_codes(zero_points, fmt.bits, fill=middle)
        return self._cast_parts(Blocks(codes.reshape(len(codes), blocks, -1), scales, packed_points))


def _convert_to_integers(coded: coded_weights.CodedWeight, parts: coded_weights.CodedParts) -> tuple[Array, Array]:
    """Convert 4-bit floats to 8-bit integers of twice their value, with half their scales."""
    table = (np.asarray(coded_weights.CODE_TABLES[coded.kind]) * 2 + 128).astype(np.uint8)
    return table[coded_weights.unpack_codes(parts.codes, 4, coded.depth)], parts.scales / 2


class NearestWeight(PackedWeight):
    """A weight without an operator for its codes, in 8-bit blocks; the error is known once it is computed."""

    lost: float = 0.0
    """Sum of the squared errors."""
    signal: float = 0.0
    """Sum of the squared weight values; 0 before writing."""

    def compute(self) -> dict[str, Array]:
        """Quantize the weight: part name → array; also measures the error."""
        parts = super().compute()
        values = self.matrix.values().T
        error = unpack_blocks(Blocks(**parts), self.block_format, self.matrix.depth).T - values
        self.lost, self.signal = float(np.vdot(error, error)), float(np.vdot(values, values))
        return parts


def carry_codes(
    model: ir.Model, ep: str | None = None, activations: Literal["float32", "int8"] | None = None
) -> CarriedCodes:
    """Replace the readers of coded weights by operators that read the codes, in place.

    Args:
        model: The model; its coded weights are initializers whose tensors are ``CodedTensor``.
        ep: Execution provider of the result; ``None``: any.
        activations: Type of activations in products with codes; ``None``: float32 if a fast kernel exists, else int8.
    """
    _separate_experts(model.graph)
    readers = [node for node in model.graph if _find_coded_tensor(node) is not None]
    task = EngineTask(frozenset(str(node.name) for node in readers), PRECISIONS[INT8], QuantizeOptions(ep=ep))
    packing = _CodesPacking(model.graph, task, activations)
    for node in readers:
        packing.carry(node)
    packing.remove_unused()
    _retain_halves(model.graph)
    if packing.done:
        model.opset_imports.setdefault(DOMAIN, 1)
    modules = tuple(_list_modules(model.graph))
    notes = tuple(_dequantization_notes(model.graph))
    formats = dict.fromkeys(weight.source_format for weight in packing.done)
    if packing.done:
        record = {
            "requested": {"precision": "as in the checkpoint", "source_format": ", ".join(formats)},
            "modules": [module.as_record() for module in modules],
        }
        model.metadata_props[QUANTIZATION_KEY] = json.dumps(record, ensure_ascii=False)
    return CarriedCodes(
        model, bool(packing.done), notes, measure_coverage(model), modules, tuple(packing.nearest)
    )  # fmt: skip


def _separate_experts(graph: ir.Graph) -> None:
    """Make the matrix of each expert a separate weight if the graph selects it from a stacked weight; in place.

    TorchScript selects with a ``Gather`` of one index, with torch 2.10 with a ``Slice`` and a ``Squeeze``; dynamo with
    a ``Split`` and a ``Squeeze``.
    """
    fresh: FreshNames | None = None
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if not isinstance(tensor, coded_weights.CodedTensor) or not tensor.weight.members:
            continue
        if tensor.permutation is not None and tensor.permutation[0] != 0:
            continue
        fresh = fresh or FreshNames.of_graph(graph)
        experts: dict[int, ir.Value] = {}
        for index, old in list(_find_selected_experts(value, len(tensor.weight.members))):
            if index not in experts:
                experts[index] = add_initializer(graph, tensor.expert(index, fresh.take(f"{name}.{index}")))
            old.replace_all_uses_with(experts[index])
        _remove_unread(graph, value)


def _find_selected_experts(value: ir.Value, count: int) -> Iterator[tuple[int, ir.Value]]:
    """Yield (expert index, value of its matrix) for each expert selected from a stacked weight."""
    for node, position in list(value.uses()):
        if node.op_type == "Gather" and position == 0 and node.attributes.get_int("axis", 0) == 0:
            index = node.inputs[1].const_value if node.inputs[1] is not None else None
            if index is not None and not index.shape.numpy():
                yield int(index.numpy()) % count, node.outputs[0]
        elif node.op_type == "Slice" and position == 0:
            bounds = [_read_integers(bound) for bound in node.inputs[1:]]
            if len(bounds) < 3 or bounds[2] != [0] or bounds[3:] not in ([], [[1]]) or not (bounds[0] and bounds[1]):
                continue
            experts = range(count)[bounds[0][0] : bounds[1][0]]
            if len(experts) == 1:
                yield from ((experts[0], matrix) for matrix in _find_squeezed(node.outputs[0]))
        elif node.op_type == "Split" and node.attributes.get_int("axis", 0) == 0 and len(node.outputs) == count:
            for number, output in enumerate(node.outputs):
                yield from ((number, matrix) for matrix in _find_squeezed(output))


def _find_squeezed(value: ir.Value) -> list[ir.Value]:
    """Outputs of the Squeeze nodes that remove exactly the first axis of a value."""
    readers = [reader for reader, _ in value.uses() if reader.op_type == "Squeeze"]
    return [reader.outputs[0] for reader in readers if _read_integers((*reader.inputs, None)[1]) == [0]]


def _read_integers(value: ir.Value | None) -> list[int] | None:
    """Integers of a constant vector; ``None`` for other values."""
    constant = value.const_value if value is not None else None
    return None if constant is None else constant.numpy().reshape(-1).tolist()


def _remove_unread(graph: ir.Graph, weight: ir.Value) -> None:
    """Remove unread selections from a weight, and the weight if nothing else reads it."""
    for node in list(weight.consumers()):
        for reader in [reader for output in node.outputs for reader in output.consumers()]:
            if reader.op_type == "Squeeze" and not any(output.uses() for output in reader.outputs):
                graph.remove(reader, safe=True)
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
    drop_unused_initializers(graph, [weight])


def _find_coded_tensor(node: ir.Node) -> coded_weights.CodedTensor | None:
    """Coded weight of a node; ``None`` without a coded weight."""
    value = constant_weight(node)
    tensor = value.const_value if value is not None else None
    return tensor if isinstance(tensor, coded_weights.CodedTensor) else None


class _CodesPacking(Packing):
    """Replacement of the readers of coded weights in one graph, in place."""

    def __init__(self, graph: ir.Graph, task: EngineTask, activations: str | None) -> None:
        super().__init__(graph, task)
        self._activations = activations
        self.done: list[coded_weights.CodedWeight] = []
        """Weights of the replaced nodes, one per node."""
        self.nearest: list[NearestWeight] = []
        self._bnb_parts: dict[str, tuple[ir.Value, ...]] = {}
        """Name of a weight → its codes and scales."""
        self._orders: dict[tuple[ir.Value, bytes], ir.Value] = {}
        """(activation, channel order) → the activation in this order."""

    def carry(self, node: ir.Node) -> None:
        """Replace a node; a node whose weight no operator supports stays."""
        tensor = _find_coded_tensor(node)
        assert tensor is not None  # checked by the caller
        if tensor.weight.kind in _BNB_KINDS and (operand := operand_of(node)) is not None:
            new = self._replace_bnb_product(node, operand)
        else:
            new = self.replace_reader(node)
        if new is not None:
            self.done.append(tensor.weight)
            new.metadata_props[QUANTIZATION_KEY] = json.dumps(_node_record(new, tensor.weight))

    def _make_product(self, node: ir.Node, operand: Operand) -> ir.Node:
        """Create the product with a packed weight; reorder its input channels if the codes require it."""
        coded = _get_coded_tensor(operand).weight
        if coded.read_order is not None and _is_representable(coded, operand):
            ordered = self._reorder_channels(node, coded.read_order())
            node.replace_input_with(0, ordered)
        return super()._make_product(node, operand)

    def _replace_bnb_product(self, node: ir.Node, operand: Operand) -> ir.Node | None:
        """Replace a product with a 4-bit weight of bitsandbytes; tables and weights read by columns use
        :meth:`replace_reader`.
        """
        weight = _get_coded_tensor(operand).weight
        if node.op_type == "Gather" or not _is_read_by_rows(operand):
            return self.replace_reader(node)
        name = operand.value.name or ""
        if name not in self._bnb_parts:
            self._bnb_parts[name] = tuple(self._add_tensor(tensor) for tensor in _bnb_tensors(weight, name))
        attributes = {
            "K": weight.depth, "N": weight.rows, "block_size": weight.block_size,
            "quant_type": _BNB_KINDS[weight.kind],
        }  # fmt: skip
        activation, *other_inputs = node.inputs
        new = ir.node(
            "MatMulBnb4", [activation, *self._bnb_parts[name]], attributes, domain=DOMAIN, name=node.name
        )  # fmt: skip
        bias = other_inputs[1] if len(other_inputs) > 1 else None
        last = new
        if bias is not None:
            product = self._insert_before(node, new, f"{node.outputs[0].name}_product", node.outputs[0])
            last = ir.node("Add", [product, bias], name=self._fresh.take(f"{node.name}/Add"))
        self._replace_node(node, last)
        return new

    def _reorder_channels(self, node: ir.Node, order: Array) -> ir.Value:
        """Activation of a node with reordered channels, shared by all readers."""
        activation = node.inputs[0]
        assert activation is not None
        key = (activation, order.tobytes())
        if key not in self._orders:
            indices = self._add_tensor(ir.tensor(order, ir.DataType.INT64, name=f"{node.name}_input_order"))
            gather = ir.node(
                "Gather", [activation, indices], {"axis": -1}, name=self._fresh.take(f"{node.name}/Gather")
            )
            gather.metadata_props.update(node.metadata_props)
            gather.outputs[0].name = self._fresh.take(f"{activation.name}_by_group")
            gather.outputs[0].type, gather.outputs[0].shape = activation.type, activation.shape
            maker = activation.producer()
            if maker is not None:
                self._graph.insert_after(maker, gather)
            else:
                self._graph.insert_before(node, gather)
            self._orders[key] = gather.outputs[0]
        return self._orders[key]

    def _pack_weight(self, node: ir.Node, operand: Operand, readers: set[str]) -> PackedWeight:
        """Build the packed weight: the codes, or 8-bit blocks if no operator reads the codes."""
        tensor = _get_coded_tensor(operand)
        matrix = WeightMatrix(tensor, operand.is_transposed)
        use = WeightUse.of(operand.value, node)
        is_table_only = readers == {"Gather"}
        # Row lookups support whole zero points only.
        is_supported = not (tensor.weight.has_float_zero_points and "Gather" in readers)
        if is_supported and _is_representable(tensor.weight, operand):
            return _CarriedWeight(tensor.weight, matrix, use, self._desk, is_table_only=is_table_only)
        fmt = BlockFormat(8, _NEAREST_BLOCK_SIZE, is_symmetric=True, algorithm="rtn")
        weight = NearestWeight(matrix, fmt, use, self._desk, is_table_only=is_table_only)
        self.nearest.append(weight)
        return weight

    def _accuracy_level(self, weight: PackedWeight) -> int:
        """``accuracy_level`` of products with a weight, as requested; else float32 if a kernel exists."""
        if self._activations is not None:
            return _COMPUTE_IN_FLOAT if self._activations == "float32" else COMPUTE_IN_INT8
        return _COMPUTE_IN_FLOAT if weight.block_format.bits in _FLOAT_KERNEL_BITS else COMPUTE_IN_INT8


def _get_coded_tensor(operand: Operand) -> coded_weights.CodedTensor:
    """Return the coded tensor of an operand."""
    tensor = operand.value.const_value
    assert isinstance(tensor, coded_weights.CodedTensor)
    return tensor


def _is_read_by_rows(operand: Operand) -> bool:
    """Return True if the rows of a coded weight, as a node reads it, are output channels or looked-up rows."""
    return operand.is_transposed == (_get_coded_tensor(operand).permutation is None)


def _is_representable(coded: coded_weights.CodedWeight, operand: Operand) -> bool:
    """Return True if integers represent the codes of a weight in the orientation that a node reads."""
    return _is_read_by_rows(operand) and (coded.kind == "integer" or coded.kind in _EXACT_IN_8_BITS)


def _bnb_tensors(weight: coded_weights.CodedWeight, name: str) -> tuple[ir.LazyTensor, ir.LazyTensor]:
    """Return codes and scales in the layout of ``MatMulBnb4``: flat, the first code in the high half of a byte."""

    def codes() -> Array:
        """Read the codes, with the halves of each byte exchanged."""
        packed = weight.read().codes.reshape(-1)
        return (packed >> 4) | (packed << 4)

    def scales() -> Array:
        return weight.read().scales.reshape(-1)

    return (
        computed_tensor(codes, ir.DataType.UINT8, [weight.rows * weight.depth // 2], f"{name}_codes"),
        computed_tensor(scales, ir.DataType.FLOAT, [weight.rows * weight.blocks], f"{name}_scales"),
    )


def _node_record(node: ir.Node, weight: coded_weights.CodedWeight) -> dict[str, object]:
    """Quantization record of a node's weight."""
    bits = node.attributes.get_int("bits", weight.bits)
    is_carried = weight.kind != "number" and (node.op_type == "MatMulBnb4" or bits == weight.bits)
    record: dict[str, object] = {"precision": weight.precision if is_carried else INT8, "kind": "operator"}
    if (size := node.attributes.get("block_size")) is not None:
        record["block_size"] = size.as_int()
    record["source_format"] = weight.source_format
    if not is_carried:
        record["source_precision"] = weight.precision
    return record


def _retain_halves(graph: ir.Graph) -> None:
    """Keep 16-bit weights that would be written as float32 in 16 bits, with a Cast before their readers."""
    fresh: FreshNames | None = None
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if not isinstance(tensor, StoredTensor) or tensor.dtype != ir.DataType.FLOAT:
            continue
        if tensor.stored.dtype not in _HALVES or tensor.nbytes < 2 * _LEAST_HALF_BYTES or value.is_graph_output():
            continue
        fresh = fresh or FreshNames.of_graph(graph)
        value.const_value = StoredTensor(tensor.stored, permutation=tensor.permutation, name=name)
        value.type = ir.TensorType(tensor.stored.dtype)
        uses = list(value.uses())
        whole: ir.Value | None = None
        for node, index in uses:
            if node.op_type == "Gather" and index == 0 and not node.domain:
                _cast_rows(graph, node, fresh)
                continue
            if whole is None:
                cast = cast_node(value, ir.DataType.FLOAT, node, fresh)
                graph.insert_before(_find_first(graph, uses), cast)
                whole = cast.outputs[0]
            node.replace_input_with(index, whole)


def _cast_rows(graph: ir.Graph, node: ir.Node, fresh: FreshNames) -> None:
    """Cast the rows that a node looks up in a 16-bit table to float32, in place."""
    table, output = node.inputs[0], node.outputs[0]
    assert table is not None  # input 0 is the table
    name = output.name
    cast = cast_node(output, ir.DataType.FLOAT, node, fresh)
    graph.insert_after(node, cast)
    ir.convenience.replace_all_uses_with(output, cast.outputs[0], replace_graph_outputs=True)
    cast.replace_input_with(0, output)
    output.name, cast.outputs[0].name = cast.outputs[0].name, name
    output.type = table.type


def _find_first(graph: ir.Graph, uses: Sequence[tuple[ir.Node, int]]) -> ir.Node:
    """First of some nodes in graph order."""
    nodes = {node for node, _ in uses}
    return next(node for node in graph if node in nodes)


def _list_modules(graph: ir.Graph) -> Iterator[ModulePrecision]:
    """Yield results by module and precision; weights that are float in the checkpoint have no precision."""
    nodes: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for node in graph:
        tag = read_tag(node)
        name = "" if tag is None else tag.tag
        if (text := node.metadata_props.get(QUANTIZATION_KEY)) is not None:
            precision = str(json.loads(text)["precision"])
            nodes[name, precision][precision] += 1
        elif (half := _float_precision(node)) is not None:
            nodes[name, ""][half] += 1
    for (name, precision), counts in nodes.items():
        if precision:
            yield ModulePrecision(name, precision, counts.total(), {})
        else:
            types = tuple(counts)
            yield ModulePrecision(name, types[0], 0, {"as in the checkpoint": counts.total()}, types)


def _float_precision(node: ir.Node) -> str | None:
    """Precision of an uncoded weight of a node; ``None`` without a weight."""
    value = constant_weight(node)
    if value is None:
        for operand in node.inputs[:2]:
            maker = operand.producer() if operand is not None else None
            while maker is not None and maker.op_type in ("Cast", "Transpose"):
                source = maker.inputs[0]
                if source is not None and source.is_initializer() and source.dtype in _HALVES:
                    return float_name(source.dtype.name)
                maker = source.producer() if source is not None else None
        return None
    return float_name(value.dtype.name) if value.dtype is not None else None


def _dequantization_notes(graph: ir.Graph) -> Iterator[str]:
    """Note the quantized weights that are written as floats, since one of their readers supports no codes."""
    float_weights = {
        name: value
        for name, value in graph.initializers.items()
        if isinstance(value.const_value, coded_weights.CodedTensor)
    }
    if float_weights:
        operators = Counter(node.op_type for value in float_weights.values() for node, _ in value.uses())
        operator_counts = ", ".join(f"{count} {name}" for name, count in operators.most_common())
        count = count_noun(len(float_weights), "weight")
        yield (
            f"{count} dequantized to floating point, since no operator that reads them supports quantized weights "
            f"({operator_counts}): {', '.join(list(float_weights)[:3])}."
        )


def _loss_words(total_db: float, worst_db: float) -> str:
    """Describe the error of requantized weights.

    >>> _loss_words(48.25, 40.0), _loss_words(math.inf, math.inf)
    ('SQNR 48.2 dB overall, 40.0 dB for the worst', 'exact: no value changed')
    """
    if math.isinf(worst_db):
        return "exact: no value changed"
    return f"SQNR {total_db:.1f} dB overall, {worst_db:.1f} dB for the worst"


def loss_notes(nearest: Sequence[NearestWeight]) -> Iterator[str]:
    """Note the error of weights without an operator for their codes, after the weights are written."""
    if measured := [weight for weight in nearest if weight.signal]:
        ratios = sorted(_compute_decibels(weight.signal, weight.lost) for weight in measured)
        total = _compute_decibels(sum(weight.signal for weight in measured), sum(weight.lost for weight in measured))
        yield (
            f"{count_noun(len(measured), 'weight')} requantized to 8 bits in blocks of {_NEAREST_BLOCK_SIZE}, since "
            "the CPU provider of ONNX Runtime has no operator for their format: "
            f"{_loss_words(total, ratios[0])}."
        )


def _compute_decibels(signal: float, lost: float) -> float:
    """Return the SQNR of a signal power and a lost power in dB."""
    return 10 * math.log10(signal / lost) if lost and signal else math.inf
