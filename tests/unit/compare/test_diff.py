"""Differences between two files by module, found without running them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
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


_BRANCHES = """<ir_version: 8, opset_import: ["" : 17]> m (bool c, float[2] x) => (float[2] y) {
    y = If (c) <
        then_branch = t () => (float[2] p) <float[2] w = {%s}> { p = Add (x, w) },
        else_branch = e () => (float[2] q) <float[2] w = {%s}> { q = Mul (x, w) }
    >
}"""


@pytest.mark.parametrize(("then", "other"), [("1, 9", "3, 4"), ("1, 2", "3, 9")])
def test_weights_of_one_name_in_two_branches_are_compared(then: str, other: str, tmp_path: Path) -> None:
    """A change of either weight is a change of the weight of this name."""
    for name, values in (("before", ("1, 2", "3, 4")), ("after", (then, other))):
        model = onnx.parser.parse_model(_BRANCHES % values)
        onnx.save(model, tmp_path / f"{name}.onnx")
    (module,) = diff_models(tmp_path / "before.onnx", tmp_path / "after.onnx").modules
    assert [("w", "changed")] == [(weight.name, weight.status) for weight in module.weights]


@pytest.mark.parametrize("count", [2, 4096])
def test_values_of_constants_are_compared(count: int, tmp_path: Path) -> None:
    """The values of a large constant are not in the structure of a file, those of a small one are."""
    for name, last in (("before", 1.0), ("after", 2.0)):
        model = parse(f"m (float[{count}] x) => (float[{count}] y) {{ k = Constant () y = Add (x, k) }}")
        values = np.append(np.zeros(count - 1, np.float32), np.float32(last))
        model.graph[0].attributes["value"] = ir.AttrTensor("value", ir.tensor(values))
        ir.save(model, tmp_path / f"{name}.onnx")
    modules = diff_models(tmp_path / "before.onnx", tmp_path / "after.onnx").modules
    assert [("k", "changed")] == [(weight.name, weight.status) for module in modules for weight in module.weights]


def test_text_file_is_refused(tmp_path: Path) -> None:
    """The error names the file."""
    (tmp_path / "text.onnx").write_text("text", encoding="utf-8")
    with pytest.raises(InputError, match=r"text\.onnx"):
        diff_models(_saved("Relu", tmp_path / "before.onnx"), tmp_path / "text.onnx")
