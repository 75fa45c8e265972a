"""Placing of weights in data files of limited size, under the names that readers expect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from winml.modelkit.errors import InputError
from winml.modelkit.onnx.files.initializer_bytes import StoredBytes
from winml.modelkit.onnx.files.writing import place_numbered

SIZES = {"a": 100, "b": 300, "c": 50, "d": 40}
"""Values of each weight, four bytes each."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with external weights, the last two of which share their data."""
    weights = [numpy_helper.from_array(np.full(size, size, np.float32), name) for name, size in SIZES.items()]
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in (*SIZES, "tied")]
    outputs = [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None) for name in (*SIZES, "tied")]
    path = tmp_path / "source" / "model.onnx"
    path.parent.mkdir()
    proto = helper.make_model(helper.make_graph(nodes, "weights", [], outputs, weights))
    onnx.save(proto, path, save_as_external_data=True, location="weights", size_threshold=0)
    proto = onnx.load(path, load_external_data=False)
    tied = proto.graph.initializer.add()
    tied.CopyFrom(proto.graph.initializer[0])
    tied.name = "tied"
    for entry in [entry for entry in proto.graph.initializer[3].external_data if entry.key == "length"]:
        proto.graph.initializer[3].external_data.remove(entry)  # optional in the format
    onnx.save(proto, path)
    return path


@pytest.mark.parametrize(
    ("limit", "pieces"),
    [(10_000, ["model.onnx_data"]), (800, ["model.onnx_data", "model.onnx_data_1", "model.onnx_data_2"])],
)
def test_weights_are_the_same_in_pieces(model: Path, tmp_path: Path, limit: int, pieces: list[str]) -> None:
    """No tensor is split: a tensor larger than a piece has its own file; a tied tensor is written once."""
    made = place_numbered(model, tmp_path / "model.onnx", piece_bytes=limit)
    assert ["model.onnx", *pieces] == [path.name for path in made]
    loaded = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(made[0]).graph.initializer}
    assert {**SIZES, "tied": 100} == {name: values.size for name, values in loaded.items()}
    assert all((values == values.size).all() for values in loaded.values())
    assert model.with_name("weights").stat().st_size == sum(path.stat().st_size for path in made[1:])


def test_model_with_its_weights_inside_is_linked(tmp_path: Path) -> None:
    """A model without data files has no file to number."""
    graph = helper.make_graph([], "empty", [], [])
    onnx.save(helper.make_model(graph), tmp_path / "a.onnx")
    assert (tmp_path / "b.onnx",) == place_numbered(tmp_path / "a.onnx", tmp_path / "b.onnx", may_link=True)
    assert (tmp_path / "a.onnx").samefile(tmp_path / "b.onnx")
    assert (tmp_path / "c.onnx",) == place_numbered(tmp_path / "a.onnx", tmp_path / "c.onnx")
    assert not (tmp_path / "a.onnx").samefile(tmp_path / "c.onnx")


def test_truncated_data_is_reported(tmp_path: Path) -> None:
    """A file may be incomplete because it is still being written."""
    (tmp_path / "weights").write_bytes(b"123")
    with pytest.raises(InputError, match="cut off"):
        list(StoredBytes(tmp_path / "weights", 0, 5).read())
