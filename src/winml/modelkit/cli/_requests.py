"""Requests from command-line options: to load a model, with or without a build config, or to run a model.

An option takes precedence over the build config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from winml.modelkit.cli._errors import named_options
from winml.modelkit.cli._options import option
from winml.modelkit.cli._streams import tell
from winml.modelkit.errors import ConfigError, UsageError, spell_keyword
from winml.modelkit.fields import MODEL, Field, fields_of
from winml.modelkit.models.load_options import declared_options, is_not_default
from winml.modelkit.verbs.file_to_file import FileRequest, read_sizes
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    from winml.modelkit.builds.config import WinMLBuildConfig
    from winml.modelkit.builds.found_models import NamedModel
    from winml.modelkit.export.config import WinMLExportConfig
    from winml.modelkit.models.request import ModelRequest
    from winml.modelkit.progress import StepEvent


_F = TypeVar("_F", bound=Callable[..., Any])
_RequestT = TypeVar("_RequestT", bound=FileRequest[Any, Any])

_DECIDES_THE_SAME = {"task": "model_class", "model_class": "task"}
"""Key of the loader section → the alternative key, which decides the same."""
FOR_CHECKPOINTS = (*(option.name for option in declared_options() if not option.is_for_onnx), "input_specs")
"""Options for loading and exporting a checkpoint, refused for an ONNX file."""


def model_request(options: Mapping[str, Any]) -> ModelRequest:
    """Make a model request from the options of :mod:`~winml.modelkit.cli._options`.

    Args:
        options: Values by option name; options that the verb does not offer are missing.

    Raises:
        ConfigError: ``--input-specs``, ``--shape-config`` or ``--dynamic-axes`` is malformed.
    """
    from winml.modelkit.models.inputs.options import parse_input_specs, parse_shape_config
    from winml.modelkit.models.request import ModelRequest
    from winml.modelkit.onnx.specs import DynamicRequest, parse_dynamic_axes

    dynamic = DynamicRequest(
        batch=options.get("dynamic_batch", False),
        sequence=options.get("dynamic_sequence", False),
        image_size=options.get("dynamic_image_size", False),
        axes=parse_dynamic_axes(options.get("dynamic_axes", ())),
    )
    specs, shapes = options.get("input_specs"), options.get("shape_config")
    return ModelRequest(
        model=options["model"],
        **{option.name: options.get(option.name, option.default) for option in declared_options()},
        input_specs=parse_input_specs(specs) if specs else None,
        shape_config=parse_shape_config(shapes) if shapes else None,
        batch_size=options.get("batch_size"),
        dynamic=dynamic,
    )


def sizes_by_name(options: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of ``--shape-config`` and ``--batch-size`` by name or key.

    Names are not checked, because ONNX files define them.

    Raises:
        ConfigError: the text is malformed, or a size is not an integer.
        UsageError: the two options disagree.
    """
    value = read_sizes(options["shape_config"]) if options["shape_config"] else {}
    if options["batch_size"]:
        if value.get("batch_size", options["batch_size"]) != options["batch_size"]:
            raise UsageError(
                f"--batch-size {options['batch_size']}: --shape-config says batch_size {value['batch_size']}",
                hint="Use one of them.",
            )
        value = {**value, "batch_size": options["batch_size"]}
    return value


def config_option(help: str) -> Callable[[_F], _F]:
    """Return the option that names a build config."""
    return option("config", str, help, MODEL, short="-c", metavar="JSON", is_common=True)


def read_build_config(text_or_path: str | None, *, section: str = "") -> WinMLBuildConfig:
    """Read a build config, or a single section; print notes on changed and unused keys.

    Args:
        text_or_path: File or text; None: the default config.
        section: Section that may be passed without the enclosing config.

    Raises:
        ConfigError: the text cannot be read, or is no valid config.
    """
    from winml.modelkit.builds.config import SECTIONS, WinMLBuildConfig, parse_build_config
    from winml.modelkit.options import read_json

    if text_or_path is None:
        return WinMLBuildConfig()
    value, source = read_json(text_or_path, "--config")
    if section and isinstance(value, dict) and not {"schema_version", "auto", *SECTIONS} & set(value):
        value = {section: value}
    config, notes = parse_build_config(value, source)
    for note in notes:
        tell(f"note: {note}")
    return config


