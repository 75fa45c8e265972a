"""How does a JSON text become validated options?

Every JSON the user hands in passes through here, so syntax errors name line and column, unknown keys name the nearest
known key, and wrong values name the field. Knows nothing of what the options mean.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from winml.modelkit.errors import ConfigError

__all__ = ["Options", "nearest", "parse_options", "read_json", "unknown_key_message"]


class Options(pydantic.BaseModel):
    """Base of every options record: frozen, strict, and without room for unknown keys."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


_OptionsT = TypeVar("_OptionsT", bound=pydantic.BaseModel)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the member of ``known`` that ``word`` was probably meant to be, or None."""
    matches = difflib.get_close_matches(word.lower(), candidates := sorted(known), n=1, cutoff=0.5)
    if matches:
        return matches[0]
    return next((name for name in candidates if name.startswith(word.lower()) or word.lower().startswith(name)), None)


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
    if not text.lstrip().startswith(("{", "[")):
        source = f"{option} {text}"
        try:
            text = Path(text).read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise ConfigError(f"{source}: no such file", hint="Give the path of a JSON file, or JSON text.") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"{source}: cannot be read: {reason}") from error
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates), source
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except _DuplicateKeyError as error:
        raise ConfigError(f"{source}: key {error.args[0]!r} stands twice in one object") from None


class _DuplicateKeyError(ValueError):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise _DuplicateKeyError(key)
        seen[key] = value
    return seen


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
    first = error.errors(include_url=False)[0]
    location = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = [field.alias or name for name, field in options.model_fields.items()]
        return unknown_key_message(str(first["loc"][-1]), known, source)
    reason = str(first["msg"]).removeprefix("Value error, ")
    given = "" if first["type"] == "missing" else f" (got {first['input']!r})"
    return f"{source}: {location or 'value'}: {reason}{given}"
