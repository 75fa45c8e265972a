"""Suggested command lines for words of other tools.

An unknown command or option is refused with the command line to type instead. Every word is translated on its own: by
the names and values of the command's own options, then by the tables of ``_synonyms.py``. A line is suggested only if
its command takes it.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click

from winml.modelkit.cli import _synonyms as synonyms
from winml.modelkit.cli._help import IS_SUGGESTION, POSITIONAL, GroupedArgument
from winml.modelkit.errors import UsageError, WinMLError
from winml.modelkit.fields import INPUTS
from winml.modelkit.file_names import MODEL_SUFFIX
from winml.modelkit.words import command_line

_HELP = frozenset({"-h", "--help", "--help-all"})
_RECORDING = frozenset({"compare", "diff", "eval", "inspect", "perf", "run", "verify"})
"""Commands whose output is a JSON record, no model."""
_OUTPUTS: Mapping[str, str] = {
    "build": "built", "compile": "compiled", "export": "model", "extract": "parts",
    "quantize": "quantized", "retag": "tagged", "sweep": "swept", "tune": "tuned",
}  # fmt: skip
"""Command that requires an output → its name; a file has the suffix of a model."""
_OF_FILES = frozenset({"compile", "export", "optimize", "quantize", "retag"})
"""Commands that make a file of a file."""
_WITHOUT_OUTPUT = frozenset({"--check", "--list", "--sensitivity", "--use-cache", *_HELP})
"""Options of these commands that write no output."""
_DATA_OPTIONS: Mapping[str, tuple[str, ...]] = {
    ".npz": ("input_data", "calibration_data"),
    **dict.fromkeys((".csv", ".jsonl", ".parquet", ".txt"), ("calibration_data", "dataset")),
}
"""Suffix of a file → the options that it may stand for without a name."""
_NAMED_BY_VALUE = frozenset({"algorithm", "device", "dtype", "level", "mode", "precision", "target"})
"""Options whose values say which option is meant: ``int8``, ``qdq``, ``gptq``, ``full``."""
_UNITS_S: Mapping[str, float] = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}
"""Unit of a time → seconds."""
_UNITS_OF_METAVARS: Mapping[str, float] = {"SECONDS": 1, "MINUTES": 60}
"""Placeholder of an option → seconds of its unit."""
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")
_NAME = re.compile(r"[A-Za-z]\w*")
_SHAPE = re.compile(r"(?:(?P<name>[\w.]+?)[:=]?)??\[?(?P<sizes>\d+(?:[x,]\d+)*)\]?")
"""Shape of an input: ``input_ids:1x128``, ``input_ids[1,128]``, ``1,3,224,224``."""
_SHAPE_COMMA = re.compile(r",(?=[A-Za-z])|;")
_AXES: Mapping[int, tuple[str, ...]] = {
    1: ("batch_size",), 2: ("batch_size", "sequence_length"), 3: (), 4: ("batch_size", "num_channels", "height", "width"),
}  # fmt: skip
"""Number of axes of an input without a name → keys of ``--shape-config``: text, or an image."""
_FALSE = frozenset({"false", "no", "off"})
_SWITCH_VALUES = frozenset({"true", "yes", "on", "auto", "dynamic", *_FALSE})
_LEAST_RATIO = 0.8
"""Chosen: similarity of the names of two options from which one is a typo of the other."""
_LEAST_COMMAND_RATIO = 0.75
"""Chosen: the same of two commands, which are shorter: ``pref`` is ``perf``."""
_LEAST_LETTERS = 4
"""Chosen: letters of an abbreviated option, and of a word that is searched in the descriptions."""
_MOST_TAKERS = 3
"""Chosen: commands that a sentence names for an option."""


def value_synonym(value: str, choices: Iterable[str]) -> str | None:
    """Return the choice that a value of another tool means; ``None`` if there is none.

    >>> value_synonym("Q4_K_M", ["int8", "int4"]), value_synonym("K-Quant", ["rtn", "k_quant"])
    ('int4', 'k_quant')
    """
    lower = value.lower().removeprefix("ort_enable_")
    bits = re.fullmatch(r"(?:[qi]|int)-?(\d+)(_.*)?", lower)
    meant = synonyms.VALUES.get(lower) or (f"int{bits[1]}" if bits else lower)
    return {_plain(choice): choice for choice in choices}.get(_plain(meant))


def _plain(name: str) -> str:
    """Return the name of an option without dashes, in lower case and with hyphens; one letter stays as it is.

    >>> _plain("--Max_Tokens"), _plain("-minShapes"), _plain("-O")
    ('max-tokens', 'min-shapes', 'O')
    """
    name = name.lstrip("-")
    return name if len(name) == 1 else re.sub(r"(?<=[a-z])(?=[A-Z])|[_.]", "-", name).lower()


def unknown_command(
    name: str,
    arguments: Sequence[str],
    commands: Mapping[str, click.Command],
    descriptions: Mapping[str, str],
    *,
    group: str = "",
) -> UsageError | None:
    """Return the error for a command of another tool, or with a typo; ``None`` if no command is similar.

    Args:
        name: The name that was typed.
        arguments: The arguments after the name.
        commands: Name → command of winml.
        descriptions: Name → description of the command.
        group: Command of winml whose subcommand the name is; empty: none.
    """
    problem = f"no such option {name}" if name.startswith("-") else f"no command {name!r}"
    name = "-".join(filter(None, [group, _plain(name)]))
    if name == "help":
        verb = next((word for word in arguments if word in commands), "")
        return _suggestion(problem, [command_line(["winml", *filter(None, [verb]), "--help"])])
    if name in synonyms.SERVING.split():
        hint = (
            "winml has no server. It writes the folder that a server reads: winml build MODEL -o built; "
            "with --layout genai for onnxruntime-genai."
        )
        return UsageError(problem, hint=hint)
    while name in synonyms.RUNTIMES.split() and arguments:
        name, *arguments = arguments
    table = {word: lines for words, lines in synonyms.COMMANDS.items() for word in words.split()}
    table.update({verb: f"{verb} {{}}" for verb in commands})
    if arguments and (both := f"{name}-{arguments[0]}") in table:
        name, *arguments = both, *arguments[1:]
    templates = _find_command(name, table, descriptions)
    if templates is None:
        return None
    if templates.startswith("export") and any(word.lower().endswith(MODEL_SUFFIX) for word in arguments[:1]):
        templates = synonyms.OF_ONNX  # an export starts from PyTorch
    lines = [line for line in templates.split("; ") if not line.startswith("verify ") or _has_proof(arguments)]
    filled = [_fill_template(line, arguments, commands) for line in lines]
    return _suggestion(problem, [line for line, _ in filled], [name for _, names in filled for name in names])


def _find_command(name: str, table: Mapping[str, str], descriptions: Mapping[str, str]) -> str | None:
    """Return the command lines of a name: by a typo, by a part of it, or by the descriptions of the commands."""
    if name in table:
        return table[name]
    if similar := difflib.get_close_matches(name, table, n=1, cutoff=_LEAST_COMMAND_RATIO):
        return table[similar[0]]
    parts = [part for part in re.split(r"\d|-", name) if part]  # torch2onnx, show-io
    if part := next((part for part in parts if part in table), None):
        return table[part]
    stems = [part[:-2] for part in parts if len(part) > _LEAST_LETTERS + 1]
    verbs = [verb for verb, text in descriptions.items() if any(f" {stem}" in f" {text.lower()}" for stem in stems)]
    return "; ".join(f"{verb} {{}}" for verb in verbs) if 0 < len(verbs) <= _MOST_TAKERS else None


def _has_proof(words: Iterable[str]) -> bool:
    """Return True if a file or folder among the words has a proof."""
    from winml.modelkit.builds.proofs import find_proof

    return any(find_proof(word) is not None for word in words if Path(word).exists())


def _fill_template(
    template: str, arguments: Sequence[str], commands: Mapping[str, click.Command]
) -> tuple[str, Sequence[str]]:
    """Return the command line of a template with the arguments translated, and the omitted options."""
    verb, *words = template.split()
    if verb not in commands or "{}" not in words:
        return f"winml {template}", [word for word in arguments if word.startswith("-")]
    start = words.index("{}")
    translation = _Translation(commands[verb], arguments, before=words[:start], after=words[start + 1 :])
    line = translation.line if translation.is_parsed else ["--help"]
    return command_line(["winml", verb, *line]), translation.omitted


def misspelled_option(command: click.Command, arguments: Sequence[str]) -> str | None:
    """Return the first long option with one dash, such as ``-output``, which click would read as ``-o utput``."""
    translation = _Translation(command, ())
    names = (word.partition("=")[0] for word in arguments)
    return next((name for name in names if _is_one_dashed(name) and translation.knows(name)), None)


def _is_one_dashed(name: str) -> bool:
    return re.fullmatch(r"-[A-Za-z][\w-]{2,}", name) is not None


def misunderstood_arguments(context: click.Context, arguments: Sequence[str], problem: str) -> UsageError | None:
    """Return the error for arguments that another tool would take; ``None`` if no line can be suggested.

    Args:
        context: Context of the command.
        arguments: The arguments of the command.
        problem: What is wrong with them.
    """
    if arguments[0] in ("help", "?") and not Path(arguments[0]).exists():
        return _suggestion(problem, [command_line([*context.command_path.split(), "--help"])])
    own = _Translation(context.command, arguments)
    names = list(dict.fromkeys(own.unknown))
    if len(names) > 1:
        problem = f"no such options {', '.join(names)}"
    elif names and "Missing" in problem:
        problem = f"no such option {names[0]}"
    path = context.command_path.split()
    best = own if own.is_parsed else None
    if own.omitted or not own.is_parsed:
        for verb in synonyms.NEIGHBORS.get(str(context.command.name), "").split():
            command = _verbs(context).get(verb)
            other = None if command is None else _Translation(command, arguments)
            if other is None or not other.is_parsed or any(map(own.knows, other.omitted)):
                continue
            if best is None or len(other.omitted) < len(best.omitted):
                best, path = other, [*path[:-1], verb]
    if best is None:
        takers = _describe_takers(context, names)
        return UsageError(problem, hint=" ".join(takers)) if takers else None
    error = _suggestion(problem, [command_line([*path, *best.line])], best.omitted)
    error.hint = " ".join([error.hint, *_describe_takers(context, best.omitted)])
    return error


def missing_output(context: click.Context, arguments: Sequence[str], error: UsageError) -> UsageError:
    """Return an error about a missing output with a line that names one."""
    completed = _Translation(context.command, arguments)
    if completed.is_parsed and completed.is_changed:
        line = command_line([*context.command_path.split(), *completed.line])
        error.hint = f"{error.hint} {_suggestion('', [line]).hint}"
    return error


def _suggestion(problem: str, lines: Sequence[str], omitted: Sequence[str] = ()) -> UsageError:
    without = f" (without {', '.join(dict.fromkeys(omitted))})" if omitted else ""
    return UsageError(problem, hint=f"Type: {'  or: '.join(lines)}{without}")


def _verbs(context: click.Context) -> Mapping[str, click.Command]:
    """Return the commands beside that of a context, by name."""
    root = context.find_root()
    group = root.command
    if not isinstance(group, click.Group):
        return {}
    commands = {verb: group.get_command(root, verb) for verb in group.list_commands(root)}
    return {verb: command for verb, command in commands.items() if command is not None}


def _describe_takers(context: click.Context, names: Iterable[str]) -> list[str]:
    """Return a sentence for each option that other commands have."""
    options = {f"winml {verb}": _options_by_name(command) for verb, command in _verbs(context).items()}
    options.pop(context.command_path, None)
    takers = {name: [path for path, known in options.items() if name in known] for name in names}
    return [f"{name} is an option of {', '.join(paths[:_MOST_TAKERS])}." for name, paths in takers.items() if paths]


class _Translation:
    """Arguments of a command, with every word of another tool translated on its own.

    Attributes:
        line: The arguments of winml, with what was missing: a name for the output, placeholders for required options.
        unknown: Options that the command does not have.
        omitted: Options without a counterpart, which the line does not contain.
        is_changed: True if the line differs from what was typed by more than omitted options, or in several places.
        is_parsed: True if the command takes the line.
    """

    def __init__(
        self, command: click.Command, arguments: Sequence[str], *, before: Sequence[str] = (), after: Sequence[str] = ()
    ) -> None:
        """Translate the arguments.

        Args:
            command: The command.
            arguments: Its arguments.
            before: Arguments of winml that stand before them.
            after: Arguments of winml that stand behind them.
        """
        self._command, self._options = command, _options_by_name(command)
        self._parameters = {str(param.name): param for param in command.params if isinstance(param, click.Option)}
        self._context = command.context_class(command, info_name=command.name, **command.context_settings)
        self.line, self.unknown, self.omitted = list(before), list[str](), list[str]()
        self._pairs, self._bits = dict[str, dict[str, str]](), dict[str, int]()
        self._place_of_bits = 0
        self._rest, self._surplus, self._repeated = list(arguments), list[str](), ""
        if self._rest[1:] and self._rest[0] in synonyms.SUBCOMMANDS.get(str(command.name), "").split():
            self._rest.pop(0)
        self._is_after_value = False
        positionals = [param for param in command.params if isinstance(param, click.Argument)]
        self._takes_texts = any(isinstance(param, GroupedArgument) and param.group == INPUTS for param in positionals)
        self._positional_names = {str(param.name) for param in positionals}
        counts = [param.nargs for param in positionals]
        self._free = len(arguments) if -1 in counts else max(sum(counts) - len(before), 0)
        names = (word.partition("=")[0] for word in self._rest)
        models = (next(self._own_and_known(name), None) for name in names if name.startswith("-"))
        names_model = any(option is not None and option[0].name == "model" for option in models)
        self._free -= names_model and any(param.name == POSITIONAL for param in positionals)
        while self._rest:
            self._add_word(self._rest.pop(0))
        self._add_collected()
        for word in self._surplus:
            self.line += self._place(word)
        self.line += after or (() if self.line else self._placeholder())
        self._complete()
        self.is_changed = [word for word in arguments if word not in self.omitted] != self.line or len(self.unknown) > 1
        self.is_parsed = self._parses()

    def knows(self, name: str) -> bool:
        """Return True if the command, or another tool, has an option of this name."""
        return next(self._own_and_known(name), None) is not None

    def _placeholder(self) -> Iterator[str]:
        if POSITIONAL in {param.name for param in self._command.params}:
            yield "MODEL"

    def _add_word(self, word: str) -> None:
        """Add a word of the command line, with its value if it is an option."""
        name, equals, value = word.partition("=")
        if word in _HELP:
            self.line.append(word)
        elif word.startswith("-") and word != "-":
            self._add_option(name, value if equals else None)
        elif equals and _NAME.fullmatch(name) and self.knows(name) and not Path(word).exists():  # model=ckpt
            self._add_option(name, value)
        elif self._repeated and self._free <= 0 and not self._is_path(word):  # --exclude A B
            self.line += [self._repeated, word]
        elif self._is_after_value and (self._free <= 0 or _NUMBER.fullmatch(word)) and not self._is_path(word):
            self.omitted.append(word)
        elif self.line and "iterations" in self._parameters and _NUMBER.fullmatch(word):
            self.line += ["--iterations", word]
        elif self._free > 0 and not (self.line and self._is_record(word)):
            self.line.append(word)
            self._free -= 1
        else:
            self._surplus.append(word)

    def _is_record(self, word: str) -> bool:
        return word.lower().endswith(".json") and self._command.name in _RECORDING and not self._takes_texts

    def _is_path(self, word: str) -> bool:
        return word.lower().endswith(MODEL_SUFFIX) or "/" in word or Path(word).exists()

    def _add_option(self, name: str, joined: str | None) -> None:
        """Add an option with its value, both as winml spells them; ``joined`` is a value behind ``=``."""
        self._repeated = ""
        if joined is None and name[:2] in self._options and not self.knows(name):  # -pint8
            name, joined = name[:2], name[2:]
        if _plain(name) == synonyms.OPTIONS_AS_VALUE:
            pairs = [joined] if joined else []
            while self._rest and "=" in self._rest[0]:
                pairs.append(self._rest.pop(0))
            self._rest[:0] = [f"--{pair}" for pair in pairs]
            return
        if _plain(name) in self._positional_names:  # --reference a.onnx --candidate b.onnx
            self._rest[:0] = [joined] if joined else []
            return
        if name not in self._options:
            self.unknown.append(name)
        following = joined if joined is not None else next(iter(self._rest), None)
        if joined is None and following is not None and self._is_option(following):
            following = None
        is_used = self._add_first(self._own_and_known(name), name, following)
        if is_used is None and following is not None:
            is_used = self._collect(_plain(name), following)
        if is_used is None and joined is None and (words := self._option_of_value(_plain(name))):  # --int8, --gptq
            self.line += words
            is_used = False
        if is_used is None:
            is_used = self._add_first(self._similar(name), name, following)
        if is_used is None and name in self._options:  # its value is wrong, and no other is known
            self.line += [name] if following is None else [name, following]
            is_used = following is not None
        elif is_used is None:
            self.omitted.append(name)
            is_used = joined is None and following is not None and self._is_value(following)
        if is_used and joined is None:
            self._rest.pop(0)
        self._is_after_value = is_used and not self._repeated

    def _is_option(self, word: str) -> bool:
        return word in self._options or (word.startswith("-") and word != "-" and not _NUMBER.fullmatch(word))

    def _add_first(
        self, options: Iterable[tuple[click.Option, str]], name: str, following: str | None
    ) -> bool | None:
        """Add the first option that takes the value; return whether the value was used, ``None`` if no option fits."""
        for param, spelling in options:
            flag, *text = shlex.split(spelling)
            if flag in self.line and not param.multiple and name not in self._options:
                continue
            if "{}" not in spelling:
                is_value = (following or "").lower() in _SWITCH_VALUES
                is_own = name in self._options and not _is_flag(self._options[name])
                if is_value and str(following).lower() in _FALSE:
                    flag, text = next(iter(param.secondary_opts), ""), []
                self.line += filter(None, [flag, *text])
                return is_value or is_own
            if following is None:
                if getattr(param, "_flag_needs_value", False):
                    self.line.append(flag)
                    return False
                continue
            if (words := self._spell_value(param, flag, text[0].replace("{}", following))) is not None:
                self.line += words
                self._repeated = flag if param.multiple or param.metavar == "SELECTOR" else ""
                return True
        return None

    def _own_and_known(self, name: str) -> Iterator[tuple[click.Option, str]]:
        """Yield parameter and spelling of options of winml and of other tools with this name.

        ``{}`` in the spelling stands for the value.
        """
        plain = _plain(name)
        bare = next((plain.removesuffix(noun) for noun in synonyms.NOUNS if plain.endswith(noun)), plain)
        flags = [name] if name in self._options else [f"--{plain}", f"-{plain}"]  # --per_channel, -ep
        flags += [f"--{plain.removesuffix('s')}", f"--{plain}s"] if len(plain) >= _LEAST_LETTERS else []
        flags += [f"--{start}-{plain}" for start in synonyms.STARTS]
        for flag in flags:
            param = self._options.get(flag)
            if param is not None and (flag in flags[:2] or not isinstance(param.type, click.Path)):
                yield param, flag if _is_flag(param) else f"{flag} {{}}"
        for named in dict.fromkeys((plain, bare)):
            for names, parameter, spelling in synonyms.OPTIONS:
                if parameter in self._parameters and named in names.split():
                    yield self._parameters[parameter], spelling
        key = plain.removesuffix("-column").removesuffix("-col")
        if key != plain and "columns" in self._parameters:
            yield self._parameters["columns"], f"--columns {key}={{}}"

    def _similar(self, name: str) -> Iterator[tuple[click.Option, str]]:
        """Yield the option of the command that an abbreviated or misspelled name means."""
        plain = _plain(name)
        is_known = any(plain in names.split() for names, _, _ in synonyms.OPTIONS)
        flags = [] if is_known else [flag for flag in self._options if flag.startswith("--")]
        # --outputs of a graph are no --output
        flags = [flag for flag in flags if f"--{plain}" != f"{flag}s" or not isinstance(self._options[flag].type, click.Path)]
        started = [flag for flag in flags if flag.startswith(f"--{plain}") or f"--{plain}".startswith(flag)]
        if len(plain) >= _LEAST_LETTERS and len(started) == 1 and len(started[0]) > _LEAST_LETTERS + 2:
            yield from self._own_and_known(started[0])
        for flag in difflib.get_close_matches(f"--{plain}", flags, n=1, cutoff=_LEAST_RATIO):
            yield from self._own_and_known(flag)

    def _is_value(self, word: str) -> bool:
        """Return True if a word is the value of an unknown option: a number, a plain word, or one too many."""
        if _NUMBER.fullmatch(word) or re.fullmatch(r"[\d.]+(?:[x,][\d.]+)+", word):
            return True
        words = list(itertools.takewhile(lambda word: not word.startswith("-"), self._rest))
        is_surplus = bool(self.line) or self._free <= 0 or len(words) > self._free + len([*self._open_options()])
        return is_surplus and self._is_path(word) == (self._takes_texts and bool(self.line))

    def _spell_value(self, param: click.Option, flag: str, value: str) -> list[str] | None:
        """Return the words of an option and a value of another tool; ``None`` if the option does not take the value.

        A value of another option is moved there: ``--dtype int8`` is a precision, ``--device cuda`` a provider.
        """
        if isinstance(param.type, click.Choice):
            choices = [*map(str, param.type.choices)]
            if value in choices:
                return [flag, value]
            if param.name == "device" and "ep" in self._parameters:
                from winml.modelkit.ort.execution_providers import EXECUTION_PROVIDERS

                provider = value.lower().partition(":")[0].removesuffix("executionprovider")
                if provider in EXECUTION_PROVIDERS and provider != "cpu":
                    return ["--ep", provider]
            if (meant := value_synonym(value, choices)) is not None:
                return ["-p" if param.name == "precision" else flag, meant]
            return self._option_of_value(value)
        unit_s = _UNITS_OF_METAVARS.get(param.metavar or "")
        measured = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", value)
        if unit_s is not None and measured is not None and measured[2] in _UNITS_S:
            return [flag, f"{float(measured[1]) * _UNITS_S[measured[2]] / unit_s:g}"]
        return [flag, value] if self._takes(param, value) else None

    def _takes(self, param: click.Option, value: str) -> bool:
        """Return True if the reader of an option accepts a value."""
        read = getattr(getattr(param, "field", None), "read", None)
        try:
            converted = param.type.convert(value, param, self._context)
            if read is not None:
                read((converted,) if param.multiple else converted)
            if param.name == "dynamic_axes":
                from winml.modelkit.onnx.specs import parse_dynamic_axes

                parse_dynamic_axes((value,))
            if param.name == "input_specs":
                from winml.modelkit.models.inputs.options import parse_input_specs

                parse_input_specs(value)
            if param.name == "ep":
                from winml.modelkit.ort.execution_providers import find_execution_provider

                find_execution_provider(value)
        except (click.UsageError, WinMLError):
            return False
        is_name = param.name not in ("model", "image", "audio") or not _NUMBER.fullmatch(value)
        is_file = param.name not in ("image", "audio") or bool(Path(value).suffix)
        return is_name and is_file and (param.name != "input_data" or Path(value).exists())

    def _option_of_value(self, value: str) -> list[str] | None:
        """Return an option of the command with a value that only this option has: ``int8`` is a precision."""
        for param in self._parameters.values():
            if isinstance(param.type, click.Choice) and param.name in _NAMED_BY_VALUE and not value.isdecimal():
                meant = value_synonym(value, map(str, param.type.choices))
                if meant is not None:
                    return ["-p" if param.name == "precision" else max(param.opts, key=len), meant]
        return None

    def _collect(self, name: str, value: str) -> bool | None:
        """Collect a part of an option that other tools spell as several: sizes, shapes, bits; ``None`` if it is none."""
        bits = re.fullmatch(r"\D*(\d{1,2})(bit)?s?", value.lower())
        for kind, names in (("w", synonyms.WEIGHT_BITS), ("a", synonyms.ACTIVATION_BITS)):
            if bits and name in names.split() and "precision" in self._parameters:
                self._place_of_bits = self._place_of_bits or len(self.line)
                self._bits[kind] = int(bits[1])
                return True
        if not {"shape_config", "sizes"} & {*self._parameters}:
            return None
        keys = next((key for names, key in synonyms.SIZES.items() if name in names.split()), name.replace("-", "_"))
        sizes = re.split(r"[x,]", value)
        from winml.modelkit.models.inputs.modalities.pipeline import SHAPE_KEYS

        if all(key in SHAPE_KEYS for key in keys.split()) and all(map(str.isdecimal, sizes)):
            if len(sizes) < len(keys.split()) and self._rest[1:] and self._rest[1].isdecimal():  # --image-size 224 224
                sizes.append(self._rest.pop(1))
            keyed = zip(keys.split(), sizes * 2 if len(sizes) == 1 else sizes, strict=False)
            self._pairs.setdefault("--shape-config", {}).update({key: f"{int(size)}" for key, size in keyed})
            return True
        if name in synonyms.SHAPES.split():
            return all([self._collect_shape(shape) for shape in _SHAPE_COMMA.split(value)]) or None
        is_shape = re.fullmatch(r"\[?\d+(?:[x,]\d+)+\]?", value) is not None
        return self._collect_shape(f"{name.replace('-', '_')}:{value}") or None if is_shape else None

    def _collect_shape(self, text: str) -> bool:
        """Collect the shape of an input, with its name or without; return False if it is none."""
        shape = _SHAPE.fullmatch(text.strip())
        if shape is None:
            return False
        sizes = re.split(r"[x,]", shape["sizes"])
        is_of_file = "input_specs" not in self._parameters or any(self._is_model(word) for word in self.line)
        if shape["name"] and is_of_file:
            axes = {f"{shape['name']}:{axis}": size for axis, size in enumerate(sizes)}
            self._pairs.setdefault("--shape-config", {}).update(axes)
        elif shape["name"]:
            self._pairs.setdefault("--input-specs", {})[shape["name"]] = f"[{','.join(sizes)}]"
        elif len(_AXES.get(len(sizes), ())) == len(sizes):
            keyed = dict(zip(_AXES[len(sizes)], sizes, strict=True))
            keyed.pop("num_channels", None)
            self._pairs.setdefault("--shape-config", {}).update(keyed)
        else:
            return False
        return True

    @staticmethod
    def _is_model(word: str) -> bool:
        return word.lower().endswith(MODEL_SUFFIX)

    def _add_collected(self) -> None:
        """Add the options that were collected from several: the last of several would apply alone."""
        if self._bits:
            weight_bits = self._bits.get("w", self._bits.get("a"))
            names = (f"w{weight_bits}a{self._bits.get('a')}", f"int{weight_bits}", f"fp{weight_bits}")
            param = self._parameters["precision"]
            known = param.type.choices if isinstance(param.type, click.Choice) else names
            name = next((name for name in names if name in known and "None" not in name), "")
            self.line[self._place_of_bits : self._place_of_bits] = ["-p", name] if name else []
        for flag, pairs in self._pairs.items():
            self.line += [flag, ",".join(f"{name}={size}" for name, size in pairs.items())]

    def _place(self, word: str) -> list[str]:
        """Return the words for a positional argument too many: the option that its value, suffix or place means."""
        if not Path(word).exists() and (words := self._option_of_value(word)) is not None:
            return words
        names = [name for name in _DATA_OPTIONS.get(Path(word).suffix.lower(), ()) if name in self._parameters]
        if names:
            return [max(self._parameters[names[0]].opts, key=len), word]
        for flag, param in self._open_options():
            if param.required or self._command.name not in _RECORDING or word.lower().endswith(".json"):
                return [flag, word]
        if not self._positional_names:
            self.omitted.append(word)
            return []
        return [word]

    def _open_options(self) -> Iterator[tuple[str, click.Option]]:
        """Yield flag and option of what the line leaves open: required options, then the output."""
        for param in sorted(self._parameters.values(), key=lambda param: not param.required):
            if (param.required or param.name == "output") and not {*param.opts} & {*self.line}:
                yield min(param.opts, key=len), param

    def _complete(self) -> None:
        """Add placeholders for missing required options, and a name for a missing output; correct a given name."""
        verb = str(self._command.name)
        is_of_file = verb in _OF_FILES and (verb == "export" or any(map(self._is_model, self.line)))
        for flag, param in [*self._open_options()]:
            if param.name == "output" and verb in _OUTPUTS and not _WITHOUT_OUTPUT & {*self.line}:
                self.line += [flag, _free_name(_OUTPUTS[verb], MODEL_SUFFIX if is_of_file else "")]
            elif param.required:
                self.line += [flag, str(param.name).upper()]
        for place, word in enumerate(self.line[:-1]):
            if (verb in _OUTPUTS or verb in _OF_FILES) and word in self._options and self._options[word].name == "output":
                name = self.line[place + 1]
                if is_of_file and not self._is_model(name):
                    self.line[place + 1] = f"{name.rstrip('/' + os.sep)}/{_OUTPUTS['export']}{MODEL_SUFFIX}"
                elif verb not in _OF_FILES and self._is_model(name):
                    self.line[place + 1] = name[: -len(MODEL_SUFFIX)]

    def _parses(self) -> bool:
        """Return True if the command takes the line."""
        context = self._command.context_class(
            self._command, info_name=self._command.name, **self._command.context_settings
        )
        context.meta[IS_SUGGESTION] = True
        try:
            with context.scope(cleanup=False):
                self._command.parse_args(context, [word for word in self.line if word not in _HELP])
        except (click.UsageError, UsageError):
            return False
        return True


def _free_name(stem: str, suffix: str) -> str:
    """Return the name of a file or folder that does not exist: ``model.onnx``, else ``model-2.onnx``."""
    name, number = f"{stem}{suffix}", 2
    while Path(name).exists():
        name, number = f"{stem}-{number}{suffix}", number + 1
    return name


def _options_by_name(command: click.Command) -> dict[str, click.Option]:
    """Return spelling → option of a command."""
    return {
        name: param
        for param in command.params
        if isinstance(param, click.Option)
        for name in (*param.opts, *param.secondary_opts)
    }


def _is_flag(parameter: click.Option) -> bool:
    return bool(parameter.is_flag or parameter.count)
