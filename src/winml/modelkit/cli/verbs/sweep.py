"""``winml sweep``: how do many models fare in many configurations?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import NEGATIVE_ANSWER, Interrupted, WinMLCommand
from winml.modelkit.cli._options import NonEmptyPath, debug_option, format_option
from winml.modelkit.cli._progress import sweep_progress
from winml.modelkit.cli._streams import show_result, silence_library_warnings, tell
from winml.modelkit.errors import ConfigError, UsageError, WinMLError

if TYPE_CHECKING:
    from winml.modelkit.results.sweep import SweepResult
    from winml.modelkit.sweep.plan import SweepPlan
    from winml.modelkit.sweep.sweep import SweepOptions

__all__ = ["command"]

EPILOG = """\b
Examples:
  winml sweep models.txt --do build,perf,compare -o swept
  winml sweep models.txt --set optim.level=none,full --set quant.precision=fp32,int8 -o swept
  winml sweep plan.json -o swept --timeout 600 --memory 6 --max relative_error=0.01
  winml sweep plan.json -o swept --retry-failed
  winml sweep plan.json -o swept2 --against swept
  winml sweep plan.json -o /shared/swept --ray auto
"""


@click.command(name="sweep", cls=WinMLCommand, epilog=EPILOG)
@click.argument("plan", type=NonEmptyPath())
@click.option("-o", "--output", type=NonEmptyPath(), required=True, help="Folder of the sweep; it goes on from there.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=V,V", help="Values that a key of the config takes; repeatable."
)
@click.option("--do", metavar="STEPS", help="Of export, build, perf, eval, compare, with commas.  [default: build]")
@click.option("--min", "minimum", multiple=True, metavar="MEASURE=N", help="Least value; else exit 3; repeatable.")
@click.option("--max", "maximum", multiple=True, metavar="MEASURE=N", help="Largest value; else exit 3; repeatable.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Most for each.")
@click.option(
    "--memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB",
    help="Most memory for each, with what it starts.",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Processes at a time.  [default: the cores; one where perf is measured]"
)
@click.option("--ray", metavar="HOST:PORT|auto", help="Spread the work over this Ray cluster.")
@click.option("--queue", metavar="NAME=ADDRESS", help="Spread the work by another queue, such as that of a plug-in.")
@click.option("--artifacts", metavar="FOLDER|URL", help="Where what is built goes, such as s3://bucket/sweep.")
@click.option(
    "--keep/--no-keep", default=True, help="Keep what was built once it is measured, or not.  [default: keep]"
)
@click.option("--retry-failed", is_flag=True, help="Do again what failed in an earlier run.")
@click.option("--against", type=NonEmptyPath(), help="Folder of an earlier sweep to compare with.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress, and no table.")
@format_option
@debug_option
def command(**options: Any) -> None:
    """Do the same with many models in many configurations, each in a process of its own.

    PLAN is a JSON file, or a list with one model a line: a path, a Hub id, or random:bert for a small random model of a
    type. What is finished is not done again. Exit codes: 0 done, 3 a limit (--min, --max) is missed, 1 a cell failed,
    2 wrong usage.
    """
    plan, requested, notes = _refuse_early(options)
    silence_library_warnings(debug=options["debug"])
    from winml.modelkit.report.sweep import sweep_document
    from winml.modelkit.sweep.sweep import run_sweep

    ended: list[str] = []
    try:
        with sweep_progress(ended, quiet=options["quiet"]) as listener:
            result = run_sweep(plan, options["output"], requested, listener, notes=notes)
    except KeyboardInterrupt:
        raise Interrupted(f"finished in this run: {len(ended)}; the same command goes on from there") from None
    show_result(result.as_record(), options, lambda: sweep_document(result))
    _end(result)


def _end(result: SweepResult) -> None:
    if not result.is_good_enough:
        click.get_current_context().exit(NEGATIVE_ANSWER)
    if result.failures:
        click.get_current_context().exit(WinMLError.exit_code)


def _refuse_early(options: Mapping[str, Any]) -> tuple[SweepPlan, SweepOptions, tuple[str, ...]]:
    """Return the plan, how it is run, and notes; refuse what names and paths show to be wrong."""
    from winml.modelkit.evaluate.options import parse_limits
    from winml.modelkit.sweep.plan import STEPS, parse_settings, read_plan
    from winml.modelkit.sweep.sweep import SweepOptions, changed_plan, refuse_early

    steps = None if options["do"] is None else [step.strip() for step in options["do"].split(",")]
    for step in steps or ():
        if step not in STEPS:
            raise ConfigError(f"--do {options['do']}: there is no step {step!r}", hint=f"Steps: {', '.join(STEPS)}.")
    plan, notes = read_plan(options["plan"])
    passed = {
        "set": parse_settings(options["settings"]),
        "do": steps,
        "min": parse_limits(options["minimum"], "--min"),
        "max": parse_limits(options["maximum"], "--max"),
    }
    plan, more = changed_plan(plan, passed)
    if options["output"].is_file():
        raise UsageError(f"-o {options['output']}: is a file", hint="Name a folder.")
    artifacts: str | None = options["artifacts"]
    requested = SweepOptions(
        resident_bytes=None if options["memory"] is None else int(options["memory"] * 1e9),
        jobs=options["jobs"],
        ray=options["ray"],
        queue=options["queue"],
        artifacts=artifacts if artifacts is None or "://" in artifacts else str(Path(artifacts).absolute()),
        keeps_files=options["keep"],
        retries_failed=options["retry_failed"],
        against=options["against"],
        **({} if options["timeout"] is None else {"seconds": options["timeout"]}),
    )
    refuse_early(plan, requested)
    for note in (*notes, *more):
        tell(f"note: {note}")
    return plan, requested, (*notes, *more)
