"""Quantizes weights beforehand and activations while the graph runs, with ONNX Runtime's own quantizer."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import onnx
import onnx_ir as ir
from onnxruntime.quantization import QuantizationMode, QuantType
from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
from onnxruntime.quantization.quant_utils import TENSOR_NAME_QUANT_SUFFIX, get_qmin_qmax_for_qType

from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.onnx.weights import (
    WeightlessProto,
    from_weightless,
    give_products_own_weights,
    to_weightless,
    transposed_tensor,
    weights_read_on_demand,
)
from winml.modelkit.quantize.engines.integer_weights import IntegerRange, measure_scales, quantized_tensor
from winml.modelkit.quantize.planning import EngineTask
from winml.modelkit.quantize.precisions import MODES, PRODUCT_AND_SUM


def _gemms_as_products(sent: WeightlessProto, names: Collection[str]) -> WeightlessProto:
    """Write the named Gemms as products and additions: ONNX Runtime's quantizer knows the product alone.

    Before / After::

        y = Gemm(x, w, b, transB=1)      →      p = MatMul(x, wᵀ);  y = Add(p, b)

    Must not fire when a factor other than 1 stands before product or addition, or the activation is transposed. The
    product keeps the name of the node. A transposed weight is a new initializer, computed when it is read: the original
    may have other readers.

    Args:
        sent: The model; its protobuf is changed in place.
        names: Names of nodes; those that are no Gemm, or none that can be written so, stay.
    """
    tensors = dict(sent.weights)
    initializers = {initializer.name: initializer for initializer in sent.proto.graph.initializer}
    fresh = FreshNames.of_proto(sent.proto.graph)
    transposed: dict[str, str] = {}
    """Name of a weight → that of its transposed form."""
    nodes = []
    for node in sent.proto.graph.node:
        settings = {attribute.name: attribute.f or attribute.i for attribute in node.attribute}
        is_product = all(settings.get(name, value) == value for name, value in PRODUCT_AND_SUM.items())
        if node.op_type != "Gemm" or node.domain or node.name not in names or not is_product:
            nodes.append(node)
            continue
        if settings.get("transB"):
            weight = initializers.get(node.input[1])
            if weight is None:
                nodes.append(node)
                continue
            if weight.name not in transposed:
                name = transposed[weight.name] = fresh.take(f"{weight.name}_transposed")
                original = tensors.get(weight.name) or ir.serde.deserialize_tensor(weight)
                tensors[name] = transposed_tensor(original, name)
                added = onnx.TensorProto(name=name, data_type=weight.data_type, dims=weight.dims[::-1])
                sent.proto.graph.initializer.append(added)
            node.input[1] = transposed[weight.name]
        nodes += _product_and_sum(node, fresh)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    sent.proto.graph.ClearField("node")
    sent.proto.graph.node.extend(copies)
    return WeightlessProto(sent.proto, tensors)


def _product_and_sum(node: onnx.NodeProto, fresh: FreshNames) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that compute what a Gemm does; both bear its metadata."""
    has_bias = len(node.input) > 2 and bool(node.input[2])
    product = fresh.take(f"{node.output[0]}_product") if has_bias else node.output[0]
    yield onnx.NodeProto(
        op_type="MatMul", name=node.name, input=node.input[:2], output=[product], metadata_props=node.metadata_props
    )
    if has_bias:
        yield onnx.NodeProto(
            op_type="Add",
            name=fresh.take(f"{node.name}_bias"),
            input=[product, node.input[2]],
            output=node.output,
            metadata_props=node.metadata_props,
        )


_STAYS = "kept"


def _with_own_weights(sent: WeightlessProto, names: Collection[str]) -> WeightlessProto:
    """Let the named nodes read initializers that nodes of another kind do not read, in place.

    ONNX Runtime's quantizer replaces a weight for all its readers: nodes that stay would read the remainder, and a
    lookup and a product, which need scales along other axes, would share the scales of the first.

    Before / After::

        w → Gather (named), MatMul (named), Transpose        w → Transpose, w.lookup → Gather, w.product → MatMul

    A new initializer refers to the values of the old one; nothing is copied that travels without values.

    Args:
        sent: The model, without values.
        names: Names of the nodes of the main graph that are quantized.

    Returns:
        The same proto, with the tensors of the new initializers.
    """
    graph = sent.proto.graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    weights = dict(sent.weights)
    fresh = FreshNames.of_proto(graph)
    for name, readers in _readers_by_kind(graph, names).items():
        if len(readers) < 2 or name not in initializers or len(initializers[name].dims) < 2:
            continue
        # The first kind keeps the name; those that stay always do.
        kinds = sorted(readers, key=lambda kind: kind != _STAYS)
        for kind in kinds[1:]:
            own = fresh.take(f"{name}.{kind}")
            copied = onnx.TensorProto()
            copied.CopyFrom(initializers[name])
            copied.name = own
            graph.initializer.append(copied)
            if name in weights:
                weights[own] = weights[name]
            for node, position in readers[kind]:
                node.input[position] = own
    return WeightlessProto(sent.proto, weights)


def _readers_by_kind(
    graph: onnx.GraphProto, names: Collection[str]
) -> dict[str, dict[str, list[tuple[onnx.NodeProto, int]]]]:
    """Return who reads each value, and at which input: those that stay, lookups and products."""
    readers: defaultdict[str, dict[str, list[tuple[onnx.NodeProto, int]]]] = defaultdict(dict)
    for output in graph.output:
        readers[output.name].setdefault(_STAYS, [])
    for node in graph.node:
        kind = _STAYS if node.name not in names else "lookup" if node.op_type == "Gather" else "product"
        for position, name in enumerate(node.input):
            readers[name].setdefault(kind, []).append((node, position))
        for name in _read_by_subgraphs(node):
            readers[name].setdefault(_STAYS, [])
    return readers


