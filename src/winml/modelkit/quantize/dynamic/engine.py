"""Quantizes with ONNX Runtime's own quantizer: weights beforehand, activations by the range each run finds.

The quantizer works on the structure alone. What it does to a weight stands in ``integer_weights``: each weight is read
for its scales, and once more when its integers are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir
from onnxruntime.quantization import QuantizationMode, QuantType
from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
from onnxruntime.quantization.quant_utils import TENSOR_NAME_QUANT_SUFFIX, get_qmin_qmax_for_qType

from winml.modelkit.graph.fresh_names import FreshNames
from winml.modelkit.graph.transposed_weights import give_products_own_weights
from winml.modelkit.graph.weightless_proto import (
    WeightlessProto,
    from_weightless,
    to_weightless,
    weights_read_on_demand,
)
from winml.modelkit.quantize.dynamic.gemm_products import gemms_as_products
from winml.modelkit.quantize.dynamic.weight_separation import with_own_weights
from winml.modelkit.quantize.engine_task import EngineTask, quiet_quantizer
from winml.modelkit.quantize.integer_weights import IntegerRange, measure_scales, quantized_tensor
from winml.modelkit.quantize.precisions import MODES

__all__ = ["quantize_dynamically"]

_INFERRED_KEY = "onnx.infer"
"""Specified: key of the model's metadata by which ONNX Runtime's quantizer knows that shapes are inferred."""


def quantize_dynamically(model: ir.Model, task: EngineTask) -> ir.Model:
    """Return the model with the named nodes in 8 bits; the given model is not changed."""
    prepared = model.clone()
    give_products_own_weights(prepared, task.nodes)
    sent = with_own_weights(gemms_as_products(to_weightless(prepared), task.nodes), task.nodes)
    # Otherwise the quantizer infers shapes by way of a folder of temporary files, which stays there if it is killed.
    sent.proto.metadata_props.add(key=_INFERRED_KEY, value="onnxruntime.quant")
    weight_type = QuantType.QInt8 if task.precision.signed_weights else QuantType.QUInt8
    options = {
        "MatMulConstBOnly": True,
        "WeightSymmetric": task.is_symmetric,
        "DefaultTensorType": onnx.TensorProto.FLOAT,  # of products without a declared type: only float32 is planned
    }
    with quiet_quantizer(), weights_read_on_demand(sent.weights):
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
    made = from_weightless(WeightlessProto(sent.proto, {**sent.weights, **quantizer.integers}), returned)
    made.metadata_props.pop(_INFERRED_KEY, None)
    return made


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
