"""The stages of a build, with their work, options and files.

:data:`STAGES` declares the input, output and dependencies of each stage; ``build.py`` runs them in this order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit import file_names
from winml.modelkit.builds.config import (
    CompileSection,
    OptimSection,
    auto_words,
    idle_quantization,
    quantize_options,
    requested_quantization,
)
from winml.modelkit.builds.dtypes import (
    dtype_file,
    dtype_quantization,
    dtypes_of,
    planned_optimization,
    quantized_dtypes,
    requested_quantizations,
)
from winml.modelkit.builds.layouts.layout import find_layout, refuse_task
from winml.modelkit.builds.manifest_records import FileRecord, StageName, StageQuality, StageRecord
from winml.modelkit.builds.plan import (
    BuildPlan,
    fused_attention_variant,
    idle_compilation,
    is_for_onnxruntime,
    packs_projections,
    request_record,
    without_compilation,
)
from winml.modelkit.compare.fidelity import FidelityInfo
from winml.modelkit.errors import StageError, UsageError, VerificationError, WinMLError, opt, spell
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.models.checkpoints.adapters import named_adapter
from winml.modelkit.onnx.specs import current_name
from winml.modelkit.optimize.capabilities import LEVELS
from winml.modelkit.options import Options
from winml.modelkit.quantize.calibration.calibration_files import calibration_files, calibration_kind
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.precisions import FLOAT32
from winml.modelkit.registries import installed_sources
from winml.modelkit.samples.processors import processor_files

if TYPE_CHECKING:
    from winml.modelkit.builds.config import WinMLBuildConfig
    from winml.modelkit.compile.pipeline import SharedContexts
    from winml.modelkit.export.records import ExportedPart, ExportResult
    from winml.modelkit.models.resolution import ResolvedModel
    from winml.modelkit.onnx.files.output_files import OutputFiles
    from winml.modelkit.progress import OnStep
    from winml.modelkit.quantize.records import QuantizedFile
    from winml.modelkit.transform.graph_file import GraphFileTask, GraphHandover
    from winml.modelkit.transform.records import TransformedFile

_GRAPH_LIBRARIES = ("onnx", "onnx-ir", "onnxruntime", "onnxscript")


@dataclass
class BuiltPart:
    """One part of the model, with the results of the stages so far."""

    name: str
    of_several: bool
    current: Path | None
    """Result of the stages so far; None before the first."""
    current_files: tuple[FileRecord, ...] = ()
    """Files of the result; empty if it is the source model."""
    records: list[StageRecord] = field(default_factory=list)

    def add(self, record: StageRecord, folder: Path) -> None:
        """Add the result of the next stage."""
        self.records.append(record)
        if record.files:
            self.current, self.current_files = folder / record.files[0].name, record.files

    @property
    def has_run(self) -> bool:
        """True if a stage ran in this build; False if all results were reused."""
        return any(record.status == "run" for record in self.records)

    @property
    def exported(self) -> tuple[FileRecord, FileRecord] | None:
        """The exported model and its sidecar; None without a sidecar."""
        for record in self.records:
            sidecar = next((file for file in record.files if file.name.endswith(file_names.SIDECAR_SUFFIX)), None)
            if sidecar is not None:
                return record.files[0], sidecar
        return None


@dataclass(frozen=True)
class StageTask:
    """Input of one run of a stage."""

    plan: BuildPlan
    source: Path | None
    """Result of the previous stage, or the source ONNX file; None for the export."""
    output: Path
    """Path of its model; other files are beside it. A stage that makes several graphs writes ``<stem>_<part>.onnx``."""
    on_step: OnStep | None
    claim_parts: Callable[[Sequence[str]], None]
    """Called by a stage that makes graphs, with the names of all parts, before it writes a file."""
    statistics: Path | None = None
    """Folder with statistics of activations, shared with other builds; None: not stored."""
    of_several: bool = False
    """True if the source is one of several parts."""
    sources: Mapping[str, Path] = field(default_factory=dict)
    """Part → result of the previous stage, for a stage that changes all parts together."""


@dataclass(frozen=True)
class StageOutcome:
    """Result of one run of a stage for one part."""

    files: tuple[Path, ...]
    """Written files, the model first."""
    normalizations: int
    """Number of normalizations of the graph."""
    summary: str
    quality: StageQuality | None = None
    """Similarity to the source, of a stage that loses precision."""
    part: str = file_names.ONLY_PART
    """Name of the part; used for a stage that makes graphs."""
    seconds: float | None = None
    """Seconds for this part; None: the time of the whole run."""
    notes: tuple[str, ...] = ()
    assumed: tuple[dict[str, Any], ...] = ()
    """Assumptions of the graph about its inputs, as JSON values."""
    resolved: Mapping[str, Any] = field(default_factory=dict)
    """Sections of the config as resolved by the stage, as JSON values."""
    dynamic: tuple[str, ...] = ()
    """Names of the dynamic dimensions of an exported graph."""
    openable_sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Of an exported graph: option that makes sizes dynamic → key of ``--shape-config`` → fixed size."""


