"""Parses and validates the JSON that users pass as options.

Syntax errors name line and column, unknown keys the nearest known key, and wrong values the field. Does not know what
the options mean.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import pydantic

from winml.modelkit.errors import ConfigError

__all__ = ["Options", "nearest", "parse_json", "parse_options", "read_json", "unknown_key_message"]


class _NamedErrors(type(pydantic.BaseModel)):  # type: ignore[misc]  # pydantic's own metaclass has no public name
    """Tells a caller in Python what is wrong with a value as it is told to a user of the command."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except pydantic.ValidationError as error:
            raise ConfigError(_validation_message(cls, error, cls.__name__)) from None


if TYPE_CHECKING:
    _Checked = pydantic.BaseModel
else:
    # Of a metaclass without a public name mypy cannot tell that this one derives from it.
    class _Checked(pydantic.BaseModel, metaclass=_NamedErrors):
        pass


class Options(_Checked):
    """Base of every options record: frozen, strict, unknown keys are errors.

    Raises:
        ConfigError: an unknown key (names the nearest known one) or a value of the wrong kind (names the field).
    """

    # Descriptions in JSON Schemas are the docstrings of the fields.
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


_OptionsT = TypeVar("_OptionsT", bound=pydantic.BaseModel)


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the member of ``names`` that ``word`` was probably meant to be, or None."""
    word, candidates = word.lower(), {candidate.lower(): candidate for candidate in sorted(names)}
    matches = difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    if matches:
        return candidates[matches[0]]
    prefixes = (lower for lower in candidates if lower.startswith(word) or word.startswith(lower))
    return next((candidates[lower] for lower in prefixes), None)


def unknown_key_message(key: str, keys: Iterable[str], label: str) -> str:
    """Return the message for an unknown key, with the nearest of ``keys``."""
    names = sorted(keys)
    guess = nearest(key, names)
    ending = f"did you mean {guess!r}?" if guess else f"known keys: {', '.join(names)}"
    return f"{label}: unknown key {key!r}; {ending}"


def read_json(text_or_path: str | os.PathLike[str], option: str) -> tuple[Any, str]:
    """Read JSON given inline or as a file.

    Args:
        text_or_path: A path, or a text that starts with ``{`` or ``[``.
        option: Name of the option it came from, for messages (``--shape-config``).

    Returns:
        The parsed value and a label for it, for further messages.

    Raises:
        ConfigError: the file is missing or unreadable, or the text is not JSON (names line and column).
    """
    text = os.fspath(text_or_path)
    label = option
    if not text.strip():
        raise ConfigError(f"{option}: the text is empty", hint="Give the path of a JSON file, or JSON text.")
    if not text.lstrip().startswith(("{", "[")):
        label = f"{option} {text}"
        try:
            text = Path(text).read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise ConfigError(f"{label}: no such file", hint="Give the path of a JSON file, or JSON text.") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"{label}: cannot be read: {reason}") from error
    return parse_json(text, label)


def parse_json(text: str, label: str) -> tuple[Any, str]:
    """Read JSON text.

    Args:
        text: The text.
        label: Name of the option or file it came from, for messages.

    Returns:
        The parsed value and ``label``, as :func:`read_json` does.

    Raises:
        ConfigError: it is not JSON (names line and column), or an object has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant), label
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{label}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}",
            hint="Mend it there. Where a shell takes the quotes out of JSON text, give it as a file.",
        ) from None
    except _DuplicateKeyError as error:
        raise ConfigError(f"{label}: key {error.args[0]!r} stands twice in one object") from None
    except RecursionError:
        raise ConfigError(f"{label}: its values are nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{label}: not valid JSON: {error}") from None


class _DuplicateKeyError(ValueError):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise _DuplicateKeyError(key)
        members[key] = value
    return members


def _refuse_constant(name: str) -> None:
    # Python accepts NaN and infinities, which JSON does not have and no option needs.
    raise ValueError(f"{name} is not a JSON value")


def parse_options(options: type[_OptionsT], value: Any, label: str) -> _OptionsT:
    """Validate parsed JSON against an options record.

    Raises:
        ConfigError: an unknown key (names the nearest known one) or a value of the wrong kind (names the field).
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{label}: expected a JSON object, got {type(value).__name__}")
    try:
        # JSON mode reads arrays as tuples and numbers as floats where the record says so, and stays strict otherwise.
        return options.model_validate_json(json.dumps(value))
    except pydantic.ValidationError as error:
        raise ConfigError(_validation_message(options, error, label)) from None


def _validation_message(options: type[pydantic.BaseModel], error: pydantic.ValidationError, label: str) -> str:
    problems = error.errors(include_url=False)
    # A misspelled key also leaves the right one missing; report the misspelled one.
    problem = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    if problem["type"] == "extra_forbidden":
        *outer, key = problem["loc"]
        known_keys = [field.alias or name for name, field in _record_at(options, outer).model_fields.items()]
        outer_location = ".".join(map(str, outer))
        return unknown_key_message(str(key), known_keys, f"{label}: {outer_location}" if outer_location else label)
    # The last element of the location may name a validator of pydantic, which is not in the JSON.
    location = ".".join(element for element in map(str, problem["loc"]) if "-" not in element and "[" not in element)
    reason = str(problem["msg"]).removeprefix("Value error, ")
    got = "" if problem["type"] == "missing" else f" (got {problem['input']!r})"
    return f"{label}: {location or 'value'}: {reason}{got}"


def _record_at(options: type[pydantic.BaseModel], location: Iterable[str | int]) -> type[pydantic.BaseModel]:
    """Return the record at a location inside another; indices of lists are skipped."""
    for element in location:
        field = options.model_fields.get(element) if isinstance(element, str) else None
        if field is not None:
            options = next(_records_in(field.annotation), options)
    return options


def _records_in(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    """Yield the records an annotation mentions (``tuple[Record, ...] | None``)."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _records_in(argument)
