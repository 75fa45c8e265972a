"""Boundary values of the modules of a file: numbers as in PyTorch, not their quantized values."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import onnx_ir as ir

from graphs import parse
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
            [/first/Neg] n = Neg (x)
            [/first/Abs] a = Abs (n)
            [/second/If] b = If (c) <
                then_branch = t () => (float[2] p) { [/second/Exp] p = Exp (a) },
                else_branch = e () => (float[2] q) { [/second/Cos] q = Cos (a) }
            >
            [/Tanh] y = Tanh (b)
        }""")
    onnx.save(model, tmp_path / "m.onnx")
    side = OnnxSide(tmp_path / "m.onnx", by_module=True)
    assert not side.is_tagged
    boundaries = {tag: (boundary.inputs, boundary.outputs) for (tag, _), boundary in side.boundaries.items()}
    assert {"/m": ((), ("y",)), "/m/first": ((), ("a",)), "/m/second": (("a",), ("b",))} == boundaries
