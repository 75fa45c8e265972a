"""``winml quantize``: lets modules of an ONNX file compute with fewer bits, and keeps its tags."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from winml.modelkit.cli._errors import NEGATIVE_ANSWER, WinMLCommand
from winml.modelkit.cli._folders import file_or_folder, refuse_early_in_folder, transform_folder, transformed_one
from winml.modelkit.cli._measuring import live_progress
from winml.modelkit.cli._options import (
    NonEmptyPath,
    data_set_files,
    debug_option,
    format_option,
    submodel_option,
    verbose_option,
)
from winml.modelkit.cli._progress import show_step
from winml.modelkit.cli._requests import config_option, read_build_config, sizes_by_name
from winml.modelkit.cli._streams import (
    json_text,
    library_output_to_stderr,
    refuse_outputs,
    show_result,
    silence_library_warnings,
    tell,
    write_files,
)
from winml.modelkit.cli.verbs._quantize_options import given_values, quantization_options
from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import measured_path
from winml.modelkit.hierarchy.selector import Selector
from winml.modelkit.quantize.options import FLOAT32, PRECISIONS

if TYPE_CHECKING:
    from rich.console import Console

    from winml.modelkit.builds.config import QuantSection
    from winml.modelkit.builds.found_models import FoundFolder
    from winml.modelkit.flows.quantize.quantized_forms import FormJudge
    from winml.modelkit.progress import StepEvent
    from winml.modelkit.quantize.options import QuantizeOptions
    from winml.modelkit.results.quantization_sensitivity import QuantizationSensitivity

__all__ = [
    "check_sensitivity",
    "command",
    "sensitivity_options",
    "show_sensitivity",
]


# --- ``winml quantize --sensitivity``: which modules pay for fewer bits, as a table, as files and as rules.


_F = TypeVar("_F", bound=Callable[..., Any])

FILES = ("output", "report", "exclude_list")
"""Options that name a file to write; measurements are kept beside the first that is given."""
_ONLY_SENSITIVITY = ("depth", "module", "input_data", "target", "dataset", "exclude_list", "report", "jobs")
_NEVER_SENSITIVITY = {"external_data": None, "verify": True, "min_sqnr_db": None}
"""Options about a file to write or to compare, and their defaults."""


def sensitivity_options(command: _F) -> _F:
    """Add the options that measure modules in place of writing a model."""
    path = NonEmptyPath()
    for option in reversed(
        (
            click.option(
                "--sensitivity",
                is_flag=True,
                help="Write no model: quantize each module alone, and rank modules by the damage to the answers; "
                "--output is the answer as JSON, and an interrupted run is taken up where it ended.",
            ),
            click.option("--depth", type=click.IntRange(min=1), help="Levels of the module tree to measure."),
            click.option("--module", metavar="SELECTOR", help="The only modules to measure."),
            click.option(
                "--input-data", metavar="FILE", help="Values for the inputs: an .npz file with an array for each."
            ),
            click.option(
                "--target",
                metavar="METRIC=NUMBER",
                help="Find the modules that must stay in float for sqnr_db=30 or, with --dataset, accuracy=0.9.",
            ),
            click.option(
                "--dataset",
                metavar="PATH|NAME",
                help="Samples that --target judges by, as winml eval does: file, folder, or name at the Hub.",
            ),
            click.option("--exclude-list", type=path, help="Write these to a file for --per-module."),
            click.option("--report", type=path, help="Also write a page with chart and table, to open in a browser."),
            click.option("--jobs", type=click.IntRange(1, 64), help="Modules measured at a time.  [default: 1]"),
        )
    ):
        command = option(command)
    return command


def check_sensitivity(options: Mapping[str, Any]) -> None:
    """Refuse what does not go together, before anything is measured.

    Raises:
        UsageError: an option needs ``--sensitivity``, or cannot be used with it.
    """
    if not options["sensitivity"]:
        for name in _ONLY_SENSITIVITY:
            if options[name] is not None:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} is for --sensitivity", hint=f"Add --sensitivity, or leave {flag} out.")
        if options["output"] is None:
            raise UsageError("no file to write was given", hint="Name one with -o, or ask for --sensitivity.")
        return
    _refuse_combinations(options)
    model: Path = options["model"]
    if not model.is_file():
        raise UsageError(f"{model}: no such file", hint="Give the path of an ONNX file.")
    outputs = [options[name] for name in FILES if options[name]]
    if len({path.absolute() for path in outputs}) < len(outputs):
        raise UsageError(
            "two of --output, --report and --exclude-list name one file", hint="Give each a file of its own."
        )
    read = [Path(options[name]) for name in ("input_data", "calibration_data") if options[name]]
    refuse_outputs(outputs, [model, *read, *data_set_files(options)], overwrite=options["overwrite"])
    if outputs:
        from winml.modelkit.graph.files.output_files import files_of_model, refuse_inputs

        refuse_inputs(outputs, files_of_model(model))


def _refuse_combinations(options: Mapping[str, Any]) -> None:
    for name, default in _NEVER_SENSITIVITY.items():
        if options[name] != default:
            flag = {"min_sqnr_db": "--min-sqnr"}.get(name, f"--{name.replace('_', '-')}")
            flag = flag if options[name] is not False else f"--no-{flag[2:]}"
            raise UsageError(f"{flag} is about a model to write, and --sensitivity writes none", hint="Leave it out.")
    if options["input_data"] and options["samples"] is not None:
        raise UsageError(
            f"--samples {options['samples']}: --input-data {options['input_data']} has values", hint="Give one of them."
        )
    if options["module"] is not None:
        Selector(options["module"])
    if options["exclude_list"] is not None and options["target"] is None:
        raise UsageError("--exclude-list needs to know what is to be reached", hint="Add --target, such as sqnr_db=30.")
    _refuse_target(options)
    output = options["output"]
    if output is not None and output.suffix.lower() in {".html", ".htm", ".onnx"}:
        raise UsageError(
            f"-o {output}: the answer of --sensitivity is JSON",
            hint="Name a .json file; --report writes the page. A model is written without --sensitivity.",
        )


def _refuse_target(options: Mapping[str, Any]) -> None:
    """Refuse a target that cannot be read, and a data set that is not there.

    Raises:
        UsageError: says which.
    """
    if options["dataset"] is not None:
        from winml.modelkit.evaluate.data_sources import find_source
        from winml.modelkit.evaluate.options import parse_limits

        find_source(options["dataset"])
        if options["target"] is None:
            raise UsageError(
                f"--dataset {options['dataset']}: nothing says what is to be reached on it",
                hint="Add --target with a metric of the task, such as accuracy=0.9.",
            )
        parse_limits([options["target"]], "--target")
    elif options["target"] is not None:
        from winml.modelkit.flows.quantize.sensitivity_options import parse_target

        parse_target(options["target"])


@contextmanager
def _form_judge(options: Mapping[str, Any]) -> Iterator[FormJudge | None]:
    """Return what judges forms by ``--dataset``; None without one."""
    if options["dataset"] is None:
        yield None
        return
    from winml.modelkit.builds.judged_models import form_judge
    from winml.modelkit.evaluate.columns import parse_columns
    from winml.modelkit.evaluate.options import EvaluationOptions, parse_limits

    is_shared = options["calibration_data"] is None
    asked = EvaluationOptions(
        dataset=options["dataset"],
        # With data of both kinds, these speak of that for ranges.
        split=options["split"] if is_shared else None,
        columns=parse_columns(options["columns"]) if is_shared else {},
        samples=options["samples"],
    )
    [target] = parse_limits([options["target"]], "--target").items()
    with form_judge(options["model"], asked, target) as judge:
        yield judge


def show_sensitivity(requested: QuantizeOptions, options: Mapping[str, Any]) -> None:
    """Measure, write the files, show the ranking, and leave with exit code 3 where a target was not met."""
    from winml.modelkit.flows.quantize.sensitivity import quantization_sensitivity
    from winml.modelkit.flows.quantize.sensitivity_options import SAMPLES, SensitivityOptions

    outputs = [options[name] for name in FILES if options[name]]
    measured = measured_path(outputs[0]) if outputs else None
    asked = SensitivityOptions(
        depth=options["depth"],
        module=options["module"],
        samples=SAMPLES if options["dataset"] is not None else options["samples"] or SAMPLES,
        input_data=Path(options["input_data"]) if options["input_data"] else None,
        sizes=sizes_by_name({**options, "batch_size": None}),
        jobs=options["jobs"] or 1,
        target=options["target"] if options["dataset"] is None else None,
        measured=measured,
        overwrite=options["overwrite"],
    )
    with (
        library_output_to_stderr(),
        _form_judge(options) as judge,
        live_progress(quiet=options["quiet"]) as progress,
    ):
        result = quantization_sensitivity(
            options["model"],
            options=requested,
            sensitivity=asked,
            judge=judge,
            on_step=None if options["quiet"] else show_step,
            progress=progress,
        )
        written = _write_files(result, options)
    if measured is not None:
        measured.unlink(missing_ok=True)  # the answer is written
    _show(result, written, options)
    if result.exclude_list is not None and not result.exclude_list.is_met:
        tell(f"--target {options['target']} was not met: {result.unmet_words}")
        click.get_current_context().exit(NEGATIVE_ANSWER)


def _write_files(result: QuantizationSensitivity, options: Mapping[str, Any]) -> list[Path]:
    """Write the files that are asked for; the list of exceptions only where it meets the target."""
    from winml.modelkit.report.quantization import sensitivity_page

    listed = result.exclude_list
    renderers: dict[str, Callable[[], str]] = {
        "output": lambda: f"{json_text(result.as_record())}\n",
        "report": lambda: sensitivity_page(result),
    }
    if listed is not None and listed.is_met:
        renderers["exclude_list"] = lambda: f"{json_text(listed.rules)}\n"
    return write_files(renderers, options)


def _show(result: QuantizationSensitivity, written: list[Path], options: Mapping[str, Any]) -> None:
    from winml.modelkit.report.quantization import print_sensitivity
    from winml.modelkit.report.terminal import print_rows

    def render(console: Console) -> None:
        print_sensitivity(result, console, verbose=options["verbose"])
        print_rows((("wrote", str(path)) for path in written), console)

    show_result(result.as_record(), options, render)


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
    from winml.modelkit.graph.files.output_files import ExportPaths, refuse_existing, refuse_inputs

    model: Path = options["model"]
    paths = ExportPaths.for_output(options["output"], with_sidecar=False, with_report=False)
    refuse_inputs([paths.model], [model])
    refuse_existing([paths.model], overwrite=options["overwrite"])
    if not model.is_file():
        raise UsageError(f"{model}: no such file", hint="Give the path of an ONNX file.")


def _quantize_folder(folder: FoundFolder, requested: QuantizeOptions, options: dict[str, Any]) -> None:
    from winml.modelkit.flows.graph_file import GraphFileTask
    from winml.modelkit.flows.quantize.quantize import quantize_file
    from winml.modelkit.report.quantization import print_quantization
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
    from winml.modelkit.report.quantization import print_quantization

    show_result(
        result.as_record(), options, lambda console: print_quantization(result, console, verbose=options["verbose"])
    )
