"""``winml build``: builds a model into a folder, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.builds.verb import BuildRequest, plan_requested_build, refuse_unloadable, run_planned_build
from winml.modelkit.cli import _options, _requests
from winml.modelkit.cli._endings import Interrupted, resuming_words
from winml.modelkit.cli._errors import NEGATIVE_RESULT, WinMLCommand
from winml.modelkit.cli._folders import end_dry_run
from winml.modelkit.cli._streams import library_output_to_stderr, show_result, tell
from winml.modelkit.errors import UsageError
from winml.modelkit.fields import fields_of
from winml.modelkit.file_names import DECODER, VAE_DECODER
from winml.modelkit.quantize.declared_options import QuantizeFields
from winml.modelkit.quantize.precisions import PRECISIONS
from winml.modelkit.verbs.named_models import model_request

if TYPE_CHECKING:
    from winml.modelkit.builds.build import BuildListener
    from winml.modelkit.builds.manifest_records import BuildResult
    from winml.modelkit.progress import StepEvent

_PRECISION: dict[str, Any] = {
    "only": (*PRECISIONS, "auto"),
    "text": "Precision of the quantized modules. auto: the usual one of the device in the config.",
    "default_words": "no quantization",
}
_FIELDS = tuple(
    replace(field, default=None, **(_PRECISION if field.name == "precision" else {}))
    for field in fields_of(QuantizeFields)
    if field.name != "ep"
)
"""Options of the quantize stage; an unstated one leaves the value of the config. ``ep`` is an option of the build."""


@click.command(name="build", cls=WinMLCommand)
@_options.model_option(
    "Hub id, checkpoint, file.py:function or ONNX file. A checkpoint is a folder or its config.json; the function, or "
    "package.module:function, returns the model.",
    is_fetched=False,
)
@_requests.config_option(
    "Build config, as winml config writes it. A file or JSON text; options take precedence over it."
)
@_options.request_options(BuildRequest)
@_options.declared_options_of(_FIELDS)
@_options.checkpoint_options
@_options.export_config_option
@_options.result_options(verbose="Show more detail: every step of a stage.")
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Export, optimize, quantize and compile a model into one folder.

    Each stage writes an ONNX file; the last one is model.onnx. Up-to-date stages are skipped.

    Exit codes: 0 success, 1 failure, 2 usage error, 3 a stage changed the outputs beyond tolerance, or the result
    misses a limit of the eval section.

    Examples:
      winml build sentence-transformers/all-MiniLM-L6-v2 -o built --level basic
      winml config ./checkpoint -o config.json && winml build -c config.json -o built
      winml build model.onnx -o built --level extended --ep dml
      winml build ./checkpoint -o built --ep qnn --ep-options soc_model=60
      winml build ./checkpoint -o built --precision int8 --exclude BertLayer.0
    """
    request = _read_request(options)
    if "package" in (request.layout, request.config.layout):
        _build_package(request, options)
        return
    with library_output_to_stderr():
        plan = plan_requested_build(request)
    end_dry_run(plan, options, refuse_unloadable)
    finished_stages: list[str] = []
    try:
        with library_output_to_stderr():
            result = run_planned_build(plan, request, make_listener(options, finished_stages))
    except KeyboardInterrupt:
        ending = (
            f"completed: {', '.join(finished_stages)}; the same command resumes there"
            if finished_stages
            else resuming_words() or "no stage was completed"
        )
        raise Interrupted(ending) from None
    show_build(result, options)
    if result.evaluation is not None and not result.evaluation.is_good_enough:
        context.exit(NEGATIVE_RESULT)


def _build_package(request: BuildRequest, options: Mapping[str, Any]) -> None:
    """Build a model package, and print it."""
    from winml.modelkit.builds.layouts.layout import BuiltFolder
    from winml.modelkit.builds.layouts.package import package_usage
    from winml.modelkit.builds.package_verb import plan_package, run_package

    with library_output_to_stderr():
        plan = plan_package(request)
    end_dry_run(plan, options)
    with library_output_to_stderr():
        result = run_package(plan, make_listener(options, []))
    opened = BuiltFolder(str(result.folder), "", (), result.parts[0], has_processors=False)
    show_result(result.as_record(), options, lambda: result.document(package_usage(opened)))


