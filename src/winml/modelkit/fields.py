"""Declaration of an option: command line, config, Python keywords, help and reference derive from the field.

A field of a dataclass that :func:`declare` made is an option. Standard library only, because the help of a verb is made
from the declarations; a record of :class:`winml.modelkit.options.Options` that derives from them validates the values.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from winml.modelkit.errors import UsageError, spell

MODEL, INPUTS, SIZES, OUTPUT = "Model", "Inputs", "Sizes", "Output"
EXPORT, QUANTIZATION, CALIBRATION = "Export", "Quantization", "Calibration"
DATASET, LIMITS, GENERATION = "Dataset", "Metrics and limits", "Generation"
VERIFICATION, DEVICE, ADVANCED, GENERAL = "Verification", "Device", "Advanced", "General"
"""Groups of options that several verbs share. A group of one verb is declared with its options."""

_FIRST = (MODEL, INPUTS, SIZES, OUTPUT)
_LAST = (DATASET, LIMITS, VERIFICATION, DEVICE, GENERATION, ADVANCED, GENERAL)
"""Order of the groups in the help and the reference; all other groups are between, in the order of declaration."""


RECORDED = "recorded"
"""Value of ``--reference`` without an argument: the checkpoint recorded in the file."""


@dataclass(frozen=True)
class Field:
    """The declaration of one option."""

    name: str
    """Name of the field, of the key in a config, and of the keyword in Python."""
    annotation: Any
    """Annotated type, such as ``str | None``."""
    default: Any
    group: str
    """Heading of the help under which the option is listed."""
    text: str = ""
    """Help text, if it is computed or shared by several options; empty: the docstring below the field."""
    declaring: type | None = None
    """The class with the docstring of the field in its source."""
    is_common: bool = False
    """True if ``--help`` lists the option; ``--help-all`` lists every option."""
    default_words: str = ""
    """Text of the default in the help, with unit, if the value itself is not clear."""
    offered_with: str = ""
    """Set of loading options that a verb offers together."""
    minimum: int | None = None
    maximum: int | None = None
    above: int | None = None
    """Exclusive lower bound of a number."""
    min_length: int | None = None
    """Minimum length of a text, or of each text of a list."""
    metavar: str | None = None
    """Placeholder of the value in the help; None: its type."""
    short: str = ""
    """Short spelling on the command line; empty: none."""
    spelling: str = ""
    """Spelling on the command line, if not derived from the name: ``--enable-x/--disable-x``; several are separated
    by spaces."""
    is_repeatable: bool = False
    """True if the option may be repeated."""
    only: tuple[Any, ...] | None = None
    """Values accepted by the command, if it does not accept all."""
    is_required: bool = False
    """True if the command requires the option."""
    is_argument: bool = False
    """True for a positional argument, which is required unless it is repeatable."""
    is_also_argument: bool = False
    """True if the value of the option may be passed as the first positional argument instead."""
    in_command: bool = True
    """True if the command has the option; else it exists in Python only."""
    read: Callable[[Any], Any] | None = None
    """Converts the text of the command line to the value; None: the text is the value."""
    is_for_onnx: bool = False
    """True if a loading option also applies to an ONNX file."""

    @property
    def help(self) -> str:
        """Help text of one or several sentences. ``--help`` prints the first sentence."""
        if self.text or self.declaring is None:
            return self.text
        return " ".join(field_docstrings(self.declaring).get(self.name, "").split())

    def expectation(self, value: object) -> str:
        """Return the hint for a value of another type: the value as the option takes it, or the option's help."""
        types = (self.annotation, *get_args(self.annotation))
        if isinstance(value, str) and any(get_origin(part) is tuple for part in types):
            return f"Pass a list: [{value!r}]."
        if isinstance(value, str) and value.lstrip("-").isdecimal() and int in types:
            return f"Pass a number: {value}."
        text = re.sub(r"`(\w+)`", lambda match: spell(match[1]), self.help.partition(". ")[0].removesuffix("."))
        return f"Expected: {text}." if text else ""

    @property
    def flag(self) -> str:
        """Main spelling on the command line: ``--trust-remote-code``."""
        return self.spelling.partition(" ")[0].partition("/")[0] or f"--{self.name.replace('_', '-')}"

    def option(self, value: object = None) -> str:
        """Return the name of the option for :func:`spell`; ``no_verify`` if the value is False."""
        on, _, off = (self.spelling or f"{self.flag}/--no-{self.flag[2:]}").partition("/")
        return (off if value is False else on).split()[0].removeprefix("--").replace("-", "_")

    @property
    def description(self) -> str:
        """Help text and default, for the schema of a config."""
        is_described = self.default_words and self.default in (None, (), {})
        return f"{self.help} Default: {self.default_words}." if is_described else self.help

    @property
    def choices(self) -> tuple[Any, ...]:
        """Accepted values, if they are enumerated."""
        if self.only is not None or self.read is not None:
            return self.only or ()
        return tuple(
            value
            for part in (self.annotation, *get_args(self.annotation))
            if get_origin(part) is Literal
            for value in get_args(part)
        )

    @property
    def is_switch(self) -> bool:
        """True for a Boolean option, including an optional one."""
        return bool in (self.annotation, *get_args(self.annotation))