@dataclass(frozen=True)
class Stage:
    """One stage of a build."""

    name: StageName
    file: str
    """File name of its model; ``<stem>_<part>.onnx`` for each of several parts."""
    section: str
    """Section of the config; null skips it."""
    options: Callable[[BuildPlan], dict[str, Any]]
    """Returns the values of the plan that affect its result, as JSON values."""
    work: Callable[[StageTask], tuple[StageOutcome, ...]]
    """Returns one outcome for each graph it made."""
    libraries: tuple[str, ...] = _GRAPH_LIBRARIES
    """Distributions that it uses: other versions may lead to another result."""
    makes_graph: bool = False
    """True if it makes the graphs of all parts from a PyTorch model; False if it changes one graph."""
    idle: Callable[[WinMLBuildConfig], str] = lambda _config: ""
    """Returns the reason why it does nothing although its section is not null, or ""."""
    takes_bits: bool = False
    """True if the result is approximate, so that errors of several parts add up."""
    idle_for: Callable[[WinMLBuildConfig, str], str] = lambda _config, _part: ""
    """Returns the reason why it does nothing for a part, or ""."""
    joins_parts: Callable[[WinMLBuildConfig], bool] = lambda _config: False
    """Returns True if it changes the graphs of all parts together; the results are one for each part."""
    handed_to: StageName | None = None
    """Stage that includes its work, on the graph in memory; None: it writes its own file."""


_REFUSAL_KEYS = {"ep", "allow_dynamic"}
"""Keys of the export section that may refuse an export, but do not affect the graph."""


def _export_options(plan: BuildPlan) -> dict[str, object]:
    """Return the values of the plan that affect an exported graph."""
    assert plan.config.export is not None  # skipped otherwise
    export = plan.config.export.model_dump(mode="json", exclude=_REFUSAL_KEYS)
    record: dict[str, object] = {"request": request_record(plan.request), "export": export}
    if plan.is_refittable:
        record["refittable"] = True
    if plan.refit is not None:
        record["refitted"] = True  # a build traces the model again
    # A model family of a plug-in may determine the parts of any model.
    return {**record, **({"families": families} if (families := installed_sources("families")) else {})}


def undo_export_resolution(options: dict[str, Any], earlier: StageRecord) -> dict[str, Any]:
    """Replace values that an earlier build resolved by the requested values; options without an export stay.

    The record of the stage has both: the request in ``origin.options``, the resolved sections in ``resolved``. A value
    that equals the resolved value becomes the requested value.
    """
    earlier_options = earlier.origin.options if earlier.origin is not None else {}
    is_export = {"request", "export"} <= earlier_options.keys() & options.keys()
    if not is_export or not {"loader", "export"} <= earlier.resolved.keys():
        return options
    resolved_export = WinMLExportConfig.model_validate_json(json.dumps(earlier.resolved["export"]))
    resolved_values, loader = resolved_export.model_dump(mode="json"), earlier.resolved["loader"]
    request, old_request = options["request"], earlier_options["request"]
    export = {
        key: earlier_options["export"].get(key, value) if value is not None and value == resolved_values[key] else value
        for key, value in options["export"].items()
    }
    dynamic = request["dynamic"]
    if any(spec.cache is not None for spec in resolved_export.input_tensors or ()):
        # These sizes of a decoder with a cache are dynamic even without a request.
        names = {current_name(dimension.name) for dimension in resolved_export.dynamic_dimensions}
        for size in (size for size, key in _SIZES_OF_DECODERS.items() if key in names):
            export[f"dynamic_{size}"] = earlier_options["export"].get(f"dynamic_{size}")
            dynamic = {**dynamic, size: old_request["dynamic"].get(size)}
    restored_keys = [key for key in ("task", "model_class") if key in request and request[key] == loader.get(key)]
    inputs = [spec.model_dump(mode="json", exclude_none=True) for spec in resolved_export.input_tensors or ()]
    open_sizes = {"dimensions": resolved_values["dynamic_dimensions"]}
    is_implied = all(
        not value or value in (old_request["dynamic"].get(key), open_sizes.get(key)) for key, value in dynamic.items()
    )
    if request.get("input_specs") == inputs and is_implied:
        restored_keys += _INPUT_KEYS
    restored_request = {**request, "dynamic": dynamic}
    request = {key: value for key, value in restored_request.items() if key not in restored_keys}
    return {
        **options,
        "request": {**request, **{key: old_request[key] for key in restored_keys if key in old_request}},
        "export": export,
    }


