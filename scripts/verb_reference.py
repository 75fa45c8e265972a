"""Writes docs/reference/verbs.md from the options of the command itself, so that the two cannot disagree.

python scripts/verb_reference.py [--check]
"""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from winml.modelkit.cli.main import COMMANDS
from winml.modelkit.fields import GENERAL, in_groups
from written_document import write_or_check

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "verbs.md"

HEAD = """# Options of the verbs

Written by `scripts/verb_reference.py` from the code; change it there. An option of the command line wins over the key
of a build config (`-c`), which wins over the default. Python functions take the last part of a key as a keyword:
`optim.level` is `level`. `--dry-run` prints what a verb would read, write and do, and writes nothing; it refuses what
the run would refuse, with the same exit code.
"""


def reference() -> str:
    """Return the document: a table for each heading of each verb whose options have headings."""
    commands = {verb: importlib.import_module(f"winml.modelkit.cli.verbs.{verb}").command for verb in COMMANDS}
    described = {verb: command for verb, command in commands.items() if _is_declared(command)}
    return "\n".join([HEAD, *(_section(verb, command) for verb, command in described.items())])


def _is_declared(command: click.Command) -> bool:
    return any(param.name == "dry_run" for param in command.params)


def _section(verb: str, command: click.Command) -> str:
    context = click.Context(command, info_name=f"winml {verb}")
    options = [param for param in command.params if hasattr(param, "group") and not getattr(param, "hidden", False)]
    groups = {id(option): str(getattr(option, "group", GENERAL)) for option in options}
    summary = (command.help or "").partition("\n\n")[0].replace("\n", " ")
    parts = [f"## winml {verb}\n\n{summary}\n"]
    for heading in in_groups(groups.values()):
        rows = [_row(option, context) for option in options if groups[id(option)] == heading]
        parts.append("\n".join([f"### {heading}\n", "| option | config | meaning |", "| --- | --- | --- |", *rows, ""]))
    return "\n".join(parts)


def _row(option: click.Parameter, context: click.Context) -> str:
    record = option.get_help_record(context)
    assert record is not None
    spelling, words = (" ".join(text.replace("|", "\\|").replace("<", "&lt;").split()) for text in record)
    key = str(getattr(option, "config_key", ""))
    return f"| `{spelling}` | {f'`{key}`' if key else ''} | {words} |"


if __name__ == "__main__":
    write_or_check(TARGET, reference())