def stated_options(record: object, declaring: type | None = None) -> dict[str, str]:
    """Return the options of a record with values other than the defaults: name → spelling for messages.

    Args:
        record: A request, or a record of options.
        declaring: The dataclass that declares the options; None: the type of the record.
    """
    values = ((field, getattr(record, field.name)) for field in fields_of(declaring or type(record)))
    return {field.name: spell(field.option(value)) for field, value in values if value != field.default}


def command_words(record: object, declaring: type) -> list[str]:
    """Return the words of a command line for the options of a record that differ from their defaults.

    Positional arguments are omitted.

    Args:
        record: A request, or a record of options.
        declaring: The dataclass that declares the options.
    """
    words: list[str] = []
    for field in fields_of(declaring):
        value = getattr(record, field.name)
        if value == field.default or field.is_argument or not field.in_command:
            continue
        if field.is_switch:
            words.append(f"--{field.option(value).replace('_', '-')}")
        elif isinstance(value, Mapping) and field.is_repeatable:
            words += [word for key, item in value.items() for word in (field.flag, f"{key}={item}")]
        elif isinstance(value, Mapping):
            words += [field.flag, json.dumps(value)]
        else:
            items = value if isinstance(value, (tuple, list)) else [value]
            words += [word for item in items for word in (field.flag, str(item))]
    return words


def refuse_stated(
    record: object, names: Iterable[str], message: str, hint: str, *, declaring: type | None = None
) -> None:
    """Refuse the first of several options if a record states it.

    Args:
        record: A request, or a record of options.
        names: Names of the options.
        message: The error, with ``{}`` for the spelling of the option.
        hint: The hint of the error, also with ``{}`` for the spelling.
        declaring: The dataclass that declares the options; None: the type of the record.

    Raises:
        UsageError: one of the options differs from its default.
    """
    options = stated_options(record, declaring)
    for flag in (options[name] for name in names if name in options):
        raise UsageError(message.replace("{}", flag), hint=hint.replace("{}", flag))


def declare(default: Any, group: str, **details: Any) -> Any:
    """Declare a dataclass field as an option.

    The docstring below the field is its help: ``--help`` prints the first sentence; ``--help-all``, the config and
    the reference print the whole text.

    Args:
        default: Default value.
        group: Heading of the help under which the option is listed.
        details: Attributes of :class:`Field`, such as ``short="-m"`` or ``minimum=1``.
    """
    metadata = {"group": group, **details}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def fields_of(declaring: type) -> tuple[Field, ...]:
    """Return the options that a dataclass declares, in order; other fields are omitted."""
    return tuple(_convert_field(declaring, attr) for attr in dataclasses.fields(declaring) if "group" in attr.metadata)


def _convert_field(declaring: type, attribute: dataclasses.Field[Any]) -> Field:
    """Return the option of a dataclass field, with its annotation evaluated in the declaring module."""
    base = next(base for base in declaring.__mro__ if attribute.name in vars(base).get("__annotations__", {}))
    annotation = vars(base)["__annotations__"][attribute.name]
    if isinstance(annotation, str):
        annotation = eval(annotation, vars(sys.modules[base.__module__]))  # noqa: S307  # our own source
    default = attribute.default if attribute.default_factory is dataclasses.MISSING else attribute.default_factory()
    details = {"declaring": base, "is_repeatable": get_origin(annotation) is tuple, **attribute.metadata}
    return Field(attribute.name, annotation, default, **details)


@functools.cache
def field_docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, by field; ``{}`` without source.

    Only the help and schemas need them. The source is searched with a regular expression, because parsing would take
    as long as printing the help.
    """
    file = Path(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")
    source = file.read_text(encoding="utf-8") if file.suffix.lower() == ".py" and file.is_file() else ""
    body = re.search(rf"^class {kind.__name__}\b.*?(?=^[@\w]|\Z)", source, re.DOTALL | re.MULTILINE)
    fields = re.compile(r'^    (\w+): .*\n(?:(?!    \w+:|    """|\n).*\n)*    """((?:.|\n)*?)"""', re.MULTILINE)
    return {name: inspect.cleandoc(text) for name, text in fields.findall(body[0] if body else "")}


def in_groups(groups: Iterable[str]) -> list[str]:
    """Return unique headings in the order of the help and the reference."""
    names = dict.fromkeys(groups)
    between = [group for group in names if group not in (*_FIRST, *_LAST)]
    return [*(group for group in _FIRST if group in names), *between, *(group for group in _LAST if group in names)]


def read_columns(
    texts: Iterable[str], option: str = "columns", *, hint: str = "Such as text=review."
) -> dict[str, str]:
    """Parse texts ``role=column`` to role → column; a text may contain several pairs, separated by commas.

    Roles are validated elsewhere.

    >>> read_columns(["text=review,label=stars"])
    {'text': 'review', 'label': 'stars'}

    Raises:
        UsageError: a text without ``=``, or a role that is named twice.
    """
    columns: dict[str, str] = {}
    for pair in (pair.strip() for text in texts for pair in text.split(",")):
        role, equals, column = (part.strip() for part in pair.partition("="))
        if not equals or not column:
            raise UsageError(f"{spell(option)} {pair}: expected role=column", hint=hint)
        if role in columns:
            raise UsageError(
                f"{spell(option)} {pair}: {role} is {columns[role]} already", hint="Specify one column per role."
            )
        columns[role] = column
    return columns
