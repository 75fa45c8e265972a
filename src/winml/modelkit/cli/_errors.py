"""Conversion of errors into messages on stderr with a hint, printed once."""

from __future__ import annotations

import errno
import functools
import math
import os
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import click

from winml.modelkit.cli._completion import complete_arguments, complete_values
from winml.modelkit.cli._help import (
    IS_SUGGESTION,
    POSITIONAL,
    DocumentedCommand,
    GroupedArgument,
    GroupedOption,
    SuggestionError,
)
from winml.modelkit.cli._streams import print_json, tell
from winml.modelkit.errors import MissingOutputError, UsageError, WinMLError, error_chain, first_line, spell_options
from winml.modelkit.fields import DEVICE, INPUTS, Field
from winml.modelkit.words import printable

_MEMORY_HINT = (
    "Use smaller inputs (--shape-config, --input-specs), raise the limit of the process (ulimit -v), or use a "
    "machine with more memory."
)
_MEMORY_WORDS = ("bad_alloc", "bad allocation", "failed to map segment", "allocate memory", "out of memory")
"""Messages of loaders, C++ and torch about a lack of memory; none is raised as a MemoryError."""
_LOST_ERROR = "error return without exception set"
"""Message of a C extension that had no memory to create its error."""
_LARGEST_INT = 2**63 - 1
"""Specified: maximum of integers in tensors and C libraries."""
NEGATIVE_RESULT = 3
"""Specified: exit code of a valid negative result: a limit is not met, or two files differ."""
_ARGUMENTS = f"{__name__}.arguments"
"""Key of a context with the arguments of the command."""
_LONG_AFTER_ONE_DASH = re.compile(r"-[A-Za-z][A-Za-z_-]{2}")
_named_paths: list[str] = []
"""Input paths of the command, for errors that name no file."""


def _typed_option(name: str, args: Sequence[str]) -> str:
    """Return the word of the command line with an unknown option: ``-hint`` for the ``-i`` that click reports."""
    is_letter = len(name) == len("-i")
    within = (arg for arg in args if is_letter and re.match(r"-[^-]", arg) and name[1] in arg)
    return next((arg for arg in args if arg.startswith(name)), next(within, name)).partition("=")[0]


def named_options(context: click.Context) -> dict[str, str]:
    """Return the mutable spellings of options in texts of the running command: option → key of the config."""
    names: dict[str, str] = context.meta.setdefault(f"{__name__}.named_options", {})
    return names


def _value_problem(value: object) -> str:
    """Describe a value that is invalid for every option; empty if the value is valid."""
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


_WITHOUT_PROVIDERS = ("extract",)
"""Verbs without an execution provider option that run models on the CPU."""


def _custom_ops_option() -> GroupedOption:
    """Return the option of libraries with custom operators."""
    text = (
        "Library of custom operators of the model, or onnxruntime-extensions. The variable WINML_CUSTOM_OPS also "
        "takes it."
    )
    field = Field("custom_ops", str, (), DEVICE, text=text)
    return GroupedOption(["--custom-ops"], field, multiple=True, metavar="LIB")


