"""Translation of the command line of another tool into one of winml."""

from __future__ import annotations

import functools
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click

from winml.modelkit.cli import _synonyms as synonyms
from winml.modelkit.cli._collected_options import CollectedOptions, is_size
from winml.modelkit.cli._help import IS_SUGGESTION, POSITIONAL, GroupedArgument
from winml.modelkit.cli._meant_options import NUMBER, MeantOptions, is_flag, is_named_shape, parts_of, plain_name
from winml.modelkit.errors import UsageError, WinMLError
from winml.modelkit.export.declared_options import DynamicFields
from winml.modelkit.fields import INPUTS, fields_of
from winml.modelkit.file_names import MODEL_SUFFIX

_HELP = frozenset({"-h", "--help", "--help-all"})
_RECORDING = frozenset({"compare", "diff", "eval", "inspect", "perf", "run", "verify"})
"""Commands whose output is a JSON record, no model."""
_RECORD_SUFFIX = ".json"
_OUTPUTS: Mapping[str, str] = {
    "build": "built", "compile": "compiled", "export": "model", "extract": "parts", "quantize": "quantized",
    "retag": "tagged", "sweep": "swept", "tune": "tuned",
}  # fmt: skip
"""Command that requires an output → its name; a file has the suffix of a model."""
_OF_CHECKPOINTS = frozenset({"build", "export"})
"""Commands whose model is a checkpoint; a file that they name is an output."""
_REFUSED_BY_FILES = frozenset({"dynamic_axes", "random_weights", *(field.name for field in fields_of(DynamicFields))})
"""Options that every command refuses for an ONNX file: an export alone makes sizes dynamic."""
_OF_FILES = frozenset({"compile", "export", "optimize", "quantize", "retag"})
"""Commands that make a file of a file."""
_WITHOUT_OUTPUT = frozenset({"--check", "--list", "--sensitivity", "--use-cache", *_HELP})
"""Options of these commands that write no output."""
_DATA_OPTIONS: Mapping[str, tuple[str, ...]] = {
    ".npz": ("input_data", "calibration_data"),
    **dict.fromkeys((".csv", ".jsonl", ".parquet", ".txt"), ("calibration_data", "dataset")),
}
"""Suffix of a file → the options that it may stand for without a name."""
_NAME = re.compile(r"[A-Za-z]\w*")
_FALSE = frozenset({"false", "no", "off"})
_SWITCH_VALUES = frozenset({"true", "yes", "on", "auto", "dynamic", *_FALSE})


