"""Early refusal of wrong names and paths, in one function of each verb and before heavy imports."""

from __future__ import annotations

import ast

import pytest

from architecture.sources import functions, modules
from winml.modelkit.cli.main import COMMANDS, MODULES

WITHOUT = {
    "cache": "it takes nothing that could be wrong",
    "sys": "it takes nothing that could be wrong",
    "build": "its plan refuses (verb.py of its subject)",
    "compare": "its plan refuses (verb.py of its subject)",
    "compile": "its plan refuses (verb.py of its subject)",
    "config": "its plan refuses (verb.py of its subject)",
    "diff": "its plan refuses (verb.py of its subject)",
    "eval": "its plan refuses (verb.py of its subject)",
    "export": "its plan refuses (verb.py of its subject)",
    "extract": "its plan refuses (verb.py of its subject)",
    "optimize": "its plan refuses (verb.py of its subject)",
    "perf": "its plan refuses (verb.py of its subject)",
    "quantize": "its plan refuses (verb.py of its subject)",
    "sweep": "its plan refuses (verb.py of its subject)",
    "tune": "its plan refuses (verb.py of its subject)",
    "run": "its plan refuses (verb.py of its subject)",
    "verify": "its plan refuses (verify_verb.py of its subject)",
    "refit": "its plan refuses (refit_verb.py of its subject)",
    "retag": "its plan refuses (verb.py of its subject)",
    "view": "its plan refuses (verb.py of its subject)",
}
"""Verb → the reason why it needs no early refusal of its own."""

VERBS = sorted(COMMANDS)


@pytest.mark.parametrize("verb", VERBS)
def test_verb_calls_its_early_refusal_once(verb: str) -> None:
    """The function is ``_refuse_early``; a verb that needs none is listed with the reason."""
    module = next(module for module in modules() if module.name == MODULES[verb])
    defined = [name for name, _ in functions(module.tree) if name == "_refuse_early"]
    called = [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_refuse_early"
    ]
    expected = 0 if verb in WITHOUT else 1
    assert (expected, expected) == (len(defined), len(called))
