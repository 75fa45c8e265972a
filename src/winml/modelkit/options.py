"""Parses and validates the JSON that users pass as options.

Syntax errors name line and column, unknown keys the nearest known key, and wrong values the field. Other JSON files
are read here as well, with a size limit and without invalid JSON that Python accepts (deep nesting, lone surrogates).
Independent of the meaning of the options.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_args, get_origin

import pydantic

from winml.modelkit.errors import ConfigError, UsageError, opt, spell
from winml.modelkit.fields import Field, field_docstrings, fields_of

JSON_LIMIT_BYTES = 100_000_000
"""Chosen: the header limit of the safetensors format, and ten times the largest weight index."""
_DEEPEST = 100
"""Chosen: configs have a handful of levels; Python supports a thousand and then fails at an arbitrary place."""
_PIECE_BYTES = 1 << 20
"""Chosen: larger than almost every config."""
_INHERITED = ("/dev/fd/", "/dev/stdin", "/proc/")
"""Paths of open files of a process: a pipe at such a path has a writer, as in ``--shape-config <(command)``."""


class _NamedErrors(type(pydantic.BaseModel)):  # type: ignore[misc]  # pydantic's own metaclass has no public name
    """Replaces bases that declare options by validated fields, and reports wrong values to Python callers."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **settings: Any) -> Any:
        """Create a record; a base with fields of :func:`winml.modelkit.fields.declare` is not a base at run time."""
        declaring = [base for base in bases if dataclasses.is_dataclass(base)]
        fields = {field.name: field for base in declaring for field in fields_of(base)}
        declared = {name: pydantic.Field(**_default_keyword(field)) for name, field in fields.items()}
        types = {name: _limited_type(field) for name, field in fields.items()}
        members = {**declared, **namespace, "__annotations__": {**types, **namespace.get("__annotations__", {})}}
        records = tuple(base for base in bases if base not in declaring)
        record = super().__new__(mcs, name, records, members, **settings)
        record.declared = tuple(fields.values())
        return record

    def __call__(cls, *args: object, **values: Any) -> Any:
        try:
            return super().__call__(*args, **{name: _as_tuples(value) for name, value in values.items()})
        except pydantic.ValidationError as error:
            raise _convert_validation_error(cls, error, cls.__name__) from None


def _as_tuples(value: object) -> object:
    """Convert nested lists to the tuples of a record; JSON and Python callers use lists."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


if TYPE_CHECKING:
    _Checked = pydantic.BaseModel
else:
    # mypy cannot see the base class of a metaclass without a public name.
    class _Checked(pydantic.BaseModel, metaclass=_NamedErrors):
        pass


class Options(_Checked):
    """Base of every options record: frozen, strict, unknown keys are errors.

    Raises:
        ConfigError: an unknown key (names the nearest known key) or a value of the wrong kind (names the field).
    """

    ways_out: ClassVar[Mapping[str, str]] = {}
    """Alternatives for error messages: key of another tool, or field with a wrong value → hint."""

    section: ClassVar[str] = ""
    """Section of a build config that the record represents; empty: no section."""
    declared: ClassVar[tuple[Field, ...]] = ()
    """Options declared by a base of the class."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    def stated_options(self) -> dict[str, Any]:
        """Return the options that were specified, by name; defaults are omitted, values are not converted to JSON."""
        return {name: getattr(self, name) for name in self.model_fields_set}

    def spelled(self, name: str) -> str:
        """Return the name of an option for errors: the key of the config section, or as :func:`spell`."""
        if self.section:
            return f"{self.section}.{name}"
        return next(spell(field.option(True)) for field in self.declared if field.name == name)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: pydantic.GetJsonSchemaHandler) -> dict[str, Any]:
        """Describe each field by its docstring.

        The docstrings are read only when a schema is written: pydantic's ``use_attribute_docstrings`` reads the
        source of every declared class, which takes 30 to 70 ms per class once torch is imported.
        """
        json_schema = handler(schema)
        properties = handler.resolve_ref_schema(json_schema).get("properties", {})
        for kind in cls.__mro__:
            docstrings = field_docstrings(kind) if kind.__module__.startswith(__package__) else {}
            declared = {field.name: field.description for field in vars(kind).get("declared", ())}
            for name, text in {**declared, **docstrings}.items():
                if name in properties:
                    properties[name].setdefault("description", text)
        return json_schema


