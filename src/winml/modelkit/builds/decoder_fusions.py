"""Graphs that are fused for ONNX Runtime even if no optimization was requested.

Decoders with a cache are fused if only ONNX Runtime can run the result anyway: operators with weights in few bits are
specific to ONNX Runtime, the base of onnxruntime-genai. Decoders of a checkpoint with weights in few bits are fused as
well. A stated level overrides this.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from winml.modelkit.builds.plan import BuildPlan, fused_attention_variant, is_for_onnxruntime
from winml.modelkit.errors import opt
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.onnx.coded_weights import CodedTensor
from winml.modelkit.onnx.files.graph_reading import load_by_reference
from winml.modelkit.optimize.decoders.interface import DecoderInterface
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.quantize.engines.weight_only import DOMAIN


def optimization_of(section: OptimizeOptions, model: ir.Model, plan: BuildPlan) -> OptimizeOptions:
    """Return the optimize options of a graph, with decoder fusions if they apply.

    Args:
        section: Section ``optim`` of the config.
        model: The exported graph.
        plan: The build.
    """
    if DecoderInterface.of(model) is None:
        return section
    if plan.layout.for_browsers:
        # Browsers run a file on WebGPU, too, whose kernel of QMoE takes neither zero points nor other shares.
        section = section.with_disabled(["mixture_of_experts_fusion"])
    variant = fused_attention_variant(plan)
    if is_for_onnxruntime(plan) or _has_coded_weights(model):
        return section.with_decoder_fusions(variant)
    return section.with_attention_variant(variant)


def is_fused(model: Path, plan: BuildPlan) -> bool:
    """Return True if a build fused a graph without a request."""
    graph = load_by_reference(model)
    return (is_for_onnxruntime(plan) or _has_coded_weights(graph)) and DecoderInterface.of(graph) is not None


def note_on_bfloat16(model: Path) -> str:
    """Return a note on a decoder with bfloat16 inputs, such as its cache; ``""`` for a fused or another decoder."""
    graph = load_by_reference(model).graph
    is_other = all(value.dtype != ir.DataType.BFLOAT16 for value in graph.inputs)
    if is_other or any(node.op_type == "GroupQueryAttention" for node in graph):
        return ""
    return (
        "The decoder computes in bfloat16: its attention and its normalizations stay as exported, since only CUDA "
        f"has kernels of the fused operators in bfloat16 ({opt.dtype} fp16, or {opt.layout} genai with {opt.ep} cuda)."
    )


def _has_coded_weights(model: ir.Model) -> bool:
    """Return True if a graph has weights in few bits, as coded tensors or in operators of ONNX Runtime."""
    if any(isinstance(value.const_value, CodedTensor) for value in model.graph.initializers.values()):
        return True
    return any(node.domain == DOMAIN and QUANTIZATION_KEY in node.metadata_props for node in model.graph)
