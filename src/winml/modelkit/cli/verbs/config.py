"""``winml config``: what a build of a model will do, as a file to read, change and keep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._answers import json_text, print_json
from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._options import (
    NonEmptyPath,
    debug_option,
    dynamic_options,
    input_options,
    model_option,
    random_options,
    source_options,
    weight_options,
)
from winml.modelkit.cli._requests import model_request
from winml.modelkit.cli._streams import library_output_to_stderr, silence_library_warnings, tell
from winml.modelkit.errors import UsageError
from winml.modelkit.words import printable

if TYPE_CHECKING:
    from winml.modelkit.builds.config import WinMLBuildConfig
    from winml.modelkit.load.request import ModelRequest

__all__ = ["command"]

EPILOG = """\b
Examples:
  winml config -m sentence-transformers/all-MiniLM-L6-v2 -o config.json
  winml config -m ./checkpoint --task text-classification --no-quant
  winml config -m ./checkpoint | winml config --check -
  winml config --schema
"""

STDIN = "-"


@click.command(name="config", cls=WinMLCommand, epilog=EPILOG)
@model_option(required=False, help="Hub id, checkpoint folder, config.json, file.py:factory or package.module:factory.")
@source_options
@weight_options
@random_options
@input_options
@dynamic_options
@click.option("--device", type=click.Choice(["cpu", "gpu", "npu"]), help="Kind of device it will run on.")
@click.option("--ep", metavar="NAME", help="Execution provider it will run on.")
@click.option("--precision", metavar="NAME", help="fp32, fp16, bf16, int8, int4, w8a16 and the like, or auto.")
@click.option("--no-quant", is_flag=True, help="Skip quantization.")
@click.option("--no-compile", is_flag=True, help="Skip compilation.")
@click.option("-o", "--output", type=NonEmptyPath(), help="File to write; stdout where it is left out.")
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there already.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of the config instead.")
@click.option("--check", metavar="FILE", help="Check a config instead; - reads stdin.")
@debug_option
def command(**options: Any) -> None:
    """Write what a build of a model will do, as JSON; no weight is read.

    Task, class and inputs are those that winml export decides. Exit codes: 0 done, 1 the files are wrong, 2 wrong usage
    or an invalid config.
    """
    exclusive = [name for name in ("model", "check", "schema") if options[name]]
    if len(exclusive) > 1:
        raise UsageError(f"--{exclusive[0]} and --{exclusive[1]} ask for different answers", hint="Give one of them.")
    if options["output"] is not None and options["model"] is None:
        raise UsageError("--output is for the config of a model", hint="Give the model with -m, or leave -o out.")
    if options["schema"]:
        print_json(_json_schema())
    elif options["check"] is not None:
        _check_config(options["check"])
    elif options["model"] is None:
        raise UsageError(
            "no model was given", hint="Give one with -m; or --check FILE to check a config, --schema for its schema."
        )
    else:
        _write_config(options)


def _json_schema() -> dict[str, Any]:
    from winml.modelkit.builds.config import WinMLBuildConfig

    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **WinMLBuildConfig.model_json_schema()}


def _check_config(place: str) -> None:
    from winml.modelkit.builds.config import SECTIONS, parse_build_config
    from winml.modelkit.options import parse_json, read_json

    value, source = parse_json(sys.stdin.read(), "stdin") if place == STDIN else read_json(place, "--check")
    config, notes = parse_build_config(value, source)
    for note in notes:
        tell(f"note: {note}")
    skipped = [name for name in SECTIONS if getattr(config, name) is None]
    click.echo(f"{printable(source)}: valid, schema version {config.schema_version}")
    click.echo(f"sections: {', '.join(name for name in SECTIONS if name not in skipped) or 'none'}")
    click.echo(f"skipped: {', '.join(skipped) or 'none'}")


def _write_config(options: dict[str, Any]) -> None:
    config = _config_of_options(options)
    request = model_request(options)
    output: Path | None = options["output"]
    _refuse_early(request, options)
    silence_library_warnings(debug=options["debug"])
    from winml.modelkit.builds.config_resolution import resolve_build_config

    with library_output_to_stderr():
        resolved, notes = resolve_build_config(config, request)
    for note in notes:
        tell(f"note: {note}")
    if output is None:
        print_json(resolved.as_record())
        return
    from winml.modelkit.graph.files.output_files import OutputFiles

    with OutputFiles() as files:
        files.reserve(output).write_text(f"{json_text(resolved.as_record())}\n", encoding="utf-8")
        files.commit()
    tell(f"wrote {output}")


def _refuse_early(request: ModelRequest, options: dict[str, Any]) -> None:
    """Refuse what names and paths show to be wrong, before torch is imported, which takes seconds."""
    from winml.modelkit.graph.files.output_files import refuse_existing, refuse_inputs
    from winml.modelkit.load.request import resolve_source
    from winml.modelkit.runtime.execution_providers import refuse_dynamic

    refuse_dynamic(options["ep"], is_dynamic=request.is_dynamic, allow_dynamic=options["allow_dynamic"])
    source = resolve_source(request, needs_weights=False)
    if options["output"] is not None:
        refuse_inputs([options["output"]], source.files)
        refuse_existing([options["output"]], overwrite=options["overwrite"])


def _config_of_options(options: dict[str, Any]) -> WinMLBuildConfig:
    """Return the config as far as the options say it.

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
    given = {
        "quant": None if options["no_quant"] else {**precision, **place},
        "compile": None if options["no_compile"] else place,
    }
    config: WinMLBuildConfig = parse_build_config(given, "options")[0]
    return config
