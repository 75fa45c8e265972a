"""Command ``winml extract``: extracts modules of a model as separate models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli import _options, _streams
from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import named_parts, options_of_part, show_parts
from winml.modelkit.cli._requests import exported_path, files_read, runnable_model
from winml.modelkit.extract.verb import ExtractPlan, ExtractRequest, plan_extraction, run_extraction
from winml.modelkit.fields import INPUTS, fields_of
from winml.modelkit.tags.selector import Selector
from winml.modelkit.words import count_noun

if TYPE_CHECKING:
    from winml.modelkit.extract.records import ExtractResult

_WHOLE = ""
"""Part name for a model with one graph, and for a single specified part."""


@click.command(name="extract", cls=WinMLCommand)
@_options.model_argument(
    "ONNX file, build folder, Hub id, checkpoint or factory. A factory is file.py:function or package.module:function."
)
@_options.request_options(ExtractRequest)
@_options.source_options
@_options.random_options
@_options.input_options
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
      winml extract -m ./checkpoint --module '/BertModel/**/BertLayer.*' -o layers --format json
    """
    plans = {part: plan_extraction(_build_request(requested)) for part, requested in _options_by_part(options).items()}
    of_several = _WHOLE not in plans
    if options["dry_run"]:
        from winml.modelkit.report.plan import plan_document

        show_parts(
            plans, options, plan_document, of_several=of_several, show=partial(_streams.show_result, is_answer=True)
        )
        return
    results = {part: _run_planned_extraction(plan, options) for part, plan in plans.items()}
    from winml.modelkit.extract.table import extract_document

    show_parts(
        results,
        options,
        extract_document,
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


def _options_by_part(options: dict[str, Any]) -> dict[str, dict[str, object]]:
    """Return name of a part with a selected module → options; a single model has the empty name.

    Raises:
        UsageError: the selector is malformed, or no part has a selected module.
    """
    Selector(options["module"])
    parts = named_parts(options)
    if len(parts) < 2:
        return {_WHOLE: next((options_of_part(options, path) for path in parts.values()), options)}
    from winml.modelkit.builds.folder_transformation import part_modules, parts_with_module

    return {
        part: {**options_of_part(options, parts[part]), "output": options["output"] / part}
        for part in parts_with_module(part_modules(parts), options["module"])
    }


def _build_request(options: Mapping[str, Any]) -> ExtractRequest:
    """Return the request for one graph, before heavy imports.

    Raises:
        UsageError: a path does not exist, or an option does not apply to the model.
    """
    model, run = runnable_model(options)
    protected = tuple(files_read(model, options))
    fields = {field.name: options[field.name] for field in fields_of(ExtractRequest)}
    return ExtractRequest(model=model, run=run, protected=protected, **fields)


def _run_planned_extraction(plan: ExtractPlan, options: dict[str, object]) -> ExtractResult:
    """Export the model if necessary, and write the planned modules; show steps unless ``--quiet`` is given."""
    from winml.modelkit.cli._progress import show_step

    with _streams.library_output_to_stderr():
        on_step = None if options["quiet"] else show_step
        return run_extraction(plan, exported_path(plan.request.model, on_step), on_step)
