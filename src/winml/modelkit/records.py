"""Writes records as JSON objects, field by field, and reads them back.

A record is a frozen dataclass. Its JSON object has an entry for each field, in declared order, and for each property
that :func:`recorded` marks. Differences from name and value (another key, rounding, an omitted entry) are metadata of
the field, made by :func:`entry`. Paths and times become text, tuples lists. NaN and infinity become null: JSON has no
such numbers. The objects are specified in ``docs/reference/formats.md``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if sys.version_info >= (3, 11):
    from typing import dataclass_transform
else:  # only type checkers read it

    def dataclass_transform(**_options: object) -> Callable[[type], type]:
        return lambda kind: kind


_ENTRY = "entry"
"""Key of the entry in the metadata of a field, and its attribute name on the getter of a property."""


@dataclass(frozen=True)
class _Entry:
    """JSON format of an attribute; see :func:`entry`."""

    key: str = ""
    """Key of the entry; empty: the name of the attribute."""
    within: str = ""
    """Key of the object inside the record that contains the entry; empty: the record itself."""
    before: str = ""
    """Key of the next entry; empty: no fixed order."""
    last: bool = False
    """True if the entry follows all entries without this mark, including entries of subclasses."""
    digits: int | None = None
    """Decimal places of numbers; None: those of the class."""
    scale: float = 1
    """Factor of the number: 1000 writes seconds as milliseconds."""
    attribute: str = ""
    """Attribute of the value to write in place of the value."""
    keys: tuple[str, ...] = ()
    """Keys of the written entries of a nested record, or of each record of a list; empty: all entries."""
    inline: bool = False
    """True if the entries of a nested record are added to the record itself; None adds no entry."""
    skip: bool = False
    """True if the attribute is not written."""
    omit_none: bool = False
    """True if None is not written."""
    omit_empty: bool = False
    """True if None, False, 0 and empty values are not written."""
    null_if_empty: bool = False
    """True if False, 0 and empty values are written as null."""

    def write(self, value: Any, record: dict[str, Any]) -> None:
        """Write a value into a JSON object, in place, by the rules of the entry; omitted values add nothing."""
        if self.attribute and value is not None:
            value = getattr(value, self.attribute)
        if (self.omit_none and value is None) or (self.omit_empty and not value):
            return
        if self.null_if_empty and not value:
            value = None
        if self.scale != 1 and value is not None:
            value *= self.scale
        if self.within:
            record = record.setdefault(self.within, {})
        json_entry = json_value(value, self.digits)
        if self.keys:
            json_entry = _select_entries(json_entry, self.keys)
        if not self.inline:
            record[self.key] = json_entry
        elif json_entry is not None:
            record.update(json_entry)


def _select_entries(value: Any, keys: tuple[str, ...]) -> Any:
    """Return selected entries of a JSON object, or of each object of an array; `None` stays `None`."""
    if isinstance(value, list):
        return [_select_entries(element, keys) for element in value]
    return None if value is None else {key: value[key] for key in keys if key in value}


def entry(key: str = "", **attributes: Any) -> Mapping[str, Any]:
    """Return the metadata of a field that is not simply written under its name: ``field(metadata=entry("class"))``.

    Args:
        key: Key of the entry, if it differs from the name of the attribute.
        attributes: Further attributes of :class:`_Entry`, such as ``digits=3`` or ``skip=True``.
    """
    return {_ENTRY: _Entry(key, **attributes)}


RecordT = TypeVar("RecordT", bound="Record")
GetterT = TypeVar("GetterT", bound=Callable[[Any], Any])


def recorded(metadata: Mapping[str, Any] | None = None) -> Callable[[GetterT], GetterT]:
    """Mark a method, or a property below ``@property``, as an entry of the record, with optional :func:`entry`."""

    def mark(getter: GetterT) -> GetterT:
        vars(getter)[_ENTRY] = (metadata or entry())[_ENTRY]
        return getter

    return mark


class _RecordType(type):
    """Type of record classes: refuses a second ``@dataclass``, which would lose the entries of fields."""

    if not TYPE_CHECKING:  # a type checker would let every attribute be set

        def __setattr__(cls, name: str, value: object) -> None:
            if name == "__dataclass_fields__" and name in vars(cls):
                raise TypeError(f"{cls.__qualname__} is a record, so a frozen dataclass already: delete its @dataclass")
            super().__setattr__(name, value)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Record(metaclass=_RecordType):
    """Base of records: a subclass is a frozen dataclass, without the decorator, that is written as a JSON object.

    Class keywords are constant entries of every record, and are written first. ``digits`` rounds the numbers of all
    fields without ``digits``.

    >>> class Timing(Record, schema_version=1):
    ...     class_name: str = dataclasses.field(metadata=entry("class"))
    ...     seconds: float = dataclasses.field(metadata=entry("milliseconds", scale=1000, digits=1))
    >>> Timing("Linear", 0.01234).as_record()
    {'schema_version': 1, 'class': 'Linear', 'milliseconds': 12.3}
    """

    __slots__ = ()

    __pydantic_config__: ClassVar[dict[str, object]] = {"strict": True, "extra": "forbid"}
    _constants: ClassVar[Mapping[str, int | str]] = {}
    _digits: ClassVar[int | None] = None

    def __init_subclass__(cls, *, digits: int | None = None, **constants: int | str) -> None:
        """Make the class a dataclass, and store its constant entries and digits."""
        super().__init_subclass__()
        cls._constants = {**cls._constants, **constants}
        cls._digits = cls._digits if digits is None else digits
        dataclass(frozen=True)(cls)

    def as_record(self) -> dict[str, object]:
        """Return the JSON object."""
        record: dict[str, object] = dict(self._constants)
        kind = type(self)
        if kind not in _ENTRIES:
            _ENTRIES[kind] = tuple(_list_entries(kind))
        for name, rule in _ENTRIES[kind]:
            value = getattr(self, name)
            rule.write(value() if callable(value) else value, record)
        return record

    @classmethod
    def from_fields(cls: type[RecordT], values: Any) -> RecordT:  # noqa: PYI019  # Python 3.10 has no Self
        """Make a record of JSON values: a mapping of field names, also for nested records.

        Raises:
            ValueError: a field is missing or unknown, or its value is of the wrong kind.
        """
        # Strict mode converts arrays to tuples only in JSON text.
        import pydantic

        return pydantic.TypeAdapter(cls).validate_json(json.dumps(values))


def record_keys(kind: type[Record]) -> tuple[str, ...]:
    """Return the keys that records of a class can have, in order, without keys of inlined records."""
    rules = (rule for _, rule in _list_entries(kind) if not rule.inline)
    return (*kind._constants, *dict.fromkeys(rule.within or rule.key for rule in rules))


def json_value(value: Any, digits: int | None = None) -> Any:
    """Convert a value to JSON-ready values.

    Args:
        value: Text, number, path, time, record, or mappings and sequences of these.
        digits: Decimal places of numbers; records use their own digits.

    Raises:
        TypeError: JSON has no equivalent of the value.
    """
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return None if not math.isfinite(value) else value if digits is None else round(value, digits)
    if isinstance(value, Mapping):
        return {key: json_value(member, digits) for key, member in value.items()}
    if isinstance(value, (tuple, list)):
        return [json_value(element, digits) for element in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds")
    if hasattr(value, "as_record"):
        return value.as_record()
    raise TypeError(f"{type(value).__name__} {value!r} cannot be written as JSON; convert it where the record is made")


_ENTRIES: dict[type[Record], tuple[tuple[str, _Entry], ...]] = {}
"""Class of written records → its attributes in order."""


def _list_entries(kind: type[Any]) -> list[tuple[str, _Entry]]:
    """Return the written attributes in order: fields, then properties, each with attributes of the base class first."""
    default = _Entry()
    rules = {attribute.name: attribute.metadata.get(_ENTRY, default) for attribute in dataclasses.fields(kind)}
    for base in reversed(kind.__mro__):
        for name, member in vars(base).items():
            getter = member.fget if isinstance(member, property) else getattr(member, "func", member)
            if _ENTRY in getattr(getter, "__dict__", {}):
                rules[name] = vars(getter)[_ENTRY]
    entries: list[tuple[str, _Entry]] = []
    for name, rule in sorted(rules.items(), key=lambda pair: (bool(pair[1].before), pair[1].last)):
        if rule.skip:
            continue
        digits = kind._digits if rule.digits is None else rule.digits
        complete_rule = dataclasses.replace(rule, key=rule.key or name, digits=digits)
        keys = [written_rule.key for _, written_rule in entries]
        entries.insert(keys.index(rule.before) if rule.before else len(entries), (name, complete_rule))
    return entries
