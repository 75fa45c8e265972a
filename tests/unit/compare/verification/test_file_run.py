"""Runs of a file in pieces, with the outputs of the whole file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphs import parse
from weighted_graphs import weight
from winml.modelkit.compare.verification.file_run import FilePieces
from winml.modelkit.onnx.files.graph_reading import load_by_reference
from winml.modelkit.onnx.files.writing import write_model
from winml.modelkit.ort.graph_sessions import open_session
from winml.modelkit.ort.sessions import Session

_WEIGHT_BYTES = 64 * 64 * 4
_WEIGHTS = ", ".join(weight(name, 64, 64) for name in ("w_a", "w_b", "w_c"))
# Three products, the input of the first of which is read again by the last; a shape is computed on the way.
_CHAIN = f"""
    m (float[rows, 64] x) => (float[rows, 64] y, int64[2] size) <{_WEIGHTS}> {{
        one = MatMul (x, w_a)
        size = Shape (one)
        two = MatMul (one, w_b)
        sum = Add (two, x)
        three = MatMul (sum, w_c)
        y = Reshape (three, size)
    }}
"""


def _written(folder: Path, text: str) -> Path:
    path = folder / "model.onnx"
    write_model(parse(text), path, external=True)
    return path


def _narrowed(path: Path, dtype: ir.DataType) -> Path:
    """Write a copy of a float32 file in a 16-bit dtype."""
    model = load_by_reference(path)
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        value.const_value = ir.tensor(value.const_value.numpy().astype(dtype.numpy()), name=value.name)
        value.dtype = dtype
    for value in (*model.graph.inputs, *(output for node in model.graph for output in node.outputs)):
        if value.dtype != ir.DataType.INT64:
            value.dtype = dtype
    write_model(model, path.with_name("narrow.onnx"), external=True)
    return path.with_name("narrow.onnx")


def test_pieces_equal_the_whole_at_every_size(tmp_path: Path) -> None:
    """Values that a later piece reads, and outputs, are kept; each piece runs all draws before the next piece."""
    path = _written(tmp_path, _CHAIN)
    generator = np.random.default_rng(1)
    draws = [{"x": generator.normal(size=(rows, 64)).astype(np.float32)} for rows in (1, 5)]
    whole = Session(path)
    for piece_bytes, count in ((_WEIGHT_BYTES, 3), (2 * _WEIGHT_BYTES, 2), (1, 3)):
        pieces = FilePieces(path, piece_bytes)
        assert count == pieces.count
        for answer, feeds in zip(pieces.run(draws), draws, strict=True):
            expected = whole.run(feeds)
            assert list(expected) == list(answer)
            np.testing.assert_array_equal(expected["size"], answer["size"])
            # Sums of 64 products in another order.
            np.testing.assert_allclose(expected["y"], answer["y"], rtol=1e-5, atol=1e-3)


def test_file_of_few_weights_or_that_cannot_be_cut_stays_whole(tmp_path: Path) -> None:
    """A single piece saves nothing, and random values cannot be drawn twice."""
    assert 0 == FilePieces(_written(tmp_path, _CHAIN), 3 * _WEIGHT_BYTES).count
    random = _CHAIN.replace("sum = Add (two, x)", "noise = RandomNormalLike (two) sum = Add (two, noise)")
    assert 0 == FilePieces(_written(tmp_path, random), _WEIGHT_BYTES).count


def test_cast_weights_are_cut_with_their_reader(tmp_path: Path) -> None:
    """A bfloat16 file runs in float32, with all of its casts at the start of the graph."""
    path = _written(tmp_path, _CHAIN)
    pieces = FilePieces(_narrowed(path, ir.DataType.BFLOAT16), _WEIGHT_BYTES // 2)
    assert 3 == pieces.count
    feeds = {"x": np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)}
    (answer,) = pieces.run([feeds])
    # bfloat16 has 8 bits: three products of weights that are off by 1/512 each.
    np.testing.assert_allclose(Session(path).run(feeds)["y"], answer["y"], atol=0.02 * np.abs(answer["y"]).max())


def test_float16_values_overflow_in_pieces_as_in_the_whole(tmp_path: Path) -> None:
    """A large file in float16 is judged as a small one: inside a piece, the CPU provider computes in float32."""
    scaled = _CHAIN.replace("one = MatMul (x, w_a)", "large = MatMul (x, w_a) one = Mul (large, tiny)")
    path = _written(tmp_path, scaled.replace("<", "<float tiny = {0.001}, "))
    narrow = _narrowed(path, ir.DataType.FLOAT16)
    feeds = {"x": np.full((5, 64), 3e4, np.float16)}
    whole = open_session(narrow, as_written=False)
    pieces = FilePieces(narrow, _WEIGHT_BYTES)
    (answer,) = pieces.run([feeds])
    np.testing.assert_array_equal(np.isfinite(whole.run(feeds)["y"]), np.isfinite(answer["y"]))
    assert not np.isfinite(answer["y"]).all()
