"""Finds the fastest file on this machine that is still right: plans, builds, judges, races, and answers.

Composes the files beside it. What is measured is on disk before the next step begins, so the same call goes on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from winml.modelkit.builds.cache import write_atomically
from winml.modelkit.builds.found_models import onnx_file
from winml.modelkit.builds.identity import file_digests
from winml.modelkit.builds.plan import is_onnx_path, request_record
from winml.modelkit.builds.resumption import resume_identity
from winml.modelkit.errors import ConfigError, UsageError, WinMLError
from winml.modelkit.evaluate.data_sources import find_source, source_files
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.file_names import TUNE_ANSWER_NAME, TUNE_CANDIDATES_NAME, TUNE_PAGE_NAME
from winml.modelkit.flows.quantize.calibration_files import calibration_files
from winml.modelkit.load.load_options import declared_options
from winml.modelkit.load.request import ModelRequest
from winml.modelkit.options import parse_options, unknown_key_message
from winml.modelkit.progress import StepClock, StepEvent
from winml.modelkit.report.tuning_page import tuning_page
from winml.modelkit.results.tuning import Candidate, TuneResult
from winml.modelkit.tune.building import TunedModel, exported_once, tuned_model
from winml.modelkit.tune.candidates import TuningMachine, look_at_tuning_machine, plan_candidates
from winml.modelkit.tune.contest import Contest, ContestTask
from winml.modelkit.tune.options import TuneOptions
from winml.modelkit.tune.state import TuneState, held_tune_folder

__all__ = ["TUNE_STEPS", "tune_model", "tuned_request"]

_NAME = "tune_model"
TUNE_STEPS = ("plain file", "forms", "modules in float", "race", "variations", "answer")


def tune_model(
    model: str | os.PathLike[str] | ModelRequest,
    output: str | os.PathLike[str],
    *,
    options: TuneOptions | None = None,
    export: WinMLExportConfig | None = None,
    overwrite: bool = False,
    on_step: Callable[[StepEvent], None] | None = None,
    progress: Callable[[int, float], None] | None = None,
    **flags: Any,
) -> TuneResult:
    """Find the fastest file of a model on this machine that is still right.

    What was measured is kept in the folder; the same call goes on from it, and returns at once where all is done.

    Args:
        model: Hub id, checkpoint folder, ``file.py:factory``, ONNX file, or folder of a build.
        output: Folder of the tuning; the winner is the build in ``best`` below it.
        options: What is looked for; None: as ``flags`` say.
        export: How a checkpoint is exported; None: as :func:`~winml.modelkit.build_hf_model` does.
        overwrite: Start anew where the folder belongs to another tuning.
        on_step: Called when a step starts and when it ends.
        progress: Called in a race after each turn, with its number and the share that is done.
        **flags: Fields of :class:`~winml.modelkit.tune.options.TuneOptions`, such as ``min_sqnr_db``; and how a
            checkpoint is loaded, as :func:`~winml.modelkit.build_hf_model` takes it.

    Returns:
        Every candidate with what it takes and how right it is, and the winner.

    Raises:
        ConfigError: a flag nobody knows, or a value of the wrong kind.
        UsageError: the request is wrong, the model has several parts, or the folder holds something else.
        InputError: files of the model are damaged.
        StageError: the model cannot be exported, or does not run.
        VerificationError: ONNX Runtime and PyTorch disagree.
    """
    asked, request = _parsed_flags(options, model, flags)
    asked.refuse_contradictions()
    folder = Path(output)
    clock = StepClock(TUNE_STEPS, on_step)
    machine = look_at_tuning_machine()
    with held_tune_folder(folder):
        model_asked = tuned_model(request, export or WinMLExportConfig())
        plan = plan_candidates(asked, machine)
        state = TuneState(folder, _request_of(model_asked, asked, machine, plan), overwrite=overwrite)
        try:
            source = exported_once(model_asked, folder.absolute(), state)
            task = ContestTask(request.model, source, asked, machine, folder.absolute(), progress)
            result = Contest(task, state, plan, clock).run()
        except WinMLError:
            state.forget()
            raise
        _write_answer(result, folder)
        if all(item.status != "not tried" for item in result.candidates):
            shutil.rmtree(folder / TUNE_CANDIDATES_NAME, ignore_errors=True)
    return result


def tuned_request(model: str | os.PathLike[str], **load: Any) -> ModelRequest:
    """Return the request of a model, which may be an ONNX file or the folder of a build.

    Raises:
        UsageError: nothing is there.
    """
    name = os.fspath(model)
    path = onnx_file(name)
    if path is None:
        return ModelRequest(model=name, **load)
    if load := {name: value for name, value in load.items() if name != "seed"}:
        raise UsageError(f"{next(iter(load))} has no meaning for {path}, which is an ONNX file", hint="Leave it out.")
    return ModelRequest(model=str(path))


def _parsed_flags(
    options: TuneOptions | None, model: str | os.PathLike[str] | ModelRequest, flags: Mapping[str, Any]
) -> tuple[TuneOptions, ModelRequest]:
    """Return the options and the request that flags of both kinds make."""
    load_names = [option.name for option in declared_options()]
    known = [*TuneOptions.model_fields, *load_names]
    for name in flags:
        if name not in known:
            raise ConfigError(unknown_key_message(name, known, _NAME))
    own = {name: value for name, value in flags.items() if name in TuneOptions.model_fields}
    load = {name: value for name, value in flags.items() if name in load_names}
    if options is not None and own:
        raise UsageError(
            f"{_NAME}: options= and {next(iter(own))} both say what is looked for", hint="Give one of them."
        )
    asked = options or parse_options(TuneOptions, own, _NAME)
    return asked, model if isinstance(model, ModelRequest) else tuned_request(model, **load)


def _request_of(
    source: TunedModel, options: TuneOptions, machine: TuningMachine, plan: tuple[Candidate, ...]
) -> dict[str, Any]:
    """Return what the measurements depend on; the time that may be taken is no part of it."""
    request = {"model": source.request.model} if is_onnx_path(source.request.model) else request_record(source.request)
    # What a factory returns cannot be known, its file can.
    script = {} if source.identity.is_repeatable else {"files": file_digests(source.identity.places)}
    asked = {
        "identity": {**source.identity.record, **script},
        "request": request,
        "export": source.export.model_dump(mode="json"),
        **options.model_dump(mode="json", exclude={"budget_minutes"}),
        "machine": machine.as_record(),
        "plan": [candidate.as_record() for candidate in plan],
    }
    return resume_identity(asked, _data_digests(options))


def _data_digests(options: TuneOptions) -> dict[str, dict[str, str]]:
    """Return what is in the files of values and samples, by option; a data set of the Hub is known by its name."""
    data: dict[str, dict[str, str]] = {}
    if options.input_data is not None:
        data["input_data"] = file_digests([options.input_data])
    if options.dataset is not None:
        source = find_source(options.dataset)
        data["dataset"] = file_digests({str(path): path for path in source_files(source)})
    if options.calibration_data is not None:
        data["calibration_data"] = file_digests(calibration_files(options.calibration_data))
    return data


def _write_answer(result: TuneResult, folder: Path) -> None:
    """Write the answer and its page."""
    text = json.dumps(result.as_record(), indent=2, ensure_ascii=False)
    write_atomically(folder / TUNE_ANSWER_NAME, f"{text}\n")
    write_atomically(folder / TUNE_PAGE_NAME, tuning_page(result))
