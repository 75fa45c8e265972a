"""Quantization of a graph: planning, engines, transfer of tags, and counting.

Each mode has its engine, selected by data. Request and result are written to the metadata, per module.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import onnx
import onnx_ir as ir

from winml.modelkit.compare.quality_minimum import QualityMinimum
from winml.modelkit.errors import InternalError, QuantizeError, opt
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.onnx.cutting import Cutter, GraphModules
from winml.modelkit.onnx.files.graph_reading import load_by_reference
from winml.modelkit.onnx.operators import walk_back
from winml.modelkit.onnx.stage import StageResult
from winml.modelkit.onnx.weights import constant_tensor, give_products_own_weights
from winml.modelkit.options import load_json, parse_options
from winml.modelkit.ort.format_keys import product_key
from winml.modelkit.quantize import planning
from winml.modelkit.quantize.attention_masks import make_masks_finite, mask_values, narrow_masks
from winml.modelkit.quantize.calibration.activation_statistics import MeasuredValue
from winml.modelkit.quantize.declared_options import INTEGER_ALGORITHMS, BlockSize
from winml.modelkit.quantize.engines import integer_weights
from winml.modelkit.quantize.engines.weight_only import algorithm_notes, block_weights
from winml.modelkit.quantize.equalization import Equalization, equalize
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.placements import BLOCK_OPERATORS, Placement, placement_for
from winml.modelkit.quantize.precisions import (
    FLOAT32,
    INTEGER_ACTIVATIONS,
    KIND_RULES,
    LEAST_CACHE_SQNR_DB,
    MIXTURE,
    MODES,
    PRECISIONS,
    SOLVED_MODES,
    W8A8,
    W8A16,
    Mode,
    Precision,
    ValueKind,
)
from winml.modelkit.quantize.qdq_placement import QdqPlacement, place_quantized_values, place_units
from winml.modelkit.quantize.records import ActivationCount
from winml.modelkit.quantize.value_kinds import classify_nodes, find_score_projections
from winml.modelkit.tags.carry.carrying import carry_tags
from winml.modelkit.tags.tagging import all_nodes, measure_coverage, read_tag
from winml.modelkit.words import count_noun, first_words

if TYPE_CHECKING:
    from winml.modelkit.quantize.calibration.calibration_data import CalibrationStatistics
    from winml.modelkit.quantize.calibration.layer_calibration import LayerCalibration

_BLOCK_SIZE = "block_size"
"""The attribute and record key."""
_CONVERTING = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}
_RESHAPING = "Reshape"
"""Operator between quantized values and the lookup that reads them."""


def _mark_quantized_nodes(
    original: ir.Model, quantized: ir.Model, planned: Sequence[planning.PlannedNode]
) -> frozenset[str]:
    """Record the precision on every quantized node; return the names of the planned nodes that were quantized.

    Independent of the engine: a planned node is quantized if the producer of its output reads values of few bits, or
    produces 16-bit floats from values of another type.

    Args:
        original: The graph before.
        quantized: The graph after; its nodes get ``winml.quantization``, in place.
        planned: Decisions for the nodes of the original graph.
    """
    outputs = {node.name: node.outputs[0].name for node in original.graph if node.outputs}
    before = {value.name: value.dtype for node in original.graph for value in node.outputs}
    before.update(
        (value.name, value.dtype) for value in (*original.graph.inputs, *original.graph.initializers.values())
    )
    computed = {value.name: value for node in quantized.graph for value in node.outputs}
    by_name = {node.name: node for node in all_nodes(quantized)}
    reached = set()

    def new_inputs(node: ir.Node) -> Iterable[ir.Value]:
        return (value for value in node.inputs if value is not None and value.name not in before)

    for decision in planned:
        if decision.mode is None:
            continue
        if MODES[decision.mode].needs_ranges:
            # The node itself stays, and its inputs may be quantized without it: its engine wrote the record.
            if decision.name in by_name and QUANTIZATION_KEY in by_name[decision.name].metadata_props:
                reached.add(decision.name)
            continue
        if decision.name in outputs:
            new = list(walk_back([computed.get(outputs[decision.name])], new_inputs))
        else:  # in a subgraph: values of two branches may have one name, and the new node has the name of the old one
            new = _list_inner_node(by_name.get(decision.name), quantized.graph, before)
        half = ir.DataType[decision.requested.float_type] if decision.requested.float_type else None
        kinds = {
            node: _classify_node(node) if half is None else _classify_half_node(node, half, before) for node in new
        }
        if not {"operator", "weight"}.intersection(kinds.values()):
            continue
        reached.add(decision.name)
        for node, kind in kinds.items():
            if kind is not None:
                record: dict[str, str | int] = {"precision": decision.requested.name, "kind": kind}
                if (size := node.attributes.get(_BLOCK_SIZE)) is not None:
                    record[_BLOCK_SIZE] = size.as_int()
                node.metadata_props.setdefault(QUANTIZATION_KEY, json.dumps(record))
    return frozenset(reached)


def _list_inner_node(node: ir.Node | None, main: ir.Graph, before: Container[str | None]) -> list[ir.Node]:
    """List a node of a subgraph, and the new nodes of the main graph whose values it reads, such as a Cast."""
    if node is None:
        return []
    makers = (value.producer() for value in node.inputs if value is not None and value.name not in before)
    return [node, *(maker for maker in makers if maker is not None and maker.graph is main)]


def _reads_few_bits(node: ir.Node) -> bool:
    """Return True if a node reads an initializer of at most eight bits, directly or through a Reshape."""
    for value in node.inputs:
        maker = value.producer() if value is not None else None
        if maker is not None and maker.op_type == _RESHAPING:
            value = maker.inputs[0]
        tensor = value.const_value if value is not None else None
        if tensor is not None and tensor.dtype.itemsize <= 1 and tensor.dtype != ir.DataType.BOOL:
            return True
    return False


def _classify_half_node(
    node: ir.Node, half: ir.DataType, before: Mapping[str | None, ir.DataType | None]
) -> str | None:
    """Classify a node of a half-precision graph: weight, operator or ``None``.

    Args:
        node: The node.
        half: The requested type.
        before: Value name → type in the graph before.
    """
    operand = node.inputs[0] if node.op_type == "Cast" else None
    if operand is not None and operand.is_initializer() and operand.dtype == half and before.get(operand.name) != half:
        return "weight"
    created = [value for value in node.outputs if value.dtype == half and before.get(value.name) != half]
    return "operator" if created and node.op_type != "Cast" else None


def _classify_node(node: ir.Node) -> str | None:
    """Classify a node of a quantized graph: ``weight``, ``activation``, ``operator`` or ``None``."""
    if node.op_type in _CONVERTING:
        operand = node.inputs[0]
        return "weight" if operand is not None and operand.is_initializer() else "activation"
    return "operator" if node.op_type != _RESHAPING and _reads_few_bits(node) else None


@dataclass(frozen=True)
class QuantizeResult(StageResult):
    """Result of a quantization."""

    modules: tuple[planning.ModulePrecision, ...] = ()
    """Modules with weights, in graph order."""
    activations: tuple[ActivationCount, ...] = ()
    """Numbers of quantized activations by kind and bits."""
    changed_nodes: int = 0
    """Number of quantized nodes; in float16, also of those without a weight."""

    @property
    def quantized(self) -> int:
        """Number of quantized nodes with a weight."""
        return sum(module.quantized for module in self.modules)


def quantize(
    model: ir.Model,
    options: QuantizeOptions,
    modules: GraphModules,
    calibration: CalibrationStatistics | None = None,
    solver: LayerCalibration | None = None,
    reasons: Mapping[str, str] | None = None,
) -> QuantizeResult:
    """Quantize the selected modules of a graph.

    Args:
        model: The normalized model; consumed.
        options: The requested options.
        modules: The module of each node.
        calibration: Measures the ranges of activations, if a mode needs ranges.
        solver: Solves the blocks of weights, if the algorithm needs samples.
        reasons: Tag of a module → reason for its precision, if selected by measurements.

    Returns:
        The quantized model, and the result of each module.

    Raises:
        InputError: the graph is already quantized.
        UsageError: a selector names no module, a precision has no such mode, or no node is left to quantize.
        QuantizeError: a weight has NaN or infinite values, an engine failed, or no node was quantized.
    """
    provider = placement_for(options.ep)
    plan = planning.plan_quantization(model, options, modules)
    _drop_records(model, plan.nodes)
    if options.needs_ranges and calibration is None:
        raise InternalError("activations have to be measured, and nothing was passed that measures them")
    kinds = classify_nodes(model) if options.has_bits_by_kind else {}
    tasks, equalized = _create_tasks(plan, options, modules, provider, kinds), Equalization()
    if options.needs_ranges and (provider.is_by_unit or options.solves_weights):
        # Before units are searched and weights are solved: each product reads a separate weight.
        give_products_own_weights(model, frozenset().union(*(task.nodes for task in tasks)))
    if calibration is not None and (options.smooth_quant is not None or options.cross_layer_equalization):
        has_channel_scales = options.per_channel is not False and provider.has_channel_products
        integer_tasks = [task for task in tasks if task.mode in INTEGER_ACTIVATIONS]
        bits = {name: task.precision.range_bits for task in integer_tasks for name in task.nodes}
        equalized = equalize(model, bits, options, calibration, has_channel_scales=has_channel_scales)
    masked: frozenset[str] = frozenset()
    if provider.finite_masks and options.needs_ranges:
        make_masks_finite(model)
        masked = mask_values(model)
    tasks = [replace(task, placement=_place_values(model, task)) for task in tasks]
    activations = _count_activations(tasks, model, kinds)
    measured = _list_measured_values(tasks, masked, equalized)
    if measured:
        assert calibration is not None  # checked above
        ranges = calibration.ranges(model, measured)
        if provider.finite_masks:
            bits = {name: task.precision.range_bits for task in tasks for name in task.placement.companions}
            ranges = narrow_masks(model, ranges, bits)
        ranges = _within_clips(model, ranges)
        projections = _wide_score_projections(model, ranges) if provider.is_by_unit else []
        tasks = [replace(task, ranges=ranges, wide_weights=_widened(task, projections)) for task in tasks]
    if options.solves_weights:
        if solver is None:
            raise InternalError("an algorithm needs samples, and nothing was passed that runs the model on them")
        solvable = [replace(task, nodes=task.nodes - task.wide_weights) for task in tasks if task.mode in SOLVED_MODES]
        solved = solver.solve(model, [weight for task in solvable for weight in block_weights(model.graph, task)])
        tasks = [replace(task, solved=solved) for task in tasks]
    quantized = model
    try:
        for task in tasks:
            quantized = _run_engine(quantized, task)
    except QuantizeError:
        integer_weights.refuse_non_finite_weights(model, plan.nodes)  # the likeliest cause, reported with its module
        raise
    if integer_weights.has_non_finite_scales(model, quantized):
        integer_weights.refuse_non_finite_weights(model, plan.nodes)
    transfer = carry_tags(model, quantized)
    reached = _mark_quantized_nodes(model, quantized, plan.nodes)
    _refuse_quantized_exclusions(model, quantized, plan.stays_float)
    notes = (
        *equalized.notes,
        *transfer.notes,
        *integer_weights.shared_weight_notes(model, reached, quantized),
        *algorithm_notes(quantized, options),
        *_missing_block_notes(model, tasks),
        *_wide_weight_notes(model, tasks),
        *_solved_integer_notes(model, tasks),
        *_rounded_integer_notes(model, tasks),
        *_subgraph_notes(plan, options),
    )
    earlier = _read_earlier_record(model)
    outcome = tuple(_module_outcomes(model, plan.nodes, reached, reasons or {}))
    if not reached:
        causes = dict.fromkeys(reason for module in outcome for reason in module.left)
        other = planning.WIDE_WEIGHTS if planning.has_wide_weights(model) else "no selected node has a weight"
        # Without a cause, no node has a weight, whatever the precision.
        is_done = all(cause.startswith(planning.ALREADY) for cause in causes)
        raise QuantizeError(
            f"no node was quantized: {'; '.join(causes) or other}",
            hint="Use the file as it is." if is_done else f"Use a different {opt.mode} or {opt.precision}.",
        )
    outcome = (*(earlier.modules if earlier is not None else ()), *outcome)
    record = _create_record(
        options,
        outcome,
        activations,
        calibration if measured or equalized.count else solver if options.solves_weights else None,
        is_chosen=bool(reasons),
    )
    if earlier is not None:
        record["earlier"] = earlier.requested
    quantized.metadata_props[QUANTIZATION_KEY] = json.dumps(record, ensure_ascii=False)
    coverage = measure_coverage(quantized)
    return QuantizeResult(
        quantized,
        changed=True,
        notes=notes,
        coverage=coverage,
        modules=outcome,
        activations=activations,
        changed_nodes=len(reached),
    )


def _solved_integer_notes(model: ir.Model, tasks: Sequence[planning.EngineTask]) -> Iterator[str]:
    """Note the numbers of weights with solved integers, and of those that were rounded to nearest."""
    nodes = frozenset().union(*(task.nodes for task in tasks if task.mode == "qdq" and task.solved))
    solved = {key.name for task in tasks for key in task.solved}
    counts = Counter(
        "solved" if weight.name in solved else node.op_type
        for node in model.graph
        if node.name in nodes and (weight := planning.constant_weight(node)) is not None
    )
    if count := counts.pop("solved", 0):
        others = ", ".join(f"{operator} {number}" for operator, number in counts.items())
        rounded = f" Rounded to nearest: {others}." if others else ""
        yield f"{count_noun(count, 'product')} got integers from the calibration samples (gptq).{rounded}"


def _rounded_integer_notes(model: ir.Model, tasks: Sequence[planning.EngineTask]) -> Iterator[str]:
    """Note the products in ``qdq`` whose algorithm has no integers of one zero point: it applies to weight-only."""
    counts = Counter(
        algorithm
        for task, node in _iterate_integer_layers(model, tasks)
        if (algorithm := task.algorithm_of(node)) not in INTEGER_ALGORITHMS | {"rtn"} and node.op_type != "Gather"
    )
    for algorithm, count in counts.items():
        yield (
            f"{count_noun(count, 'layer')} in qdq {'was' if count == 1 else 'were'} rounded to nearest: "
            f"{opt.algorithm} {algorithm} applies to weight-only."
        )


def _subgraph_notes(plan: planning.QuantizationPlan, options: QuantizeOptions) -> Iterator[str]:
    """Note the nodes of subgraphs that have another mode than the requested one."""
    dynamic = [node for node in plan.nodes if node.mode == "dynamic" and options.mode_of(node.requested) == "qdq"]
    if dynamic:
        yield (
            f"Mode dynamic quantizes {count_noun(len(dynamic), 'node')} in subgraphs (If, Loop, Scan), with "
            "scales of activations computed at run time: calibration measures the main graph only."
        )


def _missing_block_notes(model: ir.Model, tasks: Sequence[planning.EngineTask]) -> Iterator[str]:
    """Note the products for which blocks were requested and whose weights have a scale per channel or tensor."""
    counts: Counter[str] = Counter()
    for task, node in _iterate_integer_layers(model, tasks):
        blocks = task.scaling.requested_blocks(node, 1) if node.op_type in BLOCK_OPERATORS else None
        if blocks is None:
            continue
        bits = task.precision.weight_bits, task.precision.range_bits
        refusal = task.provider.product_refusal(*bits, "block", node.op_type)
        if blocks.depth % blocks.size:
            divisor = math.gcd(blocks.depth, blocks.size)
            advice = f"; {opt.block_size} {divisor} does" if divisor in get_args(BlockSize) else ""
            counts[f"{blocks.size} does not divide the depth of {blocks.depth}{advice}"] += 1
        elif task.placement.is_by_unit and refusal:
            counts[f"the provider does not run {node.op_type} in blocks: {refusal}"] += 1
    for reason, count in counts.items():
        yield f"{count_noun(count, 'product')} in qdq without blocks, with a scale per channel or weight: {reason}."


def _iterate_integer_layers(
    model: ir.Model, tasks: Sequence[planning.EngineTask]
) -> Iterator[tuple[planning.EngineTask, ir.Node]]:
    """Yield the nodes with a weight that tasks of mode ``qdq`` quantize."""
    nodes = {node.name: node for node in model.graph if planning.constant_weight(node) is not None}
    for task in tasks:
        if task.mode == "qdq":
            yield from ((task, node) for name, node in nodes.items() if name in task.nodes)


def _drop_records(model: ir.Model, planned: Sequence[planning.PlannedNode]) -> None:
    """Drop the records of nodes to quantize, in place: records of another file would count as results of this run."""
    names = {decision.name for decision in planned if decision.mode is not None}
    for node in all_nodes(model):
        if node.name in names:
            node.metadata_props.pop(QUANTIZATION_KEY, None)


def _refuse_quantized_exclusions(original: ir.Model, quantized: ir.Model, names: frozenset[str]) -> None:
    """Refuse a result in which an excluded node is quantized.

    Args:
        original: The graph before.
        quantized: The graph after.
        names: Names of the excluded nodes in the graph before.

    Raises:
        InternalError: names the node.
    """
    by_name = {node.name: node for node in quantized.graph}
    makers = {value.name: node for node in quantized.graph for value in node.outputs}
    for node in original.graph:
        if node.name not in names:
            continue
        result = by_name.get(node.name) or makers.get(node.outputs[0].name)
        weight, stored = planning.constant_weight(node), None if result is None else planning.constant_weight(result)
        is_marked = result is not None and QUANTIZATION_KEY in result.metadata_props
        is_changed = is_marked and QUANTIZATION_KEY not in node.metadata_props
        if is_changed or (weight is not None and (stored is None or stored.dtype != weight.dtype)):
            raise InternalError(f"node {node.name} ({node.op_type}) was requested to stay float and is quantized")


def _create_tasks(
    plan: planning.QuantizationPlan,
    options: QuantizeOptions,
    modules: GraphModules,
    provider: Placement,
    kinds: Mapping[str, ValueKind],
) -> list[planning.EngineTask]:
    """Create a task per mode and precision; for providers by unit, modules without weights are included."""
    groups = _split_by_kind(plan.groups(), options, kinds)
    unweighted = _split_by_kind(plan.unweighted, options, kinds)
    if provider.is_by_unit:
        for mode, precision in unweighted:
            if MODES[mode].needs_ranges:
                groups.setdefault((mode, precision), frozenset())
    block_sizes = planning.values_by_rule(plan, options.block_sizes, modules)
    algorithms = planning.values_by_rule(plan, options.algorithms, modules)
    return [
        planning.EngineTask(
            nodes,
            precision,
            options,
            provider=provider,
            block_sizes=block_sizes,
            algorithms=algorithms,
            mode=mode,
            unweighted=unweighted.get((mode, precision), frozenset()),
        )
        for (mode, precision), nodes in groups.items()
    ]


def _split_by_kind(
    groups: Mapping[tuple[Mode, Precision], frozenset[str]], options: QuantizeOptions, kinds: Mapping[str, ValueKind]
) -> dict[tuple[Mode, Precision], frozenset[str]]:
    """Divide groups of nodes whose bits depend on the kind of their values into w8a8 and w8a16."""
    divided: dict[tuple[Mode, Precision], frozenset[str]] = {}
    for (mode, precision), names in groups.items():
        by_precision: defaultdict[Precision, set[str]] = defaultdict(set)
        for name in names:
            bits = options.bits_of_kind(kinds.get(name, "other"))
            chosen = PRECISIONS[W8A8 if bits == 8 else W8A16] if precision.has_bits_by_kind else precision
            by_precision[chosen].add(name)
        for chosen, members in by_precision.items():
            divided[mode, chosen] = divided.get((mode, chosen), frozenset()) | members
    return divided


def _count_activations(
    tasks: Sequence[planning.EngineTask], model: ir.Model, kinds: Mapping[str, ValueKind]
) -> tuple[ActivationCount, ...]:
    """Count the quantized activations by kind and bits; a value that readers convert counts once, as it is made."""
    makers = {value.name: node.name or "" for node in model.graph for value in node.outputs}
    bits_of: dict[str, int] = {}
    for task in tasks:
        for value in task.placement.values:
            if value.readers is None or value.name not in bits_of:
                bits_of[value.name] = task.precision.range_bits
    counts = Counter(
        (kinds.get(makers.get(name, ""), "other") if kinds else "", bits) for name, bits in bits_of.items()
    )
    order = ["", *KIND_RULES]
    return tuple(
        ActivationCount(kind, bits, count)
        for (kind, bits), count in sorted(counts.items(), key=lambda entry: (order.index(entry[0][0]), entry[0][1]))
    )


def _list_measured_values(
    tasks: Sequence[planning.EngineTask], masked: Container[str], equalized: Equalization
) -> tuple[MeasuredValue, ...]:
    """List the values whose ranges are required, without duplicates, with the smallest number of bits of each."""
    measured: dict[str, MeasuredValue] = {}
    for task in tasks:
        for name in task.placement.measured:
            change = "; ".join(filter(None, ("finite masks" * (name in masked), equalized.changes.get(name, ""))))
            bits, earlier = task.precision.range_bits, measured.get(name)
            measured[name] = MeasuredValue(name, bits if earlier is None else min(bits, earlier.bits), change)
    return tuple(measured.values())


_WIDE_SCORES = 20.0
"""Range of attention scores above which 8-bit weights of queries and keys lose too much. Chosen: they change a score by
about 1 %, and 1 % of a score of 10 changes its probability by 10 %. Measured: the encoder of a small T5 with random
weights, whose scores range over 57, has 32.7 instead of 28.1 dB."""


def _wide_score_projections(model: ir.Model, ranges: Mapping[str, tuple[float, float]]) -> list[ir.Node]:
    """Return the projections of queries and keys whose unscaled attention scores have a wide range."""
    return [
        product
        for scores, products in find_score_projections(model).items()
        if scores in ranges and ranges[scores][1] - ranges[scores][0] > _WIDE_SCORES
        for product in products
    ]


def _widened(task: planning.EngineTask, projections: Sequence[ir.Node]) -> frozenset[str]:
    """Return the names of the projections whose weights get 16 bits in a task: those of w8a16, if the provider runs it.

    Weights in blocks keep their bits: they lose less than those with a scale per channel.
    """
    if task.precision.name != W8A16 or task.options.has_bits_by_kind or not task.is_per_channel:
        return frozenset()
    return frozenset(
        node.name or ""
        for node in projections
        if node.name in task.nodes
        and task.provider.is_run(product_key(16, 16, "channel", node.op_type))
        and task.scaling.block_axis(node, 1) is None
    )


def _wide_weight_notes(model: ir.Model, tasks: Sequence[planning.EngineTask]) -> Iterator[str]:
    """Note the modules whose weights have 16 bits for the range of their attention scores."""
    names = frozenset().union(*(task.wide_weights for task in tasks))
    tags = (read_tag(node) for node in model.graph if node.name in names)
    if modules := [*dict.fromkeys(tag.module for tag in tags if tag is not None)]:
        yield (
            f"Queries and keys have 16-bit weights in w8a16: {first_words(modules, 4)}. Their attention scores are not "
            f"scaled and range over more than {_WIDE_SCORES:g}: the Softmax amplifies the rounding of 8-bit weights."
        )


def _within_clips(model: ir.Model, ranges: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Return ranges without the margin beyond the bounds of a Clip, which no other data exceeds.

    QNN takes the Clip of a convolution into its unit only if the range of integers implies it.
    """
    bounded = dict(ranges)
    for node in model.graph:
        name = node.outputs[0].name or ""
        if node.op_type == "Clip" and name in bounded:
            bounds = [constant_tensor(value) for value in node.inputs[1:]]
            low, high = (float(tensor.numpy()) if tensor is not None else None for tensor in (*bounds, None, None)[:2])
            least, most = bounded[name]
            bounded[name] = (least if low is None else max(least, low), most if high is None else min(most, high))
    return bounded


