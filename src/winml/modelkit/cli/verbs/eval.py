"""``winml eval``: how well does a model do its task, and is it as good as before?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import NEGATIVE_ANSWER, WinMLCommand
from winml.modelkit.cli._measuring import live_progress, provider_options, refuse_unknown_ep
from winml.modelkit.cli._options import (
    NonEmptyPath,
    columns_option,
    data_set_files,
    debug_option,
    format_option,
    model_option,
    source_options,
    split_option,
)
from winml.modelkit.cli._progress import show_step
from winml.modelkit.cli._requests import refuse_checkpoint_options
from winml.modelkit.cli._streams import (
    library_output_to_stderr,
    refuse_outputs,
    silence_library_warnings,
    write_and_print_result,
)
from winml.modelkit.errors import UsageError
from winml.modelkit.runtime.execution_providers import parse_ep_options

if TYPE_CHECKING:
    from winml.modelkit.evaluate.options import EvaluationOptions

__all__ = ["command"]

EPILOG = """\b
Examples:
  winml eval model.onnx --dataset reviews.csv
  winml eval model.onnx --dataset glue:stsb --split validation --samples 500
  winml eval int8.onnx --dataset pictures --baseline model.onnx --max-drop accuracy=0.01
  winml eval model.onnx --dataset test.parquet --columns text=review,label=stars -o eval.json
  winml eval -m ./checkpoint --dataset reviews.csv --min f1=0.9
"""


@click.command(name="eval", cls=WinMLCommand, epilog=EPILOG)
@click.argument("target", required=False, metavar="[MODEL]")
@model_option(required=False, help="ONNX file, folder of a build, or a checkpoint, which PyTorch runs; or as argument.")
@click.option("--dataset", required=True, metavar="PATH|NAME", help="File, folder, or NAME[:CONFIG] at the Hub.")
@split_option
@columns_option
@click.option("--samples", type=click.IntRange(min=1), help="Samples to draw; else all.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples in one run; else what fits the task.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draw and the intervals.")
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="Metric to report; repeatable; else all.")
@click.option(
    "--baseline",
    metavar="pytorch|FILE|none",
    help="What to compare with; else the checkpoint the file was exported from, where that is on this disk.",
)
@click.option("--min", "minimum", multiple=True, metavar="METRIC=VALUE", help="Least value; else exit 3; repeatable.")
@click.option("--max", "maximum", multiple=True, metavar="METRIC=VALUE", help="Most, where less is better; repeatable.")
@click.option(
    "--max-drop", multiple=True, metavar="METRIC=VALUE", help="How much worse than the baseline it may be; repeatable."
)
@source_options
@provider_options
@click.option("-o", "--output", type=NonEmptyPath(), help="Also write the answer to this file, as JSON.")
@click.option("--overwrite", is_flag=True, help="Replace the output if it is there already.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@format_option
@debug_option
def command(**options: Any) -> None:
    """Judge a model by the samples of a data set, beside the PyTorch model it was exported from.

    Both are run on the same samples. A checkpoint is judged by itself, in PyTorch. Exit codes: 0 done, 3 a limit
    (--min, --max, --max-drop) is not met, 1 failed, 2 wrong usage.
    """
    name, requested = _refuse_early(options)
    silence_library_warnings(debug=options["debug"])
    from winml.modelkit.builds.evaluated_models import named_subject
    from winml.modelkit.flows.evaluate.evaluate import evaluate
    from winml.modelkit.report.evaluation import evaluation_document
    from winml.modelkit.runtime.opened_model import RunOptions

    run = RunOptions(
        name,
        ep_options=parse_ep_options(options["ep_options"]),
        **{key: options[key] for key in ("ep", "device", "threads")},
    )
    run.choose_provider()
    load = {key: options[key] for key in ("model_class", "revision", "trust_remote_code")}
    subject = named_subject(name, requested, run, **load)
    with library_output_to_stderr(), live_progress(quiet=options["quiet"], counted="samples") as progress:
        result = evaluate(subject, requested, on_step=None if options["quiet"] else show_step, progress=progress)
    write_and_print_result(result.as_record(), options, lambda: evaluation_document(result))
    if not result.is_good_enough:
        click.get_current_context().exit(NEGATIVE_ANSWER)


def _refuse_early(options: dict[str, Any]) -> tuple[str, EvaluationOptions]:
    """Return the model and what is asked of it; refuse what options and paths show to be wrong."""
    from winml.modelkit.builds.evaluated_models import named_baseline
    from winml.modelkit.found_models import FoundModel, onnx_file
    from winml.modelkit.load.request import ModelRequest, resolve_source

    passed = [value for value in (options["target"], options["model"]) if value is not None]
    if len(passed) != 1:
        raise UsageError(
            f"two models were given: {passed[0]!r} and, with -m, {passed[1]!r}" if passed else "no model was given",
            hint="Give one: an ONNX file, the folder of a build, or a checkpoint.",
        )
    name: str = passed[0]
    path = onnx_file(name)
    if path is None:
        request = ModelRequest(model=name, task=options["task"], trust_remote_code=options["trust_remote_code"])
        resolve_source(request)
        _refuse_run_options(options)
        model = FoundModel(name, request=request)
    else:
        hint = "Leave it out, or name the checkpoint the file was made from."
        refuse_checkpoint_options(path, options, ("model_class", "revision", "trust_remote_code"), hint)
        model = FoundModel(name, path)
    refuse_unknown_ep(options["ep"])
    requested = _evaluation_options(options)
    baseline = named_baseline(requested.baseline)
    read = [*model.files_read(), *([baseline] if isinstance(baseline, Path) else [])]
    if options["output"] is not None:
        refuse_outputs([options["output"]], [*read, *data_set_files(options)], overwrite=options["overwrite"])
    return name, requested


def _refuse_run_options(options: dict[str, object]) -> None:
    """Refuse options of ONNX Runtime for a checkpoint, which PyTorch runs.

    Raises:
        UsageError: names the first of them.
    """
    for option in ("ep", "device", "ep_options", "threads"):
        if options[option]:
            raise UsageError(
                f"--{option.replace('_', '-')} is for ONNX files, and the model is a checkpoint, which PyTorch runs",
                hint="Leave it out, or export the checkpoint first.",
            )


def _evaluation_options(options: Mapping[str, Any]) -> EvaluationOptions:
    from winml.modelkit.evaluate.columns import parse_columns
    from winml.modelkit.evaluate.data_sources import find_source
    from winml.modelkit.evaluate.options import EvaluationOptions, parse_limits

    find_source(options["dataset"])
    requested = EvaluationOptions(
        dataset=options["dataset"],
        columns=parse_columns(options["columns"]),
        min=parse_limits(options["minimum"], "--min"),
        max=parse_limits(options["maximum"], "--max"),
        max_drop=parse_limits(options["max_drop"], "--max-drop"),
        **{key: options[key] for key in ("task", "split", "samples", "batch_size", "seed", "metrics", "baseline")},
    )
    if requested.task is not None:
        from winml.modelkit.evaluate.tasks.table import task_definition
        from winml.modelkit.flows.evaluate.evaluate import check_limits
        from winml.modelkit.flows.evaluate.evaluated_models import task_name

        check_limits(task_definition(task_name(requested.task)), requested)
    return requested
