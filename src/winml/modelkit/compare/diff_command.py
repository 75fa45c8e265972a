"""``winml diff``: what changed between two ONNX files, module by module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import NEGATIVE_RESULT, WinMLCommand
from winml.modelkit.cli._folders import end_dry_run
from winml.modelkit.cli._options import option, request_options, result_options
from winml.modelkit.cli._progress import show_wait
from winml.modelkit.cli._requests import stated_fields
from winml.modelkit.cli._streams import json_text, page_text, show_result, write_answer
from winml.modelkit.compare.diff_verb import DiffRequest, plan_diff, run_diff
from winml.modelkit.fields import OUTPUT
from winml.modelkit.words import command_line

if TYPE_CHECKING:
    from winml.modelkit.compare.records import StructureDiff


@click.command(name="diff", cls=WinMLCommand)
@request_options(DiffRequest)
@option("exit_zero", bool, "Exit with 0 even if the models differ.", OUTPUT, is_common=True)
@result_options(
    quiet="",
    verbose="Show more detail: every module, and names of weights.",
    formats=("table", "json", "markdown"),
)
def command(**options: Any) -> None:
    """Show the changes between two ONNX models by module: operators, weights, types and sizes.

    The models are not run. Weights are compared by content; their values are not shown.

    Exit codes: 0 equal, 1 invalid files, 2 usage error, 3 different.

    Examples:
      winml diff export.onnx optimized.onnx
      winml diff old.onnx new.onnx --format markdown > comment.md
      winml diff old.onnx new.onnx --exit-zero -o changes.json --report changes.html
    """
    plan = plan_diff(DiffRequest(**stated_fields(DiffRequest, options)))
    end_dry_run(plan, options)
    with show_wait("comparing"):
        diff = run_diff(plan)
    texts = {
        "output": lambda path: (
            _render_markdown(diff) if path.suffix.lower() == ".md" else f"{json_text(diff.as_record())}\n"
        ),
        "report": lambda path: page_text(diff.document(), path, plan.files),
    }
    paths = write_answer(plan.files, texts, overwrite=options["overwrite"])
    if options["format_"] == "markdown":
        click.echo(_render_markdown(diff), nl=False)
    else:
        document = diff.document(folds=not options["verbose"])
        show_result(diff.as_record(), options, lambda: document.with_files(paths).with_next(_next_command(diff)))
    if not (diff.is_same or options["exit_zero"]):
        click.get_current_context().exit(NEGATIVE_RESULT)


def _next_command(diff: StructureDiff) -> str:
    """Return the command that compares the outputs of two files; empty if the files are equal."""
    return "" if diff.is_same else command_line(["winml", "compare", str(diff.before.path), str(diff.after.path)])


def _render_markdown(diff: StructureDiff) -> str:
    """Return the differences as Markdown that fits a comment: a summary, and the modules that changed most."""
    from winml.modelkit.report.document import Detail
    from winml.modelkit.report.markdown import render_markdown

    return render_markdown(diff.document(by_change=True), level=3, detail=Detail.ALWAYS)