def _place_values(model: ir.Model, task: planning.EngineTask) -> QdqPlacement:
    """Place the values to quantize; an empty placement if the mode of a task needs no ranges."""
    if not MODES[task.mode].needs_ranges:
        return QdqPlacement()
    if task.provider.is_by_unit:
        return place_units(model, task.nodes | task.unweighted, task.provider, task.scaling)
    return place_quantized_values(model.graph, task.nodes, task.unweighted)


def _run_engine(model: ir.Model, task: planning.EngineTask) -> ir.Model:
    """Run the engine of a task, and return its quantized model.

    Raises:
        QuantizeError: the engine failed.
    """
    engine = PRECISIONS.part(task.precision.name, MODES[task.mode].engine)
    try:
        quantized: ir.Model = engine(model, task)
        return quantized
    except (ValueError, RuntimeError, TypeError, AssertionError, onnx.shape_inference.InferenceError) as error:
        # Exceptions of ONNX Runtime's quantizers for unexpected graphs.
        raise QuantizeError(
            f"{task.precision.name} ({task.mode}): ONNX Runtime's quantizer failed: {error}",
            hint=f"Exclude the failing modules with {opt.exclude}, or use a different {opt.mode}.",
        ) from error


def _module_outcomes(
    model: ir.Model, planned: Sequence[planning.PlannedNode], reached: frozenset[str], reasons: Mapping[str, str]
) -> Iterator[planning.ModulePrecision]:
    """Yield the counts of quantized and of unchanged nodes of each module, with reasons."""
    weights = {node.name: planning.constant_weight(node) for node in all_nodes(model)}
    cutter = Cutter(model)
    constants = {node.name for node in model.graph if cutter.is_constant(node)}
    by_module: defaultdict[tuple[str, str], list[planning.PlannedNode]] = defaultdict(list)
    for node in planned:
        if not node.has_weight:
            continue
        by_module[node.tag, node.requested.name].append(node)
    for (tag, requested), nodes in by_module.items():
        causes: defaultdict[str, int] = defaultdict(int)
        unchanged: dict[str, None] = {}
        for node in nodes:
            if node.name not in reached:
                idle = f"{node.operator} of constants"
                unsupported = f"{node.operator} not supported by {node.mode}"
                causes[node.reason or (idle if node.name in constants else unsupported)] += 1
                weight = weights.get(node.name)
                unchanged[
                    planning.float_name(weight.dtype.name if weight is not None and weight.dtype is not None else "")
                ] = None
        quantized = len(nodes) - sum(causes.values())
        types = tuple(unchanged) or (FLOAT32,)
        yield planning.ModulePrecision(tag, requested, quantized, dict(causes), types, reasons.get(tag, ""))


