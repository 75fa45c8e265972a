"""Does every message name verbs and options that exist? What comes of following them is tested in ``tests/e2e``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import click
import pytest

from house.sources import Module, modules
from winml.modelkit.cli.main import COMMANDS, VERBS

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![\w{-])")
_COMMAND = re.compile(rf"winml ({'|'.join(COMMANDS)})\b([^;:.]*)")
_OF_OTHERS = {"--version", "--head", "--address", "--force-reinstall"}
"""Of the program itself, of Ray and of pip."""


def _options_of(command: click.Command) -> set[str]:
    options = {spelling for item in command.params for spelling in (*item.opts, *item.secondary_opts)}
    for inner in getattr(command, "commands", {}).values():
        options |= _options_of(inner)
    return options


OPTIONS = {verb: _options_of(VERBS[verb]) | {"--help"} for verb in COMMANDS}


def _texts(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module that are no documentation, with ``{}`` for what is put in."""
    inside = {id(value) for node in ast.walk(module.tree) if isinstance(node, ast.JoinedStr) for value in node.values}
    told = {id(node.value) for node in ast.walk(module.tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(module.tree):
        if id(node) in inside | told:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (value.value if isinstance(value, ast.Constant) else "{}" for value in node.values)
            yield node.lineno, "".join(map(str, parts))


def test_every_option_that_a_message_names_is_one_of_a_verb() -> None:
    """Behind the name of a verb, of this one."""
    known = _OF_OTHERS.union(*OPTIONS.values())
    wrong = []
    for module in modules():
        for line, text in _texts(module):
            wrong += [f"{module.name}:{line}: {name}" for name in _OPTION.findall(text) if name not in known]
            for verb, rest in _COMMAND.findall(text):
                clause = re.split(r", or |, and ", rest)[0]
                unknown = [name for name in _OPTION.findall(clause) if name not in OPTIONS[verb]]
                wrong += [f"{module.name}:{line}: winml {verb} {name}" for name in unknown]
    assert not wrong


@pytest.mark.parametrize("text", ["--no-such", "see winml perf --opset 20", "winml export, then --{}"])
def test_the_patterns_find_options(text: str) -> None:
    """A name that goes on with what is put in is not judged."""
    found = _OPTION.findall(text)
    assert (found == []) == ("{" in text)
