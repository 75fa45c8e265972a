"""``winml perf FOLDER`` of a model of several parts: each part or its modules by itself, or the text of all parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.cli._answers import refuse_outputs, show_answer
from winml.modelkit.cli._folders import options_of_part, parts_record, print_parts
from winml.modelkit.cli._measuring import live_progress, parse_ep_options, refuse_unknown_ep
from winml.modelkit.cli._runnable_models import files_read, runnable_model
from winml.modelkit.cli._streams import library_output_to_stderr, silence_library_warnings
from winml.modelkit.cli.verbs._module_perf import named_module_perf, refuse_failed_instances
from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import DECODER, ENCODER

if TYPE_CHECKING:
    from winml.modelkit.measure.latency import LatencyOptions
    from winml.modelkit.results.perf_result import PerfResult
    from winml.modelkit.runtime.opened_model import RunOptions

__all__ = ["show_parts_perf"]

_OF_ONE_GRAPH = ("by_module", "baseline", "input_data")


def show_parts_perf(parts: Mapping[str, Path], latency: LatencyOptions, options: dict[str, Any]) -> None:
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
    from winml.modelkit.flows.perf.whole_model import PerfOptions, measure_model
    from winml.modelkit.report.perf import print_perf

    results: dict[str, PerfResult] = {}
    with library_output_to_stderr(), live_progress(quiet=options["quiet"]) as progress:
        for part, run in runs.items():
            results[part] = measure_model(parts[part], PerfOptions(run, latency), progress=progress)
    record = parts_record(options, {part: result.as_record() for part, result in results.items()})
    show_answer(record, options, lambda console: print_parts(results, print_perf, console))


def _show_modules(
    parts: Mapping[str, Path], runs: Mapping[str, RunOptions], latency: LatencyOptions, options: dict[str, Any]
) -> None:
    """Measure the modules that a selector names, in the parts that have them."""
    from winml.modelkit.builds.folder_transformation import part_modules, parts_with_module
    from winml.modelkit.builds.found_models import FoundModel
    from winml.modelkit.report.module_perf import print_module_perf

    results = {
        part: named_module_perf(FoundModel(str(parts[part]), parts[part]), runs[part], latency, options)
        for part in parts_with_module(part_modules(parts), options["module"])
    }
    record = parts_record(options, {part: result.as_record() for part, result in results.items()})
    show_answer(record, options, lambda console: print_parts(results, print_module_perf, console))
    refuse_failed_instances(list(results.values()))


def _show_generation(
    name: str, parts: Mapping[str, Path], run: Any, latency: LatencyOptions, options: Mapping[str, Any]
) -> None:
    from winml.modelkit.cli.verbs._generation_perf import few_runs
    from winml.modelkit.inference.generation.measuring import measure_encoded_generation
    from winml.modelkit.report.generation_perf import print_generation_perf

    with library_output_to_stderr():
        result = measure_encoded_generation(
            parts, replace(run, shown=name), latency=few_runs(latency, options["iterations"])
        )
    show_answer(result.as_record(), options, lambda console: print_generation_perf(result, console))
