"""Common spellings: short flags, options before the verb, and a verb with a typo."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from e2e.in_process import run_here
from winml.modelkit.cli.main import COMMANDS, VERBS

SHORT = {"--task": "-t", "--format": "-f", "--device": "-d", "--precision": "-p", "--model": "-m", "--output": "-o"}
OTHERWISE = {"generate": {"--prompt": "-p"}}
"""Verb → its different short forms: a built model has no precision to choose."""


def _options(verb: str) -> list[click.Parameter]:
    command: click.Command = VERBS[verb]
    return [option for option in command.params if isinstance(option, click.Option)]


@pytest.mark.parametrize("verb", COMMANDS)
def test_short_flags_mean_the_same_in_every_verb(verb: str) -> None:
    """A long option with a short form has it in every verb, and the short form has no other meaning."""
    for option in _options(verb):
        for long, short in SHORT.items():
            if any(OTHERWISE.get(verb, {}).get(name) == short for name in option.opts):
                assert not any(long in other.opts for other in _options(verb))
                continue
            assert (long in option.opts) == (short in option.opts), option.opts


def test_short_flags_are_read() -> None:
    """The help shows short flags, and their values are read."""
    assert "-p, --precision NAME" in run_here("config", "--help").out
    refused = run_here("config", "-m", "x", "-p", "int3", "-d", "tpu")
    assert "'-d' / '--device': 'tpu'" in refused.err
    assert '"kind": "tasks"' in run_here("inspect", "--list-tasks", "-f", "json").out
    assert "--task fill-maks" in run_here("inspect", "-m", "owner/name", "-t", "fill-maks").err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("exprt", "-m", "x"), "'export'"),
        (("qqq",), "'qqq'"),
        (("export", "--modle", "x"), "'--model'"),
        (("-x",), "'-x'"),
    ],
)
def test_verb_or_option_with_a_typo_is_met_with_the_nearest(arguments: tuple[str, ...], words: str) -> None:
    """The exit code is 2, with one sentence and the help that lists the right name."""
    refused = run_here(*arguments)
    assert (2, "") == (refused.code, refused.out)
    assert words in refused.err
    assert "--help' shows" in refused.err


def test_quiet_and_verbose_before_the_verb_equal_those_behind_the_verb(tmp_path: Path, small_file: Path) -> None:
    """A verb without the option says so."""
    quiet = run_here("-q", "optimize", "-m", small_file, "-o", tmp_path / "quiet.onnx")
    assert (0, "", "") == (quiet.code, quiet.out, quiet.err)
    assert run_here("-v", "inspect", small_file).out == run_here("inspect", small_file, "-v").out
    assert run_here("-v", "inspect", small_file).out != run_here("inspect", small_file).out
    for verb in (("sys",), ("cache", "ls")):
        refused = run_here("-q", *verb)
        assert (2, "") == (refused.code, refused.out)
        assert f"-q (--quiet) stands before the verb, and 'winml {' '.join(verb)}' does not take it" in refused.err


def test_completion_offers_verbs_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has the protocol of the shell."""
    monkeypatch.setenv("_WINML_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "winml ex")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert "plain,export\nplain,extract\n" == run_here().out
    monkeypatch.setenv("COMP_WORDS", "winml perf --by")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert "plain,--by-module\n" == run_here().out