def read_request(kind: type[_RequestT], options: Mapping[str, Any]) -> _RequestT:
    """Make the request of the command line and its config section; the command line takes precedence.

    Args:
        kind: The request; its options are those of :func:`~winml.modelkit.cli._options.request_options`.
        options: Values by option name.

    Raises:
        ConfigError: the config or a value is invalid.
        UsageError: a value is not available.
    """
    values: dict[str, Any] = {}
    section = None
    if options["config"] is not None:
        section = getattr(read_build_config(options["config"], section=kind.section), kind.section)
    if section is not None:
        values, note = kind.section_values(section)
        if note:
            tell(f"note: {note}")
    request = kind.of_command(values, stated_fields(kind.declaring, options), stated_fields(kind, options))
    assert isinstance(request, kind)
    return request


def stated_fields(declaring: type, options: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a request that are specified on the command line, by name.

    Args:
        declaring: The request, or the class that declares a part of it.
        options: Values by option name.

    Raises:
        ConfigError: a value cannot be read.
    """
    return stated_values((field for field in fields_of(declaring) if field.in_command), options)


def stated_values(fields: Iterable[Field], options: Mapping[str, object]) -> dict[str, Any]:
    """Return the options that are specified on the command line, by name; raises as :func:`stated_fields`."""
    context = click.get_current_context()
    return {
        field.name: options[field.name] if field.read is None else field.read(options[field.name])
        for field in fields
        if is_stated(context, field.name)
    }


def is_stated(context: click.Context, name: str) -> bool:
    """Return True if an option is specified on the command line."""
    return context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)


def configured_options(options: Mapping[str, Any], config: WinMLBuildConfig) -> dict[str, Any]:
    """Merge the loader section of a config into the options; options on the command line take precedence.

    Errors of the command then name keys of the section.
    """
    context = click.get_current_context()
    loader = config.loader.model_dump() if config.loader is not None else {}
    stated_keys = {name for name in loader if is_stated(context, name)}
    stated_keys |= {_DECIDES_THE_SAME[name] for name in stated_keys & set(_DECIDES_THE_SAME)}
    loader_values = {name: value for name, value in loader.items() if name in options and name not in stated_keys}
    named_options(context).update(
        {name: f"loader.{name}" for name, value in loader_values.items() if value not in (None, False)}
    )
    return {**options, **loader_values}


def name_section_keys(section: object, flags: Iterable[str], options: Mapping[str, object], key_words: str) -> None:
    """Make errors name the keys of a config section in place of options that are not specified.

    Args:
        section: The section, or None.
        flags: Options that the section may state.
        options: Options of the command.
        key_words: Name of a key, with ``{}`` for the key: ``export.{}``.
    """
    names = named_options(click.get_current_context())
    for name in flags:
        key = spell_keyword(name)
        if getattr(section, key, None) and not (options.get(name) or options.get(key)):
            names[name] = key_words.format(key)


def configured_export(export: WinMLExportConfig, options: Mapping[str, Any]) -> WinMLExportConfig:
    """Return an export section with the sizes and ``--allow-dynamic`` of the command line.

    The inputs of the section are decided anew at these sizes; its other dynamic dimensions stay dynamic. Errors of the
    command name keys of the section.

    Raises:
        ConfigError: the sizes cannot be parsed.
    """
    from winml.modelkit.export.config import SECTION_OPTIONS

    name_section_keys(export, SECTION_OPTIONS, options, "export.{}")
    if options["allow_dynamic"]:
        export = export.model_copy(update={"allow_dynamic": True})
    if export.input_tensors is None or not (options["shape_config"] or options["batch_size"]) or options["input_specs"]:
        return export
    from winml.modelkit.models.inputs.options import parse_shape_config
    from winml.modelkit.onnx.specs import names_among

    sizes = parse_shape_config(options["shape_config"]) if options["shape_config"] else None
    keys = {*(sizes.fixed() if sizes is not None else ()), *(["batch_size"] if options["batch_size"] else ())}
    names = {size for spec in export.input_tensors for size in spec.shape if isinstance(size, str)}
    fixed = {name for key in keys for name in names_among(key, names)}
    axes = {
        spec.name: {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str) and size not in fixed}
        for spec in export.input_tensors
    }
    open_axes = {name: {**axis_names, **export.dynamic_axes.get(name, {})} for name, axis_names in axes.items()}
    changes = {
        "input_tensors": None,
        "dynamic_axes": {name: axis_names for name, axis_names in open_axes.items() if axis_names},
        "dynamic_dimensions": tuple(bounds for bounds in export.dynamic_dimensions if bounds.name not in fixed),
    }
    return export.model_copy(update=changes)


def export_section(config: WinMLBuildConfig) -> WinMLExportConfig:
    """Return the export section of the config of ``--config``.

    Raises:
        ConfigError: the section is null.
    """
    if config.export is None:
        raise ConfigError(
            "--config: export is null, which skips the export",
            hint="Use a config with an export section, or omit export.",
        )
    return config.export


def model_name(options: Mapping[str, Any], accepted_kinds: str) -> str:
    """Return the model, specified as argument or with ``-m``.

    Args:
        options: Values by option name, with ``target`` and ``model``.
        accepted_kinds: Kinds of models that the verb accepts, for the hint.

    Raises:
        UsageError: no model is specified, or two models are.
    """
    models: list[str] = [value for value in (options["target"], options["model"]) if value is not None]
    if len(models) != 1:
        raise UsageError(
            f"two models are specified: {models[0]!r} and, with -m, {models[1]!r}"
            if models
            else "no model is specified",
            hint=f"Specify one: {accepted_kinds}.",
        )
    return models[0]


def resolve_named_model(name: str, options: Mapping[str, Any], refused: Iterable[str] = FOR_CHECKPOINTS) -> NamedModel:
    """Find the ONNX file or checkpoint of a name, with all checks that need no heavy import.

    Args:
        name: The model.
        options: Values by option name.
        refused: Options that do not apply to an ONNX file.

    Raises:
        UsageError: nothing exists at the path, or an option does not apply to an ONNX file.
    """
    from winml.modelkit.builds.found_models import NamedModel, onnx_file
    from winml.modelkit.models.request import resolve_source

    path = onnx_file(name)
    if path is not None:
        refuse_checkpoint_options(path, options, refused)
        return NamedModel(name, path)
    request = model_request({**options, "model": name})
    resolve_source(request)
    return NamedModel(name, request=request)


def runnable_model(options: Mapping[str, Any]) -> tuple[NamedModel, dict[str, Any]]:
    """Return the model, and the fields of ``RunOptions`` for its inputs.

    Names and paths are checked here, before any heavy import.

    Args:
        options: Values by option name, with ``target`` and ``model``.

    Raises:
        UsageError: no model or two, nothing at its path, or an option that does not apply to an ONNX file.
    """
    name = model_name(options, "an ONNX file, a build folder, a Hub id, a checkpoint folder or file.py:factory")
    from winml.modelkit.onnx.files.named_paths import refuse_missing_values

    input_data = Path(options["input_data"]) if options["input_data"] else None
    refuse_missing_values(input_data)
    common = {"shown": name, "seed": options["seed"], "input_data": input_data}
    model = resolve_named_model(name, options)
    if model.path is None:
        return model, {"is_exported": True, **common}
    sizes = sizes_by_name({**options, "batch_size": None})
    return model, {"sizes": sizes, "batch_size": options["batch_size"], **common}


def exported_path(model: NamedModel, on_step: Callable[[StepEvent], None] | None) -> Path:
    """Return the ONNX file of a model; after an export, report on stderr the size of the result in the cache.

    Args:
        model: The model of the command line.
        on_step: Shows a step of the export; None: nothing is reported.

    Raises:
        WinMLError: as the export raises.
    """
    if model.path is not None:
        return model.path
    from winml.modelkit.builds.build_model import exported_model
    from winml.modelkit.export.config import WinMLExportConfig

    assert model.request is not None
    steps: list[StepEvent] = []

    def record_step(event: StepEvent) -> None:
        assert on_step is not None
        steps.append(event)
        on_step(event)

    path = exported_model(model.request, WinMLExportConfig(), None if on_step is None else record_step)
    if steps:
        from winml.modelkit.builds.cache import stored_bytes

        size = stored_bytes(file for file in path.parent.iterdir() if file.is_file())
        tell(f"export stored in the cache: {size_words(size)} (winml cache ls)")
    return path


def refuse_checkpoint_options(
    path: Path,
    options: Mapping[str, object],
    names: Iterable[str],
    hint: str = "Omit it, or specify the checkpoint that the file was exported from.",
) -> None:
    """Refuse options for loading and exporting a checkpoint, because the model is an ONNX file.

    Raises:
        UsageError: names the first specified option of ``names``.
    """
    refused = frozenset(names)
    for parameter in click.get_current_context().command.params:
        if parameter.name in refused and is_not_default(parameter.name, options[parameter.name]):
            flag = [*parameter.opts, *parameter.secondary_opts][-1]
            raise UsageError(f"{flag} does not apply to ONNX files such as {path}", hint=hint)


def files_read(model: NamedModel, options: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the files that a verb reads: files of the model and of its options; none of them may be replaced.

    Raises:
        WinMLError: the model is not usable.
    """
    values = (options[name] for name in ("input_data", "shape_config", "input_specs"))
    return (
        *model.files_read(),
        *(Path(value) for value in values if value and not str(value).lstrip().startswith(("{", "["))),
    )
