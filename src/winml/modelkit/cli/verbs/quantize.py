"""``winml quantize``: lets modules of an ONNX file compute with fewer bits, and keeps its tags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._answers import show_result
from winml.modelkit.cli._build_configs import config_option, read_build_config
from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import file_or_folder, refuse_early_in_folder, transform_folder, transformed_one
from winml.modelkit.cli._options import NonEmptyPath, debug_option, format_option, submodel_option, verbose_option
from winml.modelkit.cli._progress import show_step
from winml.modelkit.cli._requests import sizes_by_name
from winml.modelkit.cli._streams import silence_library_warnings, tell
from winml.modelkit.cli.verbs._quantize_options import given_values, quantization_options
from winml.modelkit.cli.verbs._sensitivity import check_sensitivity, sensitivity_options, show_sensitivity
from winml.modelkit.errors import UsageError
from winml.modelkit.quantize.precisions import FLOAT32, PRECISIONS

if TYPE_CHECKING:
    from rich.console import Console

    from winml.modelkit.builds.config import QuantSection
    from winml.modelkit.builds.found_models import FoundFolder
    from winml.modelkit.progress import StepEvent
    from winml.modelkit.quantize.options import QuantizeOptions

__all__ = ["command"]

EPILOG = """\b
Examples:
  winml quantize -m model.onnx -o int8.onnx
  winml quantize -m model.onnx -o int4.onnx --precision int4
  winml quantize -m built -o built-int8
  winml quantize -m model.onnx -o int8.onnx --exclude BertPooler --exclude 'encoder.layer.0.**'
  winml quantize -m model.onnx -o mixed.onnx --per-module rules.json
  winml quantize -m model.onnx -o qdq.onnx --mode qdq --calibration-data samples
  winml quantize -m model.onnx --sensitivity --report page.html
  winml quantize -m model.onnx --sensitivity --target sqnr_db=30 --exclude-list rules.json
  winml quantize -m model.onnx --sensitivity --target accuracy=0.9 --dataset reviews.csv
