"""Merging of duplicate metadata keys of nodes, and reading of files with such keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from graphs import run_onnx
from winml.modelkit.errors import InputError
from winml.modelkit.onnx.files.graph_reading import load_by_reference, load_foreign, merge_duplicate_keys, read_foreign
from winml.modelkit.onnx.files.reading import reading_graph
from winml.modelkit.onnx.files.stored_tensors import StoredTensor


def model_with(*entries: tuple[str, str]) -> onnx.ModelProto:
    """Build a model of an If with one node in its branches, which has metadata entries in the given order."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    inner = helper.make_node("Relu", ["x"], ["z"], name="inner")
    for key, value in entries:
        inner.metadata_props.add(key=key, value=value)
    branch = helper.make_graph([inner], "branch", [], [helper.make_tensor_value_info("z", TensorProto.FLOAT, [2])])
    condition = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("c", TensorProto.BOOL, [], [True]))
    chosen = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    graph = helper.make_graph([condition, chosen], "graph", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def metadata(model: onnx.ModelProto) -> list[tuple[str, str]]:
    """Return the entries of the node in the first branch."""
    node = model.graph.node[1].attribute[0].g.node[0]
    return [(entry.key, entry.value) for entry in node.metadata_props]


DUPLICATES = (
    ("winml.hierarchy.tag", "/M/A/B"),
    ("winml.hierarchy.module", "a.b"),
    ("winml.hierarchy.source", "direct"),
    ("namespace", "M/a: A/a.b: B"),
    ("pkg.torch.onnx.name_scopes", "['a']"),
    ("mine", "1"),
    ("winml.hierarchy.tag", "/M/A/C"),
    ("winml.hierarchy.module", "a.c"),
    ("winml.hierarchy.source", "parent"),
    ("namespace", "M/a: A/a.c: C"),
    ("pkg.torch.onnx.name_scopes", "['b']"),
    ("mine", "2"),
)


def test_merge_duplicate_keys_gives_the_common_module_and_names_the_sources() -> None:
    """Two tags of a fused node give the module common to both."""
    model = model_with(*DUPLICATES)
    assert (2, ()) == merge_duplicate_keys(model), "both branches"
    found = metadata(model)
    merged = dict(found)
    assert len(found) == len(merged)
    assert ("/M/A", "merged", "2") == tuple(
        merged[key] for key in ("winml.hierarchy.tag", "winml.hierarchy.source", "mine")
    )
    assert ["a.b", "a.c"] == json.loads(merged["winml.hierarchy.modules"])
    assert {"namespace", "winml.hierarchy.module", "pkg.torch.onnx.name_scopes"}.isdisjoint(merged)


def test_merge_duplicate_keys_reads_the_module_from_the_file() -> None:
    """The tag needs no completion then. Of keys that the model has several times the last counts."""
    model = model_with(*DUPLICATES)
    for tree in ("damaged", '[{"tag": "/M/A", "path": "a"}]'):
        model.metadata_props.add(key="winml.hierarchy.tree", value=tree)
    assert (2, ("winml.hierarchy.tree",)) == merge_duplicate_keys(model)
    merged = dict(metadata(model))
    assert ("a", "2") == (merged["winml.hierarchy.module"], merged["winml.hierarchy.depth"])
    onnx.checker.check_model(model)


def test_merge_duplicate_keys_that_agree_stay() -> None:
    """The same key with the same value twice is that value once, source and module included."""
    once = DUPLICATES[:6]
    model = model_with(*once, *once)
    assert (2, ()) == merge_duplicate_keys(model)
    assert list(once) == metadata(model)


def test_merge_duplicate_keys_leaves_clean_models_alone() -> None:
    """A node with every key once is not touched."""
    model = model_with(*DUPLICATES[:6])
    assert not merge_duplicate_keys(model)
    assert list(DUPLICATES[:6]) == metadata(model)


def test_merge_duplicate_keys_drops_malformed_tags() -> None:
    """A node with a tag and a malformed tag becomes untagged, so it can inherit a tag."""
    model = model_with(("winml.hierarchy.tag", "/M"), ("winml.hierarchy.tag", "M"))
    merge_duplicate_keys(model)
    assert [] == metadata(model)


def test_foreign_file_is_loaded_and_read_with_every_key_once(tmp_path: Path) -> None:
    """Both readers read a file with duplicate keys and give the same result."""
    path = tmp_path / "foreign.onnx"
    path.write_bytes(model_with(*DUPLICATES).SerializeToString())
    read, merged = read_foreign(path)
    assert 2 == merged.nodes
    tags = [
        [node.metadata_props.get("winml.hierarchy.tag") for node in model.graph.all_nodes()]
        for model in (read, load_foreign(path))
    ]
    assert [None, None, "/M/A", "/M/A"] == tags[0] == tags[1]


def test_read_foreign_graph_with_duplicate_values_is_refused(tmp_path: Path) -> None:
    """A model with two nodes for one value is refused by this tool, not by a library."""
    model = model_with()
    model.graph.node.append(model.graph.node[0])
    path = tmp_path / "broken.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match="a graph"):
        read_foreign(path)


WEIGHTS = {
    "large": np.arange(4096, dtype=np.float32).reshape(64, 64),
    "short": np.arange(4096, dtype=np.int64).astype(ml_dtypes.bfloat16),
    "small": np.arange(4, dtype=np.float32),
    "halves": np.arange(16384, dtype=np.int64).astype(ml_dtypes.int4),
}


def save_weights(folder: Path, *, data: str | None = None) -> Path:
    """Write a model with weights of several types, inside the file or in a data file."""
    x = ir.Value(name="x", shape=ir.Shape([4]), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.Node("", "Neg", [x], outputs=[ir.Value(name="y")])
    values = [ir.Value(name=name, const_value=ir.tensor(array, name=name)) for name, array in WEIGHTS.items()]
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=values, opset_imports={"": 21}, name="g")
    ir.save(ir.Model(graph, ir_version=10), folder / "model.onnx", external_data=data, size_threshold_bytes=0)
    return folder / "model.onnx"


@pytest.mark.parametrize("data", [None, "model.data"])
def test_load_by_reference_gives_the_values_of_weights_inside_and_outside(tmp_path: Path, data: str | None) -> None:
    """Every weight has the type and values of the saved one."""
    model = load_by_reference(save_weights(tmp_path, data=data))

    assert list(model.graph.initializers) == list(WEIGHTS)
    for name, array in WEIGHTS.items():
        tensor = model.graph.initializers[name].const_value
        assert tensor is not None
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype


def test_load_by_reference_leaves_large_weights_in_the_file(tmp_path: Path) -> None:
    """A weight is read on access: a weight of a replaced file has the new values."""
    path = save_weights(tmp_path)
    tensor = load_by_reference(path).graph.initializers["large"].const_value
    assert isinstance(tensor, StoredTensor)

    path.write_bytes(path.read_bytes().replace(WEIGHTS["large"].tobytes(), (-WEIGHTS["large"]).tobytes()))

    assert np.array_equal(tensor.numpy(), -WEIGHTS["large"])


def test_load_by_reference_reads_weights_with_an_explicit_inline_location(tmp_path: Path) -> None:
    """ONNX Runtime's quantizers write that values lie inside, which goes without saying."""
    path = save_weights(tmp_path)
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        tensor.data_location = onnx.TensorProto.DEFAULT
        assert tensor.HasField("data_location")
    path.write_bytes(model.SerializeToString())

    tensor = load_by_reference(path).graph.initializers["large"].const_value
    assert isinstance(tensor, StoredTensor)
    assert np.array_equal(tensor.numpy(), WEIGHTS["large"])


def test_load_by_reference_of_an_overlong_weight_is_refused_by_name(tmp_path: Path) -> None:
    """A shape that contradicts the number of bytes is refused while reading, not when values are used."""
    path = save_weights(tmp_path)
    model = onnx.load(path)
    model.graph.initializer[0].dims[0] -= 1
    path.write_bytes(model.SerializeToString())

    with pytest.raises(InputError, match=r"'large' .* 16384"):
        reading_graph(path, lambda: load_by_reference(path))


@pytest.mark.parametrize("indices", [[1, 2], [[0, 1], [1, 0]]], ids=["positions", "coordinates"])
def test_sparse_tensors_become_dense(tmp_path: Path, indices: list[Any]) -> None:
    """An initializer and a constant have the same values for ONNX Runtime, before and after."""

    def sparse(name: str) -> onnx.SparseTensorProto:
        values = helper.make_tensor(name, TensorProto.FLOAT, [2], [3.0, -5.0])
        shape = np.shape(indices)
        places = helper.make_tensor(f"{name}_indices", TensorProto.INT64, shape, np.ravel(indices))
        return helper.make_sparse_tensor(values, places, [2, 2])

    nodes = [
        helper.make_node("Constant", [], ["c"], sparse_value=sparse("c")),
        helper.make_node("Sub", ["x", "ws"], ["d"]),
        helper.make_node("Mul", ["d", "c"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], sparse_initializer=[sparse("ws")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "model.onnx")
    feeds = {"x": np.arange(4, dtype=np.float32).reshape(2, 2)}
    for source in (
        tmp_path / "model.onnx",
        ir.to_proto(load_by_reference(tmp_path / "model.onnx")).SerializeToString(),
    ):
        assert [[0, -6], [-35, 0]] == run_onnx(source, feeds)["y"].tolist()


def test_sparse_tensor_beyond_the_limit_of_a_file_is_refused(tmp_path: Path) -> None:
    """Its dense form would not fit into a model; nothing is allocated."""
    model = model_with()
    values = helper.make_tensor("ws", TensorProto.FLOAT, [1], [1.0])
    indices = helper.make_tensor("ws_indices", TensorProto.INT64, [1], [0])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2**40, 2]))
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(InputError, match="ws"):
        reading_graph(tmp_path / "model.onnx", lambda: load_by_reference(tmp_path / "model.onnx"))
