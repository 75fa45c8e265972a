"""``winml perf --module``: how fast is each module on its own?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    from winml.modelkit.runtime.opened_model import RunOptions

__all__ = ["check_module", "module_option", "show_module_perf"]

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
    from winml.modelkit.cli._progress import show_step
    from winml.modelkit.flows.modules.perf import measure_modules
    from winml.modelkit.report.module_perf import print_module_perf

    with library_output_to_stderr(), live_progress(quiet=options["quiet"]) as progress:
        on_step = None if options["quiet"] else show_step
        result = measure_modules(
            exported_path(model, on_step), options["module"], run_options, latency, on_step=on_step, progress=progress
        )
    show_answer(result.as_record(), options, lambda console: print_module_perf(result, console))
    if result.failed or not result.instances:
        count = len(result.failed)
        what = f"{count} of {len(result.instances)} instances could not be measured" if count else "nothing to measure"
        tell(f"error: {what}")
        click.get_current_context().exit(1)
