"""How does a JSON text become validated options?

Every JSON the user hands in passes through here, so syntax errors name line and column, unknown keys name the nearest
known key, and wrong values name the field. Knows nothing of what the options mean.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import pydantic

from winml.modelkit.errors import ConfigError

__all__ = ["Options", "nearest", "parse_json", "parse_options", "read_json", "unknown_key_message"]


class Options(pydantic.BaseModel):
    """Base of every options record: frozen, strict, and without room for unknown keys."""

    # Descriptions in JSON Schemas are the docstrings of the fields.
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


_OptionsT = TypeVar("_OptionsT", bound=pydantic.BaseModel)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the member of ``known`` that ``word`` was probably meant to be, or None."""
    word, candidates = word.lower(), {name.lower(): name for name in sorted(known)}
    matches = difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    if matches:
        return candidates[matches[0]]
    return next((candidates[name] for name in candidates if name.startswith(word) or word.startswith(name)), None)


def unknown_key_message(key: str, known: Iterable[str], source: str) -> str:
    """Return the sentence for a key nobody knows, with the nearest known one."""
    names = sorted(known)
    guess = nearest(key, names)
    ending = f"did you mean {guess!r}?" if guess else f"known keys: {', '.join(names)}"
    return f"{source}: unknown key {key!r}; {ending}"


def read_json(text_or_path: str | os.PathLike[str], option: str) -> tuple[Any, str]:
    """Read JSON given inline or as a file.

    Args:
        text_or_path: A path, or a text that starts with ``{`` or ``[``.
        option: Name of the option it came from, for messages (``--shape-config``).

    Returns:
        The parsed value and the name of its source, for further messages.

    Raises:
        ConfigError: the file is missing or unreadable, or the text is not JSON (names line and column).
    """
    text = os.fspath(text_or_path)
    source = option
    if not text.strip():
        raise ConfigError(f"{option}: the text is empty", hint="Give the path of a JSON file, or JSON text.")
    if not text.lstrip().startswith(("{", "[")):
        source = f"{option} {text}"
        try:
            text = Path(text).read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise ConfigError(f"{source}: no such file", hint="Give the path of a JSON file, or JSON text.") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"{source}: cannot be read: {reason}") from error
    return parse_json(text, source)


def parse_json(text: str, source: str) -> tuple[Any, str]:
    """Read JSON text.

    Args:
        text: The text.
        source: Where it came from, for messages.

    Returns:
        The parsed value and ``source``, as :func:`read_json` does.

    Raises:
        ConfigError: it is not JSON (names line and column), or a key stands twice in an object.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant), source
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}",
            hint="Mend it there. Where a shell takes the quotes out of JSON text, give it as a file.",
        ) from None
    except _DuplicateKeyError as error:
        raise ConfigError(f"{source}: key {error.args[0]!r} stands twice in one object") from None
    except RecursionError:
        raise ConfigError(f"{source}: its values lie too deep in one another") from None
    except ValueError as error:
        raise ConfigError(f"{source}: not valid JSON: {error}") from None


class _DuplicateKeyError(ValueError):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise _DuplicateKeyError(key)
        seen[key] = value
    return seen


def _refuse_constant(name: str) -> None:
    # Python reads NaN and infinities, which JSON does not have and no option means.
    raise ValueError(f"{name} is not a JSON value")


def parse_options(options: type[_OptionsT], value: Any, source: str) -> _OptionsT:
    """Validate parsed JSON against an options record.

    Raises:
        ConfigError: an unknown key (names the nearest known one) or a value of the wrong kind (names the field).
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: expected a JSON object, got {type(value).__name__}")
    try:
        # JSON mode reads arrays as tuples and numbers as floats where the record says so, and stays strict otherwise.
        return options.model_validate_json(json.dumps(value))
    except pydantic.ValidationError as error:
        raise ConfigError(_validation_message(options, error, source)) from None


def _validation_message(options: type[pydantic.BaseModel], error: pydantic.ValidationError, source: str) -> str:
    problems = error.errors(include_url=False)
    # A misspelled key leaves the right one missing; the first is the cause.
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    # The last part may name a validator of pydantic's, which is no place in the JSON.
    location = ".".join(str(part) for part in first["loc"] if "-" not in str(part) and "[" not in str(part))
    if first["type"] == "extra_forbidden":
        *outer, key = first["loc"]
        owner = _record_at(options, outer)
        known = [field.alias or name for name, field in owner.model_fields.items()]
        where = ".".join(str(part) for part in outer)
        return unknown_key_message(str(key), known, f"{source}: {where}" if where else source)
    reason = str(first["msg"]).removeprefix("Value error, ")
    given = "" if first["type"] == "missing" else f" (got {first['input']!r})"
    return f"{source}: {location or 'value'}: {reason}{given}"


def _record_at(options: type[pydantic.BaseModel], location: Iterable[str | int]) -> type[pydantic.BaseModel]:
    """Return the record that stands at a place inside another; positions in lists are stepped over."""
    for part in location:
        field = options.model_fields.get(part) if isinstance(part, str) else None
        if field is not None:
            options = next(_records_in(field.annotation), options)
    return options


def _records_in(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    """Yield the records an annotation mentions (``tuple[Record, ...] | None``)."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _records_in(argument)
