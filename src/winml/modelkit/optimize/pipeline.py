"""Optimization of a graph without changing its outputs, by engines in a fixed order, after an opset conversion.

The pipeline is data: engines in order, each with the reason for its position. The options decide the capabilities of
each engine; their effects are counted, and lost tags are an error.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import onnx_ir as ir
from onnx_ir.passes import common

from winml.modelkit.errors import OptimizeError, UsageError
from winml.modelkit.normalize.opset_conversion import convert_opset
from winml.modelkit.onnx.fingerprint import fingerprint
from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.onnx.stage import DeclaredPass, GraphPass, StageResult, run_passes
from winml.modelkit.onnx.validity import find_loop
from winml.modelkit.onnx.widening import computes_in
from winml.modelkit.optimize.attention_fusion import guard_by_masks
from winml.modelkit.optimize.capabilities import CAPABILITIES, Capability, Engine, Operators
from winml.modelkit.optimize.float32_twin import Float32Twin
from winml.modelkit.optimize.graph_matching import CONTRIB_DOMAIN
from winml.modelkit.optimize.onnxruntime_engine import rewrite_with_onnxruntime
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.selected_nodes import Rewrite, rewrite_selected
from winml.modelkit.optimize.standard_operators import write_standard_operators
from winml.modelkit.ort.fused_operators import kernel_types, providers_in_table
from winml.modelkit.tags.address import common_start
from winml.modelkit.tags.carry.carrying import carry_tags
from winml.modelkit.tags.tagging import Coverage, all_nodes, measure_coverage, node_graphs, operator_name, read_tag

_ORDER = (
    # First: position-dependent query rewriting reads their normalization as one operator.
    "simplified_layer_norm_fusion",
    "group_query_attention_fusion",
    "packed_projection_fusion",
    # Last: sizes that two sides of a sum have in common are known again once attentions are fused.
    "skip_simplified_layer_norm_fusion",
)
"""Capabilities whose passes run in this order before all others, which run in registry order."""

_CLEANUP = (
    # A module that is called twice has two attentions with one name.
    DeclaredPass(common.NameFixPass(), "keeps"),
    DeclaredPass(common.RemoveUnusedNodesPass(), "keeps"),
    DeclaredPass(common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0), "keeps"),
)


def _rewrite_with_passes(
    model: ir.Model, capabilities: Sequence[Capability], operators: Operators
) -> tuple[ir.Model, tuple[str, ...]]:
    """Run the passes of capabilities, in place; return the model and notes on its tags.

    Args:
        model: The model.
        capabilities: The enabled capabilities.
        operators: Operators to fuse into.

    Raises:
        OptimizeError: a pass failed, or changed the inputs or outputs of the model.
        UsageError: the pass of a plug-in cannot be imported.
    """
    steps = []
    for entry in sorted(capabilities, key=lambda entry: [*_ORDER, entry.name].index(entry.name)):
        if entry.sets is None:  # else it changes the pass of another capability
            keywords = {
                modifier.sets[1]: True for modifier in capabilities if modifier.sets and modifier.sets[0] == entry.name
            }
            is_standard = operators == "standard" and entry.standard_implementation
            implementation = entry.standard_implementation if is_standard else entry.implementation
            effect: GraphPass = CAPABILITIES.part(entry.name, implementation)(**keywords)
            steps.append(DeclaredPass(effect, effect.tags))
    if run_passes(model, [step for step in steps if step.tags != "drops"], OptimizeError):
        run_passes(model, _CLEANUP, OptimizeError)
    original = model.clone()
    if not run_passes(model, [step for step in steps if step.tags == "drops"], OptimizeError):
        return model, ()
    # The replaced nodes must be removed before the tags of the new nodes are determined.
    run_passes(model, _CLEANUP, OptimizeError)
    return model, carry_tags(original, model).notes


@dataclass(frozen=True)
class GraphCensus:
    """The operators and names of a graph."""

    operators: Counter[str]
    """Operator, with its domain unless ONNX's (``com.microsoft:Gelu``) → number of nodes."""
    names: frozenset[str]
    """Names of nodes and initializers."""
    modules: Mapping[str, Counter[str]] = field(default_factory=dict)
    """Tag → operators of its nodes; of nodes without a tag the empty text."""
    tag_of: Mapping[str, str] = field(default_factory=dict)
    """Name of a node, or of an initializer, → tag of the node, or of the first that reads it."""

    @classmethod
    def of(cls, model: ir.Model) -> GraphCensus:
        """Count a model, subgraphs and functions included."""
        nodes = list(all_nodes(model))
        names = {node.name or "" for node in nodes} | {name for graph in model.graphs() for name in graph.initializers}
        modules: defaultdict[str, Counter[str]] = defaultdict(Counter)
        tag_of: dict[str, str] = {}
        for node in nodes:
            node_tag = read_tag(node)
            tag = "" if node_tag is None else node_tag.tag
            modules[tag][operator_name(node)] += 1
            for name in (node.name, *(value.name for value in node.inputs if value is not None)):
                tag_of.setdefault(name or "", tag)
        return cls(Counter(map(operator_name, nodes)), frozenset(names), modules, tag_of)

    def fired(self, capability: Capability, before: GraphCensus) -> int | None:
        """Return how often a capability fired since ``before``; `None` if uncountable."""
        if capability.makes:
            added = sum(self.operators[name] - before.operators[name] for name in capability.makes)
            return max(0, added)
        if capability.marks:
            return sum(any(mark in name for mark in capability.marks) for name in self.names - before.names)
        return None

    def fired_in(self, capability: Capability, before: GraphCensus) -> dict[str, int]:
        """Return tag → how often a capability fired; for uncountable capabilities, tag → number of removed nodes."""
        counts: Counter[str] = Counter()
        if capability.marks and not capability.makes:
            for name in sorted(self.names - before.names):
                if any(mark in name for mark in capability.marks):
                    counts[self.tag_of.get(name, "")] += 1
            return dict(counts)
        for tag in dict.fromkeys([*before.modules, *self.modules]):
            now, then = self.modules.get(tag, Counter()), before.modules.get(tag, Counter())
            if capability.makes:
                counts[tag] = sum(now[name] - then[name] for name in capability.makes)
            else:
                counts[tag] = then.total() - now.total()
        return {tag: count for tag, count in counts.most_common() if count > 0}


