"""Copying of a model under another name, with its weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from winml.modelkit.file_names import is_data_of
from winml.modelkit.onnx.files.writing import place_self_contained
from winml.modelkit.ort.sessions import Session


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with external weights: initializers, one tied and without a length, and a node's attribute."""
    weights = [
        numpy_helper.from_array(np.full(size, size, np.float32), name) for name, size in {"a": 40, "b": 3}.items()
    ]
    constant = numpy_helper.from_array(np.full(7, 7, np.float32), "value")
    names = ("a", "tied", "b", "c")
    graph = helper.make_graph(
        [
            helper.make_node("Constant", [], ["c"], value=constant),
            *(helper.make_node("Identity", [name], [f"{name}_out"]) for name in names),
        ],
        "weights",
        [],
        [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, [None]) for name in names],
        weights,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "stage" / "stage.onnx"
    path.parent.mkdir()
    onnx.save(proto, path, save_as_external_data=True, location="weights", size_threshold=0, convert_attribute=True)
    proto = onnx.load(path, load_external_data=False)
    tied = proto.graph.initializer.add()
    tied.CopyFrom(proto.graph.initializer[0])
    tied.name = "tied"
    for entry in [entry for entry in tied.external_data if entry.key == "length"]:
        tied.external_data.remove(entry)  # optional in the format
    onnx.save(proto, path)
    return path


def answers(path: Path) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in Session(path).run({}).items()}


EXPECTED = {"a_out": [40.0] * 40, "tied_out": [40.0] * 40, "b_out": [3.0] * 3, "c_out": [7.0] * 7}


def test_weights_are_embedded(model: Path, tmp_path: Path) -> None:
    """The file works alone, in a folder of its own."""
    target = tmp_path / "alone" / "model.onnx"
    target.parent.mkdir()
    assert (target,) == place_self_contained(model, target)
    assert EXPECTED == answers(target)
    onnx.checker.check_model(str(target))


@pytest.mark.parametrize("limit", [100, 400])
def test_weights_stay_outside_above_the_size_limit(model: Path, tmp_path: Path, limit: int) -> None:
    """The limit is below the size of the weights or of the file; data files are named after the new model."""
    target = tmp_path / "alone" / "model.onnx"
    target.parent.mkdir()
    made = place_self_contained(model, target, inline_limit_bytes=limit)
    assert target == made[0]
    assert [True] == [is_data_of("model.onnx", path.name) for path in made[1:]]
    assert {*made} == {*target.parent.iterdir()}
    assert EXPECTED == answers(target)


def test_model_with_its_weights_inside_is_linked(model: Path, tmp_path: Path) -> None:
    """A link avoids a second copy of the weights."""
    first = tmp_path / "first.onnx"
    place_self_contained(model, first)
    assert (tmp_path / "second.onnx",) == place_self_contained(first, tmp_path / "second.onnx", may_link=True)
    assert first.samefile(tmp_path / "second.onnx")
    place_self_contained(first, tmp_path / "third.onnx")
    assert not first.samefile(tmp_path / "third.onnx")
