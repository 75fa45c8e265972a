"""The newest supported IR version is found, and newer files are run with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphs import parse, run_onnx
from winml.modelkit.errors import StageError
from winml.modelkit.ort.ir_versions import newest_ir_version, runnable
from winml.modelkit.ort.sessions import Session


def test_file_of_a_newer_format_runs_and_stays_as_it_is(tmp_path: Path) -> None:
    """ONNX Runtime refuses it, without telling where its own source was compiled."""
    model = ir.to_proto(parse("m (float[2] x) => (float[2] y) { y = Neg (x) }"))
    onnx.save(model, tmp_path / "old.onnx")
    assert tmp_path / "old.onnx" == runnable(tmp_path / "old.onnx")
    model.ir_version = newest_ir_version() + 1
    onnx.save(model, tmp_path / "new.onnx")
    before = (tmp_path / "new.onnx").read_bytes()
    with pytest.raises(StageError, match="IR version") as raised:
        Session(tmp_path / "new.onnx")
    assert "onnxruntime_src" not in raised.value.message
    feeds = {"x": np.array([1, -2], np.float32)}
    assert [-1, 2] == run_onnx(runnable(tmp_path / "new.onnx"), feeds)["y"].tolist()
    assert before == (tmp_path / "new.onnx").read_bytes()