_OptionsT = TypeVar("_OptionsT", bound=pydantic.BaseModel)


def _default_keyword(field: Field) -> dict[str, Any]:
    """Return the default of a field as a keyword of :class:`pydantic.Field`; each record gets a copy of a mapping."""
    is_mapping = isinstance(field.default, dict)
    return {"default_factory": field.default.copy} if is_mapping else {"default": field.default}


def _limited_type(field: Field) -> Any:
    """Return the type of a field with its limits."""
    if field.min_length is not None:
        text = Annotated[str, pydantic.Field(min_length=field.min_length)]
        return (
            tuple[text, ...]
            if get_origin(field.annotation) is tuple
            else (text | None if field.default is None else text)
        )
    if float in (field.annotation, *get_args(field.annotation)) and get_origin(field.annotation) is not dict:
        limits = pydantic.Field(allow_inf_nan=False, gt=field.above, ge=field.minimum, le=field.maximum)
        return Annotated[field.annotation, limits]
    if field.minimum is None and field.maximum is None:
        return field.annotation
    limits = pydantic.Field(ge=field.minimum, le=field.maximum)
    if any(get_origin(part) is tuple for part in get_args(field.annotation)):
        number = Annotated[int, limits]
        return number | tuple[number, ...] | None
    return Annotated[field.annotation, limits]


def nearest(text: str, names: Iterable[str]) -> str | None:
    """Return the member of ``names`` most similar to ``text``, or None."""
    text, candidates = text.lower(), {candidate.lower(): candidate for candidate in sorted(names)}
    matches = difflib.get_close_matches(text, candidates, n=1, cutoff=0.5)
    if matches:
        return candidates[matches[0]]
    prefixes = (lower for lower in candidates if lower.startswith(text) or text.startswith(lower))
    return next((candidates[lower] for lower in prefixes), None)


def suggest(text: str, names: Iterable[str], *, otherwise: str = "", also: str = "") -> str:
    """Return a hint that asks for the member of ``names`` most similar to ``text``.

    Args:
        text: The unknown name.
        names: The known names.
        otherwise: The hint if no member is similar.
        also: Sentence after either.
    """
    guess = nearest(text, names)
    return " ".join(filter(None, (f"Did you mean {guess!r}?" if guess else otherwise, also)))


_EXPORTERS = {"dynamo": "dynamo", "no_dynamo": "torchscript"}
"""Switch of the command line, as a keyword → value of ``exporter``."""


def unknown_key_message(key: str, keys: Iterable[str], label: str) -> str:
    """Format the message for an unknown key, with the nearest of ``keys``."""
    names = sorted(keys)
    guess = nearest(key, names)
    words = f"exporter={_EXPORTERS[key]!r}" if key in _EXPORTERS and "exporter" in names else guess and repr(guess)
    ending = f"did you mean {words}?" if words else f"known keys: {', '.join(names)}"
    return f"{label}: unknown key {key!r}; {ending}"


Drop = Annotated[float, pydantic.Field(allow_inf_nan=False)] | Annotated[str, pydantic.Field(pattern=r"^[\d.]+%$")]
"""Maximum decrease of a metric: a number, or a share of the baseline, such as ``5%``."""