def _read_request(options: Mapping[str, Any]) -> BuildRequest:
    """Return the request of the command line; options override the config.

    Raises:
        UsageError: no model is specified, sizes are stated for an ONNX file, or options contradict each other.
        ConfigError: the config or the value of an option is invalid.
    """
    from winml.modelkit.builds.config import QuantSection
    from winml.modelkit.builds.plan import is_onnx_path, refuse_sizes
    from winml.modelkit.options import parse_options

    config = _requests.with_export_config(_requests.read_build_config(options["config"]), options["export_config"])
    configured = _requests.configured_options(options, config)
    model = configured["model"]
    if not model:
        raise UsageError("no model is specified", hint="Specify one, or a config whose loader section names a model.")
    # Refused before the sizes are parsed: their keys are those of checkpoints, not inputs of an ONNX file.
    for option in ("shape_config", "batch_size"):
        if is_onnx_path(model) and options[option]:
            refuse_sizes(model, option, str(options[option]))
    section, stated_options = config.quant, _requests.stated_values(_FIELDS, options)
    if options["quant"] is False:
        names_provider = options["ep"] or (config.compile is not None and config.compile.ep)
        # With a provider, the minimum SQNR applies to the compiled file.
        if unused := [
            field.flag
            for field in _FIELDS
            if field.name in stated_options and not (names_provider and field.name == "min_sqnr_db")
        ]:
            raise UsageError(f"{unused[0]} has no effect with --no-quant", hint="Omit one of them.")
    if stated_options:
        base = {} if section is None else section.model_dump(mode="json", exclude_unset=True)
        section = parse_options(QuantSection, {**base, **stated_options}, "options")
    _requests.name_section_keys(config.compile, ("ep", "ep_options"), options, "compile.{}")
    sections: dict[str, Any] = {
        "quant": section,
        "export": config.export and _requests.configured_export(config.export, options),
    }
    if options["min_sqnr_db"] is not None and config.compile is not None:
        # The limit applies to every stage that runs: the compiled file is compared as well.
        sections["compile"] = config.compile.model_copy(update={"min_sqnr_db": options["min_sqnr_db"]})
    return BuildRequest(
        model=model_request(configured),
        config=config.model_copy(update=sections),
        **_requests.stated_fields(BuildRequest, options),
    )


def make_listener(options: Mapping[str, object], finished_stages: list[str]) -> BuildListener:
    """Return a listener that shows progress and adds the names of finished stages to ``finished_stages``."""
    from winml.modelkit.builds.build import BuildListener
    from winml.modelkit.cli._progress import show_step

    def show_finished(event: StepEvent) -> None:
        # The line of the running stage would appear between the lines of its steps.
        if event.finished is not None:
            show_step(event)

    verbose, quiet = options["verbose"], options["quiet"]
    return BuildListener(
        on_stage=None if quiet else show_finished if verbose else show_step,
        on_step=show_step if verbose and not quiet else None,
        on_stored=finished_stages.append,
        tell=tell,
    )


def show_build(result: BuildResult, options: Mapping[str, object]) -> None:
    """Print the result of a build."""
    stages = (stage for part in result.manifest.parts for stage in part.stages)
    assumed = [] if options.get("accept_assumptions") else [entry for stage in stages for entry in stage.assumed]
    warnings = [entry["message"] for entry in assumed]
    show_result(result.as_record(), options, lambda: result.document(*_ways_to_run(result)), warnings=warnings)


def _ways_to_run(result: BuildResult) -> tuple[str, Sequence[str]]:
    """Return a command that runs the built model or inspects the folder, and code that opens it in its runtime."""
    from winml.modelkit.builds.layouts.layout import BuiltFolder, find_layout
    from winml.modelkit.onnx.files.reading import read_structure
    from winml.modelkit.verbs.next_commands import running_command, task_command

    folder, parts = result.folder, result.part_paths
    following = running_command(folder, parts)
    if VAE_DECODER in parts:
        return following, ()
    task, command = task_command(folder, parts)
    path = parts.get(DECODER) or next(iter(parts.values()))
    inputs = tuple(value.name for value in read_structure(path).graph.input)
    opened = BuiltFolder(str(folder), task, inputs, path.stem, has_processors=command is not None)
    return following, find_layout(result.manifest.layout).usage(opened)
