"""Options shared by several verbs, declared once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from winml.modelkit.cli._help import POSITIONAL, GroupedArgument, GroupedOption
from winml.modelkit.errors import ModelPathError
from winml.modelkit.export.declared_options import DynamicFields
from winml.modelkit.fields import ADVANCED, GENERAL, MODEL, OUTPUT, RECORDED, SIZES, VERIFICATION, Field, fields_of
from winml.modelkit.models.load_options import Group, InputFields, declared_options
from winml.modelkit.onnx.files.named_paths import named_path

_F = TypeVar("_F", bound=Callable[..., Any])


class _NonEmptyPath(click.Path):
    """A path, converted to ``Path``; an empty text, such as the value of an unset shell variable, is refused."""

    def __init__(self) -> None:
        """Accept files and folders, existing or not; the reader or writer of the path checks its kind."""
        super().__init__(path_type=Path)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Refuse the empty text, which would mean the current folder."""
        if not os.fspath(value).strip():
            self.fail("the path is empty.", param, ctx)
        try:
            named_path(value)
        except ModelPathError as error:
            self.fail(f"{error.message}.", param, ctx)
        return super().convert(value, param, ctx)


def _combine_options(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Return a decorator that adds several options to a command, in this order."""

    def decorate(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def model_option(help: str, *, is_fetched: bool = True) -> Callable[[_F], _F]:
    """Return the option that names the model, which may also be the first positional argument.

    Args:
        help: The accepted kinds of models.
        is_fetched: True if an ONNX file on the Hub is accepted; the help adds its syntax.
    """
    help = f"{help} A file on the Hub is OWNER/NAME/PATH.onnx." if is_fetched else help
    details: dict[str, Any] = {"short": "-m", "metavar": "MODEL", "is_common": True, "is_also_argument": True}
    return option("model", str, help, MODEL, **details)


def _load_options(*offered_with: Group) -> Callable[[_F], _F]:
    """Return the options that models/load_options.py declares as offered together."""
    return declared_options_of(option for option in declared_options() if option.offered_with in offered_with)


def option(name: str, kind: Any, help: str, group: str, *, default: Any = None, **details: Any) -> Callable[[_F], _F]:
    """Return an option of one command that is no field of its request, declared like a field.

    Args:
        name: Name of its value.
        kind: Type of its value, such as ``int``; ``bool``: a switch, off by default.
        help: Help text. ``--help`` prints the first sentence.
        group: Heading of the help under which the option is listed.
        default: Value without the option.
        details: Further attributes of :class:`~winml.modelkit.fields.Field`.
    """
    return _declared_option(Field(name, kind, False if kind is bool else default, group, text=help, **details))


def reference_option(help: str) -> Callable[[_F], _F]:
    """Return the option that names the checkpoint to compare with; without a value, the recorded checkpoint."""
    settings: dict[str, Any] = {"is_flag": False, "flag_value": RECORDED, "metavar": "[CHECKPOINT]"}
    return grouped_option("--reference", group=VERIFICATION, is_common=True, help=help, **settings)


def grouped_option(*names: str, help: str, group: str, is_common: bool = False, **settings: Any) -> Callable[[_F], _F]:
    """Return an option with click settings that a declaration cannot express, in a group of the help."""
    field = Field(names[-1], Any, None, group, text=help, is_common=is_common)
    return click.option(*names, cls=GroupedOption, field=field, **settings)


def _positional_value(field: Field) -> Callable[[_F], _F]:
    """Return the positional argument in place of an option; :class:`WinMLCommand` moves its value to the option."""
    type_ = _NonEmptyPath() if Path in get_args(field.annotation) else None
    return click.argument(
        POSITIONAL, cls=GroupedArgument, field=field, type=type_, required=False, metavar=f"[{field.name.upper()}]"
    )


def _declared_option(field: Field, config_key: str = "") -> Callable[[_F], _F]:
    """Return the option of the command that a field declares.

    Args:
        field: The field.
        config_key: Equivalent key of a build config; empty: no such key.
    """
    if field.is_argument:
        type_ = _NonEmptyPath() if field.annotation is Path else None
        several: dict[str, Any] = {"nargs": -1, "metavar": field.metavar} if field.is_repeatable else {}
        return click.argument(field.name, cls=GroupedArgument, field=field, type=type_, **several)
    if field.is_also_argument:
        text = f"Same as the argument {field.name.upper()}."
        details: dict[str, Any] = {
            "is_also_argument": False,
            "is_common": False,
            "metavar": field.metavar or field.name.upper(),
        }
        named = replace(field, text=text, **details)
        return _combine_options(_positional_value(field), _declared_option(named, config_key))
    default = None if field.read is not None else field.default
    settings: dict[str, Any] = {"field": field, "config_key": config_key}
    settings |= {"required": True} if field.is_required else {"default": default}
    names = [field.name, *([field.short] if field.short else []), *(field.spelling.split() or [field.flag])]
    kinds = (field.annotation, *get_args(field.annotation))
    if field.is_switch and not field.spelling and field.default is not False:
        names[-1] += f"/--no-{field.flag[2:]}"
    if field.annotation is bool:
        is_pair = "/" in names[-1]
        return click.option(*names, cls=GroupedOption, is_flag=True, show_default=is_pair, **settings)
    if field.is_switch:
        return click.option(*names, cls=GroupedOption, **settings)
    if field.is_repeatable:
        settings["default"] = ()
        if (read := field.read) is not None and field.offered_with:  # no request reads an option of loading
            settings["callback"] = lambda _context, _option, texts: read(texts) if texts else None
        return click.option(*names, cls=GroupedOption, multiple=True, metavar=field.metavar, **settings)
    metavar = field.metavar
    if field.choices:
        settings["type"] = _Choice(field.choices)
    elif Path in kinds:
        settings["type"] = _NonEmptyPath()
    elif float in kinds:
        minimum = field.minimum if field.above is None else field.above
        is_limited = minimum is not None or field.maximum is not None
        limits = click.FloatRange(minimum, field.maximum, min_open=field.above is not None)
        settings["type"] = limits if is_limited else float
        metavar = metavar or "NUMBER"
    elif int in kinds and field.read is None:
        is_limited = (field.minimum, field.maximum) != (None, None)
        settings["type"] = click.IntRange(field.minimum, field.maximum) if is_limited else int
        metavar = metavar or "N"
    return click.option(*names, cls=GroupedOption, metavar=metavar, show_default=default is not None, **settings)


class _Choice(click.Choice[Any]):
    """One of several values; the error of an invalid value suggests the nearest valid value."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """List the valid values and suggest the nearest."""
        from winml.modelkit.cli._meant_options import value_synonym
        from winml.modelkit.options import nearest  # imports pydantic

        names = [str(choice) for choice in self.choices]
        guess = value_synonym(str(value), names) or nearest(str(value), names)
        return super().get_invalid_choice_message(value, ctx) + (f" Did you mean {guess!r}?" if guess else "")


def declared_options_of(fields: Iterable[Field]) -> Callable[[_F], _F]:
    """Return the options that fields declare, in their groups."""
    return _combine_options(*map(_declared_option, fields))


def request_options(kind: type[Any]) -> Callable[[_F], _F]:
    """Return the options that a request declares, and ``--dry-run``.

    Args:
        kind: The request. If it contains options of a section of a build config (``section``, ``declaring``), these and
            ``--config`` are added.
    """
    keys: dict[type, str] = {kind: ""}
    config: list[Callable[[_F], _F]] = []
    if hasattr(kind, "declaring"):
        keys = {kind.declaring: f"{kind.section}.", **keys}
        help = f"Build config, or its {kind.section} section. A file or JSON text; options take precedence over it."
        config.append(option("config", str, help, MODEL, short="-c", metavar="JSON"))
    return _combine_options(
        *(
            _declared_option(field, config_key=f"{start}{field.name}" if start else "")
            for declaring, start in keys.items()
            for field in fields_of(declaring)
            if field.in_command
        ),
        *config,
        option("dry_run", bool, "Print what would be read, run and written. Writes nothing.", OUTPUT),
    )


reading_options = _load_options("source")
"""Options for reading a checkpoint."""
source_options = _load_options("source", "export")
"""Options for reading a checkpoint and selecting its exported graphs."""
random_options = _load_options("random")
"""Options for random values."""
_weight_options = _load_options("weights")
"""Options for the data type of the weights."""
input_options = declared_options_of(fields_of(InputFields))
"""Options for the inputs and their sizes."""
dynamic_options = _combine_options(
    declared_options_of(fields_of(DynamicFields)),
    option(
        "dynamic_axes",
        str,
        "Dynamic axes by input and position: input_ids:0=batch,1=sequence, or JSON as a file or text.",
        SIZES,
        is_repeatable=True,
        metavar="AXES",
    ),
)
"""Options for dynamic dimensions."""
export_config_option = option(
    "export_config",
    str,
    'Export options, such as {"opset_version": 17} or opset_version=17: JSON text, a file or pairs.',
    ADVANCED,
    metavar="JSON",
)
"""Option for the options of an export that have no option of their own in the command."""
checkpoint_options = _combine_options(source_options, _weight_options, random_options, input_options, dynamic_options)
"""Options for loading and exporting a checkpoint."""


def tree_options(help: str) -> Callable[[_F], _F]:
    """Return the options for the level of detail of a displayed module tree."""
    return _combine_options(
        grouped_option("-v", "--verbose", count=True, group=OUTPUT, help=f"{help} -vv: do not fold repeated modules."),
        option("depth", int, "Levels of the module tree to show.", OUTPUT, minimum=1, default_words="all"),
    )


def _format_option(*formats: str) -> Callable[[_F], _F]:
    """Return the option ``--format``; the first format is the default."""
    names: dict[str, Any] = {"spelling": "--format", "short": "-f", "only": formats}
    return option("format_", str, "Output format.", OUTPUT, default=formats[0], is_common=True, **names)


format_option = _format_option("table", "json")
"""Option for the output format."""
debug_option = option("debug", bool, "Show warnings of libraries, and the traceback of a failure.", GENERAL)
"""Option for warnings of libraries and tracebacks."""


def result_options(
    *, quiet: str = "Print errors and warnings only.", verbose: str = "", formats: tuple[str, ...] = ("table", "json")
) -> Callable[[_F], _F]:
    """Return the options for detail and format of the printed result, and ``--debug``.

    Args:
        quiet: Help of ``--quiet``; empty: the command has no such option.
        verbose: Help of ``--verbose``; empty: the command has no such option.
        formats: Values of ``--format``; the first is the default.
    """
    flags = {"verbose": verbose, "quiet": quiet}
    return _combine_options(
        *(option(name, bool, help, OUTPUT, short=f"-{name[0]}") for name, help in flags.items() if help),
        _format_option(*formats),
        debug_option,
    )
