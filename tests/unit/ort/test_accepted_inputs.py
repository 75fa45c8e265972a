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
WRONG_SHAPE = "two = {2}, int64[1] wrong = {7777}"
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
    assert [16000, 0] == [int(entry.feeds["rate"]) for entry in found[:2]]
    assert "16000" in found[0].note


def test_other_branch_is_left_out_if_the_graph_refuses_its_values(tmp_path: Path) -> None:
    """A value that the graph refuses is replaced by the constant, so that sizes still vary."""
    refusing = RATES.replace("b = Identity (x)", "b = Reshape (x, wrong)").replace("two = {2}", WRONG_SHAPE)
    found = accepted(refusing, tmp_path)
    assert [16000, 16000] == [int(entry.feeds["rate"]) for entry in found[:2]]
    assert found[0].sizes != found[1].sizes


def test_constant_that_is_no_integer_is_no_value(tmp_path: Path) -> None:
    """Infinity and fractions are left out."""
    compared = "g (int64 n) => (bool[3] y) <float[3] c = {inf, 0.5, 3}> { f = Cast <to = 1> (n)\n y = Equal (f, c) }"
    accepted(compared, tmp_path)
    assert {"n": (3,)} == compared_values(tmp_path / "m.onnx")


@pytest.mark.parametrize("body", [TABLE, PADDED, TRACED], ids=["indices", "multiples", "traced size"])
def test_refused_values_and_sizes_are_replaced(body: str, tmp_path: Path) -> None:
    """The index is 0, the edges are multiples of 32, and the size of the refusal is used."""
    assert accepted(body, tmp_path)


def test_size_of_a_refusal_is_varied(tmp_path: Path) -> None:
    """Multiples of 28 are accepted: a result that froze 28 would be found."""
    first, second = accepted(TRACED, tmp_path)[:2]
    assert all(2 * first.sizes[name] == size for name, size in second.sizes.items())


def test_large_size_is_varied(tmp_path: Path) -> None:
    """Edges of images have two sizes, since a result may have frozen one."""
    image = "g (float[1, 3, height, width] x) => (float[1, 3, height, width] y) { y = Relu (x) }"
    assert [224, 256] == [entry.sizes["height"] for entry in accepted(image, tmp_path)[:2]]


def test_guessed_sizes_fit_into_memory(tmp_path: Path) -> None:
    """Six dimensions of 64 would take 512 GiB."""
    never = "g (float[a, b, c, d, e, f] x) => (float[m] y) <int64[1] shape = {77777}> { y = Reshape (x, shape) }"
    with pytest.raises(NoInputsError):
        accepted(never, tmp_path)


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


def test_sizes_that_a_graph_was_not_made_for_are_not_accepted(tmp_path: Path) -> None:
    """An input holds the sizes of an output whose shape the file declares."""
    body = "g (float[2, 3] x, int64[2] s) => (float[3, 2] y) { y = Reshape (x, s) }"
    with pytest.raises(NoInputsError, match=r"declares \[3, 2\]|cannot be reshaped"):
        accepted(body, tmp_path)


def test_setting_outside_of_its_range_is_replaced(tmp_path: Path) -> None:
    """A ratio is a float from 0 to 1."""
    body = "g (float[2, 3] x, float r) => (float[2, 3] y) { y = Dropout (x, r) }"
    assert all(0 <= entry.feeds["r"] < 1 for entry in accepted(body, tmp_path))
