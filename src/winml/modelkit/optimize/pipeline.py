"""Optimizes a graph without changing its outputs, by engines in an order that matters; converts its opset first.

The pipeline is data: engines in order, each with the reason for its place. What each may do is decided by the options;
what it did is counted, and that no tag was lost is checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import onnx
import onnx_ir as ir

from winml.modelkit.errors import OptimizeError, UsageError
from winml.modelkit.normalize.opset_conversion import convert_opset
from winml.modelkit.onnx.fingerprint import fingerprint
from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.onnx.stage import StageResult
from winml.modelkit.onnx.validity import OLDEST_OPSET, find_loop
from winml.modelkit.optimize.capabilities import CAPABILITIES, Engine
from winml.modelkit.optimize.census import GraphCensus
from winml.modelkit.optimize.graph_matching import CONTRIB_DOMAIN
from winml.modelkit.optimize.onnxruntime_engine import rewrite_with_onnxruntime
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pass_engine import rewrite_with_passes
from winml.modelkit.optimize.selected_nodes import Rewrite, rewrite_selected
from winml.modelkit.tags.address import common_start
from winml.modelkit.tags.tagging import Coverage, all_nodes, measure_coverage, node_graphs, read_tag


class _ModuleScopes:
    """The name prefix of the nodes of each module, read from a tagged graph.

    Profilers record only the name of a node, so the name of a new node must tell the module.
    """

    def __init__(self, model: ir.Model) -> None:
        """Read the prefixes; an untagged graph has none."""
        self.names = {node.name for node in all_nodes(model)}
        scopes_by_module: defaultdict[str, list[list[str]]] = defaultdict(list)
        for node in all_nodes(model):
            tag = read_tag(node)
            if tag is None or not (node.name or "").startswith("/"):
                continue
            scope_segments = (node.name or "").split("/")[:-1]
            # A node in a module is also in the modules around it.
            modules = tag.module.split(".") if tag.module else []
            for depth in range(1, len(modules) + 1):
                scopes_by_module[".".join(modules[:depth])].append(scope_segments)
        self._scopes: Mapping[str, str] = {
            module: "/".join(common_start(scopes)) for module, scopes in scopes_by_module.items()
        }

    def scope(self, module: str) -> str:
        """Return the name prefix of a module, such as ``/encoder/layer.0``; the root's is empty."""
        return self._scopes.get(module, "")


def _name_new_nodes(model: ir.Model, scopes: _ModuleScopes) -> None:
    """Name the nodes that are not in the graph ``scopes`` was read from, in place.

    A new node whose name already has the prefix of its module keeps the name.
    """
    names = FreshNames((node.name for node in all_nodes(model)), first_number=1)
    for node in all_nodes(model):
        tag = read_tag(node)
        if tag is None or node.name in scopes.names:
            continue
        scope = scopes.scope(tag.module)
        if not (node.name or "").startswith(f"{scope}/"):
            node.name = names.take(f"{scope}/{node.op_type}")


def order_nodes(model: ir.Model) -> None:
    """Put the nodes of the main graph in the order in which its outputs need them, in place.

    Depth first from the first output, so that related nodes are adjacent. Unused nodes come last. Engines write nodes
    in different orders: without one order, equal graphs would be different files, and a second run could not be
    compared with the first.

    Raises:
        OptimizeError: nodes need their own result, so no order is right.
    """
    graph = model.graph
    placed: dict[ir.Node, None] = {}
    makers = (value.producer() for value in graph.outputs)
    if loop := find_loop([*filter(None, makers), *graph], lambda node: _producers_read_by(node, graph), placed):
        raise OptimizeError(
            f"node {loop[0].name} ({loop[0].op_type}) depends on its own output", hint="Disable an optimization."
        )
    nodes = list(placed)
    if nodes != list(graph):
        graph.remove(nodes)
        graph.extend(nodes)


