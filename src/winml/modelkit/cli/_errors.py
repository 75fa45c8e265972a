"""How does an error become words on stderr, once, with the next thing to do?"""

from __future__ import annotations

import traceback
from typing import Any

import click

from winml.modelkit.errors import WinMLError, first_line

__all__ = ["WinMLCommand", "report_click_error", "report_unexpected"]


class WinMLCommand(click.Command):
    """A verb: the errors we name end it with their sentence and exit code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line.

        An empty text, as an unset variable of a shell leaves it, is no value of any option: who wrote it meant one.
        """
        remaining = super().parse_args(ctx, args)
        self._take_from_group(ctx)
        for param in self.params:
            value = ctx.params.get(param.name or "")
            texts = value if isinstance(value, tuple) else (value,)
            if any(isinstance(text, str) and not text.strip() for text in texts):
                raise click.BadParameter("the text is empty.", ctx, param)
        return remaining

    @staticmethod
    def _take_from_group(ctx: click.Context) -> None:
        """Take the options that stood before the verb as if they stood behind it."""
        given = ctx.parent.params if ctx.parent is not None else {}
        for name in ("quiet", "verbose"):
            if given.get(name) and name not in ctx.params:
                raise click.NoSuchOption(f"--{name}", ctx=ctx)
            if given.get(name):
                ctx.params[name] = True

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except WinMLError as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            where = f" ({error.step})" if error.step else ""
            click.echo(f"error{where}: {error.message}", err=True)
            if error.hint:
                click.echo(error.hint, err=True)
            ctx.exit(error.exit_code)


def report_click_error(error: click.ClickException) -> int:
    """Tell a wrong use of the command line, with the verb whose help shows the right one."""
    context = getattr(error, "ctx", None)
    click.echo(f"error: {error.format_message()}", err=True)
    if context is not None:
        click.echo(f"'{context.command_path} --help' shows what it takes.", err=True)
    return error.exit_code


def report_unexpected(error: Exception, *, debug: bool) -> int:
    """Tell an error nobody foresaw; it is ours to mend, so ask for a report."""
    if debug:
        traceback.print_exception(error)
    click.echo(f"internal error: {type(error).__name__}: {first_line(error)}", err=True)
    hint = "" if debug else " Run it again with --debug for the traceback."
    click.echo(f"This is a mistake in winml, not in your command: please report it.{hint}", err=True)
    return WinMLError.exit_code
