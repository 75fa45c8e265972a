"""Is what names and paths show to be wrong refused in one place of each verb, before anything heavy is imported?"""

from __future__ import annotations

import ast

import pytest

from house.sources import Module, functions, modules

WITHOUT = {
    "cache": "it takes nothing that could be wrong",
    "sys": "it takes nothing that could be wrong",
    "build": "its plan refuses (winml.modelkit.verbs)",
    "compare": "its plan refuses (winml.modelkit.verbs)",
    "compile": "its plan refuses (winml.modelkit.verbs)",
    "config": "its plan refuses (winml.modelkit.verbs)",
    "diff": "its plan refuses (winml.modelkit.verbs)",
    "eval": "its plan refuses (winml.modelkit.verbs)",
    "export": "its plan refuses (winml.modelkit.verbs)",
    "extract": "its plan refuses (winml.modelkit.verbs)",
    "optimize": "its plan refuses (winml.modelkit.verbs)",
    "perf": "its plan refuses (winml.modelkit.verbs)",
    "quantize": "its plan refuses (winml.modelkit.verbs)",
    "sweep": "its plan refuses (winml.modelkit.verbs)",
    "tune": "its plan refuses (winml.modelkit.verbs)",
    "run": "its plan refuses (winml.modelkit.verbs)",
    "retag": "its plan refuses (winml.modelkit.verbs)",
}
"""Verb to the reason why it needs no early refusal of its own."""

VERBS = [
    module for module in modules() if module.name.startswith("cli.verbs.") and not module.name.startswith("cli.verbs._")
]


@pytest.mark.parametrize("module", VERBS, ids=lambda module: module.name)
def test_verb_refuses_early_in_one_function_that_it_calls_once(module: Module) -> None:
    """The function is ``_refuse_early``; a verb that needs none is listed with the reason."""
    verb = module.name.rpartition(".")[2]
    defined = [name for name, _ in functions(module.tree) if name == "_refuse_early"]
    called = [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_refuse_early"
    ]
    expected = 0 if verb in WITHOUT else 1
    assert (expected, expected) == (len(defined), len(called))
