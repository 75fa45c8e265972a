"""How does an error become words on stderr, once, with the next thing to do?"""

from __future__ import annotations

import errno
import functools
import math
import os
import traceback
import warnings
from typing import Any

import click

from winml.modelkit.cli._completion import complete_arguments, complete_values
from winml.modelkit.cli._help import DocumentedCommand, GroupedOption
from winml.modelkit.cli._streams import print_json, tell
from winml.modelkit.errors import WinMLError, error_chain, first_line, spell_options
from winml.modelkit.fields import DEVICE, Field
from winml.modelkit.words import printable

_MEMORY_HINT = (
    "Use smaller inputs (--shape-config, --input-specs), raise the limit of the process (ulimit -v), or use a "
    "machine with more memory."
)
_MEMORY_WORDS = ("bad_alloc", "bad allocation", "failed to map segment", "allocate memory", "out of memory")
"""How loaders of libraries, C++ and torch say it, none of them as a MemoryError."""
_LOST_ERROR = "error return without exception set"
"""What is left of an error in a C extension for which there was no memory either."""
_LARGEST_INT = 2**63 - 1
"""Specified: what tensors and C libraries take."""
NEGATIVE_RESULT = 3
"""Specified: exit code of a valid negative answer: a limit is not met, or two files are not the same."""
_named_paths: list[str] = []
"""What the command was given to read, for an error that names no file itself."""


def named_options(context: click.Context) -> dict[str, str]:
    """Return how texts of the running command spell some options: option → key of the config that states it."""
    names: dict[str, str] = context.meta.setdefault(f"{__name__}.named_options", {})
    return names


def _problem_of(value: object) -> str:
    """Return what is wrong with a value whatever its option means; empty where nothing is."""
    if isinstance(value, str) and not value.strip():
        return "the text is empty."
    if isinstance(value, float) and math.isnan(value):
        return "nan is not a number."
    if isinstance(value, int) and abs(value) > _LARGEST_INT:
        return f"{value} exceeds the maximum of {_LARGEST_INT}."
    if isinstance(value, (str, os.PathLike)):
        try:
            str(value).encode()
        except UnicodeEncodeError:
            return f"{printable(str(value))} is not UTF-8 text."
    return ""


class WinMLCommand(DocumentedCommand):
    """A verb: the errors we name end it with their sentence and exit code."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """Take what any command of click takes."""
        super().__init__(*arguments, **settings)
        self._add_libraries()
        complete_values(self.params)

    def _add_libraries(self) -> None:
        """Let a verb that names an execution provider take the library of its plug-in, too."""
        place = next((number for number, param in enumerate(self.params) if param.name == "ep"), None)
        if place is None:
            return
        words = "Library of a plug-in execution provider. The variable WINML_EP_LIBRARY also takes it."
        field = Field("ep_library", str, (), DEVICE, text=words)
        option = GroupedOption(["--ep-library"], field, multiple=True, metavar="NAME=PATH")
        self.params.insert(place + 1, option)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line.

        An empty text, as an unset variable of a shell leaves it, is no value of any option: who wrote it meant one.
        """
        if ctx.resilient_parsing:
            return super().parse_args(ctx, complete_arguments(self.params, args))
        remaining = super().parse_args(ctx, args)
        self._take_from_group(ctx)
        for param in self.params:
            value = ctx.params.get(param.name or "")
            texts = value if isinstance(value, tuple) else (value,)
            for number, one in enumerate(texts, 1):
                if problem := _problem_of(one):
                    where = f"value {number} of {len(texts)}: " if len(texts) > 1 else ""
                    raise click.BadParameter(f"{where}{problem}", ctx, param)
        _named_paths[:] = self._named_files(ctx)
        return remaining

    def _named_files(self, ctx: click.Context) -> list[str]:
        """Return what the command line names and is there; outputs are left out."""
        values = [ctx.params.get(param.name or "") for param in self.params if param.name != "output"]
        return [str(value) for value in values if isinstance(value, (str, os.PathLike)) and os.path.lexists(value)]

    @staticmethod
    def _take_from_group(ctx: click.Context) -> None:
        """Take the options that stood before all verbs as if they stood behind it."""
        passed = ctx.find_root().params
        for name in ("quiet", "verbose"):
            if passed.get(name) and name not in ctx.params:
                raise click.UsageError(
                    f"-{name[0]} (--{name}) stands before the verb, and {ctx.command_path!r} does not take it. "
                    "Omit it.",
                    ctx,
                )
            if passed.get(name):
                ctx.params[name] = True

    @staticmethod
    def _name_libraries(ctx: click.Context) -> None:
        """Name the libraries of plug-ins in the environment until the verb ends, for the processes it starts as well.

        Raises:
            UsageError: one is not ``NAME=PATH``, or is no file.
        """
        if not (libraries := ctx.params.pop("ep_library", ())):
            return
        from winml.modelkit.ort.execution_providers import LIBRARY_VARIABLE, with_library

        before = os.environ.get(LIBRARY_VARIABLE, "")
        named = functools.reduce(lambda value, text: with_library(text, value), libraries, before)
        os.environ[LIBRARY_VARIABLE] = named
        ctx.call_on_close(lambda: os.environ.update({LIBRARY_VARIABLE: before}))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb. Without its option ``--debug``, no warning of Python is printed."""
        if ctx.params.get("debug") is False:
            # Libraries warn about their own future; what a user can act on comes as a note or an error of ours.
            warnings.simplefilter("ignore")
        try:
            with spell_options(named_options(ctx)):
                self._name_libraries(ctx)
                return super().invoke(ctx)
        except WinMLError as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            if error.exit_code == NEGATIVE_RESULT and ctx.params.get("format_") == "json":
                print_json({"exit_code": error.exit_code, **error.as_record()})
            ctx.exit(report_error(error))


class WinMLGroup(DocumentedCommand, click.Group):
    """A verb of several commands, with the same help."""


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
        # Nothing is requested: the help is the whole output.
        for line in click.unstyle(error.format_message()).splitlines():
            tell(line)
        return error.exit_code
    context = getattr(error, "ctx", None)
    tell(f"error: {error.format_message()}")
    if context is not None:
        tell(f"'{context.command_path} --help' shows its options.")
    return error.exit_code


def is_out_of_memory(error: BaseException | None) -> bool:
    """Say whether an error, or one that it came of, is that of a process which gets no more memory."""
    for link in error_chain(error):
        words = str(link)
        if isinstance(link, MemoryError) or getattr(link, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(link, (ImportError, OSError, RuntimeError)) and any(word in words for word in _MEMORY_WORDS):
            return True
        if isinstance(link, SystemError) and _LOST_ERROR in words:
            return True
    return False


def out_of_memory_error(error: BaseException) -> WinMLError:
    """Return the error for a lack of memory, with the files of the command and the reason of the failing step."""
    reason = first_line(error)
    files = f" for {', '.join(_named_paths)}" if _named_paths else ""
    words = "" if reason == type(error).__name__ else f": {reason}"
    return WinMLError(f"not enough memory{files}{words}", hint=_MEMORY_HINT)