def relevant_options(options: dict[str, Any], parts: Collection[str]) -> dict[str, Any]:
    """Omit options of an export that apply to parts of other names only."""
    if "request" not in options:
        return options
    unused = {key for key, names in _OPTIONS_OF_PARTS.items() if not set(parts) <= names}
    return {**options, "request": {key: value for key, value in options["request"].items() if key not in unused}}


_OPTIONS_OF_PARTS: Mapping[str, frozenset[str]] = {
    "cross_keys": frozenset({file_names.ENCODER, file_names.DECODER}),
    "embedding_of": frozenset({file_names.VISION, file_names.EMBEDDING, file_names.DECODER}),
}
"""Key of a request → parts of the models that it applies to."""

_SIZES_OF_DECODERS = {"batch": "batch_size", "sequence": "sequence_length"}
"""Key of a request for dynamic dimensions → dimension that is always dynamic in a decoder with a cache."""

_INPUT_KEYS = ("input_specs", "shape_config", "batch_size", "dynamic")
"""Keys of a request that only describe the inputs."""


def run_export(
    task: StageTask, handover: GraphHandover | None = None, summary: Callable[[ExportedPart], str] | None = None
) -> tuple[StageOutcome, ...]:
    """Export a model.

    Args:
        task: The run of the stage.
        handover: Work on the graphs before they are written, or None.
        summary: Returns a summary of a part in a few words; None: opset and comparison.
    """
    from winml.modelkit.export.exporting import HTPExporter

    config, request = task.plan.config.export, task.plan.request
    assert config is not None  # skipped otherwise
    exporter = HTPExporter(
        config,
        seed=request.seed,
        on_step=task.on_step,
        on_parts=task.claim_parts,
        handover=handover,
        check=partial(refuse_resolved, task.plan),
        refit=task.plan.refit,
    )
    # The build itself writes companion and adapter files.
    result = exporter.export_checkpoint(
        request,
        task.output,
        overwrite=True,
        with_companions=False,
        with_adapters=False,
        with_refit_graph=task.plan.is_refittable,
    )
    return export_outcomes(task.plan, result, summary)


def refuse_resolved(plan: BuildPlan, resolved: ResolvedModel) -> None:
    """Refuse a model with a task that the layout does not support, before weights are loaded.

    Raises:
        TaskError: the task is not supported; names the task and the layout.
    """
    if resolved.decision is not None:
        refuse_task(plan.layout, resolved.decision.task, takes_task=True)


def export_outcomes(
    plan: BuildPlan, result: ExportResult, summary: Callable[[ExportedPart], str] | None = None
) -> tuple[StageOutcome, ...]:
    """Convert the result of an export to stage outcomes, one for each part."""
    resolved = _resolved_sections(plan, result)
    is_single = len(result.parts) == 1

    def make_outcome(part: ExportedPart) -> StageOutcome:
        is_first = part is result.parts[0]
        return StageOutcome(
            files=tuple(file.path for file in part.files),
            normalizations=1,
            summary=summary(part) if summary else f"opset {part.opset_produced}, {part.comparison_words}",
            quality=StageQuality.of(part.fidelity),
            part=part.name,
            seconds=None if is_single else part.seconds,
            notes=(*(result.model_notes if is_first else ()), *part.notes),
            assumed=tuple(assumption.as_record() for assumption in part.assumed),
            resolved=resolved if is_first else {},
            dynamic=tuple(dimension.name for dimension in part.dimensions),
            openable_sizes=part.openable_sizes,
        )

    return tuple(make_outcome(part) for part in result.parts)


def _resolved_sections(plan: BuildPlan, result: ExportResult) -> dict[str, object]:
    """Return the sections of the config as resolved by the export; inputs only for a model of one part."""
    loader, export = plan.config.loader, plan.config.export
    assert loader is not None  # the plan fills it
    assert export is not None  # an export ran
    loader = loader.model_copy(update={"task": result.model.task, "model_class": result.model.class_name})
    if result.parts[0].name == file_names.ONLY_PART:
        export_values = {
            "opset_version": result.only_part.opset_produced,
            "input_tensors": result.only_part.inputs,
            "dynamic_dimensions": result.only_part.dimensions,
        }
        export = export.model_copy(update=export_values)
    record = plan.config.model_copy(update={"loader": loader, "export": export}).as_record()
    return {"loader": record["loader"], "export": record["export"]}


