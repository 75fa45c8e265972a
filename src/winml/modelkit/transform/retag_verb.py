"""Request, plan and run of ``winml retag``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.fields import MODEL, OUTPUT, declare
from winml.modelkit.python_functions import python_function
from winml.modelkit.report.plan import Plan, PlannedStep, interruptions_beside, planned_data, planned_file
from winml.modelkit.verbs.file_to_file import orphaned_data

if TYPE_CHECKING:
    from winml.modelkit.transform.records import RetaggedModel
    from winml.modelkit.transform.retag import CarriedTags


@dataclass(frozen=True, kw_only=True)
class RetagRequest:
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

    request: RetagRequest
    carried: CarriedTags


def plan_retag(request: RetagRequest) -> _RetagPlan:
    """Plan a tag transfer: transfer the tags in memory, and write nothing.

    Raises:
        UsageError, InputError, WriteError: as :func:`winml.modelkit.transform.retag.carry_between` raises.
    """
    from winml.modelkit.transform.retag import carry_between

    target = request.after if request.output is None else request.output
    carried = carry_between(request.before, request.after, target, overwrite=request.overwrite)
    reads = (request.before, *carried.original_data, request.after, *carried.data)
    matches = f"{carried.report.matched} of {carried.report.nodes} nodes matched with {request.before}"
    copies = carried.data and not carried.shares_data
    return _RetagPlan(
        verb="retag",
        reads=reads,
        writes=(planned_file(target), *((planned_data(target),) if copies else ())),
        steps=(PlannedStep("carrying tags", matches), PlannedStep("writing", f"{target}: only the metadata changes")),
        removes=orphaned_data([target], reads),
        interrupted=interruptions_beside([target]),
        request=request,
        carried=carried,
    )


def run_retag(plan: _RetagPlan) -> RetaggedModel:
    """Recover partial results of killed commands, and write the file; files replaced by the recovery are read again.

    Raises:
        WinMLError: as :func:`plan_retag` raises; nothing was written.
    """
    from winml.modelkit.transform.retag import carry_between, write_transfer

    plan.recover()
    request, carried = plan.request, plan.carried
    if not carried.is_current:
        carried = carry_between(request.before, request.after, carried.target, overwrite=request.overwrite)
    return write_transfer(carried, overwrite=request.overwrite)


@python_function()
def retag_model(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    overwrite: bool = False,
) -> RetaggedModel:
    """Transfer the module tags of a file to the file that another tool made from it (``winml retag``).

    Args:
        before: Tagged ONNX file that the tool read; it is not changed.
        after: ONNX file that the tool wrote.
        output: ONNX file to write; `None`: ``after`` itself, which requires ``overwrite``.
        overwrite: Replace an existing file.

    Returns:
        The record of the transfer; the file is written.

    Raises:
        UsageError: the output exists, or an input is missing.
        InputError: ``before`` has no tags, or ``after`` was not made from it.

    Example:
        ```python
        retag_model("model.onnx", "fast.onnx", "tagged.onnx")
        ```
    """
    target = None if output is None else Path(output)
    return run_retag(
        plan_retag(RetagRequest(before=Path(before), after=Path(after), output=target, overwrite=overwrite))
    )
