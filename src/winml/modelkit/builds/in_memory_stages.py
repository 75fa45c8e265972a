"""Stages of builds that change the exported graph in memory, without a file of the exported graph.

A graph with weights quantized separately is written to the final file directly, and so is the graph of a checkpoint
with quantized weights, and a decoder fused for a runtime without a comparison (docs/decisions/0010-no-float-copy.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from winml.modelkit.builds.config import quantize_options
from winml.modelkit.builds.dtypes import planned_optimization
from winml.modelkit.builds.plan import BuildPlan, packs_projections, stage_in_memory
from winml.modelkit.builds.stages import Stage, StageOutcome, StageTask, external_from_bytes, run_export

if TYPE_CHECKING:
    from winml.modelkit.export.records import ExportedPart
    from winml.modelkit.quantize.file_quantization import Quantization
    from winml.modelkit.transform.graph_file import GraphHandover, GraphWork


def handed_over_stages(stages: Sequence[Stage], plan: BuildPlan) -> tuple[Stage, ...]:
    """Return the stages of a build; earlier stages become part of ``quantize`` or ``optimize`` if done in memory.

    Args:
        stages: The stages of every build.
        plan: The build.
    """
    by_name = {stage.name: stage for stage in stages}
    name = stage_in_memory(plan)
    if name is None or not {"export", name} <= by_name.keys():
        return tuple(stages)
    before = [stage for stage in stages[: list(by_name).index(name)] if getattr(plan.config, stage.section) is not None]
    fused = by_name[name]

    def options(plan: BuildPlan) -> dict[str, object]:
        return {key: value for stage in (*before, fused) for key, value in stage.options(plan).items()}

    by_stage = {stage.name: replace(stage, makes_graph=False, handed_to=name) for stage in before}
    by_stage[name] = replace(
        fused,
        libraries=tuple(dict.fromkeys(library for stage in (*before, fused) for library in stage.libraries)),
        options=options,
        work=_run_quantize if name == "quantize" else _run_optimize,
        makes_graph=True,
    )
    return tuple(by_stage.get(stage.name, stage) for stage in stages)


def _run_quantize(task: StageTask) -> tuple[StageOutcome, ...]:
    """Export, optimize and quantize all parts in memory."""
    names: list[str] = []

    def keep_names(parts: Sequence[str]) -> None:
        names[:] = parts
        task.claim_parts(parts)

    assert task.plan.config.quant is not None  # the graph is handed to it
    precision = quantize_options(task.plan.config.quant).words
    with contextlib.ExitStack() as stack:  # a calibrated search holds its weights until they are written
        quantizations: dict[str, Quantization] = {}
        handover = _handover_to_quantize(task.plan, stack, names, quantizations)
        outcomes = run_export(replace(task, claim_parts=keep_names), handover, partial(_summarize_part, precision))
    searches = [quantizations[outcome.files[0].name].outcome.search for outcome in outcomes]
    return tuple(
        outcome if search is None else replace(outcome, notes=(search.note, *outcome.notes))
        for outcome, search in zip(outcomes, searches, strict=True)
    )


def _run_optimize(task: StageTask) -> tuple[StageOutcome, ...]:
    """Export and optimize all parts in memory."""
    return run_export(task, _handover_to_optimize(task.plan), partial(_summarize_part, ""))


def _handover_to_quantize(
    plan: BuildPlan, stack: contextlib.ExitStack, names: Sequence[str], quantizations: dict[str, Quantization]
) -> GraphHandover:
    """Return the handover of exported graphs to the optimization and quantization of a build.

    Args:
        plan: The build.
        stack: Closed after the files are written.
        names: Names of all parts, once they are known.
        quantizations: Output: name of the file of a part → its quantization.
    """
    from winml.modelkit.models.request import processor_folder
    from winml.modelkit.quantize.calibration.calibration_data import Calibration
    from winml.modelkit.quantize.file_quantization import Quantization
    from winml.modelkit.transform.graph_file import GraphHandover, is_external

    quant = plan.config.quant
    assert quant is not None  # the graph is handed to it
    options = quantize_options(quant)
    processors = processor_folder(plan.request)
    external = external_from_bytes(plan, "quantize")
    goes_outside = partial(is_external, from_bytes=external)

    def works(path: Path, model: ir.Model) -> Sequence[GraphWork[Any]]:
        samples = Calibration(options, processors or path.parent, {}, plan.request.seed)
        other_parts = [work for name, work in quantizations.items() if name != path.name]
        # Parts already within the limit may stay float, except the last one if all others did.
        all_stay = len(other_parts) + 1 == len(names) and all(work.outcome.stays_float for work in other_parts)
        work = Quantization(path, options, {}, may_stay_float=not all_stay, packs_projections=packs_projections(plan))
        quantizations[path.name] = stack.enter_context(work.equipped(samples, path, goes_outside))
        return [*_optimization_work(plan, model), quantizations[path.name]]

    data_set = options.judging_request(plan.request.seed)
    return GraphHandover(works, external_from_bytes=external, processors=processors, data_set=data_set)


def _handover_to_optimize(plan: BuildPlan) -> GraphHandover:
    """Return the handover of exported graphs to their optimization, after decoding of quantized weights."""
    from winml.modelkit.export.coded_checkpoints import handover_of_codes
    from winml.modelkit.transform.graph_file import GraphHandover

    export = plan.config.export
    assert export is not None  # an export is planned
    codes = handover_of_codes(plan.request, export) if plan.has_coded_weights else None

    def works(path: Path, model: ir.Model) -> Sequence[GraphWork[Any]]:
        return [*(codes.works(path, model) if codes is not None else ()), *_optimization_work(plan, model)]

    external = external_from_bytes(plan, "optimize")
    processors = None if codes is None else codes.processors
    return GraphHandover(works, external, processors, lowers_precision=codes is not None)


def _optimization_work(plan: BuildPlan, model: ir.Model) -> list[GraphWork[Any]]:
    """Return the optimization of a graph as one item of work; ``[]`` if no optimization is requested."""
    from winml.modelkit.builds.decoder_fusions import optimization_of
    from winml.modelkit.optimize.file_optimization import SingleOptimization

    planned = planned_optimization(plan.config)
    if planned is None:
        return []
    options = optimization_of(planned, model, plan)
    return [] if options.is_empty else [SingleOptimization(options, {})]


def _summarize_part(quantized: str, part: ExportedPart) -> str:
    """Summarize the changes of a part in a few words; ``quantized`` names the precision, ``""`` without one."""
    from winml.modelkit.compare.words import fidelity_words

    compared = "not compared with PyTorch" if part.fidelity is None else fidelity_words(part.fidelity)
    precision = f", {quantized}" if quantized else ""
    return "; ".join((f"opset {part.opset_produced}{precision}", *part.done, compared))