def _optimize_options(plan: BuildPlan) -> dict[str, object]:
    stated, options = plan.config.optim, planned_optimization(plan.config)
    assert stated is not None  # skipped otherwise
    assert options is not None
    flags = stated.model_dump(mode="json", exclude_none=True)
    unfused = sorted(entry.name for entry in {*stated.enabled()}.difference(options.enabled()))
    plug_in_record = {"plug_ins": plug_ins} if (plug_ins := options.plug_ins()) else {}
    fuses_decoders = plan.layout.for_onnxruntime or (plan.config.dtypes and is_for_onnxruntime(plan))
    fusion_record: dict[str, object] = {"fuses_decoders": True} if fuses_decoders else {}
    if variant := fused_attention_variant(plan):
        fusion_record["attention"] = sorted(variant)
    if unfused:
        fusion_record["unfused_for_quantization"] = unfused
    record = {"optim": flags, "skip_pre_normalization": plan.skip_pre_normalization, "verify": plan.verify}
    return {**record, **fusion_record, **plug_in_record}


def _file_task(task: StageTask, writer: StageName) -> GraphFileTask:
    """Return the file task of a stage on a single graph: source, output and settings."""
    from winml.modelkit.models.request import processor_folder
    from winml.modelkit.transform.graph_file import GraphFileTask

    assert task.source is not None  # an earlier stage ran, or the build starts from an ONNX file
    return GraphFileTask(
        task.source,
        task.output,
        overwrite=True,
        verify=task.plan.verify,
        seed=task.plan.request.seed,
        external_from_bytes=None if writer == "compile" else external_from_bytes(task.plan, writer),
        processors=None if writer == "optimize" else processor_folder(task.plan.onnx_path or task.plan.request),
        statistics=task.statistics,
        of_several=task.of_several,
    )


def _make_outcomes(result: TransformedFile, summary: str, notes: Sequence[str] = ()) -> tuple[StageOutcome, ...]:
    """Convert the result of a stage on a single file."""
    files = tuple(file.path for file in result.files)
    fidelity = result.comparison if isinstance(result.comparison, FidelityInfo) else None
    quality = StageQuality.of(fidelity)
    return (StageOutcome(files, result.normalizations, summary, quality, notes=(*notes, *result.notes)),)


def _run_optimize(task: StageTask) -> tuple[StageOutcome, ...]:
    """Optimize the file of the previous stage; without requested changes, copy a normalized file."""
    from winml.modelkit.optimize.file_optimization import optimization
    from winml.modelkit.transform.graph_file import make_file

    options, file_task = planned_optimization(task.plan.config), _file_task(task, "optimize")
    assert options is not None  # skipped otherwise
    if task.plan.onnx_path is None or task.plan.layout.for_onnxruntime:
        from winml.modelkit.builds.decoder_fusions import optimization_of
        from winml.modelkit.onnx.files.graph_reading import load_by_reference

        options = optimization_of(options, load_by_reference(file_task.source), task.plan)
    # Files of this build may share data files; the user's source file must stay independent.
    is_ours = task.source != task.plan.onnx_path
    skips = task.plan.skip_pre_normalization
    is_skipped = skips and options.is_empty
    file_task = replace(file_task, skip_normalization=is_skipped, shares_files=is_ours, copies_any_form=skips)
    levels = LEVELS[: LEVELS.index(options.level) + 1] if task.plan.has_default_level else (options.level,)
    notes: list[str] = []
    for level in reversed(levels):
        try:
            result = make_file(file_task, optimization(options.model_copy(update={"level": level}), {}))
            break
        except (StageError, VerificationError) as error:
            if level == levels[0]:
                raise
            notes.append(f"{opt.level} {level} was not used: {error.message}.")
    if result.is_copy:
        from winml.modelkit.onnx.files.placing import external_files

        files = (result.model_path, *external_files(result.model_path))
        summary = "already normalized" if result.is_plain else f"not normalized ({opt.skip_pre_normalization})"
        return (StageOutcome(files, normalizations=0, summary=summary, notes=tuple(notes)),)
    fired = ", ".join(f"{name} {count}" for name, count in result.fired.items() if count)
    summary = f"from {result.before.nodes}{f': {fired}' if fired else ''}"
    if skips:
        notes.append(f"{opt.skip_pre_normalization} is ignored: the requested optimizations need the plain form.")
    return _make_outcomes(result, summary, notes)