"""


@click.command(name="quantize", cls=WinMLCommand, epilog=EPILOG)
@click.option(
    "-m", "--model", type=NonEmptyPath(), required=True, help="ONNX file, or folder of a build; it stays as it is."
)
@click.option("-o", "--output", type=NonEmptyPath(), help="File to write; of a folder, the folder.")
@submodel_option
@quantization_options(
    [name for name in PRECISIONS if name != FLOAT32],
    unset="int8",
    more_of_samples=" With --sensitivity, sets of random values to run [default: 4], or samples of --dataset.",
)
@config_option("A build config, or its quant section; options win over it.")
@click.option(
    "--external-data/--no-external-data",
    default=None,
    help="Keep weights in a file of their own, or inside; by default large ones go outside, which loads faster.",
)
@click.option("--verify/--no-verify", default=True, help="Compare the result with the source in ONNX Runtime.")
@click.option(
    "--shape-config",
    metavar="JSON",
    help='Sizes to compare at, and of random values for ranges, such as {"batch_size": 4}, by name or input:axis; else '
    "some are tried; a file or text.",
)
@sensitivity_options
@click.option("--overwrite", is_flag=True, help="Replace the output if it is there already.")
@verbose_option("Tell more: every module.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@format_option
@debug_option
def command(**options: Any) -> None:
    """Let modules of an ONNX file compute with fewer bits; its nodes go on naming their modules.

    Exit codes: 0 done, 1 the files are wrong, 2 wrong usage, 3 too little is left of the answers of the
    source, or --target was not met.
    """
    requested = _quantize_options(options)
    options, folder = file_or_folder(options)
    if folder is not None and options["sensitivity"]:
        options, folder = transformed_one(options, folder, "--sensitivity is for one graph"), None
    _refuse_early(requested, options, folder)
    silence_library_warnings(debug=options["debug"])
    if options["sensitivity"]:
        show_sensitivity(requested, options)
    elif folder is not None:
        _quantize_folder(folder, requested, options)
    else:
        _quantize_file(requested, options)


def _quantize_options(options: dict[str, Any]) -> QuantizeOptions:
    """Return what is asked for: the config's section, with options of the command on top.

    Raises:
        UsageError: a precision cannot be reached with the mode.
        ConfigError: the config or the rules are wrong.
    """
    from winml.modelkit.options import parse_options
    from winml.modelkit.quantize.options import QuantizeOptions

    given = given_values(options)
    if options["sensitivity"]:
        given.pop("samples", None)  # how many sets of values are run, there
        if options["dataset"] is not None and options["calibration_data"] is None:
            given.pop("split", None)  # of the data set that --target judges by
            given.pop("columns", None)
    quant = read_build_config(options["config"], section="quant").quant if options["config"] is not None else None
    section = _options_of_section(quant).model_dump(mode="json", exclude_none=True) if quant is not None else {}
    requested = parse_options(QuantizeOptions, {**section, **given}, "options")
    requested.refuse_contradictions()
    return requested


def _options_of_section(section: QuantSection) -> QuantizeOptions:
    from winml.modelkit.builds.quantization import auto_words, quantize_options

    if words := auto_words(section):
        tell(f"note: {words}")
    return quantize_options(section)


def _refuse_early(requested: QuantizeOptions, options: dict[str, Any], folder: FoundFolder | None) -> None:
    """Refuse what paths show to be wrong, before a model library is imported."""
    from winml.modelkit.flows.quantize.calibration_files import refuse_missing_files

    check_sensitivity(options)
    sizes_by_name({**options, "batch_size": None})
    refuse_missing_files(requested)
    if options["sensitivity"]:
        return
    if folder is not None:
        refuse_early_in_folder(folder, options)
        return
    from winml.modelkit.graph.files.output_files import refuse_existing, refuse_inputs
    from winml.modelkit.graph.files.output_paths import ExportPaths

    model: Path = options["model"]
    paths = ExportPaths.for_output(options["output"], with_sidecar=False, with_report=False)
    refuse_inputs([paths.model], [model])
    refuse_existing([paths.model], overwrite=options["overwrite"])
    if not model.is_file():
        raise UsageError(f"{model}: no such file", hint="Give the path of an ONNX file.")


def _quantize_folder(folder: FoundFolder, requested: QuantizeOptions, options: dict[str, Any]) -> None:
    from winml.modelkit.flows.graph_file import GraphFileTask
    from winml.modelkit.flows.quantize.quantize import quantize_file
    from winml.modelkit.report.quantization_summary import print_quantization
    from winml.modelkit.results.quantized_model import QuantizedFile

    sizes = sizes_by_name({**options, "batch_size": None})

    def work(task: GraphFileTask, asked: QuantizeOptions, on_step: Callable[[StepEvent], None] | None) -> QuantizedFile:
        return quantize_file(task, asked, on_step, sizes=sizes, processors=folder.path)

    def render(result: QuantizedFile, console: Console) -> None:
        print_quantization(result, console, verbose=options["verbose"])

    transform_folder(folder, requested, options, work, render)


def _quantize_file(requested: QuantizeOptions, options: dict[str, Any]) -> None:
    from winml.modelkit.cli._streams import library_output_to_stderr
    from winml.modelkit.flows.quantize.quantize import quantize_onnx

    with library_output_to_stderr():
        result = quantize_onnx(
            options["model"],
            options["output"],
            options=requested,
            overwrite=options["overwrite"],
            verify=options["verify"],
            external_data=options["external_data"],
            sizes=sizes_by_name({**options, "batch_size": None}),
            on_step=None if options["quiet"] else show_step,
        )
    from winml.modelkit.report.quantization_summary import print_quantization

    show_result(
        result.as_record(), options, lambda console: print_quantization(result, console, verbose=options["verbose"])
    )
