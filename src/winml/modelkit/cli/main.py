"""Entry point of ``winml``: finds and runs the verb, and exits with its exit code."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from winml.modelkit.cli._endings import catch_signals, end_process, exit_status, tell_settled
from winml.modelkit.cli._help import HELP_SETTINGS
from winml.modelkit.cli._streams import open_streams
from winml.modelkit.registries import Registry

COMMANDS = {
    "export": "Export a PyTorch or Hugging Face model to ONNX. Every node is tagged with its module.",
    "build": "Export, optimize, quantize and compile a model into one folder. Up-to-date stages are skipped.",
    "refit": "Put other weights into a build without tracing the model again.",
    "optimize": "Optimize an ONNX model without changing its outputs. Tags are preserved.",
    "quantize": "Quantize an ONNX model, module by module. Tags are preserved.",
    "compile": "Compile an ONNX model for an execution provider. Tags are preserved.",
    "tune": "Find the fastest variant of a model on this machine within a quality limit.",
    "run": "Run a model on text, an image, audio or tensors, and print the result.",
    "generate": "Generate text with a model.",
    "inspect": "Show the contents of an ONNX model, or the planned export of a checkpoint.",
    "view": "Write a page that shows the modules and the graph of a model, or of two side by side.",
    "perf": "Measure the latency and memory of a model, in total or by module.",
    "compare": "Run two models on the same inputs and find the first module whose outputs diverge.",
    "verify": "Compare a model on this machine with recorded outputs of PyTorch.",
    "diff": "Show the changes between two ONNX models by module, without running them.",
    "eval": "Evaluate a model on a dataset and compare it with its source model.",
    "extract": "Extract modules of a model as separate ONNX models.",
    "retag": "Transfer module tags to an ONNX file that another tool wrote.",
    "sweep": "Build, measure and compare many models in many configurations.",
    "config": "Write the build config of a model as JSON.",
    "cache": "List or remove builds in the cache.",
    "sys": "Show versions, execution providers, devices and memory.",
}
"""Verb → description, in the order of work: make a model, run it, judge it, take it apart, and the rest."""

_ELSEWHERE = {
    "build": "builds.command",
    "refit": "builds.refit_command",
    "cache": "builds.cache_command",
    "config": "builds.config_command",
    "diff": "compare.diff_command",
    "eval": "evaluate.command",
    "perf": "profile.command",
    "retag": "transform.retag_command",
    "run": "generate.run_command",
    "sys": "builds.sys_command",
    "verify": "compare.verify_command",
}
MODULES = {name: _ELSEWHERE.get(name, f"{name}.command") for name in COMMANDS}
"""Verb → module of its ``command``."""

VERBS: Registry[click.Command] = Registry(
    "verbs",
    "verb",
    {name: f"winml.modelkit.{module}:command" for name, module in MODULES.items()},
    lambda: click.Command,
    refuse=lambda name, verb: "" if verb.name == name else f"it calls itself {verb.name}",
)
"""Verb → its command; commands of plug-ins are imported when they are run or listed."""

_COMPLETION = "_WINML_COMPLETE"
"""Environment variable by which a shell requests completions; read by click."""

COLLECTION_THRESHOLD = 150_000
"""Allocations of containers before Python searches for cyclic garbage. A command runs for seconds and mostly imports
modules, which leave no garbage: with Python's default of 700, the search takes a fifth of the time until a model is
loaded (measured: 3.6 s against 2.9 s; with 50,000 still 0.07 s, and with no limit no less than with this value)."""


class _LazyGroup(click.Group):
    """Lists the verbs by name and imports only the requested verb."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        return [*COMMANDS, *sorted({*VERBS} - {*COMMANDS})]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  # click's
        return VERBS.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in VERBS or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        from winml.modelkit.cli._suggestions import unknown_command

        if (error := unknown_command(name, args[1:], VERBS, COMMANDS)) is not None:
            raise error
        raise click.UsageError(f"No such verb {name!r}. Verbs: {', '.join(self.list_commands(ctx))}.", ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, [*args])
        except click.NoSuchOption as error:
            from winml.modelkit.cli._suggestions import unknown_command

            # An option before its command, or a command with dashes.
            name = error.option_name
            word = next((word for word in args if word in VERBS), name)
            suggestion = unknown_command(word, [other for other in args if other != word], VERBS, COMMANDS)
            if suggestion is None:
                raise
            suggestion.message = f"no such option {name}"
            raise suggestion from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            names = self.list_commands(ctx)
            formatter.write_dl([(name, COMMANDS.get(name) or VERBS[name].get_short_help_str(100)) for name in names])


def _print_version(ctx: click.Context, _param: click.Parameter, is_requested: bool) -> None:
    if is_requested and not ctx.resilient_parsing:
        from winml.modelkit.version import __version__

        click.echo(f"winml {__version__}")
        ctx.exit()


@click.group(cls=_LazyGroup, context_settings=HELP_SETTINGS, no_args_is_help=True)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
@click.option("-q", "--quiet", is_flag=True, help="Print errors and warnings only; may also follow the command.")
@click.option("-v", "--verbose", is_flag=True, help="Show more detail; may also follow the command.")
def _winml(**_flags: bool) -> None:
    """Convert PyTorch models to ONNX for deployment. Every node is tagged with its module."""


def _run_group(argv: Sequence[str] | None) -> Any:
    """Run the command line without exits of click; return the exit code of the verb, or None for 0."""
    try:
        return _winml.main(args=argv, prog_name="winml", standalone_mode=False)
    except SystemExit as leave:
        if _COMPLETION not in os.environ:
            raise
        # Click ends the process after it has printed completions.
        return leave.code


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``winml`` and exit the process.

    Args:
        argv: Arguments after the program's name; None: the arguments of the process.
    """
    gc.set_threshold(COLLECTION_THRESHOLD)
    catch_signals()
    open_streams()
    debug = "--debug" in (argv if argv is not None else sys.argv)
    status = exit_status(lambda: _run_group(argv), debug=debug)
    tell_settled()
    end_process(status, is_own_process=argv is None)