def _quantization_record(plan: BuildPlan, options: QuantizeOptions) -> dict[str, object]:
    """Return the values that affect the result of a quantization, as JSON: rules in order, data by content.

    Raises:
        InputError: calibration data cannot be read.
    """
    usage = {"columns": bool(options.columns), "ep": options.takes_constant_tables, "calibration_cache": False}
    unused_options = {name for name, is_read in usage.items() if not is_read}
    record = options.model_dump(mode="json", exclude_none=True, exclude=unused_options)
    if plug_ins := options.plug_ins():
        record["plug_ins"] = plug_ins
    record["per_module"] = [list(rule) for rule in options.per_module.items()]
    record["algorithms"] = [list(rule) for rule in options.algorithms.items()]
    if (data := options.calibrating_data) is not None:
        record |= _data_record(plan, data)
    return record


def _data_record(plan: BuildPlan, data: str) -> dict[str, object]:
    """Return digests of the files of data, and of the processor files that read them beside an ONNX file.

    Raises:
        InputError: the data cannot be read.
    """
    from winml.modelkit.builds.identity import file_digests

    # A data set of the Hub is identified by its name.
    files = calibration_files(data)
    record: dict[str, object] = {"calibration_data": file_digests(files) if files else data}
    if plan.onnx_path is not None and calibration_kind(data) != "arrays":
        # The identity of an ONNX file does not include the processor files beside it.
        record["processors"] = file_digests(processor_files(file_names.files_folder(plan.onnx_path)))
    return record


def _judging_record(plan: BuildPlan) -> dict[str, object]:
    """Return the values of the plan that affect the samples of a comparison; ``{}`` for generated samples."""
    options = requested_quantization(plan.config)
    data = None if options is None else options.dataset or options.calibration_data
    if options is None or data is None or not plan.verify:
        return {}
    selection = {"split": options.split, "columns": dict(options.columns), "samples": options.samples}
    return {"judged_on": {**_data_record(plan, data), **selection, "seed": plan.request.seed}}


def _quantize_options(plan: BuildPlan) -> dict[str, object]:
    """Return the values of the plan that affect a quantized graph, with digests of calibration data."""
    assert plan.config.quant is not None  # skipped otherwise
    options = quantize_options(plan.config.quant)
    may_draw = any(options.needs_samples or options.has_open_mode for options in requested_quantizations(plan.config))
    data = options.calibration_data
    is_drawn = may_draw and (data is None or calibration_kind(data) == "data set")
    seed = {"seed": plan.request.seed} if is_drawn else {}  # determines the samples of the calibration
    dtypes = {"dtypes": list(plan.config.dtypes)} if plan.config.dtypes else {}
    packing = {"packs_projections": True} if packs_projections(plan) else {}
    return {"quant": _quantization_record(plan, options), **dtypes, **packing, "verify": plan.verify, **seed}


def _run_dtypes(task: StageTask) -> tuple[StageOutcome, ...]:
    """Make the files of all dtypes from the file of the previous stage; the first one is the result."""
    from winml.modelkit.onnx.files.placing import external_files

    config, known = task.plan.config, find_layout(task.plan.config.layout).dtypes
    models: dict[str, Path] = {}
    summaries, notes, normalizations = [], list[str](), 0
    for name in quantized_dtypes(config):
        source = models.get(known[name].of, task.source)
        models[name] = dtype_file(task.output, name, config)
        outcome = _run_dtype(replace(task, source=source, output=models[name]), name)
        normalizations += outcome.normalizations
        summaries.append(f"{name}: {outcome.summary}")
        notes += outcome.notes
    paths = [models[name] for name in dict.fromkeys((*config.dtypes, *models))]
    files = dict.fromkeys(file for path in paths for file in (path, *external_files(path)))
    outcome = StageOutcome(tuple(files), normalizations, "; ".join(summaries), notes=tuple(dict.fromkeys(notes)))
    return (outcome,)


