"""Construction of the tagged graph of one part: the steps of an export from the first inputs to the tags."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import torch

from winml.modelkit.compare.verification.input_draws import InputDraws
from winml.modelkit.compare.verification.python_reads import ValueReads, recorded_reads
from winml.modelkit.compare.verification.reference_run import (
    PreparedPart,
    copies_for,
    prepared_part,
    refuse_verification_beyond_memory,
    run_for_shapes,
    run_reference,
    verification_bytes,
    with_drawn_weights,
    with_values,
)
from winml.modelkit.compare.verification.sizes import (
    Draw,
    DynamicProof,
    axes_of,
    bounded_proof,
    declare_output_shapes,
    limited_by_tables,
    run_at_two_sizes,
    run_at_varied_sizes,
)
from winml.modelkit.errors import ExportError, UsageError, missing_name, opt
from winml.modelkit.export.capture import Capture, CaptureOptions, NodeTagger
from winml.modelkit.export.config import (
    EXPORTER_ORDER,
    EXPORTER_WORDS,
    NEWEST_CAPTURED_OPSET,
    ExporterName,
    ExporterUse,
    WinMLExportConfig,
    suggest_other_exporter,
)
from winml.modelkit.export.opset_conversion import bfloat16_opset, lower_opset
from winml.modelkit.export.table import input_words
from winml.modelkit.file_names import ONLY_PART, part_path
from winml.modelkit.models.output_shapes import with_named_sums
from winml.modelkit.models.parts import LoadedModel, ModelPart
from winml.modelkit.models.preparation import FlatForward
from winml.modelkit.models.state_restoration import shared_state, unchanged_attributes
from winml.modelkit.normalize.opset_conversion import convert_opset
from winml.modelkit.normalize.pipeline import NormalizeOptions, normalize
from winml.modelkit.normalize.size_propagation import table_limits
from winml.modelkit.onnx.assumptions import Assumption
from winml.modelkit.onnx.files.output_files import ExportPaths, OutputFiles
from winml.modelkit.onnx.fingerprint import stamp
from winml.modelkit.onnx.lora_branches import add_branches
from winml.modelkit.onnx.model_metadata import ModelDescription, output_specs, write_model_metadata
from winml.modelkit.onnx.specs import (
    UNNAMED,
    DynamicDimension,
    OutputAxis,
    OutputTensorSpec,
)
from winml.modelkit.options import suggest
from winml.modelkit.ort.host import available_bytes
from winml.modelkit.progress import StepClock
from winml.modelkit.tags.tagging import Coverage, all_nodes, clear_tag, measure_coverage
from winml.modelkit.tags.torch_modules import CallTrace, add_captured_modules, join_traces, record_calls
from winml.modelkit.tags.tree import ModuleTree, build_tree
from winml.modelkit.transform.graph_file import GraphHandover, HandedGraph
from winml.modelkit.transform.module_functions import chosen_modules
from winml.modelkit.version import __version__

if TYPE_CHECKING:
    from winml.modelkit.compare.proof.recording import ProofMaker
    from winml.modelkit.export.refit_graph import RefitGraph

_WEIGHTS_LOADED = "The weights were loaded: the export without weights failed."


def _capture_graph(
    prepared: PreparedPart,
    tensors: Mapping[str, torch.Tensor],
    tree: ModuleTree,
    config: WinMLExportConfig,
    use: ExporterUse,
) -> tuple[Capture, ExporterUse]:
    """Capture a prepared part with the preferred exporter, or with the other exporter if the first fails.

    Args:
        prepared: The part; its forward was called before.
        tensors: Example inputs, with values.
        tree: The modules that ran.
        config: Options of the export.
        use: The first choice.

    Returns:
        The graph, and the exporter that made it.

    Raises:
        ExportError: all permitted exporters failed; the error states the reason of each.
    """
    errors: dict[ExporterName, ExportError] = {}
    for name, has_values in _list_attempts(prepared.part, config, use):
        if has_values and (errors[name].operator is not None or (name == "dynamo" and not errors[name].is_by_value)):
            # Values do not help with an unsupported operator; dynamo needs values only if the forward branches on them.
            continue
        try:
            time_limit_s = use.time_limit_s if name == use.name else None
            capture = _capture_with(name, prepared, tensors, tree, config, time_limit_s, has_values=has_values)
        except (ExportError, ImportError, AttributeError) as error:
            errors[name] = _convert_failure(name, error)
        else:
            failed = next((failed for failed in errors if failed != name), None)
            return capture, use if failed is None else ExporterUse(name, _summarize_failure(failed, errors[failed]))
    first_error, *second_errors = errors.values()
    for second_error in second_errors:
        raise _combine_failures(first_error, second_error) from second_error
    suggest_other_exporter(config, prepared.part, first_error)
    raise first_error


def _list_attempts(part: ModelPart, config: WinMLExportConfig, use: ExporterUse) -> list[tuple[ExporterName, bool]]:
    """Return the attempts in order: exporter, and True if it may read values of weights and example inputs."""
    attempts: list[tuple[ExporterName, bool]] = [(use.name, False)]
    if config.exporter == "auto" and part.open_grids is None:
        attempts.append((next(name for name in EXPORTER_ORDER if name != use.name), False))
    # Last, since they take the most memory: traces that need values.
    if part.stored is not None and ("torchscript", False) in attempts:
        attempts.append(("torchscript", True))
    if ("dynamo", False) in attempts:
        attempts.append(("dynamo", True))
    return attempts


def _capture_with(
    name: ExporterName,
    prepared: PreparedPart,
    tensors: Mapping[str, torch.Tensor],
    tree: ModuleTree,
    config: WinMLExportConfig,
    time_limit_s: float | None,
    *,
    has_values: bool,
) -> Capture:
    """Capture a part with one exporter; with ``has_values``, the trace may read weights and example values.

    Raises:
        ExportError: the weights are needed and do not fit into memory.
    """
    part, model = prepared.part, prepared.model
    if has_values and part.stored is not None:
        if config.verify:
            refuse_verification_beyond_memory(model, available_bytes())
        with with_values(prepared) as weighted:
            capture = _capture_with(name, weighted, tensors, tree, config, time_limit_s, has_values=True)
        return replace(capture, notes=(*capture.notes, _WEIGHTS_LOADED))
    tensors = copies_for(model, tensors)
    options = CaptureOptions(
        opset_version=min(config.opset_for(name), NEWEST_CAPTURED_OPSET),
        dynamic_axes=axes_of(part.inputs),
        keep_stack_traces=config.keep_torch_metadata,
        weights=part.stored,
        time_limit_s=time_limit_s,
        takes_example_values=has_values,
    )
    # A failed attempt leaves no changes on the modules for the next attempt.
    with unchanged_attributes(model):
        if name == "torchscript":
            from winml.modelkit.export.torchscript.capturing import capture_torchscript

            return capture_torchscript(model, tensors, prepared.forward, tree, options)
        from winml.modelkit.export.dynamo.capturing import capture_dynamo

        return capture_dynamo(model, tensors, prepared.forward, tree, options)


def _convert_failure(name: ExporterName, error: ExportError | ImportError | AttributeError) -> ExportError:
    """Convert an exporter's failure to an ExportError, also for a missing library name; re-raise any other error."""
    missing = missing_name(error) or missing_name(error.__cause__ or error)
    if missing:
        failure = ExportError(
            f"{missing}, which the exporter {EXPORTER_WORDS[name]} needs",
            hint=f"Use a different version of {missing.partition(' ')[0]}. Commands that take an ONNX file still work.",
        )
        failure.__cause__ = error
        return failure
    if isinstance(error, ExportError):
        return error
    raise error