def _read_by_subgraphs(node: onnx.NodeProto) -> Iterator[str]:
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            yield from (output.name for output in graph.output)
            for inner in graph.node:
                yield from inner.input
                yield from _read_by_subgraphs(inner)


_INFERRED_KEY = "onnx.infer"
"""Specified: key of the model's metadata by which ONNX Runtime's quantizer knows that shapes are inferred."""


def quantize_dynamically(model: ir.Model, task: EngineTask) -> ir.Model:
    """Return the model with the named nodes in 8 bits; the given model is not changed."""
    prepared = model.clone()
    give_products_own_weights(prepared, task.nodes)
    sent = _with_own_weights(_gemms_as_products(to_weightless(prepared), task.nodes), task.nodes)
    # Otherwise the quantizer infers shapes by way of a folder of temporary files, which stays there if it is killed.
    sent.proto.metadata_props.add(key=_INFERRED_KEY, value="onnxruntime.quant")
    weight_type = QuantType.QInt8 if task.precision.signed_weights else QuantType.QUInt8
    options = {
        "MatMulConstBOnly": True,
        "WeightSymmetric": task.options.symmetric,
        "DefaultTensorType": onnx.TensorProto.FLOAT,  # of products without a declared type: only float32 is planned
    }
    with _quiet_quantizer(), weights_read_on_demand(sent.weights):
        quantizer = _LazyWeightQuantizer(
            sent.proto,
            per_channel=task.is_per_channel,
            reduce_range=False,
            mode=QuantizationMode.IntegerOps,
            static=True,  # for its construction only: otherwise it takes Gemms apart by itself, shared weights wrongly
            weight_qType=weight_type,
            activation_qType=QuantType.QUInt8,  # the only one dynamic activations can have
            tensors_range=None,
            nodes_to_quantize=sorted(task.nodes),
            nodes_to_exclude=[],
            op_types_to_quantize=sorted(MODES["dynamic"].operators),
            extra_options={key: value for key, value in options.items() if value is not None},
        )
        quantizer.static = False
        quantizer.weights = sent.weights
        returned = quantizer.quantize_model()
    created = from_weightless(WeightlessProto(sent.proto, {**sent.weights, **quantizer.integers}), returned)
    created.metadata_props.pop(_INFERRED_KEY, None)
    return created


@contextlib.contextmanager
def _quiet_quantizer() -> Iterator[None]:
    """Keep ONNX Runtime's quantizers from writing to the log: they warn of what is no fault of the user's."""
    root = logging.getLogger()

    def is_foreign(record: logging.LogRecord) -> bool:
        return "onnxruntime" not in record.pathname

    root.addFilter(is_foreign)
    try:
        yield
    finally:
        root.removeFilter(is_foreign)


class _LazyWeightQuantizer(ONNXQuantizer):  # type: ignore[misc]  # onnxruntime has no types
    """ONNX Runtime's quantizer, except that it holds no weight and computes all channels of one at once.

    It calls the two methods below for each weight (docs/decisions/0004-private-seams.md). The integers they add have no
    values; :attr:`integers` has those.
    """

    weights: Mapping[str, ir.TensorProtocol] = {}
    """Tensors of the initializers that travel without values."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.integers: dict[str, ir.TensorProtocol] = {}
        """Quantized weights by name."""
        self.fresh = FreshNames.of_proto(self.model.graph())
        """The names of the graph."""

    def quantize_initializer_impl(self, weight: onnx.TensorProto, integer_type: int, *_: bool) -> tuple[str, str, str]:
        """Quantize a weight with one scale; return the names of its integers, zero point and scale."""
        return self._add_integers(weight, integer_type, None)

    def quantize_weight_per_channel_impl(
        self, weight_name: str, integer_type: int, channel_axis: int, *_: bool
    ) -> tuple[str, str, str]:
        """Quantize a weight with a scale for each channel; return the names of its integers, zero points and scales."""
        return self._add_integers(self.initializers[weight_name], integer_type, channel_axis)

    def _add_integers(self, weight: onnx.TensorProto, integer_type: int, axis: int | None) -> tuple[str, str, str]:
        tensor = self.weights.get(weight.name) or ir.serde.deserialize_tensor(weight)
        is_weight_type = integer_type == self.weight_qType
        symmetric = self.is_weight_symmetric(integer_type) if is_weight_type else self.is_activation_symmetric
        minimum, maximum = map(int, get_qmin_qmax_for_qType(integer_type, symmetric=symmetric))
        integers = IntegerRange(ir.DataType(integer_type), minimum, maximum, bool(symmetric))
        scales = measure_scales(tensor, axis, integers)
        ends = (TENSOR_NAME_QUANT_SUFFIX, "_zero_point", "_scale")
        names = [self.fresh.take(f"{weight.name}{end}") for end in ends]
        self.model.initializer_extend(
            [
                ir.serde.serialize_tensor(ir.Tensor(scales.scales, name=names[2])),
                ir.serde.serialize_tensor(ir.Tensor(scales.zero_points, name=names[1])),
                onnx.TensorProto(name=names[0], data_type=integer_type, dims=weight.dims),
            ]
        )
        self.integers[names[0]] = quantized_tensor(tensor, scales, names[0])
        return names[0], names[1], names[2]
