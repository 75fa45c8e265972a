"""``winml perf``: how fast is a model, and how much memory does it take?"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli import _options, _streams
from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import end_dry_run, named_parts, options_of_part, show_parts
from winml.modelkit.cli._progress import live_progress, show_step
from winml.modelkit.cli._requests import exported_path, files_read, runnable_model, stated_fields
from winml.modelkit.errors import WinMLError
from winml.modelkit.file_names import ENCODER, ONLY_PART
from winml.modelkit.profile.verb import PerfRequest, PerfSubject, plan_perf

if TYPE_CHECKING:
    from winml.modelkit.profile.module_records import ModulePerfResult
    from winml.modelkit.profile.records import PerfResult
    from winml.modelkit.report.document import Document
    from winml.modelkit.verbs.answers import AnswerPlan

_RUNS, _WARMUP = 20, 2
"""Of ``--generation``. Chosen: a prompt of a thousand tokens takes seconds, and each length is measured on its own."""


@click.command(name="perf", cls=WinMLCommand)
@_options.model_argument(
    "ONNX file, build folder, Hub id, checkpoint or factory. A factory is file.py:function or package.module:function."
)
@_options.source_options
@_options.random_options
@_options.request_options(PerfRequest)
@_options.result_options(quiet="Do not show progress.")
def command(**options: Any) -> None:
    """Measure the latency and memory of a model, in total or by module.

    A checkpoint is exported first, once.

    Exit codes: 0 success, 1 failure, 2 usage error.

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
    request = _read_request(options)
    plan = plan_perf(request)
    end_dry_run(plan, options)
    plan.recover()
    if request.generation:
        _show_generation(request, plan, options)
    elif request.module is not None:
        _show_modules(request.module, plan, options)
    elif request.by_module:
        _show_by_module(request, plan, options)
    else:
        _show_perf(plan, options)


def _read_request(options: Mapping[str, Any]) -> PerfRequest:
    """Return the request of the command line; for a folder of several parts, of each part."""
    name = options["target"] or options["model"]
    paths: Mapping[str, Path | None] = named_parts(options, beside_weights=True) or {ONLY_PART: None}
    parts = {
        part: runnable_model(options if path is None else options_of_part(options, path))
        for part, path in paths.items()
    }
    return PerfRequest(
        name=name,
        models={part: model for part, (model, _) in parts.items()},
        values={part: values for part, (_, values) in parts.items()},
        find_files=lambda: [file for model, _ in parts.values() for file in files_read(model, options)],
        **stated_fields(PerfRequest, options),
    )


def _path(subject: PerfSubject, part: str, options: Mapping[str, object]) -> Path:
    """Return the ONNX file of a part, which is exported where there is none yet."""
    return exported_path(subject.models[part], None if options["quiet"] else show_step)


def _show_perf(plan: AnswerPlan[PerfSubject], options: Mapping[str, Any]) -> None:
    """Measure each part, and show the latencies and memory."""
    from winml.modelkit.profile.perf import PerfOptions, measure_model
    from winml.modelkit.profile.table import perf_document

    subject = plan.subject
    results: dict[str, PerfResult] = {}
    tell_baseline = None if options["quiet"] else lambda text: _streams.tell(f"baseline: {text}")
    with _streams.library_output_to_stderr(), live_progress(quiet=options["quiet"]) as progress:
        for part, run in subject.runs.items():
            requested = PerfOptions(run, subject.latency, subject.baseline)
            path = _path(subject, part, options)
            results[part] = measure_model(path, requested, progress=progress, tell=tell_baseline)
    is_one = len(results) == 1
    following = _next_step(_path(subject, next(iter(results)), options), options) if is_one else {}
    _show_parts(results, plan, options, lambda result: _with_rows(perf_document(result), following))


_MOST_BYTES = 256_000_000
"""Maximum size of a file whose fusible nodes are counted. Chosen: it takes a second or two."""


def _with_rows(document: Document, rows: Mapping[str, str]) -> Document:
    """Add rows to the summary of a document."""
    return replace(document, summary=replace(document.summary, rows=[*document.summary.rows, *rows.items()]))


