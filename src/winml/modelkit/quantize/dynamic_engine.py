"""Quantizes with ONNX Runtime's own quantizer: weights beforehand, activations by the range each run finds.

The quantizer works on the structure alone; each weight is read when its turn comes.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxruntime.quantization import QuantizationMode, QuantType
from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer

from winml.modelkit.graph.weightless_proto import from_weightless, to_weightless, weights_read_on_demand
from winml.modelkit.quantize.engine_task import EngineTask, quiet_quantizer
from winml.modelkit.quantize.gemm_separation import gemms_left_alone, with_products_for_gemms
from winml.modelkit.quantize.precisions import MODES
from winml.modelkit.quantize.weight_separation import with_own_weights

__all__ = ["quantize_dynamically"]


def quantize_dynamically(model: ir.Model, task: EngineTask) -> ir.Model:
    """Return the model with the named nodes in 8 bits; the given model is not changed."""
    sent = with_own_weights(with_products_for_gemms(to_weightless(model), task.nodes), task.nodes)
    weight_type = QuantType.QInt8 if task.precision.signed_weights else QuantType.QUInt8
    options = {"MatMulConstBOnly": True, "WeightSymmetric": task.is_symmetric}
    with quiet_quantizer(), gemms_left_alone(), weights_read_on_demand(sent.weights):
        quantizer = ONNXQuantizer(
            sent.proto,
            per_channel=task.is_per_channel,
            reduce_range=False,
            mode=QuantizationMode.IntegerOps,
            static=False,
            weight_qType=weight_type,
            activation_qType=QuantType.QUInt8,  # the only one dynamic activations can have
            tensors_range=None,
            nodes_to_quantize=sorted(task.nodes),
            nodes_to_exclude=[],
            op_types_to_quantize=sorted(MODES["dynamic"].operators),
            extra_options={key: value for key, value in options.items() if value is not None},
        )
        returned = quantizer.quantize_model()
    return from_weightless(sent, returned)
