"""Text and attributes of errors."""

from __future__ import annotations

import pickle

import pytest

from winml.modelkit import errors


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  one  \ntwo"), "one"),
        (ValueError(""), "ValueError"),
        (KeyError("gone"), "'gone'"),
        (RuntimeError(" \n "), "RuntimeError"),
    ],
)
def test_first_line_is_the_first_line_with_text(error: Exception, line: str) -> None:
    """A foreign error is quoted in one line; an error without text is named by its type."""
    assert line == errors.first_line(error)


def test_error_text_without_hint_is_the_message() -> None:
    """There is no empty second line."""
    assert "it broke" == str(errors.InputError("it broke"))


def test_export_error_knows_operator_and_module() -> None:
    """Operator and module are attributes, so a program can read them."""
    error = errors.ExportError("it broke", hint="Mend it.", operator="aten::diff", module="encoder")
    assert ("aten::diff", "encoder", "Mend it.", "") == (error.operator, error.module, error.hint, error.step)
    assert (None, None) == (errors.ExportError("it broke").operator, errors.ExportError("it broke").module)


def test_task_error_lists_candidates() -> None:
    """Suitable tasks are an attribute."""
    assert ("fill-mask",) == errors.TaskError("which?", candidates=("fill-mask",)).candidates


def test_error_crosses_processes_with_all_fields() -> None:
    """A worker's error keeps its hint, step, operator and module."""
    error = errors.ExportError("it broke", hint="Mend it.", operator="aten::diff", module="encoder")
    error.step = "step 4 of 8"
    copied = pickle.loads(pickle.dumps(error))
    assert vars(error) == vars(copied)
    assert str(error) == str(copied)
