"""Measurement of the sensitivity of modules to quantization, and search for modules that must stay float.

Each module is quantized alone with the rest in float, and the outputs are compared with those of the float graph. The
options select the engine. Does not import PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from winml.modelkit.compare.quality_samples import SampleRequest
from winml.modelkit.compare.words import samples_words
from winml.modelkit.errors import ConfigError, opt
from winml.modelkit.file_names import files_folder
from winml.modelkit.onnx.files.placing import file_digest, model_digest
from winml.modelkit.onnx.fingerprint import file_fingerprint
from winml.modelkit.onnx.weights import weight_bytes
from winml.modelkit.options import options_of, unknown_key_message
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.ort.sessions import onnxruntime_version
from winml.modelkit.profile.latency import LatencyOptions
from winml.modelkit.progress import OnStep, Progress, StepClock, count_share
from winml.modelkit.python_functions import python_function
from winml.modelkit.quantize.calibration import calibration_data
from winml.modelkit.quantize.module_parts import ModulePart, list_parts
from winml.modelkit.quantize.module_study import FEW_SAMPLES, ModuleStudy, first_samples, other_samples
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
)
from winml.modelkit.quantize.sensitivity_options import SensitivityOptions
from winml.modelkit.quantize.sensitivity_records import (
    FidelityTarget,
    MetricTarget,
    QuantizationSensitivity,
)
from winml.modelkit.samples.data_sources import content_digests
from winml.modelkit.transform.graph_file import read_plain
from winml.modelkit.version import __version__

_NAME = "quantization_sensitivity"
_READING, _REFERENCE, _MODULES, _SEARCH = "reading", "float outputs", "modules", "exclude list"


@python_function(shape_config="sizes")
def quantization_sensitivity(
    model: str | os.PathLike[str],
    *,
    options: QuantizeOptions | None = None,
    sensitivity: SensitivityOptions | None = None,
    quantizer: Quantizer | None = None,
    evaluator: VariantEvaluator | None = None,
    on_step: OnStep | None = None,
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

    Example:
        ```python
        result = quantization_sensitivity("model.onnx", precision="int8", depth=2)
        for module in result.modules:
            print(module.path, module.sqnr_db)
        ```
    """
    options, sensitivity = _split_flags(options, sensitivity, flags)
    source = Path(model)
    if options.has_judging_data_alone:
        options = options.model_copy(update={"samples": sensitivity.samples})
    options, mode_notes = _resolve_mode(options, source)
    options.refuse_contradictions()
    with contextlib.ExitStack() as stack:
        if evaluator is None and (task_target := sensitivity.task_target(options.dataset)) is not None:
            evaluator = stack.enter_context(_open_evaluator(source, options, sensitivity, task_target))
        measurement = _Measurement(source, options, sensitivity, evaluator)
        calibration = measurement.calibration
        if calibration is not None:
            calibration_data.refuse_missing_data(calibration)
            stack.callback(calibration.close)
        if quantizer is None:
            statistics = None if calibration is None else calibration_data.CalibrationStatistics(calibration)
            quantizer = functools.partial(quantize, calibration=statistics)
        result = measurement.run(quantizer, on_step, progress or count_share("measurements"), before_each)
    return replace(result, model=str(model), notes=(*mode_notes, *result.notes))


