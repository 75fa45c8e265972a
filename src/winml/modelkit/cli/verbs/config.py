"""``winml config``: what a build of a model will do, as a file to read, change and keep."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._options import (
    NonEmptyPath,
    debug_option,
    device_option,
    dynamic_options,
    input_options,
    model_option,
    random_options,
    source_options,
    weight_options,
)
from winml.modelkit.cli._requests import (
    config_option,
    configured_options,
    export_section_keys,
    model_request,
    read_build_config,
    with_sizes,
)
from winml.modelkit.cli._streams import (
    library_output_to_stderr,
    print_json,
    refuse_outputs,
    silence_library_warnings,
    tell,
    write_result,
)
from winml.modelkit.errors import UsageError, rename_options
from winml.modelkit.quantize.precisions import PRECISIONS
from winml.modelkit.words import printable

if TYPE_CHECKING:
    from winml.modelkit.builds.config import QuantSection, WinMLBuildConfig
    from winml.modelkit.load.request import ModelRequest

__all__ = ["command"]

EPILOG = """\b
Examples:
  winml config -m sentence-transformers/all-MiniLM-L6-v2 -o config.json
  winml config -m ./checkpoint --task text-classification --no-quant
  winml config -c config.json --batch-size 4 -o config4.json
  winml config -m ./checkpoint | winml config --check -
  winml config --schema
