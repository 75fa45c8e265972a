"""``winml diff``: what changed between two ONNX files, module by module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import NEGATIVE_ANSWER, WinMLCommand
from winml.modelkit.cli._options import NonEmptyPath, debug_option, verbose_option
from winml.modelkit.cli._streams import json_text, refuse_outputs, show_result
from winml.modelkit.errors import ModelPathError

if TYPE_CHECKING:
    from winml.modelkit.results.comparison import StructureDiff

__all__ = ["command"]

EPILOG = """\b
Examples:
  winml diff export.onnx optimized.onnx
  winml diff old.onnx new.onnx --format markdown > comment.md
  winml diff old.onnx new.onnx --exit-zero -o changes.json
"""


@click.command(name="diff", cls=WinMLCommand, epilog=EPILOG)
@click.argument("before", type=NonEmptyPath())
@click.argument("after", type=NonEmptyPath())
@click.option("-o", "--output", type=NonEmptyPath(), help="File to write the answer to as JSON; .md writes Markdown.")
@click.option("--overwrite", is_flag=True, help="Replace the output if it is there already.")
@click.option("--exit-zero", is_flag=True, help="Exit with 0 although the files differ.")
@click.option(
    "-f",
    "--format",
    "format_",
    type=click.Choice(["table", "json", "markdown"]),
    default="table",
    show_default=True,
    help="Form of the answer on stdout.",
)
@verbose_option("Tell more: every module, and the names of weights.")
@debug_option
def command(**options: Any) -> None:
    """Compare BEFORE and AFTER by module: operators, weights, types, sizes. Neither is run.

    Each is an ONNX file or the folder of a build.

    Weights are compared by content, in the files; their values are not told. Exit codes: 0 the same, 3 different,
    1 the files are wrong, 2 wrong usage.
    """
    before, after = _refuse_early(options)
    from winml.modelkit.flows.diff import diff_models

    diff = diff_models(before, after)
    if options["output"] is not None:
        _write(diff, options["output"], overwrite=options["overwrite"])
    _show(diff, options)
    if not (diff.is_same or options["exit_zero"]):
        click.get_current_context().exit(NEGATIVE_ANSWER)


def _refuse_early(options: Mapping[str, Any]) -> tuple[Path, Path]:
    """Return the files to compare; refuse what paths show to be wrong, before anything is read."""
    from winml.modelkit.found_models import onnx_file

    for name in ("before", "after"):
        if options[name].is_dir() and not any(options[name].glob("**/*.onnx")):
            raise ModelPathError(
                f"{options[name]}: is a folder without an ONNX file",
                hint="Give an ONNX file or the folder of a build; a checkpoint is exported first.",
            )
    # The folder of a build means its model; what is no model at all is said by who reads it.
    before, after = (onnx_file(str(options[name])) or options[name] for name in ("before", "after"))
    output: Path | None = options["output"]
    refuse_outputs([output] if output is not None else [], [before, after], overwrite=options["overwrite"])
    return before, after


def _write(diff: StructureDiff, output: Path, *, overwrite: bool) -> None:
    from winml.modelkit.graph.files.output_files import OutputFiles

    text = _markdown(diff) if output.suffix == ".md" else f"{json_text(diff.as_record())}\n"
    with OutputFiles() as files:
        files.reserve(output).write_text(text, encoding="utf-8")
        files.commit(overwrite=overwrite)


def _show(diff: StructureDiff, options: dict[str, object]) -> None:
    from winml.modelkit.report.structure_diff import diff_document

    if options["format_"] == "markdown":
        click.echo(_markdown(diff), nl=False)
    else:
        show_result(diff.as_record(), options, lambda: diff_document(diff, folds=not options["verbose"]))


def _markdown(diff: StructureDiff) -> str:
    """Return what changed as Markdown that fits a comment: a summary, and the modules that changed most."""
    from winml.modelkit.report.document import Detail
    from winml.modelkit.report.markdown import render_markdown
    from winml.modelkit.report.structure_diff import diff_document

    return render_markdown(diff_document(diff, by_change=True), level=3, detail=Detail.ALWAYS)