class Translation:
    """Arguments of a command, with every word of another tool translated on its own.

    Attributes:
        line: The arguments of winml, with what was missing: a name for the output, placeholders for required options.
        unknown: Options that the command does not have.
        omitted: Options without a counterpart, which the line does not contain.
        omitted_words: These options as typed, with their values.
        remarks: Omitted option → what is there instead.
        refused_words: Options with sizes as typed, which the line does not contain because the file has fixed sizes.
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
        self._command, self._verb = command, str(command.name)
        self._output_flags = next((param.opts for param in command.params if param.name == "output"), [])
        self.file = self._find_file([*before, *arguments, *after])
        self.options = MeantOptions(command, _REFUSED_BY_FILES if self.file else ())
        self.line, self.unknown, self.omitted = list(before), list[str](), list[str]()
        self.omitted_words, self.refused_words, self.remarks = list[str](), list[str](), dict[str, str]()
        self._names = {plain_name(word.partition("=")[0]) for word in arguments if word.startswith("-")}
        self._rest, self._surplus = list(arguments), list[str]()
        if self._rest[1:] and self._rest[0] in synonyms.SUBCOMMANDS.get(self._verb, "").split():
            self._rest.pop(0)
        positionals = [param for param in command.params if isinstance(param, click.Argument)]
        self._positionals = {str(param.name) for param in positionals}
        self._takes_texts = any(isinstance(param, GroupedArgument) and param.group == INPUTS for param in positionals)
        counts = [param.nargs for param in positionals]
        self._free = len(arguments) if -1 in counts else max(sum(counts) - len(before), 0)
        self._collected = CollectedOptions(self.options.by_name)
        self._repeated: str | None = None
        """After the value of an option: its flag if it may be repeated, else empty."""
        while self._rest:
            self._add_word(self._rest.pop(0))
        if self.refused_words and not self._collected.differ_from(self.fixed_sizes):
            self.refused_words.clear()
        for word in self._surplus:
            self.line += self._place(word)
        self.line += after or (["MODEL"] if POSITIONAL in self._positionals and not self.line else [])
        self._complete()
        self.is_parsed = self._parses()

    @property
    def output(self) -> str:
        """The output that the line names; empty: none."""
        pairs = itertools.pairwise(self.line)
        return next((word for flag, word in pairs if flag in self._output_flags), "")

    @functools.cached_property
    def fixed_sizes(self) -> dict[str, list[str]]:
        """Inputs of the named file → sizes, if all are fixed; empty for any other model."""
        return _read_fixed_sizes(self.file)

    def _find_file(self, words: Sequence[str]) -> str:
        """Return the ONNX file that the words name; empty if the model is no file."""
        if self._verb in _OF_CHECKPOINTS:
            return ""
        named = (
            word.partition("=")[2] if word.startswith("-") else word
            for flag, word in itertools.pairwise(["", *words])
            if flag not in self._output_flags
        )
        return next(filter(is_model, named), "")

    def _add_word(self, word: str) -> None:
        """Add a word of the command line, with its value if it is an option."""
        name, equals, value = word.partition("=")
        if word in _HELP:
            self.line.append(word)
        elif word.startswith("-") and word != "-":
            self._add_option(name, value if equals else None)
        elif equals and self._is_pair(name, word):  # model=ckpt
            self._add_option(name, value)
        elif self._repeated is not None and not _is_path(word) and (self._free <= 0 or NUMBER.fullmatch(word)):
            if self._repeated:  # --exclude A B
                self.line += [self._repeated, word]
            else:
                self.omitted.append(word)
        elif self.line and "iterations" in self.options.by_name and NUMBER.fullmatch(word):
            self.line += ["--iterations", word]
        elif self._free > 0 and not (self.line and self._is_record(word)):
            self.line.append(word)
            self._free -= 1
            self._repeated = None
        else:
            self._surplus.append(word)

    def _is_pair(self, name: str, word: str) -> bool:
        is_name = _NAME.fullmatch(name) is not None and not Path(word).exists()
        return is_name and (self.options.knows(name) or not self._takes_texts)

    def _is_record(self, word: str) -> bool:
        return word.lower().endswith(_RECORD_SUFFIX) and self._verb in _RECORDING and not self._takes_texts

    def _add_option(self, name: str, joined: str | None) -> None:
        """Add an option with its value, both as winml spells them; ``joined`` is a value behind ``=``."""
        options, self._repeated = self.options, None
        if joined is None and name[:2] in options.by_flag and not options.knows(name):  # -pint8
            name, joined = name[:2], name[2:]
        plain = plain_name(name)
        if plain == synonyms.OPTIONS_AS_VALUE:
            pairs = [joined] if joined else [*itertools.takewhile(lambda word: "=" in word, self._rest)]
            self._rest[: 0 if joined else len(pairs)] = [f"--{pair}" for pair in pairs]
            return
        if plain in {*self._positionals, *synonyms.POSITIONALS.get(self._verb, "").split()}:  # --candidate b.onnx
            self._rest[:0] = [joined] if joined else []
            return
        if all(name not in (*param.opts, *param.secondary_opts) for param in self._command.params):
            self.unknown.append(name)
        values = [joined] if joined is not None else [*itertools.takewhile(self._is_no_option, self._rest)]
        beside, remark = synonyms.OMITTED.get(name.lstrip("-")) or synonyms.OMITTED.get(plain, ("", ""))
        is_omitted = bool(remark) and name not in options.by_flag and (not beside or beside in self._names)
        used = None
        if is_omitted:
            self.remarks[name] = remark
        else:
            used = next((used for used in self._attempts(name, joined, values) if used is not None), None)
        if used is None and name in options.by_flag:  # its value is wrong, and no other is known
            self.line += [name, *values[:1]]
            used = len(values[:1])
        elif used is None:
            self.omitted.append(name)
            used = int(self._is_value(values))
            self.omitted_words += [name, *values[:used]]
            self._repeated = "" if used else None
        del self._rest[: used if joined is None else 0]

    def _attempts(self, name: str, joined: str | None, values: Sequence[str]) -> Iterator[int | None]:
        """Add an option by one meaning of its words after the other, the likeliest first.

        Yields:
            How many of the values were used; `None` if it has no such meaning, and nothing was added.
        """
        options, plain = self.options, plain_name(name)
        is_own, value = name in options.by_flag, next(iter(values), "")
        if not is_own and (precision := self._collected.collect_bits(plain, value)) is not None:
            self._set_value("-p", precision)
            yield 1
        if is_named_shape(value) or (values and is_size(plain) and self.fixed_sizes):
            yield self._collect_sizes(name, values)
        yield self._add_first(options.find(name), name, values)
        if values:
            yield self._collect_sizes(name, values)
        if joined is None or joined.lower() in _SWITCH_VALUES - _FALSE:
            yield 0 if self._extend(options.of_value(plain)) else None  # --int8, half=true
        yield 1 if value and self._extend(self._option_of(value)) else None  # --compress int8, -d data.csv
        yield self._add_first(options.find_similar(name), name, values)
        if not is_own:
            yield self._add_first(options.find_by_part(name), name, values)
        yield 0 if any(self._extend(options.of_value(word)) for word in parts_of(name)) else None  # --use-gpu
        yield 1 if value in synonyms.SUBCOMMANDS["export"].split() else None  # --format onnx

    def _collect_sizes(self, name: str, values: Sequence[str]) -> int | None:
        """Collect sizes or shapes; return how many values were used, ``None`` if the option has none."""
        used = self._collected.collect(plain_name(name), values)
        if not used:
            return None
        if self.fixed_sizes:
            self.refused_words += [name, *values[:used]]
        else:
            for flag, value in self._collected.sizes(is_of_file=bool(self.file)):
                self._set_value(flag, value)
        return used

    def _set_value(self, flag: str, value: str) -> None:
        """Add an option with a value, or change its value; an empty value adds nothing."""
        if flag in self.line:
            self.line[self.line.index(flag) + 1] = value
        elif value:
            self.line += [flag, value]

    def _extend(self, words: Sequence[str]) -> bool:
        """Add the words of an option unless the line has it; return True if they were added."""
        is_new = bool(words) and words[0] not in self.line
        self.line += words if is_new else []
        return is_new

    def _is_no_option(self, word: str) -> bool:
        is_dashed = word.startswith("-") and word != "-" and not NUMBER.fullmatch(word)
        return word not in self.options.by_flag and not is_dashed

    def _add_first(self, options: Iterable[tuple[click.Option, str]], name: str, values: Sequence[str]) -> int | None:
        """Add the first option that takes the value; return how many values were used, ``None`` if no option fits."""
        for param, spelling in options:
            flag, *text = shlex.split(spelling)
            if flag in self.line and not param.multiple and name not in self.options.by_flag:
                continue
            if "{}" not in spelling:
                own, switch = self.options.by_flag.get(name), "".join(values[:1]).lower()
                if switch in _FALSE:
                    flag, text = next(iter(param.secondary_opts), ""), []
                self.line += filter(None, [flag, *text])
                has_value = self._is_value(values) if own is None else bool(values) and not is_flag(own)
                return int(switch in _SWITCH_VALUES or (has_value and not self._is_record(values[0])))
            if not values and getattr(param, "_flag_needs_value", False):
                self.line.append(flag)
                return 0
            if values and (words := self.options.spell(param, flag, text[0].replace("{}", values[0]))) is not None:
                self.line += words
                self._free -= param.name == "model" and POSITIONAL in self._positionals
                if self._free < 0 and not self.line[0].startswith("-"):  # optimize out.onnx -m model.onnx
                    self._surplus.append(self.line.pop(0))
                self._repeated = flag if param.multiple or param.metavar == "SELECTOR" else ""
                return 1
        return None

    def _is_value(self, words: Sequence[str]) -> bool:
        """Return True if the first word is the value of an unknown option: a number, a plain word, or one too many."""
        if not words:
            return False
        if re.fullmatch(r"-?[\d.]+(?:[x,][\d.]+)*", words[0]):
            return True
        is_surplus = bool(self.line) or self._free <= 0 or len(words) > self._free + len([*self._open_options()])
        return is_surplus and _is_path(words[0]) == (self._takes_texts and bool(self.line))

    def _place(self, word: str) -> list[str]:
        """Return the words for a positional argument too many: the option that its value, suffix or place means."""
        if words := self._option_of(word):
            return words
        for flag, param in self._open_options():
            if param.required or self._verb not in _RECORDING or word.lower().endswith(_RECORD_SUFFIX):
                return [flag, word]
        if self._positionals:
            return [word]
        self.omitted.append(word)
        return []

    def _option_of(self, word: str) -> list[str]:
        """Return the words of the option that a value means, by its content or the suffix of a file; empty: none."""
        if not Path(word).exists():
            return self.options.of_value(word)
        names = [name for name in _DATA_OPTIONS.get(Path(word).suffix.lower(), ()) if name in self.options.by_name]
        return [max(self.options.by_name[names[0]].opts, key=len), word] if names else []

    def _open_options(self) -> Iterator[tuple[str, click.Option]]:
        """Yield flag and option of what the line leaves open: required options, then the output."""
        for param in sorted(self.options.by_name.values(), key=lambda param: not param.required):
            if (param.required or param.name == "output") and not {*param.opts} & {*self.line}:
                yield min(param.opts, key=len), param

    def _complete(self) -> None:
        """Add placeholders for missing required options, and a name for a missing output; correct a given name."""
        for flag, (others, implied) in synonyms.REQUIRED.items():
            is_known = implied.split()[0] in self.options.by_flag
            if is_known and flag in self.line and not {*others.split()} & {*self.line}:
                self.line += implied.split()
        is_of_file = self._verb in _OF_FILES and (self._verb == "export" or any(map(is_model, self.line)))
        for flag, param in [*self._open_options()]:
            if param.name == "output" and self._verb in _OUTPUTS and not _WITHOUT_OUTPUT & {*self.line}:
                self.line += [flag, _free_name(_OUTPUTS[self._verb], MODEL_SUFFIX if is_of_file else "")]
            elif param.required:
                self.line += [flag, str(param.name).upper()]
        place = next((place for place, word in enumerate(self.line, 1) if word in self._output_flags), len(self.line))
        for name in self.line[place : place + 1]:
            if is_of_file and name.strip() and not is_model(name):
                self.line[place] = f"{name.rstrip('/')}/model{MODEL_SUFFIX}"
            elif self._verb in _OUTPUTS and self._verb not in _OF_FILES and is_model(name):
                self.line[place] = name[: -len(MODEL_SUFFIX)]

    def _parses(self) -> bool:
        """Return True if the command takes the line."""
        try:
            words = [word for word in self.line if word not in _HELP]
            self._command.make_context(self._verb, words, obj=IS_SUGGESTION)
        except (click.UsageError, UsageError):
            return False
        return True


def is_model(word: str) -> bool:
    """Return True for the name of an ONNX file."""
    return word.lower().endswith(MODEL_SUFFIX)


def _read_fixed_sizes(file: str) -> dict[str, list[str]]:
    """Return the inputs of a file with their sizes if all are fixed; empty for any other file."""
    if not Path(file).is_file():
        return {}
    from winml.modelkit.onnx.files.reading import read_structure, required_inputs

    try:
        inputs = required_inputs(read_structure(Path(file)).graph)
    except WinMLError:
        return {}
    shapes = {value.name: [f"{dim.dim_value}" for dim in value.type.tensor_type.shape.dim] for value in inputs}
    return {} if any("0" in shape for shape in shapes.values()) else shapes  # 0: a name, or nothing


def _is_path(word: str) -> bool:
    return is_model(word) or "/" in word or Path(word).exists()


def _free_name(stem: str, suffix: str) -> str:
    """Return the name of a file or folder that does not exist: ``model.onnx``, else ``model-2.onnx``."""
    numbered = (f"{stem}-{number}{suffix}" for number in itertools.count(2))
    return next(name for name in itertools.chain([f"{stem}{suffix}"], numbered) if not Path(name).exists())