@dataclass(frozen=True)
class _EarlierRecord:
    """Record of an earlier quantization of a file."""

    requested: Mapping[str, Any]
    modules: tuple[planning.ModulePrecision, ...]
    """Modules that it quantized; unchanged nodes are counted by the new quantization."""


def _read_earlier_record(model: ir.Model) -> _EarlierRecord | None:
    """Read the record of an earlier quantization; `None` without a record, or if it is damaged."""
    try:
        record = load_json(model.metadata_props[QUANTIZATION_KEY])
        modules = tuple(
            planning.ModulePrecision(str(module["tag"]), str(module["requested"]), int(module["quantized"]), {})
            for module in record["modules"]
            if module["quantized"]
        )
        return _EarlierRecord(dict(record["requested"]), modules)
    except (KeyError, TypeError, ValueError):
        return None


def read_request(path: Path) -> tuple[QuantizeOptions | None, frozenset[str]]:
    """Read the request of a file that winml quantized, and the tags of its quantized modules.

    Returns:
        `None` instead of the request if it chose bits by module, or for a file of another quantizer.

    Raises:
        InputError: the file is damaged.
    """
    record = _read_earlier_record(load_by_reference(path))
    if record is None or record.requested.get("precision") not in PRECISIONS:
        return None, frozenset()
    requested = {key: value for key, value in record.requested.items() if key in QuantizeOptions.model_fields}
    options = parse_options(QuantizeOptions, requested, str(path))
    tags = frozenset(module.tag for module in record.modules)
    return (options if options.bit_budget is None else None), tags


