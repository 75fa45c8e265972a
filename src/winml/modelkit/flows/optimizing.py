"""Optimizes a graph in memory, or those of its modules that options select. Used by what writes and what checks."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from winml.modelkit.flows.graph_modules import selected_nodes
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import OptimizeResult, optimize

__all__ = ["optimize_within"]


def optimize_within(model: ir.Model, options: OptimizeOptions) -> OptimizeResult:
    """Optimize a model, or those of its modules that options select.

    Raises:
        UsageError: a selector names no module.
        OptimizeError: an engine failed.
    """
    if not options.is_limited or options.is_empty:
        return optimize(model, options)
    names, notes = selected_nodes(model, options.module, options.exclude)
    before = sum(1 for _ in model.graph)
    result = optimize(model, options, names)
    left = f"Only {len(names)} of {before} nodes were given to the optimizer, those of the selected modules."
    return replace(result, notes=(*notes, left, *result.notes))
