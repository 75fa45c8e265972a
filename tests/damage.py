"""Damages to files: changed, cut or inserted bytes, replaced fields of a protobuf message or values of a JSON text."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from typing import Any

import onnx
from hypothesis import strategies as st

_EXTREME_INTEGERS = (-1, 0, 1, 2, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63))
_EXTREME_TEXTS = (
    "",
    "x",
    "a" * 300,
    "../outside",
    "/dev/zero",
    "\x1b[31m",
    "\u202eabc",
    "Add",
    "com.microsoft",
    "-1",
    "nul\0",
)
_EXTREME_BYTES = (b"", b"\xff", b"\xff\xfe\x00", b"abc", b"\x00" * 40)

Damage = Callable[[bytes], bytes]

positions = st.integers(0, 2**16 - 1)


def _cut_position(position: int, size: int) -> int:
    return position * size // 2**16


def _flip(content: bytes, position: int, value: int) -> bytes:
    at = _cut_position(position, len(content))
    return content[:at] + bytes([content[at] ^ (value % 255 + 1)]) + content[at + 1 :] if content else content


def _cut(content: bytes, position: int, _value: int) -> bytes:
    return content[: _cut_position(position, len(content))]


def _insert(content: bytes, position: int, value: int) -> bytes:
    at = _cut_position(position, len(content))
    return content[:at] + bytes([value % 256]) * (value % 9 + 1) + content[at:]


def _remove(content: bytes, position: int, value: int) -> bytes:
    at = _cut_position(position, len(content))
    return content[:at] + content[at + value % 17 + 1 :]


def _double(content: bytes, position: int, value: int) -> bytes:
    at = _cut_position(position, len(content))
    return content[:at] + content[at : at + value % 64] * 2 + content[at + value % 64 :]


def _unreadable_text(content: bytes, position: int, value: int) -> bytes:
    """Put a byte that is not UTF-8 into the text nearest to a position."""
    at = _cut_position(position, len(content))
    while at < len(content) and not chr(content[at]).isalpha():
        at += 1
    return content[:at] + bytes([0x80 + value % 128]) + content[at + 1 :] if at < len(content) else content


def _set_number(content: bytes, position: int, value: int) -> bytes:
    """Replace four or eight bytes by an integer that is no valid count, or by an integer of another type."""
    number = _EXTREME_INTEGERS[value % len(_EXTREME_INTEGERS)]
    at, size = _cut_position(position, len(content)), (4, 8)[value // 16 % 2]
    return content[:at] + (number % 2 ** (8 * size)).to_bytes(size, "little") + content[at + size :]


_BYTE_DAMAGES = (_flip, _cut, _insert, _remove, _double, _unreadable_text)


def _fields(message: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (message, set field) of a message and of all messages nested inside."""
    for field, value in message.ListFields():
        yield message, field
        if field.message_type is not None:
            for inner in value if isinstance(value, MutableSequence) else (value,):
                yield from _fields(inner)


def _change_field(content: bytes, position: int, value: int) -> bytes:
    """Replace, delete or double one field of an ONNX model."""
    try:
        model = onnx.ModelProto.FromString(content)
        places = list(_fields(model))
    except Exception:  # an earlier damage made the model unreadable
        return content
    if not places:
        return content
    message, field = places[_cut_position(position, len(places))]
    _replace(message, field, value)
    return bytes(model.SerializeToString())


def _replace(message: Any, field: Any, value: int) -> None:
    items = getattr(message, field.name)
    if isinstance(items, MutableSequence):
        index = value % len(items)
        if value % 3 == 0:
            del items[index]
        elif field.message_type is not None:
            items.add().CopyFrom(copy.deepcopy(items[index]))
        elif value % 3 == 1:
            items.append(items[index])
        else:
            items[index] = _extreme(field, value)
    elif field.message_type is not None or value % 5 == 0:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _extreme(field, value))


def _extreme(field: Any, value: int) -> Any:
    kinds: dict[int, Sequence[Any]] = {
        field.CPPTYPE_STRING: _EXTREME_BYTES if field.type == field.TYPE_BYTES else _EXTREME_TEXTS,
        field.CPPTYPE_FLOAT: (float("nan"), float("inf"), 0.0),
        field.CPPTYPE_DOUBLE: (float("nan"), float("inf"), 0.0),
    }
    choices = kinds.get(field.cpp_type)
    if choices is None:
        bits = 64 if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) else 32
        low = 0 if field.cpp_type in (field.CPPTYPE_UINT64, field.CPPTYPE_UINT32) else -(2 ** (bits - 1))
        choices = [number for number in _EXTREME_INTEGERS if low <= number < 2 ** (bits - 1)]
        if field.enum_type is not None:
            choices = [0]
    return choices[value % len(choices)]


_JSON_VALUES = (
    None, True, -1, 0, 3, 2**31, 2**70, 1e308, 0.5, "", "x", "a" * 300, "../x", "nul\0", "\ud800", [], [[]], {},
    {"a": 1}, [None], ["x"], [2, 3],
)  # fmt: skip


def _json_places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _json_places(value[key])


def change_json(content: bytes, position: int, value: int) -> bytes:
    """Replace, delete or wrap one value of a JSON text."""
    try:
        record = json.loads(content)
        places = list(_json_places(record))
    except (ValueError, RecursionError):
        return content
    if not places:
        return content
    holder, key = places[_cut_position(position, len(places))]
    if value % 8 == 0:
        del holder[key]
    elif value % 8 == 1:
        deep: Any = holder[key]
        for _ in range((1, 50, 500)[value % 3]):
            deep = [deep]
        holder[key] = deep
    else:
        holder[key] = _JSON_VALUES[value % len(_JSON_VALUES)]
    try:
        return json.dumps(record).encode()
    except RecursionError:
        return content  # Python 3.12 writes fewer levels than it reads


def damages(*kinds: Callable[[bytes, int, int], bytes]) -> st.SearchStrategy[Damage]:
    """Return damages made of one to three steps of the given kinds, or of byte damages as well."""
    numbers = positions, st.integers(0, 2**16 - 1)
    of_kinds = st.tuples(st.sampled_from(kinds), *numbers)
    of_bytes = st.tuples(st.sampled_from(_BYTE_DAMAGES), *numbers)

    def joined(steps: list[tuple[Callable[[bytes, int, int], bytes], int, int]]) -> Damage:
        def apply(content: bytes) -> bytes:
            for damage, position, value in steps:
                content = damage(content, position, value)
            return content

        return apply

    # Damaged bytes mostly fail in the parser; damaged fields get further.
    steps = st.one_of(st.lists(of_kinds, min_size=1, max_size=3), st.lists(of_kinds | of_bytes, min_size=1, max_size=3))
    return steps.map(joined)


onnx_damages = damages(_change_field)
json_damages = damages(change_json)
byte_damages = damages(_set_number)
