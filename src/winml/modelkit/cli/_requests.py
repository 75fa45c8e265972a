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
from winml.modelkit.errors import ConfigError, spell_keyword
from winml.modelkit.fields import MODEL, Field, fields_of
from winml.modelkit.verbs.file_to_file import FileRequest
from winml.modelkit.verbs.named_models import read_export_config
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    from winml.modelkit.builds.config import WinMLBuildConfig
    from winml.modelkit.builds.found_models import NamedModel
    from winml.modelkit.export.config import WinMLExportConfig
    from winml.modelkit.progress import OnStep, StepEvent


_F = TypeVar("_F", bound=Callable[..., Any])
_RequestT = TypeVar("_RequestT", bound=FileRequest[Any, Any])

_DECIDES_THE_SAME = {"task": "model_class", "model_class": "task"}
"""Key of the loader section → the alternative key, which decides the same."""


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


def with_export_config(config: WinMLBuildConfig, place: str | None) -> WinMLBuildConfig:
    """Return the config with the options of ``--export-config``, which take precedence over its export section.

    Args:
        config: The config.
        place: File or text of the option; None: the config is returned unchanged.

    Raises:
        ConfigError: the options are invalid, or the export section is null.
    """
    if place is None:
        return config
    alone = read_export_config(place)
    export = export_section(config).model_copy(update=alone.stated_options())
    return config.model_copy(update={"export": export})


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


def exported_path(model: NamedModel, on_step: OnStep | None) -> Path:
    """Return the ONNX file of a model; after an export, report on stderr the size of the result in the cache.

    Args:
        model: The model of the command line.
        on_step: Shows a step of the export; None: nothing is reported.

    Raises:
        WinMLError: as the export raises.
    """
    if model.path is not None:
        return model.path
    from winml.modelkit.builds.build_model import exported_file

    steps: list[StepEvent] = []

    def record_step(event: StepEvent) -> None:
        assert on_step is not None
        steps.append(event)
        on_step(event)

    path = exported_file(model, None if on_step is None else record_step)
    if steps:
        from winml.modelkit.builds.cache import stored_bytes

        size = stored_bytes(file for file in path.parent.iterdir() if file.is_file())
        tell(f"export stored in the cache: {size_words(size)} (winml cache ls)")
    return path