def _summarize_failure(name: ExporterName, error: ExportError) -> str:
    """Summarize the failure of an exporter in a few words."""
    if error.operator:
        scope = f" in module {error.module or '(the root)'}" if error.module is not None else ""
        return f"{error.operator}{scope} has no {EXPORTER_WORDS[name]} form"
    return f"{EXPORTER_WORDS[name]}: {error.message}"


def _combine_failures(first_error: ExportError, second_error: ExportError) -> ExportError:
    error = ExportError(
        f"neither exporter can make a graph of this model: {first_error.message}; {second_error.message}",
        hint=first_error.hint,
        operator=first_error.operator,
        module=first_error.module,
    )
    error.frozen = (*first_error.frozen, *second_error.frozen)
    return error


_LATER_CALLS = 8
"""Chosen: number of calls after which a call counter is detected; only a forward that changes state in each call is
called so often.
"""
_MAX_LISTED_CHANGES = 4
_ABSENT = object()


@dataclass(frozen=True)
class ExportTarget:
    """Destination of an export."""

    output: str | os.PathLike[str]
    """The ``.onnx`` file; of a model of several parts, the stem of their names."""
    overwrite: bool
    with_sidecar: bool
    with_report: bool
    with_companions: bool = True
    """True if config, tokenizer and processor files of a checkpoint are copied next to the model."""
    with_adapters: bool = True
    """True if run-time adapters are written next to the model."""
    with_refit_graph: bool = False
    """True if the traced graph without weights is written next to the model, for ``winml refit``."""
    functions: str | None = None
    """Modules to write as ONNX functions: ``all``, ``classes`` or a selector. None: none."""
    named_folder: Path = field(default_factory=Path)
    """The folder as the user wrote it, for messages."""

    def paths(self) -> ExportPaths:
        """Return the files of a model of one part.

        Raises:
            UsageError: the path is a directory, or does not end in ``.onnx``.
        """
        return ExportPaths.for_output(self.output, with_sidecar=self.with_sidecar, with_report=self.with_report)

    def part_paths(self, part: ModelPart) -> ExportPaths:
        """Return the files of one part."""
        path = part_path(self.paths().model, part.name, of_several=part.name != ONLY_PART)
        return ExportPaths.for_output(path, with_sidecar=self.with_sidecar, with_report=self.with_report)


