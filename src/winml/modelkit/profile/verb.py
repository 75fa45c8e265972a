"""Plan of ``winml perf``: latency of a model, of its modules or of generation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from winml.modelkit.errors import UsageError, opt, spell
from winml.modelkit.export.declared_options import DynamicFields
from winml.modelkit.fields import INPUTS, OUTPUT, declare, refuse_stated
from winml.modelkit.file_names import DECODER, ENCODER, ONLY_PART, prompt_parts
from winml.modelkit.models.load_options import InputFields
from winml.modelkit.progress import OnStep, Progress, Tell, notebook_progress
from winml.modelkit.python_functions import python_function
from winml.modelkit.report.plan import PlannedStep
from winml.modelkit.tags.selector import Selector
from winml.modelkit.verbs.answers import AnswerPlan, ModuleAnswerRequest, plan_answer
from winml.modelkit.verbs.named_models import (
    files_read,
    keyword_options,
    named_parts,
    options_of_part,
    runnable_model,
    stated_keywords,
)
from winml.modelkit.verbs.running import MEASUREMENT, LatencyFields, ProviderFields

if TYPE_CHECKING:
    from winml.modelkit.builds.found_models import NamedModel
    from winml.modelkit.ort.opened_model import RunOptions
    from winml.modelkit.profile.latency import LatencyOptions
    from winml.modelkit.profile.module_records import ComparedProfiles, ModulePerfResult
    from winml.modelkit.profile.perf import Baseline
    from winml.modelkit.profile.records import GenerationPerf

_GENERATION_RUNS, _GENERATION_WARMUP = 20, 2
"""Chosen: a prompt of a thousand tokens takes seconds, and each length is measured on its own."""
_PYTORCH = "pytorch"
_ONLY_BY_MODULE = ("memory", "depth", "top", "group", "node_data", "trace")
_OF_ONE_GRAPH = ("by_module", "baseline", "input_data", "report")


@dataclass(frozen=True, kw_only=True)
class PerfRequest(ModuleAnswerRequest, ProviderFields, LatencyFields, InputFields):
    """Request of ``winml perf``."""

    name: str
    """The model as written by the user."""
    models: Mapping[str, NamedModel]
    """Part → its model; only ``model`` for a model of one part."""
    values: Mapping[str, Mapping[str, Any]]
    """Part → fields of ``RunOptions`` that determine its inputs."""
    find_files: Callable[[], Iterable[Path]]
    """Returns the files of the models and of the options; reads the graphs."""

    input_data: str | None = declare(None, INPUTS, metavar="FILE", default_words="random values")
    """Inputs to run on: an .npz file with one array per input."""
    by_module: bool = declare(False, MEASUREMENT, is_common=True)
    """Measure the time of each module, in one profiled session."""
    module: str | None = declare(None, MEASUREMENT, metavar="SELECTOR", is_common=True)
    """Extract these modules and measure each one separately, on its inputs inside the model."""
    memory: bool = declare(False, MEASUREMENT, is_common=True)
    """With `by_module`: also measure weights, activations and scratch memory of each module, on the CPU."""
    generation: bool = declare(False, MEASUREMENT, is_common=True)
    """Generative models: measure the time to first token by prompt length, and tokens/s by cache length."""
    baseline: str | None = declare(None, MEASUREMENT, metavar="pytorch|MODEL", is_common=True)
    """Model to compare with: both are measured in alternation. An ONNX file, a checkpoint, or `pytorch`: the model
    that the file was exported from."""
    depth: int | None = declare(None, OUTPUT, minimum=1, default_words="all")
    """Levels of the module tree to show."""
    top: int | None = declare(None, OUTPUT, minimum=1, default_words="all")
    """Modules to show, by self time."""
    group: Literal["class"] | None = declare(None, OUTPUT)
    """Show one row per module class."""
    trace: Path | None = declare(None, OUTPUT)
    """Also write a Chrome trace with module frames (JSON)."""


@dataclass(frozen=True)
class PerfSubject:
    """Models to measure, and options of the measurement."""

    models: Mapping[str, NamedModel]
    runs: Mapping[str, RunOptions]
    """Part → run options."""
    latency: LatencyOptions
    baseline: Baseline | None


def plan_perf(request: PerfRequest) -> AnswerPlan[PerfSubject]:
    """Plan a measurement. Nothing is written, and no model is loaded.

    Raises:
        UsageError: options contradict each other, or the execution provider is unknown or not installed.
        OutputExistsError, WriteError: as :func:`winml.modelkit.verbs.answers.plan_answer` raises.
    """
    _refuse_combinations(request)
    request.refuse_unknown_provider()
    latency, baseline = request.latency, _find_baseline(request)
    if request.by_module and baseline is not None and baseline.path is None:
        message = f"{{}} has no effect with {opt.by_module} {opt.baseline} {baseline.name}, which lists modules"
        refuse_stated(request, ("group",), message, "Omit it.")
    exported = [model.request for model in request.models.values() if model.path is None]
    from winml.modelkit.ort.opened_model import RunOptions

    options = {**request.provider_options, "io_binding": request.io_binding}
    runs = {part: RunOptions(**values, **options) for part, values in request.values.items()}
    subject = PerfSubject(request.models, runs, latency, baseline)
    plan = plan_answer(
        "perf",
        subject,
        request,
        reads=(*_list_files_read(request), *([baseline.path] if baseline and baseline.path else [])),
        steps=_plan_steps(request, latency),
        exports=exported[0] if exported else None,
    )
    provider = request.choose_provider()
    if request.memory:
        from winml.modelkit.ort.kernel_memory import refuse_unrecorded_memory

        refuse_unrecorded_memory(provider)
    return plan


def _list_files_read(request: PerfRequest) -> Iterable[Path]:
    """List the input files. Without output files nothing can be overwritten, so the graphs are not read for their data
    files.
    """
    if request.writes_files:
        return request.find_files()
    return [model.path for model in request.models.values() if model.path is not None]


def _plan_steps(request: PerfRequest, latency: LatencyOptions) -> list[PlannedStep]:
    """Create a planned step for each model."""
    how = "in one profiled session" if request.by_module else f"{latency.iterations} runs"
    how = f"{latency.duration_s:g} s" if latency.duration_s is not None else how
    modules_text = f"each module that {request.module} names in " * bool(request.module)
    kind = "measuring generation" if request.generation else "measuring"
    beside = f", in alternation with {request.baseline}" if request.baseline else ""
    return [PlannedStep(kind, f"{modules_text}{model.name}: {how}{beside}") for model in request.models.values()]


def _refuse_combinations(request: PerfRequest) -> None:
    """Refuse options that contradict each other or have no effect.

    Raises:
        UsageError: names the options.
    """
    if request.module is not None:
        Selector(request.module)
        refuse_stated(
            request,
            ("by_module", "baseline"),
            f"{{}} measures the whole model, and cannot be combined with {opt.module} {request.module}",
            "Use one of them, or extract the modules first: winml extract.",
        )
    if request.module is not None or request.generation:
        option = spell("module" if request.module is not None else "generation")
        refuse_stated(request, ("report",), f"{{}} has no effect with {option}", "Omit it; -o writes the numbers.")
    if request.by_module:
        if request.memory and request.baseline is not None:
            raise UsageError(
                f"{opt.by_module} {opt.memory} measures one model, and {request.baseline} is a second one",
                hint="Measure each model alone.",
            )
        for name in ("group", "top"):
            if request.depth is not None and (value := getattr(request, name)) is not None:
                raise UsageError(
                    f"{opt.depth} {request.depth} applies to the module tree, and {spell(name)} {value} shows a list "
                    "instead",
                    hint="Use one of them.",
                )
    else:
        refuse_stated(request, _ONLY_BY_MODULE, f"{{}} requires {opt.by_module}", f"Add {opt.by_module}, or omit {{}}.")
    if request.generation:
        refuse_stated(
            request,
            ("io_binding",),
            f"{{}} has no effect with {opt.generation}, whose KV cache is always bound to ONNX Runtime memory",
            "Omit it.",
        )
        refuse_stated(
            request,
            ("by_module", "module", "baseline", "input_data", "shape_config", "batch_size"),
            f"{{}} has no effect with {opt.generation}, which determines prompts and steps",
            "Use one of them.",
        )
    if len(request.models) > 1:
        _refuse_for_several_parts(request)


def _refuse_for_several_parts(request: PerfRequest) -> None:
    """Refuse options for one graph, and generation without a decoder part.

    Raises:
        UsageError: names the option and the parts.
    """
    parts = ", ".join(request.models)
    refuse_stated(
        request,
        _OF_ONE_GRAPH,
        f"{{}} requires one graph, and {request.name} contains {parts}",
        f"Select a part: {opt.submodel} {next(iter(request.models))}",
    )
    is_generating = DECODER in request.models and (ENCODER in request.models or prompt_parts(request.models))
    if request.generation and not is_generating:
        raise UsageError(
            f"{opt.generation} measures decoders and encoder-decoder models, and {request.name} contains {parts}",
            hint=f"Name the file of a part: {next(iter(request.models.values())).path}",
        )


def _find_baseline(request: PerfRequest) -> Baseline | None:
    """Find the baseline: PyTorch or an ONNX file; ``None`` without a baseline.

    Raises:
        UsageError: the name is no usable model.
    """
    name = request.baseline
    if name is None:
        return None
    from winml.modelkit.builds.found_models import resolve_side
    from winml.modelkit.profile.perf import Baseline

    (model,) = request.models.values()
    if name == _PYTORCH:
        return Baseline(name, request=model.request)
    side = resolve_side(name)
    return Baseline(name, side) if isinstance(side, Path) else Baseline(name, request=side)


def perf_request(options: Mapping[str, Any], stated: Mapping[str, Any]) -> PerfRequest:
    """Make a request; for a folder of several parts, with the model of each part.

    Args:
        options: Values of all options by name, with ``model``.
        stated: Fields of the request that differ from their defaults.

    Raises:
        UsageError: no model is specified, nothing exists at its path, or an option does not apply to an ONNX file.
    """
    paths: Mapping[str, Path | None] = named_parts(options, beside_weights=True) or {ONLY_PART: None}
    named = {
        part: runnable_model(options if path is None else options_of_part(options, path))
        for part, path in paths.items()
    }
    return PerfRequest(
        name=options["model"],
        models={part: model for part, (model, _) in named.items()},
        values={part: values for part, (_, values) in named.items()},
        find_files=lambda: [file for model, _ in named.values() for file in files_read(model, options)],
        **stated,
    )


def run_perf(
    plan: AnswerPlan[PerfSubject],
    request: PerfRequest,
    exported: Callable[[NamedModel], Path],
    *,
    on_step: OnStep | None = None,
    progress: Progress | None = None,
    tell: Tell | None = None,
) -> Mapping[str, Any]:
    """Measure a model: latency, modules or generation, as the request states.

    Args:
        plan: The plan of the request.
        request: The request.
        exported: Returns the ONNX file of a model, exported if necessary.
        on_step: Called when a step starts and when it ends.
        progress: Called between runs with the number and the share of finished runs.
        tell: Called with messages on the preparation of a PyTorch baseline.

    Returns:
        Part → result; one result for all parts of a model that generates.

    Raises:
        WinMLError: the model cannot be exported, loaded or run.
    """
    subject = plan.subject
    if request.generation:
        return {ONLY_PART: _measure_generation(subject, request, exported)}
    if request.module is not None:
        return _measure_selected(subject, request.module, exported, on_step, progress)
    if request.by_module and subject.baseline is not None:
        return _profile_beside_baseline(subject, subject.baseline, exported, progress, tell)
    results: dict[str, Any] = {}
    for part, run in subject.runs.items():
        path = exported(subject.models[part])
        if request.by_module:
            from winml.modelkit.profile import by_module

            results[part] = by_module.profile_by_module(
                path, run, subject.latency, memory=request.memory, progress=progress
            )
        else:
            from winml.modelkit.profile.perf import PerfOptions, measure_model

            requested = PerfOptions(run, subject.latency, subject.baseline)
            results[part] = measure_model(path, requested, progress=progress, tell=tell)
    return results


def _profile_beside_baseline(
    subject: PerfSubject,
    baseline: Baseline,
    exported: Callable[[NamedModel], Path],
    progress: Progress | None,
    tell: Tell | None,
) -> dict[str, ComparedProfiles]:
    """Measure a model and its baseline in alternation, as a whole and by module."""
    from winml.modelkit.profile.by_module import profile_beside_file, profile_beside_pytorch
    from winml.modelkit.profile.perf import PerfOptions, measure_model

    ((part, run),) = subject.runs.items()
    path = exported(subject.models[part])
    options = PerfOptions(run, subject.latency, baseline)
    if baseline.path is None:
        return {part: profile_beside_pytorch(path, options, progress=progress, tell=tell)}
    result = measure_model(path, options, progress=progress)
    return {part: profile_beside_file(path, baseline.path, result, options, progress=progress)}


def _measure_selected(
    subject: PerfSubject,
    selector: str,
    exported: Callable[[NamedModel], Path],
    on_step: OnStep | None,
    progress: Progress | None,
) -> dict[str, ModulePerfResult]:
    """Measure the selected modules alone, in the parts that have them."""
    from winml.modelkit.builds.folder_transformation import part_modules, parts_with_module
    from winml.modelkit.profile.by_module import measure_modules

    paths = {part: exported(model) for part, model in subject.models.items()}
    parts = parts_with_module(part_modules(paths), selector) if len(paths) > 1 else list(paths)
    return {
        part: measure_modules(
            paths[part], selector, subject.runs[part], subject.latency, on_step=on_step, progress=progress
        )
        for part in parts
    }


def _measure_generation(
    subject: PerfSubject, request: PerfRequest, exported: Callable[[NamedModel], Path]
) -> GenerationPerf:
    from winml.modelkit.generate.generation.measurement import measure_generation

    warmup = min(subject.latency.warmup, _GENERATION_WARMUP)
    latency = replace(subject.latency, iterations=request.iterations or _GENERATION_RUNS, warmup=warmup)
    paths = {part: exported(model) for part, model in subject.models.items()}
    if len(paths) > 1:
        run = subject.runs.get(ENCODER) or subject.runs[DECODER]
        return measure_generation(paths, replace(run, shown=request.name), latency)
    ((part, run),) = subject.runs.items()
    return measure_generation({ONLY_PART: paths[part]}, run, latency)


@python_function(shape_config="sizes")
def profile_model(
    model: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    *,
    on_step: OnStep | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Any:
    """Measure the latency and memory of a model, in total or by module (``winml perf``).

    Args:
        model: ONNX file, build folder, checkpoint, Hub id or factory; a checkpoint is exported into the cache first.
        other: A second model: it is measured in alternation with the first, and the ``verdict`` of the result answers
            whether it is faster.
        on_step: Called when a step starts and when it ends.
        progress: Called between runs with the number and the share of finished runs.
        **options: Options of ``winml perf``: ``by_module``, ``module``, ``generation``, ``baseline``, ``iterations``,
            ``duration``, ``sizes``, ``batch_size``, ``ep``, ``threads`` and so on, and options of loading.

    Returns:
        The latency; with ``by_module``, the time of each module, beside the baseline's if there is one; with
        ``module``, the latency of the selected modules;
        with ``generation``, times of prompts and tokens. For a folder of several parts, part → result.

    Raises:
        ConfigError: an option is unknown.
        UsageError: options contradict each other, or the provider is unknown or not installed.
        StageError: the model cannot be loaded or run.

    Example:
        ```python
        latency = profile_model("model.onnx", iterations=20)
        times = profile_model("model.onnx", by_module=True, iterations=20)
        ```
    """
    from winml.modelkit.builds.build_model import exported_file

    if other is not None:
        if options.get("baseline") is not None:
            raise UsageError("other and baseline are both passed", hint="Pass two models, the first as the baseline.")
        model, options = other, {**options, "baseline": os.fspath(model)}
    values = keyword_options(
        "profile_model", model, options, PerfRequest, DynamicFields, dynamic_axes=(), export_config=None
    )
    request = perf_request(values, stated_keywords(PerfRequest, options))
    plan = plan_perf(request)
    plan.recover()
    progress = progress or notebook_progress("runs")
    results = run_perf(plan, request, lambda found: exported_file(found, on_step), on_step=on_step, progress=progress)
    return next(iter(results.values())) if len(results) == 1 else results
