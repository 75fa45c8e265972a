"""Removal of data files that only a replaced model referenced."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

import graphs
from winml.modelkit.onnx.files.output_files import OutputFiles
from winml.modelkit.onnx.files.writing import write_model

WEIGHTS = ", ".join(["1"] * 100)


def save(folder: Path, name: str, data: str | None = None, seed: int = 1) -> set[str]:
    """Write a model with its weights outside: as we do, or under a name; returns the names of its files."""
    body = f"m (float[100] x) => (float[100] y) <float[100] w = {{{WEIGHTS}}}> {{ y = Add (x, w) }}"
    model = graphs.parse(body)
    model.graph.initializers["w"].const_value = ir.tensor([float(seed)] * 100, name="w")
    if data is None:
        return {path.name for path in write_model(model, folder / name, external=True)}
    ir.save(model, folder / name, external_data=data, size_threshold_bytes=0)
    return {name, data}


def replace(target: Path, seed: int = 2) -> set[str]:
    """Replace a file by a model with other weights, as every verb does; returns the names of the new files."""
    with OutputFiles() as files:
        place = files.reserve(target)
        written = save(place.parent, target.name, seed=seed)
        files.commit()
    return written


def names(folder: Path) -> set[str]:
    """Everything in a folder."""
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("data", [None, "model.onnx.data", "model.onnx_data"])
def test_data_of_a_replaced_model_is_removed(tmp_path: Path, data: str | None) -> None:
    """Data files of an earlier version or another tool, named after the model alone, are removed too."""
    save(tmp_path, "model.onnx", data)
    assert replace(tmp_path / "model.onnx") == names(tmp_path)
    onnx.checker.check_model(str(tmp_path / "model.onnx"))


def test_equal_weights_stay_in_their_file(tmp_path: Path) -> None:
    """Equal content has the same file name."""
    before = save(tmp_path, "model.onnx")
    assert before == replace(tmp_path / "model.onnx", seed=1) == names(tmp_path)


def test_data_that_another_model_names_stays(tmp_path: Path) -> None:
    """Two models of a folder may share data."""
    before = save(tmp_path, "model.onnx")
    shutil.copyfile(tmp_path / "model.onnx", tmp_path / "other.onnx")
    written = replace(tmp_path / "model.onnx")
    assert before | written | {"other.onnx"} == names(tmp_path)


def test_data_stays_beside_an_unreadable_model(tmp_path: Path) -> None:
    """The unreadable model may reference the data."""
    before = save(tmp_path, "model.onnx")
    (tmp_path / "other.onnx").write_bytes(b"damaged")
    written = replace(tmp_path / "model.onnx")
    assert before | written | {"other.onnx"} == names(tmp_path)


def test_data_with_an_unrelated_name_stays(tmp_path: Path) -> None:
    """The file may be the source checkpoint of the export."""
    save(tmp_path, "model.onnx", "model.safetensors")
    assert replace(tmp_path / "model.onnx") | {"model.safetensors"} == names(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no model", bytes(range(256)) * 40])
def test_data_that_no_model_names_stays(tmp_path: Path, content: bytes) -> None:
    """A replaced file need not be a model, in spite of its name."""
    (tmp_path / "model.onnx").write_bytes(content)
    (tmp_path / "model.onnx.data").write_text("mine")
    assert replace(tmp_path / "model.onnx") | {"model.onnx.data"} == names(tmp_path)


def test_protected_data_stays(tmp_path: Path) -> None:
    """A command does not remove the files that it reads."""
    before = save(tmp_path, "model.onnx", "model.onnx.data")
    with OutputFiles() as files:
        save(files.reserve(tmp_path / "model.onnx").parent, "model.onnx")
        files.keep([tmp_path / "model.onnx.data"])
        files.commit()
    assert before < names(tmp_path)
