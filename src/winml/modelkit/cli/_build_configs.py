"""How does a build config stand beside the options of a verb? Shared by the verbs that read one: an option wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from winml.modelkit.cli._streams import tell
from winml.modelkit.errors import ConfigError

if TYPE_CHECKING:
    from winml.modelkit.builds.config import WinMLBuildConfig
    from winml.modelkit.export.config import WinMLExportConfig

__all__ = [
    "ConfiguredOptions",
    "config_option",
    "configured_options",
    "export_section",
    "read_build_config",
    "told_sections",
    "with_sizes",
]

_F = TypeVar("_F", bound=Callable[..., Any])

_DECIDES_THE_SAME = {"task": "model_class", "model_class": "task"}
"""Key of the loader section → the key that a user who gives this one did not speak of."""


@dataclass(frozen=True)
class ConfiguredOptions:
    """The options of a verb, completed by the loader section of a config."""

    options: dict[str, Any]
    words: Mapping[str, str]
    """Option → the key of the config that stands in its place, for messages."""


def config_option(help: str) -> Callable[[_F], _F]:
    """Return the option that names a build config."""
    return click.option("-c", "--config", metavar="JSON", help=help)


def read_build_config(place: str | None, *, section: str = "") -> WinMLBuildConfig:
    """Read a build config, or a section of it alone; tell what in it had to be changed or is not used.

    Args:
        place: File or text; None: the default config.
        section: Which section may stand alone.

    Raises:
        ConfigError: it cannot be read, or is no valid config.
    """
    from winml.modelkit.builds.config import SECTIONS, WinMLBuildConfig, parse_build_config
    from winml.modelkit.options import read_json

    if place is None:
        return WinMLBuildConfig()
    value, source = read_json(place, "--config")
    if section and isinstance(value, dict) and not {"schema_version", "auto", *SECTIONS} & set(value):
        value = {section: value}
    config, notes = parse_build_config(value, source)
    for note in notes:
        tell(f"note: {note}")
    return config


def configured_options(context: click.Context, options: dict[str, Any], config: WinMLBuildConfig) -> ConfiguredOptions:
    """Return the options, with what the command line leaves open taken from the loader section."""
    loader = config.loader.model_dump() if config.loader is not None else {}
    given = {name for name in loader if context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)}
    given |= {_DECIDES_THE_SAME[name] for name in given & set(_DECIDES_THE_SAME)}
    taken = {name: value for name, value in loader.items() if name in options and name not in given}
    words = {
        f"--{name.replace('_', '-')}": f"loader.{name}" for name, value in taken.items() if value not in (None, False)
    }
    return ConfiguredOptions({**options, **taken}, words)


def told_sections(export: WinMLExportConfig | None, options: Mapping[str, Any], words: str) -> dict[str, str]:
    """Return option → the key of an export section that was given in its place.

    Args:
        export: The section.
        options: Those of the verb; where one was given, it is the one that counts.
        words: Where the key stands, with ``{}`` for it: ``export.{}``.
    """
    from winml.modelkit.export.config import COMMAND_OPTIONS

    given = {"input_tensors": "input_specs"}
    return {
        flag: words.format(key)
        for key, flag in COMMAND_OPTIONS.items()
        if export is not None and getattr(export, key) and not options.get(given.get(key, key))
    }


def with_sizes(export: WinMLExportConfig, options: Mapping[str, Any]) -> WinMLExportConfig:
    """Return an export section whose inputs are decided anew where the command line gives sizes.

    What the inputs left open stays open, but for the sizes that are given.
    """
    if export.input_tensors is None or not (options["shape_config"] or options["batch_size"]) or options["input_specs"]:
        return export
    from winml.modelkit.graph.dimensions import names_among
    from winml.modelkit.load.inputs.options import parse_shape_config

    sizes = parse_shape_config(options["shape_config"]) if options["shape_config"] else None
    keys = {*(sizes.given() if sizes is not None else ()), *(["batch_size"] if options["batch_size"] else ())}
    names = {size for spec in export.input_tensors for size in spec.shape if isinstance(size, str)}
    fixed = {name for key in keys for name in names_among(key, names)}
    axes = {
        spec.name: {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str) and size not in fixed}
        for spec in export.input_tensors
    }
    open_axes = {name: {**named, **export.dynamic_axes.get(name, {})} for name, named in axes.items()}
    decided_anew = {
        "input_tensors": None,
        "dynamic_axes": {name: named for name, named in open_axes.items() if named},
        "dynamic_dimensions": tuple(bounds for bounds in export.dynamic_dimensions if bounds.name not in fixed),
    }
    return export.model_copy(update=decided_anew)


def export_section(config: WinMLBuildConfig, source: str) -> WinMLExportConfig:
    """Return the export section of a config.

    Raises:
        ConfigError: it is null.
    """
    if config.export is None:
        raise ConfigError(
            f"{source}: export: null skips the export", hint="Give a config with an export section, or leave it out."
        )
    return config.export