def _run_dtype(task: StageTask, dtype: str) -> StageOutcome:
    """Make the file of one dtype.

    Raises:
        WinMLError: the file cannot be made, or its outputs are too far from those of its source; names the dtype.
    """
    from winml.modelkit.optimize.file_optimization import optimization
    from winml.modelkit.optimize.options import OptimizeOptions
    from winml.modelkit.quantize.file_quantization import Quantization
    from winml.modelkit.transform.graph_file import make_file

    file_task, options = _file_task(task, "quantize"), dtype_quantization(task.plan.config, dtype)
    if options is None:
        is_ours = task.source != task.plan.onnx_path
        copy = make_file(replace(file_task, shares_files=is_ours), optimization(OptimizeOptions(), {}))
        return StageOutcome((task.output,), copy.normalizations, "not quantized")
    is_half = bool(options.base.float_type)
    work = Quantization(
        file_task.source,
        options,
        {},
        may_stay_float=task.of_several,
        has_half_caches=is_half,
        packs_projections=packs_projections(task.plan),
    )
    try:
        result = make_file(file_task, work)
    except WinMLError as error:
        error.message = f"{opt.dtypes} {dtype}: {error.message}"
        if isinstance(error, VerificationError) and error.is_quality:
            error.hint = (
                f"No file of {dtype} was written. Exclude the modules that lose most ({opt.exclude}), omit {dtype}, "
                f"lower {opt.min_sqnr}, or write it anyway with {opt.no_verify}."
            )
        raise
    notes = tuple(f"{dtype}: {note}" for note in result.notes)
    return StageOutcome((task.output,), result.normalizations, _quantized_words(result), notes=notes)


def _run_quantize(task: StageTask) -> tuple[StageOutcome, ...]:
    """Quantize the file of the previous stage."""
    if task.plan.config.dtypes:
        return _run_dtypes(task)
    from winml.modelkit.quantize.file_quantization import Quantization
    from winml.modelkit.transform.graph_file import make_file

    section, file_task = task.plan.config.quant, _file_task(task, "quantize")
    assert section is not None  # skipped otherwise
    work = Quantization(
        file_task.source,
        quantize_options(section),
        {},
        may_stay_float=file_task.of_several,
        packs_projections=packs_projections(task.plan),
    )
    result = make_file(file_task, work)
    budget_notes = [] if result.budget is None else [result.budget.note]
    note = auto_words(section)
    return _make_outcomes(
        result, _quantized_words(result), [*([f"{note[0].upper()}{note[1:]}."] if note else []), *budget_notes]
    )


def _quantized_words(result: QuantizedFile) -> str:
    """Summarize a quantization: precision, modes, skipped nodes and the comparison."""
    from winml.modelkit.compare.words import comparison_words

    skips = ", ".join(f"{count} not quantized ({reason})" for reason, count in result.left.items())
    weights = (
        f"{result.precision} ({', '.join(result.modes)}), {result.quantized} quantized{f', {skips}' if skips else ''}"
    )
    results = [*([weights] if result.modes else []), *([f"KV cache {result.kv_cache}"] if result.kv_cache else [])]
    return f"{', '.join(results)}, {comparison_words(result.fidelity)}"


def _compile_options(plan: BuildPlan) -> dict[str, object]:
    """Return the values of the plan that affect a compiled file, with the version of the provider."""
    from winml.modelkit.ort.devices import provider_version
    from winml.modelkit.ort.execution_providers import find_execution_provider
    from winml.modelkit.ort.host import instruction_sets

    section = plan.config.compile
    assert section is not None  # skipped otherwise
    assert section.ep is not None
    provider = find_execution_provider(section.ep)
    # The result depends on the version of the provider or, for the CPU, on the processor.
    produced_by = provider_version(provider) if provider.compiles else instruction_sets()
    return {
        "compile": section.model_dump(mode="json", exclude_none=True),
        "verify": plan.verify,
        "produced_by": produced_by,
        **_judging_record(plan),
    }


def _run_compile(task: StageTask) -> tuple[StageOutcome, ...]:
    """Compile the files of the previous stage; the hint of an error names the option that skips the stage."""
    try:
        return _compile_together(task) if task.sources else (_compile_part(task),)
    except (UsageError, StageError) as error:
        error.hint += without_compilation()
        raise


def _compile_together(task: StageTask) -> tuple[StageOutcome, ...]:
    """Compile all parts into one context; all files appear together."""
    from winml.modelkit.compile.file_compilation import shared_contexts
    from winml.modelkit.onnx.files.output_files import OutputFiles

    section = task.plan.config.compile
    assert section is not None  # skipped otherwise
    with OutputFiles() as files, shared_contexts([*task.sources.values()], section, task.output) as shared:
        outcomes = []
        for part, source in task.sources.items():
            output = file_names.part_path(task.output, part, of_several=True)
            part_task = replace(task, source=source, output=output, of_several=True)
            outcomes.append(replace(_compile_part(part_task, files, shared), part=part))
        files.commit(overwrite=True)
    return tuple(outcomes)


