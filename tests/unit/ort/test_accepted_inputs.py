"""Inputs that a graph accepts are found by trial."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from winml.modelkit.errors import NoInputsError, StageError, UsageError
from winml.modelkit.onnx.compared_values import compared_values
from winml.modelkit.ort.accepted_inputs import AcceptedInputs, accepted_inputs
from winml.modelkit.ort.custom_operators import LIBRARIES_VARIABLE, add_custom_library
from winml.modelkit.ort.graph_sessions import open_session

RATES = """g (float[1, n] x, int64 rate) => (float[1, n] y) <int64 high = {16000}, float two = {2}> {
    is_high = Equal (rate, high)
    y = If (is_high) <then_branch = then () => (float[1, n] a) { a = Mul (x, two) },
                      else_branch = otherwise () => (float[1, n] b) { b = Identity (x) }>
}"""
"""For: silero-vad."""
TABLE = """g (int64[1, n] ids) => (float[1, n, 2] y) <float[1, 2] table = {1, 2}> { y = Gather (table, ids) }"""
MASKED = """g (bool[1, n] pad) => (float[1, n] y) <float low = {-inf}, float zero = {0}> {
    scores = Where (pad, low, zero)
    y = Softmax <axis = 1> (scores)
}"""
PADDED = """g (float[1, 1, h, w] x) => (float[1, 1, h, w] y)
    <float[4] half = {1, 1, 0.03125, 0.03125}, float[4] whole = {1, 1, 32, 32}> {
    small = Resize <mode = "nearest"> (x, , half)
    large = Resize <mode = "nearest"> (small, , whole)
    y = Add (x, large)
}"""
"""Runs with multiples of 32. For: PP-OCR."""
TRACED = """g (float[b, t, 4] x) => (float[b, 28] y) <int64[2] shape = {-1, 28}> { y = Reshape (x, shape) }"""
"""Runs with multiples of 7 tokens. For: ``nn.TransformerEncoder`` exported by TorchScript."""


def accepted(body: str, folder: Path, requested: dict[str, int] | None = None) -> list[AcceptedInputs]:
    """Save a graph, and return what it accepts."""
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 17]> {body}'), folder / "m.onnx")
    return list(accepted_inputs(open_session(folder / "m.onnx", as_written=True), 0, requested or {}))


def test_integer_takes_the_values_that_the_graph_compares_it_with(tmp_path: Path) -> None:
    """The branch of the rate is compared, and the note names the value."""
    found = accepted(RATES, tmp_path)
    assert {"rate": (16000,)} == compared_values(tmp_path / "m.onnx")
    assert {16000} == {int(entry.feeds["rate"]) for entry in found}
    assert "16000" in found[0].note


@pytest.mark.parametrize("body", [TABLE, PADDED, TRACED], ids=["indices", "multiples", "traced size"])
def test_refused_values_and_sizes_are_replaced(body: str, tmp_path: Path) -> None:
    """The index is 0, the edges are multiples of 32, and the size of the refusal is used."""
    assert accepted(body, tmp_path)


def test_mask_that_hides_everything_is_replaced(tmp_path: Path) -> None:
    """A softmax over nothing is NaN: the mask of one position hides nothing."""
    found = accepted(MASKED, tmp_path, {"n": 1})
    assert all(np.isfinite(entry.outputs["y"]).all() for entry in found)


def test_nothing_that_is_accepted_is_an_error(tmp_path: Path) -> None:
    """No values are found for a graph that refuses all; sizes of the user are named instead."""
    never = "g (float[n] x) => (float[m] y) <int64[1] shape = {77777}> { y = Reshape (x, shape) }"
    with pytest.raises(NoInputsError):
        accepted(never, tmp_path)
    with pytest.raises(StageError) as caught:
        accepted(never, tmp_path, {"n": 3})
    assert not isinstance(caught.value, NoInputsError)


def test_library_of_custom_operators_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file is a usage error; a file that is no library is the reason of a session."""
    with pytest.raises(UsageError, match="no such file"):
        add_custom_library(str(tmp_path / "none.so"), "")
    (tmp_path / "ops.so").write_bytes(b"text")
    monkeypatch.setenv(LIBRARIES_VARIABLE, add_custom_library(str(tmp_path / "ops.so"), ""))
    with pytest.raises(StageError, match=r"ops\.so"):
        accepted(TABLE, tmp_path)