def read_drop(text: str) -> tuple[str, Drop]:
    """Parse ``METRIC=NUMBER`` or ``METRIC=PERCENT%`` to the metric and the drop.

    Raises:
        UsageError: the text has neither format.

    >>> read_drop("accuracy=0.05"), read_drop("perplexity = 2 %")
    (('accuracy', 0.05), ('perplexity', '2%'))
    """
    name, _, number = (part.strip() for part in text.partition("="))
    share = number.removesuffix("%").rstrip()
    try:
        value = float(share)
    except ValueError:
        value = math.nan
    if not name or not math.isfinite(value):
        raise UsageError(
            f"{opt.max_drop} {text!r}: expected METRIC=NUMBER, or METRIC=PERCENT% of the baseline",
            hint="For example accuracy=0.01 or perplexity=2%.",
        )
    if value < 0:
        raise UsageError(f"{opt.max_drop} {text}: expected zero or more", hint="State the maximum drop, such as 0.01.")
    return name, value if share == number else f"{value:g}%"


def drop_at(drop: Drop, baseline: float) -> float:
    """Return the maximum decrease of a metric in absolute terms.

    >>> drop_at(0.05, 2.0), drop_at("5%", 2.0)
    (0.05, 0.1)
    """
    return float(drop.removesuffix("%")) / 100 * abs(baseline) if isinstance(drop, str) else drop


def drop_words(drop: Drop) -> str:
    """Format a drop in the syntax of the option."""
    return drop if isinstance(drop, str) else f"{drop:g}"


SIZE_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
NUMBER_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


def parse_size(text: str, option: str) -> int:
    """Parse a size with a unit to bytes.

    Args:
        text: The size, such as ``900MB``.
        option: The option, for the message.

    Raises:
        UsageError: number or unit is missing.
    """
    match = NUMBER_WITH_UNIT.fullmatch(text.strip())
    if match is None or match[2] not in SIZE_UNITS or not float(match[1]):
        hint = "A number with B, kB, MB, GB or TB, such as 900MB."
        unit = "" if match is None else next((name for name in SIZE_UNITS if name.lower() == match[2].lower()), "")
        if match is not None and unit not in ("", match[2]):
            hint = f"Did you mean {match[1]}{unit}?"
        raise UsageError(f"{option} {text!r}: expected a size", hint=hint)
    return round(float(match[1]) * SIZE_UNITS[match[2]])


def read_json(text_or_path: str | os.PathLike[str], option: str) -> tuple[Any, str]:
    """Read JSON given inline or as a file, or pairs of names and values, which need no quotes in any shell.

    Args:
        text_or_path: A path, a text that starts with ``{`` or ``[``, or ``name=value,name=value``.
        option: Name of the option, for messages (``--shape-config``).

    Returns:
        The parsed value and its label for further messages.

    Raises:
        ConfigError: the file is missing or unreadable, or the text is not JSON (names line and column).
    """
    text = os.fspath(text_or_path)
    label = option
    if not text.strip():
        raise ConfigError(f"{option}: the text is empty", hint="Pass the path of a JSON file, or JSON text.")
    if text.lstrip().startswith(("{", "[")):
        return parse_json(text, option)
    label = f"{option} {text}"
    if "=" in text and not os.path.lexists(text):
        return _parse_pairs(text, option), option
    try:
        value = read_json_file(Path(text), may_be_pipe=True, **_STRICT)
    except FileNotFoundError:
        raise ConfigError(f"{label}: no such file", hint="Pass the path of a JSON file, or JSON text.") from None
    except JsonError as error:
        raise ConfigError(f"{label}: {error}", hint=error.hint) from None
    return value, label


_OUTER_COMMA = re.compile(r",(?![^\[]*\])")
"""A comma that is not inside brackets."""


def _parse_pairs(text: str, option: str) -> dict[str, object]:
    """Parse ``name=value,name=value``: numbers, true, false and null as in JSON, every other value as text.

    Raises:
        ConfigError: a pair has no name or no value, or a name is repeated.

    >>> _parse_pairs("sequence_length=64, x=float32[1,8]", "--shape-config")
    {'sequence_length': 64, 'x': 'float32[1,8]'}
    """
    pairs: dict[str, object] = {}
    for pair in _OUTER_COMMA.split(text):
        name, _, value = (part.strip() for part in pair.partition("="))
        if not name or not value:
            raise ConfigError(
                f"{option}: expected NAME=VALUE, got {pair.strip()!r} in {text!r}",
                hint="Separate pairs by commas, or pass JSON text or the path of a JSON file.",
            )
        if name in pairs:
            raise ConfigError(f"{option}: key {name!r} occurs twice in {text!r}")
        pairs[name] = json.loads(value) if _JSON_SCALAR.fullmatch(value) else value
    return pairs


