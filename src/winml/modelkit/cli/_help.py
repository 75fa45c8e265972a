"""Layout of the help of a verb: options in groups, the common options for ``--help``, all options for ``--help-all``.

An option declares its group and whether it is common; no option is named here. ``--help`` also shortens: it prints the
first paragraph of the description, the first sentence of each option, and the first examples.
"""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import click

from winml.modelkit.errors import UsageError
from winml.modelkit.fields import GENERAL, Field, in_groups

_HELP_ALL = "--help-all"
WIDTH = 100
"""Maximum width of the help in columns. Chosen: fits beside an editor; a narrower terminal reduces it."""
HELP_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": WIDTH}
"""Settings of the context of a verb."""
_EXAMPLES = 2
"""Number of examples in ``--help``. Chosen: the help of the largest verb then fits a screen of 45 lines."""
_NAMES = 28
"""Maximum width of option names in columns; longer names get a separate line."""
_WITHOUT_GROUP = "Options"
_LIMITLESS = 1_000_000
"""Chosen: upper limits from this value on are omitted from the help, since no user reaches them."""
_IS_WHOLE = f"{__name__}.is_whole"
IS_SUGGESTION = object()
"""Object of a context that parses a suggested command line: its errors lead to no other suggestion."""
POSITIONAL = "positional_model"
"""Parameter with the first positional argument of a command, if an option may state its value instead."""


class SuggestionError(UsageError):
    """A usage error whose hint has several lines: command lines to copy, and remarks."""


class GroupedOption(click.Option):
    """An option with a group in the help.

    Attributes:
        field: Declaration of the option.
        config_key: Equivalent key of a build config; empty: no such key.
    """

    def __init__(self, names: Sequence[str], field: Field, *, config_key: str = "", **settings: Any) -> None:
        """See :class:`click.Option`; the help is taken from the declaration."""
        self.field = field
        super().__init__(names, **settings)
        self.group, self.is_common, self.config_key = field.group, field.is_common, config_key

    @property
    def help(self) -> str:
        """Help text, read from the source of the declaration when displayed."""
        return self.field.help

    @help.setter
    def help(self, _text: str | None) -> None:
        """Ignore the help set by click."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the row of the option in the help; None if the option is hidden."""
        return None if self.hidden else self.row(ctx, is_brief=False)

    def row(self, ctx: click.Context, *, is_brief: bool) -> tuple[str, str]:
        """Return the names of the option, and its description with default, limits and repeatability.

        Args:
            ctx: The context of the command.
            is_brief: One spelling, the first sentence, and of the remarks only a default of one word.
        """
        description = _help_words(self.help, ctx, is_brief=is_brief)
        remarks = self.remarks(ctx, is_brief=is_brief)
        return self._spelling_words(ctx, is_brief=is_brief), f"{description}  [{remarks}]" if remarks else description

    def remarks(self, ctx: click.Context, *, is_brief: bool = False) -> str:
        """Return the default, the limits of numbers, and whether the option is repeatable or required."""
        default = _help_words(self.field.default_words, ctx) or self.get_help_extra(ctx).get("default", "")
        shows_default = default and not (is_brief and " " in default)
        remarks = (
            f"default: {default}" if shows_default else "",
            "" if is_brief else self._range_words(),
            "repeatable" if self.multiple and not is_brief else "",
            "required" if self.required else "",
        )
        return "; ".join(filter(None, remarks))

    def _spelling_words(self, ctx: click.Context, *, is_brief: bool) -> str:
        """Return the spellings with the metavar; brief: of the long spellings, only the first."""
        spellings = [self.opts, self.secondary_opts]
        if is_brief:
            spellings = [[name for name in names if name in _brief_spellings(names)] for names in spellings]
        text = " / ".join(", ".join(sorted(names, key=len)) for names in spellings if names)
        return text if self.is_flag or self.count else f"{text} {self.make_metavar(ctx)}"

    def _range_words(self) -> str:
        """Format the range of a numeric option; ``""`` without bounds."""
        if not isinstance(self.type, (click.IntRange, click.FloatRange)) or self.count:
            return ""
        low, high = self.type.min, self.type.max
        if low is not None and high is not None and high < _LIMITLESS:
            return f"{low:g} to {high:g}"
        return "" if low is None or low <= 1 else f"at least {low:g}"


def _help_words(text: str, ctx: click.Context, *, is_brief: bool = False) -> str:
    """Format a help text: remove code marks, spell option names as flags; brief: the first sentence only."""
    options = (param for param in ctx.command.params if isinstance(param, click.Option))
    flags = {option.name: _brief_spellings(option.opts)[0] for option in options}
    help_text = re.sub(r"`([^`]*)`", lambda match: flags.get(match[1], match[1]), text)
    return f"{help_text.partition('. ')[0]}." if is_brief and ". " in help_text else help_text


def _brief_spellings(names: Sequence[str]) -> tuple[str, ...]:
    """Return the first long spelling, and the short spellings."""
    long = [name for name in names if name.startswith("--")]
    return (*long[:1], *(name for name in names if name not in long))


