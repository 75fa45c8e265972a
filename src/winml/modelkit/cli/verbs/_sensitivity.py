"""``winml quantize --sensitivity``: which modules pay for fewer bits, as a table, as files and as rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from winml.modelkit.cli._answers import json_text, refuse_outputs, show_result, write_files
from winml.modelkit.cli._data_sets import data_set_files
from winml.modelkit.cli._exit_codes import NEGATIVE_ANSWER
from winml.modelkit.cli._measuring import live_progress
from winml.modelkit.cli._options import NonEmptyPath
from winml.modelkit.cli._progress import show_step
from winml.modelkit.cli._requests import sizes_by_name
from winml.modelkit.cli._streams import library_output_to_stderr, tell
from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import measured_path
from winml.modelkit.hierarchy.selector import Selector

if TYPE_CHECKING:
    from rich.console import Console

    from winml.modelkit.flows.quantize.quantized_forms import FormJudge
    from winml.modelkit.quantize.options import QuantizeOptions
    from winml.modelkit.results.quantization_sensitivity import QuantizationSensitivity

__all__ = ["check_sensitivity", "sensitivity_options", "show_sensitivity"]

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
        from winml.modelkit.graph.files.output_files import refuse_inputs
        from winml.modelkit.graph.files.output_paths import files_of_model

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
    from winml.modelkit.report.sensitivity_page import sensitivity_page

    listed = result.exclude_list
    renderers: dict[str, Callable[[], str]] = {
        "output": lambda: f"{json_text(result.as_record())}\n",
        "report": lambda: sensitivity_page(result),
    }
    if listed is not None and listed.is_met:
        renderers["exclude_list"] = lambda: f"{json_text(listed.rules)}\n"
    return write_files(renderers, options)


def _show(result: QuantizationSensitivity, written: list[Path], options: Mapping[str, Any]) -> None:
    from winml.modelkit.report.quantization_sensitivity import print_sensitivity
    from winml.modelkit.report.terminal import print_rows

    def render(console: Console) -> None:
        print_sensitivity(result, console, verbose=options["verbose"])
        print_rows((("wrote", str(path)) for path in written), console)

    show_result(result.as_record(), options, render)
