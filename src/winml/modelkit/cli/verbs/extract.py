"""``winml extract``: modules of a model become models of their own."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import named_parts, options_of_part, parts_record, print_parts
from winml.modelkit.cli._options import (
    NonEmptyPath,
    debug_option,
    format_option,
    input_options,
    model_option,
    random_options,
    source_options,
)
from winml.modelkit.cli._requests import exported_path, files_read, runnable_model
from winml.modelkit.cli._streams import library_output_to_stderr, print_json, silence_library_warnings, tell
from winml.modelkit.hierarchy.selector import Selector

if TYPE_CHECKING:
    from rich.console import Console

    from winml.modelkit.builds.found_models import FoundModel
    from winml.modelkit.results.extract_result import ExtractResult

__all__ = ["command"]

_WHOLE = ""
"""In place of the name of a part: the model is one graph, or one part is named."""

EPILOG = """\b
Examples:
  winml extract model.onnx --module BertAttention -o attention
  winml extract model.onnx --module 'encoder.layer.0.*' -o layer0 --with-inputs
  winml extract -m ./checkpoint --module '/BertModel/**/BertLayer.*' -o layers --format json
"""


@click.command(name="extract", cls=WinMLCommand, epilog=EPILOG)
@click.argument("target", required=False, metavar="[MODEL]")
@model_option(
    required=False, help="ONNX file, folder of a build, Hub id, checkpoint folder, file.py:factory; or as argument."
)
@click.option("--module", required=True, metavar="SELECTOR", help="Modules to cut out, by class, path or tag.")
@click.option("-o", "--output", required=True, type=NonEmptyPath(), help="The folder to write to.")
@click.option("--with-inputs", is_flag=True, help="Also write what flowed in and out, as .npz files.")
@click.option("--overwrite", is_flag=True, help="Replace files that are there already.")
@source_options
@random_options
@input_options
@click.option("--input-data", metavar="FILE", help="Values for the whole model: an .npz file with an array per input.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@format_option
@debug_option
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Cut modules out of a model, each as an ONNX model of its own that answers as it does inside.

    A model that is not an ONNX file yet is exported first, once. Of a folder with several parts, the modules of each
    go to a folder of its name. Exit codes: 0 done, 1 failed or some module could
    not be cut out, 2 wrong usage, 3 a cut model does not answer as the whole model does.
    """
    requests = {part: (asked, *_refuse_early(asked)) for part, asked in _options_by_part(options).items()}
    results = {part: _extract(*request) for part, request in requests.items()}
    records = {part: {"folder": str(item.folder), **item.as_record()} for part, item in results.items()}
    if options["format_"] == "json":
        print_json(records.get(_WHOLE) or parts_record(options, records))
    elif not options["quiet"]:
        from winml.modelkit.report.terminal import console_for

        console = console_for(sys.stdout)
        if _WHOLE in results:
            _print_extract(results[_WHOLE], console)
        else:
            print_parts(results, _print_extract, console)
    refused, modules = (sum(len(getattr(item, name)) for item in results.values()) for name in ("refused", "modules"))
    if refused or not modules:
        what = (
            f"{refused} module{'' if refused == 1 else 's'} could not be cut out"
            if refused
            else "nothing was there to cut"
        )
        tell(f"error: {what}; the others were written" if modules else f"error: {what}")
        context.exit(1)


def _print_extract(result: ExtractResult, console: Console) -> None:
    from winml.modelkit.report.files import extract_lines
    from winml.modelkit.report.terminal import print_rows

    print_rows(extract_lines(result), console, width=9)


def _options_by_part(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options for each part of a folder that has a module of the selector; under no name for one model.

    Raises:
        UsageError: no part has such a module.
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


def _extract(options: dict[str, Any], model: FoundModel, run_options: dict[str, Any]) -> ExtractResult:
    silence_library_warnings(debug=options["debug"])
    from winml.modelkit.cli._progress import show_step
    from winml.modelkit.flows.modules.extract import ExtractOptions, extract_modules
    from winml.modelkit.runtime.opened_model import RunOptions

    with library_output_to_stderr():
        on_step = None if options["quiet"] else show_step
        return extract_modules(
            exported_path(model, on_step),
            options["module"],
            options["output"],
            ExtractOptions(
                RunOptions(**run_options),
                protected=tuple(files_read(model, options)),
                with_inputs=options["with_inputs"],
                overwrite=options["overwrite"],
            ),
            on_step=on_step,
        )


def _refuse_early(options: dict[str, Any]) -> tuple[FoundModel, dict[str, Any]]:
    """Return the model and how it is run; refuse what names and paths show to be wrong, before heavy imports."""
    model, run_options = runnable_model(options)
    from winml.modelkit.file_names import EXTRACT_MANIFEST_NAME
    from winml.modelkit.graph.files.output_files import refuse_existing

    refuse_existing([options["output"] / EXTRACT_MANIFEST_NAME], overwrite=options["overwrite"])
    return model, run_options
