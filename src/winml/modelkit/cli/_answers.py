"""How does a record become the answer for a program? One JSON object on stdout, in one form for all verbs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.words import json_printable

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["json_text", "print_json", "refuse_outputs", "show_answer", "show_result", "write_answer", "write_files"]


def print_json(record: Mapping[str, Any]) -> None:
    """Write a record on stdout."""
    click.echo(json_text(record))


def json_text(record: Mapping[str, Any]) -> str:
    """Return a record as indented JSON; letters of all languages stay readable, and no character moves a terminal."""
    import json

    return json_printable(json.dumps(record, indent=2, ensure_ascii=False))


def refuse_outputs(paths: Iterable[Path], inputs: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse files that may not be written, before anything is done.

    Raises:
        UsageError: one is among what is read.
        OutputExistsError: one is there already.
    """
    from winml.modelkit.graph.files.output_files import refuse_existing, refuse_inputs

    if paths := list(paths):
        refuse_inputs(paths, inputs)
        refuse_existing(paths, overwrite=overwrite)


def show_answer(record: Mapping[str, Any], options: Mapping[str, Any], render: Callable[[Console], None]) -> None:
    """Write a record to the file of ``--output``, if one is named, and to stdout in the form that is asked for.

    Args:
        record: The answer.
        options: Those of the verb: ``output``, ``overwrite`` and ``format_``.
        render: Prints the answer for people.
    """
    output: Path | None = options["output"]
    if output is not None:
        write_answer(output, record, overwrite=options["overwrite"])
    if options["format_"] == "json":
        print_json(record)
        return
    from winml.modelkit.report.terminal import console_for, print_rows

    console = console_for(sys.stdout)
    render(console)
    if output is not None:
        print_rows([("wrote", str(output))], console)


def show_result(record: Mapping[str, Any], options: Mapping[str, Any], render: Callable[[Console], None]) -> None:
    """Tell what was made: as JSON where that is asked for, else for people, unless they want to hear nothing.

    Args:
        record: The answer for a program.
        options: Those of the verb: ``format_`` and, where it has one, ``quiet``.
        render: Prints the answer for people.
    """
    if options["format_"] == "json":
        print_json(record)
        return
    if options.get("quiet"):
        return
    from winml.modelkit.report.terminal import console_for

    render(console_for(sys.stdout))


def write_answer(path: Path, record: Mapping[str, Any], *, overwrite: bool) -> None:
    """Write a record to a file.

    Raises:
        WriteError: it cannot be written.
    """
    from winml.modelkit.graph.files.output_files import OutputFiles

    with OutputFiles() as files:
        files.reserve(path).write_text(f"{json_text(record)}\n", encoding="utf-8")
        files.commit(overwrite=overwrite)


def write_files(renderers: Mapping[str, Callable[[], str]], options: Mapping[str, Any]) -> list[Path]:
    """Write the files that options name, all or none of them; return those that were written.

    Args:
        renderers: Name of an option → what returns the text of its file.
        options: Those of the verb, ``overwrite`` among them.

    Raises:
        WriteError: one cannot be written.
    """
    from winml.modelkit.graph.files.output_files import OutputFiles

    names = [name for name in renderers if options[name]]
    with OutputFiles() as files:
        for name in names:
            files.reserve(options[name]).write_text(renderers[name](), encoding="utf-8")
        files.commit(overwrite=options["overwrite"])
    return [options[name] for name in names]
