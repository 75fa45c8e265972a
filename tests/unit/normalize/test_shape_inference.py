"""Shapes of all values that onnx can infer."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphs import answer, parse, tags
from winml.modelkit.normalize.passes import InferredShapesPass
from winml.modelkit.normalize.pipeline import NormalizeOptions, normalize
from winml.modelkit.onnx.stage import all_nodes

BODY = """
m (float[2,3] x, bool c) => (float[6] z) <float[3,4] w = {0,0,0,0,0,0,0,0,0,0,0,0}, int64[1] n = {1}>
{ a = MatMul (x, w)  t = Shape (x)  u = Concat <axis=0> (n, t)  r = Reshape (x, u)  k = nowhere.Nonsense (r)
  y = If (c) <then_branch = f () => (p) <int64[1] s = {6}> { q = Relu (r)  p = Reshape (q, s) },
              else_branch = e () => (o) <int64[1] s2 = {6}> { o = Reshape (r, s2) }>
  z = Neg (y) }
"""


def _shapes_by_value(model: ir.Model) -> dict[str | None, list[Any] | None]:
    return {
        value.name: None if value.shape is None else list(value.shape)
        for node in all_nodes(model)
        for value in node.outputs
    }


def test_inference_reaches_branches_and_passes_over_unknown_operators() -> None:
    """Constants are followed through Shape and Concat; an operator onnx does not know keeps no other from its shape."""
    model = parse(BODY, domains=', "nowhere" : 1')
    assert InferredShapesPass()(model).modified
    expected = {
        "a": [2, 4],
        "t": [2],
        "u": [3],
        "r": [1, 2, 3],
        "k": None,
        "y": [6],
        "q": [1, 2, 3],
        "p": [6],
        "o": [6],
        "z": [6],
    }
    assert expected == _shapes_by_value(model)
    assert not InferredShapesPass()(model).modified


def test_inference_changes_neither_outputs_nor_tags() -> None:
    """Shapes are a statement about values only."""
    model = parse("m (float[2] x) => (float[2] y) { a = Neg (x)  y = Abs (a) }")
    x = np.array([1, -2], np.float32)
    before = (answer(model, x=x), tags(model))
    assert InferredShapesPass()(model).modified
    assert before == (answer(model, x=x), tags(model))


def test_inference_reads_no_large_weight() -> None:
    """Only the shape of a weight is used, at any size."""

    def read() -> NoReturn:
        raise AssertionError("the weight was read")

    model = parse(BODY, domains=', "nowhere" : 1')
    weight = model.graph.initializers["w"]
    weight.const_value = ir.LazyTensor(read, dtype=ir.DataType.FLOAT, shape=ir.Shape([3, 1 << 40]), name="w")
    weight.shape = ir.Shape([3, 1 << 40])
    assert InferredShapesPass()(model).modified
    assert [2, 1 << 40] == _shapes_by_value(model)["a"]


def test_inference_that_fails_as_a_whole_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnx_ir's pass logs the error and returns; InferredShapesPass raises onnx's error."""

    def fail(*_arguments: object, **_options: object) -> NoReturn:
        raise ValueError("the message is too large")

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", fail)
    with pytest.raises(ValueError, match="too large"):
        InferredShapesPass()(parse(BODY, domains=', "nowhere" : 1'))


LOOP = """
m (float[2] x, int64 n) => (float[k] y) <bool c = {1}>
{ e = SequenceEmpty <dtype = 1> ()
  s = Loop (n, c, e) <body = b (int64 i, bool d, seq(float[2]) t) => (bool d2, seq(float[2]) u)
      { d2 = Identity (d)  u = SequenceInsert (t, x) }>
  y = ConcatFromSequence <axis=0> (s) }
"""


@pytest.mark.parametrize("fold_constants", [True, False])
def test_loop_that_carries_a_sequence_returns_a_sequence(fold_constants: bool) -> None:
    """The output of the loop has no type in the file, and gets the one of its body."""
    model = parse(LOOP)
    model.graph.outputs[0].shape = None
    feeds = {"x": np.array([1, 2], np.float32), "n": 2}
    before = answer(model, **feeds)
    normalize(model, NormalizeOptions(fold_constants=fold_constants))
    (loop,) = (node for node in model.graph if node.op_type == "Loop")
    assert isinstance(loop.outputs[0].type, ir.SequenceType)
    assert before == answer(model, **feeds) == [[1, 2, 1, 2]]
