"""Quantizes a graph: plans, lets the engines work, brings the tags back, and counts what came of it.

Which engine works for which mode is data. What was asked for and what came of it stand in the file, module by module.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir

from winml.modelkit.errors import QuantizeError
from winml.modelkit.graph.stage import StageResult
from winml.modelkit.hierarchy.carry.carrying import carry_tags
from winml.modelkit.hierarchy.coverage import measure_coverage
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.quantize.dynamic_engine import quantize_dynamically
from winml.modelkit.quantize.engine_task import EngineTask
from winml.modelkit.quantize.module_precision import ModulePrecision
from winml.modelkit.quantize.node_records import mark_quantized_nodes
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.planning import GraphModules, PlannedNode, plan_quantization
from winml.modelkit.quantize.precisions import Mode
from winml.modelkit.quantize.weight_checks import has_non_finite_scales, refuse_non_finite_weights, shared_weight_notes

__all__ = ["QuantizeResult", "quantize"]


@dataclass(frozen=True)
class QuantizeResult(StageResult):
    """The result of quantizing."""

    modules: tuple[ModulePrecision, ...] = ()
    """Modules that have nodes with weights, in the order of the graph."""

    @property
    def quantized(self) -> int:
        """Number of nodes with a weight that were quantized."""
        return sum(module.quantized for module in self.modules)

    @property
    def left(self) -> int:
        """Number of nodes with a weight that were not."""
        return sum(sum(module.left.values()) for module in self.modules)


ENGINES: Mapping[Mode, Callable[[ir.Model, EngineTask], ir.Model]] = {
    "dynamic": quantize_dynamically,
}
"""Who does it for each mode."""


def quantize(model: ir.Model, options: QuantizeOptions, modules: GraphModules) -> QuantizeResult:
    """Let modules of a graph compute with fewer bits.

    Args:
        model: The model, in its plain form; used up.
        options: What is asked for.
        modules: The module of each node.

    Returns:
        The quantized model, and what came of it in each module.

    Raises:
        InputError: the graph is quantized already.
        UsageError: a selector names no module, a precision goes with no mode, or nothing is left to quantize.
        QuantizeError: a weight has NaN or infinite values, an engine failed, or it quantized nothing.
    """
    plan = plan_quantization(model, options, modules)
    quantized = model
    try:
        for (mode, precision), nodes in plan.groups().items():
            quantized = _run_engine(quantized, mode, EngineTask(nodes, precision, options))
    except QuantizeError:
        refuse_non_finite_weights(model, plan.nodes)  # the likeliest reason, with its module
        raise
    if has_non_finite_scales(model, quantized):
        refuse_non_finite_weights(model, plan.nodes)
    carried = carry_tags(model, quantized)
    reached = mark_quantized_nodes(model, quantized, plan.nodes)
    outcome = _module_outcomes(plan.nodes, reached)
    if not any(module.quantized for module in outcome):
        raise QuantizeError(
            "no node was quantized: the engine has no form for any of them",
            hint="Choose another --mode or --precision.",
        )
    quantized.metadata_props[QUANTIZATION_KEY] = json.dumps(_record(options, outcome), ensure_ascii=False)
    notes = (*carried.notes, *shared_weight_notes(model, reached, quantized))
    return QuantizeResult(quantized, changed=True, notes=notes, coverage=measure_coverage(quantized), modules=outcome)


def _run_engine(model: ir.Model, mode: Mode, task: EngineTask) -> ir.Model:
    try:
        return ENGINES[mode](model, task)
    except (ValueError, RuntimeError, TypeError, AssertionError, onnx.shape_inference.InferenceError) as error:
        # The quantizers of ONNX Runtime raise these for what they do not expect.
        raise QuantizeError(
            f"{task.precision.name} ({mode}): ONNX Runtime's quantizer failed: {error}",
            hint="Exclude the modules it fails at with --exclude, or choose another --mode.",
        ) from error


def _module_outcomes(planned: Sequence[PlannedNode], reached: frozenset[str]) -> tuple[ModulePrecision, ...]:
    by_module: defaultdict[tuple[str, str], list[PlannedNode]] = defaultdict(list)
    for node in planned:
        by_module[node.tag, node.requested.name].append(node)
    outcomes = []
    for (tag, requested), nodes in by_module.items():
        left: defaultdict[str, int] = defaultdict(int)
        for node in nodes:
            if node.name not in reached:
                left[node.reason or f"{node.mode} left this {node.operator} as it was"] += 1
        outcomes.append(ModulePrecision(tag, requested, sum(node.name in reached for node in nodes), dict(left)))
    return tuple(outcomes)


def _record(options: QuantizeOptions, outcome: Sequence[ModulePrecision]) -> dict[str, Any]:
    requested = {
        "precision": options.base.name,
        **options.model_dump(mode="json", exclude_none=True, exclude_defaults=True),
    }
    return {"requested": requested, "modules": [module.as_record() for module in outcome]}
