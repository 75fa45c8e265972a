"""Does a shell get its completions from the command, and nothing else?"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def _answer(**variables: str) -> str:
    command = [sys.executable, "-m", "winml.modelkit"]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_shell_gets_a_script_that_asks_winml(shell: str) -> None:
    """The one of bash also asks which bash is there."""
    assert f"_WINML_COMPLETE={shell}_complete" in _answer(_WINML_COMPLETE=f"{shell}_source")


def test_verbs_and_options_are_completed() -> None:
    """In the protocol of bash."""
    asked = {"_WINML_COMPLETE": "bash_complete"}
    assert ["plain,export", "plain,extract"] == _answer(**asked, COMP_WORDS="winml ex", COMP_CWORD="1").split()
    assert "plain,--dynamic-axes" in _answer(**asked, COMP_WORDS="winml export --dynamic", COMP_CWORD="2").split()
