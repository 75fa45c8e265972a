"""Runs that return inner values of a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphs import parse
from winml.modelkit.errors import ModelPathError, StageError
from winml.modelkit.ort.graph_sessions import open_session

GRAPH = """
g (float[2,3] x) => (float[2,3] c)
<float[3] w = {0, 0, 0}>
{ a = Mul(x, w) \n b = Neg(a) \n c = Relu(b) }
"""
X = np.float32([[1, 2, 3], [4, 5, 6]])


def _write_model(folder: Path, *, external: bool) -> Path:
    path = folder / "model.onnx"
    ir.save(parse(GRAPH), path, external_data="model.onnx.data" if external else None, size_threshold_bytes=0)
    return path


@pytest.mark.parametrize("external", [False, True])
def test_inner_values_come_out_beside_the_outputs(tmp_path: Path, external: bool) -> None:
    """One run returns both; the file, its data file and its folder stay unchanged."""
    path = _write_model(tmp_path, external=external)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    session = open_session(path, as_written=True, outputs=["b", "a"])
    assert ("c", "b", "a") == session.outputs
    outputs = session.run({"x": X}, ["a", "c"])
    assert ["a", "c"] == list(outputs)
    assert np.array_equal(np.maximum(-outputs["a"], 0), outputs["c"])
    assert before == {file.name: file.read_bytes() for file in tmp_path.iterdir()}


def test_unknown_value_is_refused_with_the_file(tmp_path: Path) -> None:
    """The refusal of ONNX Runtime is given with the opened file."""
    path = _write_model(tmp_path, external=False)
    with pytest.raises(StageError, match=r"cannot load .*model\.onnx"):
        open_session(path, as_written=True, outputs=["nothing"])


def test_missing_file_is_reported(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(ModelPathError, match=r"away\.onnx"):
        open_session(tmp_path / "away.onnx", as_written=True)
