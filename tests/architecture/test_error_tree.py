"""The tree drawn in ``errors.py`` against its classes."""

from __future__ import annotations

import inspect
import re

from winml.modelkit import errors

_LINE = re.compile(r"^\s*(?P<branch>[│├└─ ]*)(?P<name>[A-Z]\w*Error)\s+(?P<code>\d)\b", re.MULTILINE)
_INDENT = 4  # characters per level of the drawing


def _drawn() -> dict[str, tuple[str | None, int]]:
    """Return ``{class: (parent, exit code)}`` as the docstring draws it."""
    tree: dict[str, tuple[str | None, int]] = {}
    ancestors: list[str] = []
    for match in _LINE.finditer(inspect.getdoc(errors) or ""):
        depth = len(match["branch"]) // _INDENT
        ancestors = [*ancestors[:depth], match["name"]]
        tree[match["name"]] = (ancestors[-2] if depth else None, int(match["code"]))
    return tree


def _real() -> dict[str, tuple[str | None, int]]:
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == errors.__name__
    }
    return {
        name: (parent if (parent := kind.__mro__[1].__name__) in classes else None, kind.exit_code)
        for name, kind in classes.items()
    }


def test_drawn_error_tree_equals_the_classes() -> None:
    """Names, parents and exit codes in the docstring are equal to those of the classes."""
    assert _real() == _drawn()


def test_error_classes_end_in_error_and_have_docstrings() -> None:
    """Every class is named after the failed work, ends in ``Error`` and has a docstring of its own."""
    assert [] == [name for name in _real() if not name.endswith("Error") or not vars(vars(errors)[name]).get("__doc__")]


def test_error_text_is_message_then_hint() -> None:
    """The text of an error states the failure first and the remedy second."""
    error = errors.ModelPathError("models/bert: no such folder", hint="Check the path.")
    assert "models/bert: no such folder\nCheck the path." == str(error)
    assert 2 == error.exit_code