def _next_step(path: Path, options: Mapping[str, Any], *, counts_nodes: bool = False) -> dict[str, str]:
    """Return the command that optimizes a plain export; ``{}`` for other files.

    Args:
        path: The measured file.
        options: Options of the command.
        counts_nodes: Also count the nodes that can be fused, and return ``{}`` if there are none.
    """
    from winml.modelkit.metadata_keys import EXPORT_KEY, QUANTIZATION_KEY
    from winml.modelkit.onnx.files.reading import read_structure

    # A checkpoint is exported into the cache, which no command names.
    if options["quiet"] or not path.is_relative_to(Path(options["target"] or options["model"])):
        return {}
    model = read_structure(path)
    keys = {entry.key for entry in model.metadata_props}
    is_plain = EXPORT_KEY in keys and QUANTIZATION_KEY not in keys
    if not is_plain or any(node.domain for node in model.graph.node):
        return {}
    output = path.with_name(f"{path.stem}_full.onnx")
    command = {"next": shlex.join(["winml", "optimize", "-m", str(path), "-o", str(output), "--level", "full"])}
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


def _show_parts(
    results: Mapping[str, Any],
    plan: AnswerPlan[PerfSubject],
    options: Mapping[str, object],
    describe: Callable[[Any], Any],
) -> None:
    """Write and print the result of one model, or those of several parts."""

    def show(record: Mapping[str, object], options: Mapping[str, Any], describe: Callable[[], Any]) -> None:
        _streams.show_answer(record, plan.files, options, describe)

    show_parts(results, options, describe, of_several=len(plan.subject.models) > 1, show=show)


def _show_generation(request: PerfRequest, plan: AnswerPlan[PerfSubject], options: Mapping[str, object]) -> None:
    """Measure prompts and steps of a generative model, and show the times."""
    from winml.modelkit.generate.generation.measurement import measure_generation
    from winml.modelkit.profile.table import generation_perf_document

    subject = plan.subject
    warmup = min(subject.latency.warmup, _WARMUP)
    latency = replace(subject.latency, iterations=request.iterations or _RUNS, warmup=warmup)
    with _streams.library_output_to_stderr():
        paths = {part: _path(subject, part, options) for part in subject.models}
        if len(paths) > 1:
            run = replace(subject.runs[ENCODER], shown=request.name)
        else:
            ((part, run),) = subject.runs.items()
            paths = {ONLY_PART: paths[part]}
        result = measure_generation(paths, run, latency)
    _streams.show_answer(result.as_record(), plan.files, options, lambda: generation_perf_document(result))


def _show_modules(selector: str, plan: AnswerPlan[PerfSubject], options: Mapping[str, Any]) -> None:
    """Measure the modules in the parts that have them, show the tables, and exit with 1 where an instance failed."""
    from winml.modelkit.builds.folder_transformation import part_modules, parts_with_module
    from winml.modelkit.profile.by_module import measure_modules
    from winml.modelkit.profile.module_table import module_perf_document

    subject = plan.subject
    parts = list(subject.models)
    if len(parts) > 1:
        paths = {part: _path(subject, part, options) for part in parts}
        parts = parts_with_module(part_modules(paths), selector)
    results: dict[str, ModulePerfResult] = {}
    for part in parts:
        with _streams.library_output_to_stderr(), live_progress(quiet=options["quiet"]) as progress:
            results[part] = measure_modules(
                _path(subject, part, options),
                selector,
                subject.runs[part],
                subject.latency,
                on_step=None if options["quiet"] else show_step,
                progress=progress,
            )
    _show_parts(results, plan, options, module_perf_document)
    failed = sum(len(result.failed) for result in results.values())
    instances = sum(len(result.instances) for result in results.values())
    if failed or not instances:
        problem = f"{failed} of {instances} instances could not be measured" if failed else "nothing to measure"
        _streams.tell(f"error: {problem}")
        click.get_current_context().exit(1)


def _show_by_module(request: PerfRequest, plan: AnswerPlan[PerfSubject], options: Mapping[str, Any]) -> None:
    """Measure, write the files, and show where the time goes."""
    from winml.modelkit.profile.by_module import profile_model
    from winml.modelkit.profile.chrome_trace import chrome_trace_json
    from winml.modelkit.profile.module_table import profile_document
    from winml.modelkit.profile.node_data import profile_node_data

    subject = plan.subject
    ((part, run),) = subject.runs.items()
    with _streams.library_output_to_stderr(), live_progress(quiet=options["quiet"]) as progress:
        measured = profile_model(_path(subject, part, options), run, subject.latency, progress=progress)
    by_class = request.group == "class"
    following = _next_step(_path(subject, part, options), options, counts_nodes=True)
    _streams.show_answer(
        measured.as_record(depth=request.depth),
        plan.files,
        options,
        lambda: _with_rows(
            profile_document(measured, depth=request.depth, top=request.top, by_class=by_class), following
        ),
        report=lambda page: _streams.page_text(profile_document(measured), page, plan.files),
        node_data=lambda _path: profile_node_data(measured),
        trace=lambda _path: chrome_trace_json(measured),
    )
