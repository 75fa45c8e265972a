"""``winml export``: a model becomes an ONNX file that remembers its modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._options import (
    NonEmptyPath,
    dynamic_options,
    functions_option,
    input_options,
    model_option,
    random_options,
    result_options,
    source_options,
    tree_options,
    weight_options,
)
from winml.modelkit.cli._requests import (
    config_option,
    configured_options,
    export_section,
    export_section_keys,
    model_request,
    read_build_config,
    sizes_by_name,
    with_sizes,
)
from winml.modelkit.cli._streams import library_output_to_stderr, show_result, silence_library_warnings, tell
from winml.modelkit.errors import ConfigError, ModelPathError, UsageError, rename_options
from winml.modelkit.graph.files.named_paths import named_path
from winml.modelkit.load.load_options import declared_options, is_not_default

if TYPE_CHECKING:
    from winml.modelkit.export.config import WinMLExportConfig
    from winml.modelkit.hierarchy.torch_modules import TorchModules
    from winml.modelkit.load.request import ModelRequest
    from winml.modelkit.results.export_result import ExportResult
    from winml.modelkit.results.written_file import PinnedModel

__all__ = [
    "command",
    "is_pinning",
    "pin",
]


# --- ``winml export`` of an ONNX file: fixes its open dimensions.


_FOR_PYTORCH_MODELS = (
    *(option.name for option in declared_options() if not option.is_for_onnx),
    "input_specs", "dynamic_batch", "dynamic_sequence", "dynamic_image_size", "dynamic_axes", "allow_dynamic",
    "config", "export_config", "opset", "torch_module", "hierarchy", "clean_onnx", "keep_torch_metadata",
    "operation_fallback", "with_report", "ep",
)  # fmt: skip
"""Options that say how a graph is made from a PyTorch model."""


def is_pinning(options: Mapping[str, object]) -> bool:
    """Say whether the model is an ONNX file, whose sizes can be fixed.

    Raises:
        ModelPathError: it has the name of one, and nothing can be there.
    """
    model = str(options["model"] or "").strip()
    return PurePath(model).suffix.lower() == ".onnx" and not named_path(model).is_dir()


def pin(options: Mapping[str, Any]) -> None:
    """Fix the sizes and show the result.

    Raises:
        UsageError: an option that has no meaning here, or a name the file does not have.
    """
    for name in _FOR_PYTORCH_MODELS:
        if is_not_default(name, options[name]):
            raise UsageError(
                f"--{name.replace('_', '-')} has no meaning for an ONNX file, whose sizes alone can be fixed",
                hint="Leave it out, or export the PyTorch model anew.",
            )
    if not named_path(options["model"].strip()).is_file():
        raise ModelPathError(f"{options['model']}: no such file", hint="Give the path of an ONNX file.")
    if not (options["shape_config"] or options["batch_size"]):
        raise UsageError(
            f"{options['model']}: is an ONNX file, and no size of it is to be fixed",
            hint="Give sizes of its open dimensions with --shape-config '{\"batch\": 1}', or export what it was made "
            "from: a checkpoint folder, config.json, Hub id or file.py:factory.",
        )
    sizes = sizes_by_name(options)
    silence_library_warnings(debug=options["debug"])
    from winml.modelkit.flows.pin import pin_model

    with rename_options({} if options["shape_config"] else {"--shape-config": "--batch-size"}):
        result = pin_model(
            options["model"].strip(),
            options["output"],
            sizes,
            overwrite=options["overwrite"],
            verify=options["verify"] is not False,
            seed=options["seed"],
        )
    _show_pinned(result, options)


def _show_pinned(result: PinnedModel, options: Mapping[str, Any]) -> None:
    from winml.modelkit.report.files import pinned_document

    show_result(result.as_record(), options, lambda: pinned_document(result, options["model"]))


EPILOG = """\b
Examples:
  winml export -m sentence-transformers/all-MiniLM-L6-v2 -o model.onnx -v
  winml export -m ./checkpoint -o model.onnx --shape-config '{"sequence_length": 64}' --with-report
  winml export -m ./checkpoint -o model.onnx --dynamic-batch --dynamic-seq-len
  winml export -m model.py:build -o model.onnx --input-specs inputs.json
  winml export -c config.json -o model.onnx --opset 18
  winml export -m dynamic.onnx -o static.onnx --shape-config '{"batch_size": 1, "sequence_length": 128}'
