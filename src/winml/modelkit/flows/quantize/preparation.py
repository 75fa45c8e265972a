"""Brings a graph into the form that engines quantize: at the opset they need, batch normalizations in the weights.

The form is the same whether a file is written or modules are measured. Quantizes nothing.
"""

from __future__ import annotations

import onnx_ir as ir

from winml.modelkit.normalize.pipeline import normalize
from winml.modelkit.optimize.opset_conversion import convert_opset
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import optimize
from winml.modelkit.options import parse_options
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.precisions import MODES

__all__ = ["prepare"]

_FOLDING = ("conv_batch_norm_fusion", "matmul_batch_norm_fusion")
"""Capabilities of the optimizer that compute a batch normalization into the weights before it."""


def prepare(model: ir.Model, options: QuantizeOptions) -> tuple[ir.Model, list[str]]:
    """Return a model as options need it before it is quantized, and what was done.

    Args:
        model: The model, in its plain form; used up.
        options: What is asked for.

    Raises:
        OptimizeError: it could not be brought to the opset.
    """
    notes: list[str] = []
    least = max((MODES[mode].least_opset for _, mode in options.requested_modes()), default=0)
    if model.opset_imports.get("", least) < least:
        notes.append(f"Opset {model.opset_imports['']} was raised to {least}, which quantized operators need.")
        model, told = convert_opset(model, least)
        # Conversion makes constants and nodes without names.
        notes += [*told, *normalize(model).notes]
    if options.needs_ranges:
        model, folded = _fold_normalizations(model)
        notes += folded
    return model, notes


def _fold_normalizations(model: ir.Model) -> tuple[ir.Model, list[str]]:
    """Compute batch normalizations into the weights before them: no integer kernel computes one."""
    if not any(node.op_type == "BatchNormalization" for node in model.graph):
        return model, []
    folded = optimize(model, parse_options(OptimizeOptions, dict.fromkeys(_FOLDING, True), "folding"))
    count = sum(folded.fired.values())
    words = f"{count} batch normalizations were computed into the weights of the layers before them."
    return folded.model, [*([words] if count else []), *folded.notes]
