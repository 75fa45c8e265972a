"""How is ``winml`` started? Finds the verb, runs it, and ends with the exit code its outcome deserves."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from winml.modelkit.cli._errors import catch_signals, end_process, exit_status, tell_settled
from winml.modelkit.cli._streams import open_streams
from winml.modelkit.registries import Registry

__all__ = ["main"]

COMMANDS = {
    "build": "Export a model and optimize it into one folder; what has not changed is not made again.",
    "cache": "Show or remove what earlier builds keep on this disk.",
    "compare": "Run two models on the same values, and find the module where their answers part.",
    "compile": "Compile an ONNX file for one execution provider; its tags stay.",
    "config": "Write what a build of a model will do, as a file to read, change and keep.",
    "diff": "Show what changed between two ONNX files, module by module; neither is run.",
    "eval": "Judge a model by the samples of a data set, beside the model it was made from.",
    "export": "Turn a PyTorch or Hugging Face model into an ONNX file that remembers its modules.",
    "extract": "Cut modules out of a model, each as an ONNX model of its own.",
    "generate": "Let a built model go on with a text, token by token.",
    "inspect": "Show what is in a model, or what an export of it will be; no weight is read.",
    "optimize": "Make an ONNX file cheaper with the same answer; its tags stay.",
    "perf": "Measure how fast a model is, and how much memory it takes.",
    "quantize": "Let modules of an ONNX file compute with fewer bits; its tags stay.",
    "retag": "Give a file that another tool made the tags of the file it was made from.",
    "run": "Run a model on one text, image, recording or set of tensors, and print its answer.",
    "sweep": "Build, measure and compare many models in many configurations, each in a process of its own.",
    "sys": "Say what a bug report needs: versions, execution providers, devices, memory.",
    "tune": "Find the fastest file of a model on this machine that is still right.",
}
"""Verb → what it does. Each is the ``command`` of the module of its name in ``verbs``."""

VERBS: Registry[click.Command] = Registry(
    "verbs",
    "verb",
    {name: f"winml.modelkit.cli.verbs.{name}:command" for name in COMMANDS},
    lambda: click.Command,
    refuse=lambda name, verb: "" if verb.name == name else f"it calls itself {verb.name}",
)
"""Verb → its command; those of plug-ins are imported when they are run or listed."""

COMPLETION = "_WINML_COMPLETE"
"""Variable by which a shell asks for completions; click reads it."""

COLLECTION_THRESHOLD = 50_000
"""Containers made before Python looks for cyclic garbage. A command lives for seconds and mostly imports, where none
is to be found: with Python's own 700 the search takes a fifth of the time until a model is loaded (measured: 3.6 s
against 2.9 s)."""


class _LazyGroup(click.Group):
    """Knows its verbs by name and imports only the one that is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  # click's
        return VERBS.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in VERBS or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        from winml.modelkit.options import nearest

        guess = nearest(name, VERBS.names)
        ending = f"Did you mean {guess!r}?" if guess else f"Verbs: {', '.join(self.list_commands(ctx))}."
        raise click.UsageError(f"No such verb {name!r}. {ending}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            names = self.list_commands(ctx)
            formatter.write_dl([(name, COMMANDS.get(name) or VERBS[name].get_short_help_str(100)) for name in names])


def _print_version(ctx: click.Context, _param: click.Parameter, is_requested: bool) -> None:
    if is_requested and not ctx.resilient_parsing:
        from winml.modelkit.version import __version__

        click.echo(f"winml {__version__}")
        ctx.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
@click.option("-q", "--quiet", is_flag=True, help="As behind the verb: print nothing but errors.")
@click.option("-v", "--verbose", is_flag=True, help="As behind the verb: tell more.")
def _winml(**_given: bool) -> None:
    """PyTorch models to deployable ONNX, with every node's module remembered."""


def _run(argv: Sequence[str] | None) -> Any:
    try:
        return _winml.main(args=argv, prog_name="winml", standalone_mode=False)
    except SystemExit as leave:
        if COMPLETION not in os.environ:
            raise
        # Click ends the process once a shell has its completions.
        return leave.code


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``winml`` and leave the process.

    Args:
        argv: Arguments after the program's name; None takes those of the process.
    """
    gc.set_threshold(COLLECTION_THRESHOLD)
    catch_signals()
    open_streams()
    debug = "--debug" in (argv if argv is not None else sys.argv)
    status = exit_status(lambda: _run(argv), debug=debug)
    tell_settled()
    end_process(status, is_own_process=argv is None)
