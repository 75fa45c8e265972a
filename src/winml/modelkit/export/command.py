"""``winml export``: conversion of a model to an ONNX file with the modules of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli import _requests
from winml.modelkit.cli._errors import WinMLCommand, named_options
from winml.modelkit.cli._folders import end_dry_run
from winml.modelkit.cli._options import (
    checkpoint_options,
    export_config_option,
    grouped_option,
    model_option,
    request_options,
    result_options,
    tree_options,
)
from winml.modelkit.cli._progress import show_step
from winml.modelkit.cli._streams import library_output_to_stderr, show_result, tell
from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.export.declared_options import DynamicFields, ExportFields
from winml.modelkit.export.verb import ExportRequest, PinRequest, plan_export, refuse_unloadable, run_export
from winml.modelkit.fields import ADVANCED, fields_of
from winml.modelkit.file_names import files_folder
from winml.modelkit.models.load_options import declared_options
from winml.modelkit.onnx.files.named_paths import named_path
from winml.modelkit.verbs.named_models import model_request, read_export_config, sizes_by_name

if TYPE_CHECKING:
    from winml.modelkit.export.records import ExportResult
    from winml.modelkit.transform.records import PinnedModel

_FOR_PYTORCH_MODELS = (
    *(option.name for option in declared_options() if not option.is_for_onnx),
    *(option.name for option in (*fields_of(DynamicFields), *fields_of(ExportFields)) if option.name != "verify"),
    "input_specs", "dynamic_axes", "config", "export_config", "clean_onnx", "with_report", "functions",
)  # fmt: skip
"""Options that say how a graph is made from a PyTorch model."""


def _is_pinning(options: Mapping[str, object]) -> bool:
    """Return True if the model is an ONNX file, whose sizes can be fixed.

    Raises:
        ModelPathError: it has the name of one, and nothing can be there.
    """
    model = str(options["model"] or "").strip()
    return PurePath(model).suffix.lower() == ".onnx" and not named_path(model).is_dir()


def _sizes_hint(path: Path) -> str:
    """Return how a dynamic dimension of an ONNX file is fixed, by its name in the file."""
    from winml.modelkit.onnx.files.reading import read_structure
    from winml.modelkit.onnx.specs import stated_bounds

    try:
        model = read_structure(path)
    except InputError:  # damaged: the request is wrong whatever is in it
        return "Export its source:"
    shapes = (value.type.tensor_type.shape for value in model.graph.input)
    name = next((size.dim_param for shape in shapes for size in shape.dim if size.dim_param), None)
    if name is None:
        return "It has no named dynamic dimension. Export its source:"
    bounds = stated_bounds({entry.key: entry.value for entry in model.metadata_props}).get(name)
    sizes = json.dumps({name: 1 if bounds is None else bounds.clamp(1)})
    return f"Fix its dynamic dimensions with --shape-config '{sizes}', or export its source:"


def pin(options: Mapping[str, Any]) -> None:
    """Fix dynamic dimensions of an ONNX file and show the result, or the plan.

    Raises:
        UsageError: an option that has no meaning here, or a name the file does not have.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in _FOR_PYTORCH_MODELS and _requests.is_stated(context, parameter.name):
            flag = [*parameter.opts, *parameter.secondary_opts][-1]
            raise UsageError(
                f"{flag} does not apply to ONNX files, of which only the sizes can be fixed",
                hint="Omit it, or export the PyTorch model again.",
            )
    if not (options["shape_config"] or options["batch_size"]):
        raise UsageError(
            f"{options['model']}: is an ONNX file, and no size to fix is specified",
            hint=f"{_sizes_hint(named_path(options['model'].strip()))} a checkpoint folder, config.json, Hub id or "
            "file.py:function.",
        )
    from winml.modelkit.options import Options

    request = PinRequest(
        options=Options(),
        model=named_path(options["model"].strip()),
        output=options["output"],
        overwrite=options["overwrite"],
        verify=options["verify"],
        seed=options["seed"],
        sizes=sizes_by_name(options),
    )
    if not options["shape_config"]:
        named_options(context)["shape_config"] = "--batch-size"
    plan = request.plan_file()
    end_dry_run(plan, options)
    result: PinnedModel = plan.run_file()
    from winml.modelkit.transform.table import pinned_document
    from winml.modelkit.verbs.next_commands import measuring_command

    following = measuring_command("perf", [result.model_path], [])
    record = {**result.as_record(), "next": following}
    show_result(record, options, lambda: pinned_document(result, options["model"]).with_next(following))


