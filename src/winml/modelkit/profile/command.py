"""``winml perf``: how fast is a model, and how much memory does it take?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli import _options, _streams
from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import end_dry_run, show_parts
from winml.modelkit.cli._progress import live_progress, show_step
from winml.modelkit.cli._requests import exported_path, stated_fields
from winml.modelkit.errors import UsageError, WinMLError
from winml.modelkit.fields import MODEL
from winml.modelkit.profile.verb import PerfRequest, PerfSubject, perf_request, plan_perf, run_perf

if TYPE_CHECKING:
    from winml.modelkit.profile.module_records import (
        ComparedProfiles,
        ModulePerfResult,
        ProfiledDecoder,
        ProfiledModules,
    )
    from winml.modelkit.verbs.answers import AnswerPlan


@click.command(name="perf", cls=WinMLCommand)
@_options.model_option("ONNX file, build, checkpoint, Hub id or file.py:function.")
@_options.option(
    "others",
    str,
    "Second model: both are measured in alternation, and the first is the baseline.",
    MODEL,
    is_argument=True,
    is_repeatable=True,
    metavar="[OTHER]",
)
@_options.source_options
@_options.random_options
@_options.request_options(PerfRequest)
@_options.dynamic_options
@_options.export_config_option
@_options.result_options(quiet="Do not show progress.")
def command(**options: Any) -> None:
    """Measure the latency and memory of a model, in total or by module.

    A checkpoint is exported first, once.

    Exit codes: 0 success, 1 failure, 2 usage error.

    Examples:
      winml perf model.onnx
      winml perf model.onnx fast.onnx
      winml perf model.onnx -o latency.json
      winml perf model.onnx --shape-config batch_size=8,sequence_length=128 --duration 10
      winml perf model.onnx --by-module --depth 4 --report time.html
      winml perf model.onnx fast.onnx --by-module --report pair.html
      winml perf model.onnx --module 'encoder.layer.*' --iterations 50
      winml perf ./checkpoint --baseline pytorch
      winml perf built --generation
      winml perf optimized.onnx --baseline model.onnx --format json
    """
    request = _read_request(options)
    plan = plan_perf(request)
    end_dry_run(plan, options)
    plan.recover()
    results = _measure(plan, request, options)
    from winml.modelkit.profile.table import generation_perf_document, perf_document

    if request.generation:
        (result,) = results.values()
        _streams.show_answer(result.as_record(), plan.files, options, lambda: generation_perf_document(result))
    elif request.module is not None:
        from winml.modelkit.profile.module_table import module_perf_document

        _show_parts(results, plan, options, module_perf_document)
        _exit_on_failures(results)
    elif request.by_module:
        (result,) = results.values()
        _show_by_module(result, request, plan, options)
    else:
        files = [plan.subject.models[part].path for part in results]
        following = _next_step(files[0], options) if len(files) == 1 else {}
        first = next(iter(results.values()))  # a page is of one graph
        _show_parts(
            results,
            plan,
            options,
            lambda result: perf_document(result).with_rows(following.items()),
            report=lambda page: _streams.page_text(perf_document(first), page, plan.files),
        )


def _read_request(options: Mapping[str, Any]) -> PerfRequest:
    """Return the request of the command line; a second model is measured against the first.

    Raises:
        UsageError: more than two models are specified, or a second one and a baseline.
    """
    stated = stated_fields(PerfRequest, options)
    if others := options["others"]:
        if len(others) > 1 or options["baseline"]:
            beside = f"the baseline {options['baseline']!r}" if len(others) == 1 else repr(others[1])
            raise UsageError(
                f"{options['model']!r}, {others[0]!r} and {beside}: two models are measured in alternation",
                hint=f"Specify two: winml perf {options['model']} {others[0]}",
            )
        stated["baseline"] = options["model"]
        options = {**options, "model": others[0]}
    return perf_request(options, stated)


def _measure(plan: AnswerPlan[PerfSubject], request: PerfRequest, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Measure every part, with progress on stderr unless the command is quiet."""
    on_step = None if options["quiet"] else show_step
    tell_baseline = None if options["quiet"] else lambda words: _streams.tell(f"baseline: {words}")
    with _streams.library_output_to_stderr(), live_progress(quiet=options["quiet"]) as progress:
        return run_perf(
            plan,
            request,
            lambda model: exported_path(model, on_step),
            on_step=on_step,
            progress=progress,
            tell=tell_baseline,
        )


