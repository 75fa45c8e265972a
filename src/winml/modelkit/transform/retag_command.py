"""Command ``winml retag``: transfers tags to a file that another tool wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import end_dry_run
from winml.modelkit.cli._options import request_options, result_options
from winml.modelkit.cli._requests import stated_fields
from winml.modelkit.cli._streams import show_result
from winml.modelkit.fields import MODEL, OUTPUT, declare
from winml.modelkit.report.plan import Plan, PlannedStep, interruptions_beside, planned_data, planned_file
from winml.modelkit.verbs.file_to_file import orphaned_data

if TYPE_CHECKING:
    from winml.modelkit.transform.records import RetaggedModel
    from winml.modelkit.transform.retag import CarriedTags


@dataclass(frozen=True, kw_only=True)
class _RetagRequest:
    """Request of ``winml retag``."""

    before: Path = declare(None, MODEL, is_argument=True)
    """Tagged ONNX file that the tool read."""
    after: Path = declare(None, MODEL, is_argument=True)
    """ONNX file that the tool wrote."""
    output: Path | None = declare(None, OUTPUT, short="-o", is_common=True)
    """ONNX file to write. With `--overwrite`, AFTER by default."""
    overwrite: bool = declare(False, OUTPUT, is_common=True)
    """Overwrite existing files."""


@dataclass(frozen=True, kw_only=True)
class _RetagPlan(Plan):
    """Plan of a tag transfer."""

    request: _RetagRequest
    carried: CarriedTags


def _plan_retag(request: _RetagRequest) -> _RetagPlan:
    """Plan a tag transfer: transfer the tags in memory, and write nothing.

    Raises:
        UsageError, InputError, WriteError: as :func:`winml.modelkit.transform.retag.carry_between` raises.
    """
    from winml.modelkit.transform.retag import carry_between

    target = request.after if request.output is None else request.output
    transfer = carry_between(request.before, request.after, target, overwrite=request.overwrite)
    reads = (request.before, *transfer.original_data, request.after, *transfer.data)
    matches = f"{transfer.report.matched} of {transfer.report.nodes} nodes matched with {request.before}"
    copies = transfer.data and not transfer.shares_data
    return _RetagPlan(
        verb="retag",
        reads=reads,
        writes=(planned_file(target), *((planned_data(target),) if copies else ())),
        steps=(PlannedStep("carrying tags", matches), PlannedStep("writing", f"{target}: only the metadata changes")),
        removes=orphaned_data([target], reads),
        interrupted=interruptions_beside([target]),
        request=request,
        carried=transfer,
    )


def _run_retag(plan: _RetagPlan) -> RetaggedModel:
    """Recover partial results of killed commands, and write the file; files replaced by the recovery are read again.

    Raises:
        WinMLError: as :func:`_plan_retag` raises; nothing was written.
    """
    from winml.modelkit.transform.retag import carry_between, write_transfer

    plan.recover()
    request, transfer = plan.request, plan.carried
    if not transfer.is_current:
        transfer = carry_between(request.before, request.after, transfer.target, overwrite=request.overwrite)
    return write_transfer(transfer, overwrite=request.overwrite)


@click.command(name="retag", cls=WinMLCommand)
@request_options(_RetagRequest)
@result_options()
def command(**options: object) -> None:
    """Transfer the module tags of BEFORE to AFTER, made from BEFORE by another tool.

    Only the metadata of AFTER changes. No weights are read.

    Exit codes: 0 success, 1 invalid files, 2 usage error.

    Examples:
      winml retag model.onnx optimized.onnx -o optimized_tagged.onnx
      winml retag model.onnx optimized.onnx --overwrite
    """
    plan = _plan_retag(_RetagRequest(**stated_fields(_RetagRequest, options)))
    end_dry_run(plan, options)
    result = _run_retag(plan)
    from winml.modelkit.transform.table import retagged_document

    show_result(result.as_record(), options, lambda: retagged_document(result))