class GroupedArgument(click.Argument):
    """An argument with a description and a group in the help."""

    is_common = True

    def __init__(self, names: Sequence[str], field: Field, **settings: Any) -> None:
        """See :class:`click.Argument`; the description is taken from the declaration."""
        super().__init__(names, **settings)
        self.group, self._field = field.group, field

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the row of the argument in the help."""
        return self.row(ctx, is_brief=False)

    def row(self, ctx: click.Context, *, is_brief: bool) -> tuple[str, str]:
        """Return the name and the description; brief: the first sentence."""
        short = self._field.short
        name = f"[{short}] {self._field.name.upper()}" if self.name == POSITIONAL else self.make_metavar(ctx)
        return name, _help_words(self._field.help, ctx, is_brief=is_brief)


class DocumentedCommand(click.Command):
    """A command with its docstring and its grouped options as help; lines after ``Examples:`` are the epilog."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """See :class:`click.Command`."""
        super().__init__(*arguments, **settings)
        description, _, self.epilog = inspect.cleandoc(self.help or "").partition("\n\nExamples:\n")
        self.help = description
        field = Field("help_all", bool, False, GENERAL, text="Show every option and exit.")
        flag: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _show_all_options}
        self.params.append(GroupedOption([_HELP_ALL], field, **flag))
        self.context_settings = {**HELP_SETTINGS, **self.context_settings}

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help: the common options in groups, or all options for ``--help-all``."""
        _write_help(self, ctx, formatter)


def _show_all_options(ctx: click.Context, _param: click.Parameter, is_requested: bool) -> None:
    """Print all options and end the command; the callback of ``--help-all``."""
    if is_requested and not ctx.resilient_parsing:
        ctx.meta[_IS_WHOLE] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def grouped_options(command: click.Command, ctx: click.Context) -> dict[str, list[click.Parameter]]:
    """Return the described parameters of a command by group, in the order of the help."""
    groups: dict[str, list[click.Parameter]] = {}
    for param in command.get_params(ctx):
        is_described = isinstance(param, click.Option) or hasattr(param, "group")
        if is_described and param.get_help_record(ctx) is not None:
            # A plug-in may have plain click options, without a group.
            group = str(getattr(param, "group", GENERAL if "--help" in param.opts else _WITHOUT_GROUP))
            groups.setdefault(group, []).append(param)
    return {group: groups[group] for group in in_groups(groups)}


def option_row(param: click.Parameter, ctx: click.Context, *, is_brief: bool = False) -> tuple[str, str]:
    """Return the row of a parameter in the help; brief: as in ``--help``."""
    if isinstance(param, (GroupedOption, GroupedArgument)):
        return param.row(ctx, is_brief=is_brief)
    record = param.get_help_record(ctx)
    assert record is not None
    return record


def _write_help(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the help of a verb: the common options, or all options for ``--help-all``."""
    is_whole = bool(ctx.meta.get(_IS_WHOLE))
    command.format_usage(ctx, formatter)
    description = command.help or ""
    _write_text(formatter, description if is_whole else description.partition("\n\n")[0])
    hidden_groups: list[str] = []
    groups = grouped_options(command, ctx)
    for group, params in groups.items():
        selection = [param for param in params if is_whole or getattr(param, "is_common", group != GENERAL)]
        if not selection:
            hidden_groups += [group] if group != GENERAL else []
            continue
        with formatter.section(_format_heading(group)):
            _write_rows(formatter, [option_row(param, ctx, is_brief=not is_whole) for param in selection])
    if isinstance(command, click.Group):
        _write_verbs(command, ctx, formatter, is_whole=is_whole)
    examples = (command.epilog or "").splitlines()
    if examples:
        _write_text(formatter, "\n".join(["\b", "Examples:", *(examples if is_whole else examples[:_EXAMPLES])]))
    if not is_whole:
        count = sum(map(len, groups.values()))
        hidden_words = f"; also: {', '.join(hidden_groups)}" if hidden_groups else ""
        formatter.write_paragraph()
        formatter.write_text(f"All {count} options: {ctx.command_path} {_HELP_ALL}{hidden_words}.")


def _write_rows(formatter: click.HelpFormatter, rows: Sequence[tuple[str, str]]) -> None:
    """Write names and descriptions in two columns, as click does; option names are not broken at hyphens."""
    indent = " " * formatter.current_indent
    width = min(max(len(names) for names, _ in rows), _NAMES) + 2
    text_width = max(formatter.width - width - len(indent), _NAMES)
    for names, description in rows:
        lines = textwrap.wrap(description, text_width, break_on_hyphens=False, break_long_words=False)
        if len(names) > width - 2:
            formatter.write(f"{indent}{names}\n")
            names = ""
        for line in lines:
            formatter.write(f"{indent}{names:<{width}}{line}\n")
            names = ""


def _format_heading(group: str) -> str:
    """Format a heading, bold in a terminal; click removes the style elsewhere."""
    return group if os.environ.get("NO_COLOR") else click.style(group, bold=True)


def _write_text(formatter: click.HelpFormatter, text: str) -> None:
    """Write a paragraph, indented; nothing for an empty text."""
    if text:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text)


def _write_verbs(group: click.Group, ctx: click.Context, formatter: click.HelpFormatter, *, is_whole: bool) -> None:
    """Write the subcommands of a group; whole: with the options of each subcommand."""
    commands = {name: group.commands[name] for name in group.list_commands(ctx)}
    with formatter.section(_format_heading("Commands")):
        formatter.write_dl([(name, command.get_short_help_str(WIDTH)) for name, command in commands.items()])
    for name, command in commands.items() if is_whole else ():
        context = click.Context(command, info_name=name, parent=ctx)
        for heading, params in grouped_options(command, context).items():
            with formatter.section(_format_heading(f"{name}: {heading}")):
                _write_rows(formatter, [option_row(param, context) for param in params])
