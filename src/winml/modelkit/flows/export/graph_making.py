"""Makes the tagged graph of one part: the steps of an export from the first inputs to the tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir
import torch

from winml.modelkit.errors import UsageError
from winml.modelkit.export.capture import Capture
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.exporter_choice import ExporterUse
from winml.modelkit.export.node_tagger import NodeTagger
from winml.modelkit.export.opset_conversion import lower_opset
from winml.modelkit.export.preparation import FlatForward
from winml.modelkit.flows.export.capturing import capture_graph
from winml.modelkit.flows.export.export_run import ExportRun, TaggedGraph
from winml.modelkit.flows.export.output_axes import name_output_axes, name_sums
from winml.modelkit.flows.module_functions import chosen_modules
from winml.modelkit.graph.model_metadata import ModelDescription, output_specs, write_model_metadata
from winml.modelkit.graph.specs import OutputTensorSpec
from winml.modelkit.hierarchy.coverage import all_nodes, measure_coverage
from winml.modelkit.hierarchy.tagging import clear_tag
from winml.modelkit.hierarchy.tracing import CallTrace, joined_traces, record_calls
from winml.modelkit.hierarchy.tree import ModuleTree, build_tree
from winml.modelkit.load.parts import LoadedModel, ModelPart
from winml.modelkit.normalize.pipeline import NormalizeOptions, normalize
from winml.modelkit.normalize.stamp import stamp
from winml.modelkit.report.tensor_words import input_words
from winml.modelkit.verify.input_draws import InputDraws
from winml.modelkit.verify.other_sizes import Draw, declare_output_shapes, run_at_other_sizes, unchanged_attributes
from winml.modelkit.verify.reference_run import PreparedPart, prepared_part, run_for_shapes, run_reference
from winml.modelkit.version import __version__

__all__ = ["calls_of_all_parts", "make_tagged_graph"]

Tensors = Mapping[str, torch.Tensor]


def calls_of_all_parts(loaded: LoadedModel, seed: int) -> CallTrace | None:
    """Return which modules run in any part, so that each has the same tag in every part; None for a single part.

    Raises:
        ExportError: PyTorch refuses the inputs of a part.
    """
    if len(loaded.parts) == 1:
        return None
    traces = []
    for part in loaded.parts:
        with prepared_part(part) as prepared, unchanged_attributes(part.model):
            traces.append(_trace_calls(prepared, InputDraws(part, seed))[0])
    return joined_traces(traces)


def make_tagged_graph(run: ExportRun, prepared: PreparedPart, exporter: ExporterUse) -> TaggedGraph:
    """Run the steps from the first inputs to the tagged, normalized graph.

    Args:
        run: The export.
        prepared: The part.
        exporter: The exporter to begin with.

    Raises:
        ExportError: the part cannot be run, traced or converted.
        UsageError: an option does not fit the part.
    """
    part, clock = prepared.part, run.clock
    with clock.step("input generation") as step:
        inputs = run.inputs(part)
        step.summary = input_words(part.inputs)
    with clock.step("hierarchy building") as step:
        trace, draw = _trace_calls(prepared, inputs)
        inputs.traced = tensors = draw.inputs
        tree = build_tree(trace, run.config.torch_module, run.all_parts)
        if run.target.functions is not None:
            # Refused here rather than after the capture, which may take minutes. Of several parts, any may have them.
            everything = build_tree(run.all_parts or trace, run.config.torch_module)
            chosen_modules(everything, run.target.functions)
        draw = _with_output_names(draw, prepared.forward, run.config)
        proof = run_at_other_sizes(draw, part.dimensions, lambda sizes: _draw_of_sizes(run, prepared, sizes))
        names = [spec.name for spec in part.inputs]
        proof = name_output_axes(
            name_sums(proof, part.inputs), part.output_axes, names, [item.name for item in part.dimensions]
        )
        at_other_shapes = f", run at {len(proof.draws)} other shapes" if proof.draws else ""
        step.summary = f"{len(tree)} modules traced of {tree.registered} registered{at_other_shapes}"
    with clock.step("ONNX export") as step:
        capture, used = capture_graph(prepared, tensors, tree, run.config, exporter)
        step.summary = f"{len(capture.scopes)} nodes, opset {capture.model.opset_imports['']}, {used.name}"
    with clock.step("node tagger creation") as step:
        tagger = NodeTagger(tree, operation_fallback=run.config.operation_fallback)
        step.summary = f"{len(tree)} tags"
    with clock.step("node tagging") as step:
        tagger.tag_nodes(capture.scopes)
        step.summary = f"{len(capture.scopes)} captured nodes"
    with clock.step("tag injection") as step:
        model, graph_notes = _plain_graph(capture.model, run.config, used)
        declare_output_shapes(model.graph, proof)
        _describe_model(model, run, part, tree, used)
        coverage = measure_coverage(model)
        step.summary = f"normalized to {coverage.nodes} nodes, {coverage.tagged} tagged"
    notes = (*(tree.notes if run.config.hierarchy else ()), *_capture_notes(capture), *graph_notes, *proof.notes)
    return TaggedGraph(model, tree, coverage, draw, proof, used, notes, choices=capture.fixed_choices)


def _trace_calls(prepared: PreparedPart, inputs: InputDraws) -> tuple[CallTrace, Draw]:
    """Run the part once, on its first inputs, and return which modules ran, and what it answered.

    Some models replace modules of theirs while they run, depending on their inputs: those run the next time.
    """
    model, sizes = prepared.model, prepared.part.trace_sizes
    registered = list(model.modules())
    traces: list[CallTrace] = []

    def run(tensors: Tensors) -> Draw:
        with record_calls(model) as trace:
            draw = Draw(tensors, run_reference(prepared, tensors), sizes)
        traces.append(trace)
        return draw

    draw = inputs.accepted(lambda drawing: drawing.draw(1), run)
    if len(traces) > 1 or [*map(id, registered)] != [*map(id, model.modules())]:
        draw = run(draw.inputs)
    return traces[-1], draw


def _draw_of_sizes(run: ExportRun, prepared: PreparedPart, sizes: Mapping[str, int]) -> Draw:
    """Draw inputs of other sizes and run the part on them."""

    def answer(tensors: Tensors) -> Draw:
        with unchanged_attributes(prepared.model):
            return Draw(tensors, run_for_shapes(prepared, tensors), sizes)

    return run.inputs(prepared.part).accepted(lambda drawing: drawing.draw(3, sizes), answer)


def _with_output_names(draw: Draw, forward: FlatForward, config: WinMLExportConfig) -> Draw:
    """Give the outputs the names of ``output_tensors``, where there is one; return the draw under those names.

    Raises:
        UsageError: there are more or fewer outputs than named, or one is of another shape or dtype.
    """
    specs = config.output_tensors
    if specs is None:
        return draw
    if len(specs) != len(draw.reference):
        raise UsageError(
            f"output_tensors describes {len(specs)} outputs, the model returns {len(draw.reference)}: "
            f"{', '.join(draw.reference)}",
            hint="Describe them all, in this order, or leave output_tensors out.",
        )
    for spec, (name, value) in zip(specs, draw.reference.items(), strict=True):
        actual = OutputTensorSpec.model_construct(name=name, shape=value.shape, dtype=str(value.dtype))
        if problem := spec.disagreement(actual):
            raise UsageError(f"output_tensors: {spec.name}: {problem}", hint="Correct it, or leave it out.")
    forward.rename_outputs([spec.name for spec in specs])
    return replace(draw, reference=dict(zip(forward.output_names, draw.reference.values(), strict=True)))


def _plain_graph(model: ir.Model, config: WinMLExportConfig, used: ExporterUse) -> tuple[ir.Model, tuple[str, ...]]:
    """Normalize a tagged graph and give it the requested opset; return it, and what the user should know."""
    options = NormalizeOptions(fold_constants=config.do_constant_folding)
    normalized = normalize(model, options)
    requested_opset = config.opset_for(used.name)
    if model.opset_imports[""] <= requested_opset:
        return normalized.model, normalized.notes
    # Only now: what older opsets take as a number, a graph fresh from the exporter computes.
    lowered, note = lower_opset(normalized.model, requested_opset)
    renormalized = normalize(lowered, options)
    return renormalized.model, (*renormalized.notes, *((note,) if note else ()))


def _describe_model(model: ir.Model, run: ExportRun, part: ModelPart, tree: ModuleTree, used: ExporterUse) -> None:
    """Write what the file says about itself, or remove every trace of the hierarchy; in place."""
    if not run.config.hierarchy:
        for node in all_nodes(model):
            clear_tag(node)
        return
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
        },
        part=run.loaded.describe(part),
    )
    write_model_metadata(model, description)
    stamp(model)


def _capture_notes(capture: Capture) -> tuple[str, ...]:
    unused = (f"Nothing in the graph reads input {name}." for name in capture.unused_inputs)
    choices = (
        f"{place} reads the value of a tensor: the graph holds the choice made for the traced inputs."
        for place in capture.fixed_choices
    )
    return (*capture.notes, *unused, *choices)
