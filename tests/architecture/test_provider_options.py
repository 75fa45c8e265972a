"""Options of execution providers: every verb that opens a session on a provider takes all of them."""

from __future__ import annotations

import pytest

from winml.modelkit.cli.main import VERBS

_ALL = {"ep", "ep_options", "ep_library"}
_OTHERS = {
    "config": {"ep", "ep_library"},  # writes a target
    "export": {"ep", "ep_library"},  # these three make files for a target, and run them on the CPU
    "optimize": {"ep", "ep_library"},
    "quantize": {"ep", "ep_library"},
    "sweep": {"ep_library"},  # providers and their options are in its configurations
    "refit": set(),  # makes files for the target of the build
    "sys": {"ep_library"},  # lists providers
    "cache": set(),  # these run no model, or on the CPU only
    "diff": set(),
    "extract": set(),
    "retag": set(),
    "view": set(),  # --measure runs on the CPU
}
"""Verb → options, for verbs that open no session on a provider."""


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_verb_takes_the_options_of_its_provider(verb: str) -> None:
    """A new verb takes all options, or states in the table above why not."""
    names = {param.name for param in VERBS[verb].params}
    assert _OTHERS.get(verb, _ALL) == _ALL & names
    assert "device" not in names or "ep" in names
