"""``winml perf``: how fast is a model, and how much memory does it take?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import named_parts, options_of_part, parts_record
from winml.modelkit.cli._measuring import (
    latency_options,
    live_progress,
    measuring_options,
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
from winml.modelkit.cli._requests import exported_path, files_read, runnable_model
from winml.modelkit.cli._streams import (
    json_text,
    library_output_to_stderr,
    refuse_outputs,
    show_result,
    silence_library_warnings,
    tell,
    write_and_print_result,
    write_files,
)
from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import DECODER, ENCODER
from winml.modelkit.hierarchy.selector import Selector
from winml.modelkit.runtime.execution_providers import parse_ep_options

if TYPE_CHECKING:
    from winml.modelkit.flows.perf import Baseline
    from winml.modelkit.found_models import FoundModel
    from winml.modelkit.measure.latency import LatencyOptions
    from winml.modelkit.results.module_perf import ModulePerfResult, ProfiledDecoder, ProfiledModules
    from winml.modelkit.results.perf import PerfResult
    from winml.modelkit.runtime.opened_model import RunOptions

__all__ = [
    "by_module_options",
    "check_by_module",
    "check_generation",
    "check_module",
    "command",
    "few_runs",
    "generation_option",
    "module_option",
    "named_module_perf",
    "refuse_failed_instances",
    "show_by_module",
    "show_generation",
    "show_module_perf",
    "show_parts_perf",
]


# --- ``winml perf --generation``: how fast does a decoder begin, and how fast does it go on?


_F = TypeVar("_F", bound=Callable[..., Any])

_RUNS, _WARMUP = 20, 2
"""Chosen: a prompt of a thousand tokens takes seconds, and each length is measured on its own."""


def generation_option(command: _F) -> _F:
    """Add the option that measures a decoder by prompt and step."""
    return click.option(
        "--generation",
        is_flag=True,
        help="Of a model with a cache: time to the first token by length of the prompt, tokens/s by what is cached.",
    )(command)


def check_generation(options: Mapping[str, object]) -> None:
    """Refuse what does not go together.

    Raises:
        UsageError: an option that says what a run is fed, or that measures something else.
    """
    if not options["generation"]:
        return
    if not options["io_binding"]:
        raise UsageError(
            "--no-io-binding has no meaning with --generation, whose cache always stays in memory of ONNX Runtime",
            hint="Leave it out.",
        )
    for name in ("by_module", "module", "baseline", "input_data", "shape_config", "batch_size"):
        if options[name]:
            raise UsageError(
                f"--{name.replace('_', '-')} has no meaning with --generation, which chooses prompts and steps itself",
                hint="Give one of them.",
            )


def few_runs(latency: LatencyOptions, iterations: int | None) -> LatencyOptions:
    """Return how often each length is measured: seldom, unless ``--iterations`` says otherwise."""
    return replace(latency, iterations=iterations or _RUNS, warmup=min(latency.warmup, _WARMUP))


def show_generation(
    model: FoundModel, run_options: RunOptions, latency: LatencyOptions, options: Mapping[str, Any]
) -> None:
    """Measure and show the table."""
    from winml.modelkit.cli._progress import show_step
    from winml.modelkit.inference.generation.measuring import measure_generation
    from winml.modelkit.report.perf import generation_perf_document

    with library_output_to_stderr():
        result = measure_generation(
            exported_path(model, None if options["quiet"] else show_step),
            run_options.shown,
            run_options.choose_provider(),
            threads=run_options.threads,
            seed=run_options.seed,
            latency=few_runs(latency, options["iterations"]),
        )
    write_and_print_result(result.as_record(), options, lambda: generation_perf_document(result))


# --- ``winml perf --module``: how fast is each module on its own?


def module_option(command: _F) -> _F:
    """Add the option that measures modules in place of the whole model."""
    return click.option(
        "--module", metavar="SELECTOR", help="Cut out each module it names, and measure it alone on real activations."
    )(command)


def check_module(options: Mapping[str, Any]) -> None:
    """Refuse what does not go together.

    Raises:
        UsageError: an empty selector, or an option that speaks of the whole model.
    """
    if options["module"] is None:
        return
    Selector(options["module"])
    for name in ("by_module", "baseline"):
        if options[name]:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} measures the whole model, and --module {options['module']} parts of it",
                hint="Give one of them, or cut the modules out first: winml extract.",
            )


def show_module_perf(
    model: FoundModel, run_options: RunOptions, latency: LatencyOptions, options: Mapping[str, object]
) -> None:
    """Measure, show the tables, and leave with exit code 1 where an instance failed.

    Raises:
        UsageError: the file to write is what is measured, or there already.
    """
    from winml.modelkit.report.module_times import module_perf_document

    result = named_module_perf(model, run_options, latency, options)
    write_and_print_result(result.as_record(), options, lambda: module_perf_document(result))
    refuse_failed_instances([result])


def named_module_perf(
    model: FoundModel, run_options: RunOptions, latency: LatencyOptions, options: Mapping[str, Any]
) -> ModulePerfResult:
    """Measure the modules that ``--module`` names in one file, with progress on stderr.

    Raises:
        WinMLError: the selector names nothing, or the file does not run.
    """
    from winml.modelkit.cli._progress import show_step
    from winml.modelkit.flows.modules.perf import measure_modules

    with library_output_to_stderr(), live_progress(quiet=options["quiet"]) as progress:
        on_step = None if options["quiet"] else show_step
        return measure_modules(
            exported_path(model, on_step), options["module"], run_options, latency, on_step=on_step, progress=progress
        )


def refuse_failed_instances(results: Sequence[ModulePerfResult]) -> None:
    """Leave with exit code 1 where an instance of a module could not be measured, or there was none."""
    failed = sum(len(result.failed) for result in results)
    instances = sum(len(result.instances) for result in results)
    if failed or not instances:
        what = f"{failed} of {instances} instances could not be measured" if failed else "nothing to measure"
        tell(f"error: {what}")
        click.get_current_context().exit(1)


# --- ``winml perf --by-module``: which module takes the time, as a table and as files for other tools.


_PAGES = ("report", "node_data", "trace")
FILES = ("output", *_PAGES)
"""Options that name a file to write."""
_ONLY_BY_MODULE = ("depth", "top", "group", *_PAGES)


def by_module_options(command: _F) -> _F:
    """Add the options that break the time down by module."""
    path = NonEmptyPath()
    for option in reversed(
        (
            click.option(
                "--by-module", is_flag=True, help="Show which module takes the time, in one profiled session."
            ),
            click.option("--depth", type=click.IntRange(min=1), help="Levels of the module tree to show."),
            click.option("--top", type=click.IntRange(min=1), help="Show only so many, those with the most own time."),
            click.option("--group", type=click.Choice(["class"]), help="Show all modules of a class together."),
            click.option("--report", type=path, help="Also write a page with chart and table, to open in a browser."),
            click.option("--node-data", type=path, help="Also write node data for Model Explorer (JSON)."),
            click.option("--trace", type=path, help="Also write a Chrome trace with module frames (JSON)."),
        )
    ):
        command = option(command)
    return command


def check_by_module(options: Mapping[str, Any]) -> None:
    """Refuse what does not go together, before anything is measured.

    Raises:
        UsageError: an option needs ``--by-module``, or cannot be used with it; or a library is missing.
    """
    if not options["by_module"]:
        for name in _ONLY_BY_MODULE:
            if options[name]:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"{flag} says how times by module are shown", hint=f"Add --by-module, or leave {flag} out."
                )
        return
    if options["baseline"]:
        raise UsageError(
            f"--baseline {options['baseline']}: profiling slows both down differently, so --by-module compares nothing",
            hint="Compare in a run of its own, without --by-module.",
        )
    for name in ("group", "top"):
        if options["depth"] is not None and options[name] is not None:
            raise UsageError(
                f"--depth {options['depth']} is for the tree, and --{name} {options[name]} shows a list in its place",
                hint="Give one of them.",
            )
    paths = [options[name] for name in FILES if options[name]]
    if len({path.absolute() for path in paths}) < len(paths):
        raise UsageError(
            "two of --output, --report, --node-data and --trace name one file", hint="Give each a file of its own."
        )


def show_by_module(
    model: FoundModel, run_options: RunOptions, latency: LatencyOptions, options: Mapping[str, Any]
) -> None:
    """Measure, write the files, and show where the time goes.

    Raises:
        UsageError: a file to write is what is measured, or there already.
    """
    from winml.modelkit.cli._progress import show_step
    from winml.modelkit.flows.modules.profile import profile_model

    outputs = [options[name] for name in FILES if options[name]]
    refuse_outputs(outputs, files_read(model, options) if outputs else (), overwrite=options["overwrite"])
    with library_output_to_stderr(), live_progress(quiet=options["quiet"]) as progress:
        path = exported_path(model, None if options["quiet"] else show_step)
        measured = profile_model(path, run_options, latency, progress=progress)
        written = _write_files(measured, options)
    from winml.modelkit.report.module_times import profile_document

    depth, top, by_class = options["depth"], options["top"], options["group"] == "class"
    record = measured.as_record(depth=depth)
    show_result(
        record,
        options,
        lambda: profile_document(measured, depth=depth, top=top, by_class=by_class).with_files(written),
        is_answer=True,
    )


def _write_files(measured: ProfiledModules | ProfiledDecoder, options: Mapping[str, Any]) -> list[Path]:
    from winml.modelkit.report.html import render_html
    from winml.modelkit.report.module_times import profile_document
    from winml.modelkit.report.trace import chrome_trace_json, profile_node_data

    return write_files(
        {
            "output": lambda: f"{json_text(measured.as_record(depth=options['depth']))}\n",
            "report": lambda: render_html(profile_document(measured)),
            "node_data": lambda: profile_node_data(measured),
            "trace": lambda: chrome_trace_json(measured),
        },
        options,
    )


# --- ``winml perf FOLDER`` of a model of several parts: each part or its modules by itself, or the text of all
# parts.


_OF_ONE_GRAPH = ("by_module", "baseline", "input_data")


def show_parts_perf(parts: Mapping[str, Path], latency: LatencyOptions, options: Mapping[str, Any]) -> None:
    """Measure all parts and show the answer.

    Raises:
        UsageError: an option that is for one graph, or that a part does not take.
        WinMLError: a part does not run.
    """
    name = options["target"] or options["model"]
    for key in _OF_ONE_GRAPH:
        if options[key]:
            raise UsageError(
                f"--{key.replace('_', '-')} is for one graph, and {name} holds {', '.join(parts)}",
                hint=f"Name a part: --submodel {next(iter(parts))}",
            )
    if options["generation"] and not {ENCODER, DECODER} <= set(parts):
        raise UsageError(
            f"--generation measures an encoder and its decoder, or a decoder, and {name} holds {', '.join(parts)}",
            hint=f"Name the file of a part: {next(iter(parts.values()))}",
        )
    named = {part: runnable_model(options_of_part(options, path)) for part, path in parts.items()}
    refuse_unknown_ep(options["ep"])
    if options["output"]:
        read = [file for model, _ in named.values() for file in files_read(model, options)]
        refuse_outputs([options["output"]], read, overwrite=options["overwrite"])
    silence_library_warnings(debug=options["debug"])
    from winml.modelkit.runtime.opened_model import RunOptions

    running = {key: options[key] for key in ("ep", "device", "threads", "io_binding")}
    ep_options = parse_ep_options(options["ep_options"])
    runs = {part: RunOptions(**values, ep_options=ep_options, **running) for part, (_, values) in named.items()}
    if options["generation"]:
        _show_generation(name, parts, runs[ENCODER], latency, options)
        return
    if options["module"] is not None:
        _show_modules(parts, runs, latency, options)
        return
    from winml.modelkit.flows.perf import PerfOptions, measure_model
    from winml.modelkit.report.document import parts_document
    from winml.modelkit.report.perf import perf_document

    results: dict[str, PerfResult] = {}
    with library_output_to_stderr(), live_progress(quiet=options["quiet"]) as progress:
        for part, run in runs.items():
            results[part] = measure_model(parts[part], PerfOptions(run, latency), progress=progress)
    record = parts_record(options, {part: result.as_record() for part, result in results.items()})
    write_and_print_result(record, options, lambda: parts_document(results, perf_document))


def _show_modules(
    parts: Mapping[str, Path], runs: Mapping[str, RunOptions], latency: LatencyOptions, options: Mapping[str, Any]
) -> None:
    """Measure the modules that a selector names, in the parts that have them."""
    from winml.modelkit.builds.folder_transformation import part_modules, parts_with_module
    from winml.modelkit.found_models import FoundModel
    from winml.modelkit.report.document import parts_document
    from winml.modelkit.report.module_times import module_perf_document

    results = {
        part: named_module_perf(FoundModel(str(parts[part]), parts[part]), runs[part], latency, options)
        for part in parts_with_module(part_modules(parts), options["module"])
    }
    record = parts_record(options, {part: result.as_record() for part, result in results.items()})
    write_and_print_result(record, options, lambda: parts_document(results, module_perf_document))
    refuse_failed_instances(list(results.values()))


def _show_generation(
    name: str, parts: Mapping[str, Path], run: Any, latency: LatencyOptions, options: Mapping[str, Any]
) -> None:
    from winml.modelkit.inference.generation.measuring import measure_encoder_decoder_generation
    from winml.modelkit.report.perf import generation_perf_document

    with library_output_to_stderr():
        result = measure_encoder_decoder_generation(
            parts, replace(run, shown=name), latency=few_runs(latency, options["iterations"])
        )
    write_and_print_result(result.as_record(), options, lambda: generation_perf_document(result))


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
    from winml.modelkit.flows.perf import PerfOptions, measure_model
    from winml.modelkit.report.perf import perf_document

    with library_output_to_stderr(), live_progress(quiet=options["quiet"]) as progress:
        path = exported_path(model, None if options["quiet"] else show_step)
        result = measure_model(
            path, PerfOptions(run_options, latency, baseline), progress=progress, tell=_tell(options)
        )
    write_and_print_result(result.as_record(), options, lambda: perf_document(result))


def _tell(options: Mapping[str, object]) -> Callable[[str], None] | None:
    """Return what says on stderr how the baseline comes along; None where nothing is to be said."""
    return None if options["quiet"] else lambda words: tell(f"baseline: {words}")


def _refuse_early(options: Mapping[str, Any]) -> tuple[FoundModel, dict[str, Any]]:
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


def _refuse_combinations(options: Mapping[str, object]) -> None:
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
    from winml.modelkit.flows.perf import Baseline
    from winml.modelkit.found_models import onnx_file

    if name == _PYTORCH:
        return Baseline(name, request=model.request)
    path = onnx_file(name)
    if path is None:
        raise UsageError(
            f"--baseline {name}: neither {_PYTORCH} nor an ONNX file", hint=f"Give --baseline {_PYTORCH}, or a file."
        )
    return Baseline(name, path)