def read_minimum(model: ir.Model) -> QualityMinimum | None:
    """Return the quality limit of a file that winml quantized: as requested in dB, or that of its precisions.

    `None` for a file that winml did not quantize.
    """
    record = _read_earlier_record(model)
    if record is None:
        return None
    if (stated_db := record.requested.get("min_sqnr_db")) is not None:
        return QualityMinimum(float(stated_db))
    # The requested precision of all modules is a precision only if no module has another, which may be a mixture's.
    names = {module.requested for module in record.modules} or {str(record.requested.get("precision"))}
    minimums = [precision.minimum for name, precision in PRECISIONS.items() if name in names]
    if record.requested.get("kv_cache") is not None:
        minimums.append(QualityMinimum(LEAST_CACHE_SQNR_DB))
    return QualityMinimum.least_of(minimums) if minimums else None


_NOT_RECORDED = {"precision", "calibration_data", "calibration_cache", "dataset"}


def _create_record(
    options: QuantizeOptions,
    outcome: Sequence[planning.ModulePrecision],
    activations: Sequence[ActivationCount],
    calibration: CalibrationStatistics | LayerCalibration | None,
    *,
    is_chosen: bool,
) -> dict[str, object]:
    """Record of request and result, JSON-ready.

    If the precision was selected per module (``is_chosen``), the requested precision is the common precision of all
    modules, or the mark of a mixture.
    """
    chosen = {module.requested for module in outcome if module.quantized} if is_chosen else {options.base.name}
    # The location of the data on this machine is omitted; the calibration record describes the data.
    requested = {
        "precision": MIXTURE if len(chosen) > 1 else next(iter(chosen), options.base.name),
        **options.model_dump(mode="json", exclude_none=True, exclude_defaults=True, exclude=_NOT_RECORDED),
    }
    calibrated = {} if calibration is None else {"calibration": dict(calibration.as_record())}
    counted = {"activations": [count.as_record() for count in activations]} if activations else {}
    modules = [module.as_record() for module in outcome]
    return {"requested": requested, **calibrated, **counted, "modules": modules}
