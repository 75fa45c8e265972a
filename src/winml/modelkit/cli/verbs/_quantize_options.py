"""Which options of a verb fill the section ``quant`` of a build config? Those of ``winml quantize``, declared there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli.verbs.quantize import command as quantize_command
from winml.modelkit.errors import UsageError
from winml.modelkit.quantize.options import QuantizeOptions

if TYPE_CHECKING:
    from winml.modelkit.builds.config import QuantSection

__all__ = ["filled_section", "given_values", "quantize_options", "refuse_flags_without_stage"]


def quantize_options(*, after: str) -> Callable[[click.Command], click.Command]:
    """Return what gives a verb the options of ``winml quantize`` that say how, behind one of its own.

    Options that the verb has itself stay its own.
    """

    def with_options(command: click.Command) -> click.Command:
        own = [parameter.name for parameter in command.params]
        shared = [item for item in quantize_command.params if item.name in QuantizeOptions.model_fields]
        place = own.index(after) + 1
        command.params[place:place] = [item for item in shared if item.name not in own]
        return command

    return with_options


def given_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options about quantization that were given, as JSON values by key of the section.

    Raises:
        ConfigError: the rules of modules are no JSON.
    """
    from winml.modelkit.options import read_json

    given = {name: options[name] for name in QuantizeOptions.model_fields if options.get(name) not in (None, ())}
    if "per_module" in given:
        given["per_module"], _ = read_json(options["per_module"], "--per-module")
    return given


def filled_section(section: QuantSection | None, options: Mapping[str, Any]) -> QuantSection | None:
    """Return a section with what the options say; an option wins, and begins a section that is null.

    Raises:
        ConfigError: a value is wrong.
    """
    from winml.modelkit.builds.config import QuantSection
    from winml.modelkit.options import parse_options

    given = given_values(options)
    if not given:
        return section
    base = {} if section is None else section.model_dump(mode="json", exclude_unset=True)
    return parse_options(QuantSection, {**base, **given}, "options")


def refuse_flags_without_stage(options: Mapping[str, Any]) -> None:
    """Refuse options about quantization where the stage is left out.

    Raises:
        UsageError: names the first of them.
    """
    flags = {item.name: item.opts[0] for item in quantize_command.params}
    given = [flags[name] for name in QuantizeOptions.model_fields if options.get(name) not in (None, ())]
    if given:
        raise UsageError(f"{given[0]} has no meaning with --no-quant", hint="Leave one of them out.")
