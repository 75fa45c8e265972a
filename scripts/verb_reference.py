"""Writes docs/reference/verbs.md from the options of the command, so that both agree.

python scripts/verb_reference.py [--check]
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

import click

from winml.modelkit.cli._help import GroupedOption, grouped_options, option_row
from winml.modelkit.cli.main import COMMANDS, VERBS
from written_document import write_or_check

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "verbs.md"

HEAD = """# Commands

Every verb with its options, in the groups of `--help-all`. `--help` shows the common options, which are **bold** here.
Written by `scripts/verb_reference.py` from the code; change it there.

An option of the command line takes precedence over the key of a build config (`-c`), which takes precedence over the
default. Python functions take the last part of a key as a keyword: `optim.level` is `level`. `--dry-run` prints what a
verb would read, run and write, and writes nothing; it refuses what the run refuses before it loads weights, with the
same exit code. Of a Hub id that is not on this machine, it downloads the config files.
"""

_CODE = re.compile(r"""(`[^`]*`|(?<![\w-])--[a-z][\w-]*|\{"[^}]*\}|\b[A-Za-z]+_[\w:=,]*\w(?:\.[a-z]+\b)?)""")
"""Code in a text: in backticks, an option, JSON, or a name with an underscore."""
_LONGEST_LINE = 140


def reference() -> str:
    """Return the document: a section for each verb, with a table for each group of its options."""
    commands = {verb: VERBS[verb] for verb in sorted(COMMANDS)}
    return "\n".join(
        [HEAD, *(part for verb, command in commands.items() for part in _section(f"winml {verb}", command))]
    )


def _section(name: str, command: click.Command, level: int = 2) -> Iterator[str]:
    context = click.Context(command, info_name=name, **command.context_settings)
    yield f"{'#' * level} {name}\n"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        yield f"{textwrap.fill(_prose(paragraph), _LONGEST_LINE, break_on_hyphens=False)}\n"
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield f"```console\n{usage}\n```\n"
    for group, params in grouped_options(command, context).items():
        yield f"{'#' * (level + 1)} {group}\n"
        yield from _table(params, context)
        yield ""
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            yield from _section(f"{name} {inner}", command.commands[inner], level + 1)


def _table(params: Iterable[click.Parameter], context: click.Context) -> Iterator[str]:
    """Yield the rows; a column of keys only where an option has one."""
    keys = {id(param): str(getattr(param, "config_key", "")) for param in params}
    columns = ["option", *(["config"] if any(keys.values()) else []), "meaning"]
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for param in params:
        key = keys[id(param)]
        config = [f"`{key}`" if key else ""] if len(columns) > 2 else []
        yield f"| {' | '.join([_names(param, context), *config, _meaning(param, context)])} |"


def _names(param: click.Parameter, context: click.Context) -> str:
    """Return the spellings of an option, each on its line, and the metavar unless it lists the values."""
    if not isinstance(param, click.Option):
        return f"**`{param.make_metavar(context)}`**"
    names = [*sorted(param.opts, key=len), *param.secondary_opts]
    if not (param.is_flag or param.count or isinstance(param.type, click.Choice)):
        names[-1] += f" {param.make_metavar(context)}"
    mark = "**" if getattr(param, "is_common", False) else ""
    return "<br>".join(f"{mark}`{_cell(name)}`{mark}" for name in names)


def _meaning(param: click.Parameter, context: click.Context) -> str:
    words = _words(param, context)
    if isinstance(param.type, click.Choice):
        words = f"{words} Values: {', '.join(f'`{choice}`' for choice in param.type.choices)}."
    return words


def _words(param: click.Parameter, context: click.Context) -> str:
    if not isinstance(param, GroupedOption):
        return _prose(option_row(param, context)[1])
    remarks = param.remarks(context)
    return _prose(param.help or "") + (f" *{_prose(remarks[0].upper() + remarks[1:])}.*" if remarks else "")


def _prose(text: str) -> str:
    """Return a text as Markdown in one line: nothing outside of code is markup."""
    parts = _CODE.split(" ".join(text.split()))
    words = [re.sub(r"([*\[\]_])", r"\\\1", _cell(part).replace("<", "&lt;")) for part in parts[::2]]
    code = [f"`{_cell(part.strip('`'))}`" for part in parts[1::2]]
    return "".join(part for pair in zip_longest(words, code, fillvalue="") for part in pair)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    write_or_check(TARGET, reference())
