"""Plan and run of ``winml quantize``: quantization of modules, or measurement of their sensitivity."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from winml.modelkit.errors import ModelPathError, UsageError, opt
from winml.modelkit.fields import declare, fields_of, refuse_stated
from winml.modelkit.file_names import measured_path
from winml.modelkit.python_functions import python_function
from winml.modelkit.quantize.declared_options import SENSITIVITY, QuantizeFields, SensitivityFields
from winml.modelkit.report.plan import Plan, PlannedStep, interruptions_beside, planned_file
from winml.modelkit.verbs.file_to_file import FilePlan, WeightsRequest
from winml.modelkit.verbs.named_models import file_request

if TYPE_CHECKING:
    from winml.modelkit.builds.found_models import ModelFolder
    from winml.modelkit.options import Options
    from winml.modelkit.progress import OnStep, Progress
    from winml.modelkit.quantize.file_quantization import Quantization
    from winml.modelkit.quantize.options import QuantizeOptions
    from winml.modelkit.quantize.records import QuantizedFile
    from winml.modelkit.quantize.sensitivity_options import SensitivityOptions
    from winml.modelkit.quantize.sensitivity_records import QuantizationSensitivity
    from winml.modelkit.transform.graph_file import GraphFileTask


@dataclass(frozen=True, kw_only=True)
class _Measures:
    """The --sensitivity switch (a separate class: listed first in --help)."""

    sensitivity: bool = declare(False, SENSITIVITY, is_common=True)
    """Measure how sensitive each module is to quantization, and write no model. Each module is quantized alone, and
    modules are ranked by the error of the outputs. `--output` is a JSON file of the result; `--samples` is the number
    of samples compared [default: 16, fewer for large models], or of `--dataset`. An interrupted measurement resumes
    with the same command."""


@dataclass(frozen=True, kw_only=True)
class QuantizeRequest(WeightsRequest["QuantizeOptions", "QuantizedFile"], SensitivityFields, _Measures):
    """Request of ``winml quantize``."""

    verb: ClassVar[str] = "quantize"
    section: ClassVar[str] = "quant"
    declaring: ClassVar[type] = QuantizeFields

    exclude_list: Path | None = declare(None, SENSITIVITY)
    """Write the modules to exclude to a file for `--per-module`."""
    report: Path | None = declare(None, SENSITIVITY, is_common=True)
    """Write an HTML report with chart and table. Also with `--budget` and `--max-size`."""

    @classmethod
    def options_record(cls) -> type[QuantizeOptions]:
        """Return the validated record of the options."""
        from winml.modelkit.quantize.options import QuantizeOptions

        return QuantizeOptions

    @classmethod
    def section_values(cls, section: Options) -> tuple[dict[str, object], str]:
        """Options of the section; ``auto`` is replaced by its precision."""
        from winml.modelkit.builds.config import QuantSection, auto_words, quantize_options

        assert isinstance(section, QuantSection)
        return quantize_options(section).model_dump(mode="json", exclude_none=True), auto_words(section)

    @classmethod
    def of_command(
        cls, section: Mapping[str, Any], options: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> QuantizeRequest:
        """Build the request of a command line.

        With ``--sensitivity``, ``--samples`` belongs to the measurement.
        """
        stated = {"samples": options["samples"]} if fields.get("sensitivity") and "samples" in options else {}
        left = {name: value for name, value in options.items() if name not in stated}
        request = super().of_command(section, left, {**fields, **stated})
        assert isinstance(request, QuantizeRequest)
        return request

    def refuse_options(self) -> None:
        """Refuse options that contradict each other or have no effect, and missing calibration data.

        Raises:
            UsageError: names the option.
        """
        from winml.modelkit.quantize.calibration.calibration_files import refuse_missing_files

        self.options.refuse_contradictions()
        if not self.sensitivity:
            measured = [field.name for field in fields_of(QuantizeRequest) if field.group == SENSITIVITY]
            measured.remove("report")
            hint = f"Add {opt.sensitivity}, or omit {{}}."
            refuse_stated(self, measured, f"{{}} requires {opt.sensitivity}", hint)
            if self.options.bit_budget is None:
                refuse_stated(
                    self, ["report"], f"{{}} requires {opt.sensitivity}, {opt.budget} or {opt.max_size}", hint
                )
        refuse_missing_files(self.options)

    def plan(self) -> FilePlan[QuantizedFile]:
        """Plan the command, including the report of a search for bits and the files of the calibration."""
        plan = super().plan()
        if self.report is not None:
            plan = _add_report(plan, self.report, overwrite=self.overwrite)
        return plan if plan.folder is None else self._add_calibration_files(plan)

    def plan_file(self) -> FilePlan[QuantizedFile]:
        """Plan the quantization of one file, including the files of the calibration."""
        return self._add_calibration_files(super().plan_file())

    def task(self, source: Path, output: Path, folder: ModelFolder | None = None) -> GraphFileTask:
        """Return the task; samples of a part are generated for the processors of its folder."""
        task = super().task(source, output, folder)
        return task if folder is None else replace(task, processors=folder.path)

    def work(self, task: GraphFileTask, options: QuantizeOptions) -> Quantization:
        """Return the quantization, as work on the file of a task."""
        from winml.modelkit.quantize.file_quantization import Quantization

        # The plan refuses a folder all of whose parts keep a limit.
        return Quantization(
            task.source, options, self.sizes or {}, may_stay_float=task.of_several, written=task.paths.model
        )

    def _add_calibration_files(self, plan: FilePlan[QuantizedFile]) -> FilePlan[QuantizedFile]:
        """Add calibration data on this disk and the calibration cache to a plan.

        Raises:
            UsageError: every source keeps the limit; or the cache is for several graphs, one of the other files, or a
                folder.
        """
        options = self.options
        sources = [part.task.source for part in plan.parts.values() if part.checked is not None]
        if len(sources) == len(plan.parts):
            options.refuse_files_within_limit(sources)
        for name in (options.calibration_data, options.dataset):
            if name is not None and (data := Path(name)).exists():
                plan = replace(plan, reads=(*plan.reads, data))
        if options.calibration_cache is None:
            return plan
        cache = Path(options.calibration_cache)
        if plan.folder is not None and len(plan.parts) > 1:
            raise UsageError(
                f"{opt.calibration_cache} {cache}: one graph expected, {plan.folder.path} has {', '.join(plan.parts)}",
                hint=f"Select one: {opt.submodel} {next(iter(plan.parts))}.",
            )
        _refuse_other_file(opt.calibration_cache, cache, plan)
        if cache.is_dir():
            raise UsageError(
                f"{opt.calibration_cache} {cache}: this is a folder", hint="Specify a file, such as statistics.json."
            )
        grows = planned_file(cache, "activations are measured that it does not hold")
        return replace(plan, writes=(*plan.writes, grows))


def _add_report(plan: FilePlan[QuantizedFile], report: Path, *, overwrite: bool) -> FilePlan[QuantizedFile]:
    """Add the HTML report of a search for bits to a plan.

    Raises:
        UsageError: several parts are quantized, or the report is also another file of the plan.
        OutputExistsError: the report exists, without overwrite.
    """
    from winml.modelkit.onnx.files.output_files import refuse_existing

    if len(plan.parts) > 1:
        raise UsageError(
            f"{opt.report} {report}: {', '.join(plan.parts)} are quantized, and a report covers one of them",
            hint=f"Select one: {opt.submodel} {next(iter(plan.parts))}.",
        )
    _refuse_other_file(opt.report, report, plan)
    refuse_existing([report], overwrite=overwrite)
    return replace(plan, writes=(*plan.writes, planned_file(report)))


def _refuse_other_file(option: str, path: Path, plan: FilePlan[QuantizedFile]) -> None:
    """Refuse an additional output that is the model or an input file.

    Raises:
        UsageError: names the option.
    """
    for role, paths in (("read", plan.reads), ("written", tuple(file.path for file in plan.writes))):
        is_same = (path.exists() and planned.exists() and path.samefile(planned) for planned in paths)
        if path.absolute() in {planned.absolute() for planned in paths} or any(is_same):
            raise UsageError(
                f"{option} {path}: the file is also {role} by a different option", hint="Name another file."
            )


@python_function()
def quantize_model(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    submodel: Sequence[str] = (),
    options: QuantizeOptions | None = None,
    overwrite: bool = False,
    freeze_inputs: bool = False,
    verify: bool = True,
    external_data: bool | None = None,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    on_step: OnStep | None = None,
    **flags: Any,
) -> QuantizedFile:
    """Quantize an ONNX file, or modules of it. Its module tags are preserved.

    Args:
        model: The file, or a build folder; it is not changed.
        output: The ``.onnx`` file to write; the folder for a build folder.
        submodel: Parts of a build folder; empty: all.
        options: Options; None: those in ``flags``.
        overwrite: Replace an existing file.
        freeze_inputs: Turn inputs that have a default value into constants.
        verify: Compare the result with ``model`` in ONNX Runtime.
        external_data: Store weights in a separate data file (True) or in the model (False); None: a separate file from
            ``EXTERNAL_BYTES`` on.
        seed: Seed of the inputs that outputs are compared on.
        sizes: Sizes of dynamic dimensions to compare at, by name, by ``input:axis``, or by key of ``--shape-config``.
        on_step: Called when a step starts and when it ends.
        **flags: Fields of :class:`QuantizeOptions`: ``precision``, ``mode``, ``exclude`` and so on.

    Returns:
        The record of the quantization; the file is written. For a build folder, the
        :class:`~winml.modelkit.transform.records.TransformedFolder` with the record of each part.

    Raises:
        UsageError: an unknown flag, an output that exists, a selector that names no module, or nothing to
            quantize.
        InputError: the file is no ONNX model, its data is missing, or it is quantized already.
        QuantizeError: an engine failed, or supports no node.
        StageError: ``model`` itself does not run, so that the result cannot be compared.
        VerificationError: the quality is below the limit; no file was written.

    Example:
        ```python
        quantized = quantize_model("model.onnx", "int8.onnx", precision="int8", exclude=["BertLayer.0"])
        ```
    """
    return file_request(QuantizeRequest, "quantize_model", locals()).run(on_step)


quantize_onnx = quantize_model
"""Former name of :func:`quantize_model`."""


@dataclass(frozen=True, kw_only=True)
class SensitivityPlan(Plan):
    """Plan of a sensitivity measurement."""

    request: QuantizeRequest
    model: Path
    sensitivity: SensitivityOptions


def plan_sensitivity(request: QuantizeRequest) -> SensitivityPlan:
    """Plan a sensitivity measurement. Writes nothing.

    Raises:
        UsageError: options contradict each other, a path is wrong, or an output exists.
        ModelPathError: the file does not exist.
    """
    from winml.modelkit.onnx.files.named_paths import refuse_missing_values
    from winml.modelkit.onnx.files.output_files import files_of_model, refuse_existing, refuse_inputs
    from winml.modelkit.quantize.sensitivity_options import SensitivityOptions

    request.refuse_options()
    source = request.find_source()
    model = source if isinstance(source, Path) else source.only_part(f"{opt.sensitivity} requires one graph")
    _refuse_beside_sensitivity(request)
    if not model.is_file():
        raise ModelPathError(f"{model}: no such file", hint="Pass the path of an ONNX file.")
    outputs = [path for path in (request.output, request.report, request.exclude_list) if path is not None]
    if len({path.absolute() for path in outputs}) < len(outputs):
        raise UsageError(
            f"two of {opt.output}, {opt.report} and {opt.exclude_list} specify the same file",
            hint="Use a separate file for each.",
        )
    inputs = [Path(path) for path in (request.input_data, request.options.calibration_data) if path is not None]
    if outputs:
        refuse_inputs(outputs, [*inputs, *_dataset_files(request), *files_of_model(model)])
        refuse_existing(outputs, overwrite=request.overwrite)
    refuse_missing_values(request.input_data)
    _refuse_graph(request, model, outputs)
    measured = measured_path(outputs[0]) if outputs else None
    stated = {field.name: getattr(request, field.name) for field in fields_of(SensitivityFields)}
    sensitivity = SensitivityOptions(
        **stated,
        sizes=dict(request.sizes or {}),
        seed=request.seed,
        processors=None if isinstance(source, Path) else source.path,
        measured=measured,
        overwrite=request.overwrite,
    )
    sensitivity.fidelity_target(request.options.dataset)  # refuses an invalid one
    met = "the target is met"
    return SensitivityPlan(
        verb="quantize",
        reads=(model, *inputs, *_dataset_files(request)),
        writes=tuple(planned_file(path, met if path == request.exclude_list else "") for path in outputs),
        steps=(
            PlannedStep("measuring", f"{model}: each module quantized alone"),
            *(
                (PlannedStep("searching", f"modules that must stay in float for {request.target}"),)
                * bool(request.target)
            ),
        ),
        notes=(f"Measurements are stored in {measured} until the result is written.",) if measured is not None else (),
        interrupted=interruptions_beside(outputs),
        request=request,
        model=model,
        sensitivity=sensitivity,
    )


def _refuse_graph(request: QuantizeRequest, model: Path, outputs: Sequence[Path]) -> None:
    """Check the structure of the graph, unless recovery would replace the file first.

    Raises:
        UsageError: a selector names no module, or a size names no dimension of the graph.
        InputError: the file is no ONNX model, its data is missing, or the graph is already quantized.
    """
    from winml.modelkit.onnx.files.output_files import is_waiting
    from winml.modelkit.quantize.file_quantization import Quantization
    from winml.modelkit.transform.graph_file import GraphFileTask, check_source

    if is_waiting(model, outputs):
        return
    options = request.options
    if request.module is not None:
        options = options.model_copy(update={"include": (*options.include, request.module)})
    check_source(GraphFileTask(model, model), Quantization(model, options, request.sizes or {}))


def _refuse_beside_sensitivity(request: QuantizeRequest) -> None:
    """Refuse options that contradict a sensitivity analysis, and an output that is not JSON.

    Raises:
        UsageError: names the option.
    """
    from winml.modelkit.tags.selector import Selector

    if request.options.bit_budget is not None:
        raise UsageError(
            f"{opt.sensitivity} writes no model, and cannot be combined with {opt.budget} or {opt.max_size}",
            hint="Use one of them.",
        )
    if request.options.kv_cache is not None:
        raise UsageError(
            f"{opt.kv_cache} {request.options.kv_cache}: {opt.sensitivity} measures weights by module",
            hint=f"Omit one of them: {opt.kv_cache} reports its error.",
        )
    if request.options.solves_weights:
        raise UsageError(
            f"{opt.sensitivity}: {opt.algorithm} {request.options.algorithm} quantizes a module by what the modules "
            "before it make, and each is measured alone",
            hint=f"Use {opt.algorithm} rtn, hqq or k_quant.",
        )
    unused = f"{{}} has no effect with {opt.sensitivity}, which writes no model"
    refuse_stated(request, ("external_data", "verify"), unused, "Omit it.")
    refuse_stated(request.options, ("min_sqnr_db",), unused, "Omit it.", declaring=QuantizeFields)
    if request.input_data is not None and request.samples is not None:
        raise UsageError(
            f"{opt.samples} {request.samples}: {opt.input_data} {request.input_data} already determines the samples",
            hint="Use one of them.",
        )
    if request.module is not None:
        Selector(request.module)
    if request.exclude_list is not None and request.target is None:
        raise UsageError(f"{opt.exclude_list} requires {opt.target}", hint=f"Add {opt.target}, such as sqnr_db=30.")
    if request.output is not None and request.output.suffix.lower() in {".html", ".htm", ".onnx"}:
        raise UsageError(
            f"-o {request.output}: the result of {opt.sensitivity} is JSON",
            hint=f"Use a .json file; {opt.report} writes an HTML report. Without {opt.sensitivity}, a model is "
            "written.",
        )


def _dataset_files(request: QuantizeRequest) -> list[Path]:
    """Files of the dataset on this disk."""
    from winml.modelkit.samples.data_sources import find_source as find_dataset
    from winml.modelkit.samples.data_sources import source_files

    return [] if request.options.dataset is None else list(source_files(find_dataset(request.options.dataset)))


def refuse_unrun_sensitivity(plan: SensitivityPlan) -> None:
    """Check the normalized graph of a plan that is not run, as its run would.

    Raises:
        WinMLError: as :func:`run_sensitivity` raises before the model runs.
    """
    from winml.modelkit.onnx.files.output_files import is_waiting
    from winml.modelkit.quantize.sensitivity import refuse_unmeasurable

    if not is_waiting(plan.model, [file.path for file in plan.writes]):
        refuse_unmeasurable(plan.model, plan.request.options, plan.sensitivity)


def run_sensitivity(
    plan: SensitivityPlan, on_step: OnStep | None = None, progress: Progress | None = None
) -> QuantizationSensitivity:
    """Recover files of killed commands, then measure; the caller writes the files of the plan.

    Raises:
        WinMLError: the model cannot be read, run or quantized.
    """
    from winml.modelkit.quantize.sensitivity import quantization_sensitivity

    plan.recover()
    return quantization_sensitivity(
        plan.model, options=plan.request.options, sensitivity=plan.sensitivity, on_step=on_step, progress=progress
    )