def _compile_part(
    task: StageTask, transaction: OutputFiles | None = None, shared: SharedContexts | None = None
) -> StageOutcome:
    """Compile the file of the previous stage.

    Args:
        task: The run of the stage for one part.
        transaction: Transaction of the caller; None: the file is committed alone.
        shared: The compiled files of all parts; None: the part is compiled alone.
    """
    from winml.modelkit.builds.provider_comparison import judging_data
    from winml.modelkit.compare.words import comparison_words
    from winml.modelkit.compile.file_compilation import compilation
    from winml.modelkit.transform.graph_file import make_file

    section, file_task = task.plan.config.compile, replace(_file_task(task, "compile"), transaction=transaction)
    assert section is not None  # skipped otherwise
    data = judging_data(task.plan, file_task.source)
    result = make_file(file_task, compilation(file_task, section, {}, data=data, shared=shared))
    parts = f", {len(result.parts)} compiled, {len(result.outside)} outside" if result.parts else ""
    summary = f"for {result.compiled['provider']}{parts}, {comparison_words(result.comparison)}"
    is_alone = section.share_weights and shared is None
    notes = [f"{opt.share_weights} has no effect: the model has one part."] if is_alone else []
    return _make_outcomes(result, summary, notes)[0]


def _idle_compilation_of_part(config: WinMLBuildConfig, part: str) -> str:
    """Return the reason why a part is not compiled, or ""."""
    from winml.modelkit.ort.execution_providers import find_execution_provider

    section = config.compile
    if part != file_names.EMBEDDING or section is None or section.ep is None:
        return ""
    if find_execution_provider(section.ep).takes_dynamic:
        return ""
    return f"a run reads any number of tokens and images, and {section.ep} requires fixed sizes: it runs on the CPU"


STAGES: tuple[Stage, ...] = (
    Stage(
        name="export",
        file=file_names.EXPORTED_NAME,
        section="export",
        libraries=("torch", "transformers", "diffusers", *_GRAPH_LIBRARIES),
        options=_export_options,
        work=run_export,
        makes_graph=True,
    ),
    # Before quantize: fusions match operators that quantization splits.
    Stage(
        name="optimize",
        file=file_names.OPTIMIZED_NAME,
        section="optim",
        options=_optimize_options,
        work=_run_optimize,
    ),
    Stage(
        name="quantize",
        file=file_names.QUANTIZED_NAME,
        section="quant",
        options=_quantize_options,
        work=_run_quantize,
        idle=lambda config: "" if config.quant is None or config.dtypes else idle_quantization(config),
        takes_bits=True,
    ),
    # Last: a graph compiled for one device cannot be changed any more.
    Stage(
        name="compile",
        file=file_names.COMPILED_NAME,
        section="compile",
        options=_compile_options,
        work=_run_compile,
        idle=idle_compilation,
        idle_for=_idle_compilation_of_part,
        joins_parts=lambda config: config.compile is not None and bool(config.compile.share_weights),
    ),
)


_SECTION_RECORDS: Mapping[str, type[Options]] = {
    "export": WinMLExportConfig,
    "optim": OptimSection,
    "quant": QuantizeOptions,
    "compile": CompileSection,
}
"""Key of the options of a stage → class of their record."""


