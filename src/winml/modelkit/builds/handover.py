"""Which builds hand the exported graph over in memory, and what do their stages look like?

Where the exported graph gets fewer bits tensor by tensor, no file holds it as it was exported: its weights go from the
checkpoint to the quantized file. Why: docs/decisions/0010-no-float-copy.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.builds.plan import BuildPlan
from winml.modelkit.builds.quantization import idle_quantization, quantize_options
from winml.modelkit.builds.stages import Stage, StageOutcome, StageTask, export_outcomes
from winml.modelkit.quantize.precisions import MODES
from winml.modelkit.results.build_manifest import StageName, StageRecord

if TYPE_CHECKING:
    import onnx_ir as ir

    from winml.modelkit.flows.graph_file import GraphWork
    from winml.modelkit.flows.graph_handover import GraphHandover
    from winml.modelkit.results.export_result import ExportedPart

__all__ = ["handed_over_stages"]

_TAKER: StageName = "quantize"


def handed_over_stages(stages: Sequence[Stage], plan: BuildPlan) -> tuple[Stage, ...]:
    """Return the stages of a build: as they are, or with the export and the optimizer as part of ``quantize``.

    Args:
        stages: The stages of every build.
        plan: What this one is to do.
    """
    by_name = {stage.name: stage for stage in stages}
    if not {"export", _TAKER} <= by_name.keys() or not _is_handed_over(plan):
        return tuple(stages)
    before = [
        stage for stage in stages[: list(by_name).index(_TAKER)] if getattr(plan.config, stage.section) is not None
    ]
    quantize = by_name["quantize"]

    def options(plan: BuildPlan) -> dict[str, Any]:
        return {key: value for stage in (*before, quantize) for key, value in stage.options(plan).items()}

    def undo_resolution(options: dict[str, Any], earlier: StageRecord) -> dict[str, Any]:
        return {**options, **by_name["export"].undo_resolution(options, earlier)}

    taker = replace(
        quantize,
        libraries=tuple(dict.fromkeys(name for stage in (*before, quantize) for name in stage.libraries)),
        options=options,
        work=_run_handed_over,
        makes_graph=True,
        undo_resolution=undo_resolution,
        relevant=by_name["export"].relevant,
    )
    givers = {stage.name: replace(stage, makes_graph=False, handed_to=_TAKER) for stage in before}
    return tuple(taker if stage is quantize else givers.get(stage.name, stage) for stage in stages)


def _is_handed_over(plan: BuildPlan) -> bool:
    """Say whether every bit is taken away tensor by tensor, of a model that is still to be exported."""
    section = plan.config.quant
    if plan.onnx_path is not None or section is None or idle_quantization(section):
        return False
    return all(MODES[mode].is_by_tensor for _, mode in quantize_options(section).requested_modes())


def _run_handed_over(task: StageTask) -> tuple[StageOutcome, ...]:
    from winml.modelkit.flows.export.export import HTPExporter

    config, request = task.plan.config.export, task.plan.request
    assert config is not None  # an export is planned
    exporter = HTPExporter(
        config,
        seed=request.seed,
        on_step=task.on_step,
        on_parts=task.claim_parts,
        handover=_handover_of(task.plan),
    )
    result = exporter.export_checkpoint(request, task.output, overwrite=True, with_companions=False)
    outcomes = export_outcomes(task.plan, result)
    return tuple(
        replace(outcome, summary=_summary(task.plan, part))
        for outcome, part in zip(outcomes, result.parts, strict=True)
    )


def _handover_of(plan: BuildPlan) -> GraphHandover:
    from winml.modelkit.builds.decoder_fusions import optimization_of
    from winml.modelkit.flows.graph_file import EXTERNAL_BYTES
    from winml.modelkit.flows.graph_handover import GraphHandover
    from winml.modelkit.flows.optimize import SingleOptimization
    from winml.modelkit.flows.quantize.quantize import Quantization

    optim, quant = plan.config.optim, plan.config.quant
    assert quant is not None  # the graph is handed to it
    options = quantize_options(quant)

    def works(path: Path, model: ir.Model) -> Sequence[GraphWork[Any]]:
        chosen = None if optim is None else optimization_of(optim, model, plan)
        optimization = [] if chosen is None or chosen.is_empty else [SingleOptimization(chosen, {})]
        return [*optimization, Quantization(path, options, {})]

    least = Quantization(Path(), options, {}).least_sqnr_db
    return GraphHandover(works, least_sqnr_db=least, external_from_bytes=EXTERNAL_BYTES)


def _summary(plan: BuildPlan, part: ExportedPart) -> str:
    from winml.modelkit.compare.words import fidelity_words

    assert plan.config.quant is not None  # the graph was handed to it
    options = quantize_options(plan.config.quant)
    modes = ", ".join(options.modes())
    compared = "not compared with PyTorch" if part.fidelity is None else fidelity_words(part.fidelity)
    return "; ".join((f"opset {part.opset_produced}, {options.base.name} ({modes})", *part.done, compared))
