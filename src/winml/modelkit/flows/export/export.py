"""How does a model become a verified file that remembers its modules? The eight steps of ``winml export``.

Composes load, export, normalize and report; decides nothing they decide. Every file is written under a temporary name
and put in place at the end, so a failure or an interruption leaves earlier files as they were.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import nn

from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.errors import StageError, UsageError, VerificationError
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.exporter_choice import ExporterUse, first_choice, parameter_bytes, second_choice
from winml.modelkit.export.node_tagger import NodeTagger
from winml.modelkit.export.opset_conversion import lower_opset
from winml.modelkit.export.preparation import FlatForward, prepared_for_export
from winml.modelkit.export.tensors import to_numpy, to_torch
from winml.modelkit.flows.export.capturing import capture_graph
from winml.modelkit.flows.export.live_module import ExampleInputs, loaded_from_module
from winml.modelkit.flows.export.loading import load_for_export
from winml.modelkit.graph.files.output_files import OutputFiles
from winml.modelkit.graph.files.output_paths import ExportPaths
from winml.modelkit.graph.files.writing import write_model
from winml.modelkit.graph.model_metadata import output_specs, write_model_metadata
from winml.modelkit.graph.specs import OutputTensorSpec
from winml.modelkit.hierarchy.coverage import Coverage, all_nodes, measure_coverage
from winml.modelkit.hierarchy.tagging import clear_tag, read_tag
from winml.modelkit.hierarchy.tracing import CallTrace, record_calls
from winml.modelkit.hierarchy.tree import ModuleTree, build_tree
from winml.modelkit.load.parts import LoadedModel
from winml.modelkit.load.request import ModelRequest
from winml.modelkit.normalize.pipeline import NormalizeOptions, normalize
from winml.modelkit.normalize.stamp import stamp
from winml.modelkit.progress import StepClock, StepEvent
from winml.modelkit.report.markdown import export_report
from winml.modelkit.report.sidecar import sidecar_json
from winml.modelkit.results.export_result import ExportResult, NodeRecord
from winml.modelkit.results.words import verification_notes, verification_words
from winml.modelkit.results.written_file import WrittenFile
from winml.modelkit.runtime.execution_providers import refuse_dynamic
from winml.modelkit.runtime.feeds import make_feeds
from winml.modelkit.verify.failure_explanation import refuse_outputs_by_value
from winml.modelkit.verify.other_sizes import (
    Draw,
    DynamicProof,
    compare_at_other_sizes,
    declare_output_shapes,
    run_at_other_sizes,
    unchanged_attributes,
)
from winml.modelkit.verify.reference_run import dtypes_inside, run_reference, with_values
from winml.modelkit.verify.stable_draws import compare_stable_draws
from winml.modelkit.version import __version__
from winml.modelkit.words import count_words, shape_words

__all__ = ["STEPS", "HTPExporter", "export_pytorch"]

STEPS = (
    "model preparation",
    "input generation",
    "hierarchy building",
    "ONNX export",
    "node tagger creation",
    "node tagging",
    "tag injection",
    "metadata and reports",
)

Tensors = Mapping[str, torch.Tensor]

_LEAVE_IT_TO_DYNAMO = (
    "Without --no-dynamo, dynamo is tried as well, which follows sizes that TorchScript takes as numbers. "
)


def export_pytorch(
    model: nn.Module,
    output: str | os.PathLike[str],
    inputs: ExampleInputs | None = None,
    *,
    config: WinMLExportConfig | None = None,
    overwrite: bool = False,
    with_report: bool = False,
    seed: int = 0,
    on_step: Callable[[StepEvent], None] | None = None,
) -> ExportResult:
    """Export a live module to an ONNX file in which every node names the module it came from.

    The module is left as it was found: forward, hooks, training flags, dtype, device.

    Args:
        model: Any module. It is traced in evaluation mode.
        output: Path of the ``.onnx`` file; sidecar and report are written beside it.
        inputs: Example tensors: by name, in the order of the forward's parameters, or a single one. Their shapes become
            the graph's. None: taken from ``config.input_tensors``, or decided from the config of a transformers model.
        config: Options of the export.
        overwrite: Replace files that are there already.
        with_report: Also write the Markdown report.
        seed: Seed of the random inputs.
        on_step: Called when a step starts and when it ends.

    Returns:
        What was made. The files are in place.

    Raises:
        UsageError: the request is wrong: inputs that fit no parameter, an output that exists.
        ExportError: the module cannot be traced or converted.
        VerificationError: ONNX Runtime and PyTorch disagree; no file was written.
    """
    exporter = HTPExporter(config, seed=seed, on_step=on_step)
    return exporter.export(model, output, inputs, overwrite=overwrite, with_report=with_report)


@dataclass(frozen=True)
class _TaggedGraph:
    """The graph that will be written, and what it was made from."""

    graph: ir.Model
    tree: ModuleTree
    coverage: Coverage
    draw: Draw
    proof: DynamicProof
    """What the model answers at other sizes than the traced ones."""
    exporter: ExporterUse
    notes: tuple[str, ...]


class HTPExporter:
    """Exports modules with hierarchy-preserving tags."""

    def __init__(
        self,
        config: WinMLExportConfig | None = None,
        *,
        seed: int = 0,
        on_step: Callable[[StepEvent], None] | None = None,
    ) -> None:
        """Set the options of every export made with this object; see :func:`export_pytorch`."""
        self.config = config or WinMLExportConfig()
        self.seed = seed
        self.on_step = on_step

    def export(
        self,
        model: nn.Module,
        output: str | os.PathLike[str],
        inputs: ExampleInputs | None = None,
        *,
        overwrite: bool = False,
        with_report: bool = False,
    ) -> ExportResult:
        """Export a live module; see :func:`export_pytorch`."""

        def describe() -> tuple[LoadedModel, ExporterUse]:
            loaded = loaded_from_module(model, inputs, self.config)
            return loaded, first_choice(self.config, parameter_bytes(model))

        return self._run(describe, output, overwrite, with_report)

    def export_checkpoint(
        self,
        request: ModelRequest,
        output: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        with_report: bool = False,
    ) -> ExportResult:
        """Load a model from a Hub id, a checkpoint, a config or a script, and export it."""
        if self.config.input_tensors is not None and request.input_specs is None:
            request = replace(request, input_specs=self.config.input_tensors)
        request = replace(request, dynamic=request.dynamic.joined(self.config.dynamic))
        refuse_dynamic(self.config.ep, is_dynamic=request.is_dynamic, allow_dynamic=self.config.allow_dynamic)
        return self._run(lambda: load_for_export(request, self.config), output, overwrite, with_report)

    def _run(
        self,
        load: Callable[[], tuple[LoadedModel, ExporterUse]],
        output: str | os.PathLike[str],
        overwrite: bool,
        with_report: bool,
    ) -> ExportResult:
        started = datetime.now(timezone.utc)
        paths = ExportPaths.for_output(output, with_report=with_report, with_sidecar=self.config.hierarchy)
        paths.refuse_existing(overwrite=overwrite)
        clock = StepClock(STEPS, self.on_step)
        with clock.step("model preparation") as step:
            loaded, exporter = load()
            is_dynamic, allow = bool(loaded.dimensions), self.config.allow_dynamic
            refuse_dynamic(self.config.ep, is_dynamic=is_dynamic, allow_dynamic=allow)
            step.summary = f"{loaded.info.class_name}, {count_words(_parameter_count(loaded.model))} parameters"
        names = [spec.name for spec in loaded.inputs]
        with prepared_for_export(loaded.model, names, loaded.forward_kwargs) as forward:
            made = self._make_graph(clock, loaded, forward, exporter)
            try:
                return self._write(clock, loaded, forward, made, paths, started, overwrite=overwrite)
            except VerificationError as error:
                other = second_choice(self.config, made.exporter, error)
                if other is None:
                    raise
                again = self._make_graph(clock, loaded, forward, other)
                if again.exporter != other:
                    error.hint = f"{error.hint} Tried as well: {again.exporter.reason}."
                    raise
            return self._write(clock, loaded, forward, again, paths, started, overwrite=overwrite)

    def _write(
        self,
        clock: StepClock,
        loaded: LoadedModel,
        forward: FlatForward,
        made: _TaggedGraph,
        paths: ExportPaths,
        started: datetime,
        *,
        overwrite: bool,
    ) -> ExportResult:
        """Write the files, verified, and put them in place together."""
        with clock.step("metadata and reports") as step, OutputFiles() as files:
            model_path = files.stage(paths.model)
            # Weights of an earlier model, which this one may hold itself.
            files.drop(paths.data)
            write_model(made.graph, model_path)
            verification = self._verify(loaded, forward, made, model_path) if self.config.verify else None
            step.summary = verification_words(verification)
            result = self._result(loaded, made, paths.model, verification, started)
            result = replace(result, files=_sizes(paths.model, files.staged()), steps=clock.timings())
            if paths.report:
                files.stage(paths.report).write_text(export_report(result), encoding="utf-8")
            if paths.sidecar:
                files.stage(paths.sidecar).write_text(sidecar_json(result), encoding="utf-8")
            written = files.commit(overwrite=overwrite)
        return replace(result, files=_sizes(paths.model, written), steps=clock.timings())

    def _make_graph(
        self, clock: StepClock, loaded: LoadedModel, forward: FlatForward, exporter: ExporterUse
    ) -> _TaggedGraph:
        """Run the steps from the first inputs to the tagged, normalized graph."""
        with clock.step("input generation") as step:
            tensors = self._inputs(loaded, draw=1)
            step.summary = ", ".join(f"{spec.name} {shape_words(spec.dtype, spec.shape)}" for spec in loaded.inputs)
        with clock.step("hierarchy building") as step:
            trace, draw = _record(loaded, forward, tensors)
            tree = build_tree(trace, self.config.torch_module)
            draw = self._name_outputs(forward, draw)
            proof = run_at_other_sizes(draw, loaded.dimensions, lambda sizes: self._draw(loaded, forward, sizes))
            others = f", run at {len(proof.draws)} other shapes" if proof.draws else ""
            step.summary = f"{len(tree)} modules traced of {tree.registered} registered{others}"
        with clock.step("ONNX export") as step:
            capture, used = capture_graph(loaded, tensors, forward, tree, self.config, exporter)
            step.summary = f"{len(capture.scopes)} nodes, opset {capture.model.opset_imports['']}, {used.name}"
        with clock.step("node tagger creation") as step:
            tagger = NodeTagger(tree, operation_fallback=self.config.operation_fallback)
            step.summary = f"{len(tree)} tags"
        with clock.step("node tagging") as step:
            tagger.tag_nodes(capture.scopes)
            step.summary = f"{len(capture.scopes)} captured nodes"
        with clock.step("tag injection") as step:
            graph, changes = self._plain_graph(capture.model, used)
            declare_output_shapes(graph.graph, proof)
            self._finish_metadata(graph, loaded, tree, used)
            coverage = measure_coverage(graph)
            step.summary = f"normalized to {coverage.nodes} nodes, {coverage.tagged} tagged"
        unused = tuple(f"Nothing in the model reads input {name}." for name in capture.unused_inputs)
        choices = tuple(
            f"{place} reads the value of a tensor: the graph holds the choice made for the traced inputs."
            for place in capture.fixed_choices
        )
        notes = (*unused, *choices, *changes, *proof.notes)
        return _TaggedGraph(graph, tree, coverage, draw, proof, used, notes)

    def _plain_graph(self, model: ir.Model, used: ExporterUse) -> tuple[ir.Model, tuple[str, ...]]:
        """Normalize a tagged graph and give it the opset that is wanted; return it, and what the user should know."""
        options = NormalizeOptions(fold_constants=self.config.do_constant_folding)
        normalized = normalize(model, options)
        wanted = self.config.opset_for(used.name)
        if model.opset_imports[""] <= wanted:
            return normalized.model, normalized.notes
        # Only now: what older opsets want as a number, a graph fresh from the exporter computes.
        lowered, note = lower_opset(normalized.model, wanted)
        again = normalize(lowered, options)
        return again.model, (*again.notes, *((note,) if note else ()))

    def _inputs(
        self, loaded: LoadedModel, draw: int, sizes: Mapping[str, int] | None = None, *, with_padding: bool = True
    ) -> Tensors:
        """Return one set of inputs on the model's device: the user's own first, then random draws.

        Args:
            loaded: The model.
            draw: Which set, from 1.
            sizes: Size of every open dimension; None: as traced.
            with_padding: Whether random masks hide something.
        """
        if draw == 1 and loaded.example is not None:
            tensors = dict(loaded.example)
        else:
            feeds = make_feeds(
                loaded.inputs, seed=self.seed + draw, sizes=sizes or loaded.trace_sizes, with_padding=with_padding
            )
            tensors = {name: to_torch(value) for name, value in feeds.items()}
        device = next((parameter.device for parameter in loaded.model.parameters()), torch.device("cpu"))
        return {spec.name: tensors[spec.name].to(device) for spec in loaded.inputs}

    def _draw(self, loaded: LoadedModel, forward: FlatForward, sizes: Mapping[str, int]) -> Draw:
        """Draw inputs of other sizes and run the model on them."""
        tensors = self._inputs(loaded, draw=3, sizes=sizes)
        with unchanged_attributes(loaded.model):
            return Draw(tensors, run_reference(loaded, forward, tensors), sizes)

    def _name_outputs(self, forward: FlatForward, draw: Draw) -> Draw:
        """Give the outputs the names the user wants, where they are given; return the draw under those names.

        Raises:
            UsageError: there are more or fewer outputs than named, or one is of another shape or dtype.
        """
        wanted = self.config.output_tensors
        if wanted is None:
            return draw
        if len(wanted) != len(draw.reference):
            raise UsageError(
                f"output_tensors describes {len(wanted)} outputs, the model returns {len(draw.reference)}: "
                f"{', '.join(draw.reference)}",
                hint="Describe them all, in this order, or leave output_tensors out.",
            )
        for spec, (name, value) in zip(wanted, draw.reference.items(), strict=True):
            actual = OutputTensorSpec.model_construct(name=name, shape=value.shape, dtype=str(value.dtype))
            if problem := spec.disagreement(actual):
                raise UsageError(f"output_tensors: {spec.name}: {problem}", hint="Correct it, or leave it out.")
        forward.rename_outputs([spec.name for spec in wanted])
        return replace(draw, reference=dict(zip(forward.output_names, draw.reference.values(), strict=True)))

    def _finish_metadata(self, graph: ir.Model, loaded: LoadedModel, tree: ModuleTree, used: ExporterUse) -> None:
        """Write what the file says about itself, or remove every trace of the hierarchy; in place."""
        if not self.config.hierarchy:
            for node in all_nodes(graph):
                clear_tag(node)
            return
        write_model_metadata(
            graph,
            tree=tree,
            info=loaded.info.as_record(),
            inputs=loaded.inputs,
            outputs=output_specs(graph.graph),
            export={
                "tool": "winml-modelkit",
                "version": __version__,
                "exporter": used.name,
                "exporter_reason": used.reason,
                "torch": torch.__version__,
                "opset_requested": self.config.opset_for(used.name),
                "opset_produced": graph.opset_imports[""],
            },
        )
        stamp(graph)

    def _verify(
        self, loaded: LoadedModel, forward: FlatForward, made: _TaggedGraph, model_path: Path
    ) -> VerificationInfo:
        """Compare the written file with PyTorch on the traced inputs, on a second draw, and at other sizes.

        Raises:
            VerificationError: they disagree, or the comparison would show nothing.
        """
        made, second = self._answered(loaded, forward, made)
        draws = (made.draw, second)
        refuse_outputs_by_value(draws)
        dtypes = dtypes_inside(loaded.model, made.draw.reference)
        answers = _answers(model_path, draws, loaded.model)
        verification = compare_stable_draws(
            draws,
            answers,
            loaded,
            forward,
            computed_in=dtypes,
            # The third is for other sizes.
            draw_inputs=lambda number, other: self._inputs(loaded, draw=number + 1, with_padding=other.has_padding),
            ask=lambda fresh: _answers(model_path, fresh, loaded.model),
        )
        others = compare_at_other_sizes(
            model_path,
            made.proof,
            made.draw.sizes,
            loaded.inputs,
            made.graph,
            dtypes,
            advice=_LEAVE_IT_TO_DYNAMO if self.config.exporter == "torchscript" else "",
        )
        return replace(verification, comparisons=(*verification.comparisons, *others))

    def _answered(self, loaded: LoadedModel, forward: FlatForward, made: _TaggedGraph) -> tuple[_TaggedGraph, Draw]:
        """Return what was made with PyTorch's answer to every draw, and a second draw at the traced sizes.

        Where masks hide something in the traced inputs they hide nothing in the second draw, and the other way round:
        many a model goes another way when there is no padding.

        A model that was traced without its weights has them here only, so that ONNX Runtime finds the memory free.
        """
        tensors = self._inputs(loaded, draw=2, with_padding=not made.draw.has_padding)
        with with_values(loaded, forward) as (whole, whole_forward):
            if whole is not loaded:
                made = _revalued(made, whole, whole_forward)
            return made, Draw(tensors, run_reference(whole, whole_forward, tensors), made.draw.sizes)

    def _result(
        self,
        loaded: LoadedModel,
        made: _TaggedGraph,
        model_path: Path,
        verification: VerificationInfo | None,
        started: datetime,
    ) -> ExportResult:
        skipped = () if verification else ("Not verified: nobody compared the file with the model (--no-verify).",)
        if loaded.dimensions and not verification:
            skipped = (*skipped, "Not checked: whether the open dimensions stay open (--no-verify).")
        return ExportResult(
            model_path=model_path,
            files=(),
            model=loaded.info,
            tree=made.tree,
            nodes=_node_records(made.graph),
            coverage=made.coverage,
            inputs=loaded.inputs,
            outputs=output_specs(made.graph.graph),
            verification=verification,
            steps=(),
            started=started,
            tool_version=__version__,
            exporter=made.exporter.name,
            exporter_reason=made.exporter.reason,
            opset_requested=self.config.opset_for(made.exporter.name),
            opset_produced=made.graph.opset_imports[""],
            notes=(*loaded.notes, *made.notes, *verification_notes(verification), *skipped),
            dimensions=loaded.dimensions,
            checked_sizes=made.proof.other_sizes(made.draw.sizes) if verification else {},
        )


def _record(loaded: LoadedModel, forward: FlatForward, tensors: Tensors) -> tuple[CallTrace, Draw]:
    """Run the model once and return which modules ran, and what it answered.

    Some put other modules in place of their own while they run, by what they are given: those run the next time.
    """
    registered = list(loaded.model.modules())
    with record_calls(loaded.model) as trace:
        draw = Draw(tensors, run_reference(loaded, forward, tensors), loaded.trace_sizes)
    if [*map(id, registered)] != [*map(id, loaded.model.modules())]:
        with record_calls(loaded.model) as trace:
            draw = Draw(tensors, run_reference(loaded, forward, tensors), loaded.trace_sizes)
    return trace, draw


def _revalued(made: _TaggedGraph, whole: LoadedModel, forward: FlatForward) -> _TaggedGraph:
    """Return what was made with the answers of the model that has its weights."""

    def answered(draw: Draw) -> Draw:
        with unchanged_attributes(whole.model):
            return replace(draw, reference=run_reference(whole, forward, draw.inputs))

    draws = tuple(answered(draw) for draw in made.proof.draws)
    return replace(made, draw=answered(made.draw), proof=replace(made.proof, draws=draws))


def _answers(model_path: Path, draws: Sequence[Draw], model: nn.Module) -> list[Mapping[str, NDArray[Any]]]:
    """Ask ONNX Runtime.

    Raises:
        VerificationError: it cannot run the file.
    """
    # ONNX Runtime is loaded by those who verify only.
    from winml.modelkit.runtime.sessions import Session

    try:
        session = Session(model_path)
        return [session.run({name: to_numpy(value) for name, value in draw.inputs.items()}) for draw in draws]
    except StageError as error:
        raise VerificationError(
            f"cannot verify: {error.message.replace(str(model_path), 'the file')}",
            hint=f"{_kernel_words(model)}; --no-verify writes the file without comparing.",
            is_graph_wrong=True,
        ) from error


def _kernel_words(model: nn.Module) -> str:
    """Return what ONNX Runtime may lack for a model, and what helps."""
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    if small := " and ".join(sorted(dtypes & {"bfloat16", "float16", "float64"})):
        return f"The weights are {small}, for which its CPU has few kernels: --dtype fp32 casts them"
    return "Its CPU kernels do not take every dtype and operator"


def _node_records(model: ir.Model) -> tuple[NodeRecord, ...]:
    def record(node: ir.Node) -> NodeRecord:
        tag = read_tag(node)
        return NodeRecord(
            name=node.name or "",
            op_type=node.op_type,
            tag=tag.tag if tag else "",
            module=tag.module if tag else "",
            source=tag.source if tag else None,
        )

    return tuple(map(record, all_nodes(model)))


def _sizes(model_path: Path, sizes: Mapping[Path, int]) -> tuple[WrittenFile, ...]:
    """Return the files as the user named them, the model first."""
    files = [WrittenFile(model_path.with_name(path.name), size) for path, size in sizes.items()]
    return tuple(sorted(files, key=lambda file: (file.path != model_path, file.path.name)))


def _parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