def _show_parts(
    results: Mapping[str, Any],
    plan: AnswerPlan[PerfSubject],
    options: Mapping[str, object],
    describe: Callable[[Any], Any],
    **texts: Callable[[Path], str],
) -> None:
    """Write and print the result of one model, or those of several parts; ``texts``: as for ``show_answer``."""

    def show(record: Mapping[str, object], options: Mapping[str, Any], describe: Callable[[], Any]) -> None:
        _streams.show_answer(record, plan.files, options, describe, **texts)

    show_parts(results, options, describe, of_several=len(plan.subject.models) > 1, show=show)


_MOST_BYTES = 256_000_000
"""Maximum size of a file whose fusible nodes are counted. Chosen: it takes a second or two."""


def _next_step(path: Path | None, options: Mapping[str, Any], *, counts_nodes: bool = False) -> dict[str, str]:
    """Return the command that optimizes a plain export; ``{}`` for other files.

    Args:
        path: The measured file; None: a checkpoint, whose export no command names.
        options: Options of the command.
        counts_nodes: Also count the nodes that can be fused, and return ``{}`` if there are none.
    """
    from winml.modelkit.metadata_keys import EXPORT_KEY, QUANTIZATION_KEY
    from winml.modelkit.onnx.files.reading import read_structure

    if options["quiet"] or path is None:
        return {}
    model = read_structure(path)
    keys = {entry.key for entry in model.metadata_props}
    is_plain = EXPORT_KEY in keys and QUANTIZATION_KEY not in keys
    if not is_plain or any(node.domain for node in model.graph.node):
        return {}
    from winml.modelkit.verbs.next_commands import transforming_command

    command = {"next": transforming_command("optimize", path, ["--level", "full"], suffix="full")}
    if not counts_nodes:
        return command
    from winml.modelkit.onnx.files.placing import external_files

    if sum(file.stat().st_size for file in (path, *external_files(path))) > _MOST_BYTES:
        return command
    from winml.modelkit.optimize.file_optimization import count_fusible_nodes

    try:
        with _streams.library_output_to_stderr():
            before, after = count_fusible_nodes(path)
    except WinMLError:
        return {}  # winml optimize reports it
    return {"fusible": f"{before} nodes become {after} at --level full", **command} if after < before else {}


def _exit_on_failures(results: Mapping[str, ModulePerfResult]) -> None:
    """Exit with 1 if an instance of a module failed."""
    failed = sum(len(result.failed) for result in results.values())
    instances = sum(len(result.instances) for result in results.values())
    if failed or not instances:
        what = f"{failed} of {instances} instances could not be measured" if failed else "nothing to measure"
        _streams.tell(f"error: {what}")
        click.get_current_context().exit(1)


def _show_by_module(
    measured: ProfiledModules | ProfiledDecoder | ComparedProfiles,
    request: PerfRequest,
    plan: AnswerPlan[PerfSubject],
    options: Mapping[str, Any],
) -> None:
    """Write the files, and show where the time goes."""
    from winml.modelkit.profile.chrome_trace import chrome_trace_json
    from winml.modelkit.profile.module_records import ComparedProfiles
    from winml.modelkit.profile.node_data import profile_node_data

    profiled = measured.model if isinstance(measured, ComparedProfiles) else measured
    by_class = request.group == "class"
    (model,) = plan.subject.models.values() if len(plan.subject.models) == 1 else (None,)
    following = _next_step(model.path if model is not None else None, options, counts_nodes=True)
    _streams.show_answer(
        measured.as_record(depth=request.depth),
        plan.files,
        options,
        lambda: measured.document(depth=request.depth, top=request.top, by_class=by_class).with_rows(following.items()),
        report=lambda page: _streams.page_text(measured.document(), page, plan.files),
        node_data=lambda _path: profile_node_data(profiled),
        trace=lambda _path: chrome_trace_json(profiled),
    )
