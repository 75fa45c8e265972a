"""Quantizes a graph: plans, lets the engines work, brings the tags back, and counts what came of it.

Which engine works for which mode is data. What was asked for and what came of it stand in the file, module by module.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import onnx
import onnx_ir as ir

from winml.modelkit.errors import InternalError, QuantizeError
from winml.modelkit.graph.module_parts import GraphModules
from winml.modelkit.graph.stage import StageResult
from winml.modelkit.hierarchy.carry.carrying import carry_tags
from winml.modelkit.hierarchy.coverage import all_nodes, measure_coverage
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.quantize.dynamic.engine import quantize_dynamically
from winml.modelkit.quantize.engine_task import EngineTask
from winml.modelkit.quantize.half_floats.engine import convert_floats
from winml.modelkit.quantize.module_precision import ModulePrecision, float_name
from winml.modelkit.quantize.node_records import mark_quantized_nodes
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.planning import PlannedNode, QuantizationPlan, constant_weight, plan_quantization
from winml.modelkit.quantize.precisions import FLOAT32, MODES, Mode, Precision
from winml.modelkit.quantize.qdq_engine import quantize_statically
from winml.modelkit.quantize.qdq_placement import QdqPlacement, place_quantized_values
from winml.modelkit.quantize.weight_checks import has_non_finite_scales, refuse_non_finite_weights, shared_weight_notes
from winml.modelkit.quantize.weight_only.engine import algorithm_notes, quantize_weights

__all__ = ["QuantizeResult", "RangeSource", "quantize"]


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


class RangeSource(Protocol):
    """Finds the ranges of activations."""

    def measure(self, model: ir.Model, names: Sequence[str]) -> Mapping[str, tuple[float, float]]:
        """Return smallest and largest value of values of a model, by name."""

    def as_record(self) -> Mapping[str, Any]:
        """Return what the ranges come from, JSON-ready."""


ENGINES: Mapping[Mode, Callable[[ir.Model, EngineTask], ir.Model]] = {
    "dynamic": quantize_dynamically,
    "qdq": quantize_statically,
    "weight-only": quantize_weights,
    "float": convert_floats,
}
"""Who does it for each mode."""


def quantize(
    model: ir.Model, options: QuantizeOptions, modules: GraphModules, calibration: RangeSource | None = None
) -> QuantizeResult:
    """Let modules of a graph compute with fewer bits.

    Args:
        model: The model, in its plain form; used up.
        options: What is asked for.
        modules: The module of each node.
        calibration: Finds the ranges of activations, where a mode needs them.

    Returns:
        The quantized model, and what came of it in each module.

    Raises:
        InputError: the graph is quantized already.
        UsageError: a selector names no module, a precision goes with no mode, or nothing is left to quantize.
        QuantizeError: a weight has NaN or infinite values, an engine failed, or it quantized nothing.
    """
    plan = plan_quantization(model, options, modules)
    placements = _placements(model, plan)
    measured = [name for placement in placements.values() for name in placement.measured]
    ranges: Mapping[str, tuple[float, float]] = {}
    if measured:
        if calibration is None:
            raise InternalError("a mode needs the ranges of activations, and nothing was given that measures them")
        ranges = calibration.measure(model, tuple(dict.fromkeys(measured)))
    quantized = model
    try:
        for (mode, precision), nodes in plan.groups().items():
            placement = placements.get((mode, precision), QdqPlacement())
            quantized = _run_engine(quantized, mode, EngineTask(nodes, precision, options, placement, ranges))
    except QuantizeError:
        refuse_non_finite_weights(model, plan.nodes)  # the likeliest reason, with its module
        raise
    if has_non_finite_scales(model, quantized):
        refuse_non_finite_weights(model, plan.nodes)
    carried = carry_tags(model, quantized)
    reached = mark_quantized_nodes(model, quantized, plan.nodes)
    notes = (*carried.notes, *shared_weight_notes(model, reached, quantized), *algorithm_notes(quantized, options))
    outcome = _module_outcomes(model, plan.nodes, reached)
    if not any(module.quantized for module in outcome):
        reasons = dict.fromkeys(reason for module in outcome for reason in module.left)
        raise QuantizeError(
            f"no node was quantized: {'; '.join(reasons) or 'none of those to be changed has a weight'}",
            hint="Choose another --mode or --precision.",
        )
    quantized.metadata_props[QUANTIZATION_KEY] = json.dumps(
        _record(options, outcome, calibration if measured else None), ensure_ascii=False
    )
    return QuantizeResult(quantized, changed=True, notes=notes, coverage=measure_coverage(quantized), modules=outcome)


def _placements(model: ir.Model, plan: QuantizationPlan) -> dict[tuple[Mode, Precision], QdqPlacement]:
    """Return which values of the model become numbers of few bits, for each group whose mode needs their ranges."""
    return {
        (mode, precision): place_quantized_values(model.graph, nodes, plan.others.get((mode, precision), frozenset()))
        for (mode, precision), nodes in plan.groups().items()
        if MODES[mode].needs_ranges
    }


def _run_engine(model: ir.Model, mode: Mode, task: EngineTask) -> ir.Model:
    try:
        return ENGINES[mode](model, task)
    except (ValueError, RuntimeError, TypeError, AssertionError, onnx.shape_inference.InferenceError) as error:
        # The quantizers of ONNX Runtime raise these for what they do not expect.
        raise QuantizeError(
            f"{task.precision.name} ({mode}): ONNX Runtime's quantizer failed: {error}",
            hint="Exclude the modules it fails at with --exclude, or choose another --mode.",
        ) from error


def _module_outcomes(
    model: ir.Model, planned: Sequence[PlannedNode], reached: frozenset[str]
) -> tuple[ModulePrecision, ...]:
    weights = {node.name: constant_weight(node) for node in all_nodes(model)}
    by_module: defaultdict[tuple[str, str], list[PlannedNode]] = defaultdict(list)
    for node in planned:
        if not node.has_weight:
            continue
        by_module[node.tag, node.requested.name].append(node)
    outcomes = []
    for (tag, requested), nodes in by_module.items():
        left: defaultdict[str, int] = defaultdict(int)
        kept: dict[str, None] = {}
        for node in nodes:
            if node.name not in reached:
                left[node.reason or f"{node.mode} left this {node.operator} as it was"] += 1
                weight = weights.get(node.name)
                kept[float_name(weight.dtype.name if weight is not None and weight.dtype is not None else "")] = None
        quantized = len(nodes) - sum(left.values())
        outcomes.append(ModulePrecision(tag, requested, quantized, dict(left), tuple(kept) or (FLOAT32,)))
    return tuple(outcomes)


def _record(
    options: QuantizeOptions, outcome: Sequence[ModulePrecision], calibration: RangeSource | None
) -> dict[str, Any]:
    # Where the data lay on this machine says nothing on others; what is to be said of it stands in the calibration.
    requested = {
        "precision": options.base.name,
        **options.model_dump(mode="json", exclude_none=True, exclude_defaults=True, exclude={"calibration_data"}),
    }
    calibrated = {} if calibration is None else {"calibration": dict(calibration.as_record())}
    return {"requested": requested, **calibrated, "modules": [module.as_record() for module in outcome]}
