"""``winml eval``: how well does a model do its task, and is it as good as before?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import NEGATIVE_RESULT, WinMLCommand
from winml.modelkit.cli._folders import show_plan
from winml.modelkit.cli._measuring import live_progress
from winml.modelkit.cli._options import model_argument, request_options, result_options, source_options
from winml.modelkit.cli._progress import show_step
from winml.modelkit.cli._requests import found_model, model_name, stated_fields
from winml.modelkit.cli._streams import json_text, library_output_to_stderr, show_result, write_answer
from winml.modelkit.evaluate.verb import EvalRequest, plan_evaluation, run_evaluation

if TYPE_CHECKING:
    from winml.modelkit.evaluate.records import Evaluation

EPILOG = """\b
Examples:
  winml eval model.onnx --dataset reviews.csv
  winml eval model.onnx --dataset glue:stsb --split validation --samples 500
  winml eval int8.onnx --dataset pictures --baseline model.onnx --report eval.html
  winml eval model.onnx --dataset test.parquet --columns text=review,label=stars -o eval.json
  winml eval -m ./checkpoint --dataset reviews.csv --min f1=0.9
"""


@click.command(name="eval", cls=WinMLCommand, epilog=EPILOG)
@model_argument("ONNX file, build folder, or a checkpoint, which PyTorch runs.")
@request_options(EvalRequest)
@source_options
@result_options(quiet="Do not show progress.")
def command(**options: Any) -> None:
    """Evaluate a model on a dataset and compare it with its source model.

    Both are evaluated on the same samples. A checkpoint is evaluated alone, in PyTorch.

    Exit codes: 0 success, 1 failure, 2 usage error, 3 a limit (--min, --max, --max-drop) is not met.
    """
    request = _read_request(options)
    plan = plan_evaluation(request)
    if options["dry_run"]:
        show_plan(plan, options)
        return
    with library_output_to_stderr(), live_progress(quiet=options["quiet"], counted="sample") as progress:
        result = run_evaluation(plan, request, None if options["quiet"] else show_step, progress)
    _write_and_show(result, plan.files, options)
    if not result.is_good_enough:
        click.get_current_context().exit(NEGATIVE_RESULT)


def _write_and_show(result: Evaluation, files: Mapping[str, Sequence[Path]], options: Mapping[str, Any]) -> None:
    from winml.modelkit.cli._pages import page_text
    from winml.modelkit.evaluate.table import evaluation_document

    record, document = result.as_record(), evaluation_document(result)
    texts = {
        "output": lambda _: f"{json_text(record)}\n",
        "report": lambda page: page_text(document, page, files),
    }
    written = write_answer(files, texts, overwrite=options["overwrite"])
    show_result(record, options, lambda: document.with_files(written), is_answer=True)


def _read_request(options: Mapping[str, Any]) -> EvalRequest:
    """Return what the command line requests."""
    name = model_name(options, "an ONNX file, a build folder, or a checkpoint")
    # The other options of the command have other meanings than those of a checkpoint, such as --batch-size.
    load = {key: options[key] for key in ("model_class", "revision", "trust_remote_code")}
    return EvalRequest(
        model=found_model(name, {"task": options["task"], **load}, load),
        task=options["task"],
        load=load,
        **stated_fields(EvalRequest, options),
    )
