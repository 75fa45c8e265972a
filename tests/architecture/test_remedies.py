"""Names of verbs and options in messages; the library itself spells no flags.

The remedies themselves are tested in ``tests/e2e``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import click
import pytest

from architecture.sources import Module, modules
from winml.modelkit.cli.main import COMMANDS, VERBS
from winml.modelkit.errors import spell_flag

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![\w{-])")
_COMMAND = re.compile(rf"winml ({'|'.join(COMMANDS)})\b([^;:.]*)")
_OF_OTHERS = {"--version", "--head", "--address", "--force-reinstall"}
"""Options of the program itself, of Ray and of pip."""


def _options_of(command: click.Command) -> set[str]:
    options = {spelling for item in command.params for spelling in (*item.opts, *item.secondary_opts)}
    for inner in getattr(command, "commands", {}).values():
        options |= _options_of(inner)
    return options


OPTIONS = {verb: _options_of(VERBS[verb]) | {"--help"} for verb in COMMANDS}


def _spelled(node: ast.AST) -> str | None:
    """Return the flag of ``opt.min_sqnr``; `None` for any other node."""
    if isinstance(node, ast.FormattedValue):
        node = node.value
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "opt":
        flag = spell_flag(node.attr)
        return flag if flag.startswith("--") else None
    return None


def _texts(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module other than docstrings, with ``{}`` for inserted values, and options as flags."""
    inside = {id(value) for node in ast.walk(module.tree) if isinstance(node, ast.JoinedStr) for value in node.values}
    told = {id(node.value) for node in ast.walk(module.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(module.tree):
        if id(node) in inside | told:
            continue
        if flag := _spelled(node) if isinstance(node, ast.Attribute) else None:
            yield node.lineno, flag
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (
                value.value if isinstance(value, ast.Constant) else _spelled(value) or "{}" for value in node.values
            )
            yield node.lineno, "".join(map(str, parts))


def test_every_option_that_a_message_names_is_one_of_a_verb() -> None:
    """An option behind the name of a verb is an option of this verb."""
    known = _OF_OTHERS.union(*OPTIONS.values())
    wrong = []
    for module in modules():
        if module.name == "cli._synonyms":  # options of other tools; a test of its own compares their replacements
            continue
        for line, text in _texts(module):
            wrong += [f"{module.name}:{line}: {name}" for name in _OPTION.findall(text) if name not in known]
            for verb, rest in _COMMAND.findall(text):
                clause = re.split(r", or |, and ", rest)[0]
                unknown = [name for name in _OPTION.findall(clause) if name not in OPTIONS[verb]]
                wrong += [f"{module.name}:{line}: winml {verb} {name}" for name in unknown]
    assert not wrong


@pytest.mark.parametrize("text", ["--no-such", "see winml perf --opset 20", "winml export, then --{}"])
def test_the_patterns_find_options(text: str) -> None:
    """An option name that continues with an inserted value is not judged."""
    found = _OPTION.findall(text)
    assert (found == []) == ("{" in text)


_LIBRARY_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
_COMMAND_LINE = re.compile(r"(?:winml [a-z]+|ray start)\b(?:(?![.;,:)](?:\s|$)).)*", re.DOTALL)
"""A command with its options: a command line is spelled the same in Python."""


def _declares(node: ast.AST) -> bool:
    """Return True if a node declares an option, with its spelling and help."""
    is_spelling = isinstance(node, ast.Dict) and any(ast.unparse(key) == "'spelling'" for key in node.keys if key)
    return is_spelling or (isinstance(node, ast.Call) and "declare" in ast.unparse(node.func))


def test_library_spells_no_flags_outside_of_whole_commands() -> None:
    """The command, a config and Python each spell an option differently, so messages use ``opt.min_sqnr``."""
    wrong = []
    for module in modules():
        if module.name.startswith("cli.") or module.name == "fields" or module.name.endswith("command"):
            continue
        declared = [inner for node in ast.walk(module.tree) if _declares(node) for inner in ast.walk(node)]
        lines = {inner.lineno for inner in declared if isinstance(inner, (ast.Constant, ast.JoinedStr))}
        for line, text in _literals(module):
            if line not in lines and (flags := _LIBRARY_FLAG.findall(_COMMAND_LINE.sub("", text))):
                wrong.append(f"{module.name}:{line}: {', '.join(flags)}")
    assert not wrong


def _literals(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module as written in the source, with a space and ``x`` for inserted values."""
    inside = {id(value) for node in ast.walk(module.tree) if isinstance(node, ast.JoinedStr) for value in node.values}
    told = {id(node.value) for node in ast.walk(module.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | told:
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (str(value.value) if isinstance(value, ast.Constant) else " x" for value in node.values)
            yield node.lineno, "".join(parts)
