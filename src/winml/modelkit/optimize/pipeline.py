"""Makes a graph cheaper with the same answer, by engines in an order that matters.

The pipeline is data: engines in order, each with the reason for its place. What each may do is decided by the options;
what it did is counted, and that no tag was lost is checked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import onnx_ir as ir

from winml.modelkit.errors import OptimizeError
from winml.modelkit.graph.fingerprint import fingerprint
from winml.modelkit.graph.stage import StageResult
from winml.modelkit.hierarchy.coverage import Coverage, measure_coverage
from winml.modelkit.optimize.capabilities import CAPABILITIES, Capability, Engine
from winml.modelkit.optimize.node_naming import ModuleScopes, name_new_nodes
from winml.modelkit.optimize.node_ordering import order_nodes
from winml.modelkit.optimize.onnxruntime_engine import rewrite_with_onnxruntime
from winml.modelkit.optimize.operator_counts import GraphCensus
from winml.modelkit.optimize.opset_conversion import convert_opset
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.rewrite_engine import rewrite_with_passes
from winml.modelkit.optimize.selected_part import Rewrite, rewrite_selected

__all__ = ["OptimizeResult", "optimize"]


@dataclass(frozen=True)
class OptimizeResult(StageResult):
    """The result of the optimizer."""

    fired: Mapping[str, int] = field(default_factory=dict)
    """Capability that was on → how often it fired; those that only take away are not counted one by one."""
    fired_in: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Capability that was on → tag of a module → how often it fired there, or how many nodes went there."""


class _EngineRun(Protocol):
    """Takes the model, the capabilities that are on and those of them that may make operators of ONNX Runtime."""

    def __call__(
        self, model: ir.Model, capabilities: Sequence[Capability], contrib: Sequence[Capability]
    ) -> tuple[ir.Model, tuple[str, ...]]:
        """Return the model changed, in place or not, and notes."""


PIPELINE: tuple[tuple[Engine, _EngineRun], ...] = (
    # First: ONNX Runtime takes apart what an attention is made of (products become Gemm, scales go into them).
    ("winml", rewrite_with_passes),
    ("onnxruntime", rewrite_with_onnxruntime),
)
"""Who works in which order, and why."""


def optimize(model: ir.Model, options: OptimizeOptions, selected: Collection[str] | None = None) -> OptimizeResult:
    """Make a model cheaper with the same answer.

    Args:
        model: The model, in its plain form; used up: the result may hold it, or a new one.
        options: What may be done.
        selected: Names of the only nodes that may change, of which every fusion consists; None: all.

    Returns:
        The optimized model, which capabilities fired and how often, and its coverage.

    Raises:
        UsageError: a capability was enabled by name that the execution provider has no operators for, or none at the
            opset of the graph.
        OptimizeError: an engine failed, or tags were lost.
    """
    enabled = list(options.enabled())
    opset = options.opset or model.opset_imports.get("")
    if opset is not None:
        options.refuse_older_opset(opset)
    if options.is_empty:
        return OptimizeResult(
            model, changed=False, notes=_provider_notes(model, options), coverage=measure_coverage(model)
        )
    order_nodes(model)
    coverage_before, fingerprint_before = measure_coverage(model), fingerprint(model)
    scopes = ModuleScopes(model)
    notes: list[str] = []
    fired: dict[str, int] = {}
    fired_in: dict[str, dict[str, int]] = {}
    interface = _interface_names(model)
    if options.opset is not None:
        model, engine_notes = convert_opset(model, options.opset)
        notes += engine_notes
    for engine, run in PIPELINE:
        engine_capabilities = [entry for entry in enabled if entry.engine == engine]
        if not engine_capabilities:
            continue
        before = GraphCensus.of(model)
        with_contrib = [entry for entry in engine_capabilities if options.uses_contrib(entry)]
        model, engine_notes = _run_engine(
            model, partial(run, capabilities=engine_capabilities, contrib=with_contrib), selected, scopes
        )
        notes += engine_notes
        after = GraphCensus.of(model)
        counts = {entry.name: after.fired(entry, before) for entry in engine_capabilities}
        fired |= {name: count for name, count in counts.items() if count is not None}
        fired_in |= {entry.name: after.fired_in(entry, before) for entry in engine_capabilities}
    # Last: carrying tags reads in names which node was fused into which.
    name_new_nodes(model, scopes)
    order_nodes(model)
    coverage = measure_coverage(model)
    _refuse_lost_tags(coverage_before, coverage)
    _refuse_changed_interface(interface, _interface_names(model))
    return OptimizeResult(
        model,
        changed=fingerprint(model) != fingerprint_before,
        notes=tuple(dict.fromkeys((*notes, *_provider_notes(model, options)))),
        coverage=coverage,
        fired=fired,
        fired_in=fired_in,
    )


def _run_engine(
    model: ir.Model, run: Rewrite, selected: Collection[str] | None, scopes: ModuleScopes
) -> tuple[ir.Model, tuple[str, ...]]:
    """Run an engine on the graph, or on the selected nodes of it."""
    if selected is None:
        return run(model)
    # What the engine before made is of selected nodes.
    names = {*selected, *(GraphCensus.of(model).names - scopes.names)}
    return model, rewrite_selected(model, names, run)


def _provider_notes(model: ir.Model, options: OptimizeOptions) -> tuple[str, ...]:
    """Say which operators of ONNX Runtime are in the graph that the execution provider does not have."""
    if options.ep is None:
        return ()
    makers = [entry for entry in CAPABILITIES.values() if entry.providers]
    foreign = []
    for name in sorted(GraphCensus.of(model).operators):
        if name.startswith(_CONTRIB):
            # What none of the capabilities makes runs at best where the others do.
            entries = [entry for entry in makers if name in entry.makes] or makers
            if not any(options.ep in entry.providers for entry in entries):
                foreign.append(name.removeprefix(_CONTRIB))
    if not foreign:
        return ()
    words = f"{', '.join(foreign)} (com.microsoft)"
    return (f"The graph has {words}, which {options.ep} is not known to run: another provider does, or none.",)


_CONTRIB = "com.microsoft:"


def _refuse_lost_tags(before: Coverage, after: Coverage) -> None:
    if before.is_complete and before.nodes and not after.is_complete:
        raise OptimizeError(
            f"optimizing left {after.nodes - after.tagged} of {after.nodes} nodes without a tag, where all had one",
            hint="This is a mistake in winml: please report it.",
        )


def _refuse_changed_interface(before: _Interface, after: _Interface) -> None:
    if before != after:
        raise OptimizeError(
            "optimizing changed inputs and outputs of the graph "
            f"from {_interface_words(before)} to {_interface_words(after)}",
            hint="This is a mistake in winml: please report it.",
        )


_Interface = tuple[tuple[str, ...], tuple[str, ...]]


def _interface_names(model: ir.Model) -> _Interface:
    """Return the names of inputs and outputs; initializers that old files list as inputs may come or go."""
    inputs = (value.name for value in model.graph.inputs if value.name not in model.graph.initializers)
    return tuple(map(str, inputs)), tuple(str(value.name) for value in model.graph.outputs)


def _interface_words(interface: _Interface) -> str:
    return " → ".join(", ".join(names) for names in interface)
