"""Brings a graph into the form that engines quantize, and refuses selectors without effect in it.

The form is at the opset that engines need, with batch normalizations in the weights and activations in separate nodes.
It is the same whether a file is written or modules are measured. Quantizes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from winml.modelkit.errors import UsageError
from winml.modelkit.normalize.opset_conversion import convert_opset
from winml.modelkit.normalize.pipeline import normalize
from winml.modelkit.onnx.bundle import is_one_of_several
from winml.modelkit.onnx.cutting import GraphModules
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import optimize
from winml.modelkit.options import parse_options
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.placements import placement_for
from winml.modelkit.quantize.planning import SEPARABLE_LAYERS, refuse_idle_selectors
from winml.modelkit.quantize.precisions import MODES
from winml.modelkit.transform.module_functions import graph_modules
from winml.modelkit.words import count_noun

_FOLDING = ("conv_batch_norm_fusion", "matmul_batch_norm_fusion")
"""Capabilities of the optimizer that compute a batch normalization into the weights before it."""


@dataclass(frozen=True)
class PreparedGraph:
    """A model in the form that engines quantize."""

    model: ir.Model
    modules: GraphModules
    notes: tuple[str, ...]
    """Changes of the graph, and selectors without effect in this part of a model."""


def prepare(model: ir.Model, options: QuantizeOptions, root: str) -> PreparedGraph:
    """Bring a model into the form that options need, and refuse selectors without effect in it.

    Args:
        model: The model, in its plain form; used up.
        options: Options of the quantization.
        root: Name of the root if node names are all that states modules.

    Raises:
        OptimizeError: the opset could not be converted.
        UsageError: a selector has no effect, and the model is not one of several parts.
    """
    notes: list[str] = []
    modes = [MODES[mode] for mode in options.modes()]
    least = max((rules.least_opset for rules in modes), default=0)
    if model.opset_imports.get("", least) < least:
        notes.append(f"Opset {model.opset_imports['']} was raised to {least}, which the quantized operators require.")
        model, converted = convert_opset(model, least)
        # Conversion makes constants and nodes without names.
        notes += [*converted, *normalize(model).notes]
    notes += _separate_layers(model, frozenset().union(*(rules.operators for rules in modes)))
    if any(rules.needs_ranges for rules in modes):
        if any(node.op_type == "BatchNormalization" for node in model.graph):
            # No integer kernel computes one.
            folded = optimize(model, parse_options(OptimizeOptions, dict.fromkeys(_FOLDING, True), "folding"))
            if count := sum(folded.fired.values()):
                normalizations = count_noun(count, "batch normalization", "were")
                notes.append(f"{normalizations} folded into the weights of the preceding layers.")
            model, notes = folded.model, [*notes, *folded.notes]
        if names := placement_for(options.ep).fusions:
            fused = optimize(model, parse_options(OptimizeOptions, dict.fromkeys(names, True), "fusing"))
            counts = ", ".join(f"{name} {count}" for name, count in fused.fired.items() if count)
            if counts:
                notes.append(f"Operators that {options.ep} supports as one were fused: {counts}.")
            model, notes = fused.model, [*notes, *fused.notes]
    modules = graph_modules(model, root)
    return PreparedGraph(model, modules, (*notes, *_idle_notes(model, options, modules)))


def _idle_notes(model: ir.Model, options: QuantizeOptions, modules: GraphModules) -> tuple[str, ...]:
    """Refuse selectors without effect; in a part of several, return a note, since another part may have the nodes."""
    if not options.selectors or not (options.modes() or options.kv_cache):
        return ()
    try:
        refuse_idle_selectors(model, options, modules)
    except UsageError as error:
        if not is_one_of_several(model.metadata_props):
            raise
        return (f"{error.message}.",)
    return ()


def _separate_layers(model: ir.Model, operators: frozenset[str]) -> list[str]:
    """Separate activations from layers that have one of the operators, in place; return a note."""
    if not any(SEPARABLE_LAYERS.get(node.op_type) in operators for node in model.graph):
        return []
    from winml.modelkit.quantize.fused_layers import separate_activations  # few graphs have such layers

    separated = separate_activations(model, operators)
    if not separated:
        return []
    counts = ", ".join(f"{operator} {count}" for operator, count in separated.items())
    return [f"Activations were separated from layers, which can be quantized without them: {counts}."]
