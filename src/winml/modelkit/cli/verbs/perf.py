"""``winml perf``: how fast is a model, and how much memory does it take?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._answers import refuse_outputs, show_answer
from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import named_parts, options_of_part
from winml.modelkit.cli._measuring import (
    latency_options,
    live_progress,
    measuring_options,
    parse_ep_options,
    provider_options,
    refuse_unknown_ep,
)
from winml.modelkit.cli._options import (
    NonEmptyPath,
    debug_option,
    format_option,
    input_options,
    model_option,
    random_options,
    source_options,
)
from winml.modelkit.cli._runnable_models import exported_path, files_read, runnable_model
from winml.modelkit.cli._streams import library_output_to_stderr, silence_library_warnings, tell
from winml.modelkit.cli.verbs._generation_perf import check_generation, generation_option, show_generation
from winml.modelkit.cli.verbs._module_perf import check_module, module_option, show_module_perf
from winml.modelkit.cli.verbs._module_times import by_module_options, check_by_module, show_by_module
from winml.modelkit.cli.verbs._parts_perf import show_parts_perf
from winml.modelkit.errors import UsageError

if TYPE_CHECKING:
    from winml.modelkit.builds.found_models import FoundModel
    from winml.modelkit.flows.perf.whole_model import Baseline

__all__ = ["command"]

_PYTORCH = "pytorch"

EPILOG = """\b
Examples:
  winml perf model.onnx
  winml perf model.onnx -o latency.json
  winml perf model.onnx --shape-config '{"batch_size": 8, "sequence_length": 128}' --duration 10
  winml perf model.onnx --by-module --depth 4 --report time.html
  winml perf model.onnx --module 'encoder.layer.*' --iterations 50
  winml perf -m ./checkpoint --baseline pytorch
  winml perf built --generation
  winml perf optimized.onnx --baseline model.onnx --format json
"""


@click.command(name="perf", cls=WinMLCommand, epilog=EPILOG)
@click.argument("target", required=False, metavar="[MODEL]")
@model_option(
    required=False, help="ONNX file, folder of a build, Hub id, checkpoint folder, file.py:factory; or as argument."
)
@source_options
@random_options
@input_options
@click.option("--input-data", metavar="FILE", help="Values for the inputs: an .npz file with an array for each.")
@provider_options
@measuring_options
@by_module_options
@module_option
@generation_option
@click.option("--baseline", metavar="pytorch|FILE", help="Measure this too, in turns, and compare.")
@click.option("-o", "--output", type=NonEmptyPath(), help="Also write the answer to this file, as JSON.")
@click.option("--overwrite", is_flag=True, help="Replace files that are there already.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@format_option
@debug_option
def command(**options: Any) -> None:
    """Measure how fast a model is, and how much memory it takes.

    A model that is not an ONNX file yet is exported first, once. Exit codes: 0 done, 1 failed, 2 wrong usage.
    """
    parts = named_parts(options, beside_weights=True)
    if len(parts) == 1:
        options = options_of_part(options, next(iter(parts.values())))
    elif parts:
        _refuse_combinations(options)
        show_parts_perf(parts, latency_options(options), options)
        return
    model, values = _refuse_early(options)
    values["ep_options"] = parse_ep_options(options["ep_options"])
    latency, baseline = latency_options(options), _find_baseline(options["baseline"], model)
    silence_library_warnings(debug=options["debug"])
    from winml.modelkit.runtime.opened_model import RunOptions

    run_options = RunOptions(**values, **{key: options[key] for key in ("ep", "device", "threads", "io_binding")})
    # Before an export, which may take minutes.
    run_options.choose_provider()
    if options["generation"]:
        show_generation(model, run_options, latency, options)
        return
    if options["module"] is not None:
        show_module_perf(model, run_options, latency, options)
        return
    if options["by_module"]:
        show_by_module(model, run_options, latency, options)
        return
    from winml.modelkit.cli._progress import show_step
    from winml.modelkit.flows.perf.whole_model import PerfOptions, measure_model
    from winml.modelkit.report.perf import print_perf

    with library_output_to_stderr(), live_progress(quiet=options["quiet"]) as progress:
        path = exported_path(model, None if options["quiet"] else show_step)
        result = measure_model(
            path, PerfOptions(run_options, latency, baseline), progress=progress, tell=_tell(options)
        )
    show_answer(result.as_record(), options, lambda console: print_perf(result, console))


def _tell(options: Mapping[str, Any]) -> Callable[[str], None] | None:
    """Return what says on stderr how the baseline comes along; None where nothing is to be said."""
    return None if options["quiet"] else lambda words: tell(f"baseline: {words}")


def _refuse_early(options: dict[str, Any]) -> tuple[FoundModel, dict[str, Any]]:
    """Return the model and what it is fed; refuse what options and paths show to be wrong, before heavy imports."""
    _refuse_combinations(options)
    model, run_options = runnable_model(options)
    refuse_unknown_ep(options["ep"])
    if options["output"]:
        refuse_outputs([options["output"]], files_read(model, options), overwrite=options["overwrite"])
    elif options["overwrite"] and not options["by_module"]:
        raise UsageError(
            "--overwrite replaces a file, and none is to be written", hint="Name one with -o, or leave it out."
        )
    return model, run_options


def _refuse_combinations(options: Mapping[str, Any]) -> None:
    """Refuse options that do not go together.

    Raises:
        UsageError: names them.
    """
    check_module(options)
    check_by_module(options)
    check_generation(options)


def _find_baseline(name: str | None, model: FoundModel) -> Baseline | None:
    """Return what ``--baseline`` names.

    Raises:
        UsageError: there is no such baseline.
    """
    if name is None:
        return None
    from winml.modelkit.builds.found_models import onnx_file
    from winml.modelkit.flows.perf.whole_model import Baseline

    if name == _PYTORCH:
        return Baseline(name, request=model.request)
    path = onnx_file(name)
    if path is None:
        raise UsageError(
            f"--baseline {name}: neither {_PYTORCH} nor an ONNX file", hint=f"Give --baseline {_PYTORCH}, or a file."
        )
    return Baseline(name, path)
