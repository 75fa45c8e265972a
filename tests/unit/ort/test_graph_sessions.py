"""Runs of a graph in memory on stored weights: cast and transposed by the session, never written.

Files of a newer format run with the newest supported IR version.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphs import parse
from winml.modelkit.errors import StageError
from winml.modelkit.onnx.files.stored_tensors import StoredTensor, StoredValues
from winml.modelkit.ort.graph_sessions import GraphSessions, newest_ir_version, open_session
from winml.modelkit.ort.host import resident_bytes
from winml.modelkit.ort.sessions import Session

X = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)


def product(tensor: ir.TensorProtocol) -> ir.Model:
    """Return ``y = x W``."""
    depth, width = tensor.shape.numpy()
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 17]>
        g (float[N, {depth}] x) => (float[N, {width}] y) <float[1] w = {{0.0}}> {{ y = MatMul (x, w) }}"""
    )
    weight = model.graph.initializers["w"]
    weight.const_value, weight.shape = tensor, ir.Shape(tensor.shape.numpy())
    return model


def stored(folder: Path, dtype: type, name: str = "weights.bin") -> tuple[StoredTensor, np.ndarray]:
    """Return a weight stored in another type and order than in the graph, and its values."""
    values = np.random.default_rng(1).standard_normal((96, 64)).astype(dtype)
    (folder / name).write_bytes(b"head" + values.tobytes())
    place = StoredValues(folder / name, 4, ir.DataType.from_numpy(values.dtype), values.shape, "key")
    return StoredTensor(place, dtype=ir.DataType.FLOAT, permutation=(1, 0), name="w"), values.astype(np.float32).T


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_stored_weight_is_cast_and_transposed_by_the_session(tmp_path: Path, dtype: type) -> None:
    """The graph stays unchanged; types that no kernel casts are converted in memory."""
    tensor, values = stored(tmp_path, dtype)
    model = product(tensor)
    session = GraphSessions(model).open(model)
    np.testing.assert_allclose(X @ values, session.run({"x": X})["y"], rtol=1e-4, atol=1e-5)
    assert model.graph.initializers["w"].const_value is tensor
    assert ["MatMul"] == [node.op_type for node in model.graph]
    assert ["weights.bin"] == [path.name for path in tmp_path.iterdir()]