class _ModuleScopes:
    """The name prefix of the nodes of each module, read from a tagged graph.

    Profilers record only the name of a node, so the name of a new node must contain the module.
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
    """Name new nodes after their module, in place; new are nodes missing in the graph of ``scopes``.

    A new node is not renamed if its name already has the prefix of the module.
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
    """Sort the nodes of the main graph in the order of computation of its outputs, in place.

    Depth first from the first output, so that related nodes are adjacent. Unused nodes come last. Engines write nodes
    in different orders: without a fixed order, equal graphs would be different files, and a second run could not be
    compared with the first.

    Raises:
        OptimizeError: the graph has a cycle, so no order exists.
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


def _sort_attributes(model: ir.Model) -> None:
    """Sort the attributes of each node by name, in place: ONNX Runtime writes them in a different order in each run."""
    for node in all_nodes(model):
        attributes = sorted(node.attributes.items())
        node.attributes.clear()
        node.attributes.update(attributes)


def _producers_read_by(node: ir.Node, graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the nodes of ``graph`` whose values a node or its subgraphs read."""
    for value in _walk_inputs(node):
        producer = value.producer() if value is not None else None
        if producer is not None and producer.graph is graph:
            yield producer


def _walk_inputs(node: ir.Node) -> Iterator[ir.Value | None]:
    """Yield the inputs of a node, and all values read or returned in its subgraphs."""
    yield from node.inputs
    for graph in node_graphs(node):
        # A subgraph may return a value of the outer graph.
        yield from graph.outputs
        for inner in graph:
            yield from _walk_inputs(inner)