_JSON_SCALAR = re.compile(r"true|false|null|-?(0|[1-9]\d{0,17})(\.\d+)?([eE][-+]?\d{1,2})?")


def parse_json(text: str, label: str) -> tuple[Any, str]:
    """Parse JSON text.

    Args:
        text: The text.
        label: Name of its option or file, for messages.

    Returns:
        The parsed value and ``label``, as :func:`read_json` does.

    Raises:
        ConfigError: the text is not JSON (names line and column), or an object has a duplicate key.
    """
    try:
        return load_json(text, **_STRICT), label
    except JsonError as error:
        raise ConfigError(f"{label}: {error}", hint=error.hint) from None


class JsonError(ValueError):
    """A file cannot be read, or contains no JSON; the message states the reason without the name of the file.

    Attributes:
        hint: Next step for the user, or an empty string.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def read_json_file(path: Path, *, may_be_pipe: bool = False, **hooks: Any) -> Any:
    """Read a JSON file of at most ``JSON_LIMIT_BYTES``.

    Args:
        path: The file.
        may_be_pipe: Also accept a pipe that this process was started with, or a device.
        hooks: As for :func:`json.loads`.

    Raises:
        FileNotFoundError: the file does not exist.
        JsonError: the file is not a regular file, too large, not UTF-8 or not JSON.
    """
    return load_json(read_text_file(path, may_be_pipe=may_be_pipe), **hooks)


def read_text_file(path: Path, *, may_be_pipe: bool = False) -> str:
    """Read a text file of at most ``JSON_LIMIT_BYTES``, such as a template that JSON files may contain as well.

    Args:
        path: The file.
        may_be_pipe: As for :func:`read_json_file`.

    Raises:
        FileNotFoundError: the file does not exist.
        JsonError: the file is not a regular file, too large or not UTF-8.
    """
    try:
        mode = path.stat().st_mode
        is_inherited = may_be_pipe and (not stat.S_ISFIFO(mode) or os.fspath(path).startswith(_INHERITED))
        # Opening a pipe without a writer would block forever.
        if not stat.S_ISREG(mode) and (stat.S_ISDIR(mode) or not is_inherited):
            raise JsonError("is a directory" if stat.S_ISDIR(mode) else "is not a regular file", hint=_GIVE_FILE)
        with path.open("rb") as file:
            content = b""
            # In pieces, because a single read would allocate the limit in memory.
            while len(content) <= JSON_LIMIT_BYTES and (piece := file.read(_PIECE_BYTES)):
                content += piece
    except FileNotFoundError:
        raise
    except OSError as error:
        raise JsonError(f"cannot be read: {error.strerror or error}", hint=_GIVE_FILE) from error
    except ValueError as error:
        # The name contains a character that no file system accepts.
        raise JsonError(f"cannot be read: {error}", hint=_GIVE_FILE) from error
    if len(content) > JSON_LIMIT_BYTES:
        raise JsonError(f"is larger than {JSON_LIMIT_BYTES} bytes, the limit of a JSON file", hint=_GIVE_FILE)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JsonError(f"cannot be read: byte {error.start} is not UTF-8 text", hint="Save it as UTF-8.") from error


def load_json(text: str, **hooks: Any) -> Any:
    """Parse JSON text; ``hooks`` are passed to :func:`json.loads`.

    Raises:
        JsonError: the text is not JSON (names line and column), nested too deeply, or contains a lone surrogate.
    """
    try:
        value = json.loads(text, **hooks)
    except json.JSONDecodeError as error:
        raise JsonError(
            f"not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}",
            hint="Correct it there. If the shell removes the quotes of JSON text, pass NAME=VALUE pairs or a file.",
        ) from None
    except _DuplicateKeyError as error:
        raise JsonError(f"key {error.args[0]!r} occurs twice in one object") from None
    except RecursionError:
        raise _nesting_error() from None
    except ValueError as error:
        # For example, a number with more digits than Python converts.
        raise JsonError(f"not valid JSON: {error}") from None
    _refuse_unprocessable_values(value)
    return value


def load_metadata(text: str) -> Any:
    """Parse JSON text from the metadata of a model, whose numbers become sizes and counts.

    Raises:
        JsonError: as :func:`load_json`, or a number is not finite or has more than 64 bits.
    """
    return load_json(text, parse_int=_parse_int64, parse_float=_parse_finite_float, parse_constant=_refuse_nan)


def load_metadata_record(text: str) -> dict[str, Any]:
    """Parse a JSON object from the metadata of a model; ``{}`` if damaged or of another kind."""
    try:
        record = load_metadata(text)
    except JsonError:
        return {}
    return record if isinstance(record, dict) else {}


def _parse_int64(digits: str) -> int:
    """Parse an integer; raises ValueError beyond 64 bits."""
    if len(digits) > _INT64_DIGITS or not -(1 << 63) <= int(digits) < 1 << 63:
        raise ValueError(f"the number {digits[:_INT64_DIGITS]}… has more than 64 bits")
    return int(digits)


def _parse_finite_float(digits: str) -> float:
    """Parse a number; raises ValueError for an infinity."""
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:_INT64_DIGITS]} is not finite")
    return number


_INT64_DIGITS = 20
"""Specified: length of the smallest 64-bit integer, including its sign."""


def _refuse_unprocessable_values(value: Any) -> None:
    """Refuse values that Python parses but cannot process later: deep nesting, and texts that UTF-8 cannot encode.

    Raises:
        JsonError: there is such a value.
    """
    level = [value]
    for _ in range(_DEEPEST):
        children: list[Any] = []
        for element in level:
            if isinstance(element, dict):
                children += [*element, *element.values()]
            elif isinstance(element, list):
                children += element
            elif isinstance(element, str) and not element.isascii():
                _refuse_lone_surrogates(element)
        if not children:
            return
        level = children
    raise _nesting_error()


def _refuse_lone_surrogates(text: str) -> None:
    """Raise JsonError for half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise JsonError(
            f"not valid JSON: a string contains {error.object[error.start]!a}, half of a surrogate pair"
        ) from None


