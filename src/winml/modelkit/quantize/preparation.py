"""Preparation of a graph for the engines, and refusal of selectors without effect.

The prepared graph has the opset of the engines, batch normalizations folded into weights, and separate activation
nodes. It is the same whether a file is written or modules are measured. Quantizes nothing. Before / After, for fused
layers::

    x → FusedConv(activation=Relu) → y        x → Conv → Relu → y
    x → FusedGemm(activation=Relu) → y        x → Gemm → Relu → y

Must not fire when the activation is not in :data:`_PARAMETERS`, or the node is in a subgraph or a function.
Tags: both nodes have the metadata of the fused node; the layer keeps its name, the last node its output.
Why it is safe: the schemas of ONNX Runtime define the fused operators by these nodes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveUnusedNodesPass

from winml.modelkit.errors import UsageError
from winml.modelkit.normalize.opset_conversion import convert_opset
from winml.modelkit.normalize.pipeline import normalize
from winml.modelkit.onnx.bundle import is_one_of_several
from winml.modelkit.onnx.cutting import Cutter, GraphModules, cut_model
from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.onnx.operators import walk_back
from winml.modelkit.onnx.weights import add_initializer
from winml.modelkit.onnx.widening import computes_in
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import optimize
from winml.modelkit.options import parse_options
from winml.modelkit.ort.graph_sessions import GraphSessions
from winml.modelkit.ort.sessions import Session
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.placements import placement_for
from winml.modelkit.quantize.planning import (
    OPERATORS_WITH_WEIGHTS,
    SEPARABLE_LAYERS,
    choose_mode,
    constant_weight,
    refuse_idle_selectors,
)
from winml.modelkit.quantize.precisions import MODES
from winml.modelkit.tags.tagging import all_nodes
from winml.modelkit.transform.graph_file import read_plain
from winml.modelkit.transform.module_functions import graph_modules
from winml.modelkit.words import count_noun

_FLOAT32_ALONE = frozenset({ir.DataType.FLOAT.name})
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_RECURRENT_WEIGHTS = (1, 2)
"""Specified: positions of the input weights and the recurrent weights of an ``LSTM``."""
_FOLDING = ("conv_batch_norm_fusion", "matmul_batch_norm_fusion")
"""Optimizer capabilities that fold a batch normalization into the preceding weights."""


@dataclass(frozen=True)
class PreparedGraph:
    """A model prepared for the engines."""

    model: ir.Model
    modules: GraphModules
    notes: tuple[str, ...]
    """Changes of the graph, and selectors without effect in this part of a model."""

    @functools.cached_property
    def sessions(self) -> GraphSessions:
        """Session factory for the graph and its variants."""
        return GraphSessions(self.model)

    def session(self, threads: int | None = None, name: str = "the float graph") -> Session:
        """Open a session of the graph."""
        return self.sessions.open(self.model, threads=threads, name=name)

    def weights_of(self, nodes: Collection[str]) -> dict[str, ir.TensorProtocol]:
        """Name of a weight → the weight, for the nodes of these names."""
        values = {constant_weight(node) for node in all_nodes(self.model) if node.name in nodes}
        return {
            value.name or "": value.const_value
            for value in values
            if value is not None and value.const_value is not None
        }

    def parameters_of(self, nodes: Collection[str]) -> int:
        """Number of values in the weights of nodes."""
        return sum(tensor.size for tensor in self.weights_of(nodes).values())

    def refuse_no_modules(self, source: str) -> None:
        """Refuse a graph whose nodes have no modules.

        Raises:
            UsageError: no node has a module; the message names the source.
        """
        if not self.modules.modules:
            raise UsageError(
                f"{source}: the nodes have no module information",
                hint="Export it with winml export, or transfer tags from its source file: winml retag.",
            )


class ResolvedOptions(NamedTuple):
    """Options with the mode that fits a graph."""

    options: QuantizeOptions
    notes: tuple[str, ...] = ()
    """A note on the mode, if it is not the default of the precision."""


def resolve_mode(options: QuantizeOptions, read: Callable[[], ir.Model], root: str) -> ResolvedOptions:
    """Return the options with the mode that fits the operators of the weights, unless a mode is requested.

    Args:
        options: Options of the quantization.
        read: Reads and normalizes the graph; the returned model may be modified.
        root: Name of the root module if modules are known by the names of nodes only.

    Raises:
        UsageError: a selector names no module.
    """
    if not options.has_open_mode:
        return ResolvedOptions(options)
    model = read()
    separate_activations(model, SEPARABLE_LAYERS.values())
    choice = choose_mode(model, options, graph_modules(model, root))
    if choice is None:
        return ResolvedOptions(options)
    return ResolvedOptions(options.model_copy(update={"mode": choice.mode}), (choice.note,))


def read_prepared(source: Path, options: QuantizeOptions) -> PreparedGraph:
    """Read a file as :func:`~winml.modelkit.transform.graph_file.transform_file` does, and prepare the graph.

    Weights are mapped into memory.

    Raises:
        InputError: the file is no valid ONNX model, or its data is missing.
        OptimizeError: the opset could not be converted.
        UsageError: a selector has no effect, and the model is not one of several parts.
    """
    model, notes = read_plain(source)
    prepared = prepare(model, options, source.stem)
    return replace(prepared, notes=(*notes, *prepared.notes))


def prepare(model: ir.Model, options: QuantizeOptions, root: str) -> PreparedGraph:
    """Prepare a model for the engines, and refuse selectors without effect.

    Args:
        model: The normalized model; consumed.
        options: Options of the quantization.
        root: Name of the root module if modules are known by the names of nodes only.

    Raises:
        OptimizeError: the opset could not be converted.
        UsageError: a selector has no effect, and the model is not one of several parts.
    """
    notes: list[str] = []
    modes = [MODES[mode] for mode in options.modes()]
    opset = max((options.least_opset(rules) for rules in modes), default=0)
    if model.opset_imports.get("", opset) < opset:
        notes.append(f"Opset {model.opset_imports['']} was raised to {opset}, which the quantized operators require.")
        model, converted = convert_opset(model, opset)
        # Conversion creates constants and nodes without names.
        notes += [*converted, *normalize(model).notes]
    if modes:
        notes += _inline_weighted_functions(model)
        _move_subgraph_weights(model)
    float32_modes = [name for name in options.modes() if MODES[name].float_types == _FLOAT32_ALONE]
    dtypes = [dtype for dtype in _HALVES if float32_modes and computes_in(model, dtype)]
    for dtype in dtypes:
        from winml.modelkit.ort.half_rounding import widen_graph  # needed only by graphs of 16-bit floats

        widen_graph(model, dtype)
    if dtypes:
        notes += [
            f"The graph computed in 16-bit floats; mode {float32_modes[0]} takes float32, so the rest is float32 now.",
            *normalize(model).notes,
        ]
    if "LSTM" in frozenset().union(*(rules.operators for rules in modes)):
        _fold_recurrent_weights(model)
    notes += _separate_layers(model, frozenset().union(*(rules.operators for rules in modes)))
    if any(rules.needs_ranges for rules in modes):
        if any(node.op_type == "BatchNormalization" for node in model.graph):
            # There is no integer kernel for it.
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


def _inline_weighted_functions(model: ir.Model) -> list[str]:
    """Inline the functions of a model if one has operators with weights, in place; return notes.

    A weight is an input of a function, so that the function alone does not tell that its operator has one.
    """
    names = [
        function.name
        for function in model.functions.values()
        if any(node.op_type in OPERATORS_WITH_WEIGHTS for node in function.all_nodes())
    ]
    if not names:
        return []
    InlinePass()(model)
    note = f"Functions with operators that can be quantized were inlined: {', '.join(names)}."
    return [note, *normalize(model).notes]


def _move_subgraph_weights(model: ir.Model) -> None:
    """Move the floating-point weights of subgraphs, such as the branches of an ``If``, to the main graph, in place.

    Subgraphs see the values of the main graph. Weights of two branches may have the same name.
    """
    fresh: FreshNames | None = None
    for graph in model.graph.subgraphs():
        for name, value in list(graph.initializers.items()):
            tensor = value.const_value
            if tensor is None or not tensor.dtype.is_floating_point() or len(tensor.shape) < 2:
                continue
            if value.is_graph_output() or value.is_graph_input():
                continue
            fresh = fresh or FreshNames.of_graph(model.graph)
            graph.initializers.pop(name)
            value.name = fresh.take(name)
            model.graph.register_initializer(value)


def _fold_recurrent_weights(model: ir.Model) -> None:
    """Compute the weights of each ``LSTM`` of the main graph, whose gates an exporter reorders with nodes, in place.

    Before / After::

        weight → Slice, Concat → LSTM       computed weight → LSTM
    """
    cutter = Cutter(model)
    computed: dict[ir.Value, None] = {}
    for node in model.graph:
        for value in (node.inputs[position] for position in _RECURRENT_WEIGHTS) if node.op_type == "LSTM" else ():
            maker = None if value is None else value.producer()
            if value is not None and maker is not None and cutter.is_constant(maker):
                computed[value] = None
    if not computed:
        return
    cut = replace(cutter.cut_exactly({*walk_back(computed)}), outputs=tuple(computed))
    arrays = GraphSessions(model).open(cut_model(model, cut)).run({})
    fresh = FreshNames.of_graph(model.graph)
    for value in computed:
        name = fresh.take(f"{value.name}_computed")
        weight = add_initializer(model.graph, ir.Tensor(arrays[value.name or ""], name=name))
        ir.convenience.replace_all_uses_with(value, weight)
    RemoveUnusedNodesPass()(model)


def _idle_notes(model: ir.Model, options: QuantizeOptions, modules: GraphModules) -> tuple[str, ...]:
    """Refuse selectors without effect; in one of several parts, return a note, since other parts may have the nodes.

    Raises:
        UsageError: names the selector; only if the model is not one of several parts.
    """
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
    separated = separate_activations(model, operators)
    if not separated:
        return []
    counts = ", ".join(f"{operator} {count}" for operator, count in separated.items())
    return [f"Activations were separated from layers, which can be quantized without them: {counts}."]


_DOMAIN = "com.microsoft"
_ADDED = 3
"""Specified: index of the FusedConv input added before the activation."""
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "Relu": (), "Sigmoid": (), "Tanh": (), "Softplus": (), "Softsign": (), "LeakyRelu": ("alpha",), "Elu": ("alpha",),
    "ThresholdedRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "Selu": ("alpha", "gamma"), "Clip": ("min", "max"),
}  # fmt: skip
"""Specified: activation → its parameters in the order of ``activation_params`` of FusedConv; FusedGemm has an attribute
for each, such as ``activation_alpha``."""


def separate_activations(model: ir.Model, operators: Container[str]) -> Counter[str]:
    """Separate the fused layers of the main graph that contain one of these operators, in place.

    Returns:
        Number of separated nodes by fused operator.
    """
    separated: Counter[str] = Counter()
    fresh: FreshNames | None = None
    for node in list(model.graph):
        activation = node.attributes.get_string("activation", "")
        is_fused = node.domain == _DOMAIN and SEPARABLE_LAYERS.get(node.op_type) in operators
        if not is_fused or activation not in _PARAMETERS:
            continue
        fresh = fresh or FreshNames.of_graph(model.graph)
        _separate_activation(node, activation, fresh)
        separated[node.op_type] += 1
    return separated


def _separate_activation(fused: ir.Node, activation: str, fresh: FreshNames) -> None:
    """Replace a fused layer by its operator, additions and activation."""
    graph, output = fused.graph, fused.outputs[0]
    assert isinstance(graph, ir.Graph)  # a node of the main graph
    inputs, added = list(fused.inputs[:_ADDED]), fused.inputs[_ADDED:]
    attributes = [attribute for name, attribute in fused.attributes.items() if not name.startswith("activation")]
    nodes = [ir.Node("", SEPARABLE_LAYERS[fused.op_type], inputs, attributes, name=fused.name)]
    nodes += [ir.node("Add", [nodes[-1].outputs[0], value]) for value in added if value is not None]
    parameters = _activation_parameters(fused, activation)
    constants = []
    if activation == "Clip":
        for name, number in parameters.items():
            tensor = ir.tensor(number, output.dtype or ir.DataType.FLOAT, fresh.take(f"{fused.name}_{name}"))
            constants.append(add_initializer(graph, tensor))
        parameters = {}
    nodes.append(ir.node(activation, [nodes[-1].outputs[0], *constants], parameters))
    for node in nodes:
        node.metadata_props.update(fused.metadata_props)
        node.name = node.name or fresh.take(f"{fused.name}/{node.op_type}")
        value = node.outputs[0]
        value.name, value.type, value.shape = fresh.take(f"{node.name}_output"), output.type, output.shape
    ir.convenience.replace_nodes_and_values(graph, fused, [fused], nodes, [output], [nodes[-1].outputs[0]])


def _activation_parameters(fused: ir.Node, activation: str) -> dict[str, float]:
    """Parameters of the activation of a fused node."""
    names = _PARAMETERS[activation]
    if "activation_params" in fused.attributes:
        return dict(zip(names, fused.attributes["activation_params"].as_floats(), strict=False))
    attributes = {name: fused.attributes.get(f"activation_{name}") for name in names}
    return {name: attribute.as_float() for name, attribute in attributes.items() if attribute is not None}
