"""Search for the fastest variant of a model on this machine within a quality limit.

Measurements are saved before the next step begins, so the same call resumes a tuning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.builds.cache import only_looking, resume_identity
from winml.modelkit.builds.config import WinMLBuildConfig
from winml.modelkit.builds.found_models import onnx_file
from winml.modelkit.builds.identity import file_digests
from winml.modelkit.builds.plan import is_onnx_path, plan_build, request_record
from winml.modelkit.builds.planned_build import is_to_be_fetched
from winml.modelkit.errors import UsageError, WinMLError
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.file_names import TUNE_CANDIDATES_NAME, TUNE_PAGE_NAME, TUNE_RESULT_NAME, TUNE_STATE_NAME
from winml.modelkit.models.load_options import declared_options
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.files.moving import remove_folder
from winml.modelkit.onnx.files.output_files import refuse_existing
from winml.modelkit.onnx.files.resumable_results import write_atomically
from winml.modelkit.options import options_of
from winml.modelkit.progress import OnStep, Progress, StepClock
from winml.modelkit.python_functions import python_function
from winml.modelkit.quantize.calibration.calibration_files import calibration_files
from winml.modelkit.report.html import render_html
from winml.modelkit.samples.data_sources import find_source, source_files
from winml.modelkit.tune.building import TunedModel, exported_once, tuned_model
from winml.modelkit.tune.candidates import TuningMachine, look_at_tuning_machine, plan_candidates
from winml.modelkit.tune.contest import Contest
from winml.modelkit.tune.options import TuneOptions
from winml.modelkit.tune.records import Candidate, TuneResult
from winml.modelkit.tune.state import TuneState, held_tune_folder, measured_candidates, refuse_foreign_folder
from winml.modelkit.tune.table import tuning_document

TUNE_STEPS = ("plain file", "forms", "modules in float", "race", "placement", "variations", "answer")


@python_function(shape_config="sizes", budget="budget_minutes")
def tune_model(
    model: str | os.PathLike[str] | ModelRequest,
    output: str | os.PathLike[str],
    *,
    options: TuneOptions | None = None,
    export: WinMLExportConfig | None = None,
    overwrite: bool = False,
    on_step: OnStep | None = None,
    progress: Progress | None = None,
    **flags: Any,
) -> TuneResult:
    """Find the fastest variant of a model on this machine within a quality limit.

    Measurements are stored in the folder: the same call resumes them, and returns at once if all are finished.

    Args:
        model: Hub id, checkpoint folder, ``file.py:function``, ONNX file, or folder of a build.
        output: Folder of the tuning; the winner is the build in ``best`` below it.
        options: Limits and candidates; None: those in ``flags``.
        export: How a checkpoint is exported; None: as :func:`~winml.modelkit.build_hf_model` does.
        overwrite: Start again if the folder belongs to another tuning.
        on_step: Called when a step starts and when it ends.
        progress: Called after each turn of a race, with its number and the finished share.
        **flags: Fields of :class:`~winml.modelkit.tune.options.TuneOptions`, such as ``min_sqnr_db``; and how a
            checkpoint is loaded, as :func:`~winml.modelkit.build_hf_model` takes it.

    Returns:
        Every candidate with its time, size and quality, and the winner.

    Raises:
        ConfigError: an unknown flag, or a value of the wrong kind.
        UsageError: the request is wrong, the model has several parts, or the folder holds something else.
        InputError: files of the model are damaged.
        StageError: the model cannot be exported, or does not run.
        VerificationError: the outputs of ONNX Runtime and PyTorch differ.

    Example:
        ```python
        result = tune_model("model.onnx", "tuned", only=("dynamic", "level"), budget_minutes=20)
        print(result.winner.folder, result.winner.words)
        ```
    """
    tune_options, request = _split_flags(options, model, flags)
    tune_options.refuse_contradictions()
    folder = Path(output)
    clock = StepClock(TUNE_STEPS, on_step)
    machine = look_at_tuning_machine()
    with held_tune_folder(folder):
        original = tuned_model(request, export or WinMLExportConfig())
        plan = plan_candidates(tune_options, machine)
        state = TuneState(folder, _measurement_identity(original, tune_options, machine, plan), overwrite=overwrite)
        try:
            source = exported_once(original, folder.absolute(), state)
            contest = Contest(
                request.model, source, tune_options, machine, folder.absolute(), state, plan, clock, progress
            )
            result = contest.run()
        except WinMLError:
            state.forget()
            raise
        text = json.dumps(result.as_record(), indent=2, ensure_ascii=False)
        write_atomically(folder / TUNE_RESULT_NAME, f"{text}\n")
        write_atomically(folder / TUNE_PAGE_NAME, render_html(tuning_document(result)))
        if all(candidate.status != "not tried" for candidate in result.candidates):
            remove_folder(folder / TUNE_CANDIDATES_NAME)
    return result


@dataclass(frozen=True)
class TuningOutlook:
    """Current state of a tuning, and its plan."""

    candidates: tuple[Candidate, ...]
    measured: frozenset[str]
    """Names of candidates settled by an earlier run of the same tuning."""
    starts_anew: bool
    """True if the folder belongs to another tuning, which would be removed."""


def look_at_tuning(
    request: ModelRequest, options: TuneOptions, folder: Path, *, overwrite: bool = False
) -> TuningOutlook:
    """Return the plan of a tuning, with the candidates already measured. Writes and downloads nothing.

    Args:
        request: The model.
        options: Options of the tuning.
        folder: Folder of the tuning.
        overwrite: Restart if the folder belongs to another tuning.

    Raises:
        UsageError: the request is wrong, or the folder belongs to another tuning.
        OutputExistsError: the folder contains files that no tuning wrote.
        WriteError: the folder cannot be written to.
    """
    options.refuse_contradictions()
    if options.dataset is not None:
        find_source(options.dataset)
    refuse_foreign_folder(folder)
    state = folder / TUNE_STATE_NAME
    refuse_existing([state], overwrite=True)
    machine = look_at_tuning_machine()
    candidates = plan_candidates(options, machine)
    names: frozenset[str] | None = frozenset()
    with only_looking():
        # Without a state, the model need not be identified, nor read twice.
        if state.exists() and not is_to_be_fetched(plan_build(WinMLBuildConfig(), request)):
            model = tuned_model(request, WinMLExportConfig())
            identity = _measurement_identity(model, options, machine, candidates)
            names = measured_candidates(folder, identity, overwrite=overwrite)
    return TuningOutlook(candidates, names or frozenset(), names is None)


def _source_request(model: str | os.PathLike[str], **load: Any) -> ModelRequest:
    """Return the request for a model, which may be an ONNX file or a build folder.

    Raises:
        UsageError: nothing exists at the path.
    """
    name = os.fspath(model)
    path = onnx_file(name)
    if path is None:
        return ModelRequest(model=name, **load)
    if load := {name: value for name, value in load.items() if name != "seed"}:
        raise UsageError(f"{next(iter(load))} does not apply to {path}, an ONNX file", hint="Omit it.")
    return ModelRequest(model=str(path))


def _split_flags(
    options: TuneOptions | None, model: str | os.PathLike[str] | ModelRequest, flags: Mapping[str, object]
) -> tuple[TuneOptions, ModelRequest]:
    """Split flags of both kinds into the options and the request."""
    load = {option.name: flags[option.name] for option in declared_options() if option.name in flags}
    tune_flags = {name: value for name, value in flags.items() if name not in load or name in TuneOptions.model_fields}
    tune_options = options_of(TuneOptions, options, tune_flags, "tune_model")
    return tune_options, model if isinstance(model, ModelRequest) else _source_request(model, **load)


def _measurement_identity(
    source: TunedModel, options: TuneOptions, machine: TuningMachine, plan: tuple[Candidate, ...]
) -> dict[str, object]:
    """Return everything that the measurements depend on; the limits of time and memory are not included."""
    request = {"model": source.request.model} if is_onnx_path(source.request.model) else request_record(source.request)
    # The return value of a factory is not known in advance; its file is.
    script = {} if source.identity.is_repeatable else {"files": file_digests(source.identity.places)}
    record = {
        "identity": {**source.identity.record, **script},
        "request": request,
        "export": source.export.model_dump(mode="json"),
        **options.model_dump(mode="json", exclude={"budget_minutes", "max_peak"}),
        "machine": machine.as_record(),
        "plan": [candidate.as_record() for candidate in plan],
    }
    return resume_identity(record, _data_digests(options))


def _data_digests(options: TuneOptions) -> dict[str, dict[str, str]]:
    """Return digests of the files of values and samples, by option; a dataset on the Hub is identified by its name."""
    data: dict[str, dict[str, str]] = {}
    if options.input_data is not None:
        data["input_data"] = file_digests([options.input_data])
    if options.dataset is not None:
        source = find_source(options.dataset)
        data["dataset"] = file_digests({str(path): path for path in source_files(source)})
    if options.calibration_data is not None:
        data["calibration_data"] = file_digests(calibration_files(options.calibration_data))
    return data
