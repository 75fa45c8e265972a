"""``winml retag``: a file that another tool made gets its tags back."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._options import NonEmptyPath, debug_option, format_option
from winml.modelkit.cli._streams import print_json

if TYPE_CHECKING:
    from winml.modelkit.results.written_file import RetaggedModel

__all__ = ["command"]

EPILOG = """\b
Examples:
  winml retag model.onnx optimized.onnx -o optimized_tagged.onnx
  winml retag model.onnx optimized.onnx --overwrite
"""


@click.command(name="retag", cls=WinMLCommand, epilog=EPILOG)
@click.argument("before")
@click.argument("after")
@click.option("-o", "--output", type=NonEmptyPath(), help="ONNX file to write; else AFTER itself, with --overwrite.")
@click.option("--overwrite", is_flag=True, help="Replace files that are there already.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@format_option
@debug_option
def command(**options: Any) -> None:
    """Carry the tags of BEFORE to AFTER, which another tool made from it.

    Everything but the metadata of AFTER is copied as it is; no weight is read. Exit codes: 0 done, 1 the files are
    wrong, 2 wrong usage.
    """
    from winml.modelkit.flows.retag import retag_model

    result = retag_model(options["before"], options["after"], options["output"], overwrite=options["overwrite"])
    if options["format_"] == "json":
        print_json(result.as_record())
    elif not options["quiet"]:
        _show_result(result)


def _show_result(result: RetaggedModel) -> None:
    from winml.modelkit.report.files import retagged_lines
    from winml.modelkit.report.terminal import console_for, print_rows

    print_rows(retagged_lines(result), console_for(sys.stdout), width=9)
