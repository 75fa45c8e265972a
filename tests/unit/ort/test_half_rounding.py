"""Float16 values that ONNX Runtime computes in float32 on the CPU round and overflow as on a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphs import parse
from winml.modelkit.ort.graph_sessions import open_session
from winml.modelkit.ort.half_rounding import round_half_values

LARGEST = float(np.finfo(np.float16).max)
SUM = """m (float16[4] x) => (float[4] y) {
    a = Add (x, x)
    b = Sub (a, x)
    y = Cast <to = 1> (b)
}"""
BRANCH = """m (float16[4] x, bool c) => (float16[4] y) {
    y = If (c) <then_branch = t () => (float16[4] u) { d = Add (x, x)
                                                      u = Sub (d, x) },
                else_branch = f () => (float16[4] v) { v = Sub (x, x) }>
}"""


def _save(path: Path, text: str) -> Path:
    onnx.save(onnx.shape_inference.infer_shapes(ir.to_proto(parse(text))), path)
    return path


@pytest.mark.parametrize("as_written", [True, False])
def test_value_beyond_float16_is_infinite(tmp_path: Path, as_written: bool) -> None:
    """Twice 40,000 overflows although the difference to 40,000 does not, as written and optimized."""
    path = _save(tmp_path / "sum.onnx", SUM)
    feeds = {"x": np.array([1, 40_000, -40_000, 3], np.float16)}
    rounded = open_session(path, as_written=as_written).run(feeds)["y"]
    assert [1, np.inf, -np.inf, 3] == rounded.tolist()
    exact = open_session(path, as_written=as_written, as_device=False).run(feeds)["y"]
    assert np.isfinite(exact).all()


def test_requested_value_keeps_its_name_and_type(tmp_path: Path) -> None:
    """A value inside the graph is returned in float16."""
    session = open_session(_save(tmp_path / "sum.onnx", SUM), as_written=True, outputs=["a"])
    found = session.run({"x": np.full(4, LARGEST / 4, np.float16)})
    assert np.float16 == found["a"].dtype
    assert [LARGEST / 2] * 4 == pytest.approx(found["a"].tolist(), rel=1e-3)


def test_values_of_a_branch_are_rounded(tmp_path: Path) -> None:
    """Values inside a branch overflow; inputs and outputs of the graph stay float16."""
    path = _save(tmp_path / "branch.onnx", BRANCH)
    model = ir.load(path)
    assert round_half_values(model)
    assert [ir.DataType.FLOAT16] * 2 == [model.graph.inputs[0].dtype, model.graph.outputs[0].dtype]
    found = open_session(path, as_written=False).run({"x": np.full(4, 40_000, np.float16), "c": np.array(True)})
    assert np.isinf(found["y"]).all()


def test_float32_graph_stays_unchanged() -> None:
    """There is nothing to round."""
    model = parse("m (float[4] x) => (float[4] y) { y = Add (x, x) }")
    assert not round_half_values(model)
    assert ["Add"] == [node.op_type for node in model.graph]
