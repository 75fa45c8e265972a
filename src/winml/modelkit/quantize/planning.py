"""Decision for each node: quantized or float, the mode, and the reason for staying float.

Reads the graph and the modules of its nodes; changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import onnx_ir as ir

from winml.modelkit.errors import InputError, QuantizeError, UsageError, opt
from winml.modelkit.onnx.cutting import GraphModules
from winml.modelkit.onnx.weights import QUANTIZED_OPERATORS, ROUNDING_OPERATORS
from winml.modelkit.quantize.declared_options import Algorithm
from winml.modelkit.quantize.engines.block_quantizers import SolvedWeight
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.placements import Placement, placement_for
from winml.modelkit.quantize.precisions import FLOAT16, FLOAT32, MODES, PRECISIONS, Mode, Precision
from winml.modelkit.quantize.qdq_placement import COMPANIONS, QdqPlacement, WeightScaling
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.tags.tagging import all_nodes, operator_name

_T = TypeVar("_T")

_TAKING_TRANSPOSED = ("MatMul", "Gemm")
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

OPERATORS_WITH_WEIGHTS = frozenset({
    "LSTM", "GRU", "RNN", "Einsum", "FusedMatMul", "FusedGemm", "FusedConv", "NhwcFusedConv", "Attention",
    "EmbedLayerNormalization", "MoE",
}).union(*(rules.operators for rules in MODES.values()))  # fmt: skip
"""Operators whose constants are weights: the operators of some mode, and other known operators of ONNX and ONNX
Runtime. Constants of other operators, such as rotary cosines, are not reported as skipped weights."""

_WEIGHT_INPUTS = {"Gather": 0, "MoE": 2}
"""Specified: position of the weight among the inputs; 1 for all others."""


ALREADY = "already has"
"""Start of the reason why a node of the requested precision is left."""


@dataclass(frozen=True)
class PlannedNode:
    """Decision for one node, which has a weight or computes with floats."""

    name: str
    operator: str
    tag: str
    requested: Precision
    mode: Mode | None
    """Quantization mode; ``None``: the node stays unchanged."""
    reason: str = ""
    """Reason for staying unchanged."""
    has_weight: bool = True


@dataclass(frozen=True)
class QuantizationPlan:
    """Decisions for the nodes with weights and for other changing nodes, in graph order."""

    nodes: tuple[PlannedNode, ...]
    unweighted: Mapping[tuple[Mode, Precision], frozenset[str]] = field(default_factory=dict)
    """(mode, precision) → names of the nodes without weights in modules of this precision."""
    stays_float: frozenset[str] = frozenset()
    """Names of the nodes of the main graph that the options exclude."""

    def groups(self) -> dict[tuple[Mode, Precision], frozenset[str]]:
        """(mode, precision) → names of the nodes to quantize, in the order of the modes."""
        ordered: dict[tuple[Mode, Precision], set[str]] = {}
        for mode in MODES:
            for node in self.nodes:
                if node.mode == mode:
                    ordered.setdefault((mode, node.requested), set()).add(node.name)
        return {key: frozenset(names) for key, names in ordered.items()}


def plan_quantization(model: ir.Model, options: QuantizeOptions, modules: GraphModules) -> QuantizationPlan:
    """Decide the quantization of each node with a weight.

    Args:
        model: The model; node names are unique.
        options: The requested options.
        modules: The module of each node.

    Raises:
        InputError: the graph is already quantized.
        UsageError: a selector names no module, a precision has no such mode, or no node is left to quantize.
    """
    refuse_quantized(model, options)
    precision_of = _ModulePrecisions(options, modules)
    planned = []
    unweighted: dict[tuple[Mode, Precision], set[str]] = {}
    stays_float: set[str] = set()
    for node in all_nodes(model):
        weight, is_inner = constant_weight(node), node.graph is not model.graph
        if weight is None and is_inner and not isinstance(node.graph, ir.Graph):
            continue
        assert node.name, f"a {node.op_type} node has no name"
        tag = modules.tag_of.get(node.name, "")
        requested, reason = precision_of(node.name)
        if not requested.modes and not is_inner:
            stays_float.add(node.name)
        mode = options.mode_of(requested)
        if is_inner and weight is not None:
            mode = _mode_in_subgraph(mode, requested, options)
        if weight is None and (mode is None or not MODES[mode].changes_every_node):
            if mode is not None and not is_inner:
                unweighted.setdefault((mode, requested), set()).add(node.name)
            continue
        if mode is not None and (obstacle := _find_obstacle(node, weight, mode, options, is_inner=is_inner)):
            reason = obstacle + _suggest_other_modes(node, requested, mode)
            mode = None
        reason = reason if mode is None else ""
        planned.append(PlannedNode(node.name, node.op_type, tag, requested, mode, reason, weight is not None))
    plan = QuantizationPlan(
        tuple(planned), {key: frozenset(names) for key, names in unweighted.items()}, frozenset(stays_float)
    )
    if not plan.groups():
        if not any(node.reason for node in planned):
            raise _no_weights_error(model)
        raise UsageError(
            f"no node to quantize: {_join_reasons(planned)}",
            hint=f"Exclude fewer modules, include more, or use a different {opt.mode}.",
        )
    return plan


def refuse_idle_selectors(model: ir.Model, options: QuantizeOptions, modules: GraphModules) -> None:
    """Refuse a selector of modules in which quantization changes no node, whatever their precision.

    Args:
        model: The model; node names are unique.
        options: The requested options.
        modules: The module of each node.

    Raises:
        UsageError: names the selector, and the nearest modules with nodes that are quantized.
    """
    modes = options.modes()
    by_mode = {mode: _find_obstacles(model, mode, options) for mode in dict.fromkeys((*modes, "weight-only"))}
    by_any: dict[str, str] = {}
    for mode in modes:
        for name, obstacle in by_mode[mode].items():
            by_any[name] = obstacle and by_any.get(name, obstacle)
    excluded = [modules.selected_tags(text) for text in options.exclude]
    weighted = {node.name for node in all_nodes(model) if constant_weight(node) is not None}
    for option, selectors in (
        (opt.exclude, dict.fromkeys(options.exclude, by_any)),
        (opt.include, dict.fromkeys(options.include, by_any)),
        (opt.per_module, {
            text: by_mode.get(options.mode_of(PRECISIONS[name]) or "", by_any)
            for text, name in options.per_module.items()
        }),
        (opt.block_sizes, dict.fromkeys(options.block_sizes, by_mode["weight-only"])),
        (opt.algorithms, dict.fromkeys(options.algorithms, by_mode["weight-only"])),
    ):  # fmt: skip
        for text, obstacles in selectors.items():
            tags = modules.selected_tags(text)
            changed = [name for name, obstacle in obstacles.items() if not obstacle]
            fused = [name for name in changed if modules.contains_any(name, tags)]
            if fused and all(any(modules.does_work_of(name, group) for group in excluded) for name in fused):
                continue
            reasons = {why for name, why in obstacles.items() if why and modules.does_work_of(name, tags)}
            why = f": {'; '.join(sorted(reasons))}" if reasons else ""
            owners = {modules.tag_of.get(name, "") for name in changed if name in weighted}
            modules.refuse_idle(option, text, changed, f"none of its nodes can be quantized{why}", owners)
            if option == opt.per_module:
                overruled = _overruled_nodes(text, changed, options, modules)
                remaining = [name for name in changed if name not in overruled]
                reason = "earlier selectors set another precision for all of its nodes; put it before them"
                modules.refuse_idle(option, text, remaining, reason, owners)


def _overruled_nodes(
    selector: str, names: Iterable[str], options: QuantizeOptions, modules: GraphModules
) -> frozenset[str]:
    """Return the nodes with another precision than that of a selector of ``per_module``, from an earlier selector."""
    texts = list(options.per_module)
    earlier = {text: options.per_module[text] for text in texts[: texts.index(selector)]}
    precisions = _ModulePrecisions(options.model_copy(update={"per_module": earlier}), modules)
    own = PRECISIONS[options.per_module[selector]]
    return frozenset(name for name in names if precisions.by_rule(name) not in (None, own))


_LEAST_SHARE = 0.1
"""Minimum share of the requested weights for a mode, if another mode quantizes more. Chosen: the classifier of a
convolutional network has less."""


def refuse_small_share(model: ir.Model, options: QuantizeOptions, modules: GraphModules) -> None:
    """Refuse modes that quantize a small share of the requested weights if another mode quantizes more.

    Tables are not counted unless they are quantized: a lookup is as fast in float.

    Args:
        model: The model; node names are unique.
        options: Options of the quantization.
        modules: The module of each node.

    Raises:
        QuantizeError: names the other mode, and the modules to select for the requested mode.
        UsageError: no node is left to quantize.
    """
    planned = plan_quantization(model, options, modules).nodes
    requested = {node.name: node for node in planned if node.has_weight and node.requested.modes}
    sizes, by_mode = _measure_modes(model, options, requested, options.base.modes)
    quantized = {name: size for name, size in sizes.items() if requested[name].mode is not None}
    counted = {name: size for name, size in sizes.items() if name in quantized or requested[name].operator != "Gather"}
    share, total = sum(quantized.values()) / max(1, sum(counted.values())), sum(sizes.values())
    best = max(by_mode, key=by_mode.__getitem__, default=None)
    if best is None or share >= _LEAST_SHARE or by_mode[best] <= sum(quantized.values()):
        return
    owners = {requested[name].tag for name in quantized}
    paths = [module.path for module in modules.modules if module.tag in owners]
    unquantized = [name for name in sizes if name not in quantized]
    included = " ".join(f"{opt.include} {path}" for path in paths)
    suggestion = f" To quantize {', '.join(paths)} alone, add {included}."
    is_separable = all(paths) and not any(modules.does_work_of(name, owners) for name in unquantized)
    raise QuantizeError(
        f"{options.words} quantizes {len(quantized)} of {len(sizes)} nodes with weights, {share:.1%} of their bytes: "
        f"{_join_reasons([requested[name] for name in unquantized])}",
        hint=f"No file was written. Use {opt.mode} {best}, which quantizes {by_mode[best] / total:.0%} of the "
        f"weights.{suggestion if is_separable and len(paths) <= _LISTED_MODULES else ''}",
    )


def _measure_modes(
    model: ir.Model, options: QuantizeOptions, names: Container[str], modes: Iterable[Mode]
) -> tuple[dict[str, int], dict[Mode, int]]:
    """Return name of a node → bytes of its weight, and mode → bytes of the weights that it can quantize.

    Args:
        model: The model; node names are unique.
        options: Options of the quantization.
        names: Names of the nodes to count.
        modes: Modes to compare.
    """
    sizes: dict[str, int] = {}
    by_mode = dict.fromkeys(modes, 0)
    for node in all_nodes(model):
        name, weight = node.name or "", constant_weight(node)
        if name not in names or weight is None or weight.const_value is None:
            continue
        sizes[name] = weight.const_value.nbytes
        for mode in by_mode:
            is_inner = node.graph is not model.graph
            used = (_mode_in_subgraph(mode, options.base, options) if is_inner else None) or mode
            if not _find_obstacle(node, weight, used, options, is_inner=is_inner):
                by_mode[mode] += sizes[name]
    return sizes, by_mode


_LEAST_OF_BEST = 0.5
"""Minimum share of the weights that a default mode quantizes, relative to the mode that quantizes most. Chosen: the
default of ``int8`` quantizes nearly all products of a transformer, and at most the classifier of a convolutional
network, which has 37 % of the weights of MobileNetV2."""


@dataclass(frozen=True)
class ModeChoice:
    """Mode of a quantization for which no mode was requested."""

    mode: Mode
    default: Mode
    share: float
    """Share of the bytes of the requested weights that the mode quantizes."""
    default_share: float
    """Share that the default mode quantizes."""
    operator: str
    """Operator with most of the weights."""

    @property
    def note(self) -> str:
        """Sentence with the mode, its reason and the option that changes it."""
        return (
            f"{opt.mode} {self.mode} was selected: it quantizes {self.share:.0%} of the weights, which are mostly of "
            f"{self.operator}; {opt.mode} {self.default}, the default, would quantize {self.default_share:.0%}."
        )


def choose_mode(model: ir.Model, options: QuantizeOptions, modules: GraphModules) -> ModeChoice | None:
    """Select the mode by the operators that have the weights; ``None`` if the default mode quantizes most of them.

    The first mode of the precision that quantizes half of the weights of the best mode is selected. Tables are not
    counted: every mode quantizes lookups.

    Args:
        model: The model; node names are unique.
        options: Options without a mode.
        modules: The module of each node.

    Raises:
        UsageError: a selector names no module.
    """
    precision_of = _ModulePrecisions(options, modules)
    weighted = {
        node.name or "": (node, precision_of(node.name or "")[0])
        for node in all_nodes(model)
        if node.op_type != "Gather" and constant_weight(node) is not None
    }
    modes = next((precision.modes for _, precision in weighted.values() if len(precision.modes) > 1), ())
    names = {name for name, (_, precision) in weighted.items() if precision.modes == modes}
    sizes, by_mode = _measure_modes(model, options, names, modes)
    best = max(by_mode.values(), default=0)
    mode = next((mode for mode, size in by_mode.items() if size >= _LEAST_OF_BEST * best), None)
    if not best or mode is None or mode == modes[0]:
        return None
    total = sum(sizes.values())
    by_operator: Counter[str] = Counter()
    for name, size in sizes.items():
        by_operator[weighted[name][0].op_type] += size
    [(operator, _)] = by_operator.most_common(1)
    return ModeChoice(mode, modes[0], by_mode[mode] / total, by_mode[modes[0]] / total, operator)


_LISTED_MODULES = 4
"""Maximum number of modules in a hint. Chosen: more do not fit."""

SEPARABLE_LAYERS: Mapping[str, str] = {"FusedConv": "Conv", "FusedGemm": "Gemm"}
"""Operator of ONNX Runtime with a fused activation → ONNX operator with the weight."""
_FUSED_OPERATORS = frozenset({"NhwcFusedConv", "FusedMatMul"})
"""Operators with a weight created by optimization levels above basic and supported only by the float mode."""


def _find_obstacles(model: ir.Model, mode: Mode, options: QuantizeOptions) -> dict[str, str]:
    """Name of a node → reason why a mode cannot change it; empty if it can. Nodes with a weight come first."""
    rules, provider = MODES[mode], placement_for(options.ep)
    weighted: dict[str, str] = {}
    unweighted: dict[str, str] = {}
    for node in all_nodes(model):
        name, weight, is_inner = node.name or "", constant_weight(node), node.graph is not model.graph
        if weight is not None:
            used = (_mode_in_subgraph(mode, options.base, options) if is_inner else None) or mode
            weighted[name] = _find_obstacle(node, weight, used, options, is_inner=is_inner)
        elif is_inner:
            continue
        elif rules.changes_every_node:
            unweighted[name] = _find_obstacle(node, None, mode, options, is_inner=False)
        elif rules.needs_ranges and (
            provider.rule(node) is not None if provider.is_by_unit else node.op_type in COMPANIONS
        ):
            unweighted[name] = ""
    return {**weighted, **unweighted}


def constant_weight(node: ir.Node) -> ir.Value | None:
    """Weight of a node: its first floating-point initializer of at least two dimensions; ``None`` without a weight.

    Operators without weights, such as ``Mul``, have none regardless of their inputs. The weight may be read through a
    ``Transpose``: a table shared by an embedding and a product (tied embeddings) is stored once.
    """
    if node.op_type not in OPERATORS_WITH_WEIGHTS:
        return None
    for value in node.inputs:
        maker = value.producer() if value is not None else None
        if maker is not None and maker.op_type == "Transpose" and node.op_type in _TAKING_TRANSPOSED:
            value = maker.inputs[0]
        if value is None or value.const_value is None or not value.is_initializer():
            continue
        if value.const_value.dtype in _FLOATS and len(value.const_value.shape) >= 2:
            return value
    return None


def _mode_in_subgraph(mode: Mode | None, precision: Precision, options: QuantizeOptions) -> Mode | None:
    """Return the mode of a node of a subgraph, whose activations no calibration measures: they are at run time."""
    measures_at_run_time = "dynamic" in precision.modes and options.ep in (None, "cpu")
    return "dynamic" if mode == "qdq" and measures_at_run_time else mode


def _find_obstacle(
    node: ir.Node, weight: ir.Value | None, mode: Mode, options: QuantizeOptions, *, is_inner: bool
) -> str:
    """Reason why a mode cannot quantize a node; empty if it can."""
    rules = MODES[mode]
    if is_inner and not rules.changes_subgraphs:
        return f"{mode} does not quantize subgraphs and functions"
    if is_inner and weight is not None and weight.graph is node.graph:
        return "its weight belongs to the subgraph"  # another subgraph may have a weight of the same name
    if weight is not None and weight.is_graph_input():
        return f"its weight is a graph input, which may change at run time ({opt.freeze_inputs} makes it a constant)"
    if rules.changes_every_node and weight is not None and weight.dtype not in (None, ir.DataType.FLOAT):
        return f"{ALREADY} {weight.dtype.name.lower()} weights"
    if rules.changes_every_node or weight is None:
        return ""
    if operator_name(node) not in rules.operators:
        return f"{mode} does not support {node.op_type}"
    tensor = weight.const_value
    assert tensor is not None
    if not _reads_weight(node.inputs[_WEIGHT_INPUTS.get(node.op_type, 1)], weight):
        input_number = 1 + next((index for index, value in enumerate(node.inputs) if _reads_weight(value, weight)), 0)
        position_text = "on the left" if input_number == 1 else f"as input {input_number}"
        return f"{mode} does not support {node.op_type} with its weight {position_text}"
    if tensor.dtype.name not in rules.float_types:
        return f"{mode} does not support {node.op_type} with {tensor.dtype.name.lower()} weights"
    for name, value in rules.fixed_attributes.get(node.op_type, {}).items():
        attribute = node.attributes.get(name)
        if attribute is not None and attribute.value != value:
            return f"{mode} does not support {node.op_type} with {name} {attribute.value:g}"
    rank = len(tensor.shape)
    if rank not in rules.channel_ranks.get(node.op_type, (rank,)) and options.per_channel is not False:
        return f"{mode} supports per-channel scales for 2 dimensions only, not for {rank} (use {opt.per_tensor})"
    return ""


def _reads_weight(value: ir.Value | None, weight: ir.Value) -> bool:
    """Return True if an input is the weight, directly or through a Transpose."""
    maker = value.producer() if value is not None else None
    return value is weight or (maker is not None and maker.inputs[0] is weight)


def _suggest_other_modes(node: ir.Node, requested: Precision, mode: Mode) -> str:
    """Suggest modes that support an operator unsupported by the requested mode; empty without such modes."""
    if node.op_type in MODES[mode].operators:
        return ""
    if node.op_type in _FUSED_OPERATORS:
        return f" (optimize with {opt.level} basic instead)"
    operator = SEPARABLE_LAYERS.get(node.op_type, node.op_type)
    modes = [f"{opt.mode} {name}" for name in requested.modes if operator in MODES[name].operators]
    return f" ({' and '.join(modes)} {'has' if len(modes) == 1 else 'have'})" if modes else ""


class _ModulePrecisions:
    """Requested precision of each module, and the reason for staying float."""

    def __init__(self, options: QuantizeOptions, modules: GraphModules) -> None:
        self._modules = modules
        self._base = options.base
        self._rules = [(modules.selected_tags(text), PRECISIONS[name]) for text, name in options.per_module.items()]
        self._included = frozenset().union(*map(modules.selected_tags, options.include))
        self._excluded = [(text, modules.selected_tags(text)) for text in options.exclude]

    def __call__(self, name: str) -> tuple[Precision, str]:
        """Return the precision of a node, and the reason if the node stays unchanged.

        A node that belongs to several modules stays float if requested for any of them, and is quantized only if
        requested for all of them.
        """
        for text, tags in self._excluded:
            if self._modules.does_work_of(name, tags):
                return PRECISIONS[FLOAT32], f"excluded by {text}"
        if self._included and not self._modules.works_only_for(name, self._included):
            return PRECISIONS[FLOAT32], "not included"
        if (precision := self.by_rule(name)) is not None:
            return precision, "" if precision.modes else "set to fp32"
        return self._base, "" if self._base.modes else "left at fp32"

    def by_rule(self, name: str) -> Precision | None:
        """Return the precision of the first rule that applies to a node; `None` without a rule."""
        for tags, precision in self._rules:
            applies = self._modules.works_only_for if precision.modes else self._modules.does_work_of
            if applies(name, tags):
                return precision
        return None


def values_by_rule(plan: QuantizationPlan, rules: Mapping[str, _T], modules: GraphModules) -> dict[str, _T]:
    """Name of a node → value of the first rule that matches its module; nodes without a rule are omitted.

    Raises:
        UsageError: a selector names no module.
    """
    selected = [(modules.selected_tags(text), value) for text, value in rules.items()]
    rule_values = {
        node.name: next((value for tags, value in selected if modules.works_only_for(node.name, tags)), None)
        for node in plan.nodes
    }
    return {name: value for name, value in rule_values.items() if value is not None}


def refuse_quantized(model: ir.Model, options: QuantizeOptions) -> None:
    """Refuse a quantized graph; float16 is allowed for the remaining nodes if only weights are quantized.

    Raises:
        InputError: names a quantized node.
    """
    # The rest of a graph with quantized weights may get it; scales in bfloat16 would be too coarse.
    is_half_requested = {precision.name for precision, _ in options.requested_modes()} == {FLOAT16}
    refused = ROUNDING_OPERATORS if is_half_requested else QUANTIZED_OPERATORS
    for node in all_nodes(model):
        if node.op_type in refused:
            suggestion = (
                "" if node.op_type in ROUNDING_OPERATORS else f" {opt.precision} {FLOAT16} converts the other weights."
            )
            name = f"node {node.name}" if node.name else "a node without a name"
            raise InputError(
                f"the graph is already quantized: {name} is a {node.op_type}",
                hint=f"Quantize its floating-point source file.{suggestion}",
            )


def _join_reasons(planned: Sequence[PlannedNode]) -> str:
    """Join the distinct reasons for staying float; a general reason if no node states one."""
    reasons = dict.fromkeys(node.reason for node in planned if node.reason)
    return "; ".join(reasons) or "no node reads a floating-point weight of two or more dimensions"


WIDE_WEIGHTS = "the weights are float64, expected float32, float16 or bfloat16"
"""Reason for a graph without a weight to quantize."""


def has_wide_weights(model: ir.Model) -> bool:
    """Return True if an initializer is float64."""
    return any(value.dtype == ir.DataType.DOUBLE for value in model.graph.initializers.values())


def _no_weights_error(model: ir.Model) -> UsageError:
    """Create the error of a graph in which no node reads a weight that a mode can quantize."""
    if has_wide_weights(model):
        return UsageError(f"no node to quantize: {WIDE_WEIGHTS}", hint="Export the model in float32.")
    hint = "Quantization reduces such weights"
    # Operators for classical models keep their numbers in attributes, which no precision converts.
    if any(value.dtype == ir.DataType.FLOAT for value in model.graph.initializers.values()):
        hint += f"; {opt.precision} {FLOAT16} converts other values as well"
    return UsageError(
        "no node to quantize: no node reads a float32, float16 or bfloat16 weight of two or more dimensions",
        hint=f"{hint}.",
    )


class WeightKey(NamedTuple):
    """A weight and its orientation in products."""

    name: str
    is_transposed: bool
    """True if the shape is width × depth."""


@dataclass(frozen=True)
class EngineTask:
    """Nodes of one graph to quantize with one precision."""

    nodes: frozenset[str]
    """Names of nodes of the main graph."""
    precision: Precision
    options: QuantizeOptions
    placement: QdqPlacement = field(default_factory=QdqPlacement)
    """Values to quantize, if their ranges are required."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Name of a value → its smallest and largest value; placement values with fixed limits are not included."""
    provider: Placement = field(default_factory=lambda: placement_for(None))
    """Operators and types of the provider."""
    block_sizes: Mapping[str, int] = field(default_factory=dict)
    """Name of a node → block size of its weight, if set by a rule."""
    algorithms: Mapping[str, Algorithm] = field(default_factory=dict)
    """Name of a node → algorithm of its weight, if set by a rule."""
    solved: Mapping[WeightKey, SolvedWeight] = field(default_factory=dict)
    """Weights with blocks solved on calibration data."""
    mode: Mode = ""
    """Quantization mode of the nodes."""
    unweighted: frozenset[str] = frozenset()
    """Names of the nodes without weights in the same modules, which may be quantized too."""
    wide_weights: frozenset[str] = frozenset()
    """Names of the products whose weights have 16 bits, although the precision has fewer."""

    @property
    def is_per_channel(self) -> bool:
        """True if each output channel of a weight has a separate scale."""
        return self.options.per_channel is not False

    @property
    def scaling(self) -> WeightScaling:
        """Bits of the precision, and requested scales of weights in QuantizeLinear and DequantizeLinear."""
        size = self.options.qdq_block_size or self.precision.default_block
        bits = self.precision.weight_bits, self.precision.range_bits
        return WeightScaling(*bits, self.is_per_channel, size if self.is_per_channel else None, self.block_sizes)

    def algorithm_of(self, node: ir.Node) -> Algorithm:
        """Algorithm for the weight of a node."""
        return self.algorithms.get(node.name or "") or self.options.algorithm


def float_name(dtype: str) -> str:
    """Convert ONNX's name of a float type to the name of the precision."""
    return next((name for name, precision in PRECISIONS.items() if dtype and precision.float_type == dtype), FLOAT32)


class ModulePrecision(Record):
    """Requested precision and result of one module, without its submodules."""

    tag: str
    requested: str
    """Name of the precision."""
    quantized: int
    """Number of nodes with a weight quantized to the precision."""
    left: Mapping[str, int]
    """Reason for staying unchanged → number of nodes."""
    kept: tuple[str, ...] = field(default=(FLOAT32,), metadata=entry(skip=True))
    """Precisions of the weights of unchanged nodes, as stored in the file."""
    why: str = field(default="", metadata=entry(omit_empty=True))
    """Reason for the precision, if selected by measurements."""

    @property
    @recorded(entry(before="quantized"))
    def actual(self) -> str:
        """Precision of the module's weights: one name, or several if some nodes are unchanged."""
        names = [self.requested] * bool(self.quantized) + list(self.kept) * bool(self.left)
        return ", ".join(dict.fromkeys(names)) or FLOAT32
