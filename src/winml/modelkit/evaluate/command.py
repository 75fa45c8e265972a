"""``winml eval``: how well does a model do its task, and is it as good as before?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import NEGATIVE_RESULT, WinMLCommand
from winml.modelkit.cli._folders import end_dry_run
from winml.modelkit.cli._options import model_option, reading_options, request_options, result_options
from winml.modelkit.cli._progress import live_progress, show_step
from winml.modelkit.cli._requests import stated_fields
from winml.modelkit.cli._streams import library_output_to_stderr, page_text, show_answer
from winml.modelkit.evaluate.verb import EvalRequest, plan_evaluation, run_evaluation
from winml.modelkit.verbs.named_models import model_name, resolve_named_model
from winml.modelkit.verbs.next_commands import diverging_command, measuring_command, model_files, timing_command

if TYPE_CHECKING:
    from winml.modelkit.evaluate.records import Evaluation


@click.command(name="eval", cls=WinMLCommand)
@model_option("ONNX file, build folder, or a checkpoint, which PyTorch runs.")
@request_options(EvalRequest)
@reading_options
@result_options(quiet="Do not show progress.")
def command(**options: Any) -> None:
    """Evaluate a model on a dataset and compare it with its source model.

    Both are evaluated on the same samples. A checkpoint is evaluated alone, in PyTorch.

    Exit codes: 0 success, 1 failure, 2 usage error, 3 a limit (--min, --max, --max-drop) is not met.

    Examples:
      winml eval model.onnx --dataset reviews.csv
      winml eval model.onnx --dataset glue:stsb --split validation --samples 500
      winml eval int8.onnx --dataset pictures --baseline model.onnx --report eval.html
      winml eval model.onnx --dataset test.parquet --columns text=review,label=stars -o eval.json
      winml eval ./checkpoint --dataset reviews.csv --min f1=0.9
    """
    request = _read_request(options)
    plan = plan_evaluation(request)
    end_dry_run(plan, options)
    with library_output_to_stderr(), live_progress(quiet=options["quiet"], counted="sample") as progress:
        result = run_evaluation(plan, request, None if options["quiet"] else show_step, progress)
    document, following = result.document(), _next_command(request, result)
    show_answer(
        {**result.as_record(), "next": following},
        plan.files,
        options,
        lambda: document.with_next(following),
        report=lambda page: page_text(document, page, plan.files),
    )
    if not result.is_good_enough:
        click.get_current_context().exit(NEGATIVE_RESULT)


def _next_command(request: EvalRequest, result: Evaluation) -> str:
    """Return the command that acts on an evaluation.

    A model that misses a limit is compared with its baseline by module; another one is measured; a checkpoint is built.
    """
    if result.model.kind == "pytorch":
        return measuring_command("build", [result.model.name], ["-o", f"{Path(result.model.name).name}_built"])
    baseline, model = result.baseline, Path(result.model.name)
    if baseline is None or not model.exists() or len(model_files(model)) > 1:
        return measuring_command("perf", [result.model.name], [])
    if not result.is_good_enough:
        data = {name: getattr(request, name) for name in ("dataset", "split", "columns")}
        return diverging_command(baseline.name, model, data)
    return (
        measuring_command("perf", [model], [])
        if baseline.kind == "pytorch"
        else timing_command(Path(baseline.name), model)
    )


def _read_request(options: Mapping[str, Any]) -> EvalRequest:
    """Make the request from the command line."""
    name = model_name(options, "an ONNX file, a build folder, or a checkpoint")
    # The other options of the command have other meanings than those of a checkpoint, such as --batch-size.
    load = {key: options[key] for key in ("model_class", "revision", "trust_remote_code", "adapter")}
    return EvalRequest(
        model=resolve_named_model(name, {"task": options["task"], **load}, load),
        task=options["task"],
        load=load,
        **stated_fields(EvalRequest, options),
    )
