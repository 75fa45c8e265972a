"""Suggested command lines for words of other tools.

An unknown command or option is refused with the command line to type instead. A line is suggested only if its command
takes it.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from winml.modelkit.cli import _synonyms as synonyms
from winml.modelkit.cli._help import SuggestionError
from winml.modelkit.cli._meant_options import MeantOptions, plain_name
from winml.modelkit.cli._translation import Translation, is_model
from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import MODEL_SUFFIX
from winml.modelkit.words import command_line

_LEAST_RATIO = 0.75
"""Chosen: similarity of two commands from which one is a typo of the other: ``pref`` is ``perf``."""
_LEAST_NAME = 4
"""Chosen: letters of a command with a typo."""
_FILE, _FOLDER = "model-file", "model-folder"
_OF_PATHS: Mapping[str, str] = {_FILE: "inspect {}; perf {}", _FOLDER: "inspect {}; build {}"}
"""Command lines for an ONNX file, and for another path, that was typed without a command."""
_PROOF_REMARK = "For winml verify: winml export --proof and winml build --proof write a proof of the model beside it."
_SERVER_REMARK = "winml has no server. It writes the folder that a server reads."
_LEAST_LETTERS = 6
"""Chosen: letters of a word that is searched in the descriptions of commands, without its last two."""
_COMMON = 10
"""Chosen: commands from which an option, such as ``--seed``, does not say which command was meant."""
_MOST_TAKERS = 3
"""Chosen: commands that a sentence names for an option, or that a word of a description means."""


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
    problem, typed = f"no such option {name}" if name.startswith("-") else f"no command {name!r}", name
    name = "-".join(filter(None, [group, plain_name(name)]))
    if name in ("help", "help-all"):
        verb = next((word for word in arguments if word in commands), "")
        return _Suggested([command_line(["winml", *filter(None, [verb]), "--help"])]).as_error(problem)
    while name in synonyms.RUNTIMES.split() and arguments:
        name, *arguments = arguments
    table = {word: lines for words, lines in synonyms.COMMANDS.items() for word in words.split()}
    if name not in table and not group and Path(typed).exists():
        arguments, name = [typed, *arguments], _FILE if is_model(typed) else _FOLDER
    table |= {**{verb: f"{verb} {{}}" for verb in commands}, **_OF_PATHS}
    if arguments and (both := f"{name}-{arguments[0]}") in table:
        name, *arguments = both, *arguments[1:]
    if typed.startswith("-") and name not in table:
        return None
    words = MeantOptions(commands["quantize"]).of_value(name) if name not in table and commands else []
    is_value = f"quantize {{}} {' '.join(words)}" if words else None  # winml int8 model.onnx
    if (templates := is_value or _find_command(name, table, descriptions)) is None:
        return None
    if templates.startswith("export") and any(map(is_model, arguments[:1])):
        templates = synonyms.OF_ONNX  # an export starts from PyTorch
    lines = [line for line in templates.split("; ") if not line.startswith("verify ") or _has_proof(arguments)]
    filled = [_fill_template(line, arguments, commands, is_alone=len(lines) == 1) for line in lines]
    if len(filled) == 1:
        return filled[0].as_error(problem)
    omitted = [name for suggested in filled for name in suggested.omitted]
    remarks = [_PROOF_REMARK] if len(lines) < len(templates.split("; ")) else []
    remarks += [_SERVER_REMARK] if name in synonyms.SERVING.split() else []
    return _Suggested([suggested.lines[0] for suggested in filled], omitted, remarks).as_error(problem)


def _find_command(name: str, table: Mapping[str, str], descriptions: Mapping[str, str]) -> str | None:
    """Return the command lines of a name: by a typo, by a part of it, or by the descriptions of the commands."""
    if name in table:
        return table[name]
    similar = difflib.get_close_matches(name, table, n=1, cutoff=_LEAST_RATIO)
    if similar and len(name) >= _LEAST_NAME:
        return table[similar[0]]
    parts = [part for part in re.split(r"\d|-", name) if part]  # torch2onnx, show-io
    if part := next((part for part in parts if part in table), None):
        return table[part]
    stems = [part[:-2] for part in parts if len(part) >= _LEAST_LETTERS]
    verbs = [verb for verb, text in descriptions.items() if any(f" {stem}" in f" {text.lower()}" for stem in stems)]
    return "; ".join(f"{verb} {{}}" for verb in verbs) if 0 < len(verbs) <= _MOST_TAKERS else None


def _has_proof(words: Iterable[str]) -> bool:
    """Return True if a file or folder among the words has a proof."""
    from winml.modelkit.builds.proofs import find_proof

    return any(find_proof(word) is not None for word in words if Path(word).exists())


def _fill_template(
    template: str, arguments: Sequence[str], commands: Mapping[str, click.Command], *, is_alone: bool
) -> _Suggested:
    """Return the command line of a template with the arguments translated; alone, other commands complete it."""
    verb, *words = template.split()
    if verb not in commands or "{}" not in words:
        return _Suggested([f"winml {template}"], [word for word in arguments if word.startswith("-")])
    start = words.index("{}")
    own = Translation(commands[verb], arguments, before=words[:start], after=words[start + 1 :])
    suggested = _complete_translation(own, ["winml", verb], arguments, commands if is_alone and words == ["{}"] else {})
    return suggested or _Suggested([command_line(["winml", verb, "--help"])])


def _complete_translation(
    own: Translation, path: Sequence[str], arguments: Sequence[str], commands: Mapping[str, click.Command]
) -> _Suggested | None:
    """Return command lines for translated arguments; ``None`` if no command takes them.

    What the command does not take is given to another command of the same arguments, or to one that continues with its
    output.

    Args:
        own: The translation of the arguments for the command that was typed.
        path: Words of that command.
        arguments: The arguments.
        commands: Name → command of winml.
    """
    best, verb = (own if own.is_parsed else None), path[-1]
    counts = _count_takers(commands)
    if not own.is_parsed or any(counts[name] < _COMMON for name in own.omitted):
        for neighbor in synonyms.NEIGHBORS.get(verb, "").split():
            command = commands.get(neighbor)
            other = None if command is None else Translation(command, arguments)
            if other is None or not other.is_parsed or any(map(own.options.knows, other.omitted)):
                continue
            if best is None or len(other.omitted) < len(best.omitted):
                best, path = other, [*path[:-1], neighbor]
    if best is None:
        return None
    suggested = _Suggested([command_line([*path, *best.line])], best.omitted, [*best.remarks.values()])
    following, flag = synonyms.FOLLOWING.get(verb, ("", ""))
    if best is own and own.omitted and following in commands:
        line = own.line if own.output else [*own.line, "-o", f"{verb}d{MODEL_SUFFIX}"]
        then = Translation(commands[following], [own.output or line[-1], *own.omitted_words])
        if then.is_parsed and flag in then.line:
            lines = [command_line([*path, *line]), command_line([*path[:-1], following, *then.line])]
            words = [word for word in own.omitted if word not in own.omitted_words]
            return _Suggested(lines, [*words, *then.omitted], [*own.remarks.values()], is_sequence=True)
    if best.refused_words and "export" not in commands:
        suggested.omitted = [*best.omitted, *(word for word in best.refused_words if word.startswith("-"))]
    elif best.refused_words:
        checkpoint = _read_checkpoint(best.file)
        export = Translation(commands["export"], [checkpoint, *best.refused_words])
        shapes = ", ".join(f"{name} {'x'.join(shape)}" for name, shape in best.fixed_sizes.items())
        suggested.remarks = [
            *suggested.remarks, f"{best.file} has fixed sizes ({shapes}). Export the model with other sizes:",
        ]  # fmt: skip
        suggested.last = command_line(["winml", "export", *export.line])
    return suggested


def _read_checkpoint(file: str) -> str:
    """Return the model that a file was exported from, as the file records it."""
    from winml.modelkit.onnx.bundle import model_record
    from winml.modelkit.onnx.files.reading import read_metadata

    return str(model_record(read_metadata(Path(file))).get("name_or_path", "CHECKPOINT"))


def _count_takers(commands: Mapping[str, click.Command]) -> Counter[str]:
    """Return how many commands have each option."""
    return Counter(flag for command in commands.values() for flag in MeantOptions(command).by_flag)


def misspelled_option(command: click.Command, arguments: Sequence[str]) -> str | None:
    """Return the first long option with one dash, such as ``-output``, which click would read as ``-o utput``."""
    options = MeantOptions(command)
    names = (word.partition("=")[0] for word in arguments)
    return next((name for name in names if re.fullmatch(r"-[A-Za-z][\w-]{2,}", name) and options.knows(name)), None)


def misunderstood_arguments(context: click.Context, arguments: Sequence[str], problem: str) -> UsageError | None:
    """Return the error for arguments that another tool would take; ``None`` if no line can be suggested.

    Args:
        context: Context of the command.
        arguments: The arguments of the command.
        problem: What is wrong with them.
    """
    if arguments[:1] in (["help"], ["?"]) and not Path(arguments[0]).exists():
        return _Suggested([command_line([*context.command_path.split(), "--help"])]).as_error(problem)
    own = Translation(context.command, arguments)
    names = list(dict.fromkeys(own.unknown))
    if len(names) > 1:
        problem = f"no such options {', '.join(names)}"
    elif names and "Missing" in problem:
        problem = f"no such option {names[0]}"
    suggested = _complete_translation(own, context.command_path.split(), arguments, _verbs(context))
    if suggested is None:
        hint = " ".join(_describe_takers(own, context, names))
        return UsageError(problem, hint=hint) if hint else None
    suggested.remarks = [*_describe_takers(own, context, suggested.omitted), *suggested.remarks]
    return suggested.as_error(problem)


def missing_output(context: click.Context, arguments: Sequence[str], error: UsageError) -> UsageError:
    """Return an error about a missing output with a line that names one."""
    completed = Translation(context.command, arguments)
    if not completed.is_parsed or completed.line == [*arguments]:
        return error
    line = command_line([*context.command_path.split(), *completed.line])
    return _Suggested([line]).as_error(error.message, error.hint)


@dataclass
class _Suggested:
    """Command lines to type."""

    lines: Sequence[str]
    """Alternatives, or the lines of a sequence."""
    omitted: Sequence[str] = ()
    """Typed options without a counterpart."""
    remarks: Sequence[str] = ()
    is_sequence: bool = False
    last: str = ""
    """Command line that the last remark is about."""

    def as_error(self, problem: str, hint: str = "") -> SuggestionError:
        """Return the error; each command line stands alone on its line, to be copied."""
        several = " these, one after the other" if self.is_sequence else " one of these"
        without = f", without {', '.join(dict.fromkeys(self.omitted))}" if self.omitted else ""
        lines = [f"  {line}" for line in (*self.lines, self.last) if line]
        lines[len(self.lines) : len(self.lines)] = dict.fromkeys(self.remarks)
        first = f"Type{several if len(self.lines) > 1 else ''}{without}:"
        return SuggestionError(problem, hint="\n".join([*filter(None, [hint]), first, *lines]))


def _verbs(context: click.Context) -> Mapping[str, click.Command]:
    """Return the commands beside that of a context, by name."""
    root = context.find_root()
    group = root.command
    if not isinstance(group, click.Group):
        return {}
    commands = {verb: group.get_command(root, verb) for verb in group.list_commands(root)}
    return {verb: command for verb, command in commands.items() if command is not None}


def _describe_takers(own: Translation, context: click.Context, names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each option that the command has for another value, or that few other commands have."""
    options = {f"winml {verb}": MeantOptions(command).by_flag for verb, command in _verbs(context).items()}
    options.pop(context.command_path, None)
    for name in names:
        paths = [path for path, known in options.items() if name in known]
        meant = [*own.options.find(name)] if len(name) > len("-b") else []
        if meant and meant[0][0].name == "input_data" and "dataset" in own.options.by_name:
            meant += own.options.find("--dataset")
        flags = [spelling.replace("{}", str(param.metavar)) for param, spelling in meant]
        if name in own.remarks or any(flag.split()[0] in own.line for flag in flags):
            continue
        if flags:
            yield f"{context.command_path} has {' and '.join(dict.fromkeys(flags))}."
        elif 0 < len(paths) < _COMMON:
            yield f"{name} is an option of {', '.join(paths[:_MOST_TAKERS])}."