"""

STDIN = "-"


@click.command(name="config", cls=WinMLCommand, epilog=EPILOG)
@model_option(
    required=False,
    help="Hub id, checkpoint folder, config.json, file.py:factory, package.module:factory, or an .onnx file.",
)
@click.option("--model-type", help="Architecture such as bert, in place of a model.")
@config_option("A config to begin with, whose model may stand for -m; a file or text. Options win over it.")
@source_options
@weight_options
@random_options
@input_options
@dynamic_options
@device_option("Kind of device it will run on.")
@click.option("--ep", metavar="NAME", help="Execution provider it will run on.")
@click.option("-p", "--precision", metavar="NAME", help=f"{', '.join(PRECISIONS)}, or auto: by the device.")
@click.option("--no-quant", is_flag=True, help="Skip quantization.")
@click.option("--no-compile", is_flag=True, help="Skip compilation.")
@click.option("-o", "--output", type=NonEmptyPath(), help="File to write; stdout where it is left out.")
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there already.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of the config instead.")
@click.option("--check", metavar="FILE", help="Check a config instead; - reads stdin.")
@debug_option
@click.pass_context
def command(context: click.Context, /, **options: Any) -> None:
    """Write what a build of a model will do, as JSON; no weight is read.

    Task, class, inputs and opset are those that winml export decides. Exit codes: 0 done, 1 the files are wrong, 2
    wrong usage or an invalid config.
    """
    makes_config = any(options[name] for name in ("model", "model_type", "config"))
    exclusive = [name for name in ("model", "model_type", "check", "schema") if options[name]]
    if len(exclusive) > 1 or (options["config"] and (options["check"] or options["schema"])):
        first, second = [*(["config"] if options["config"] else []), *exclusive][:2]
        flags = [f"--{name.replace('_', '-')}" for name in (first, second)]
        raise UsageError(f"{flags[0]} and {flags[1]} ask for different answers", hint="Give one of them.")
    if options["output"] is not None and not makes_config:
        raise UsageError("--output is for the config of a model", hint="Give the model with -m, or leave -o out.")
    if options["schema"]:
        print_json(_json_schema())
    elif options["check"] is not None:
        _check_config(options["check"])
    elif not makes_config:
        raise UsageError(
            "no model was given",
            hint="Give one with -m, or --model-type; or --check FILE to check a config, --schema for its schema.",
        )
    else:
        _write_config(context, options)


def _json_schema() -> dict[str, object]:
    from winml.modelkit.builds.config import WinMLBuildConfig

    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **WinMLBuildConfig.model_json_schema()}


def _check_config(place: str) -> None:
    from winml.modelkit.builds.config import SECTIONS, parse_build_config
    from winml.modelkit.options import parse_json, read_json

    value, source = parse_json(sys.stdin.read(), "stdin") if place == STDIN else read_json(place, "--check")
    config, notes = parse_build_config(value, source)
    if config.eval is not None:
        from winml.modelkit.builds.evaluated_models import refuse_unfit_limits

        loader = config.loader.model_dump() if config.loader is not None else {}
        refuse_unfit_limits(config.eval, loader.get("task"))
    for note in notes:
        tell(f"note: {note}")
    skipped = [name for name in SECTIONS if getattr(config, name) is None]
    click.echo(f"{printable(source)}: valid, schema version {config.schema_version}")
    click.echo(f"sections: {', '.join(name for name in SECTIONS if name not in skipped) or 'none'}")
    click.echo(f"skipped: {', '.join(skipped) or 'none'}")


def _write_config(context: click.Context, options: dict[str, Any]) -> None:
    base = read_build_config(options["config"])
    passed = configured_options(context, options, base)
    if options["model_type"]:
        passed.options["model"] = None
    elif not passed.options["model"]:
        raise UsageError("no model was given", hint="Give one with -m, or --model-type; the config names none.")
    words = {**passed.words, **export_section_keys(base.export, options, "export.{}")}
    with rename_options(words):
        config = _config_of_options(base, passed.options)
        request = model_request({**passed.options, "model": passed.options["model"] or ""})
        _refuse_early(config, request, passed.options)
        silence_library_warnings(debug=options["debug"])
        resolved, notes = _resolved_config(config, request, options["model_type"])
    for note in notes:
        tell(f"note: {note}")
    _put_config(resolved, options)


def _resolved_config(
    config: WinMLBuildConfig, request: ModelRequest, model_type: str | None
) -> tuple[WinMLBuildConfig, tuple[str, ...]]:
    from winml.modelkit.builds.plan import is_onnx_path, plan_build

    if is_onnx_path(request.model):
        from winml.modelkit.builds.stages import without_idle_stages

        # Decided by the file alone: nothing of it has to be read.
        return without_idle_stages(plan_build(config, request).config)
    with library_output_to_stderr():
        from winml.modelkit.builds.config_resolution import resolve_build_config

        return resolve_build_config(config, request, model_type=model_type)


def _put_config(resolved: WinMLBuildConfig, options: Mapping[str, Any]) -> None:
    output: Path | None = options["output"]
    if output is None:
        print_json(resolved.as_record())
        return
    write_result(output, resolved.as_record(), overwrite=True)
    tell(f"wrote {output}")


def _refuse_early(config: WinMLBuildConfig, request: ModelRequest, options: Mapping[str, Any]) -> None:
    """Refuse what names and paths show to be wrong, before torch is imported, which takes seconds."""
    from winml.modelkit.builds.plan import is_onnx_path, plan_build
    from winml.modelkit.load.request import resolve_source
    from winml.modelkit.runtime.execution_providers import refuse_dynamic

    files: tuple[Path, ...] = ()
    if is_onnx_path(request.model):
        plan = plan_build(config, request)
        files = (plan.onnx_path,) if plan.onnx_path is not None else ()
    else:
        is_dynamic = request.is_dynamic or (config.export is not None and not config.export.dynamic.is_empty)
        refuse_dynamic(options["ep"], is_dynamic=is_dynamic, allow_dynamic=options["allow_dynamic"])
        files = () if options["model_type"] else resolve_source(request, needs_weights=False).files
    if options["output"] is not None:
        refuse_outputs([options["output"]], files, overwrite=options["overwrite"])


def _config_of_options(base: WinMLBuildConfig, options: dict[str, object]) -> WinMLBuildConfig:
    """Return the config with what the options say; an option wins.

    Raises:
        UsageError: an option asks for something of a stage that is skipped.
        ConfigError: an option has no valid value.
    """
    from winml.modelkit.builds.config import parse_build_config

    place = {key: options[key] for key in ("device", "ep") if options[key] is not None}
    precision = {} if options["precision"] is None else {"precision": options["precision"]}
    if precision and options["no_quant"]:
        raise UsageError("--precision has no meaning with --no-quant", hint="Leave one of them out.")
    if place and options["no_quant"] and options["no_compile"]:
        raise UsageError(
            f"--{next(iter(place))} has no meaning with both --no-quant and --no-compile: no stage is left to read it",
            hint="Leave it out.",
        )
    passed = {"quant": {**precision, **place}, "compile": place}
    requested = parse_build_config({name: values for name, values in passed.items() if values}, "options")[0]
    changed: dict[str, Any] = {}
    for name, values in passed.items():
        if options[f"no_{name}"]:
            changed[name] = None
        # A place alone begins no quantization that the config leaves out.
        elif values and not (name == "quant" and base.quant is None and not precision):
            section = getattr(base, name) or getattr(requested, name)
            changed[name] = section.model_copy(update=values)
    if changed.get("quant") is not None:
        changed["quant"] = _with_decided_precision(changed["quant"])
    if base.export is not None:
        export = with_sizes(base.export, options)
        changed["export"] = export.model_copy(update={"allow_dynamic": True}) if options["allow_dynamic"] else export
    config: WinMLBuildConfig = base.model_copy(update=changed)
    return config


def _with_decided_precision(section: QuantSection) -> QuantSection:
    """Return a section with the precision that the device decides where none is named; which one is told."""
    from winml.modelkit.builds.config import AUTO_PRECISION
    from winml.modelkit.builds.quantization import auto_words, quantize_options, with_precision

    if section.precision is None:
        section = with_precision(section, AUTO_PRECISION)
    if words := auto_words(section):
        tell(f"note: {words}")
    return with_precision(section, quantize_options(section).base.name)
