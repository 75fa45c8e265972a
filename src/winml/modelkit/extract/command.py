"""Command ``winml extract``: extracts modules of a model as separate models."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli import _options, _streams
from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import show_parts
from winml.modelkit.cli._requests import exported_path
from winml.modelkit.extract.verb import (
    WHOLE,
    ExtractPlan,
    ExtractRequest,
    extract_requests,
    plan_extraction,
    run_extraction,
)
from winml.modelkit.fields import INPUTS
from winml.modelkit.words import count_noun

if TYPE_CHECKING:
    from winml.modelkit.extract.records import ExtractResult


@click.command(name="extract", cls=WinMLCommand)
@_options.model_option(
    "ONNX file, build folder, Hub id, checkpoint or file.py:function. The function, or package.module:function, "
    "returns the model."
)
@_options.request_options(ExtractRequest)
@_options.source_options
@_options.random_options
@_options.input_options
@_options.dynamic_options
@_options.export_config_option
@_options.option(
    "input_data",
    str,
    "Inputs of the whole model: an .npz file with one array per input.",
    INPUTS,
    metavar="FILE",
    default_words="random values",
)
@_options.result_options()
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Extract modules of a model as separate ONNX models.

    The outputs of each extracted model are compared with those inside the whole model. A checkpoint is exported first,
    once. Modules of a folder with several parts are written to a folder per part.

    Exit codes: 0 success, 1 failure, or a module could not be extracted, 2 usage error, 3 the outputs of an extracted
    model differ beyond tolerance.

    Examples:
      winml extract model.onnx --module BertAttention -o attention
      winml extract model.onnx --module 'encoder.layer.0.*' -o layer0 --with-inputs
      winml extract ./checkpoint --module '/BertModel/**/BertLayer.*' -o layers --format json
    """
    plans = {part: plan_extraction(request) for part, request in extract_requests(options).items()}
    of_several = WHOLE not in plans
    if options["dry_run"]:
        from winml.modelkit.report.plan import plan_document

        show_parts(
            plans, options, plan_document, of_several=of_several, show=partial(_streams.show_result, is_answer=True)
        )
        return
    results = {part: _run_planned_extraction(plan, options) for part, plan in plans.items()}
    show_parts(
        results,
        options,
        lambda result: result.document().with_next(_next_command(result)),
        of_several=of_several,
        record=lambda result: {"folder": str(result.folder), **result.as_record()},
    )
    refused, modules = (
        sum(len(getattr(result, name)) for result in results.values()) for name in ("refused", "modules")
    )
    if refused or not modules:
        reason = (
            f"{count_noun(refused, 'module')} could not be extracted" if refused else "no module to extract was found"
        )
        _streams.tell(f"error: {reason}; the remaining ones were written" if modules else f"error: {reason}")
        context.exit(1)


def _next_command(result: ExtractResult) -> str:
    """Return the command that measures the first extracted model; empty without one."""
    from winml.modelkit.verbs.next_commands import measuring_command

    files = [result.folder / module.file for module in result.modules[:1]]
    return measuring_command("perf", files, []) if files else ""


def _run_planned_extraction(plan: ExtractPlan, options: dict[str, object]) -> ExtractResult:
    """Export the model if necessary, and write the planned modules; show steps unless ``--quiet`` is given."""
    from winml.modelkit.cli._progress import show_step

    with _streams.library_output_to_stderr():
        on_step = None if options["quiet"] else show_step
        return run_extraction(plan, exported_path(plan.request.model, on_step), on_step)