@dataclass(frozen=True)
class ExportRun:
    """Settings and state shared by the exports of all parts of one model."""

    config: WinMLExportConfig
    seed: int
    clock: StepClock
    target: ExportTarget
    loaded: LoadedModel
    files: OutputFiles
    """All written files; committed with the last part."""
    all_parts: CallTrace | None = None
    """Module calls of all parts; None for a single part."""
    handover: GraphHandover | None = None
    """Processing of each graph before it is written; None: none."""
    draws: dict[str, InputDraws] = field(default_factory=dict)
    """Part → source of its inputs; filled on demand."""

    staged: dict[str, Path] = field(default_factory=dict)
    """Part → its model file under the temporary name; filled during the export."""
    proof: ProofMaker | None = None
    """Maker of the proof beside the model; None: none."""
    fixed_sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes that an earlier attempt had to fix, by key of ``--shape-config``."""
    refit: Mapping[str, RefitGraph] | None = None
    """Part → its traced graph, for a refit; None: the parts are traced."""

    def inputs(self, part: ModelPart) -> InputDraws:
        """Return the cached input source of a part."""
        return self.draws.setdefault(part.name, InputDraws(part, self.seed))


@dataclass(frozen=True)
class TaggedGraph:
    """Graph of one part as it will be written, with the traced inputs and findings."""

    model: ir.Model
    tree: ModuleTree
    coverage: Coverage
    draw: Draw
    """Traced inputs and reference outputs."""
    proof: DynamicProof
    """Outputs observed at other sizes than the traced sizes."""
    exporter: ExporterUse
    notes: tuple[str, ...]
    handed: HandedGraph | None = None
    """Result of the processing after the export; None: no processing."""
    assumed: tuple[Assumption, ...] = ()
    """Assumptions of the trace; a comparison with PyTorch shows which of them hold for other inputs."""
    dimensions: tuple[DynamicDimension, ...] = ()
    """Dynamic dimensions, within the bounds that the graph supports."""
    reads: ValueReads | None = None
    """Values of the traced inputs read by Python; None if not recorded."""
    refit: RefitGraph | None = None
    """The traced graph without weights; None: not requested."""


_Shape = tuple[int | str, ...]


def _name_output_axes(
    proof: DynamicProof, requested: Sequence[OutputAxis], inputs: Sequence[str], dimensions: Sequence[str]
) -> DynamicProof:
    """Apply the requested names to the output shapes of a proof.

    Dynamic sizes of the inputs decide the dynamic axes of the outputs; requests beyond these are noted. The name of a
    dynamic size is retained in an expression (``sequence//2``), unless another name is requested for the axis.

    Args:
        proof: The observed output shapes.
        requested: Axes and their names.
        inputs: Names of the inputs, for messages.
        dimensions: Names of the dynamic sizes of the inputs.

    Raises:
        UsageError: the output or the axis does not exist.
    """
    shapes = dict(proof.output_shapes or {})
    notes = []
    for target in requested:
        _refuse_unknown_axis(target, shapes, inputs)
        size = shapes[target.output][target.axis]
        axis_label = f"{target.requested_by}: axis {target.axis} of {target.output}"
        if isinstance(size, int):
            notes.append(f"{axis_label} is always {size}: it depends on no dynamic dimension of the inputs.")
        elif target.name in (UNNAMED, size):
            continue
        elif target.name in dimensions or size in dimensions:
            notes.append(f"{axis_label} equals {size} and has this name instead of {target.name}.")
        else:
            shape = shapes[target.output]
            shapes[target.output] = (*shape[: target.axis], target.name, *shape[target.axis + 1 :])
    return replace(proof, output_shapes=shapes or None, notes=(*proof.notes, *notes))


def _refuse_unknown_axis(target: OutputAxis, shapes: Mapping[str, _Shape], inputs: Sequence[str]) -> None:
    """Refuse a requested output axis that does not exist.

    Raises:
        UsageError: names the nearest output, or the rank of the output.
    """
    if target.output not in shapes:
        listing = f"Its inputs: {', '.join(inputs)}. Its outputs: {', '.join(shapes)}."
        raise UsageError(
            f"{target.requested_by}: the model has no input or output {target.output!r}",
            hint=suggest(target.output, [*inputs, *shapes], also=listing),
        )
    rank = len(shapes[target.output])
    if target.axis >= rank:
        raise UsageError(
            f"{target.requested_by}: output {target.output} has no axis {target.axis}; it has {rank}, counted from 0",
            hint=f"Its shape: [{', '.join(map(str, shapes[target.output]))}].",
        )


Tensors = Mapping[str, torch.Tensor]


def calls_of_all_parts(loaded: LoadedModel, seed: int) -> CallTrace | None:
    """Record the module calls of all parts, so that a module has the same tag in every part; `None` for a single part.

    Raises:
        ExportError: PyTorch refuses the inputs of a part.
    """
    if len(loaded.parts) == 1:
        return None
    traces = []
    for part in loaded.parts:
        with prepared_part(part) as prepared, unchanged_attributes(part.model):
            traces.append(_trace_calls(prepared, InputDraws(part, seed)).calls)
    return join_traces(traces)


def make_tagged_graph(
    run: ExportRun, prepared: PreparedPart, exporter: ExporterUse, *, normalizes: bool = True
) -> TaggedGraph:
    """Run the steps from the first inputs to the tagged, normalized graph.

    Args:
        run: The export.
        prepared: The part.
        exporter: The exporter to begin with.
        normalizes: Normalize the graph; otherwise it stays as the exporter wrote it.

    Raises:
        ExportError: the part cannot be run, traced or converted.
        UsageError: an option does not fit the part.
    """
    part, clock = prepared.part, run.clock
    with clock.step("input generation") as step:
        inputs = run.inputs(part)
        step.summary = input_words(part.inputs)
    with clock.step("hierarchy building") as step:
        # Without values there are no reads to record.
        watches_reads = run.config.verify and run.handover is None and part.stored is None
        first_run = _trace_calls(prepared, inputs, watches_reads=watches_reads)
        trace, draw = first_run.calls, first_run.draw
        inputs.traced = tensors = draw.inputs
        tree = build_tree(trace, run.config.torch_module, run.all_parts)
        if run.target.functions is not None:
            # Refused here rather than after the capture, which may take minutes. Of several parts, any may have them.
            everything = build_tree(run.all_parts or trace, run.config.torch_module)
            chosen_modules(everything, run.target.functions)
        draw = _rename_outputs(draw, prepared.forward, run.config)
        # Comparisons in decibels stay near the traced sizes.
        parameters = _count_parameters(prepared) if run.handover is None and run.config.verify else None

        run_at = partial(_draw_at_sizes, run, prepared)
        try:
            proof = (None if run.config.verify else run_at_two_sizes(draw, part.dimensions, run_at)) or (
                run_at_varied_sizes(draw, part.dimensions, run_at, parameters)
            )
        except UsageError as error:
            _suggest_axes(error, prepared, tensors)
            raise
        if proof.output_shapes is not None:
            proof = replace(proof, output_shapes=with_named_sums(proof.output_shapes, part.inputs))
        names = [spec.name for spec in part.inputs]
        proof = _name_output_axes(proof, part.output_axes, names, [dimension.name for dimension in part.dimensions])
        at_other_shapes = f", run at {len(proof.draws)} more shapes" if proof.draws else ""
        step.summary = f"{len(tree)} modules ({tree.registered} registered, with torch.nn layers){at_other_shapes}"
    with clock.step("ONNX export") as step:
        capture, used = _capture_graph(prepared, tensors, tree, run.config, exporter)
        step.summary = f"{len(capture.scopes)} nodes, opset {capture.model.opset_imports['']}, {used.name}"
        trace = add_captured_modules(trace, capture.scopes.values())
        all_parts = run.all_parts and add_captured_modules(run.all_parts, capture.scopes.values())
        tree = build_tree(trace, run.config.torch_module, all_parts)
    with clock.step("node tagger creation") as step:
        tagger = NodeTagger(tree, operation_fallback=run.config.operation_fallback)
        step.summary = f"{len(tree)} tags"
    with clock.step("node tagging") as step:
        tagger.tag_nodes(capture.scopes)
        unfilled = None
        if run.target.with_refit_graph:
            from winml.modelkit.export import refit_graph

            unfilled = refit_graph.graph_without_weights(capture.model)
            if part.stored is None or _WEIGHTS_LOADED in capture.notes:
                other = _trace_other_weights(run, prepared, tensors, tagger, used)
                refit_graph.refuse_value_dependence(unfilled[0], other)
        step.summary = f"{len(capture.scopes)} nodes tagged"
    with clock.step("tag injection") as step:
        model, graph_notes = _normalize_graph(capture.model, run.config, used) if normalizes else (capture.model, ())
        maxima = {dimension.name: dimension.max for dimension in part.dimensions if dimension.max is not None}
        limits = {
            name: rows
            for name, rows in (table_limits(model.graph) if draw.sizes else {}).items()
            if name not in capture.bounds and rows < maxima.get(name, math.inf)
        }
        extended, of_tables = limited_by_tables(proof, draw.sizes, limits, run_at, _count_parameters(prepared))
        dimensions, bound_notes, bounded_sums = _bound_dimensions(part.dimensions, capture.bounds, of_tables, limits)
        bounds = {name: bound for name, bound in capture.bounds.items() if name in draw.sizes} | of_tables
        # Without a comparison of values, further draws are of no use.
        proof = bounded_proof(proof if parameters is None else extended, draw.sizes, bounds, run_at, parameters)
        if part.branches:
            names = [adapter.name for adapter in part.adapters if adapter.name is not None]
            add_branches(model, part.branches, names, is_whole=len(run.loaded.parts) == 1)
        declare_output_shapes(model.graph, proof)
        _describe_model(model, run, replace(part, dimensions=dimensions), tree, used)
        coverage = measure_coverage(model)
        step.summary = f"{len(capture.scopes)} → {coverage.nodes} nodes, {coverage.tagged} tagged"
    unused = (f"Input {name} is unused: no node of the graph reads it." for name in capture.unused_inputs)
    tree_notes = tree.notes if run.config.hierarchy else ()
    tagged_graph = TaggedGraph(
        model,
        tree,
        coverage,
        draw,
        proof,
        used,
        (*tree_notes, *capture.notes, *unused, *graph_notes, *proof.notes, *bound_notes),
        assumed=(
            *capture.assumed,
            *bounded_sums,
            *_find_state_between_calls(run, prepared, draw, proof.draws, first_run.changes),
            *map(_shared_state_assumption, first_run.shared),
        ),
        dimensions=dimensions,
        reads=first_run.reads,
    )
    if unfilled is None:
        return tagged_graph
    content, initializers, weights = unfilled
    refit = refit_graph.RefitGraph(
        content,
        initializers,
        weights,
        trace,
        all_parts,
        used,
        refit_graph.describe_source(prepared.model, run.loaded.info.class_name, run.loaded.info.source_format),
        output_shapes=proof.output_shapes,
        dimensions=dimensions,
        assumed=tagged_graph.assumed,
        notes=tagged_graph.notes,
        sizes=run.fixed_sizes,
    )
    return replace(tagged_graph, refit=refit)


def _trace_other_weights(
    run: ExportRun,
    prepared: PreparedPart,
    tensors: Tensors,
    tagger: NodeTagger,
    used: ExporterUse,
) -> bytes:
    """Capture the part with random weights and other buffers, and return its graph without weights."""
    from winml.modelkit.export.refit_graph import graph_without_weights, with_other_buffers

    with with_drawn_weights(prepared, run.seed) as drawn, with_other_buffers(drawn.model):
        capture, _ = _capture_graph(drawn, tensors, tagger.tree, run.config, used)
    tagger.tag_nodes(capture.scopes)
    return graph_without_weights(capture.model)[0]


def refit_tagged_graph(run: ExportRun, prepared: PreparedPart, refit: RefitGraph) -> TaggedGraph:
    """Return the tagged, normalized graph of a part from its earlier trace, with the weights of the loaded model.

    PyTorch runs once for a comparison, and not at all without one.

    Args:
        run: The export.
        prepared: The part.
        refit: The earlier trace of the part.

    Raises:
        CheckpointError: the model is not the model of the trace with other weights.
        ExportError: the part cannot be run.
    """
    from winml.modelkit.export.refit_graph import describe_source, refuse_other_inputs, refuse_other_source

    part, clock = prepared.part, run.clock
    info = run.loaded.info
    with clock.step("input generation") as step:
        refuse_other_source(refit.source, describe_source(prepared.model, info.class_name, info.source_format))
        model = refit.with_weights(prepared.model, part.stored)
        refuse_other_inputs(model, part.inputs)
        prepared.forward.rename_outputs([value.name or "" for value in model.graph.outputs])
        step.summary = input_words(part.inputs)
    with clock.step("hierarchy building") as step:
        inputs, draw = run.inputs(part), Draw({}, {}, part.trace_sizes)
        if run.config.verify:

            def run_sample(tensors: Tensors) -> Draw:
                return Draw(tensors, run_reference(prepared, tensors), part.trace_sizes)

            draw = inputs.accepted(lambda drawing: drawing.draw(1), run_sample)
            inputs.traced = draw.inputs
        tree = build_tree(refit.trace, run.config.torch_module, refit.all_parts)
        step.summary = f"{len(tree)} modules, as traced before"
    with clock.step("tag injection") as step:
        nodes = measure_coverage(model).nodes
        model, graph_notes = _normalize_graph(model, run.config, refit.exporter)
        if part.branches:
            names = [adapter.name for adapter in part.adapters if adapter.name is not None]
            add_branches(model, part.branches, names, is_whole=len(run.loaded.parts) == 1)
        proof = DynamicProof(output_shapes=refit.output_shapes)
        if run.config.verify and run.handover is not None:
            # The samples of a new build, so that the quality is the same number. The sizes themselves were verified.
            run_at = partial(_draw_at_sizes, run, prepared)
            proof = run_at_varied_sizes(draw, part.dimensions, run_at, None)
            bounds = {size.name: (size.min, size.max or sys.maxsize) for size in refit.dimensions}
            proof = replace(bounded_proof(proof, draw.sizes, bounds, run_at, None), output_shapes=refit.output_shapes)
        declare_output_shapes(model.graph, proof)
        _describe_model(model, run, replace(part, dimensions=refit.dimensions), tree, refit.exporter)
        coverage = measure_coverage(model)
        step.summary = f"{nodes} → {coverage.nodes} nodes, {coverage.tagged} tagged"
    return TaggedGraph(
        model,
        tree,
        coverage,
        draw,
        proof,
        refit.exporter,
        tuple(dict.fromkeys((*refit.notes, *graph_notes))),
        assumed=refit.assumed,
        dimensions=refit.dimensions,
        refit=refit,
    )


def bounded_graph(
    run: ExportRun, prepared: PreparedPart, tagged_graph: TaggedGraph, maxima: Mapping[str, int], reason: str
) -> TaggedGraph:
    """Limit the dynamic dimensions of a graph to supported sizes; updates the graph's metadata in place.

    Args:
        run: The export.
        prepared: The part.
        tagged_graph: The graph of the part.
        maxima: Dimension → largest size.
        reason: Reason of the limits, for the note.

    Raises:
        ExportError: only the traced size of a dimension remains.
    """
    bounds = {size.name: (size.min, maxima[size.name]) for size in tagged_graph.dimensions if size.name in maxima}
    dimensions, *_ = _bound_dimensions(tagged_graph.dimensions, bounds)
    proof = bounded_proof(
        tagged_graph.proof,
        tagged_graph.draw.sizes,
        bounds,
        partial(_draw_at_sizes, run, prepared),
        _count_parameters(prepared),
    )
    part = replace(prepared.part, dimensions=dimensions)
    _describe_model(tagged_graph.model, run, part, tagged_graph.tree, tagged_graph.exporter)
    notes = (f"{name} is limited to {size}: {reason}" for name, size in maxima.items())
    return replace(tagged_graph, proof=proof, dimensions=dimensions, notes=(*tagged_graph.notes, *notes))


def _bound_dimensions(
    dimensions: Sequence[DynamicDimension],
    bounds: Mapping[str, tuple[int, int]],
    of_tables: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    rows: Mapping[str, int] = MappingProxyType({}),
) -> tuple[tuple[DynamicDimension, ...], list[str], list[Assumption]]:
    """Return the bounded dimensions, a note on each narrowed dimension, and assumptions on bounds of their sums.

    Args:
        dimensions: The dynamic dimensions.
        bounds: Dimension → smallest and largest size that torch.export found.
        of_tables: Dimension → bounds set by the rows of tables.
        rows: Dimension → rows of the table of the graph that limits it.

    Raises:
        ExportError: only the traced size of a dimension remains.
    """
    bounded, notes = [], []
    for dimension in dimensions:
        smallest, largest = {**bounds, **of_tables}.get(dimension.name, (0, sys.maxsize))
        smallest, largest = max(smallest, dimension.min), min(largest, dimension.max or largest)
        if smallest == largest and dimension.min != dimension.max:
            error = ExportError(
                f"{dimension.name} cannot be dynamic: the graph supports size {largest} only",
                hint=f"Fix the size: omit the dynamic option, or set a number in {opt.shape_config}.",
            )
            error.frozen = (dimension.name,)
            raise error
        narrowed = dimension.model_copy(update={"min": smallest, "max": None if largest == sys.maxsize else largest})
        bounded.append(narrowed)
        if narrowed != dimension:
            sizes = f"to sizes from {smallest}" if narrowed.max is None else f"to sizes from {smallest} to {largest}"
            reason = "torch.export found that the forward takes a different branch beyond"
            if narrowed.name in of_tables:
                reason = "the model rejects larger ones"
                if largest == rows.get(narrowed.name):
                    reason = f"a table of the model, such as one of positions, has {largest} rows"
            notes.append(f"{narrowed.name} is limited {sizes}: {reason}.")
    names = {dimension.name for dimension in dimensions}
    sums = [
        Assumption(
            "size",
            name,
            value=f"up to {largest}",
            message=f"{name} is limited to {largest}, as the sum of its parts: torch.export found that the forward "
            "takes a different branch beyond.",
        )
        for name, (_, largest) in bounds.items()
        if name not in names and largest != sys.maxsize
    ]
    return tuple(bounded), notes, sums


def _count_parameters(prepared: PreparedPart) -> int:
    return sum(parameter.numel() for parameter in prepared.part.module.parameters())


@dataclass(frozen=True)
class _FirstRun:
    """Observations of the first run of a part."""

    calls: CallTrace
    """Recorded module calls."""
    draw: Draw
    changes: tuple[str, ...]
    """Attributes of modules that the run changed."""
    shared: tuple[str, ...]
    """Globals and class attributes of the user's code that the run changed."""
    reads: ValueReads | None
    """Values of the inputs read by Python; None if not recorded."""


def _trace_calls(prepared: PreparedPart, inputs: InputDraws, *, watches_reads: bool = False) -> _FirstRun:
    """Run the part once on its first inputs; optionally record the input values that Python reads.

    Some models replace modules during a run, depending on their inputs: the new modules are retained for the next run.
    All further changes are undone: the trace starts from the loaded state. References are computed by the model as
    loaded, unless this run created parameters.
    """
    model, sizes = prepared.model, prepared.part.trace_sizes
    runs: list[_FirstRun] = []
    replaces_modules = False

    def run_once(tensors: Tensors, *, is_watched: bool) -> Draw:
        """Run the part once; append calls, changes and watched reads to the runs."""
        nonlocal replaces_modules
        registered, shared, parameters = _module_kinds(model), shared_state(model), _parameter_kinds(model)
        with record_calls(model) as trace, unchanged_attributes(model) as state:
            with recorded_reads(tensors) if is_watched else nullcontext() as reads:
                draw = Draw(tensors, run_reference(prepared, tensors, keeps_state=True), sizes)
            changes = state.changes()
            if registered != _module_kinds(model):
                replaces_modules = True
                state.keep()
                if _parameter_kinds(model) <= parameters:
                    prepared.as_loaded = prepared.as_loaded or state
        changed = tuple(name for name, value in shared_state(model).items() if shared.get(name, _ABSENT) != value)
        runs.append(_FirstRun(trace, draw, changes, changed, reads() if reads is not None else None))
        return draw

    def run(tensors: Tensors) -> Draw:
        if watches_reads:
            # Operators that call functions, such as torch.cond, do not run while reads are watched.
            with suppress(ExportError):
                return run_once(tensors, is_watched=True)
        return run_once(tensors, is_watched=False)

    draw = inputs.accepted(lambda drawing: drawing.draw(1), run)
    if replaces_modules:
        run(draw.inputs)
    return next(observed for observed in reversed(runs) if observed.draw.inputs is draw.inputs)


def _shared_state_assumption(name: str) -> Assumption:
    return Assumption(
        "first_call",
        value=name,
        message=f"The forward changes {name}, which belongs to no module and cannot be restored: the file may contain "
        "its value at export time.",
    )


def _module_kinds(model: torch.nn.Module) -> list[tuple[int, type]]:
    """Return identity and class of each module; modules that are initialized by the first call change their class."""
    return [(id(module), type(module)) for module in model.modules()]


def _parameter_kinds(model: torch.nn.Module) -> set[tuple[int, type]]:
    return {(id(parameter), type(parameter)) for parameter in model.parameters()}


def streams_weights(prepared: PreparedPart) -> bool:
    """Return True if a comparison with PyTorch reads weights one by one.

    True if the weights were not loaded for the trace and take more than half of the available memory.
    """
    return prepared.part.with_references is not None and 2 * verification_bytes(prepared.model) > available_bytes()


def _find_state_between_calls(
    run: ExportRun, prepared: PreparedPart, draw: Draw, others: Sequence[Draw], changes: Sequence[str]
) -> tuple[Assumption, ...]:
    """Call PyTorch again; return an assumption on state retained between calls if a later call has other outputs.

    A later call has other values at the traced sizes, follows a call at other sizes, or has other sizes: a table that
    grows with the inputs depends on the longest input so far.

    `()` otherwise, for a part whose values are not loaded for a comparison, and if the model refuses the sample.

    Args:
        run: The export, with samples of the inputs.
        prepared: The part.
        draw: The traced sample.
        others: Samples at other sizes.
        changes: Attributes that the first call changed.
    """
    loads_values = run.config.verify and run.handover is None and not streams_weights(prepared)
    if not changes or not (prepared.part.stored is None or loads_values):
        return ()
    with with_values(prepared) as weighted:

        def run_sample(tensors: Tensors) -> Draw:
            return Draw(tensors, run_reference(weighted, tensors), draw.sizes)

        try:
            sample = run.inputs(prepared.part).accepted(lambda drawing: drawing.draw(2), run_sample)
            pairs = [(draw, sample)]
            pairs += [pair for other in others for pair in ((other, sample), (draw, run_sample(other.inputs)))]
        except ExportError:
            return ()
        if not any(_differs_later(weighted, *pair) for pair in pairs):
            return ()
    names = ", ".join(changes[:_MAX_LISTED_CHANGES]) + (", …" if len(changes) > _MAX_LISTED_CHANGES else "")
    note = f"The forward keeps state between calls ({names}), so in PyTorch a later call returns different outputs."
    message = f"{note} The file always returns the outputs of a first call."
    return (Assumption("first_call", value=", ".join(changes), message=message),)


def _differs_later(prepared: PreparedPart, draw: Draw, sample: Draw) -> bool:
    """Return True if PyTorch's outputs for a sample differ after further calls from the first call.

    A model whose state no longer changes after a call, such as a table created in the first call, is not called again.
    All changes are undone.

    Args:
        prepared: The part.
        draw: The sample of the further calls.
        sample: The compared sample, with the outputs of a first call.
    """
    with unchanged_attributes(prepared.model):
        for _call in range(_LATER_CALLS):
            try:
                with unchanged_attributes(prepared.model) as state:
                    run_reference(prepared, draw.inputs, keeps_state=True)
                    is_changed = bool(state.changes())
                    state.keep()
                later = run_reference(prepared, sample.inputs)
            except ExportError:
                return True
            is_same = sample.reference.keys() == later.keys() and all(
                np.array_equal(value, later[name], equal_nan=value.dtype.kind not in "biu")
                for name, value in sample.reference.items()
            )
            if not is_same or not is_changed:
                return not is_same
    return False


def _draw_at_sizes(run: ExportRun, prepared: PreparedPart, sizes: Mapping[str, int]) -> Draw:
    """Draw inputs of chosen sizes, and run the part on the inputs."""
    return run.inputs(prepared.part).accepted(
        lambda drawing: drawing.draw(3, sizes), lambda tensors: Draw(tensors, run_for_shapes(prepared, tensors), sizes)
    )


def _suggest_axes(error: UsageError, prepared: PreparedPart, tensors: Mapping[str, torch.Tensor]) -> None:
    """Add to the hint of a refused size the fixed axes that must become dynamic too, such as a mask's.

    Candidates are fixed axes of the same position and size. One candidate, or all candidates, are suggested if the
    model runs on inputs of twice the size with them and fails without.
    """

    def is_accepted(axes: Sequence[tuple[str, int]]) -> bool:
        """Return True if the model runs with these axes at twice their size."""
        doubled = dict(tensors)
        for name, axis in axes:
            doubled[name] = torch.cat([doubled[name]] * 2, dim=axis)
        try:
            run_for_shapes(prepared, doubled)
        except ExportError:
            return False
        return True

    shapes = {spec.name: spec.shape for spec in prepared.part.inputs}
    for dimension in error.frozen:
        fixed = [(name, axis) for name, shape in shapes.items() for axis, size in enumerate(shape) if size == dimension]
        sizes = {(axis, tensors[name].shape[axis]) for name, axis in fixed}
        candidates = [
            (name, axis)
            for name, shape in shapes.items()
            for axis, size in enumerate(shape)
            if isinstance(size, int) and (axis, size) in sizes
        ]
        if not candidates or is_accepted(fixed):
            continue
        choices = [*([candidate] for candidate in candidates), candidates]
        if missing := next((axes for axes in choices if is_accepted([*fixed, *axes])), None):
            places = " and ".join(f"axis {axis} of {name}" for name, axis in missing)
            option = " ".join(f"{name}:{axis}={dimension}" for name, axis in missing)
            error.hint = (
                f"Make {places} dynamic as well: write {dimension} there in {opt.input_specs}, or add "
                f"{opt.dynamic_axes} '{option}'. Or fix the size of {dimension}."
            )


def _rename_outputs(draw: Draw, forward: FlatForward, config: WinMLExportConfig) -> Draw:
    """Rename the outputs as in ``output_tensors``, if stated; return the draw with the new names.

    Raises:
        UsageError: number, shape or dtype of the outputs differ from ``output_tensors``.
    """
    specs = config.output_tensors
    if specs is None:
        return draw
    if len(specs) != len(draw.reference):
        raise UsageError(
            f"output_tensors describes {len(specs)} outputs, the model returns {len(draw.reference)}: "
            f"{', '.join(draw.reference)}",
            hint="Describe all outputs in this order, or omit output_tensors.",
        )
    for spec, (name, value) in zip(specs, draw.reference.items(), strict=True):
        actual = OutputTensorSpec.model_construct(name=name, shape=value.shape, dtype=str(value.dtype))
        if problem := spec.disagreement(actual):
            raise UsageError(f"output_tensors: {spec.name}: {problem}", hint="Correct it, or omit it.")
    forward.rename_outputs([spec.name for spec in specs])
    return replace(draw, reference=dict(zip(forward.output_names, draw.reference.values(), strict=True)))


def _normalize_graph(model: ir.Model, config: WinMLExportConfig, used: ExporterUse) -> tuple[ir.Model, tuple[str, ...]]:
    """Normalize a tagged graph and convert it to the requested opset; return the model and notes for the user."""
    options = NormalizeOptions(fold_constants=config.do_constant_folding)
    normalized = normalize(model, options)
    requested_opset, opset_note = bfloat16_opset(normalized.model, config.opset_for(used.name))
    first_notes = (*normalized.notes, *filter(None, [opset_note]))
    if model.opset_imports[""] == requested_opset:
        return normalized.model, first_notes
    # Only now: numbers that older opsets hold as attributes are computed in a graph fresh from the exporter.
    if model.opset_imports[""] < requested_opset:
        converted, notes = convert_opset(normalized.model, requested_opset)
    else:
        converted, note = lower_opset(normalized.model, requested_opset)
        notes = (note,) if note else ()
    renormalized = normalize(converted, options)
    return renormalized.model, (*renormalized.notes, *filter(None, [opset_note]), *notes)


def _describe_model(model: ir.Model, run: ExportRun, part: ModelPart, tree: ModuleTree, used: ExporterUse) -> None:
    """Write the model description to the metadata, or remove all tags without ``hierarchy``; in place.

    Args:
        model: The graph.
        run: The export.
        part: The part of the model.
        tree: Its modules.
        used: The exporter, with the reason for it.
    """
    if not run.config.hierarchy:
        for node in all_nodes(model):
            clear_tag(node)
        return
    requested = next(loaded_part for loaded_part in run.loaded.parts if loaded_part.name == part.name).dimensions
    narrowed = {size.name: [size.min, size.max] for size in part.dimensions if size not in requested}
    bounds = (
        size.model_copy(update={"min": part.smallest_sizes.get(size.name, size.min), "example": None})
        for size in part.dimensions
    )
    description = ModelDescription(
        tree=tree,
        info=run.loaded.info.as_record(),
        inputs=part.inputs,
        outputs=output_specs(model.graph),
        export={
            "tool": "winml-modelkit",
            "version": __version__,
            "exporter": used.name,
            "exporter_reason": used.reason,
            "torch": torch.__version__,
            "opset_requested": run.config.opset_for(used.name),
            "opset_produced": model.opset_imports[""],
            **({"bounds": narrowed} if narrowed else {}),
        },
        part=run.loaded.describe(part),
        bounds=tuple(size for size in bounds if size.min > 1 or size.max is not None),
    )
    write_model_metadata(model, description)
    stamp(model)