def _nesting_error() -> JsonError:
    return JsonError("its values are nested too deeply", hint=f"At most {_DEEPEST} levels are allowed.")


class _DuplicateKeyError(ValueError):
    pass


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, object]:
    """Make an object of its JSON members; raises _DuplicateKeyError for a repeated key. Hook of :func:`json.loads`."""
    members: dict[str, object] = {}
    for key, value in pairs:
        if key in members:
            raise _DuplicateKeyError(key)
        members[key] = value
    return members


def _refuse_nan(name: str) -> None:
    """Raise ValueError for NaN or an infinity."""
    # Python accepts NaN and infinities, which are invalid JSON and which no option needs.
    raise ValueError(f"{name} is not a JSON value")


_STRICT: dict[str, object] = {
    "object_pairs_hook": _refuse_duplicate_keys,
    "parse_constant": _refuse_nan,
}
"""Hooks that refuse duplicate keys, NaN and infinities in the JSON of users."""
_GIVE_FILE = "Pass the path of a JSON file."


def parse_options(options: type[_OptionsT], value: Any, label: str) -> _OptionsT:
    """Validate parsed JSON against an options record.

    Raises:
        ConfigError: an unknown key (names the nearest known key) or a value of the wrong kind (names the field).
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{label}: expected a JSON object, got {type(value).__name__}")
    try:
        # JSON mode converts arrays to tuples and numbers to floats if declared, and is strict otherwise.
        return options.model_validate_json(json.dumps(value))
    except pydantic.ValidationError as error:
        raise _convert_validation_error(options, error, label) from None


def options_of(
    record: type[_OptionsT], options: _OptionsT | None, keywords: Mapping[str, Any], function: str
) -> _OptionsT:
    """Return the options of a Python function that accepts them as a record or as keywords.

    Args:
        record: Class of the options.
        options: The record of the caller, or None.
        keywords: The keywords.
        function: Name of the function, for messages.

    Raises:
        ConfigError: an unknown keyword (names the nearest known keyword) or a value of the wrong kind.
        UsageError: both are passed.
    """
    if options is None:
        values = {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in keywords.items()
        }
        return parse_options(record, values, function)
    if keywords:
        raise UsageError(
            f"{function}: {next(iter(keywords))} is passed in addition to options",
            hint="Set it in the options, or pass keywords only.",
        )
    return options


def _convert_validation_error(
    options: type[pydantic.BaseModel], error: pydantic.ValidationError, label: str
) -> ConfigError:
    """Convert the first problem of pydantic into a ConfigError; a misspelled key comes before all other problems."""
    problems = error.errors(include_url=False)
    # A misspelled key also leaves the correct key missing; report the misspelled key.
    problem = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    if problem["type"] == "extra_forbidden":
        *outer_keys, key = problem["loc"]
        record = _record_type(options, outer_keys)
        known_keys = [field.alias or name for name, field in record.model_fields.items()]
        outer_location = ".".join(map(str, outer_keys))
        outer_label = f"{label}: {outer_location}" if outer_location else label
        if hint := _key_hint(record, key):
            return ConfigError(f"{outer_label}: unknown key {key!r}", hint=hint)
        return ConfigError(unknown_key_message(str(key), known_keys, outer_label))
    # The last element of the location may name a pydantic validator, which is not in the JSON.
    location = ".".join(element for element in map(str, problem["loc"]) if "-" not in element and "[" not in element)
    reason = str(problem["msg"]).removeprefix("Value error, ")
    value = repr(problem["input"])
    value_words = "" if problem["type"] == "missing" or f"got {value}" in reason else f" (got {value})"
    fields = [position for position, element in enumerate(problem["loc"]) if isinstance(element, str)]
    hints = [_key_hint(_record_type(options, problem["loc"][:index]), problem["loc"][index]) for index in fields]
    if fields:
        record = _record_type(options, problem["loc"][: fields[0]])
        hints.append(_expectation(record, str(problem["loc"][fields[0]]), problem["input"]))
    return ConfigError(f"{label}: {location or 'value'}: {reason}{value_words}", hint=next(filter(None, hints), ""))


def _expectation(record: type[pydantic.BaseModel], name: str, value: object) -> str:
    """Return the hint for a value of another type by the declaration or docstring of its field; empty without one."""
    for kind in record.__mro__:
        for field in vars(kind).get("declared", ()):
            if field.name == name:
                return str(field.expectation(value))
        if text := field_docstrings(kind).get(name):
            return f"Expected: {' '.join(text.split()).partition('. ')[0].removesuffix('.')}."
    return ""


def _key_hint(record: type[pydantic.BaseModel], key: str | int) -> str:
    """Return the hint of ``ways_out`` for a key, with options spelled; empty without a hint."""
    hint = record.ways_out.get(str(key), "") if issubclass(record, Options) else ""
    return re.sub(r"\{(\w+)\}", lambda option: spell(option[1]), hint)


def _record_type(options: type[pydantic.BaseModel], location: Iterable[str | int]) -> type[pydantic.BaseModel]:
    """Return the type of the record at a location inside another record; list indices are skipped."""
    for element in location:
        field = options.model_fields.get(element) if isinstance(element, str) else None
        if field is not None:
            options = next(_list_record_types(field.annotation), options)
    return options


def _list_record_types(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    """Yield the record types in an annotation (``tuple[Record, ...] | None``)."""
    # Python 3.10 treats dict[str, int] as a type, and issubclass fails for it.
    if isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _list_record_types(argument)
