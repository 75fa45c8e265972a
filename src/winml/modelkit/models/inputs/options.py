"""Parsing of ``--shape-config`` and ``--input-specs`` into records.

Independent of the model: ``decision.py`` checks sizes and names against the model. Imports neither torch nor
transformers, so errors are reported at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import pydantic

from winml.modelkit.errors import ConfigError, opt
from winml.modelkit.models.inputs.modalities.pipeline import SHAPE_KEYS
from winml.modelkit.models.inputs.sizes import SEPARATOR
from winml.modelkit.onnx.specs import InputTensorSpec, OpenSize
from winml.modelkit.options import Options, parse_options, read_json


def _read_size(value: object) -> int | OpenSize:
    """Read one size: a number, or a dynamic size (a name, or an object with min, max, example or name).

    Raises:
        ValueError: the value is neither, or the number is less than 1; pydantic adds the name of the field.
    """
    if isinstance(value, OpenSize):
        return value
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, dict):
        try:
            return parse_options(OpenSize, value, "")
        except ConfigError as error:
            # The caller adds the option and the key of the size.
            raise ValueError(error.message.removeprefix(": ")) from None
    if not isinstance(value, int) or isinstance(value, bool):
        # pydantic converts only a ValueError into an error that names the field.
        raise ValueError("expected a whole number, a name, or an object with min, max and example")  # noqa: TRY004
    if value < 1:
        raise ValueError("Input should be greater than or equal to 1")
    return value


def _as_json(value: int | OpenSize) -> int | dict[str, object]:
    return value if isinstance(value, int) else value.model_dump(exclude_defaults=True)


Size = Annotated[
    int | OpenSize,
    pydantic.PlainValidator(_read_size),
    pydantic.PlainSerializer(_as_json, return_type=int | dict[str, object]),
]


_SIZE_FIELDS: dict[str, Any] = {
    key.name: (Size | None, pydantic.Field(None, description=key.description)) for key in SHAPE_KEYS.values()
}
"""One field for each key that a modality understands."""
_SizeFields: Any = pydantic.create_model("_SizeFields", __base__=Options, **_SIZE_FIELDS)


class ShapeConfig(_SizeFields):  # type: ignore[misc]  # its fields are known at run time only
    """Requested sizes; `None` leaves the size to the model's config, an :class:`OpenSize` makes the size dynamic."""

    def fixed(self) -> dict[str, int]:
        """Return the sizes with a number."""
        return {key: value for key, value in self if isinstance(value, int)}

    def left_open(self) -> dict[str, OpenSize]:
        """Return the dynamic sizes."""
        return {key: value for key, value in self if isinstance(value, OpenSize)}


def parse_shape_config(text_or_path: str | os.PathLike[str]) -> ShapeConfig:
    """Read ``--shape-config``: a JSON object of sizes, inline or in a file; a name makes a size dynamic.

    Raises:
        ConfigError: not JSON, an unknown key, or a size that is not an integer of at least 1.
    """
    return parse_options(ShapeConfig, *read_json(text_or_path, opt.shape_config))


def parse_input_specs(text_or_path: str | os.PathLike[str]) -> tuple[InputTensorSpec, ...]:
    """Read ``--input-specs``: descriptions of inputs, inline or in a file. An element type may be omitted.

    Either a list of ``{"name", "shape", "dtype", "value_range"?, "first_values"?}`` objects, the format of
    ``winml.io.inputs`` in the model, or one object with the names as keys. In such an object, an input inside a
    container may be inside an object or a list: ``{"features": {"input_ids": {…}}, "images": [{…}, {…}]}`` describes
    ``features.input_ids``, ``images.0`` and ``images.1``. Element type and shape may be one text, which needs no
    quotes in a shell: ``input_ids=int64[batch,16],x=[1,8]``.

    Raises:
        ConfigError: not JSON, an unknown key, a wrong value, no input at all, or a name given twice.
    """
    value, origin = read_json(text_or_path, opt.input_specs)
    entries = _input_entries(value, origin)
    specs = tuple(InputTensorSpec.read_patch(entry, location) for location, entry in entries)
    if not specs:
        raise ConfigError(f"{origin}: no input is described", hint='Describe at least one {"name", "shape", "dtype"}.')
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{origin}: input {name!r} is described twice")
    return specs


def _input_entries(value: object, origin: str) -> list[tuple[str, Any]]:
    """Return (location for messages, entry) of every described input.

    Raises:
        ConfigError: the value is neither a list nor an object of inputs, or an entry has another name inside.
    """
    if isinstance(value, list):
        return [(f"{origin}: input {index}", entry) for index, entry in enumerate(value)]
    if not isinstance(value, dict):
        raise ConfigError(f"{origin}: expected a list of inputs, got {type(value).__name__}")
    entries = []
    for name, entry in _flatten_entries(value, ""):
        location = f"{origin}: input {name!r}"
        if isinstance(entry, str) and (short := _TYPE_AND_SHAPE.fullmatch(entry)):
            entry = _read_type_and_shape(short)
        if not isinstance(entry, dict):
            raise ConfigError(
                f"{location}: expected an object with shape and dtype, got {type(entry).__name__}",
                hint=f'Such as {{"{name}": {{"shape": ["batch", 16], "dtype": "int64"}}}} or {name}=int64[batch,16]; a '
                "name is a dynamic size.",
            )
        if entry.get("name", name) != name:
            raise ConfigError(f"{location}: has a different name inside, {entry['name']!r}")
        entries.append((location, {**entry, "name": name}))
    return entries


_TYPE_AND_SHAPE = re.compile(r"(?P<dtype>\w*)\[(?P<shape>[^\[\]]*)\]")
"""``float32[1,3,224,224]``, as ONNX's text format writes types; without an element type ``[1,3,224,224]``."""


def _read_type_and_shape(match: re.Match[str]) -> dict[str, object]:
    sizes = [size.strip() for size in match["shape"].split(",") if size.strip()]
    shape = [int(size) if size.lstrip("-").isdecimal() else size for size in sizes]
    return {"shape": shape, **({"dtype": match["dtype"]} if match["dtype"] else {})}


def _flatten_entries(value: Mapping[str, Any] | list[Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield path and entry of every leaf in objects and lists that contain only objects and lists."""
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
        name = f"{prefix}{SEPARATOR}{key}" if prefix else str(key)
        if _is_container(entry):
            yield from _flatten_entries(entry, name)
        else:
            yield name, entry


def _is_container(entry: object) -> bool:
    if isinstance(entry, dict):
        return bool(entry) and all(isinstance(child, dict) or _is_container(child) for child in entry.values())
    return isinstance(entry, list) and bool(entry) and all(isinstance(child, (dict, list)) for child in entry)
