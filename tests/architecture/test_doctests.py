"""The examples in docstrings."""

from __future__ import annotations

import doctest
import importlib

import pytest

from architecture.sources import PACKAGE, modules

WITH_EXAMPLES = [module for module in modules() if ">>> " in module.path.read_text(encoding="utf-8")]


def test_examples_exist() -> None:
    """The list of modules with examples is not empty by mistake."""
    assert {"tags.address", "export.table", "words"} <= {module.name for module in WITH_EXAMPLES}


@pytest.mark.parametrize("module", WITH_EXAMPLES, ids=lambda module: module.name)
def test_examples_in_docstrings_run(module: object) -> None:
    """Every example of the module is found, runs, and prints the text below it."""
    loaded = importlib.import_module(f"{PACKAGE}.{module.name}")  # type: ignore[attr-defined]
    results = doctest.testmod(loaded, optionflags=doctest.ELLIPSIS)
    assert results.attempted
    assert not results.failed
