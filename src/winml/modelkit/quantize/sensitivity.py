"""Measurement of the sensitivity of modules to quantization, and search for modules that must stay float.

Each module is quantized alone with the rest in float, and the outputs are compared with those of the float graph. The
options select the engine. Does not import PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from winml.modelkit.compare.quality_samples import MOST_SAMPLES, SampleRequest
from winml.modelkit.compare.words import samples_words
from winml.modelkit.errors import ConfigError, opt
from winml.modelkit.file_names import files_folder
from winml.modelkit.onnx.files.placing import file_digest, model_digest
from winml.modelkit.onnx.weights import weight_bytes
from winml.modelkit.options import options_of, unknown_key_message
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.ort.sessions import onnxruntime_version
from winml.modelkit.profile.latency import LatencyOptions
from winml.modelkit.progress import StepClock, StepEvent, count_share
from winml.modelkit.python_functions import python_function
from winml.modelkit.quantize.calibration import calibration_data
from winml.modelkit.quantize.module_parts import ModulePart, excluding_options, list_parts, only_options
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.pipeline import quantize
from winml.modelkit.quantize.planning import QuantizationPlan, plan_quantization
from winml.modelkit.quantize.precisions import CALIBRATION_OPTIONS
from winml.modelkit.quantize.preparation import PreparedGraph, ResolvedOptions, read_prepared, resolve_mode
from winml.modelkit.quantize.quantized_variants import (
    MeasuredVariants,
    QuantizedVariants,
    Quantizer,
    Samples,
    VariantEvaluator,
    take_samples,
    variant_key,
)
from winml.modelkit.quantize.sensitivity_options import SensitivityOptions
from winml.modelkit.quantize.sensitivity_records import (
    ExcludeList,
    FidelityTarget,
    MeasuredVariant,
    MetricTarget,
    ModuleSensitivity,
    QuantizationSensitivity,
    TimedVariant,
    Trial,
)
from winml.modelkit.samples.data_sources import content_digests
from winml.modelkit.transform.graph_file import read_plain
from winml.modelkit.version import __version__


@dataclass(frozen=True)
class ExcludeTrial:
    """Result of a search for excluded modules."""

    excluded: tuple[ModulePart, ...]
    """In descending order of sensitivity."""
    variant: MeasuredVariant
    is_met: bool


@dataclass
class _ExcludeSearch:
    """Search for the modules that must stay float; all measurements are stored in :attr:`trials`.

    Modules are excluded in the order of their individual error. Bisection finds their number. Each module is then
    quantized again, in descending order of size, if the target is still met.
    """

    units: Sequence[ModulePart]
    """Parts that may stay float, in descending order of sensitivity."""
    limit: int
    """Maximum number of excluded parts: with all parts excluded, nothing might remain to quantize."""
    target: FidelityTarget | MetricTarget
    measure: Callable[[Sequence[ModulePart]], MeasuredVariant]
    """Measures the model with some parts in float."""
    costs_bytes: Callable[[ModulePart], int]
    """Returns the additional size of the model if a part stays float."""
    trials: list[Trial] = field(default_factory=list)
    _lists: list[ExcludeTrial] = field(default_factory=list)

    def find(self) -> ExcludeTrial:
        """Find a list that meets the target and from which no module can be removed; else the list of best quality."""
        if self._try_count(0, "all modules quantized").is_met:
            return self._lists[-1]
        if not self.limit or not self._try_count(self.limit, f"the {self.limit} most sensitive in float").is_met:
            return max(self._lists, key=lambda exclusion: self.target.quality(exclusion.variant))
        return self._remove_needless(self._bisect_count())

    def _bisect_count(self) -> ExcludeTrial:
        """Find the number of most sensitive modules in float that meets the target, by bisection."""
        too_few, exclusion = 0, self._lists[-1]
        while len(exclusion.excluded) - too_few > 1:
            count = (too_few + len(exclusion.excluded)) // 2
            tried = self._try_count(count, f"the {count} most sensitive in float")
            if tried.is_met:
                exclusion = tried
            else:
                too_few = count
        return exclusion

    def _remove_needless(self, best: ExcludeTrial) -> ExcludeTrial:
        """Quantize excluded modules again, the largest first, while the target is met."""
        # Among modules of equal size, the less sensitive module is removed first.
        ranked = sorted(enumerate(best.excluded), key=lambda pair: (self.costs_bytes(pair[1]), pair[0]), reverse=True)
        for _, unit in ranked:
            if len(best.excluded) == 1:
                break  # the empty list was measured first
            fewer = tuple(part for part in best.excluded if part is not unit)
            name = unit.module.path or unit.module.tag
            tried = self._try_units(fewer, f"{name}{' (own nodes)' if unit.inner else ''} in float")
            best = tried if tried.is_met else best
        return best

    def _try_count(self, count: int, description: str) -> ExcludeTrial:
        """Measure the model with the ``count`` most sensitive units in float."""
        return self._try_units(tuple(self.units[:count]), description)

    def _try_units(self, excluded: tuple[ModulePart, ...], description: str) -> ExcludeTrial:
        """Measure the model with some units in float, and record the trial."""
        variant = self.measure(excluded)
        exclusion = ExcludeTrial(excluded, variant, self.target.is_met(variant))
        self._lists.append(exclusion)
        self.trials.append(Trial(len(excluded), description, variant, exclusion.is_met))
        return exclusion


_NAME = "quantization_sensitivity"
_READING, _REFERENCE, _MODULES, _SEARCH = "reading", "float outputs", "modules", "exclude list"

Progress = Callable[[int, float], None]


@python_function(shape_config="sizes")
def quantization_sensitivity(
    model: str | os.PathLike[str],
    *,
    options: QuantizeOptions | None = None,
    sensitivity: SensitivityOptions | None = None,
    quantizer: Quantizer | None = None,
    evaluator: VariantEvaluator | None = None,
    on_step: Callable[[StepEvent], None] | None = None,
    progress: Progress | None = None,
    before_each: Callable[[], None] | None = None,
    **flags: Any,
) -> QuantizationSensitivity:
    """Quantize each module of an ONNX file alone, and rank the modules by the error of the outputs.

    Args:
        model: The file; it is not changed.
        options: Quantization options; ``None``: from ``flags``.
        sensitivity: Measurement options; ``None``: from ``flags``.
        quantizer: Function that quantizes a graph; ``None``: the engine of the mode, with ranges measured once.
        evaluator: Evaluates quantized variants on a dataset, with its own target.
        on_step: Called when a step starts and when it ends.
        progress: Called after each measurement with the number and the share of finished ones.
        before_each: Called before each measurement; an exception stops the work, and finished measurements are kept.
        **flags: Fields of :class:`QuantizeOptions` and :class:`SensitivityOptions`; ``samples`` belongs to the latter.

    Returns:
        The ranking and, with a target, the list of modules to exclude and whether the target is met.

    Raises:
        ConfigError: an unknown flag, or a value of the wrong kind.
        UsageError: a flag together with the record that contains its field, an unknown metric, module or depth,
            measurements of other options, a dataset that does not fit the model, or a file without modules.
        InputError: the file is no ONNX model, its data is missing, or the model is already quantized.
        StageError: the model does not run, or its outputs are constant.
    """
    options, sensitivity = _split_flags(options, sensitivity, flags)
    source = Path(model)
    if options.has_judging_data_alone:
        options = options.model_copy(update={"samples": sensitivity.samples})
    with contextlib.ExitStack() as stack:
        if evaluator is None and (task_target := sensitivity.task_target(options.dataset)) is not None:
            evaluator = stack.enter_context(_open_evaluator(source, options, sensitivity, task_target))
        return _measure_sensitivity(
            source, str(model), options, sensitivity, evaluator, quantizer, on_step, progress, before_each
        )


def _measure_sensitivity(
    source: Path,
    model_name: str,
    options: QuantizeOptions,
    sensitivity: SensitivityOptions,
    evaluator: VariantEvaluator | None,
    quantizer: Quantizer | None,
    on_step: Callable[[StepEvent], None] | None,
    progress: Progress | None,
    before_each: Callable[[], None] | None,
) -> QuantizationSensitivity:
    """Measure the modules with parsed options; arguments and errors are those of :func:`quantization_sensitivity`."""
    target = sensitivity.fidelity_target(options.dataset) if evaluator is None else evaluator.target
    options, mode_notes = _resolve_mode(options, source)
    options.refuse_contradictions()
    calibration = None
    if options.needs_samples:
        folder = _find_processors(source, sensitivity)
        calibration = calibration_data.Calibration(options, folder, sensitivity.sizes, sensitivity.seed, source)
        calibration_data.refuse_missing_data(calibration)
    stored = _open_measurements(source, options, sensitivity, calibration, evaluator)
    if quantizer is None:
        statistics = None if calibration is None else calibration_data.CalibrationStatistics(calibration)
        quantizer = functools.partial(quantize, calibration=statistics)
    clock = StepClock((_READING, _REFERENCE, _MODULES, *([_SEARCH] if target else [])), on_step)
    with contextlib.closing(calibration) if calibration else contextlib.nullcontext():
        with clock.step(_READING) as step:
            graph = read_prepared(source, options)
            plan, parts = _plan_parts(graph, source, options, sensitivity)
            step.summary = f"{sum(bool(part.nodes) for part in parts)} modules with nodes to quantize"
        with clock.step(_REFERENCE) as step:
            # All jobs together use one thread per core.
            threads = None if sensitivity.jobs == 1 else max(1, (os.cpu_count() or 1) // sensitivity.jobs)
            request = _sample_request(source, options, sensitivity)
            samples = take_samples(graph, request, threads)
            step.summary = samples_words(samples.about)
            search_samples = samples
            if target is not None and evaluator is None and sensitivity.input_data is None:
                search_samples = take_samples(graph, _other_samples(request), threads)
        variants, selecting = (
            QuantizedVariants(graph, inputs, quantizer, stored, threads, evaluator, before_each)
            for inputs in (samples, search_samples)
        )
        study = _Study(graph, options, plan, parts, variants, selecting if search_samples is not samples else variants)
        with clock.step(_MODULES) as step:
            progress = progress or count_share("measurements")
            study.measure_modules(sensitivity.jobs, progress, _first_samples(sensitivity, evaluator, samples))
            step.summary = f"{variants.cost.measured} variants measured"
        exclude_list = times = None
        if target is not None:
            with clock.step(_SEARCH) as step:
                exclude_list, times = study.timed(
                    study.search(target), LatencyOptions(sensitivity.iterations, warmup=3)
                )
                step.summary = f"{len(exclude_list.excluded)} modules in float, {len(exclude_list.trials)} measurements"
    values = samples.values[0]
    return QuantizationSensitivity(
        model=model_name,
        tool_version=__version__,
        onnxruntime_version=onnxruntime_version(),
        precision=options.base.name,
        modes=options.modes(),
        tree_source=graph.modules.source,
        samples=samples.about.count,
        input_source=samples.about.source,
        data=samples.about.data,
        calibration=None if calibration is None else calibration.words,
        input_shapes={name: array.shape for name, array in values.feeds.items()},
        seed=sensitivity.seed,
        modules=study.rows(),
        whole=study.whole,
        float_bytes=weight_bytes(graph.model),
        exclude_list=exclude_list,
        latency=times,
        float_scores=study.float_scores,
        cost=replace(variants.cost, resumed=stored.resumed),
        steps=clock.timings(),
        notes=(*mode_notes, *graph.notes, *values.notes, *_study_notes(study, samples)),
    )


def _resolve_mode(options: QuantizeOptions, source: Path) -> ResolvedOptions:
    """Return the options with the mode that the weights of the file decide."""
    return resolve_mode(options, lambda: read_plain(source)[0], source.stem)


def _find_processors(source: Path, sensitivity: SensitivityOptions) -> Path:
    """Return the folder of tokenizer and processors: as requested, or the folder of the model."""
    return sensitivity.processors or files_folder(source.absolute())


def _split_flags(
    options: QuantizeOptions | None, sensitivity: SensitivityOptions | None, flags: Mapping[str, Any]
) -> tuple[QuantizeOptions, SensitivityOptions]:
    """Split flags into quantization and measurement options; shared names belong to the measurement."""
    field_names = [*QuantizeOptions.model_fields, *SensitivityOptions.model_fields]
    for name in flags:
        if name not in field_names:
            raise ConfigError(unknown_key_message(name, field_names, _NAME))
    values = dict(flags)
    measuring = {name: values.pop(name) for name in flags if name in SensitivityOptions.model_fields}
    return (
        options_of(QuantizeOptions, options, values, _NAME),
        options_of(SensitivityOptions, sensitivity, measuring, _NAME),
    )


def _open_measurements(
    source: Path,
    options: QuantizeOptions,
    sensitivity: SensitivityOptions,
    calibration: calibration_data.Calibration | None,
    evaluator: VariantEvaluator | None,
) -> MeasuredVariants:
    """Open the stored measurements of an interrupted run, if measurements are stored.

    Measurements depend on the model, the options and the samples, but not on the measured modules.
    """
    if sensitivity.measured is None:
        return MeasuredVariants(None, {}, overwrite=sensitivity.overwrite)
    data = sensitivity.input_data
    data_set = options.dataset and {
        "split": options.split,
        "columns": dict(options.columns),
        "content": [*content_digests(options.dataset).values()],
    }
    request = {
        "model": model_digest(source),
        **options.model_dump(mode="json", exclude={"min_sqnr_db", *CALIBRATION_OPTIONS}),
        # Omitted options are equal to their written-out defaults.
        "precision": options.base.name,
        "mode": options.mode_of(options.base),
        **({"calibration": {"method": calibration.method, **calibration.request()}} if calibration is not None else {}),
        # Without random samples if values come from a file.
        **({"input_data": file_digest(data)} if data is not None else {"samples": sensitivity.samples}),
        "seed": sensitivity.seed,
        "sizes": dict(sensitivity.sizes),
        **({"data_set": data_set} if data_set is not None else {}),
        "winml": __version__,
        "onnxruntime": onnxruntime_version(),
        **({"judge": dict(evaluator.request)} if evaluator is not None else {}),
    }
    return MeasuredVariants(sensitivity.measured, request, overwrite=sensitivity.overwrite)


_OTHER_SAMPLES = 500_009
"""Added to the seed: the search uses these samples, and the result is judged on the samples of the other commands."""
_SEARCHES = 5
"""Maximum number of searches, each with a stricter target, until the list meets the target on the samples that it is
judged on. Chosen: earlier measurements are reused, and most lists meet the target at the first or second search."""
_SHARING = 6
"""Minimum number of variants for an additional run of the float graph, so that each variant starts at its first
difference. Chosen: a variant that starts in the middle saves half of its runs."""
_FEW_SAMPLES = 4
"""Default number of samples of the first pass. Chosen: all variants are compared on the same samples, so that few
suffice to rank them (rank correlation with all samples: bert-base 0.98, MiniLM 0.999)."""
_MANY_VALUES = 4096
"""Minimum number of output values per sample for a first pass. Chosen: few samples of a classifier are a handful of
numbers, which rank modules by chance."""
_MANY_VARIANTS = 16
"""Minimum number of variants for a first pass. Chosen: fewer are measured on all samples in a minute."""
_MEASURED_FULLY = 8
"""Number of variants of the most sensitive modules that are measured on all samples afterwards. Chosen: the rows shown
first in the table."""


def refuse_unmeasurable(source: Path, options: QuantizeOptions, sensitivity: SensitivityOptions) -> None:
    """Check the graph and its modules as a measurement does before running the model.

    Raises:
        WinMLError: as :func:`quantization_sensitivity` raises for the graph and its modules.
    """
    options, _ = _resolve_mode(options, source)
    _plan_parts(read_prepared(source, options), source, options, sensitivity)


def _plan_parts(
    graph: PreparedGraph, source: Path, options: QuantizeOptions, sensitivity: SensitivityOptions
) -> tuple[QuantizationPlan, tuple[ModulePart, ...]]:
    """Plan the quantization, and list the parts to measure.

    Raises:
        UsageError: the graph names no modules, or no node can be quantized.
    """
    graph.refuse_no_modules(str(source))
    plan = plan_quantization(graph.model, options, graph.modules)
    return plan, list_parts(plan, graph.modules, sensitivity.depth, sensitivity.module)


def _open_evaluator(
    source: Path, options: QuantizeOptions, sensitivity: SensitivityOptions, target: tuple[str, float]
) -> contextlib.AbstractContextManager[VariantEvaluator]:
    """Open the evaluator of variants on the dataset, for a target of the task."""
    from winml.modelkit.evaluate.options import EvaluationOptions
    from winml.modelkit.quantize.variant_evaluation import variant_evaluator  # imports the tasks

    assert options.dataset is not None  # a target of the task requires it
    data = {"split": options.split, "columns": dict(options.columns)} if options.has_judging_data_alone else {}
    evaluation = EvaluationOptions.model_validate(
        {"dataset": options.dataset, "samples": sensitivity.samples, "seed": sensitivity.seed, **data}
    )
    return variant_evaluator(source, evaluation, target)


def _sample_request(source: Path, options: QuantizeOptions, sensitivity: SensitivityOptions) -> SampleRequest:
    """Request for the samples of the comparison."""
    run = RunOptions(
        shown=str(source), sizes=sensitivity.sizes, input_data=sensitivity.input_data, seed=sensitivity.seed
    )
    data_set = options.judging_request(sensitivity.seed)
    if data_set is not None:
        data_set = replace(data_set, samples=sensitivity.samples)
    folder = _find_processors(source, sensitivity)
    return SampleRequest(run, folder, data_set, count=sensitivity.samples, model=source)


def _other_samples(request: SampleRequest) -> SampleRequest:
    """Request for samples of the same kind and number, on which modules are selected."""
    data_set = None if request.data_set is None else request.data_set.others(request.data_set.samples or MOST_SAMPLES)
    return replace(request, run=replace(request.run, seed=request.run.seed + _OTHER_SAMPLES), data_set=data_set)


def _first_samples(sensitivity: SensitivityOptions, evaluator: VariantEvaluator | None, samples: Samples) -> int | None:
    """Number of samples of the first ranking; ``None``: all samples, as for requested samples."""
    if sensitivity.samples is not None or sensitivity.input_data is not None or evaluator is not None:
        return None
    values = max(array.size for array in samples.answers[0].values())
    return _FEW_SAMPLES if len(samples.values) >= 2 * _FEW_SAMPLES and values >= _MANY_VALUES else None


@dataclass
class _Study:
    """Measurements of one model and its modules."""

    graph: PreparedGraph
    options: QuantizeOptions
    plan: QuantizationPlan
    parts: tuple[ModulePart, ...]
    variants: QuantizedVariants
    """Measures on the samples that results are judged on."""
    selecting: QuantizedVariants
    """Measures on the samples that select modules."""
    float_scores: Mapping[str, float] = field(default_factory=dict)
    """Metric name → score of the float graph, if a target was not met."""
    _estimates: dict[str, MeasuredVariant] = field(default_factory=dict)
    _done: int = 0
    _total: int = 1

    @property
    def planned(self) -> frozenset[str]:
        """Names of the nodes quantized in the whole model."""
        return frozenset(node.name for node in self.plan.nodes if node.mode is not None)

    @property
    def whole(self) -> MeasuredVariant:
        """Measurement with all modules quantized."""
        return self.variants.stored[variant_key(self.planned)]

    def find_measurement(self, part: ModulePart) -> MeasuredVariant | None:
        """Measurement or estimate of a part; ``None`` without nodes to quantize."""
        if not part.nodes:
            return None
        variant = self.variants.stored.get(variant_key(part.node_names))
        return self._estimates[variant_key(part.node_names)] if variant is None else variant

    def measure_modules(self, jobs: int, progress: Progress | None, few: int | None) -> None:
        """Measure the whole model and each part; parts with the same nodes are measured once.

        Args:
            jobs: Number of parallel measurements.
            progress: Called after each measurement.
            few: Number of samples to rank parts on; the most sensitive parts are then measured on all samples.
                ``None``: all parts are measured on all samples.
        """
        whole = variant_key(self.planned)
        requested = {whole: self.options}
        for part in self.parts:
            if part.nodes:
                requested.setdefault(variant_key(part.node_names), only_options(part, self.options, self.graph.modules))
        self._total = sum(self.variants.stored.get(key) is None for key in requested) or 1
        if few is None or len(requested) < _MANY_VARIANTS:
            self._measure_variants(requested, jobs, progress, None)
            return
        composed = self._composed_parts()
        composed.pop(whole, None)
        separate = {key: options for key, options in requested.items() if key != whole and key not in composed}
        self._total = sum(self.variants.stored.get(key) is None for key in separate) + _MEASURED_FULLY
        self._measure_variants(separate, jobs, progress, few)
        float_bytes = weight_bytes(self.graph.model)
        for key, parts in composed.items():
            variants = [variant for part in parts if (variant := self.find_measurement(part)) is not None]
            if (estimate := MeasuredVariant.estimated(variants, float_bytes)) is not None:
                self._estimates[key] = estimate
        unknown = {key: requested[key] for key in composed if key not in self._estimates}
        self._measure_variants({whole: self.options}, jobs, progress, None)
        self._measure_variants(unknown, jobs, progress, few)
        ranked = dict.fromkeys(variant_key(part.node_names) for part in self._rank_parts(self.parts) if part.nodes)
        certain = {key: requested[key] for key in list(ranked)[:_MEASURED_FULLY]}
        self._measure_variants(certain, jobs, progress, None)

    def _composed_parts(self) -> dict[str, tuple[ModulePart, ...]]:
        """Key of a part → the units with the same nodes in total, for parts of several units."""
        units = [part for part in self.parts if part.is_unit]
        composed = {}
        for part in self.parts:
            inner = tuple(unit for unit in units if unit.node_names <= part.node_names)
            if len(inner) > 1 and frozenset().union(*(unit.node_names for unit in inner)) == part.node_names:
                composed[variant_key(part.node_names)] = inner
        return composed

    def _measure_variants(
        self, requested: Mapping[str, QuantizeOptions], jobs: int, progress: Progress | None, count: int | None
    ) -> None:
        """Measure the variants without a measurement on ``count`` samples; ``None``: on all samples."""
        missing = {key: setup for key, setup in requested.items() if not self.variants.has_measured(key, count=count)}
        if len(missing) >= _SHARING:
            self.variants.share_starts()
        measure = functools.partial(self.variants.measure, count=count)
        with contextlib.ExitStack() as stack:
            run: Callable[..., Iterable[MeasuredVariant]] = map
            if jobs > 1:
                run = stack.enter_context(ThreadPoolExecutor(jobs)).map
            for _ in run(measure, missing, missing.values()):
                self._done += 1
                if progress is not None:
                    progress(self._done, min(self._done / self._total, 1.0))

    def search(self, target: FidelityTarget | MetricTarget) -> ExcludeList:
        """Find the modules that must stay float, without timing."""
        units = [part for part in self._rank_parts(self.parts) if part.is_unit and self._count_nodes(part)]
        are_others = self.whole.nodes > sum(map(self._count_nodes, units))
        search = _ExcludeSearch(
            units=units,
            limit=len(units) - (not are_others),
            target=target,
            measure=lambda some: self._measure_excluding(some, units, self.selecting),
            costs_bytes=self._bytes_saved,
        )
        exclusion = search.find()
        judged = self._measure_judged(exclusion, units)
        for _ in range(_SEARCHES - 1):
            if not exclusion.is_met or isinstance(target, MetricTarget) or isinstance(search.target, MetricTarget):
                break
            if not (missing := target.shortfall(judged)):
                break
            # The judging samples are harder: search again with a target stricter by the difference.
            search.target = search.target.stricter(missing)
            exclusion = search.find()
            judged = self._measure_judged(exclusion, units)
        options = excluding_options(exclusion.excluded, units, self.options)
        return ExcludeList(
            target=target,
            is_met=target.is_met(judged),
            rules=options.per_module,
            excluded=tuple(unit.module.tag for unit in exclusion.excluded),
            form=judged,
            trials=tuple(search.trials),
        )

    def _measure_judged(self, exclusion: ExcludeTrial, units: Sequence[ModulePart]) -> MeasuredVariant:
        """Measure the variant of a list on the samples that it is judged on."""
        return self._measure_excluding(exclusion.excluded, units, self.variants)

    def timed(self, listed: ExcludeList, timing: LatencyOptions) -> tuple[ExcludeList, TimedVariant | None]:
        """Add the latency of a list, and measure the fully quantized variant.

        A list that misses its target and a whole model that does not run are not timed.
        """
        if not listed.is_met:
            self.float_scores = self.variants.float_scores()
            return listed, None
        rules = self.options.model_copy(update={"per_module": dict(listed.rules)})
        whole = self.variants.timed(self.options, timing) if self.whole.runs else None
        return replace(listed, latency=self.variants.timed(rules, timing) if listed.excluded else whole), whole

    def _count_nodes(self, part: ModulePart) -> int:
        """Number of quantized nodes of a part; 0 without nodes to quantize."""
        variant = self.find_measurement(part)
        return variant.nodes if variant is not None else 0

    def _rank_parts(self, parts: Iterable[ModulePart]) -> list[ModulePart]:
        """Sort parts by descending error; parts without quantized nodes come last."""

        def damage(part: ModulePart) -> tuple[int, float]:
            """Sort key of a part: whether nodes were quantized, then SQNR in dB."""
            variant = self.find_measurement(part)
            if variant is None or not variant.nodes:
                return (2 if variant is None else 1), 0.0
            return 0, variant.worst.sqnr_db if variant.worst is not None else float("-inf")

        return sorted(parts, key=damage)

    def _measure_excluding(
        self, excluded: Sequence[ModulePart], units: Sequence[ModulePart], variants: QuantizedVariants
    ) -> MeasuredVariant:
        """Measure the variant in which some units stay float, using the equivalent rules."""
        prefix = "" if variants is self.variants else "selecting "
        key = prefix + variant_key(self.planned.difference(*(unit.node_names for unit in excluded)))
        return variants.measure(key, excluding_options(excluded, units, self.options), is_judged=True)

    def rows(self) -> tuple[ModuleSensitivity, ...]:
        """Rows of the ranking."""
        return tuple(map(self._make_row, self._rank_parts(self.parts)))

    def _make_row(self, part: ModulePart) -> ModuleSensitivity:
        """Create the record of a part."""
        return ModuleSensitivity(
            path=part.module.path,
            tag=part.module.tag,
            class_name=part.module.class_name,
            part=part.part,
            precision=part.precision,
            parameters=self.graph.parameters_of(part.node_names),
            form=self.find_measurement(part),
            size_bytes_saved=self._bytes_saved(part),
        )

    def _bytes_saved(self, part: ModulePart) -> int:
        """Bytes of weights saved by quantizing a part alone; 0 if not measured."""
        variant = self.find_measurement(part)
        return (
            weight_bytes(self.graph.model) - variant.weight_bytes if variant is not None and variant.weight_bytes else 0
        )


def _study_notes(study: _Study, samples: Samples) -> Iterator[str]:
    """Yield notes on estimates, source of modules and samples, resumed measurements and non-finite outputs."""
    graph, stored = study.graph, study.variants.stored
    variants = [variant for part in study.parts if (variant := study.find_measurement(part)) is not None]
    if quick := sum(variant.samples < study.variants.samples or variant.is_estimate for variant in variants):
        estimates = sum(variant.is_estimate for variant in variants)
        yield (
            f"{quick} less sensitive modules were ranked on {_FEW_SAMPLES} samples; {estimates} of these are estimates "
            f"from their parts. {opt.samples} {study.variants.samples} measures every module on all samples."
        )
    if graph.modules.source != "winml tags":
        yield f"The file has no winml tags; modules were read from its {graph.modules.source}."
    if samples.about.source == "random":
        yield f"Measured on random values in the ranges that the file states; {opt.input_data} takes real inputs."
    if stored.resumed:
        yield f"{stored.resumed} variants were measured by an interrupted run."
    if any(not np.isfinite(array).all() for output in samples.answers for array in output.values()):
        yield "The float model returns NaN or infinity; these values are excluded from the comparison."
    if samples.left_out:
        yield f"The float model returns no finite values for {', '.join(samples.left_out)}, which is not compared."