def test_weights_of_several_folders_and_links_are_read(tmp_path: Path) -> None:
    """A cache of the Hub stores files elsewhere, under other names."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    tensor, values = stored(tmp_path / "blobs", np.float16, "0123")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "0123")
    linked = StoredValues(
        tmp_path / "snapshot" / "model.safetensors", 4, tensor.stored.dtype, tensor.stored.shape, "key"
    )
    other, _ = stored(tmp_path, np.float32)
    model = product(StoredTensor(linked, dtype=ir.DataType.FLOAT, permutation=(1, 0), name="w"))
    model.graph.register_initializer(ir.val("idle", const_value=other.named("idle")))
    np.testing.assert_allclose(X @ values, GraphSessions(model).open(model).run({"x": X})["y"], rtol=1e-3, atol=1e-3)


def test_computed_weight_is_computed_once_for_all_graphs(tmp_path: Path) -> None:
    """A weight of the shared graph is computed once; a weight of another graph is computed for each session."""
    reads: list[str] = []
    _, values = stored(tmp_path, np.float32)

    def computed(name: str) -> ir.LazyTensor:
        def read() -> ir.TensorProtocol:
            reads.append(name)
            return ir.Tensor(np.ascontiguousarray(values), name="w")

        return ir.LazyTensor(read, ir.DataType.FLOAT, ir.Shape(values.shape), name="w")

    shared = product(computed("shared"))
    sessions = GraphSessions(shared)
    own = product(computed("own"))
    for model in (shared, shared.clone(), own, own):
        np.testing.assert_allclose(X @ values, sessions.open(model).run({"x": X})["y"], rtol=1e-4, atol=1e-5)
    assert ["shared", "own", "own"] == reads


def test_mapped_weights_take_no_memory(tmp_path: Path) -> None:
    """The opening of a graph converts and copies no weight."""
    size = 4096
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(2 * size * size)
    place = StoredValues(path, 0, ir.DataType.BFLOAT16, (size, size), "key")
    model = product(StoredTensor(place, dtype=ir.DataType.FLOAT, permutation=(1, 0), name="w"))
    GraphSessions(model).open(product(ir.tensor(np.eye(64, dtype=np.float32))))  # libraries are warm
    before = resident_bytes()
    session = GraphSessions(model).open(model)
    assert resident_bytes() - before < size * size
    assert {"x"} == session.inputs.keys()


def test_table_that_is_also_read_transposed_is_held_once(tmp_path: Path) -> None:
    """Tied embeddings are neither folded nor prepacked, and are no input of the session."""
    model = parse(
        """m (int64[N] ids) => (float[N, M] y) <float[1] table = {0.0}>
        { x = Gather (table, ids) turned = Transpose <perm = [1, 0]> (table) y = MatMul (x, turned) }"""
    )
    table = np.random.default_rng(2).standard_normal((1 << 14, 1 << 9)).astype(np.float32)
    (tmp_path / "table.data").write_bytes(table.tobytes())
    value = model.graph.initializers["table"]
    value.shape = ir.Shape(table.shape)
    value.const_value = ir.ExternalTensor(
        "table.data", 0, table.nbytes, ir.DataType.FLOAT, shape=value.shape, name="table", base_dir=tmp_path
    )
    ir.save(model, tmp_path / "tied.onnx")
    open_session(tmp_path / "tied.onnx", as_written=False)  # libraries are warm
    before = resident_bytes()
    session = open_session(tmp_path / "tied.onnx", as_written=False, copies_tables=False)
    assert resident_bytes() - before < table.nbytes // 2
    assert {"ids"} == session.inputs.keys()
    outputs = session.run({"ids": np.array([3, 5])})
    np.testing.assert_allclose(table[[3, 5]] @ table.T, outputs["y"], rtol=1e-4, atol=1e-3)


def test_file_of_a_newer_format_runs_unchanged(tmp_path: Path) -> None:
    """ONNX Runtime refuses the file; the message omits the path of its own source."""
    model = ir.to_proto(parse("m (float[2] x) => (float[2] y) { y = Neg (x) }"))
    onnx.save(model, tmp_path / "old.onnx")
    assert tmp_path / "old.onnx" == open_session(tmp_path / "old.onnx", as_written=False).source_path
    model.ir_version = newest_ir_version() + 1
    onnx.save(model, tmp_path / "new.onnx")
    before = (tmp_path / "new.onnx").read_bytes()
    with pytest.raises(StageError, match="IR version") as raised:
        Session(tmp_path / "new.onnx")
    assert "onnxruntime_src" not in raised.value.message
    feeds = {"x": np.array([1, -2], np.float32)}
    for as_written in (False, True):
        assert [-1, 2] == open_session(tmp_path / "new.onnx", as_written=as_written).run(feeds)["y"].tolist()
    assert before == (tmp_path / "new.onnx").read_bytes()


def test_bfloat16_of_a_branch_is_computed_in_float32(tmp_path: Path) -> None:
    """The main graph has float32 values alone; ONNX Runtime has no bfloat16 Add on the CPU."""
    branch = (
        "g () => (float[2] z) <bfloat16[2] wide, bfloat16[2] sum> "
        "{{ wide = Cast <to = 16> (x) sum = {} (wide, wide) z = Cast <to = 1> (sum) }}"
    )
    graph = parse(
        "g (float[2] x, bool c) => (float[2] y) { y = If <then_branch = "
        f"{branch.format('Add')}, else_branch = {branch.format('Mul')}> (c) }}"
    )
    path = tmp_path / "branches.onnx"
    onnx.save(ir.to_proto(graph), path)
    session = open_session(path, as_written=False)
    feeds = {"x": np.array([1.0, 3.0], np.float32), "c": np.array(True)}
    assert [2.0, 6.0] == session.run(feeds)["y"].tolist()
