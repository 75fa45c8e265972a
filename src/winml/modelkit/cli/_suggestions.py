"""Suggested command lines for words of other tools.

An unknown command or option is refused with the command line to type instead. A line is suggested only if its command
takes it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

from winml.modelkit.cli import _synonyms as synonyms
from winml.modelkit.cli._meant_options import MeantOptions, plain_name
from winml.modelkit.cli._translation import Translation
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
_LEAST_LETTERS = 6
"""Chosen: letters of a word that is searched in the descriptions of commands, without its last two."""
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
    if name not in table and not group and Path(typed).exists():
        arguments, name = [typed, *arguments], _FILE if _is_model(typed) else _FOLDER
    table |= {**{verb: f"{verb} {{}}" for verb in commands}, **_OF_PATHS}
    if arguments and (both := f"{name}-{arguments[0]}") in table:
        name, *arguments = both, *arguments[1:]
    if typed.startswith("-") and name not in table:
        return None
    if name not in table and commands and (words := MeantOptions(commands["quantize"]).of_value(name)):
        templates: str | None = f"quantize {{}} {' '.join(words)}"  # winml int8 model.onnx
    else:
        templates = _find_command(name, table, descriptions)
    if templates is None:
        return None
    if templates.startswith("export") and any(map(_is_model, arguments[:1])):
        templates = synonyms.OF_ONNX  # an export starts from PyTorch
    lines = [line for line in templates.split("; ") if not line.startswith("verify ") or _has_proof(arguments)]
    filled = [_fill_template(line, arguments, commands) for line in lines]
    return _suggestion(problem, [line for line, _ in filled], [name for _, names in filled for name in names])


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


def _is_model(word: str) -> bool:
    return word.lower().endswith(MODEL_SUFFIX)


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
    translation = Translation(commands[verb], arguments, before=words[:start], after=words[start + 1 :])
    line = translation.line if translation.is_parsed else ["--help"]
    return command_line(["winml", verb, *line]), translation.omitted


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
        return _suggestion(problem, [command_line([*context.command_path.split(), "--help"])])
    own = Translation(context.command, arguments)
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
            other = None if command is None else Translation(command, arguments)
            if other is None or not other.is_parsed or any(map(own.options.knows, other.omitted)):
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
    completed = Translation(context.command, arguments)
    if completed.is_parsed and completed.line != [*arguments]:
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
    options = {f"winml {verb}": MeantOptions(command).by_flag for verb, command in _verbs(context).items()}
    options.pop(context.command_path, None)
    takers = {name: [path for path, known in options.items() if name in known] for name in names}
    return [f"{name} is an option of {', '.join(paths[:_MOST_TAKERS])}." for name, paths in takers.items() if paths]
