"""``winml perf --by-module``: which module takes the time, as a table and as files for other tools."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from winml.modelkit.cli._answers import json_text, print_json, refuse_outputs, write_files
from winml.modelkit.cli._measuring import live_progress
from winml.modelkit.cli._options import NonEmptyPath
from winml.modelkit.cli._runnable_models import exported_path, files_read
from winml.modelkit.cli._streams import library_output_to_stderr
from winml.modelkit.errors import UsageError

if TYPE_CHECKING:
    from winml.modelkit.builds.found_models import FoundModel
    from winml.modelkit.measure.latency import LatencyOptions
    from winml.modelkit.results.profiled_modules import ProfiledDecoder, ProfiledModules
    from winml.modelkit.runtime.opened_model import RunOptions

__all__ = ["by_module_options", "check_by_module", "show_by_module"]

_F = TypeVar("_F", bound=Callable[..., Any])

_PAGES = ("report", "node_data", "trace")
FILES = ("output", *_PAGES)
"""Options that name a file to write."""
_ONLY_BY_MODULE = ("depth", "top", "group", *_PAGES)


def by_module_options(command: _F) -> _F:
    """Add the options that break the time down by module."""
    path = NonEmptyPath()
    for option in reversed(
        (
            click.option(
                "--by-module", is_flag=True, help="Show which module takes the time, in one profiled session."
            ),
            click.option("--depth", type=click.IntRange(min=1), help="Levels of the module tree to show."),
            click.option("--top", type=click.IntRange(min=1), help="Show only so many, those with the most own time."),
            click.option("--group", type=click.Choice(["class"]), help="Show all modules of a class together."),
            click.option("--report", type=path, help="Also write a page with chart and table, to open in a browser."),
            click.option("--node-data", type=path, help="Also write node data for Model Explorer (JSON)."),
            click.option("--trace", type=path, help="Also write a Chrome trace with module frames (JSON)."),
        )
    ):
        command = option(command)
    return command


def check_by_module(options: Mapping[str, Any]) -> None:
    """Refuse what does not go together, before anything is measured.

    Raises:
        UsageError: an option needs ``--by-module``, or cannot be used with it; or a library is missing.
    """
    if not options["by_module"]:
        for name in _ONLY_BY_MODULE:
            if options[name]:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"{flag} says how times by module are shown", hint=f"Add --by-module, or leave {flag} out."
                )
        return
    if options["baseline"]:
        raise UsageError(
            f"--baseline {options['baseline']}: profiling slows both down differently, so --by-module compares nothing",
            hint="Compare in a run of its own, without --by-module.",
        )
    for name in ("group", "top"):
        if options["depth"] is not None and options[name] is not None:
            raise UsageError(
                f"--depth {options['depth']} is for the tree, and --{name} {options[name]} shows a list in its place",
                hint="Give one of them.",
            )
    paths = [options[name] for name in FILES if options[name]]
    if len({path.absolute() for path in paths}) < len(paths):
        raise UsageError(
            "two of --output, --report, --node-data and --trace name one file", hint="Give each a file of its own."
        )


def show_by_module(
    model: FoundModel, run_options: RunOptions, latency: LatencyOptions, options: Mapping[str, Any]
) -> None:
    """Measure, write the files, and show where the time goes.

    Raises:
        UsageError: a file to write is what is measured, or there already.
    """
    from winml.modelkit.cli._progress import show_step
    from winml.modelkit.flows.modules.profile import profile_model

    outputs = [options[name] for name in FILES if options[name]]
    refuse_outputs(outputs, files_read(model, options) if outputs else (), overwrite=options["overwrite"])
    with library_output_to_stderr(), live_progress(quiet=options["quiet"]) as progress:
        path = exported_path(model, None if options["quiet"] else show_step)
        measured = profile_model(path, run_options, latency, progress=progress)
        written = _write_files(measured, options)
    if options["format_"] == "json":
        print_json(measured.as_record(depth=options["depth"]))
        return
    _print(measured, options)
    from winml.modelkit.report.terminal import console_for, print_rows

    print_rows((("wrote", str(path)) for path in written), console_for(sys.stdout), width=12)


def _print(measured: ProfiledModules | ProfiledDecoder, options: Mapping[str, Any]) -> None:
    from winml.modelkit.report.decoder_times import print_decoder_times
    from winml.modelkit.report.module_times import print_module_times
    from winml.modelkit.report.perf import print_perf
    from winml.modelkit.report.terminal import console_for
    from winml.modelkit.results.profiled_modules import ProfiledDecoder

    console = console_for(sys.stdout)
    depth, top, by_class = options["depth"], options["top"], options["group"] == "class"
    if isinstance(measured, ProfiledDecoder):
        print_decoder_times(measured, console, depth=depth, top=top, by_class=by_class)
        return
    print_perf(measured.result, console)
    console.print()
    print_module_times(measured.profile, console, depth=depth, top=top, by_class=by_class)


def _write_files(measured: ProfiledModules | ProfiledDecoder, options: Mapping[str, Any]) -> list[Path]:
    from winml.modelkit.report.chrome_trace import chrome_trace_json
    from winml.modelkit.report.decoder_times import decoder_page
    from winml.modelkit.report.model_explorer import profile_node_data
    from winml.modelkit.report.module_page import profile_page
    from winml.modelkit.results.profiled_modules import ProfiledModules

    return write_files(
        {
            "output": lambda: f"{json_text(measured.as_record(depth=options['depth']))}\n",
            "report": lambda: (
                profile_page(measured) if isinstance(measured, ProfiledModules) else decoder_page(measured)
            ),
            "node_data": lambda: profile_node_data(measured),
            "trace": lambda: chrome_trace_json(measured),
        },
        options,
    )
