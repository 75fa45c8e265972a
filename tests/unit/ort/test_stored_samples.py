"""Samples that are stored beside a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphs import parse
from winml.modelkit import compare_models, optimize_model
from winml.modelkit.errors import UsageError
from winml.modelkit.ort.graph_inputs import graph_inputs
from winml.modelkit.ort.sessions import Session
from winml.modelkit.ort.stored_samples import StoredSamples, stored_samples

ROWS = "m (float[n, 2] x, int64[1] i) => (float[m, 2] y) { a = Gather (x, i) b = Relu (a) y = Add (b, b) }"
"""It takes indices of existing rows only."""


def save(folder: Path, body: str = ROWS, *samples: tuple[np.ndarray, ...]) -> Path:
    """Write a model with test data of ONNX beside it."""
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(ir.to_proto(parse(body)), path)
    for number, arrays in enumerate(samples):
        place = folder / f"test_data_set_{number}"
        place.mkdir()
        for position, array in enumerate(arrays):
            tensor = onnx.numpy_helper.from_array(array)
            (place / f"input_{position}.pb").write_bytes(tensor.SerializeToString())
    return path


X = np.arange(200, dtype=np.float32).reshape(100, 2)


def test_stored_samples_are_read_in_order_if_they_fit(tmp_path: Path) -> None:
    """An array of another type is no sample of this model, and a damaged file none at all."""
    sets = [(X, np.array([90])), (X, np.array([3])), (X.astype(np.float64), np.array([0]))]
    path = save(tmp_path / "fits", ROWS, *sets)
    inputs = graph_inputs(Session(path))
    samples = stored_samples(path, inputs)
    assert [90, 3] == [int(feeds["i"][0]) for feeds in samples.feeds]
    assert ("test_data_set_0", "test_data_set_1") == samples.names
    assert all(words in samples.unused for words in ("test_data_set_2", "float64[100, 2]"))
    (path.parent / "test_data_set_1" / "input_1.pb").write_bytes(b"\xff")
    damaged = stored_samples(path, inputs)
    assert () == damaged.feeds
    assert damaged.unused
    assert stored_samples(save(tmp_path / "without"), inputs) == StoredSamples()


def test_sample_that_refers_to_another_file_is_not_read(tmp_path: Path) -> None:
    """Its values would come from any file of this machine."""
    path = save(tmp_path / "m", ROWS, (X, np.array([90])))
    tensor = onnx.numpy_helper.from_array(X)
    onnx.external_data_helper.set_external_data(tensor, "secret.bin")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    (path.parent / "test_data_set_0" / "input_0.pb").write_bytes(tensor.SerializeToString())
    assert () == stored_samples(path, graph_inputs(Session(path))).feeds


def test_verbs_compare_on_stored_samples_and_the_users_before_them(tmp_path: Path) -> None:
    """The order is: the user's, those beside the model, generated values."""
    path = save(tmp_path / "m", ROWS, (X, np.array([90])))
    compared = compare_models(path, save(tmp_path / "other"))
    assert ("file", "test_data_set_0") == (compared.samples.source, compared.samples.data)
    result = optimize_model(path, tmp_path / "out.onnx", level="full")
    assert any("test_data_set_0" in note for note in result.notes)
    np.savez(tmp_path / "own.npz", x=X, i=np.array([1]))
    result = optimize_model(path, tmp_path / "out.onnx", level="full", input_data=tmp_path / "own.npz", overwrite=True)
    assert not any("test_data_set_0" in note for note in result.notes)
    assert [1] == [entry.draw for entry in result.verification.comparisons]
    np.savez(tmp_path / "bad.npz", x=X)
    with pytest.raises(UsageError, match="'i'"):
        optimize_model(path, tmp_path / "new.onnx", level="full", input_data=tmp_path / "bad.npz")
    with pytest.raises(UsageError, match="dataset"):
        optimize_model(path, tmp_path / "new.onnx", input_data=tmp_path / "own.npz", dataset="texts.txt")


@pytest.mark.parametrize("arrays", [(X[:, :1], np.array([1])), (X,), (X, np.array([1000]))])
def test_verbs_note_a_stored_sample_that_does_not_fit(tmp_path: Path, arrays: tuple[np.ndarray, ...]) -> None:
    """Of another shape, without an input, or refused by the graph."""
    path = save(tmp_path / "m", ROWS, arrays)
    compared = compare_models(path, save(tmp_path / "other"))
    assert "file" != compared.samples.source
    verified = optimize_model(path, tmp_path / "out.onnx", level="full")
    for notes in (compared.notes, verified.notes):
        assert 1 == sum(note.count("test_data_set_0") for note in notes), notes


@pytest.mark.parametrize("unfit", [(X[:, :1], np.array([1])), (X, np.array([1000]))])
def test_verbs_name_the_stored_samples_that_they_used(tmp_path: Path, unfit: tuple[np.ndarray, ...]) -> None:
    """A sample that does not fit, or that the graph refuses, does not take the others with it."""
    path = save(tmp_path / "m", ROWS, (X, np.array([90])), unfit, (X, np.array([3])))
    compared = compare_models(path, path)
    assert (2, "test_data_set_0 and test_data_set_2") == (compared.samples.count, compared.samples.data)
    verified = optimize_model(path, tmp_path / "out.onnx", level="full")
    for notes in (compared.notes, verified.notes):
        assert 1 == sum(note.count("test_data_set_1") for note in notes), notes
    assert any("test_data_set_0 and test_data_set_2" in note for note in verified.notes)


def test_samples_without_a_signal_verify_nothing(tmp_path: Path) -> None:
    """A generated sample that follows the only stored one does."""
    body = "m (float[n, 2] x, float[1] s) => (float[n, 2] y) { y = Mul (x, s) }"
    silent = [(X, np.array([number], np.float32)) for number in (0, np.nan)]
    stored = optimize_model(save(tmp_path / "m", body, *silent), tmp_path / "out.onnx", level="full")
    assert not stored.verification.has_signal
    mixed = optimize_model(save(tmp_path / "n", body, silent[1]), tmp_path / "other.onnx", level="full")
    assert mixed.verification.has_signal
    assert any("only NaN" in note and "generated" in note for note in mixed.notes)


def test_outputs_that_repeat_one_row_are_no_signal(tmp_path: Path) -> None:
    """Only the number of rows depends on the input."""
    body = "m (float[n, 2] x) => (float[n, 2] y) <float z = {0}, float[2] w = {1, 2}> { a = Mul (x, z) y = Add (a, w) }"
    result = optimize_model(save(tmp_path / "m", body), tmp_path / "out.onnx", level="full")
    assert not result.verification.has_signal
