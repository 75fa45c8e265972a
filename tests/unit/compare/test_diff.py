"""Differences between two files by module, found without running them."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from graphs import parse
from winml.modelkit.compare.diff import diff_models
from winml.modelkit.errors import InputError

_NET = "m (float[2] x) => (float[2] y) {{ a = Neg (x) y = {last} (a) }}"


def _saved(last: str, path: Path) -> Path:
    ir.save(parse(_NET.format(last=last)), path)
    return path


def test_exchanged_operator_is_a_change_of_its_module(tmp_path: Path) -> None:
    """The module beside it has no difference."""
    diff = diff_models(_saved("Relu", tmp_path / "before.onnx"), _saved("Tanh", tmp_path / "after.onnx"))
    assert {"Relu": (1, 0), "Tanh": (0, 1)} == dict(diff.operators)
    assert [] == [module for module in diff.modules if "Neg" in str(module)]
    assert diff.modules


def test_file_and_its_copy_do_not_differ(tmp_path: Path) -> None:
    """Modules, operators and inputs have no differences."""
    diff = diff_models(_saved("Relu", tmp_path / "before.onnx"), _saved("Relu", tmp_path / "after.onnx"))
    assert ((), {}, ()) == (diff.modules, dict(diff.operators), tuple(diff.interface))
    assert not diff.is_rewired


def test_text_file_is_refused(tmp_path: Path) -> None:
    """The error names the file."""
    (tmp_path / "text.onnx").write_text("text", encoding="utf-8")
    with pytest.raises(InputError, match=r"text\.onnx"):
        diff_models(_saved("Relu", tmp_path / "before.onnx"), tmp_path / "text.onnx")
