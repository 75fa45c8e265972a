"""Boundary values of the modules of a file: numbers as in PyTorch, not their quantized values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from graphs import parse
from winml.modelkit.compare.by_module.module_comparison import unchanged_modules
from winml.modelkit.compare.by_module.onnx_side import OnnxSide

BODY = """m (int64[4] ids) => (float[4, 2] y)
<uint8[3, 2] t = {0, 1, 2, 3, 4, 5}, float s = {0.1}, uint8 z = {3}>
{
    rows = Gather (t, ids)
    floats = DequantizeLinear (rows, s, z)
    n = Neg (floats)
    quantized = QuantizeLinear (n, s, z)
    again = DequantizeLinear (quantized, s, z)
    y = Abs (again)
}"""


def test_boundaries_are_numbers(tmp_path: Path) -> None:
    """A dequantized row of a table is a boundary value; the input of a QuantizeLinear is one, too."""
    ir.save(parse(BODY), tmp_path / "m.onnx")
    side = OnnxSide(tmp_path / "m.onnx", by_module=True)
    assert (("floats",), ("n",)) == (side.boundaries["/M/Neg", 1].inputs, side.boundaries["/M/Neg", 1].outputs)
    assert ("n",) == side.boundaries["/M/Abs", 1].inputs


def test_modules_of_another_tool_have_boundaries(tmp_path: Path) -> None:
    """Without tags, the names of nodes tell the modules, also in the branches of a node."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        m (bool c, float[2] x) => (float[2] y) {
            n = Neg (x)
            a = Abs (n)
            b = If (c) <
                then_branch = t () => (float[2] p) { p = Exp (a) },
                else_branch = e () => (float[2] q) { q = Cos (a) }
            >
            y = Tanh (b)
        }""")
    branches = [node for attribute in model.graph.node[2].attribute for node in attribute.g.node]
    names = ("/first/Neg", "/first/Abs", "/second/If", "/Tanh", "/second/Exp", "/second/Cos")
    for node, name in zip([*model.graph.node, *branches], names, strict=True):
        node.name = name
    onnx.save(model, tmp_path / "m.onnx")
    side = OnnxSide(tmp_path / "m.onnx", by_module=True)
    assert not side.is_tagged
    boundaries = {tag: (boundary.inputs, boundary.outputs) for (tag, _), boundary in side.boundaries.items()}
    assert {"/m": ((), ("y",)), "/m/first": ((), ("a",)), "/m/second": (("a",), ("b",))} == boundaries


BRANCHES = """<ir_version: 8, opset_import: ["" : 17]>
m (bool c, float[4096] x) => (float[4096] y) {
    k = Constant ()
    a = If (c) <
        then_branch = t () => (float[4096] p) <float[1] w = {1}> { p = Add (x, w) },
        else_branch = e () => (float[4096] q) { q = Identity (x) }
    >
    y = Mul (a, k)
}"""
ALL = {"/m/first", "/m/second", "/m/third"}


@pytest.mark.parametrize(
    ("weight", "constant", "expected"), [(2, 1, {"/m/first"}), (1, 2, {"/m/second", "/m/third"}), (1, 1, ALL)]
)
def test_modules_with_other_weights_are_changed(
    weight: float, constant: float, expected: set[str], tmp_path: Path
) -> None:
    """A weight of a branch changes the modules of the branch and of its If, a large constant the one that holds it."""
    sides = []
    for name, values in (("before", (1, 1)), ("after", (weight, constant))):
        model = onnx.parser.parse_model(BRANCHES)
        nodes = {node.output[0]: node for node in model.graph.node}
        (inner,) = nodes["a"].attribute[0].g.node
        for node, label in ((nodes["a"], "/second/If"), (inner, "/third/Add"), (nodes["y"], "/first/Mul")):
            node.name = label
        nodes["a"].attribute[0].g.initializer[0].float_data[:] = [values[0]]
        nodes["k"].name = "/first/Constant"
        held = onnx.numpy_helper.from_array(np.full(4096, values[1], np.float32))
        nodes["k"].attribute.append(onnx.helper.make_attribute("value", held))
        onnx.save(model, tmp_path / f"{name}.onnx")
        sides.append(OnnxSide(tmp_path / f"{name}.onnx", by_module=True))
    assert expected <= unchanged_modules(*sides)
    assert not (ALL - expected) & unchanged_modules(*sides)
