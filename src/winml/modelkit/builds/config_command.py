"""``winml config``: writes, validates and describes build configs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from winml.modelkit.builds.config_verb import ConfigRequest, plan_config, run_config
from winml.modelkit.cli import _options, _requests, _streams
from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import end_dry_run
from winml.modelkit.errors import UsageError
from winml.modelkit.fields import MODEL, OUTPUT
from winml.modelkit.verbs.named_models import model_request
from winml.modelkit.words import printable

STDIN = "-"


@click.command(name="config", cls=WinMLCommand)
@_options.model_option(
    "Hub id, checkpoint, file.py:function or ONNX file. A checkpoint is a folder or its config.json; the function, or "
    "package.module:function, returns the model.",
    is_fetched=False,
)
@_requests.config_option("Build config to start from. A file or JSON text; options take precedence over it.")
@_options.checkpoint_options
@_options.export_config_option
@_options.request_options(ConfigRequest)
@_options.option("schema", bool, "Print the JSON Schema of configs.", OUTPUT, is_common=True)
@_options.option("check", str, "Validate this config; - reads stdin.", MODEL, metavar="FILE", is_common=True)
@_options.option(
    "format_",
    str,
    "Output format of --dry-run; a config is always JSON.",
    OUTPUT,
    spelling="--format",
    short="-f",
    only=("table", "json"),
    default_words="table",
)
@_options.debug_option
def command(**options: Any) -> None:
    """Write the build config of a model as JSON.

    Task, class, inputs and opset are chosen as in winml export. No weights are read.

    Exit codes: 0 success, 1 invalid files, 2 usage error or invalid config.

    Examples:
      winml config sentence-transformers/all-MiniLM-L6-v2 -o config.json
      winml config ./checkpoint --task text-classification --no-quant
      winml config -c config.json --batch-size 4 -o config4.json
      winml config ./checkpoint | winml config --check -
      winml config --schema
    """
    makes_config = any(options[name] for name in ("model", "model_type", "config"))
    exclusive = [name for name in ("model", "model_type", "check", "schema") if options[name]]
    if len(exclusive) > 1 or (options["config"] and (options["check"] or options["schema"])):
        first_option, second_option = [*(["config"] if options["config"] else []), *exclusive][:2]
        flags = [f"--{name.replace('_', '-')}" for name in (first_option, second_option)]
        raise UsageError(f"{flags[0]} and {flags[1]} cannot be combined", hint="Use one of them.")
    for name, flag in (("output", "-o"), ("dry_run", "--dry-run")):
        if options[name] and not makes_config:
            raise UsageError(
                f"--{name.replace('_', '-')} applies to the config of a model only",
                hint=f"Specify the model, or omit {flag}.",
            )
    if options["format_"] == "table" and not options["dry_run"]:
        raise UsageError(
            "--format table requires --dry-run, since a config is JSON", hint="Add --dry-run, or omit --format."
        )
    if options["schema"]:
        from winml.modelkit.builds.config import WinMLBuildConfig

        dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
        _streams.print_json_text(_streams.plain_json_text({**dialect, **WinMLBuildConfig.model_json_schema()}))
    elif options["check"] is not None:
        _check_config(options["check"])
    elif not makes_config:
        raise UsageError(
            "no model is specified",
            hint="Specify one, or --model-type; or --check FILE to validate a config, or --schema for the schema.",
        )
    else:
        _write_config(options)


def _check_config(argument: str) -> None:
    """Validate a config and print its version and sections; raises ConfigError for an invalid config."""
    from winml.modelkit.builds.config import SECTIONS, parse_build_config
    from winml.modelkit.options import parse_json, read_json

    value, source = parse_json(sys.stdin.read(), "stdin") if argument == STDIN else read_json(argument, "--check")
    config, notes = parse_build_config(value, source)
    if config.eval is not None:
        from winml.modelkit.builds.evaluated_models import refuse_unfit_limits

        loader = config.loader.model_dump() if config.loader is not None else {}
        refuse_unfit_limits(config.eval, loader.get("task"))
    for note in notes:
        _streams.tell(f"note: {note}")
    skipped = [name for name in SECTIONS if getattr(config, name) is None]
    click.echo(f"{printable(source)}: valid, schema version {config.schema_version}")
    click.echo(f"sections: {', '.join(name for name in SECTIONS if name not in skipped) or 'none'}")
    click.echo(f"skipped: {', '.join(skipped) or 'none'}")


def _write_config(options: dict[str, Any]) -> None:
    """Decide the config of a model, and write or print it; for ``--dry-run``, print the plan alone."""
    request = _read_request(options)
    plan = plan_config(request)
    end_dry_run(plan, {**options, "format_": options["format_"] or "table"})
    for note in plan.notes:
        _streams.tell(f"note: {note}")
    with _streams.library_output_to_stderr():
        config, notes = run_config(plan)
    for note in notes:
        _streams.tell(f"note: {note}")
    if request.output is None:
        _streams.print_json(config.as_record())
        return
    _streams.write_files({request.output: lambda: f"{_streams.json_text(config.as_record())}\n"}, overwrite=True)
    _streams.tell(f"wrote {request.output}")


def _read_request(options: Mapping[str, Any]) -> ConfigRequest:
    """Return the request of the command line; options override the config.

    Raises:
        UsageError: no model is specified.
        ConfigError: the config or a size is invalid.
    """
    config = _requests.with_export_config(_requests.read_build_config(options["config"]), options["export_config"])
    configured = _requests.configured_options(options, config)
    if not options["model_type"] and not configured["model"]:
        raise UsageError("no model is specified", hint="Specify one, or --model-type: the config names no model.")
    name = "" if options["model_type"] else configured["model"]
    if config.export is not None:
        config = config.model_copy(update={"export": _requests.configured_export(config.export, options)})
    model = model_request({**configured, "model": name})
    return ConfigRequest(model=model, config=config, **_requests.stated_fields(ConfigRequest, options))
