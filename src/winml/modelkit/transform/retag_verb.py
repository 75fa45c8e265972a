"""What does ``winml retag`` do with a request? Carries the tags of a file to what another tool wrote from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.fields import MODEL, OUTPUT, declare
from winml.modelkit.file_names import data_path
from winml.modelkit.report.plan import Plan, PlannedFile, PlannedStep, interruptions_beside
from winml.modelkit.verbs.file_to_file import orphaned_data

if TYPE_CHECKING:
    from winml.modelkit.transform.records import RetaggedModel
    from winml.modelkit.transform.retag import CarriedTags


@dataclass(frozen=True, kw_only=True)
class RetagRequest:
    """What is requested of ``winml retag``."""

    before: Path = declare(None, MODEL, is_argument=True)
    """Tagged ONNX file that the tool read."""
    after: Path = declare(None, MODEL, is_argument=True)
    """ONNX file that the tool wrote."""
    output: Path | None = declare(None, OUTPUT, short="-o", is_common=True)
    """ONNX file to write. With `--overwrite`, AFTER by default."""
    overwrite: bool = declare(False, OUTPUT, is_common=True)
    """Overwrite existing files."""


@dataclass(frozen=True, kw_only=True)
class RetagPlan(Plan):
    """What carrying tags would do."""

    request: RetagRequest
    carried: CarriedTags


def plan_retag(request: RetagRequest) -> RetagPlan:
    """Return what would be done: tags are carried in memory, and nothing is written.

    Raises:
        UsageError, InputError, WriteError: as :func:`winml.modelkit.transform.retag.retag_model` raises.
    """
    from winml.modelkit.transform.retag import carry_between

    target = request.after if request.output is None else request.output
    carried = carry_between(request.before, request.after, target, overwrite=request.overwrite)
    reads = (request.before, *carried.original_data, request.after, *carried.data)
    found = f"{carried.report.matched} of {carried.report.nodes} nodes matched with {request.before}"
    copies = carried.data and not carried.shares_data
    return RetagPlan(
        verb="retag",
        reads=reads,
        writes=(PlannedFile(target, target.exists()), *((PlannedFile(data_path(target, "*")),) if copies else ())),
        steps=(PlannedStep("carrying tags", found), PlannedStep("writing", f"{target}: only the metadata changes")),
        removes=orphaned_data([target], reads),
        interrupted=interruptions_beside([target]),
        request=request,
        carried=carried,
    )


def run_retag(plan: RetagPlan) -> RetaggedModel:
    """Recover what killed commands left, and write the file; what they replaced is read again.

    Raises:
        WinMLError: as :func:`plan_retag` raises; nothing was written.
    """
    from winml.modelkit.transform.retag import carry_between, write_carried

    plan.recover()
    request, carried = plan.request, plan.carried
    if not carried.is_current:
        carried = carry_between(request.before, request.after, carried.target, overwrite=request.overwrite)
    return write_carried(carried, overwrite=request.overwrite)