@dataclass(frozen=True)
class _Measurement:
    """One sensitivity analysis."""

    source: Path
    options: QuantizeOptions
    sensitivity: SensitivityOptions
    evaluator: VariantEvaluator | None

    @functools.cached_property
    def calibration(self) -> calibration_data.Calibration | None:
        """Calibration samples; ``None`` if the quantization does not run the model."""
        if not self.options.needs_samples:
            return None
        sensitivity = self.sensitivity
        return calibration_data.Calibration(
            self.options, self._processors, sensitivity.sizes, sensitivity.seed, self.source
        )

    @property
    def target(self) -> FidelityTarget | MetricTarget | None:
        """Requested quality; ``None`` for a ranking alone."""
        if self.evaluator is not None:
            return self.evaluator.target
        return self.sensitivity.fidelity_target(self.options.dataset)

    @functools.cached_property
    def _digest(self) -> str:
        """Digest of the content of the model's files: stored measurements and the result state it."""
        return model_digest(self.source)

    @property
    def _processors(self) -> Path:
        """Folder of tokenizer and processors: as requested, or the folder of the model."""
        return self.sensitivity.processors or files_folder(self.source.absolute())

    def run(
        self, quantizer: Quantizer, on_step: OnStep | None, progress: Progress, before_each: Callable[[], None] | None
    ) -> QuantizationSensitivity:
        """Measure the modules, and search the modules that must stay float for the target.

        Raises:
            WinMLError: as :func:`quantization_sensitivity`.
        """
        options, sensitivity, target = self.options, self.sensitivity, self.target
        stored = self._open_stored()
        clock = StepClock((_READING, _REFERENCE, _MODULES, *([_SEARCH] if target else [])), on_step)
        with clock.step(_READING) as step:
            graph = read_prepared(self.source, options)
            plan, parts = _plan_parts(graph, self.source, options, sensitivity)
            step.summary = f"{sum(bool(part.nodes) for part in parts)} modules with nodes to quantize"
        with clock.step(_REFERENCE) as step:
            # All jobs together use one thread per core.
            threads = None if sensitivity.jobs == 1 else max(1, (os.cpu_count() or 1) // sensitivity.jobs)
            request = self._sample_request()
            samples = search_samples = take_samples(graph, request, threads)
            step.summary = samples_words(samples.about)
            if target is not None and self.evaluator is None and sensitivity.input_data is None:
                search_samples = take_samples(graph, other_samples(request), threads)
        variants, selecting = (
            QuantizedVariants(graph, inputs, quantizer, stored, threads, self.evaluator, before_each)
            for inputs in (samples, search_samples)
        )
        is_judged_alone = search_samples is samples
        study = ModuleStudy(graph, options, plan, parts, variants, variants if is_judged_alone else selecting)
        with clock.step(_MODULES) as step:
            study.measure_modules(sensitivity.jobs, progress, self._first_samples(samples))
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
            model=str(self.source),
            fingerprint=file_fingerprint(self.source),
            digest=self._digest,
            tool_version=__version__,
            onnxruntime_version=onnxruntime_version(),
            precision=options.base.name,
            modes=options.modes(),
            tree_source=graph.modules.source,
            samples=samples.about.count,
            input_source=samples.about.source,
            data=samples.about.data,
            calibration=None if self.calibration is None else self.calibration.words,
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
            notes=(*graph.notes, *values.notes, *_study_notes(study, samples)),
        )

    def _open_stored(self) -> MeasuredVariants:
        """Open the stored measurements of an interrupted run, if measurements are stored.

        Measurements depend on the model, the options and the samples, but not on the measured modules.
        """
        options, sensitivity, calibration = self.options, self.sensitivity, self.calibration
        if sensitivity.measured is None:
            return MeasuredVariants(None, {}, overwrite=sensitivity.overwrite)
        data = sensitivity.input_data
        data_set = options.dataset and {
            "split": options.split,
            "columns": dict(options.columns),
            "content": [*content_digests(options.dataset).values()],
        }
        calibrated = None if calibration is None else {"method": calibration.method, **calibration.request()}
        request = {
            "model": self._digest,
            **options.model_dump(mode="json", exclude={"min_sqnr_db", *CALIBRATION_OPTIONS}),
            # Omitted options are equal to their written-out defaults.
            "precision": options.base.name,
            "mode": options.mode_of(options.base),
            **({"calibration": calibrated} if calibrated is not None else {}),
            # Without random samples if values come from a file.
            **({"input_data": file_digest(data)} if data is not None else {"samples": sensitivity.samples}),
            "seed": sensitivity.seed,
            "sizes": dict(sensitivity.sizes),
            **({"data_set": data_set} if data_set is not None else {}),
            "winml": __version__,
            "onnxruntime": onnxruntime_version(),
            **({"judge": dict(self.evaluator.request)} if self.evaluator is not None else {}),
        }
        return MeasuredVariants(sensitivity.measured, request, overwrite=sensitivity.overwrite)

    def _sample_request(self) -> SampleRequest:
        """Request for the samples of the comparison."""
        sensitivity = self.sensitivity
        run = RunOptions(
            shown=str(self.source), sizes=sensitivity.sizes, input_data=sensitivity.input_data, seed=sensitivity.seed
        )
        data_set = self.options.judging_request(sensitivity.seed)
        if data_set is not None:
            data_set = replace(data_set, samples=sensitivity.samples)
        return SampleRequest(run, self._processors, data_set, count=sensitivity.samples, model=self.source)

    def _first_samples(self, samples: Samples) -> int | None:
        """Number of samples of the first ranking; ``None``: all samples, as for requested samples."""
        sensitivity = self.sensitivity
        is_stated = sensitivity.samples is not None or sensitivity.input_data is not None
        return None if is_stated or self.evaluator is not None else first_samples(samples)


def _resolve_mode(options: QuantizeOptions, source: Path) -> ResolvedOptions:
    """Return the options with the mode that the weights of the file decide."""
    return resolve_mode(options, lambda: read_plain(source)[0], source.stem)


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


def _study_notes(study: ModuleStudy, samples: Samples) -> Iterator[str]:
    """Yield notes on estimates, source of modules and samples, resumed measurements and non-finite outputs."""
    graph, stored = study.graph, study.variants.stored
    variants = [variant for part in study.parts if (variant := study.find_measurement(part)) is not None]
    if quick := sum(variant.samples < study.variants.samples or variant.is_estimate for variant in variants):
        estimates = sum(variant.is_estimate for variant in variants)
        yield (
            f"{quick} less sensitive modules were ranked on {FEW_SAMPLES} samples; {estimates} of these are estimates "
            f"from their parts. {opt.samples} {study.variants.samples} measures every module on all samples."
        )
    if graph.modules.source != "winml tags":
        yield f"The file has no winml tags; modules were read from its {graph.modules.source}."
    if samples.about.source == "random":
        yield f"Measured on random values in the ranges that the file states; {opt.input_data} takes real inputs."
    if any(node.requested.float_type == ir.DataType.FLOAT16.name for node in study.plan.nodes if node.mode is not None):
        from winml.modelkit.ort.half_rounding import ROUNDING_NOTE  # needed only by float16 files

        yield ROUNDING_NOTE
    if stored.resumed:
        yield f"{stored.resumed} variants were measured by an interrupted run."
    if any(not np.isfinite(array).all() for output in samples.answers for array in output.values()):
        yield "The float model returns NaN or infinity; these values are excluded from the comparison."
    if samples.left_out:
        yield f"The float model returns no finite values for {', '.join(samples.left_out)}, which is not compared."
