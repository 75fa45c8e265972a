"""Options that several verbs share, read alike by each verb."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from winml.modelkit.cli.main import VERBS


@pytest.mark.parametrize("path", ["", " "])
@pytest.mark.parametrize("verb", ["export", "config", "optimize", "build", "extract", "retag"])
def test_empty_output_is_refused_by_every_verb(verb: str, path: str) -> None:
    """An unset variable of a shell leaves an empty text, which would mean the current folder."""
    command: click.Command = VERBS[verb]
    outcome = CliRunner().invoke(command, ["-o", path])
    assert 2 == outcome.exit_code
    assert "'--output':" in outcome.output
