"""``winml tune``: the fastest variant of a model on this machine within a quality limit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._endings import Interrupted
from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import end_dry_run
from winml.modelkit.cli._options import checkpoint_options, model_option, request_options, result_options
from winml.modelkit.cli._progress import live_progress
from winml.modelkit.cli._requests import stated_fields
from winml.modelkit.cli._streams import library_output_to_stderr, show_result
from winml.modelkit.tune.verb import TuneRequest, plan_tuning, run_tuning
from winml.modelkit.verbs.named_models import model_name, resolve_named_model, sizes_by_name

if TYPE_CHECKING:
    from winml.modelkit.tune.records import TuneResult


@click.command(name="tune", cls=WinMLCommand)
@model_option("ONNX file, build, checkpoint, Hub id or file.py:function.")
@request_options(TuneRequest)
@checkpoint_options
@result_options()
def command(**options: Any) -> None:
    """Find the fastest variant of a model on this machine within a quality limit.

    Candidates differ in optimization level, precision, execution provider and threads. They are made from one export
    and timed in alternation. An interrupted tuning resumes with the same command.

    Exit codes: 0 success, also if the verdict is no or undecided, 1 failure, 2 usage error.

    Examples:
      winml tune ./checkpoint -o tuned
      winml tune model.onnx -o tuned --min-sqnr 25 --budget 20
      winml tune ./checkpoint -o tuned --max-drop accuracy=0.01 --dataset reviews.csv
      winml tune model.onnx -o tuned --only dynamic,qdq --target throughput
      winml tune ./checkpoint -o tuned --dry-run
    """
    request = _read_request(options)
    with library_output_to_stderr():
        plan = plan_tuning(request)
    end_dry_run(plan, options)
    from winml.modelkit.cli._progress import show_step
    from winml.modelkit.onnx.files.named_paths import take_recorded_reads

    try:
        with library_output_to_stderr(), live_progress(quiet=options["quiet"], counted="turn") as progress:
            result = run_tuning(plan, request, None if options["quiet"] else show_step, progress)
    except KeyboardInterrupt:
        take_recorded_reads()  # the build of a candidate is internal; the folder of the tuning is named
        message = f"measurements are saved in {options['output']}; the same command resumes there"
        raise Interrupted(message) from None
    _print_result(result, options)


def _read_request(options: Mapping[str, Any]) -> TuneRequest:
    """Make the request from the command line."""
    from winml.modelkit.models.request import ModelRequest

    name = model_name(options, "a Hub id, a checkpoint, file.py:function, an ONNX file or a build folder")
    source = resolve_named_model(name, options)
    sizes: dict[str, Any] = {"seed": options["seed"]}
    if source.path is not None:
        sizes |= {"sizes": sizes_by_name({**options, "batch_size": None}), "batch_size": options["batch_size"]}
    model = source.request or ModelRequest(model=str(source.path))
    return TuneRequest(model=model, files=source.files_read(), **sizes, **stated_fields(TuneRequest, options))


def _print_result(result: TuneResult, options: Mapping[str, Any]) -> None:
    from winml.modelkit.builds.found_models import read_model_folder
    from winml.modelkit.file_names import TUNE_PAGE_NAME, TUNE_RESULT_NAME
    from winml.modelkit.tune.tune_result import provider_words
    from winml.modelkit.verbs.next_commands import running_command

    parts = read_model_folder(Path(result.winner.folder)).parts
    following = running_command(options["output"], parts, provider_words(result.won.candidate))
    files = [options["output"] / name for name in (TUNE_RESULT_NAME, TUNE_PAGE_NAME)]
    record = {**result.as_record(), "next": following}
    show_result(record, options, lambda: result.document().with_files(files).with_next(following))