def with_new_defaults(before: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a finished stage, with defaults for options added after its run.

    Args:
        before: Options of the earlier run, possibly of an earlier version.
        current: Options of this version.
    """
    options = dict(before)
    for name, record in _SECTION_RECORDS.items():
        if isinstance(before.get(name), dict) and isinstance(current.get(name), dict):
            defaults = record().model_dump(mode="json")
            new = {key: defaults[key] for key in current[name] if key in defaults and key not in before[name]}
            options[name] = {**before[name], **new}
    return options


def without_idle_stages(config: WinMLBuildConfig) -> tuple[WinMLBuildConfig, tuple[str, ...]]:
    """Return a config with null for stages that will not run; sections with stated options stay.

    Returns:
        The config, and a sentence for each section that stays although its stage will not run.
    """
    idle_sections, notes = [], []
    for stage in STAGES:
        section = getattr(config, stage.section)
        if section is None or not (reason := stage.idle(config)):
            continue
        if section.model_dump(exclude_none=True, exclude_defaults=True):
            notes.append(f"the {stage.name} stage will be skipped: {reason}")
        else:
            idle_sections.append(stage.section)
    return config.model_copy(update=dict.fromkeys(idle_sections)), tuple(notes)


def names_of(
    stages: Sequence[Stage],
    parts: Sequence[str] = (file_names.ONLY_PART,),
    config: WinMLBuildConfig | None = None,
    *,
    is_refittable: bool = False,
) -> tuple[str, ...]:
    """Return every file name of a build with these stages and parts, except manifest and data files.

    Args:
        stages: The stages.
        parts: The parts of the model.
        config: Config with the layout; None: the plain layout.
        is_refittable: True if the traced graphs without weights are stored.

    Names of data files contain a digest of the content and are unique. If a layout numbers data files, the first one is
    included.

    Raises:
        UsageError: the layout does not exist, or has no name for the precision.
    """
    of_several = tuple(parts) != (file_names.ONLY_PART,)
    layout = find_layout(None if config is None else config.layout)
    models, data, sidecars = list[Path](), list[Path](), list[Path]()
    for part in parts:
        for stage in stages:
            path = file_names.part_path(Path(stage.file), part, of_several=of_several)
            models += stage_files(stage, path, config)
            if stage.makes_graph:
                sidecars.append(file_names.sidecar_path(path))
                sidecars += [file_names.refit_path(path)] if is_refittable else []
        finished = [Path(name) for name in built_names(part, of_several=of_several, config=config)]
        models += finished
        sidecars.append(file_names.sidecar_path(finished[0]))
        if layout.numbers_data:
            data += (file_names.numbered_data_path(path, 0) for path in finished)
    return (*(path.as_posix() for path in (*models, *data, *sidecars)), *layout.written, file_names.BUILD_CONFIG_NAME)


def stage_files(stage: Stage, path: Path, config: WinMLBuildConfig | None) -> list[Path]:
    """Return the models that a stage writes for a part: ``path``, and the quantize stage one for each further dtype."""
    if config is None or not config.dtypes or not stage.takes_bits:
        return [path]
    return [dtype_file(path, dtype, config) for dtype in quantized_dtypes(config)]


def adapter_names(plan: BuildPlan) -> tuple[str, ...]:
    """Return the paths, relative to the build folder, of the adapters that are selected at run time."""
    folder = Path(built_names(file_names.ONLY_PART, of_several=False, config=plan.config)[0]).parent
    names = (named_adapter(text).name for text in plan.request.adapter)
    return tuple((folder / f"{name}{file_names.ADAPTER_SUFFIX}").as_posix() for name in names if name is not None)


def built_names(part: str, *, of_several: bool, config: WinMLBuildConfig | None) -> tuple[str, ...]:
    """Return the paths of a finished part in the build folder, one for each dtype, with ``/``.

    Raises:
        UsageError: the layout has no name for the precision.
    """
    layout = find_layout(None if config is None else config.layout)
    if config is not None and config.dtypes:
        plain = Path(layout.model_name(part, of_several, FLOAT32))
        return tuple(plain.with_stem(f"{plain.stem}{dtype.suffix}").as_posix() for dtype in dtypes_of(config).values())
    options = None if config is None else requested_quantization(config)
    return (layout.model_name(part, of_several, FLOAT32 if options is None else options.base.name),)


_REQUESTED_BY = {"export": "export_config", "optim": "level", "quant": "precision", "compile": "ep"}
"""Section of the config → option that requests its stage."""


def skip_reason(stage: Stage, plan: BuildPlan) -> str:
    """Return the reason why a stage does not run; ``""`` if it runs."""
    if stage.makes_graph and plan.onnx_path is not None:
        return "the model is an ONNX file already"
    if stage.section in plan.switched_off:
        return plan.switched_off[stage.section]
    if getattr(plan.config, stage.section) is None:
        return f"not requested ({spell(_REQUESTED_BY[stage.section])} requests it)"
    if stage.handed_to is not None:
        return f"done by {stage.handed_to} in memory, without an intermediate file"
    return stage.idle(plan.config)


_NEVER = sys.maxsize


def external_from_bytes(plan: BuildPlan, writer: StageName) -> int:
    """Return the number of bytes from which a stage stores a weight in a data file.

    The last stage writes the file as deployed, so the deployed file is a link and not a second copy.

    Args:
        plan: The build.
        writer: The stage.
    """
    from winml.modelkit.transform.graph_file import EXTERNAL_BYTES

    later_stages = STAGES[[stage.name for stage in STAGES].index(writer) + 1 :]
    is_last = all(skip_reason(stage, plan) for stage in later_stages)
    is_inside = plan.is_deployed and not plan.layout.numbers_data
    return _NEVER if is_last and is_inside else EXTERNAL_BYTES