def _producers_read_by(node: ir.Node, graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the nodes of ``graph`` whose values a node reads, its subgraphs included."""
    for value in _read_values(node):
        producer = value.producer() if value is not None else None
        if producer is not None and producer.graph is graph:
            yield producer


def _read_values(node: ir.Node) -> Iterator[ir.Value | None]:
    yield from node.inputs
    for graph in node_graphs(node):
        # A subgraph may return a value of the outer graph.
        yield from graph.outputs
        for inner in graph:
            yield from _read_values(inner)


@dataclass(frozen=True)
class OptimizeResult(StageResult):
    """The result of the optimizer."""

    fired: Mapping[str, int] = field(default_factory=dict)
    """Capability that was on → how often it fired; those that only take away are not counted one by one."""
    fired_in: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Capability that was on → tag of a module → how often it fired there, or how many nodes went there."""


# The passes of winml first: ONNX Runtime takes apart what an attention is made of (products become Gemm, scales go into
# them).
_ENGINES: tuple[Engine, ...] = ("winml", "onnxruntime")


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
    scopes = _ModuleScopes(model)
    notes: list[str] = []
    fired: dict[str, int] = {}
    fired_in: dict[str, dict[str, int]] = {}
    interface = _interface_words(model)
    if options.opset is not None:
        model, engine_notes = convert_opset(model, options.opset)
        notes += engine_notes
    for engine in _ENGINES:
        capabilities = [entry for entry in enabled if entry.engine == engine]
        if not capabilities:
            continue
        before = GraphCensus.of(model)
        rewrite: Rewrite = partial(rewrite_with_passes, capabilities=capabilities)
        if engine == "onnxruntime":
            contrib = [entry for entry in capabilities if options.uses_contrib(entry)]
            rewrite = partial(rewrite_with_onnxruntime, capabilities=capabilities, contrib=contrib)
        if selected is None:
            model, engine_notes = rewrite(model)
        else:
            # What the engine before made is of selected nodes.
            engine_notes = rewrite_selected(model, {*selected, *(before.names - scopes.names)}, rewrite)
        notes += engine_notes
        after = GraphCensus.of(model)
        counts = {entry.name: after.fired(entry, before) for entry in capabilities}
        fired |= {name: count for name, count in counts.items() if count is not None}
        fired_in |= {entry.name: after.fired_in(entry, before) for entry in capabilities}
    # Last: carrying tags reads in names which node was fused into which.
    _name_new_nodes(model, scopes)
    order_nodes(model)
    coverage = measure_coverage(model)
    _refuse_lost_tags(coverage_before, coverage)
    if interface != _interface_words(model):
        raise OptimizeError(
            f"optimizing changed inputs and outputs of the graph from {interface} to {_interface_words(model)}",
            hint="This is a bug in winml: please report it.",
        )
    return OptimizeResult(
        model,
        changed=fingerprint(model) != fingerprint_before,
        notes=tuple(dict.fromkeys((*notes, *_provider_notes(model, options)))),
        coverage=coverage,
        fired=fired,
        fired_in=fired_in,
    )


def _provider_notes(model: ir.Model, options: OptimizeOptions) -> tuple[str, ...]:
    """Say which operators of ONNX Runtime are in the graph that the execution provider does not have."""
    if options.ep is None:
        return ()
    prefix = f"{CONTRIB_DOMAIN}:"
    makers = [entry for entry in CAPABILITIES.values() if entry.providers]
    foreign = []
    for name in sorted(GraphCensus.of(model).operators):
        if name.startswith(prefix):
            # What none of the capabilities makes runs at best where the others do.
            entries = [entry for entry in makers if name in entry.makes] or makers
            if not any(options.ep in entry.providers for entry in entries):
                foreign.append(name.removeprefix(prefix))
    if not foreign:
        return ()
    words = f"{', '.join(foreign)} (com.microsoft)"
    return (
        f"The graph has {words}, which {options.ep} is not known to support: a different provider runs them, or none.",
    )


def _refuse_lost_tags(before: Coverage, after: Coverage) -> None:
    if before.is_complete and before.nodes and not after.is_complete:
        raise OptimizeError(
            f"optimizing left {after.nodes - after.tagged} of {after.nodes} nodes without a tag, although all "
            "had one before",
            hint="This is a bug in winml: please report it.",
        )


def _interface_words(model: ir.Model) -> str:
    """Return the names of inputs and outputs; initializers that old files list as inputs may come or go."""
    inputs = (str(value.name) for value in model.graph.inputs if value.name not in model.graph.initializers)
    return f"{', '.join(inputs)} → {', '.join(str(value.name) for value in model.graph.outputs)}"


def refuse_unknown_opset(target: int | None) -> None:
    """Refuse a version of ONNX's operators that is not among those the installed onnx knows.

    Raises:
        UsageError: names the versions there are.
    """
    newest = onnx.defs.onnx_opset_version()
    if target is not None and not OLDEST_OPSET <= target <= newest:
        raise UsageError(
            f"opset {target}: ONNX has no such opset",
            hint=f"Use an opset from {OLDEST_OPSET} to {newest}, the range that onnx {onnx.__version__} supports.",
        )
