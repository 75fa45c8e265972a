"""``winml inspect``: the contents of a model, without reading weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import NEGATIVE_RESULT, WinMLCommand
from winml.modelkit.cli._folders import show_parts
from winml.modelkit.cli._options import (
    input_options,
    model_option,
    option,
    result_options,
    source_options,
    tree_options,
)
from winml.modelkit.cli._progress import show_step, show_wait
from winml.modelkit.cli._requests import exported_path
from winml.modelkit.cli._streams import library_output_to_stderr, show_result
from winml.modelkit.errors import UsageError
from winml.modelkit.fields import DEVICE, MODEL, OUTPUT
from winml.modelkit.file_names import ONLY_PART
from winml.modelkit.models.load_options import declared_options
from winml.modelkit.ort.execution_providers import Device, find_execution_provider, parse_ep_options
from winml.modelkit.progress import counted
from winml.modelkit.verbs.named_models import model_request, named_parts, options_of_part, refuse_checkpoint_options
from winml.modelkit.words import command_line

if TYPE_CHECKING:
    from winml.modelkit.inspect.onnx_inspection import OnnxInspection
    from winml.modelkit.inspect.provider_fit import ProviderFit
    from winml.modelkit.models.request import ModelRequest
    from winml.modelkit.report.module_tree import TreeLimits

FOR_CHECKPOINTS = (
    "model_type",
    "list_tasks",
    *(option.name for option in declared_options()),
    "input_specs",
    "shape_config",
    "batch_size",
)
"""Options for loading and exporting a checkpoint, refused for an ONNX file."""


@click.command(name="inspect", cls=WinMLCommand)
@model_option(
    "ONNX file, build folder, Hub id, checkpoint or file.py:function. The function, or package.module:function, "
    "returns the model."
)
@option("model_type", str, "Architecture, such as bert, instead of a model.", MODEL, metavar="TYPE", is_common=True)
@source_options
@option("list_tasks", bool, "List the tasks of the architecture, or all tasks without a model.", OUTPUT, is_common=True)
@option("hierarchy", bool, "Show the module tree.", OUTPUT, short="-H", is_common=True)
@option(
    "module",
    str,
    "Show these modules and their nodes. Requires an ONNX file.",
    OUTPUT,
    metavar="SELECTOR",
    is_common=True,
)
@input_options
@tree_options("Show more detail: every operator and initializer.")
@option(
    "ep",
    str,
    "Show which nodes this execution provider, such as qnn, does not run, and what to do.",
    DEVICE,
    metavar="NAME",
    is_common=True,
)
@option("device", Device, "Kind of device.", DEVICE, short="-d", default_words="that of the execution provider")
@option("ep_options", str, "Option of the execution provider.", DEVICE, is_repeatable=True, metavar="KEY=VALUE")
@result_options(quiet="")
def command(**options: object) -> None:
    """Show the contents of an ONNX model, or the planned export of a checkpoint.

    ONNX files: inputs and outputs, operators, sizes and module tree. Checkpoints: task, class, inputs and modules of
    the export. No weights are read. With --ep, a checkpoint is exported first, once.

    Exit codes: 0 success, 1 invalid files, 2 usage error, 3 the execution provider does not run all nodes.

    Examples:
      winml inspect model.onnx -H
      winml inspect model.onnx --module 'encoder.layer.0.**'
      winml inspect model.onnx --ep qnn
      winml inspect sentence-transformers/all-MiniLM-L6-v2 --hierarchy
      winml inspect --model-type bert --list-tasks
      winml inspect --model-class BertForMaskedLM
    """
    parts = named_parts(options)
    # Each part is a file: errors in the options apply to all parts.
    file_options = options_of_part(options, next(iter(parts.values()))) if parts else options
    model = _refuse_early(file_options)
    if len(parts) > 1:
        _print_files(parts, options, file_options)
    elif model is not None and model.lower().endswith(".onnx"):
        _print_files({ONLY_PART: Path(model)}, options, file_options)
    elif model is None and options["list_tasks"] and not (options["model_type"] or options["model_class"]):
        _print_all_tasks(options)
    else:
        _print_model_inspection(model, options)


def _refuse_early(options: Mapping[str, Any]) -> str | None:
    """Return the model; check its name and the options before heavy imports.

    Raises:
        UsageError: no model is specified, or options contradict each other.
    """
    name: str | None = options["model"]
    if name is not None and options["model_type"]:
        raise UsageError(
            f"--model-type {options['model_type']} and the model {name!r} cannot be combined", hint="Use one of them."
        )
    if name is None and not any(options[name] for name in ("model_type", "model_class", "list_tasks")):
        raise UsageError(
            "no model is specified",
            hint="Pass an ONNX file, a Hub id, a checkpoint folder, a config.json or file.py:function; or --model-type "
            "or --model-class.",
        )
    if options["depth"] is not None and not options["hierarchy"] and options["module"] is None:
        raise UsageError(f"--depth {options['depth']} applies to the module tree, which -H shows", hint="Add -H.")
    model = None if name is None else _find_file(name)
    is_file = model is not None and model.lower().endswith(".onnx")
    _refuse_provider(options, model)
    if options["module"] is not None and not is_file:
        raise UsageError("--module requires an ONNX file", hint="Use --hierarchy to see the module tree.")
    if model is not None and not is_file:
        request = model_request({**options, "model": model})
        if options["ep"] is None:
            from winml.modelkit.models.request import resolve_source

            resolve_source(request, needs_weights=False)
        else:
            _refuse_export(request, options)
    return model


def _refuse_export(request: ModelRequest, options: Mapping[str, Any]) -> None:
    """Check that a model can be exported for a provider, before the cache is written to.

    Raises:
        WinMLError: the model cannot be exported, or the provider is not installed and has no operator table.
    """
    from winml.modelkit.builds.cache import plan_cached_export
    from winml.modelkit.inspect.provider_check import checked_provider

    plan_cached_export(request)
    checked_provider(options["ep"], options["device"], parse_ep_options(options["ep_options"]))


def _refuse_provider(options: Mapping[str, Any], model: str | None) -> None:
    """Refuse an unknown provider, provider options without a provider, and a provider without a model.

    Raises:
        UsageError: names the option or the provider.
    """
    if options["ep"] is not None:
        find_execution_provider(options["ep"])
    parse_ep_options(options["ep_options"])
    for name in ("device", "ep_options"):
        if options[name] and options["ep"] is None:
            raise UsageError(f"--{name.replace('_', '-')} requires an execution provider", hint="Add --ep NAME.")
    if options["ep"] is not None and (model is None or options["list_tasks"]):
        raise UsageError(
            f"--ep {options['ep']} requires a model",
            hint="Specify an ONNX file, or a checkpoint, which is exported first.",
        )


def _find_file(name: str) -> str:
    """Return the ONNX file of a name: in a build or export folder, or on the Hub; else the name itself."""
    from winml.modelkit.builds.found_models import onnx_file, onnx_file_in
    from winml.modelkit.models.checkpoints.hub import hub_file

    path = onnx_file(name) if hub_file(name) is not None else onnx_file_in(name)
    return name if path is None else str(path)


def _print_files(parts: Mapping[str, Path], options: Mapping[str, Any], file_options: dict[str, object]) -> None:
    """Print the contents of a file, or of each part of a folder; with ``--module``, of parts with such a module."""
    names = list(parts)
    of_several = len(parts) > 1
    uses_hierarchy = options["hierarchy"] or options["module"] is not None
    if of_several and options["module"] is not None:
        from winml.modelkit.builds.folder_transformation import part_modules, parts_with_module

        names = parts_with_module(part_modules(parts), options["module"])
    with show_wait("inspecting"):
        numbered = counted(names, "part") if of_several else names
        files = {part: _inspect_file(parts[part], file_options) for part in numbered}
    show_parts(
        files,
        options,
        lambda inspection: inspection.document(_tree_limits(options) if uses_hierarchy else None),
        of_several=of_several,
        record=lambda inspection: inspection.as_record(
            with_hierarchy=uses_hierarchy, with_weights=bool(options["verbose"])
        ),
    )
    for inspection in files.values():
        _exit_if_unfit(inspection.fit)


def _inspect_file(path: Path, options: Mapping[str, Any]) -> OnnxInspection:
    """Inspect a file and check the requested provider; raises UsageError for an option of checkpoints."""
    hint = "Omit it, or inspect the checkpoint that the file was exported from."
    refuse_checkpoint_options(path, options, FOR_CHECKPOINTS, hint)
    from winml.modelkit.inspect.onnx_inspection import inspect_onnx

    return replace(inspect_onnx(path, selector=options["module"]), fit=_provider_fit(path, options))


def _provider_fit(path: Path, options: Mapping[str, Any]) -> ProviderFit | None:
    """Check the requested provider on a file; None if no provider is requested."""
    if options["ep"] is None:
        return None
    from winml.modelkit.inspect.provider_check import check_provider

    return check_provider(path, options["ep"], options["device"], parse_ep_options(options["ep_options"]))


def _exit_if_unfit(fit: ProviderFit | None) -> None:
    """Exit with the code of a negative result if the provider does not run the whole model."""
    if fit is not None and not fit.runs_all:
        click.get_current_context().exit(NEGATIVE_RESULT)


def _tree_limits(options: Mapping[str, Any]) -> TreeLimits:
    """Return the limits of the displayed module tree from ``--depth`` and ``-vv``."""
    from winml.modelkit.report.module_tree import TreeLimits

    return TreeLimits(options["depth"], folds=options["verbose"] < 2)


def _print_all_tasks(options: dict[str, object]) -> None:
    """Print the tasks of all architectures, with their aliases."""
    from winml.modelkit.inspect.table import tasks_document
    from winml.modelkit.models.checkpoints.task import TASK_ALIASES, all_tasks

    tasks = all_tasks()
    record = {"kind": "tasks", "tasks": tasks, "aliases": TASK_ALIASES}
    show_result(record, options, lambda: tasks_document(tasks, TASK_ALIASES))


def _print_model_inspection(model: str | None, options: Mapping[str, Any]) -> None:
    """Print the tasks or the planned export of an architecture; exit if the provider does not run all nodes."""
    request = model_request({**options, "model": model or ""})
    from winml.modelkit.inspect.model_inspection import inspect_checkpoint, list_tasks
    from winml.modelkit.inspect.table import tasks_document

    if options["list_tasks"]:
        with library_output_to_stderr():
            tasks = list_tasks(request, model_type=options["model_type"])
        record = {"kind": "tasks", "tasks": {task: list(classes) for task, classes in tasks.items()}}
        show_result(record, options, lambda: tasks_document(tasks))
        return
    with library_output_to_stderr(), show_wait("inspecting"):
        inspection = inspect_checkpoint(request, model_type=options["model_type"], hierarchy=options["hierarchy"])
        if options["ep"] is not None:
            from winml.modelkit.builds.found_models import NamedModel

            path = exported_path(NamedModel(request.model, request=request), show_step)
            inspection = replace(inspection, fit=_provider_fit(path, options))
    limits = _tree_limits(options)
    # The check of a provider ends with its remedies.
    following = command_line(["winml", "build", model, "-o", "built"]) if model and options["ep"] is None else ""
    show_result(inspection.as_record(), options, lambda: inspection.document(limits).with_next(following))
    _exit_if_unfit(inspection.fit)