"""


@click.command(name="export", cls=WinMLCommand, epilog=EPILOG)
@model_option(
    required=False,
    help="Hub id, checkpoint folder, config.json, file.py:factory or package.module:factory; "
    "an .onnx file, to fix its open sizes.",
)
@config_option("A build config, or its export section; its loader may name the model. Options win over it.")
@source_options
@random_options
@input_options
@weight_options
@dynamic_options
@click.option("--ep", metavar="NAME", help="Execution provider the file is for, such as qnn.")
@click.option("-o", "--output", required=True, type=NonEmptyPath(), help="The .onnx file to write.")
@click.option("--overwrite", is_flag=True, help="Replace files that are there already.")
@click.option("--export-config", metavar="JSON", help='Options such as {"opset_version": 17}; a file or text.')
@click.option("--opset", type=int, help="Version of ONNX's operators, 11 to 20.  [default: 17, or 18 with dynamo]")
@click.option(
    "--dynamo/--no-dynamo",
    default=None,
    help="Use torch's dynamo exporter, or TorchScript.  [default: TorchScript, and dynamo for what it cannot do]",
)
@click.option(
    "--torch-module",
    metavar="CLASSES",
    help="torch.nn classes to show as modules: Linear,LayerNorm, all, none; or auto, those that no other class stands "
    "above but the root's.  [default: auto]",
)
@click.option(
    "--hierarchy/--no-hierarchy",
    default=None,
    help="Write the module tags, or leave no trace of them.  [default: write]",
)
@click.option("--clean-onnx", is_flag=True, hidden=True, help="Deprecated: --no-hierarchy.")
@functions_option
@click.option("--keep-torch-metadata", is_flag=True, help="Keep the Python lines each node came from (local paths).")
@click.option("--operation-fallback", is_flag=True, help="Tag nodes without a known scope by their neighbours.")
@click.option(
    "--verify/--no-verify", default=None, help="Compare with PyTorch before writing, or not.  [default: verify]"
)
@click.option(
    "--tokenizer/--no-tokenizer",
    default=True,
    help="Copy config, tokenizer and processor files of the checkpoint beside the model, or not.  [default: copy]",
)
@click.option("--with-report", is_flag=True, help="Also write a Markdown report.")
@tree_options("Tell more: the module tree with node counts.")
@result_options
@click.pass_context
def command(context: click.Context, /, **options: object) -> None:
    """Turn a PyTorch or Hugging Face model into an ONNX file that remembers its modules.

    The file is compared with PyTorch in ONNX Runtime before it is put in place; every node names the module it came
    from. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 the file does not answer as the model does.
    """
    if is_pinning(options):
        pin(options)
        return
    config, options, words = _configured(context, options)
    with rename_options(words):
        origin = "{} in --export-config" if options["export_config"] else "export.{}"
        request = model_request(options)
        dynamic = request.dynamic.joined(config.dynamic.requested_by(origin))
        request = dataclasses.replace(request, dynamic=dynamic)
        if config.input_tensors is not None and request.input_specs is None:
            origin = origin.format("input_tensors")
            request = dataclasses.replace(request, input_specs=config.input_tensors, specs_origin=origin)
        _refuse_early(request, config, options)
        if options["clean_onnx"] and not options["quiet"]:
            tell("warning: --clean-onnx is deprecated; use --no-hierarchy")
        result = _export_model(request, config, options)
    _show_result(result, options)


def _configured(
    context: click.Context, options: dict[str, Any]
) -> tuple[WinMLExportConfig, dict[str, object], dict[str, str]]:
    """Return the options of the export and of the verb, and for messages the keys that stand in place of options.

    Raises:
        UsageError: nothing names a model.
        ConfigError: a config is wrong.
    """
    build_config = read_build_config(options["config"], section="export")
    passed = configured_options(context, options, build_config)
    if not passed.options["model"]:
        raise UsageError("no model was given", hint="Give one with -m, or a config whose loader names one.")
    config = export_section(build_config, "--config")
    words = {**passed.words, **export_section_keys(config, options, "export.{}")}
    if options["export_config"]:
        alone = _export_config(options["export_config"])
        words.update(export_section_keys(alone, options, "{} in --export-config"))
        config = config.model_copy(update={name: getattr(alone, name) for name in alone.model_fields_set})
    return _with_flags(with_sizes(config, options), options), passed.options, words


def _refuse_early(request: ModelRequest, config: WinMLExportConfig, options: Mapping[str, Any]) -> None:
    """Refuse what names and paths show to be wrong, before torch is imported, which takes seconds."""
    from winml.modelkit.graph.files.output_files import ExportPaths
    from winml.modelkit.load.request import resolve_source
    from winml.modelkit.runtime.execution_providers import refuse_dynamic

    if options["depth"] is not None and not options["verbose"]:
        raise UsageError(f"--depth {options['depth']} is for the module tree, which -v shows", hint="Add -v.")
    if options["functions"] is not None and not config.hierarchy:
        raise UsageError(
            f"--functions {options['functions']} goes by the tags, and --no-hierarchy writes none",
            hint="Leave one of them out.",
        )
    paths = ExportPaths.for_output(options["output"], with_sidecar=config.hierarchy, with_report=options["with_report"])
    paths.refuse_existing(overwrite=options["overwrite"])
    refuse_dynamic(config.ep, is_dynamic=request.is_dynamic, allow_dynamic=config.allow_dynamic)
    resolve_source(request)


def _export_config(place: str) -> WinMLExportConfig:
    from winml.modelkit.export.config import WinMLExportConfig
    from winml.modelkit.options import parse_options, read_json

    value, source = read_json(place, "--export-config")
    if isinstance(value, dict) and "export" in value:
        raise ConfigError(f"{source}: a whole build config", hint="Give it with -c.")
    return parse_options(WinMLExportConfig, value, source)


def _with_flags(config: WinMLExportConfig, options: Mapping[str, Any]) -> WinMLExportConfig:
    """Return the config with what the flags say; a flag wins."""
    passed: dict[str, Any] = {}
    if options["torch_module"]:
        passed["torch_module"] = _torch_modules(options["torch_module"])
    if options["hierarchy"] is not None or options["clean_onnx"]:
        passed["hierarchy"] = bool(options["hierarchy"]) and not options["clean_onnx"]
    if options["dynamo"] is not None:
        passed["exporter"] = "dynamo" if options["dynamo"] else "torchscript"
    if options["verify"] is not None:
        passed["verify"] = options["verify"]
    flags = ("keep_torch_metadata", "operation_fallback", "allow_dynamic")
    passed.update({name: True for name in flags if options[name]})
    if options["ep"] is not None:
        passed["ep"] = options["ep"]
    if options["opset"] is not None:
        from winml.modelkit.options import parse_options

        requested = parse_options(type(config), {"opset_version": options["opset"]}, f"--opset {options['opset']}")
        passed["opset_version"] = requested.opset_version
    return config.model_copy(update=passed)


def _torch_modules(text: str) -> TorchModules:
    from winml.modelkit.hierarchy.torch_modules import normalized_torch_modules

    try:
        return normalized_torch_modules(text)  # type: ignore[no-any-return]  # a text becomes one of them
    except ValueError as error:
        hint = "Give auto, none, all, or names of classes separated by commas."
        raise ConfigError(f"--torch-module {text}: {error}", hint=hint) from None


def _export_model(request: ModelRequest, config: WinMLExportConfig, options: Mapping[str, Any]) -> ExportResult:
    from winml.modelkit.cli._progress import show_step

    silence_library_warnings(debug=options["debug"])
    from winml.modelkit.flows.export.export import HTPExporter

    exporter = HTPExporter(config, seed=options["seed"], on_step=None if options["quiet"] else show_step)
    with library_output_to_stderr():
        return exporter.export_checkpoint(
            request,
            options["output"],
            overwrite=options["overwrite"],
            with_report=options["with_report"],
            with_companions=options["tokenizer"],
            functions=options["functions"],
        )


def _show_result(result: ExportResult, options: Mapping[str, Any]) -> None:
    if options["quiet"] or options["format_"] == "json":
        # Among the rows of the table it is a note. Nobody is to miss it: the folder may be read as another model's.
        for note in result.companions.notes:
            tell(f"Warning: {note}")
    from winml.modelkit.report.export import export_document
    from winml.modelkit.report.module_tree import TreeLimits

    has_tree = options["verbose"] and any(part.coverage.tagged for part in result.parts)
    limits = TreeLimits(options["depth"], folds=options["verbose"] < 2) if has_tree else None
    show_result(result.as_record(), options, lambda: export_document(result, limits))
