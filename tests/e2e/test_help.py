"""``--help`` on one screen, and ``--help-all`` with every option in the same groups."""

from __future__ import annotations

import re

import click
import pytest

from e2e.in_process import run_here
from winml.modelkit.cli.main import COMMANDS, VERBS
from winml.modelkit.fields import GENERAL

MOST_LINES, MOST_COLUMNS = 45, 100
_HEADING = re.compile(r"^(\S.*):$", re.MULTILINE)
_LAST = re.compile(r"^All (\d+) options: winml (?:\w+) --help-all(?:; also: (.+?))?\.$")


def _command(verb: str) -> click.Command:
    command: click.Command = VERBS[verb]
    return command


def _help(monkeypatch: pytest.MonkeyPatch, verb: str, option: str, columns: int) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = run_here(verb, option)
    assert (0, "") == (shown.code, shown.err)
    return shown.out


def _headings(text: str) -> list[str]:
    return [heading for heading in _HEADING.findall(text) if heading != "Commands"]


@pytest.mark.parametrize("verb", COMMANDS)
@pytest.mark.parametrize("columns", [80, 100])
def test_help_fits_a_screen(monkeypatch: pytest.MonkeyPatch, verb: str, columns: int) -> None:
    """The help fits a narrow terminal, and the complete help fits its width."""
    text, whole = (_help(monkeypatch, verb, option, columns) for option in ("--help", "--help-all"))
    assert len(text.splitlines()) <= MOST_LINES
    assert [] == [line for line in (text + whole).splitlines() if len(line) > MOST_COLUMNS]


@pytest.mark.parametrize("verb", COMMANDS)
def test_whole_help_has_every_option_once(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Each row begins with an option that no earlier row has."""
    text = _help(monkeypatch, verb, "--help-all", 100)
    command = _command(verb)
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    options = [param for found in (command, *inner) for param in found.params if isinstance(param, click.Option)]
    params = [param for param in options if not param.hidden]
    helps = len(inner) + 1
    rows = [line.split()[0].rstrip(",") for line in text.splitlines() if re.match(r"^  -", line)]
    assert sorted([min(param.opts, key=len) for param in params] + ["-h"] * helps) == sorted(rows)


@pytest.mark.parametrize("verb", sorted({*COMMANDS} - {"cache"}))
def test_help_names_every_group(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """The last line names the groups without a common option, and counts all options."""
    brief, whole = (_help(monkeypatch, verb, option, 200) for option in ("--help", "--help-all"))
    found = _LAST.match(brief.splitlines()[-1])
    assert found is not None
    named = [*_headings(brief), *(found[2] or "").split(", "), GENERAL]
    assert sorted(_headings(whole)) == sorted(filter(None, named))
    options = whole[whole.index(f"\n{_headings(whole)[0]}:") :].partition("\n  Examples:")[0]
    rows = re.findall(r"^  (?:-|\[-m|\[?[A-Z]{2})", options, re.MULTILINE)
    assert int(found[1]) == len(rows)


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_lists_common_options(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """The mark of an option decides alone."""
    text = _help(monkeypatch, verb, "--help", 100)
    listed = {line.split()[0].rstrip(",") for line in text.splitlines() if re.match(r"^  -", line)}
    options = [param for param in _command(verb).params if isinstance(param, click.Option)]
    shown = [option for option in options if listed & {*option.opts}]
    assert [option for option in options if getattr(option, "is_common", False)] == shown


def test_help_has_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The width has an upper limit for readability."""
    narrow, wide = (_help(monkeypatch, "build", "--help-all", columns) for columns in (80, 300))
    assert len(narrow.splitlines()) > len(wide.splitlines())
    assert max(map(len, wide.splitlines())) <= MOST_COLUMNS
