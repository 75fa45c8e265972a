"""Brings a graph into the form that engines quantize: at the opset they need, batch normalizations in the weights.

The form is the same whether a file is written or modules are measured. Quantizes nothing.
"""

from __future__ import annotations

import onnx_ir as ir

from winml.modelkit.normalize.pipeline import normalize
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import convert_opset, optimize
from winml.modelkit.options import parse_options
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.placements import placement_for
from winml.modelkit.quantize.precisions import MODES

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
        notes.append(f"Opset {model.opset_imports['']} was raised to {least}, which the quantized operators require.")
        model, reported = convert_opset(model, least)
        # Conversion makes constants and nodes without names.
        notes += [*reported, *normalize(model).notes]
    if folds_normalizations(model, options):
        model, folded = _fold_normalizations(model)
        notes += folded
    if any(MODES[mode].needs_ranges for mode in options.modes()):
        model, fused = _fuse_for_provider(model, options)
        notes += fused
    return model, notes


def _fuse_for_provider(model: ir.Model, options: QuantizeOptions) -> tuple[ir.Model, list[str]]:
    """Make the operators that the provider takes as one, such as a GELU, of those an exporter wrote."""
    names = placement_for(options.ep).fusions
    if not names:
        return model, []
    fused = optimize(model, parse_options(OptimizeOptions, dict.fromkeys(names, True), "fusing"))
    counts = ", ".join(f"{name} {count}" for name, count in fused.fired.items() if count)
    words = f"Operators that {options.ep} supports as one were fused: {counts}."
    return fused.model, [*([words] if counts else []), *fused.notes]


def folds_normalizations(model: ir.Model, options: QuantizeOptions) -> bool:
    """Return True if batch normalizations of a model are folded before it is quantized."""
    has_ranges = any(MODES[mode].needs_ranges for mode in options.modes())
    return has_ranges and any(node.op_type == "BatchNormalization" for node in model.graph)


def _fold_normalizations(model: ir.Model) -> tuple[ir.Model, list[str]]:
    """Compute batch normalizations into the weights before them: no integer kernel computes one."""
    folded = optimize(model, parse_options(OptimizeOptions, dict.fromkeys(_FOLDING, True), "folding"))
    count = sum(folded.fired.values())
    words = f"{count} batch normalizations were folded into the weights of the preceding layers."
    return folded.model, [*([words] if count else []), *folded.notes]
