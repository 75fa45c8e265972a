"""Computation of a bfloat16 graph in float32, with unchanged weights."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from graphs import parse
from winml.modelkit.errors import WinMLError
from winml.modelkit.onnx.files.writing import write_model
from winml.modelkit.onnx.widening import computes_in, widen_floats
from winml.modelkit.ort.graph_sessions import open_session
from winml.modelkit.ort.sessions import Session

# A weight that is an output as well, a constant, a Cast, a mask of a Shape, and a branch that reads the weight.
_GRAPH = """m (bfloat16[n, 2] x, bool flag) => (bfloat16[n, 2] y, bfloat16[n, 2] z)
    <bfloat16[2, 2] w = {0, 0, 0, 0}> {
        half = Constant <value = bfloat16[1] {0}> ()
        a = MatMul (x, w)
        b = Mul (a, half)
        size = Shape (b)
        zeros = ConstantOfShape <value = bfloat16[1] {0}> (size)
        one = Cast <to = 16> (flag)
        c = Add (b, zeros)
        y = Mul (c, one)
        z = If (flag) <
            then_branch = then () => (bfloat16[n, 2] t) { t = MatMul (x, w) },
            else_branch = else () => (bfloat16[n, 2] e) { e = Neg (x) }>
    }"""

_WEIGHT = np.array([[1, 0], [0, 2]], np.float32)


def _graph() -> ir.Model:
    """The graph with its values, which a text gives as bits of no agreed meaning."""
    model = parse(_GRAPH)
    model.graph.initializers["w"].const_value = ir.tensor(_WEIGHT.astype(ml_dtypes.bfloat16), name="w")
    for node, value in zip(
        (node for node in model.graph if node.op_type in ("Constant", "ConstantOfShape")), (0.5, 1.0), strict=True
    ):
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.array([value], ml_dtypes.bfloat16)))
    return model


@pytest.mark.parametrize("is_external", [False, True])
def test_outputs_equal_float32(tmp_path: Path, is_external: bool) -> None:
    """ONNX Runtime's CPU provider opens such a graph only after widening. The file stays as it is."""
    path = tmp_path / "model.onnx"
    write_model(_graph(), path, external=is_external)
    before = path.read_bytes()
    with pytest.raises(WinMLError):
        Session(path)
    x = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    session = open_session(path, as_written=False, outputs=["a"])
    for flag in (True, False):
        answer = session.run({"x": x, "flag": np.array(flag)})
        np.testing.assert_allclose(answer["a"], x @ _WEIGHT, rtol=1e-6)
        # Sums of two products.
        np.testing.assert_allclose(answer["y"], (x @ _WEIGHT / 2 + 1) * flag, rtol=1e-6)
        np.testing.assert_allclose(answer["z"], x @ _WEIGHT if flag else -x, rtol=1e-6)
    assert before == path.read_bytes()


def test_weights_are_cast_on_read() -> None:
    """Only the type of the weights changes before they are read."""
    model = _graph()
    widen_floats(model, ir.DataType.BFLOAT16)
    assert not computes_in(model, ir.DataType.BFLOAT16)
    weight = model.graph.initializers["w"].const_value
    assert isinstance(weight, ir.LazyTensor)
    assert ir.DataType.FLOAT == weight.dtype == model.graph.initializers["w"].dtype
    np.testing.assert_array_equal(_WEIGHT, weight.numpy())


@pytest.mark.parametrize(
    "text",
    ["m (float[2] x) => (float[2] y) { y = Mul (x, x) }",
     "m (float[2] x) => (float[2] y) <bfloat16[2] w = {16256, 0}> { f = Cast <to = 1> (w)  y = Mul (x, f) }"],
    ids=["nothing in bfloat16", "weights stored in bfloat16"],
)  # fmt: skip
def test_runnable_graphs_are_not_widened(text: str) -> None:
    """Such graphs are compared unchanged."""
    assert not computes_in(parse(text), ir.DataType.BFLOAT16)


def test_rounding_by_casts_stays(tmp_path: Path) -> None:
    """A float32 value that is cast to bfloat16 and back is rounded when the file is opened: 257 becomes 256."""
    text = "m (float[2] x) => (float[2] y) { h = Cast <to = 16> (x) f = Cast <to = 1> (h) y = Neg (f) }"
    write_model(parse(text), tmp_path / "model.onnx")
    answer = open_session(tmp_path / "model.onnx", as_written=True).run({"x": np.array([257, 3], np.float32)})
    assert answer["y"].tolist() == [-256, -3]