class WinMLCommand(DocumentedCommand):
    """A verb: a WinMLError ends the command with a message and its exit code."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """See :class:`click.Command`."""
        super().__init__(*arguments, **settings)
        self._refuses_extra = not self.context_settings.get("allow_extra_args")
        self.context_settings["allow_extra_args"] = True  # refused in _parse
        self._add_libraries()
        complete_values(self.params)

    def _add_libraries(self) -> None:
        """Add the options of libraries to a verb with an execution provider option, to sweeps, and to the providers.

        The providers of a sweep are named in its configurations.
        """
        position = next((number for number, param in enumerate(self.params) if param.name == "ep"), None)
        if position is None and self.name in ("sweep", "sys", *_WITHOUT_PROVIDERS):
            position = -1
        if position is None:
            return
        self.params.insert(position + 1, _custom_ops_option())
        if self.name in _WITHOUT_PROVIDERS:
            return
        text = "Library of a plug-in execution provider. The variable WINML_EP_LIBRARY also takes it."
        field = Field("ep_library", str, (), DEVICE, text=text)
        option = GroupedOption(["--ep-library"], field, multiple=True, metavar="NAME=PATH")
        self.params.insert(position + 1, option)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; an error about arguments of other tools states the command line to type instead."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, complete_arguments(self.params, args))
        args = self._without_model_flags(args)
        try:
            self._refuse_single_dash(ctx, args)
            remaining = self._parse(ctx, args)
        except (click.UsageError, UsageError) as error:
            if ctx.obj is IS_SUGGESTION:
                raise
            from winml.modelkit.cli._suggestions import misunderstood_arguments

            problem = error.format_message().rstrip(".") if isinstance(error, click.UsageError) else error.message
            if isinstance(error, click.NoSuchOption):
                problem = f"no such option {_typed_option(error.option_name, args)}"
            raise misunderstood_arguments(ctx, args, problem) or error from None
        ctx.meta[_ARGUMENTS] = args
        _named_paths[:] = self._existing_paths(ctx)
        return remaining

    def _refuse_single_dash(self, ctx: click.Context, args: Sequence[str]) -> None:
        """Refuse ``-output FILE``, which click reads as ``-o utput``.

        Raises:
            click.NoSuchOption: names the option as it was typed.
        """
        if not any(_LONG_AFTER_ONE_DASH.match(arg) for arg in args):
            return
        from winml.modelkit.cli._suggestions import misspelled_option

        if (name := misspelled_option(self, args)) is not None:
            raise click.NoSuchOption(name, ctx=ctx)

    def _parse(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments.

        An empty text, such as the value of an unset shell variable, is refused for every option: a value was intended.
        """
        remaining = super().parse_args(ctx, [*args])
        if remaining and self._refuses_extra:
            words = f"argument{'s' if len(remaining) > 1 else ''} ({' '.join(remaining)})"
            raise click.UsageError(f"Got unexpected extra {words}.", ctx)
        self._move_positional_model(ctx)
        self._apply_group_options(ctx)
        for param in self.params:
            value = ctx.params.get(param.name or "")
            texts = value if isinstance(value, tuple) else (value,)
            for number, text in enumerate(texts, 1):
                if problem := _value_problem(text):
                    where = f"value {number} of {len(texts)}: " if len(texts) > 1 else ""
                    raise click.BadParameter(f"{where}{problem}", ctx, param)
        return remaining

    def _without_model_flags(self, args: list[str]) -> list[str]:
        """Remove ``-m`` and ``--model`` before the models of a command with several positional models."""
        options = {name for param in self.params for name in param.opts}
        if "-m" in options or not any(isinstance(param, GroupedArgument) for param in self.params):
            return args
        words = (arg.removeprefix("--model=") for arg in args)
        return [word for word in words if word not in ("-m", "--model")]

    def _move_positional_model(self, ctx: click.Context) -> None:
        """Move a positional model to the option; after ``-m``, positional values are inputs.

        Raises:
            UsageError: two models are specified.
        """
        model, option = ctx.params.pop(POSITIONAL, None), ctx.params.get("model")
        if model is None or model == option:
            return
        if option is None:
            ctx.params["model"] = model
            ctx.set_parameter_source("model", click.core.ParameterSource.COMMANDLINE)
            return
        arguments = (param for param in self.params if isinstance(param, GroupedArgument) and param.nargs == -1)
        inputs = next((str(param.name) for param in arguments if param.group == INPUTS), None)
        if inputs is None:
            raise UsageError(
                f"two models are specified: {str(model)!r} and, with -m, {str(option)!r}", hint="Specify one of them."
            )
        ctx.params[inputs] = (model, *ctx.params[inputs])
        ctx.set_parameter_source(inputs, click.core.ParameterSource.COMMANDLINE)

    def _existing_paths(self, ctx: click.Context) -> list[str]:
        """Return the existing files and folders on the command line, without outputs."""
        values = [ctx.params.get(param.name or "") for param in self.params if param.name != "output"]
        return [str(value) for value in values if isinstance(value, (str, os.PathLike)) and os.path.lexists(value)]

    @staticmethod
    def _apply_group_options(ctx: click.Context) -> None:
        """Apply options before the verb like options after the verb, in ``ctx.params``.

        Raises:
            click.UsageError: the verb does not have the option.
        """
        group_options = ctx.find_root().params
        for name in ("quiet", "verbose"):
            if group_options.get(name) and name not in ctx.params:
                raise click.UsageError(
                    f"-{name[0]} (--{name}) stands before the verb, and {ctx.command_path!r} does not take it. "
                    "Omit it.",
                    ctx,
                )
            if group_options.get(name):
                ctx.params[name] = True

    @staticmethod
    def _set_libraries(ctx: click.Context) -> None:
        """Set the libraries of the user in the environment until the verb ends; child processes inherit them.

        Raises:
            UsageError: a plug-in is not ``NAME=PATH``, or a file does not exist.
        """
        plug_ins, operators = ctx.params.pop("ep_library", ()), ctx.params.pop("custom_ops", ())
        if plug_ins:
            from winml.modelkit.ort.execution_providers import LIBRARY_VARIABLE, add_library

            _add_to_variable(ctx, LIBRARY_VARIABLE, plug_ins, add_library)
        if operators:
            from winml.modelkit.ort.custom_operators import LIBRARIES_VARIABLE, add_custom_library

            _add_to_variable(ctx, LIBRARIES_VARIABLE, operators, add_custom_library)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb. Without ``--debug``, Python warnings are suppressed."""
        if ctx.params.get("debug") is False:
            # Libraries warn about future changes; notes and errors of winml cover everything a user can act on.
            warnings.simplefilter("ignore")
        try:
            with spell_options(named_options(ctx)):
                self._set_libraries(ctx)
                return super().invoke(ctx)
        except WinMLError as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            if isinstance(error, MissingOutputError):
                from winml.modelkit.cli._suggestions import missing_output

                error = missing_output(ctx, ctx.meta[_ARGUMENTS], error)
            if error.exit_code == NEGATIVE_RESULT and ctx.params.get("format_") == "json":
                print_json({"exit_code": error.exit_code, **error.as_record()})
            ctx.exit(report_error(error))


def _add_to_variable(ctx: click.Context, variable: str, texts: Sequence[str], add: Callable[[str, str], str]) -> None:
    """Add texts to an environment variable until the command ends."""
    old_value = os.environ.get(variable, "")
    os.environ[variable] = functools.reduce(lambda value, text: add(text, value), texts, old_value)
    ctx.call_on_close(lambda: os.environ.update({variable: old_value}))


class WinMLGroup(DocumentedCommand, click.Group):
    """A verb with subcommands, with the same help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options of the group; the error for a subcommand with dashes states the command line to type."""
        try:
            return super().parse_args(ctx, [*args])
        except click.NoSuchOption:
            self._refuse_other_words(args)
            raise

    def _refuse_other_words(self, args: Sequence[str]) -> None:
        """Refuse a subcommand of another tool; returns if it is not known.

        Raises:
            UsageError: states the command line to type.
        """
        from winml.modelkit.cli._suggestions import unknown_command

        if (error := unknown_command(args[0], args[1:], {}, {}, group=str(self.name))) is not None:
            raise error from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand; the error for the subcommand of another tool states the command line to type."""
        if args[0] not in self.commands and not ctx.resilient_parsing:
            self._refuse_other_words(args)
        return super().resolve_command(ctx, args)


