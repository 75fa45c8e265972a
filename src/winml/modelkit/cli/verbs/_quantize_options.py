"""What do the options about quantization ask for in a build? Made of the fields that the stage declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from winml.modelkit.cli._options import declared_options_of
from winml.modelkit.errors import UsageError
from winml.modelkit.fields import fields_of
from winml.modelkit.quantize.declared_options import QuantizeFields

if TYPE_CHECKING:
    from winml.modelkit.builds.config import QuantSection

__all__ = ["filled_section", "quantization_options", "refuse_flags_without_stage"]

_FIELDS = tuple(field for field in fields_of(QuantizeFields) if field.name != "ep")
"""Those that an option here states; the execution provider is one of the verb as a whole."""

_F = TypeVar("_F", bound=Callable[..., Any])


def quantization_options(precisions: Sequence[str], help: str) -> Callable[[_F], _F]:
    """Return the options that say how modules are quantized.

    Args:
        precisions: Those the verb takes.
        help: What ``--precision`` means there.
    """
    own: dict[str, dict[str, Any]] = {"precision": {"only": tuple(precisions), "help": help}}
    return declared_options_of(replace(field, default=None, **own.get(field.name, {})) for field in _FIELDS)


def filled_section(section: QuantSection | None, options: Mapping[str, object]) -> QuantSection | None:
    """Return a section with what the options say; an option wins, and begins a section that is null.

    Raises:
        ConfigError: a value is wrong.
        UsageError: columns are no pairs of a role and a column.
    """
    from winml.modelkit.builds.config import QuantSection
    from winml.modelkit.options import parse_options

    stated = {
        field.name: options[field.name] if field.read is None else field.read(options[field.name])
        for field in _stated(options)
    }
    if not stated:
        return section
    base = {} if section is None else section.model_dump(mode="json", exclude_unset=True)
    return parse_options(QuantSection, {**base, **stated}, "options")


def refuse_flags_without_stage(options: Mapping[str, object]) -> None:
    """Refuse options about quantization where the stage is left out.

    Raises:
        UsageError: names the first of them.
    """
    if stated := _stated(options):
        flags = {item.name: item.opts[-1] for item in click.get_current_context().command.params}
        raise UsageError(f"{flags[stated[0].name]} has no meaning with --no-quant", hint="Leave one of them out.")


def _stated(options: Mapping[str, object]) -> list[Any]:
    return [field for field in _FIELDS if options.get(field.name) not in (None, ())]