@dataclass(frozen=True)
class OptimizeResult(StageResult):
    """The result of the optimizer."""

    fired: Mapping[str, int] = field(default_factory=dict)
    """Enabled capability → how often it fired; capabilities that only remove nodes are not counted."""
    fired_in: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Capability that was on → tag of a module → how often it fired there, or how many nodes went there."""


_ATTENTION = f"{CONTRIB_DOMAIN}:GroupQueryAttention"
"""Operator whose kernels decide whether a provider runs fused decoders in bfloat16."""
_UNWIDENED = (
    "Optimizations of ONNX Runtime were not applied: the graph computes in float16, and its functions, subgraphs or "
    "float16 attributes prevent the conversion to float32 in which ONNX Runtime fuses."
)

# Passes of winml run first: ONNX Runtime splits attention patterns (products become Gemm, scales are moved into them).
_ENGINES: tuple[Engine, ...] = ("winml", "onnxruntime")


def optimize(model: ir.Model, options: OptimizeOptions, selected: Collection[str] | None = None) -> OptimizeResult:
    """Optimize a model without changing its outputs.

    Args:
        model: The normalized model; consumed: the result may be this model or a new model.
        options: Options of the optimization.
        selected: Names of the nodes that may be changed and fused; None: all.

    Returns:
        The optimized model, capability → how often it fired, and the tag coverage.

    Raises:
        UsageError: a capability was enabled by name whose operators the execution provider or the opset of the graph
            lacks.
        OptimizeError: an engine failed, or tags were lost.
    """
    requested, float_types = list(options.enabled()), _float_types(model)
    provider = None if options.operators == "standard" else options.ep
    enabled = [entry for entry in requested if options.judging_capability(entry).has_kernels(provider, float_types)]
    idle_notes = _idle_notes([entry for entry in requested if entry not in enabled], options, float_types)
    opset = options.opset_after(model.opset_imports.get(""))
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
    interface = _interface_words(model)
    if opset is not None:
        model, engine_notes = convert_opset(model, opset)
        notes += engine_notes
    narrow = ir.DataType.FLOAT16
    if "bfloat16" in kernel_types(_ATTENTION).get(options.ep or "", ()) and computes_in(model, ir.DataType.BFLOAT16):
        enabled = [entry for entry in enabled if entry.has_kernels(options.ep, {"bfloat16"})]
        narrow = ir.DataType.BFLOAT16
    fuses = any(entry.makes or entry.engine == "onnxruntime" for entry in enabled)
    twin = Float32Twin.of(model, narrow) if fuses else None
    if twin is None and computes_in(model, ir.DataType.FLOAT16):
        # ONNX Runtime's CPU provider would leave a Cast around each operator without a float16 kernel.
        notes += [_UNWIDENED] if any(entry.engine == "onnxruntime" for entry in enabled) else []
        enabled = [entry for entry in enabled if entry.engine != "onnxruntime"]
    engines = _Engines(options, selected, scopes.names)
    done, failure_notes = engines.run_without_failures(model if twin is None else twin.widened, enabled)
    notes += failure_notes
    if options.operators != "standard" and narrow == ir.DataType.FLOAT16 and guard_by_masks(done.model):
        run_passes(done.model, _CLEANUP, OptimizeError)
    if twin is not None:
        twin.restore(done.model)
    if options.operators == "standard":
        write_standard_operators(done.model)
    model, notes = done.model, [*notes, *done.notes]
    # Last: carrying tags reads in names which node was fused into which.
    _name_new_nodes(model, scopes)
    order_nodes(model)
    _sort_attributes(model)
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
        notes=tuple(dict.fromkeys((*notes, *idle_notes, *_provider_notes(model, options)))),
        coverage=coverage,
        fired=done.fired,
        fired_in=done.fired_in,
    )


@dataclass
class _EngineResult:
    """Result of the engines."""

    model: ir.Model
    notes: list[str] = field(default_factory=list)
    fired: dict[str, int] = field(default_factory=dict)
    fired_in: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Engines:
    """The engines, with the settings of one optimization."""

    options: OptimizeOptions
    selected: Collection[str] | None
    """Names of the nodes that may be changed; None: all."""
    known_names: Collection[str | None]
    """Names of the nodes before the optimization."""

    def run_without_failures(
        self, model: ir.Model, enabled: Sequence[Capability]
    ) -> tuple[_EngineResult, tuple[str, ...]]:
        """Run the engines; omit each capability that fails, or whose result ONNX Runtime cannot load.

        Args:
            model: The model; consumed.
            enabled: The enabled capabilities.

        Returns:
            The result, and a note for each omitted capability.

        Raises:
            OptimizeError: an engine fails on the graph without any of its capabilities.
        """
        notes: tuple[str, ...] = ()
        while True:
            original = model.clone()
            try:
                return self.run(model, enabled), notes
            except OptimizeError as error:
                failed = self._find_failed(original, enabled, error)
                if failed is None:
                    raise
                enabled = [entry for entry in enabled if entry.name != failed.name]
                notes = (*notes, f"{failed.name} was omitted, because it failed: {error.message}.")
                model = original

    def run(self, model: ir.Model, enabled: Sequence[Capability]) -> _EngineResult:
        """Run the engines in their order; the model is consumed."""
        done = _EngineResult(model)
        for engine in _ENGINES:
            capabilities = [entry for entry in enabled if entry.engine == engine]
            if not capabilities:
                continue
            before = GraphCensus.of(done.model)
            rewrite: Rewrite = partial(
                _rewrite_with_passes, capabilities=capabilities, operators=self.options.operators
            )
            if engine == "onnxruntime":
                contrib = [entry for entry in capabilities if self.options.uses_contrib(entry)]
                rewrite = partial(rewrite_with_onnxruntime, capabilities=capabilities, contrib=contrib)
            if self.selected is None:
                done.model, engine_notes = rewrite(done.model)
            else:
                # Nodes made by the previous engine replace selected nodes.
                chosen = {*self.selected, *before.names.difference(self.known_names)}
                engine_notes = rewrite_selected(done.model, chosen, rewrite)
            done.notes += engine_notes
            after = GraphCensus.of(done.model)
            counts = {entry.name: after.fired(entry, before) for entry in capabilities}
            done.fired |= {name: count for name, count in counts.items() if count is not None}
            done.fired_in |= {entry.name: after.fired_in(entry, before) for entry in capabilities}
        return done

    def _find_failed(self, model: ir.Model, enabled: Sequence[Capability], error: OptimizeError) -> Capability | None:
        """Return the capability whose pass failed, or made the first graph that ONNX Runtime cannot load.

        Args:
            model: The model before the engines.
            enabled: The enabled capabilities.
            error: The failure.

        Returns:
            The capability; None if the engine fails on the graph without it.
        """
        if error.failed_pass:
            return next((entry for entry in enabled if error.failed_pass in _pass_names(entry)), None)
        ordered = [entry for engine in _ENGINES for entry in enabled if entry.engine == engine]

        def fails(count: int) -> bool:
            try:
                done = self.run(model.clone(), ordered[:count])
                rewrite_with_onnxruntime(done.model, (), ())  # loads the result of the passes
            except OptimizeError:
                return True
            return False

        if fails(0):
            return None
        return ordered[bisect.bisect_left(range(len(ordered)), True, lo=1, key=fails) - 1]


def _pass_names(capability: Capability) -> set[str]:
    """Return the class names of the passes that implement a capability."""
    return {name.rpartition(":")[2] for name in (capability.implementation, capability.standard_implementation)}


def _provider_notes(model: ir.Model, options: OptimizeOptions) -> tuple[str, ...]:
    """Return a note on operators of ONNX Runtime unsupported by the execution provider; `()` without such operators."""
    if options.ep is None:
        return ()
    prefix = f"{CONTRIB_DOMAIN}:"
    operators = [name for name in sorted(GraphCensus.of(model).operators) if name.startswith(prefix)]
    # Operators outside of the table are supported at best where the others are.
    foreign = [
        name.removeprefix(prefix)
        for name in operators
        if options.ep not in (kernel_types(name) or providers_in_table())
    ]
    if not foreign:
        return ()
    operator_words = f"{', '.join(foreign)} (com.microsoft)"
    note = (
        f"The graph has {operator_words}, which {options.ep} is not known to support: a different provider runs them, "
        "or none."
    )
    return (note,)


def _float_types(model: ir.Model) -> frozenset[str]:
    """Return the float types of the inputs and weights of a graph, as numpy names them."""
    values = (*model.graph.inputs, *model.graph.initializers.values())
    dtypes = {value.dtype for value in values if value.dtype is not None and value.dtype.is_floating_point()}
    return frozenset(str(dtype.numpy()) for dtype in dtypes)


def _idle_notes(
    capabilities: Sequence[Capability], options: OptimizeOptions, float_types: Collection[str]
) -> tuple[str, ...]:
    """Note the capabilities whose operators have no kernel for the float types of the graph; `()` without any.

    Raises:
        UsageError: a capability is enabled by name.
    """
    if not capabilities:
        return ()
    types = " or ".join(sorted(float_types))
    for entry in options.named():
        if entry in capabilities:
            raise UsageError(
                f"{options.spelled(entry.name)}: execution provider {options.ep} has no kernel of the resulting "
                f"operators in {types}",
                hint="Omit it, use a different provider, or export in another dtype.",
            )
    return (f"{options.ep} has no kernel in {types} for: {', '.join(entry.name for entry in capabilities)}.",)


def _refuse_lost_tags(before: Coverage, after: Coverage) -> None:
    """Refuse a result with untagged nodes if all nodes were tagged before.

    Raises:
        OptimizeError: the message has the number of untagged nodes.
    """
    if before.is_complete and before.nodes and not after.is_complete:
        raise OptimizeError(
            f"optimizing left {after.nodes - after.tagged} of {after.nodes} nodes without a tag, although all "
            "had one before",
            hint="This is a bug in winml: please report it.",
        )


def _interface_words(model: ir.Model) -> str:
    """Return the names of inputs and outputs in words, without initializers listed as inputs."""
    inputs = (str(value.name) for value in model.graph.inputs if value.name not in model.graph.initializers)
    return f"{', '.join(inputs)} → {', '.join(str(value.name) for value in model.graph.outputs)}"
