"""Export of a model to verified files with tagged nodes: the eight steps of ``winml export``.

Composes load, export, normalize, verify and report. Every file is written under a temporary name, and the files of all
parts of a model are moved to their final names together at the end: a failure or an interruption leaves earlier files
unchanged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import nn

from winml.modelkit.errors import CheckpointError, UsageError, WinMLError, opt
from winml.modelkit.export.config import (
    ExporterUse,
    WinMLExportConfig,
    configured_request,
    first_choice,
)
from winml.modelkit.export.graph_making import ExportRun, ExportTarget, calls_of_all_parts
from winml.modelkit.export.loading import ModelCheck, closing_sizes, load_for_export
from winml.modelkit.export.part_export import export_part
from winml.modelkit.export.records import STEPS, ExportResult
from winml.modelkit.file_names import EMBEDDING, proof_paths
from winml.modelkit.models.caches.inputs import PAST_KEY
from winml.modelkit.models.live_module import ExampleInputs, loaded_from_module
from winml.modelkit.models.parts import LoadedModel, ModelPart
from winml.modelkit.models.programs import open_program
from winml.modelkit.models.request import CHECKPOINT_KINDS, ModelRequest, processor_folder, resolve_source
from winml.modelkit.models.state_restoration import restored_module_state, restored_process_state
from winml.modelkit.onnx.files.named_paths import restored_working_directory
from winml.modelkit.onnx.files.output_files import OutputFiles, recover, refuse_existing
from winml.modelkit.ort.execution_providers import refuse_dynamic
from winml.modelkit.ort.foreign_libraries import local_files_only
from winml.modelkit.progress import OnStep, StepClock
from winml.modelkit.python_functions import python_function
from winml.modelkit.transform.graph_file import GraphHandover
from winml.modelkit.transform.module_functions import refuse_old_runtime, refuse_unregistered
from winml.modelkit.version import __version__
from winml.modelkit.words import count_words

if TYPE_CHECKING:
    from winml.modelkit.compare.proof.recording import ProofMaker
    from winml.modelkit.compare.proof.records import ProofRequest
    from winml.modelkit.export.refit_graph import RefitGraph


@python_function()
def export_pytorch(
    model: nn.Module,
    output: str | os.PathLike[str],
    inputs: ExampleInputs | None = None,
    *,
    config: WinMLExportConfig | None = None,
    overwrite: bool = False,
    with_report: bool = False,
    functions: str | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> ExportResult:
    """Export a module to an ONNX file in which every node is tagged with its module.

    The module is not changed: forward, hooks, training mode, dtype and device are restored.

    Args:
        model: Any module. It is traced in evaluation mode.
        output: Path of the ``.onnx`` file; sidecar and report are written beside it.
        inputs: Example tensors: by name, in the order of the forward's parameters, or a single one. Their shapes are
            those of the graph. None: those of ``config.input_tensors``, or of the config of a transformers model.
        config: Options of the export.
        overwrite: Replace existing files.
        with_report: Also write the Markdown report.
        functions: Modules to write as ONNX functions: ``all``, ``classes`` (modules of one class whose graphs are
            equal share one) or a selector.
        seed: Seed of the random inputs.
        on_step: Called when a step starts and when it ends.

    Returns:
        The record of the export; the files are written.

    Raises:
        UsageError: inputs that match no parameter, or an output that exists.
        ExportError: the module cannot be traced or converted.
        VerificationError: the outputs of ONNX Runtime and PyTorch differ; no file was written.
    """
    exporter = HTPExporter(config, seed=seed, on_step=on_step)
    return exporter.export(model, output, inputs, overwrite=overwrite, with_report=with_report, functions=functions)


class HTPExporter:
    """Exports modules to ONNX with hierarchy tags."""

    def __init__(
        self,
        config: WinMLExportConfig | None = None,
        *,
        seed: int = 0,
        on_step: OnStep | None = None,
        on_parts: Callable[[Sequence[str]], None] | None = None,
        handover: GraphHandover | None = None,
        check: ModelCheck | None = None,
        proof: ProofRequest | None = None,
        refit: Mapping[str, Path] | None = None,
    ) -> None:
        """Set the options of every export made with this object; see :func:`export_pytorch`.

        ``on_parts`` is called with the names of the parts, once they are known and before any file is written.
        ``handover`` processes the graphs in memory, and no file holds the unprocessed export. ``check`` is called with
        the model of a checkpoint before its weights are loaded, and may refuse it. ``proof`` requests a proof beside
        the model. ``refit`` has the traced graph of each part, by its name, of a refit.
        """
        self.config = config or WinMLExportConfig()
        self.seed = seed
        self.on_step = on_step
        self.on_parts = on_parts
        self.handover = handover
        self.check = check
        self.proof = proof
        self.refit = refit

    @python_function()
    def export(
        self,
        model: nn.Module,
        output: str | os.PathLike[str],
        inputs: ExampleInputs | None = None,
        *,
        overwrite: bool = False,
        with_report: bool = False,
        functions: str | None = None,
    ) -> ExportResult:
        """Export a live module; see :func:`export_pytorch`."""

        def describe() -> tuple[LoadedModel, ExporterUse]:
            tensors, dynamic = self.config.input_tensors, self.config.dynamic
            loaded = loaded_from_module(model, inputs, input_tensors=tensors, dynamic=dynamic)
            return loaded, first_choice(self.config)

        # Before its attributes are looked at, which TorchScript does not show.
        model, inputs = open_program(model, inputs, type(model).__name__)
        target = self._make_target(output, overwrite=overwrite, with_report=with_report)
        target = replace(target, functions=functions)
        return self._export_parts(describe, target, model)

    def export_checkpoint(
        self,
        request: ModelRequest,
        output: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        with_report: bool = False,
        with_companions: bool = True,
        with_adapters: bool = True,
        with_refit_graph: bool = False,
        functions: str | None = None,
    ) -> ExportResult:
        """Load a model from a Hub id, a checkpoint, a config or a script, and export it.

        ``with_companions`` copies config, tokenizer and processor files of a checkpoint next to the model;
        ``with_adapters`` writes run-time adapters next to the model, ``with_refit_graph`` the traced graph without
        weights; ``functions`` is as for
        :func:`export_pytorch`. A size that is dynamic by default and not supported by the graph is fixed, with a
        note; if it was requested, that is an error.
        """
        request = configured_request(request, self.config)
        refuse_dynamic(self.config.ep, is_dynamic=request.is_dynamic, allow_dynamic=self.config.allow_dynamic)
        target = self._make_target(output, overwrite=overwrite, with_report=with_report)
        target = replace(
            target,
            with_companions=with_companions,
            with_adapters=with_adapters,
            with_refit_graph=with_refit_graph,
            functions=functions,
        )
        graphs: dict[str, RefitGraph] | None = None
        if self.refit is not None:
            from winml.modelkit.export.refit_graph import read_refit_graph

            graphs = {part: read_refit_graph(path) for part, path in self.refit.items()}
        fixed_sizes: dict[str, int] = {}
        for graph in (graphs or {}).values():
            fixed_sizes |= graph.sizes or {}
        request = request.with_sizes(fixed_sizes)
        notes: list[str] = []
        parts: tuple[ModelPart, ...] = ()

        def load() -> tuple[LoadedModel, ExporterUse]:
            nonlocal parts
            lowered = self.handover is not None and self.handover.lowers_precision
            try:
                loaded, use = load_for_export(request, self.config, is_handed_over=lowered, check=self.check)
            except UsageError as error:
                if graphs is None or resolve_source(request).kind != "script":
                    raise
                # The options are those of the build, so that only another model may contradict them.
                classes = ", ".join(dict.fromkeys(str(graph.source["class"]) for graph in graphs.values()))
                raise CheckpointError(
                    f"{request.model} does not fit a build of {classes}: {error.message}",
                    hint="Only weights may differ. winml build builds another architecture.",
                ) from error
            parts = loaded.parts
            return replace(loaded, model_notes=(*notes, *loaded.model_notes)), use

        # Each iteration fixes a dynamic size, so that the loop ends.
        while True:
            try:
                return self._export_parts(load, target, request=request, fixed_sizes=fixed_sizes, refit=graphs)
            except WinMLError as error:
                frozen = frozen_by_default(error.frozen, parts)
                if not frozen:
                    raise
            notes += _frozen_notes(frozen, parts)
            request = request.with_sizes(frozen)
            fixed_sizes |= frozen
            parts = ()

    def _make_target(self, output: str | os.PathLike[str], *, overwrite: bool, with_report: bool) -> ExportTarget:
        # The model's own code may change the working directory.
        path = Path(output)
        return ExportTarget(path.absolute(), overwrite, self.config.hierarchy, with_report, named_folder=path.parent)

    def _export_parts(
        self,
        load: Callable[[], tuple[LoadedModel, ExporterUse]],
        target: ExportTarget,
        live_module: nn.Module | None = None,
        request: ModelRequest | None = None,
        fixed_sizes: Mapping[str, int] = MappingProxyType({}),
        refit: Mapping[str, RefitGraph] | None = None,
    ) -> ExportResult:
        """Load a model and export its parts, one at a time; side effects of the forwards are undone.

        Args:
            load: Loads the model; returns also the exporter to begin with.
            target: Paths and files to write.
            live_module: The module in memory, if not loaded from a checkpoint.
            request: The request for a checkpoint, for weights in few bits.
            fixed_sizes: Sizes that an earlier attempt had to fix, by key of ``--shape-config``.
            refit: Part → its traced graph, of a refit.

        Raises:
            OutputExistsError: an output exists and may not be replaced.
            UsageError: an option does not fit the model.
            InputError: the options require a newer ONNX Runtime.
        """
        started = datetime.now(timezone.utc)
        target.paths().refuse_existing(overwrite=target.overwrite)
        recover([target.paths().model])
        if self.proof is not None:
            refuse_existing(proof_paths(target.paths().model.parent), overwrite=target.overwrite)
        if target.functions is not None:
            refuse_old_runtime()
        clock = StepClock(STEPS, self.on_step)
        with ExitStack() as restorations:
            restorations.enter_context(restored_process_state())
            restorations.enter_context(restored_working_directory())
            with clock.step("model preparation") as step:
                # Deciding the inputs of a live module may run the module as well.
                if live_module is not None:
                    module_state = restorations.enter_context(restored_module_state(live_module))
                loaded, exporter = load()
                if live_module is None:
                    module_state = restorations.enter_context(restored_module_state(loaded.model))
                if refit is not None:
                    from winml.modelkit.export.refit_graph import refuse_other_parts

                    refuse_other_parts(refit, [part.name for part in loaded.requested_parts])
                self._refuse_options(loaded, target)
                parameter_count = sum(parameter.numel() for parameter in loaded.model.parameters())
                step.summary = f"{loaded.info.class_name}, {count_words(parameter_count)} parameters"
                if self.on_parts is not None:
                    self.on_parts(tuple(part.name for part in loaded.requested_parts))
                all_parts = calls_of_all_parts(loaded, self.seed) if refit is None else None
            result = ExportResult(loaded.info, (), started, __version__, loaded.model_notes)
            if loaded.info.source_kind in CHECKPOINT_KINDS:
                restorations.enter_context(local_files_only())
            with OutputFiles() as files:
                handover = self.handover
                if handover is None and request is not None and loaded.info.source_format is not None:
                    # Its quantizers are for checkpoints in few bits alone.
                    from winml.modelkit.export.coded_checkpoints import handover_of_codes

                    handover = handover_of_codes(request, self.config)
                proof = self._make_proof(loaded, request)
                run = ExportRun(
                    self.config,
                    self.seed,
                    clock,
                    target,
                    loaded,
                    files,
                    all_parts,
                    handover,
                    proof=proof,
                    fixed_sizes=fixed_sizes,
                    refit=refit,
                )
                for part in loaded.requested_parts:
                    result = export_part(run, result, part, exporter)
        result = replace(result, model_notes=(*result.model_notes, *module_state.notes))
        return result.in_folder(target.named_folder)

    def _make_proof(self, loaded: LoadedModel, request: ModelRequest | None) -> ProofMaker | None:
        """Return the maker of the requested proof; `None` without a request."""
        if self.proof is None:
            return None
        from winml.modelkit.compare.proof.recording import ProofMaker

        folder = None if request is None else processor_folder(request)
        return ProofMaker(self.proof, loaded.info.class_name, len(loaded.requested_parts), folder)

    def _refuse_options(self, loaded: LoadedModel, target: ExportTarget) -> None:
        """Refuse options that do not fit the loaded model.

        Raises:
            UsageError: a dynamic dimension that the provider does not support, functions of unknown modules, images of
                any size with dynamo, or one list of outputs for several parts.
            OutputExistsError: a file of a part exists.
        """
        if target.functions is not None:
            refuse_unregistered(loaded.model, target.functions)
        if self.config.activations is not None and loaded.info.source_format is None:
            raise UsageError(
                f"{opt.activations} {self.config.activations}: {loaded.info.name_or_path} has no quantized weights",
                hint="Omit it. The option is for quantized checkpoints.",
            )
        for part in loaded.requested_parts:
            if self.config.exporter == "dynamo" and part.open_grids is not None:
                raise UsageError(
                    f"{opt.dynamo}: part {part.name} takes image sizes as values of {part.open_grids}, which only the "
                    "TorchScript exporter supports",
                    hint=f"Omit {opt.dynamo}.",
                )
        # The embedding reads a prompt with its images in one run, on the CPU.
        is_dynamic = any(part.dimensions for part in loaded.requested_parts if part.name != EMBEDDING)
        try:
            refuse_dynamic(self.config.ep, is_dynamic=is_dynamic, allow_dynamic=self.config.allow_dynamic)
        except UsageError as error:
            if any(part.open_grids is not None for part in loaded.requested_parts):
                size = json.dumps({"height": _IMAGE_EDGE, "width": _IMAGE_EDGE})
                error.hint = f"The images have any size. Fix it, for example with {opt.shape_config} '{size}'."
            elif any(part.cache is not None for part in loaded.parts):
                error.hint = (
                    "A graph with a KV cache has dynamic dimensions by default, and one of this graph has no key in "
                    f"{opt.shape_config}. Pass {opt.no_cache}, or add {opt.allow_dynamic} and fix the sizes later."
                )
            raise
        if len(loaded.parts) == 1:
            return
        for part in loaded.requested_parts:
            target.part_paths(part).refuse_existing(overwrite=target.overwrite)
        if self.config.output_tensors is not None:
            names = ", ".join(part.name for part in loaded.parts)
            raise UsageError(
                f"output_tensors describes the outputs of one graph, and the model has several parts: {names}",
                hint="Omit output_tensors.",
            )


_IMAGE_EDGE = 448
"""Chosen: a size in a hint, a multiple of 28 and 32, the merged patches of Qwen2-VL and Qwen3-VL."""


def frozen_by_default(names: Collection[str], parts: Sequence[ModelPart]) -> dict[str, int]:
    """Return key of ``--shape-config`` → size, for dynamic dimensions that are dynamic by default.

    `{}` if one of them is the length of a cache.

    One row, one new token in a decoder, and the traced number of tokens or frames of the first part with tokens or
    frames.

    Args:
        names: Dimensions that the graph does not support as dynamic.
        parts: The parts of the model, in the order in which they run.
    """
    if any(part.open_by_default.get(name) == PAST_KEY for part in parts for name in names):
        return {}  # a decoder whose cache has a fixed length generates no text
    closing = closing_sizes(parts) or {}
    steps = ("batch_size", "decoder_sequence_length")
    sizes: dict[str, int] = {}
    for part in parts:
        for name in (name for name in names if name in part.open_by_default):
            traced = part.trace_sizes[name]
            sizes.setdefault(part.open_by_default[name], closing.get(name, traced) if name in steps else traced)
    return sizes


def _frozen_notes(sizes: Mapping[str, int], parts: Sequence[ModelPart]) -> Iterator[str]:
    """Yield notes on sizes that were fixed because the exporter froze the dynamic dimension.

    Args:
        sizes: By key of ``--shape-config``.
        parts: The parts, with these sizes dynamic.
    """
    for key, size in sizes.items():
        names = {
            (part.name, name) for part in parts for name, size_key in part.open_by_default.items() if size_key == key
        }
        axes = [
            f"axis {axis} of {spec.name}"
            for part in parts
            for spec in part.inputs
            if spec.cache is None
            for axis, name in enumerate(spec.shape)
            if (part.name, name) in names
        ]
        # Within the positions of any model that takes the first.
        other_size = json.dumps({key: size // 2 if size > 1 else 2})
        yield (
            f"{key} ({', '.join(dict.fromkeys(axes))}) is fixed to {size}: as a dynamic dimension, it was frozen by "
            f"the exporter. For a different size: {opt.shape_config} '{other_size}'."
        )
