"""Values of stored tensors, read in pieces."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from winml.modelkit.errors import CheckpointError
from winml.modelkit.onnx.files.stored_tensors import PIECE_ELEMENTS, StoredTensor, StoredValues
from winml.modelkit.onnx.files.writing import write_model

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int64, np.bool_, ml_dtypes.float8_e4m3fn)
FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)


def _write_and_refer(values: Any, path: Path, before: bytes = b"head") -> StoredTensor:
    path.write_bytes(before + values.tobytes() + b"tail")
    stored = StoredValues(path, len(before), ir.DataType.from_numpy(values.dtype), values.shape, "key")
    return StoredTensor(stored, name="w")


def _bytes_written(tensor: StoredTensor) -> bytes:
    file = io.BytesIO()
    tensor.tofile(file)
    return file.getvalue()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (67, 131), (3, 4, 5)])
def test_stored_tensor_gives_the_bytes_of_the_file(tmp_path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
    """Reading and writing give the bytes of the tensor, without the bytes before and after."""
    values = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    tensor = _write_and_refer(values, tmp_path / "weights")
    assert (values.shape, values.nbytes) == (tensor.shape.numpy(), tensor.nbytes)
    assert values.dtype == tensor.numpy().dtype
    assert values.tobytes() == tensor.numpy().tobytes() == tensor.tobytes() == _bytes_written(tensor)


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
@given(rows=st.integers(1, 140), columns=st.integers(1, 140), seed=st.integers(0, 9))
def test_stored_tensor_cast_and_transposed_equals_numpy(
    tmp_path_factory: pytest.TempPathFactory, source: Any, target: Any, rows: int, columns: int, seed: int
) -> None:
    """The result is equal for every shape relative to the tiles and every element type."""
    drawn = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    values = drawn.astype(source)
    path = tmp_path_factory.getbasetemp() / f"weights-{np.dtype(source)}-{np.dtype(target)}"
    tensor = _write_and_refer(values, path).cast(ir.DataType.from_numpy(np.dtype(target))).transposed([1, 0], "t")
    expected = np.ascontiguousarray(values.T).astype(target)
    assert expected.tobytes() == _bytes_written(tensor) == tensor.numpy().tobytes()


@pytest.mark.parametrize("orders", [[(2, 0, 1)], [(1, 0, 2), (2, 1, 0)], [(1, 2, 0), (2, 0, 1)]])
def test_stored_tensor_transposed_again_is_transposed_once(tmp_path: Path, orders: Sequence[tuple[int, ...]]) -> None:
    """Several transpositions are combined, and inverse ones cancel."""
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tensor, expected = _write_and_refer(values, tmp_path / "weights"), values
    for order in orders:
        tensor, expected = tensor.transposed(order, "t"), expected.transpose(order)
    assert expected.shape == tensor.shape.numpy()
    assert expected.tobytes() == _bytes_written(tensor) == tensor.tobytes()


def test_stored_tensor_too_large_for_its_type_is_infinite_without_a_warning(tmp_path: Path) -> None:
    """The overflow is infinite as in torch; pytest turns warnings into errors."""
    tensor = _write_and_refer(np.array([1e6, 1.0], np.float32), tmp_path / "weights").cast(ir.DataType.FLOAT16)
    assert [np.inf, 1.0] == tensor.numpy().tolist()


def test_stored_tensor_is_written_in_pieces(tmp_path: Path) -> None:
    """A cast needs a few pieces in memory, a transposition the stored tensor besides, a copy next to nothing."""
    values = np.ones((4096, 4 * PIECE_ELEMENTS // 1024), np.float16)
    tensor = _write_and_refer(values, tmp_path / "weights")
    piece = 4 * PIECE_ELEMENTS
    limits = ((tensor, piece), (tensor.cast(ir.DataType.FLOAT), 4 * piece),
              (tensor.cast(ir.DataType.FLOAT).transposed([1, 0], "t"), values.nbytes + 4 * piece))  # fmt: skip
    assert values.nbytes > 6 * piece
    for case, limit in limits:
        with (tmp_path / "out").open("wb") as file:
            tracemalloc.start()
            case.tofile(file)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < limit
        assert (tmp_path / "out").stat().st_size == case.nbytes


@pytest.mark.parametrize("change", ["none", "cast", "transposed"])
def test_stored_tensor_of_a_file_cut_short_names_file_and_tensor(tmp_path: Path, change: str) -> None:
    """A file replaced during reading is not an internal error."""
    tensor = _write_and_refer(np.ones((8, 8), np.float32), tmp_path / "weights")
    if change != "none":
        tensor = tensor.cast(ir.DataType.FLOAT16) if change == "cast" else tensor.transposed([1, 0], "t")
    (tmp_path / "weights").write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match="tensor 'key'"):
        _bytes_written(tensor)


@pytest.mark.parametrize("external", [False, True])
def test_write_model_takes_stored_tensors(tmp_path: Path, external: bool) -> None:
    """The file written holds the values, under the name in the graph, and needs the stored file no more."""
    values = np.arange(6000, dtype=np.float32).reshape(60, 100)
    tensor = _write_and_refer(values, tmp_path / "weights").transposed([1, 0], "w")
    x = ir.val("x", ir.DataType.FLOAT, ir.Shape([2, 100]))
    weight = ir.val("renamed", const_value=tensor)
    node = ir.node("MatMul", [x, weight], outputs=[ir.val("y", ir.DataType.FLOAT, ir.Shape([2, 60]))], name="/MatMul")
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[weight], name="g", opset_imports={"": 18})
    write_model(ir.Model(graph, ir_version=10), tmp_path / "model.onnx", external=external)
    (tmp_path / "weights").unlink()
    reloaded = ir.load(tmp_path / "model.onnx").graph.initializers["renamed"].const_value
    assert reloaded is not None
    assert values.T.tolist() == reloaded.numpy().tolist()
