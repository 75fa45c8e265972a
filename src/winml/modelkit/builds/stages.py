"""Which stages does a build have, and what does each of them do?

Data: :data:`STAGES` says what each reads, writes and depends on, and ``build_flow`` runs them in this order. A stage
that this version lacks stands there without work, so that a build can say so; giving it work is all it takes to add it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.builds.plan import BuildPlan, request_record
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.file_names import BUILD_CONFIG_NAME, BUILT_MODEL_NAME, data_path, sidecar_path
from winml.modelkit.results.build_manifest import StageName, StageRecord

if TYPE_CHECKING:
    from winml.modelkit.progress import StepEvent
    from winml.modelkit.results.optimized_model import OptimizedFile

__all__ = ["STAGES", "Stage", "StageOutcome", "StageTask", "names_of"]

_GRAPH_LIBRARIES = ("onnx", "onnx-ir", "onnxruntime", "onnxscript")


@dataclass(frozen=True)
class StageTask:
    """What one run of a stage is given."""

    plan: BuildPlan
    source: Path | None
    """Result of the stage before it, or the ONNX file the build starts from; None for the export."""
    output: Path
    """Where its model goes; other files go beside it."""
    on_step: Callable[[StepEvent], None] | None


@dataclass(frozen=True)
class StageOutcome:
    """What one run of a stage did."""

    files: tuple[Path, ...]
    """What it wrote, the model first."""
    normalizations: int
    """How often it brought the graph into its plain form."""
    summary: str
    notes: tuple[str, ...] = ()
    resolved: Mapping[str, Any] = field(default_factory=dict)
    """Sections of the config as it decided them, as JSON values."""


@dataclass(frozen=True)
class Stage:
    """One stage of a build."""

    name: StageName
    file: str
    """The model it writes."""
    section: str
    """Section of the config; null skips it."""
    libraries: tuple[str, ...]
    """Distributions that do the work: other versions may give another result."""
    options: Callable[[BuildPlan], dict[str, Any]]
    """What of the plan decides its result, as JSON values."""
    work: Callable[[StageTask], StageOutcome] | None
    """None: this version lacks the stage."""
    makes_graph: bool = False
    """Whether it makes a graph from a PyTorch model, rather than changing one."""
    as_asked_before: Callable[[dict[str, Any], StageRecord], dict[str, Any]] = lambda options, _earlier: options
    """Options, with what they say just as an earlier run decided it put back to what that run was asked."""


_WITHOUT_EFFECT = {"ep", "allow_dynamic"}
"""Keys of the export section that only decide whether it is refused."""


def _export_options(plan: BuildPlan) -> dict[str, Any]:
    assert plan.config.export is not None  # skipped otherwise
    export = plan.config.export.model_dump(mode="json", exclude=_WITHOUT_EFFECT)
    return {"request": request_record(plan.request), "export": export}


def _export_as_asked_before(options: dict[str, Any], earlier: StageRecord) -> dict[str, Any]:
    """Put back what a config says because an earlier build wrote it there."""
    before = earlier.origin.options if earlier.origin is not None else {}
    if not {"request", "export"} <= before.keys() or not {"loader", "export"} <= earlier.resolved.keys():
        return options
    decided = WinMLExportConfig.model_validate_json(json.dumps(earlier.resolved["export"]))
    written = decided.model_dump(mode="json")
    request, export = dict(options["request"]), dict(options["export"])
    for key, value in export.items():
        if value is not None and value == written[key] and key in before["export"]:
            export[key] = before["export"][key]
    if "task" in request and request["task"] == earlier.resolved["loader"].get("task"):
        _put_back(request, before["request"], "task")
    inputs = [spec.model_dump(mode="json", exclude_none=True) for spec in decided.input_tensors or ()]
    if request.get("input_specs") == inputs and _is_implied(request["dynamic"], before["request"]["dynamic"], written):
        _put_back(request, before["request"], *_INPUT_KEYS)
    return {"request": request, "export": export}


_INPUT_KEYS = ("input_specs", "shape_config", "batch_size", "dynamic")
"""Keys of a request that only say what the inputs are to be."""


def _is_implied(now: Mapping[str, Any], before: Mapping[str, Any], written: Mapping[str, Any]) -> bool:
    """Say whether a wish for open dimensions asks for nothing that the inputs as written do not have already."""
    wishes = {**now, "dimensions": now["dimensions"] if now["dimensions"] != written["dynamic_dimensions"] else []}
    return all(not value or value == before.get(key) for key, value in wishes.items())


def _put_back(request: dict[str, Any], before: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        request.pop(key, None)
    request.update({key: before[key] for key in keys if key in before})


def _export(task: StageTask) -> StageOutcome:
    from winml.modelkit.flows.export.export import HTPExporter
    from winml.modelkit.results.words import verification_words

    config, request = task.plan.config.export, task.plan.request
    assert config is not None  # skipped otherwise
    exporter = HTPExporter(config, seed=request.seed, on_step=task.on_step)
    result = exporter.export_checkpoint(request, task.output, overwrite=True)
    loader = task.plan.config.loader
    assert loader is not None  # the plan fills it
    loader = loader.model_copy(update={"task": result.model.task, "model_class": result.model.class_name})
    decided = {
        "opset_version": result.opset_produced,
        "input_tensors": result.inputs,
        "dynamic_dimensions": result.dimensions,
    }
    resolved = task.plan.config.model_copy(update={"loader": loader, "export": config.model_copy(update=decided)})
    record = resolved.as_record()
    return StageOutcome(
        files=tuple(file.path for file in result.files),
        normalizations=1,
        summary=f"opset {result.opset_produced}, {verification_words(result.verification)}",
        notes=result.notes,
        resolved={"loader": record["loader"], "export": record["export"]},
    )


def _optimize_options(plan: BuildPlan) -> dict[str, Any]:
    assert plan.config.optim is not None  # skipped otherwise
    flags = plan.config.optim.model_dump(mode="json", exclude_none=True)
    return {"optim": flags, "skip_pre_normalization": plan.skip_pre_normalization, "verify": plan.verify}


def _optimize(task: StageTask) -> StageOutcome:
    from winml.modelkit.flows.graph_file import CopyRules, GraphFileTask
    from winml.modelkit.flows.optimize import EXTERNAL_BYTES, optimize_file

    section = task.plan.config.optim
    assert section is not None  # skipped otherwise
    assert task.source is not None  # an export ran before, or the build starts from an ONNX file
    # Files of this build may share data and name each other; the user's file must stay free to be changed.
    is_ours = task.source != task.plan.onnx_path
    skips = task.plan.skip_pre_normalization
    result = optimize_file(
        GraphFileTask(
            task.source,
            task.output,
            overwrite=True,
            verify=task.plan.verify,
            seed=task.plan.request.seed,
            skip_normalization=skips and section.is_empty,
            external_from_bytes=EXTERNAL_BYTES,
            copying=CopyRules(share_data=is_ours, may_link=is_ours, of_any_form=skips),
        ),
        section,
    )
    if result.is_copy:
        return _copied_by_reference(result)
    ignored = (_IGNORED_SKIP,) if skips else ()
    return StageOutcome(
        files=tuple(file.path for file in result.files),
        normalizations=result.normalizations,
        summary=_optimized_words(result),
        notes=(*ignored, *result.notes),
    )


_IGNORED_SKIP = "--skip-pre-normalization is ignored: what the optimizer is asked for needs the plain form."


def _copied_by_reference(result: OptimizedFile) -> StageOutcome:
    """Return the outcome where nothing was asked for that would change the source."""
    from winml.modelkit.graph.files.placing import external_files

    return StageOutcome(
        files=(result.model_path, *external_files(result.model_path)),
        normalizations=0,
        summary="already normalized" if result.is_plain else "not normalized (--skip-pre-normalization)",
    )


def _optimized_words(result: OptimizedFile) -> str:
    fired = ", ".join(f"{name} {count}" for name, count in result.fired.items() if count)
    return f"from {result.before.nodes}{f': {fired}' if fired else ''}"


def _section_options(section: str) -> Callable[[BuildPlan], dict[str, Any]]:
    return lambda plan: {section: getattr(plan.config, section).model_dump(mode="json", exclude_none=True)}


STAGES: tuple[Stage, ...] = (
    Stage(
        name="export",
        file="export.onnx",
        section="export",
        libraries=("torch", "transformers", *_GRAPH_LIBRARIES),
        options=_export_options,
        work=_export,
        makes_graph=True,
        as_asked_before=_export_as_asked_before,
    ),
    # Before quantize: fusions look for operators that quantization takes apart.
    Stage(
        name="optimize",
        file="optimized.onnx",
        section="optim",
        libraries=_GRAPH_LIBRARIES,
        options=_optimize_options,
        work=_optimize,
    ),
    Stage(
        name="quantize",
        file="quantized.onnx",
        section="quant",
        libraries=_GRAPH_LIBRARIES,
        options=_section_options("quant"),
        work=None,
    ),
    # Last: what is compiled for one device can no longer be changed.
    Stage(
        name="compile",
        file="compiled.onnx",
        section="compile",
        libraries=_GRAPH_LIBRARIES,
        options=_section_options("compile"),
        work=None,
    ),
)


def names_of(stages: tuple[Stage, ...]) -> tuple[str, ...]:
    """Return every name a build of these stages may write, the manifest apart."""
    models = [Path(name) for name in (*(stage.file for stage in stages), BUILT_MODEL_NAME)]
    sidecars = [str(sidecar_path(Path(stage.file))) for stage in stages if stage.makes_graph]
    return (*(str(path) for path in models), *(str(data_path(path)) for path in models), *sidecars, BUILD_CONFIG_NAME)
