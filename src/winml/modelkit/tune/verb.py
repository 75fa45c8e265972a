"""Plan and run of ``winml tune``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit import file_names
from winml.modelkit.errors import opt
from winml.modelkit.fields import OUTPUT, declare, fields_of
from winml.modelkit.report.plan import Plan, PlannedStep, interruptions_beside, planned_files
from winml.modelkit.tune.declared_options import TuneFields

if TYPE_CHECKING:
    from winml.modelkit.models.request import ModelRequest
    from winml.modelkit.progress import OnStep, Progress
    from winml.modelkit.tune.options import TuneOptions
    from winml.modelkit.tune.records import Candidate, TuneResult
    from winml.modelkit.tune.tuning import TuningOutlook


@dataclass(frozen=True, kw_only=True)
class TuneRequest(TuneFields):
    """Request of ``winml tune``."""

    model: ModelRequest
    files: tuple[Path, ...] = ()
    """Local files of the model."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    batch_size: int | None = None
    seed: int = 0

    output: Path = declare(None, OUTPUT, short="-o", is_required=True, is_common=True)
    """Folder to write to. An interrupted tuning in it is resumed."""
    overwrite: bool = declare(False, OUTPUT, is_common=True)
    """Replace a different tuning in the folder."""

    def tune_options(self) -> TuneOptions:
        """Return the options of the tuning."""
        from winml.modelkit.tune.options import TuneOptions

        names = [*(field.name for field in fields_of(TuneFields)), "sizes", "batch_size", "seed"]
        return TuneOptions(**{name: getattr(self, name) for name in names})


def plan_tuning(request: TuneRequest) -> Plan:
    """Plan the candidates on this machine, with those already measured. Nothing is written.

    Raises:
        UsageError, OutputExistsError, WriteError: as :func:`winml.modelkit.tune.tuning.look_at_tuning` raises.
    """
    from winml.modelkit.evaluate.declared_options import data_set_files
    from winml.modelkit.tune.tuning import TUNE_STEPS, look_at_tuning

    folder = request.output
    outlook = look_at_tuning(request.model, request.tune_options(), folder, overwrite=request.overwrite)
    values = () if request.input_data is None else (request.input_data,)
    conditions = {
        file_names.TUNE_STATE_NAME: "",
        file_names.TUNE_RESULT_NAME: "",
        file_names.TUNE_PAGE_NAME: "",
        f"{file_names.TUNED_NAME}/*": "the winner is not determined yet",
        f"{file_names.TUNE_CANDIDATES_NAME}/*": (
            "the time limit is reached before all are measured; removed at the end otherwise"
        ),
        f"{file_names.TUNE_EXPORT_NAME}/*": "the model cannot be exported twice the same",
        file_names.TUNE_LOCK_NAME: "the lock leaves its file",
    }
    return Plan(
        verb="tune",
        reads=tuple(path for path in (*request.files, *values, *data_set_files(request)) if path.is_file()),
        writes=planned_files(folder, conditions),
        steps=tuple(map(PlannedStep, TUNE_STEPS, _describe_steps(outlook, request))),
        notes=(f"{folder} contains a different tuning, whose results are removed.",) if outlook.starts_anew else (),
        interrupted=interruptions_beside([folder / file_names.TUNE_STATE_NAME]),
    )


def run_tuning(
    plan: Plan, request: TuneRequest, on_step: OnStep | None = None, progress: Progress | None = None
) -> TuneResult:
    """Recover leftovers of killed commands, and tune.

    Raises:
        WinMLError: as :func:`winml.modelkit.tune.tuning.tune_model` raises.
    """
    plan.recover()
    from winml.modelkit.tune.tuning import tune_model

    return tune_model(
        request.model,
        request.output,
        options=request.tune_options(),
        overwrite=request.overwrite,
        on_step=on_step,
        progress=progress,
    )


def _describe_steps(outlook: TuningOutlook, request: TuneRequest) -> tuple[str, ...]:
    """Describe each step of a tuning, in order."""
    folder = request.output
    plain, *variants = outlook.candidates
    forms = [candidate for candidate in variants if not candidate.part_of]
    parts = [candidate for candidate in variants if candidate.part_of]

    def describe_candidates(candidates: Sequence[Candidate]) -> str:
        entries = (
            f"{candidate.name} ({candidate.words}{'; already measured' * (candidate.name in outlook.measured)})"
            for candidate in candidates
        )
        return ", ".join(entries) or "none"

    return (
        describe_candidates([plain]),
        describe_candidates(forms),
        describe_candidates(parts),
        "of candidates within the quality limit, fastest first, in alternation",
        "groups of modules of a quantized winner, each in float"
        if request.ep is not None or "placement" in request.only
        else f"not requested ({opt.ep})",
        f"of the winner: levels, numbers of threads, fixed sizes and a compiled file, as far as {opt.only} names them",
        f"{folder / file_names.TUNE_RESULT_NAME}, {folder / file_names.TUNE_PAGE_NAME}",
    )
