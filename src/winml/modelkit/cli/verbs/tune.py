"""``winml tune``: the fastest file of a model on this machine that is still right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import Interrupted, WinMLCommand
from winml.modelkit.cli._measuring import live_progress
from winml.modelkit.cli._options import (
    NonEmptyPath,
    columns_option,
    debug_option,
    dynamic_options,
    format_option,
    input_options,
    model_option,
    random_options,
    source_options,
    split_option,
    weight_options,
)
from winml.modelkit.cli._requests import FOR_CHECKPOINTS, model_request, refuse_checkpoint_options, sizes_by_name
from winml.modelkit.cli._streams import library_output_to_stderr, show_result, silence_library_warnings
from winml.modelkit.results.tuning import KINDS, TARGETS

if TYPE_CHECKING:
    from winml.modelkit.load.request import ModelRequest
    from winml.modelkit.results.tuning import TuneResult
    from winml.modelkit.tune.options import TuneOptions

__all__ = ["command"]

EPILOG = """\b
Examples:
  winml tune -m ./checkpoint -o tuned
  winml tune -m model.onnx -o tuned --min-sqnr 25 --budget 20
  winml tune -m ./checkpoint -o tuned --max-drop accuracy=0.01 --dataset reviews.csv
  winml tune -m model.onnx -o tuned --only dynamic,qdq --target throughput
  winml tune -m ./checkpoint -o tuned --plan
"""
_DYNAMIC = ("dynamic_batch", "dynamic_sequence", "dynamic_image_size", "dynamic_axes", "allow_dynamic")


@click.command(name="tune", cls=WinMLCommand, epilog=EPILOG)
@model_option(required=True, help="Hub id, checkpoint folder, file.py:factory, ONNX file, or folder of a build.")
@click.option("-o", "--output", type=NonEmptyPath(), required=True, help="Folder of the tuning, new or its own.")
@click.option("--target", type=click.Choice(TARGETS), default="latency", show_default=True, help="What is to be best.")
@click.option(
    "--min-sqnr", "min_sqnr_db", type=float, metavar="DB", help="Least ratio of signal to error.  [default: 30]"
)
@click.option(
    "--max-drop", multiple=True, metavar="METRIC=VALUE", help="Most that a metric of the task may lose; repeatable."
)
@click.option("--dataset", metavar="PATH|NAME", help="Samples for --max-drop: file, folder, or name at the Hub.")
@split_option
@columns_option
@click.option("--samples", type=click.IntRange(min=1), help="Samples of the data set to draw.")
@click.option(
    "--budget",
    "budget_minutes",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MINUTES",
    help="When this time is over, begin nothing new.",
)
@click.option("--only", multiple=True, metavar="KIND", help=f"Kinds of candidates to try: {', '.join(KINDS)}.")
@click.option("--calibration-data", metavar="PATH|NAME", help="Where qdq finds the ranges of activations.")
@click.option("--input-data", metavar="FILE", help="Values for the inputs: an .npz file with an array for each.")
@click.option("--plan", "shows_plan", is_flag=True, help="Say what would be tried on this machine, and stop.")
@click.option("--overwrite", is_flag=True, help="Start anew where the folder belongs to another tuning.")
@source_options
@weight_options
@random_options
@input_options
@dynamic_options
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@format_option
@debug_option
def command(**options: Any) -> None:
    """Find the fastest file of a model on this machine that is still right.

    Levels, precisions, providers and threads are tried, all from one export and timed in turns. An interrupted
    tuning goes on with the same command. Exit codes: 0 done, 1 failed, 2 wrong usage.
    """
    request, requested = _refuse_early(options)
    silence_library_warnings(debug=options["debug"])
    if options["shows_plan"]:
        _show_plan(requested, options)
        return
    from winml.modelkit.cli._progress import show_step
    from winml.modelkit.tune.tuning import tune_model

    try:
        with library_output_to_stderr(), live_progress(quiet=options["quiet"]) as progress:
            result = tune_model(
                request,
                options["output"],
                options=requested,
                overwrite=options["overwrite"],
                on_step=None if options["quiet"] else show_step,
                progress=progress,
            )
    except KeyboardInterrupt:
        words = f"kept: what was measured, in {options['output']}; the same command goes on from there"
        raise Interrupted(words) from None
    _show(result, options)


def _refuse_early(options: Mapping[str, Any]) -> tuple[ModelRequest, TuneOptions]:
    """Return the model and what is looked for; refuse what names and paths show to be wrong, before heavy imports."""
    from winml.modelkit.tune.state import refuse_foreign_folder

    request, sizes = _requested_model(options)
    requested = _tune_options(options, sizes)
    requested.refuse_contradictions()
    if requested.dataset is not None:
        from winml.modelkit.evaluate.data_sources import find_source

        find_source(requested.dataset)
    if not options["shows_plan"]:
        refuse_foreign_folder(options["output"])
    return request, requested


def _requested_model(options: Mapping[str, Any]) -> tuple[ModelRequest, dict[str, object]]:
    """Return the request of the model, and the sizes that an ONNX file is run at."""
    from winml.modelkit.found_models import onnx_file
    from winml.modelkit.load.request import ModelRequest, resolve_source

    path = onnx_file(options["model"])
    if path is None:
        request = model_request(options)
        resolve_source(request)
        return request, {}
    hint = "Leave it out, or name the checkpoint the file was made from."
    refuse_checkpoint_options(path, options, (*FOR_CHECKPOINTS, *_DYNAMIC), hint)
    sizes = sizes_by_name({**options, "batch_size": None})
    return ModelRequest(model=str(path)), {"sizes": sizes, "batch_size": options["batch_size"]}


def _tune_options(options: Mapping[str, Any], sizes: Mapping[str, Any]) -> TuneOptions:
    from winml.modelkit.evaluate.columns import parse_columns
    from winml.modelkit.evaluate.options import parse_limits
    from winml.modelkit.tune.declared_options import parse_kinds
    from winml.modelkit.tune.options import TuneOptions

    same = ("target", "min_sqnr_db", "dataset", "split", "samples", "budget_minutes", "calibration_data", "seed")
    return TuneOptions(
        **{name: options[name] for name in same},
        max_drop=parse_limits(options["max_drop"], "--max-drop"),
        columns=parse_columns(options["columns"]),
        only=parse_kinds(options["only"]),
        input_data=Path(options["input_data"]) if options["input_data"] else None,
        **sizes,
    )


def _show_plan(requested: TuneOptions, options: Mapping[str, object]) -> None:
    from winml.modelkit.report.tuning import tuning_plan_document
    from winml.modelkit.tune.candidates import look_at_tuning_machine, plan_candidates

    machine = look_at_tuning_machine()
    plan = plan_candidates(requested, machine)
    record = {"schema_version": 1, "machine": machine.as_record(), "plan": [item.as_record() for item in plan]}
    show_result(record, options, lambda: tuning_plan_document(plan), is_answer=True)


def _show(result: TuneResult, options: Mapping[str, Any]) -> None:
    from winml.modelkit.file_names import TUNE_ANSWER_NAME, TUNE_PAGE_NAME
    from winml.modelkit.report.tuning import tuning_document

    written = [options["output"] / name for name in (TUNE_ANSWER_NAME, TUNE_PAGE_NAME)]
    show_result(result.as_record(), options, lambda: tuning_document(result).with_files(written))