def report_error(error: WinMLError) -> int:
    """Print the message and hint of a WinMLError; return the exit status."""
    where = f" ({error.step})" if error.step else ""
    tell(f"error{where}: {error.message}")
    # If memory is lacking, advice about files does not help, whatever failed.
    hint = _MEMORY_HINT if is_out_of_memory(error.__cause__) else error.hint
    for line in hint.split("\n") if isinstance(error, SuggestionError) else filter(None, [hint]):
        tell(line)
    return error.exit_code


def report_click_error(error: click.ClickException) -> int:
    """Print a usage error of click and a reference to the help of the verb; return the exit status."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        # Nothing was requested: the output is the help alone.
        for line in click.unstyle(error.format_message()).splitlines():
            tell(line)
        return error.exit_code
    context = getattr(error, "ctx", None)
    tell(f"error: {_plain_range(error.format_message())}")
    if context is not None:
        tell(f"'{context.command_path} --help' shows its options.")
    return error.exit_code


def _plain_range(message: str) -> str:
    """Return a message of click with ranges and numbers in words.

    >>> _plain_range("99 is not in the range 11<=x<=24.")
    '99 is not in the range 11 to 24.'
    >>> _plain_range("'x' is not a valid float range.")
    "'x' is not a number."
    """
    message = re.sub(r"range (\S+)<=x<=(\S+)", r"range \1 to \2", message)
    message = re.sub(r"range (\S+)<x<=(\S+)", r"range above \1 to \2", message)
    message = re.sub(r"range x>=(\S+?)(\.?)$", r"range \1 or more\2", message).replace("range x>", "range above ")
    message = re.sub(r"is not a valid integer(?: range)?", "is not a whole number", message)
    return re.sub(r"is not a valid float(?: range)?", "is not a number", message)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, or an error in its chain of causes, is due to a lack of memory."""
    for link in error_chain(error):
        text = str(link)
        if isinstance(link, MemoryError) or getattr(link, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(link, (ImportError, OSError, RuntimeError)) and any(phrase in text for phrase in _MEMORY_WORDS):
            return True
        if isinstance(link, SystemError) and _LOST_ERROR in text:
            return True
    return False


def out_of_memory_error(error: BaseException) -> WinMLError:
    """Return the error for a lack of memory, with the files of the command and the reason of the failing step."""
    reason = first_line(error)
    files = f" for {', '.join(_named_paths)}" if _named_paths else ""
    reason_text = "" if reason == type(error).__name__ else f": {reason}"
    return WinMLError(f"not enough memory{files}{reason_text}", hint=_MEMORY_HINT)
