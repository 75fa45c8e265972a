"""``winml perf --module``: how fast is each module on its own?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from winml.modelkit.cli._answers import show_answer
from winml.modelkit.cli._measuring import live_progress
from winml.modelkit.cli._runnable_models import exported_path
from winml.modelkit.cli._streams import library_output_to_stderr, tell
from winml.modelkit.errors import UsageError
from winml.modelkit.hierarchy.selector import Selector

if TYPE_CHECKING:
    from winml.modelkit.builds.found_models import FoundModel
    from winml.modelkit.measure.latency import LatencyOptions
    from winml.modelkit.results.module_perf_result import ModulePerfResult
    from winml.modelkit.runtime.opened_model import RunOptions

__all__ = ["check_module", "module_option", "named_module_perf", "refuse_failed_instances", "show_module_perf"]

_F = TypeVar("_F", bound=Callable[..., Any])


def module_option(command: _F) -> _F:
    """Add the option that measures modules in place of the whole model."""
    return click.option(
        "--module", metavar="SELECTOR", help="Cut out each module it names, and measure it alone on real activations."
    )(command)


def check_module(options: Mapping[str, Any]) -> None:
    """Refuse what does not go together.

    Raises:
        UsageError: an empty selector, or an option that speaks of the whole model.
    """
    if options["module"] is None:
        return
    Selector(options["module"])
    for name in ("by_module", "baseline"):
        if options[name]:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} measures the whole model, and --module {options['module']} parts of it",
                hint="Give one of them, or cut the modules out first: winml extract.",
            )


def show_module_perf(
    model: FoundModel, run_options: RunOptions, latency: LatencyOptions, options: Mapping[str, Any]
) -> None:
    """Measure, show the tables, and leave with exit code 1 where an instance failed.

    Raises:
        UsageError: the file to write is what is measured, or there already.
    """
    from winml.modelkit.report.module_perf import print_module_perf

    result = named_module_perf(model, run_options, latency, options)
    show_answer(result.as_record(), options, lambda console: print_module_perf(result, console))
    refuse_failed_instances([result])


def named_module_perf(
    model: FoundModel, run_options: RunOptions, latency: LatencyOptions, options: Mapping[str, Any]
) -> ModulePerfResult:
    """Measure the modules that ``--module`` names in one file, with progress on stderr.

    Raises:
        WinMLError: the selector names nothing, or the file does not run.
    """
    from winml.modelkit.cli._progress import show_step
    from winml.modelkit.flows.modules.perf import measure_modules

    with library_output_to_stderr(), live_progress(quiet=options["quiet"]) as progress:
        on_step = None if options["quiet"] else show_step
        return measure_modules(
            exported_path(model, on_step), options["module"], run_options, latency, on_step=on_step, progress=progress
        )


def refuse_failed_instances(results: Sequence[ModulePerfResult]) -> None:
    """Leave with exit code 1 where an instance of a module could not be measured, or there was none."""
    failed = sum(len(result.failed) for result in results)
    instances = sum(len(result.instances) for result in results)
    if failed or not instances:
        what = f"{failed} of {instances} instances could not be measured" if failed else "nothing to measure"
        tell(f"error: {what}")
        click.get_current_context().exit(1)
