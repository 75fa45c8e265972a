"""``winml sweep``: many models in many configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._endings import Interrupted
from winml.modelkit.cli._errors import NEGATIVE_RESULT, WinMLCommand
from winml.modelkit.cli._folders import end_dry_run
from winml.modelkit.cli._options import request_options, result_options
from winml.modelkit.cli._progress import sweep_progress
from winml.modelkit.cli._requests import stated_fields
from winml.modelkit.cli._streams import show_result, tell
from winml.modelkit.errors import WinMLError
from winml.modelkit.sweep.verb import SweepRequest, plan_sweep, run_planned_sweep

if TYPE_CHECKING:
    from winml.modelkit.sweep.records import SweepResult


@click.command(name="sweep", cls=WinMLCommand)
@request_options(SweepRequest)
@result_options(quiet="Show neither progress nor the table.")
def command(**options: Any) -> None:
    """Build, measure and compare many models in many configurations.

    PLAN is a JSON file, or a text file with one model per line: a path, a Hub id, or random:bert for a small random
    model of that architecture. Each model and configuration runs in a separate process. Finished ones are skipped.

    Exit codes: 0 success, 1 a configuration failed, 2 usage error, 3 a limit (--min, --max) is not met.

    Examples:
      winml sweep models.txt --do build,perf,compare -o swept
      winml sweep models.txt --set optim.level=none,full --set quant.precision=fp32,int8 -o swept
      winml sweep plan.json -o swept --timeout 600 --memory 6 --max relative_error=0.01
      winml sweep plan.json -o swept --retry-failed
      winml sweep plan.json -o swept2 --against swept
      winml sweep plan.json -o /shared/swept --ray auto
    """
    request = SweepRequest(**stated_fields(SweepRequest, options))
    plan = plan_sweep(request)
    end_dry_run(plan, options)
    for note in plan.notes:
        tell(f"note: {note}")
    ended: list[str] = []
    try:
        with sweep_progress(ended, quiet=options["quiet"]) as listener:
            result = run_planned_sweep(plan, request, listener)
    except KeyboardInterrupt:
        raise Interrupted(f"finished in this run: {len(ended)}; the same command resumes there") from None
    show_result(result.as_record(), options, result.document)
    _exit_on_failure(result)


def _exit_on_failure(result: SweepResult) -> None:
    """Exit with code 3 for a missed limit, with code 1 for a failed cell."""
    if not result.is_good_enough:
        click.get_current_context().exit(NEGATIVE_RESULT)
    if result.failures:
        click.get_current_context().exit(WinMLError.exit_code)
