"""Options and values of a command that words of other tools mean.

Names and values of the command's own options come first, then the tables of ``_synonyms.py``.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import click

from winml.modelkit.cli import _synonyms as synonyms
from winml.modelkit.errors import WinMLError

NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")
_NAMED_BY_VALUE = frozenset({
    "algorithm", "device", "dtype", "format_", "layout", "level", "method", "mode", "precision", "target",
})  # fmt: skip
"""Options whose values say which option is meant: ``int8``, ``qdq``, ``gptq``, ``full``."""
_VAGUE = frozenset({"calibration_data", "columns", "config", "inputs", "model", "output", "task"})
"""Options that take almost any value: a word of a name does not mean them."""
_DATA_SUFFIXES = frozenset({".csv", ".jpg", ".json", ".jsonl", ".npz", ".parquet", ".png", ".txt", ".wav"})
"""Suffixes of files that are no models."""
_UNITS_S: Mapping[str, float] = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}
"""Unit of a time → seconds."""
_UNITS_OF_METAVARS: Mapping[str, float] = {"SECONDS": 1, "MINUTES": 60}
"""Placeholder of an option → seconds of its unit."""
_LEAST_RATIO = 0.81
"""Chosen: similarity of the names of two options from which one is a typo of the other."""
_KNOWN_RATIO = 0.9
"""Chosen: the same for a name of another tool: ``topk`` is ``--top-k``, ``precision`` is no ``--revision``."""
_LEAST_LETTERS = 4
"""Chosen: letters of an abbreviated option, and of a plural."""


_KNOWN = frozenset({"submodel", *(name for names, _, _ in synonyms.OPTIONS for name in names.split())})
"""Names of options of other tools, and of other commands if ``--model`` is similar to them."""


def plain_name(name: str) -> str:
    """Return the name of an option without dashes, in lower case and with hyphens; one letter stays as it is.

    >>> plain_name("--Max_Tokens"), plain_name("-minShapes"), plain_name("-O")
    ('max-tokens', 'min-shapes', 'O')
    """
    name = name.lstrip("-")
    return name if len(name) == 1 else re.sub(r"(?<=[a-z])(?=[A-Z])|[_.]", "-", name).lower()


def value_synonym(value: str, choices: Iterable[str]) -> str | None:
    """Return the choice that a value of another tool means; ``None`` if there is none.

    >>> value_synonym("Q4_K_M", ["int8", "int4"]), value_synonym("K-Quant", ["rtn", "k_quant"])
    ('int4', 'k_quant')
    """
    lower = value.lower().removeprefix("ort_enable_")
    bits = re.fullmatch(r"(?:[qi]|int)-?(\d+)(_.*)?", lower)
    meant = synonyms.VALUES.get(lower) or (f"int{bits[1]}" if bits else lower)
    return {plain_name(choice): choice for choice in choices}.get(plain_name(meant))


def parts_of(name: str) -> list[str]:
    """Return the words of a name that may mean an option alone, the last word first; empty for a single word."""
    words = plain_name(name).split("-")
    is_negation = words[0] == "no" or f"{words[0]}-" in synonyms.NEGATIONS
    if len(words) == 1 or is_negation or plain_name(name) in _KNOWN:
        return []
    return [word for word in reversed(words) if len(word) > 1 and word not in synonyms.VAGUE_WORDS]


def is_flag(param: click.Option) -> bool:
    """Return True if an option has no value."""
    return bool(param.is_flag or param.count)


def choices_of(param: click.Option) -> list[str]:
    """Return the values of an option that has a list of them; empty for other options."""
    from winml.modelkit.quantize.precisions import PRECISIONS

    is_free = not isinstance(param.type, click.Choice)
    return [*map(str, PRECISIONS if is_free and param.name == "precision" else getattr(param.type, "choices", ()))]


def is_named_shape(value: str) -> bool:
    """Return True if a value is the shape of an input with its name: ``pixel_values:1x3x224x224``."""
    return re.match(r"[A-Za-z]\w*[:\[]\[?\d+[x,]", value) is not None


class MeantOptions:
    """The options of a command, by the names and values of winml and of other tools.

    Attributes:
        by_flag: Spelling → option.
        by_name: Name of a parameter → option.
    """

    def __init__(self, command: click.Command, refused: Collection[str] = ()) -> None:
        """Collect the options of a command, without parameters that the named model refuses."""
        options = [param for param in command.params if isinstance(param, click.Option) and param.name not in refused]
        self.by_flag = {flag: param for param in options for flag in (*param.opts, *param.secondary_opts)}
        self.by_name = {str(param.name): param for param in options}
        self._context = command.context_class(command, info_name=command.name, **command.context_settings)
        self._meanings: defaultdict[str, list[tuple[click.Option, str]]] = defaultdict(list)
        for flag, param in self.by_flag.items():
            self._meanings[flag.lstrip("-")].append((param, flag if is_flag(param) else f"{flag} {{}}"))
        for names, parameter, spelling in synonyms.OPTIONS:
            for name in names.split() if parameter in self.by_name else ():
                self._meanings[name].append((self.by_name[parameter], spelling))

    def knows(self, name: str) -> bool:
        """Return True if the command has the option of a name of winml or of another tool."""
        return next(self.find(name), None) is not None

    def find(self, name: str) -> Iterator[tuple[click.Option, str]]:
        """Yield options and spellings that a name means, the likeliest first; ``{}`` stands for the value."""
        plain = plain_name(name)
        bare = next((plain.removesuffix(noun) for noun in synonyms.NOUNS if plain.endswith(noun)), plain)
        exact = [plain] if plain.endswith("-name") else [plain, bare]
        variants = [plain.removesuffix("s"), f"{plain}s"]
        variants += [f"{start}-{plain}{ending}" for start in synonyms.STARTS for ending in ("", "s")]
        variants += [f"no-{plain.removeprefix(start)}" for start in synonyms.NEGATIONS if plain.startswith(start)]
        for variant in dict.fromkeys([*exact, bare, *variants]):
            for param, spelling in self._meanings.get(variant, ()):
                # Outputs of a graph, or --output-name, are no output path.
                if variant in exact or not (param.name == "model" or isinstance(param.type, click.Path)):
                    yield param, spelling
        if plain.endswith(synonyms.COLUMN) and "columns" in self.by_name:
            yield self.by_name["columns"], f"--columns {plain.removesuffix(synonyms.COLUMN)}={{}}"

    def find_similar(self, name: str) -> Iterator[tuple[click.Option, str]]:
        """Yield the options that an abbreviated or misspelled name means."""
        plain = plain_name(name)
        flags = [flag for flag in self.by_flag if flag.startswith("--") and f"{flag}s" != f"--{plain}"]
        started = [flag for flag in flags if flag.startswith(f"--{plain}") or re.match(rf"{flag}[a-z]", f"--{plain}")]
        is_abbreviated = len(plain) >= _LEAST_LETTERS and len(started) == 1 and plain not in _KNOWN
        if is_abbreviated and len(started[0].strip("-")) > _LEAST_LETTERS:
            yield from self.find(started[0])
        cutoff = _KNOWN_RATIO if plain in _KNOWN else _LEAST_RATIO
        for flag in difflib.get_close_matches(f"--{plain}", flags, n=1, cutoff=cutoff):
            yield from self.find(flag)

    def find_by_part(self, name: str) -> Iterator[tuple[click.Option, str]]:
        """Yield the options that a word of a name means, the last word first: ``--random-seed`` is ``--seed``."""
        for word in parts_of(name):
            yield from (option for option in self.find(word) if option[0].name not in _VAGUE)

    def spell(self, param: click.Option, flag: str, value: str) -> list[str] | None:
        """Return the words of an option with a value of another tool; ``None`` if the option does not take it.

        A value of another option is moved there: ``--dtype int8`` is a precision, ``--device cuda`` a provider.
        """
        if isinstance(param.type, click.Choice):
            choices, provider = choices_of(param), value.lower().partition(":")[0]
            ep = self.by_name.get("ep") if param.name == "device" and provider not in choices else None
            if ep is not None and self._takes(ep, provider):
                return ["--ep", provider.removesuffix("executionprovider")]
            meant = value if value in choices else value_synonym(value, choices)
            return self.of_value(value) or None if meant is None else [flag, meant]
        unit_s = _UNITS_OF_METAVARS.get(param.metavar or "")
        measured = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", value)
        if unit_s is not None and measured is not None and measured[2] in _UNITS_S:
            return [flag, f"{float(measured[1]) * _UNITS_S[measured[2]] / unit_s:g}"]
        if param.multiple and param.metavar in ("NAME", "SELECTOR") and "," in value:
            return [word for name in value.split(",") for word in (flag, name)]
        return [flag, value] if self._takes(param, value) else None

    def of_value(self, value: str) -> list[str]:
        """Return the option that a value alone means, with the value: ``int8`` is a precision; empty: none."""
        for name, param in self.by_name.items() if not value.isdecimal() else ():
            if name in _NAMED_BY_VALUE and (meant := value_synonym(value, choices_of(param))) is not None:
                return ["-p" if name == "precision" else max(param.opts, key=len), meant]
        flag = f"--{plain_name(value)}"  # --scheme asymmetric
        return [flag] if flag in self.by_flag and is_flag(self.by_flag[flag]) else []

    def _takes(self, param: click.Option, value: str) -> bool:
        """Return True if an option accepts a value."""
        read = getattr(getattr(param, "field", None), "read", None)
        try:
            converted = param.type.convert(value, param, self._context)
            if read is not None:
                read((converted,) if param.multiple else converted)
            return param.name not in _FITS or bool(_FITS[str(param.name)](value))
        except (click.UsageError, WinMLError):
            return False


def _are_axes(value: str) -> bool:
    from winml.modelkit.onnx.specs import parse_dynamic_axes

    return bool(parse_dynamic_axes((value,)))


def _are_specs(value: str) -> bool:
    from winml.modelkit.models.inputs.options import parse_input_specs

    return bool(parse_input_specs(value))


def _is_provider(value: str) -> bool:
    from winml.modelkit.ort.execution_providers import find_execution_provider

    return bool(find_execution_provider(value))


_FITS: Mapping[str, Callable[[str], bool]] = {
    "audio": lambda value: bool(Path(value).suffix),
    "dynamic_axes": _are_axes,
    "ep": _is_provider,
    "image": lambda value: bool(Path(value).suffix),
    "input_data": os.path.exists,
    "input_specs": _are_specs,
    "inputs": lambda value: "=" in value,
    "model": lambda value: Path(value).suffix.lower() not in _DATA_SUFFIXES,
    "prompt": lambda value: not Path(value).exists(),
    "task": lambda value: NUMBER.fullmatch(value) is None,
    "text": lambda value: not Path(value).exists(),
}
"""Option whose value is read when its command runs → function that returns False, or raises, for another value."""
