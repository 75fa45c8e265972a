"""Normalization of an exported graph, with unchanged tags and outputs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphs import answer, operators, parse, tags
from winml.modelkit.metadata_keys import NORMALIZED_KEY
from winml.modelkit.normalize.pipeline import NormalizeOptions, normalize
from winml.modelkit.onnx.files.writing import write_model
from winml.modelkit.onnx.fingerprint import is_normalized, stamp

CAPTURED = """
m (float[2,3] x, bool c) => (float[2,4] y, float[2,4] z, float[2,3] u, float[2] v)
<float[4,3] w = {0,0,0,0,0,0,0,0,0,0,0,0}>
{
  s = Shape (x)  i = Constant <value_int = 0> ()  n = Gather (s, i)  a = Constant <value_ints = [0]> ()
  n1 = Unsqueeze (n, a)  m1 = Constant <value_ints = [4]> ()  t = Concat <axis=0> (n1, m1)
  wt = Transpose <perm=[1,0]> (w)  h = MatMul (x, wt)  r = Reshape (h, t)  d = Identity (r)  dead = Neg (d)
  g = If (c) <then_branch = tb () => (p) { two = Constant <value_float = 2.0> ()  p = Mul (d, two) },
              else_branch = eb () => (q) { q = Relu (d) }>
  e = Constant <value_ints = [2, 4]> ()  y = Reshape (g, e)  z = Identity (y)  u = Identity (x)
  ax = Constant <value_ints = [1]> ()  v = ReduceSum <keepdims=0> (y, ax)
}
"""
"""A graph as torch's exporter writes it: shape computations, a transposed weight, identities, a dead node, a branch."""


def _feeds(chosen: bool) -> dict[str, Any]:
    return {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "c": chosen}


def test_normalize_makes_the_plain_form() -> None:
    """Shapes are computed, the weight is transposed, and identities and dead nodes are removed if names allow it."""
    model = parse(CAPTURED)
    before = [answer(model, **_feeds(chosen)) for chosen in (True, False)]
    result = normalize(model)
    assert (True, ()) == (result.changed, result.notes)
    assert ["MatMul", "If", "Mul", "Relu", "Identity", "Identity", "ReduceSum"] == operators(model)
    assert ["w.transposed"] == [name for name in model.graph.initializers if name.startswith("w")]
    for expected, chosen in zip(before, (True, False), strict=True):
        actual = answer(model, **_feeds(chosen))
        assert all(np.allclose(left, right, rtol=1e-6) for left, right in zip(expected, actual, strict=True))


def test_normalize_keeps_inputs_outputs_and_every_tag() -> None:
    """Names and order of the caller's values stay, and every node that is left has a tag."""
    model = parse(CAPTURED)
    result = normalize(model)
    assert ["x", "c"] == [value.name for value in model.graph.inputs]
    assert ["y", "z", "u", "v"] == [value.name for value in model.graph.outputs]
    assert all(tags(model))
    assert result.coverage.is_complete
    assert 7 == result.coverage.nodes


def test_normalize_gives_every_value_a_shape_and_every_node_a_name(tmp_path: Path) -> None:
    """The file passes onnx's full check."""
    model = parse(CAPTURED)
    normalize(model)
    nodes = list(model.graph.all_nodes())
    assert all(value.shape is not None and value.dtype is not None for node in nodes for value in node.outputs)
    assert len(nodes) == len({node.name for node in nodes})
    write_model(model, tmp_path / "model.onnx")
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)


@pytest.mark.parametrize("fold_constants", [True, False])
def test_normalize_twice_has_no_further_effect(tmp_path: Path, fold_constants: bool) -> None:
    """A second normalization changes nothing, in memory or after a save."""
    options = NormalizeOptions(fold_constants=fold_constants)
    model = parse(CAPTURED)
    assert normalize(model, options).changed
    assert not normalize(model, options).changed
    write_model(model, tmp_path / "model.onnx")
    assert not normalize(ir.load(tmp_path / "model.onnx"), options).changed


def test_normalize_without_folding_keeps_constant_nodes() -> None:
    """The nodes that compute a shape stay, constants are initializers all the same."""
    model = parse(CAPTURED)
    normalize(model, NormalizeOptions(fold_constants=False))
    assert {"Shape", "Gather", "Unsqueeze", "Concat", "Transpose"} <= set(operators(model))
    assert "Constant" not in operators(model)


def test_failing_pass_is_left_out_and_noted() -> None:
    """After an error of a library, the other passes run on the unchanged graph; the note names the pass."""
    model = parse("m (float[2] x) => (float[2] y) <int64[1] a = {0}> { u = Identity (x)  y = Relu (u) }")
    # onnx infers no shapes without the version of the operators.
    version = model.graph.opset_imports.pop("")
    result = normalize(model)
    assert result.changed
    assert any(re.search(r"without InferredShapesPass: step \d+", note) for note in result.notes)
    assert ["Relu"] == operators(model)
    assert not model.graph.initializers
    model.graph.opset_imports[""] = version
    assert not any("without" in note for note in normalize(model).notes)


def test_stamp_holds_until_the_structure_changes(tmp_path: Path) -> None:
    """A stamped model is recognized after reading, a changed one is not."""
    model = parse(CAPTURED)
    assert not is_normalized(model)
    normalize(model)
    stamp(model)
    write_model(model, tmp_path / "model.onnx")
    loaded = ir.load(tmp_path / "model.onnx")
    assert is_normalized(loaded)
    next(node for node in loaded.graph if node.op_type == "ReduceSum").op_type = "ReduceMax"
    assert not is_normalized(loaded)
    loaded.metadata_props[NORMALIZED_KEY] = "not JSON"
    assert not is_normalized(loaded)


@pytest.mark.parametrize("text", ["{", "[" * 200_000, "9" * 10_000])
def test_unreadable_stamp_is_ignored(text: str) -> None:
    """A graph with a damaged stamp is normalized."""
    model = parse(CAPTURED)
    model.metadata_props[NORMALIZED_KEY] = text
    assert not is_normalized(model)
