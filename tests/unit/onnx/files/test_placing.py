"""Copying of a model under a second name."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphs import parse, run_onnx
from winml.modelkit.errors import InputError, ModelPathError
from winml.modelkit.file_names import is_data_of
from winml.modelkit.onnx.files.placing import external_files, link_or_copy, place_copy
from winml.modelkit.onnx.files.writing import write_model

# Large enough for onnx_ir to keep outside.
BODY = f"m (float[2, 16] x) => (float[2, 16] y) <float[16, 16] w = {{{', '.join(['1'] * 256)}}}> {{ y = MatMul(x, w) }}"
X = np.arange(32, dtype=np.float32).reshape(2, 16)


def written(folder: Path, *, external: bool, name: str = "model.onnx") -> Path:
    """Write the model and return its path."""
    write_model(parse(BODY), folder / name, external=external)
    return folder / name


def test_place_copy_that_may_link_is_another_name(tmp_path: Path) -> None:
    """A linked model with internal weights is not written twice."""
    source = written(tmp_path, external=False)
    assert (tmp_path / "other.onnx",) == place_copy(source, tmp_path / "other.onnx", may_link=True)
    assert (tmp_path / "other.onnx").samefile(source)


def test_place_copy_is_a_file_of_its_own(tmp_path: Path) -> None:
    """Changes of the copy do not affect the source."""
    source = written(tmp_path, external=False)
    place_copy(source, tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").samefile(source)
    assert (tmp_path / "other.onnx").read_bytes() == source.read_bytes()


def test_place_copy_with_external_data_is_self_contained(tmp_path: Path) -> None:
    """The data file has the new name only, as onnx requires; the copy works without the source."""
    source = written(tmp_path, external=True)
    expected = run_onnx(source, {"x": X})["y"]
    (tmp_path / "other").mkdir()
    target = tmp_path / "other" / "placed.onnx"
    placed = place_copy(source, target)
    assert [target] == [path for path in placed if not is_data_of(target.name, path.name)]
    assert external_files(target) == placed[1:]
    for path in (source, *external_files(source)):
        path.unlink()
    onnx.checker.check_model(str(target))
    assert np.array_equal(expected, run_onnx(target, {"x": X})["y"])


def test_place_copy_with_shared_data_names_the_data_of_the_source(tmp_path: Path) -> None:
    """The copy in the same folder shares the data file, and onnx accepts both models."""
    source = written(tmp_path, external=True)
    target = tmp_path / "other.onnx"
    assert (target,) == place_copy(source, target, share_data=True)
    assert external_files(source) == external_files(target)
    onnx.checker.check_model(str(target))


def test_place_copy_keeps_several_data_files_separate(tmp_path: Path) -> None:
    """Each weight stays in a data file of its own."""
    body = "m (float[4] x) => (float[4] y) <float[4] w0 = {1, 2, 3, 4}, float[4] w1 = {5, 6, 7, 8}> "
    model = ir.to_proto(parse(body + "{ z = Add(x, w0) y = Mul(z, w1) }"))
    for tensor in model.graph.initializer:
        (tmp_path / f"{tensor.name}.bin").write_bytes(onnx.numpy_helper.to_array(tensor).tobytes())
        onnx.external_data_helper.set_external_data(tensor, f"{tensor.name}.bin")
        tensor.ClearField("raw_data")
        tensor.ClearField("float_data")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "new").mkdir()
    placed = place_copy(tmp_path / "model.onnx", tmp_path / "new" / "b.onnx")
    assert 3 == len({*placed})
    assert all(is_data_of("b.onnx", path.name) for path in placed[1:])
    feed = {"x": np.ones(4, dtype=np.float32)}
    assert np.array_equal(run_onnx(tmp_path / "model.onnx", feed)["y"], run_onnx(placed[0], feed)["y"])


def test_missing_external_files_are_named(tmp_path: Path) -> None:
    """The message has the expected path of the missing data."""
    source = written(tmp_path, external=True)
    (data,) = external_files(source)
    data.unlink()
    with pytest.raises(InputError, match=rf"its data file .*{re.escape(data.name)} is missing"):
        external_files(source)


@pytest.mark.parametrize("location", ["../weights.bin", "C:\\weights.bin"])
def test_external_files_outside_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    """A model cannot make the tool read files elsewhere."""
    model = ir.to_proto(parse(BODY))
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], location)
    model.graph.initializer[0].ClearField("raw_data")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match="its folder"):
        external_files(tmp_path / "model.onnx")


def test_external_files_of_a_missing_model_are_a_wrong_path(tmp_path: Path) -> None:
    """A missing model is reported as missing."""
    with pytest.raises(ModelPathError, match="no such"):
        external_files(tmp_path / "missing.onnx")


def test_link_or_copy_never_replaces(tmp_path: Path) -> None:
    """An existing name is an error and is not overwritten."""
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    with pytest.raises(FileExistsError):
        link_or_copy(tmp_path / "a", tmp_path / "b")
    assert "b" == (tmp_path / "b").read_text()
