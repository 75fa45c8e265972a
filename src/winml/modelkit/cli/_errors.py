"""How does an error become words on stderr, once, with the next thing to do?"""

from __future__ import annotations

import errno
import math
import os
import traceback
from typing import Any

import click

from winml.modelkit.cli._completion import complete_paths
from winml.modelkit.cli._streams import tell
from winml.modelkit.errors import WinMLError, first_line
from winml.modelkit.words import printable

__all__ = [
    "WinMLCommand",
    "is_out_of_memory",
    "report_click_error",
    "report_error",
    "report_out_of_memory",
    "report_unexpected",
]

_MEMORY_HINT = (
    "Ask for smaller inputs (--shape-config, --input-specs), raise the limit of the process (ulimit -v), or use a "
    "machine with more."
)
_MEMORY_WORDS = ("bad_alloc", "bad allocation", "failed to map segment", "allocate memory", "out of memory")
"""How loaders of libraries, C++ and torch say it, none of them as a MemoryError."""
_LOST_ERROR = "error return without exception set"
"""What is left of an error in a C extension for which there was no memory either."""


_LARGEST_INT = 2**63 - 1
"""Specified: what tensors and C libraries take."""
_given_files: list[str] = []
"""What the command was given to read, for an error that names no file itself."""


def _problem_of(value: Any) -> str:
    """Return what is wrong with a value whatever its option means; empty where nothing is."""
    if isinstance(value, str) and not value.strip():
        return "the text is empty."
    if isinstance(value, float) and math.isnan(value):
        return "nan is no number."
    if isinstance(value, int) and abs(value) > _LARGEST_INT:
        return f"{value} is more than {_LARGEST_INT}."
    if isinstance(value, (str, os.PathLike)):
        try:
            str(value).encode()
        except UnicodeEncodeError:
            return f"{printable(str(value))} is not UTF-8 text."
    return ""


class WinMLCommand(click.Command):
    """A verb: the errors we name end it with their sentence and exit code."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """Take what any command of click takes."""
        super().__init__(*arguments, **settings)
        complete_paths(self.params)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line.

        An empty text, as an unset variable of a shell leaves it, is no value of any option: who wrote it meant one.
        """
        remaining = super().parse_args(ctx, args)
        self._take_from_group(ctx)
        for param in self.params:
            value = ctx.params.get(param.name or "")
            texts = value if isinstance(value, tuple) else (value,)
            for one in texts:
                if problem := _problem_of(one):
                    raise click.BadParameter(problem, ctx, param)
        _given_files[:] = self._files_given(ctx)
        return remaining

    def _files_given(self, ctx: click.Context) -> list[str]:
        """Return what the command line names and is there; outputs are left out."""
        values = [ctx.params.get(param.name or "") for param in self.params if param.name != "output"]
        return [str(value) for value in values if isinstance(value, (str, os.PathLike)) and os.path.lexists(value)]

    @staticmethod
    def _take_from_group(ctx: click.Context) -> None:
        """Take the options that stood before all verbs as if they stood behind it."""
        given = ctx.find_root().params
        for name in ("quiet", "verbose"):
            if given.get(name) and name not in ctx.params:
                raise click.UsageError(
                    f"-{name[0]} (--{name}) stands before the verb, and {ctx.command_path!r} does not take it. "
                    "Leave it out.",
                    ctx,
                )
            if given.get(name):
                ctx.params[name] = True

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except WinMLError as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            ctx.exit(report_error(error))


def report_error(error: WinMLError) -> int:
    """Tell an error that we name: its sentence, and what to do next; returns the exit status."""
    where = f" ({error.step})" if error.step else ""
    tell(f"error{where}: {error.message}")
    # Whatever could not be read or run for lack of memory, no advice about files helps.
    hint = _MEMORY_HINT if is_out_of_memory(error.__cause__) else error.hint
    if hint:
        tell(hint)
    return error.exit_code


def report_click_error(error: click.ClickException) -> int:
    """Tell a wrong use of the command line, with the verb whose help shows the right one."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        # Nothing was asked for: the help is the whole answer.
        for line in error.format_message().splitlines():
            tell(line)
        return error.exit_code
    context = getattr(error, "ctx", None)
    tell(f"error: {error.format_message()}")
    if context is not None:
        tell(f"'{context.command_path} --help' shows what it takes.")
    return error.exit_code


def is_out_of_memory(error: BaseException | None) -> bool:
    """Say whether an error, or one that it came of, is that of a process which gets no more memory."""
    while error is not None:
        words = str(error)
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(error, (ImportError, OSError, RuntimeError)) and any(word in words for word in _MEMORY_WORDS):
            return True
        if isinstance(error, SystemError) and _LOST_ERROR in words:
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def report_out_of_memory(error: BaseException) -> int:
    """Tell that there is no more memory, with what the failing step says of it."""
    reason = first_line(error)
    files = f" for {', '.join(_given_files)}" if _given_files else ""
    tell(f"error: not enough memory{files}{'' if reason == type(error).__name__ else f': {reason}'}")
    tell(_MEMORY_HINT)
    return WinMLError.exit_code


def report_unexpected(error: Exception, *, debug: bool) -> int:
    """Tell an error nobody foresaw; it is ours to mend, so ask for a report."""
    if debug:
        traceback.print_exception(error)
    tell(f"internal error: {type(error).__name__}: {first_line(error)}")
    hint = "" if debug else " Run it again with --debug for the traceback."
    tell(f"This is a mistake in winml, not in your command: please report it.{hint}")
    return WinMLError.exit_code