@click.command(name="export", cls=WinMLCommand)
@model_option(
    "Hub id, checkpoint or file.py:function. A checkpoint is a folder or its config.json; the function, or "
    "package.module:function, returns the model. An ONNX file is exported with fixed sizes. "
    "Without MODEL, --config names the model.",
    is_fetched=False,
)
@checkpoint_options
@request_options(ExportRequest)
@export_config_option
@grouped_option("--clean-onnx", is_flag=True, hidden=True, group=ADVANCED, help="Deprecated: use --no-hierarchy.")
@tree_options("Show more detail: the module tree with node counts.")
@result_options()
def command(**options: Any) -> None:
    """Export a PyTorch or Hugging Face model to ONNX. Every node is tagged with its module.

    The outputs of the file are compared with PyTorch before it is written.

    Exit codes: 0 success, 1 failure, 2 usage error, 3 the outputs differ from PyTorch beyond tolerance.

    Examples:
      winml export sentence-transformers/all-MiniLM-L6-v2 -o model.onnx -v
      winml export ./checkpoint -o model.onnx --shape-config sequence_length=64
      winml export ./checkpoint -o model.onnx --dynamic-batch --dynamic-seq-len
      winml export model.py:build -o model.onnx --input-specs inputs.json
      winml export -c config.json -o model.onnx --opset 18
      winml export dynamic.onnx -o static.onnx --shape-config batch_size=1
    """
    if _is_pinning(options):
        pin(options)
        return
    plan = plan_export(_read_request(options))
    if options["clean_onnx"] and not options["quiet"]:
        tell("warning: --clean-onnx is deprecated; use --no-hierarchy")
    end_dry_run(plan, options, refuse_unloadable)
    with library_output_to_stderr():
        result = run_export(plan, None if options["quiet"] else show_step)
    _show_result(result, options)


def _read_request(options: Mapping[str, Any]) -> ExportRequest:
    """Return the request of the command line, which takes precedence over the config.

    Raises:
        UsageError: nothing names a model, or ``--depth`` stands without ``-v``.
        ConfigError: a config is wrong.
    """
    if options["depth"] is not None and not options["verbose"]:
        raise UsageError(f"--depth {options['depth']} applies to the module tree, which -v shows", hint="Add -v.")
    from winml.modelkit.export.config import SECTION_OPTIONS, WinMLExportConfig

    configured, config = options, WinMLExportConfig()
    if options["config"]:
        # Not without one: a build config has the options of all stages, which take long to import.
        build_config = _requests.read_build_config(options["config"], section="export")
        configured = _requests.configured_options(options, build_config)
        config = _requests.export_section(build_config)
    if not configured["model"]:
        raise UsageError("no model is specified", hint="Specify one, or a config whose loader section names a model.")
    origin = "export.{}"
    alone = read_export_config(options["export_config"]) if options["export_config"] else None
    if alone is not None:
        config = config.model_copy(update=alone.stated_options())
    config = _requests.configured_export(config, options)
    if alone is not None:
        origin = "{} in --export-config"
        _requests.name_section_keys(alone, SECTION_OPTIONS, options, origin)
    stated_fields = _requests.stated_fields(ExportFields, options)
    if options["clean_onnx"]:
        stated_fields["hierarchy"] = False
    config = config.model_copy(update=stated_fields)
    requested = _requests.stated_fields(ExportRequest, options)
    return ExportRequest(model=model_request(configured), config=config, origin=origin, **requested)


def _show_result(result: ExportResult, options: Mapping[str, Any]) -> None:
    from winml.modelkit.report.module_tree import TreeLimits

    has_tree = options["verbose"] and any(part.coverage.tagged for part in result.parts)
    limits = TreeLimits(options["depth"], folds=options["verbose"] < 2) if has_tree else None
    following = _next_command(result)
    record = {**result.as_record(), "next": following}
    # With other companion files, the folder may be read as another model's.
    warnings = [*result.companions.notes, *(entry.message for part in result.parts for entry in part.unaccepted)]
    show_result(record, options, lambda: result.document(limits).with_next(following), warnings=warnings)


def _next_command(result: ExportResult) -> str:
    """Return the command that acts on an export: the optimization of one graph; several parts are run."""
    from winml.modelkit.verbs.next_commands import running_command, transforming_command

    if len(result.parts) == 1 and result.only_part.functions is None:
        return transforming_command("optimize", result.only_part.model_path, ["--level", "full"], suffix="full")
    return running_command(
        files_folder(result.parts[0].model_path), {part.name: part.model_path for part in result.parts}
    )
