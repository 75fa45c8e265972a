"""Complete writing of models, with one tensor in memory at a time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_ir import tensor_adapters

from winml.modelkit.errors import QuantizeError, WriteError
from winml.modelkit.file_names import data_path
from winml.modelkit.onnx.files.content_digest import content_digest
from winml.modelkit.onnx.files.writing import write_model

DTYPES = (
    np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int64, np.int8, np.uint8, np.bool_,
    ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float8_e4m3fn,
)  # fmt: skip


def _model_with_initializers(
    tensors: Sequence[ir.TensorProtocol], branch: Sequence[ir.TensorProtocol] = ()
) -> ir.Model:
    """Return ``out = x + 1`` with these initializers in the graph, and those of a branch of an If."""
    x = ir.val("x", ir.DataType.FLOAT, ir.Shape([2]))
    one = ir.val("one", const_value=ir.tensor(np.ones(2, np.float32), name="one"))
    add = ir.node("Add", [x, one], outputs=[ir.val("sum", ir.DataType.FLOAT, ir.Shape([2]))], name="/Add")
    add.metadata_props["winml.hierarchy.tag"] = "/Model"
    condition = ir.val("condition", const_value=ir.tensor(np.array(True), name="condition"))
    branches = []
    for side in ("then", "else"):
        relu = ir.node("Relu", [add.outputs[0]], outputs=[ir.val(f"{side}_out", ir.DataType.FLOAT, ir.Shape([2]))])
        inner = [ir.val(f"{side}_{tensor.name}", const_value=tensor) for tensor in branch] if side == "then" else []
        branches.append(ir.Graph([], relu.outputs, nodes=[relu], initializers=inner, name=side))
    choice = ir.node(
        "If",
        [condition],
        attributes={"then_branch": branches[0], "else_branch": branches[1]},
        outputs=[ir.val("out", ir.DataType.FLOAT, ir.Shape([2]))],
        name="/If",
    )
    values = [ir.val(tensor.name or "", const_value=tensor) for tensor in tensors]
    graph = ir.Graph(
        [x],
        choice.outputs,
        nodes=[add, choice],
        initializers=[one, condition, *values],
        name="g",
        opset_imports={"": 21},
    )
    return ir.Model(graph, ir_version=10)


def _tensors_of_each_dtype(shape: tuple[int, ...]) -> list[ir.Tensor[Any]]:
    generator = np.random.default_rng(0)
    return [
        ir.tensor(generator.integers(0, 2, shape).astype(dtype), name=f"{np.dtype(dtype).name}{len(shape)}")
        for dtype in DTYPES
    ]


@pytest.fixture
def various() -> ir.Model:
    """A model with tensors of every dtype: large, small, scalar and empty, torch's and numpy's, in a branch too."""
    tensors = [tensor for shape in ((), (0, 3), (7, 3, 2, 1), (61, 111)) for tensor in _tensors_of_each_dtype(shape)]
    weight = torch.linspace(-1, 1, 6000).view(60, 100)
    lazy = ir.LazyTensor(
        lambda: ir.tensor(np.arange(5000)), dtype=ir.DataType.INT64, shape=ir.Shape([5000]), name="lazy"
    )
    words = ir.StringTensor(np.array([b"a", b"bc"]), name="words")
    adapted = [
        tensor_adapters.TorchTensor(weight.t(), name="transposed view"),
        tensor_adapters.TorchTensor(weight.bfloat16(), name="torch bfloat16"),
    ]
    return _model_with_initializers([*tensors, *adapted, lazy, words], branch=_tensors_of_each_dtype((61, 111)))


def _values_in_file(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (tensor.dtype.name, tuple(tensor.shape.numpy()), repr(tensor.numpy().tolist()).encode())
        for graph in ir.load(path).graphs()
        for name, value in graph.initializers.items()
        if (tensor := value.const_value) is not None
    }


def test_write_model_inline_equals_onnx_ir(various: ir.Model, tmp_path: Path) -> None:
    """The file equals the library's, message for message, except for the value types of weights."""
    assert (tmp_path / "ours.onnx",) == write_model(various, tmp_path / "ours.onnx")
    ir.save(various, tmp_path / "theirs.onnx")
    theirs = onnx.load(tmp_path / "theirs.onnx")
    for graph in (theirs.graph, *(attribute.g for node in theirs.graph.node for attribute in node.attribute)):
        weights = {tensor.name for tensor in graph.initializer}
        kept = [info for info in graph.value_info if info.name not in weights]
        assert not weights or len(kept) < len(graph.value_info), "the library writes one for each weight"
        del graph.value_info[:]
        graph.value_info.extend(kept)
    assert theirs == onnx.load(tmp_path / "ours.onnx")
    onnx.checker.check_model(str(tmp_path / "ours.onnx"), full_check=True)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(2000, 40_000), min_size=1, max_size=30), seed=st.integers(0, 2**16))
def test_data_file_is_named_by_content_digested_during_the_write(sizes: list[int], seed: int) -> None:
    """Two threads write, some tensors late; a piece that was digested too early would give another name."""
    random = np.random.default_rng(seed)
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 17}), ir_version=10)

    def values(size: int) -> ir.Tensor:
        time.sleep(0.003 * random.integers(2))
        return ir.Tensor(random.integers(0, 255, size, dtype=np.uint8))

    for number, size in enumerate(sizes):
        tensor = ir.LazyTensor(partial(values, size), ir.DataType.UINT8, ir.Shape([size]), name=f"w{number}")
        model.graph.register_initializer(ir.Value(name=tensor.name, const_value=tensor))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("winml.modelkit.onnx.files.content_digest._PIECE_BYTES", 1000)
        patch.setattr("winml.modelkit.onnx.files.content_digest._BLOCK_BYTES", 300)
        path, data = write_model(model, Path(folder, "model.onnx"), external=True)
        assert data_path(path, content_digest(data)) == data


def test_write_model_external_holds_the_same_values(various: ir.Model, tmp_path: Path) -> None:
    """Weights outside read back as the weights inside, and the data file is named without a folder."""
    write_model(various, tmp_path / "inline.onnx")
    written = write_model(various, tmp_path / "external.onnx", external=True)
    model, data = written
    assert tmp_path / "external.onnx" == model
    assert data_path(model, content_digest(data)) == data
    assert _values_in_file(tmp_path / "inline.onnx") == _values_in_file(tmp_path / "external.onnx")
    proto = onnx.load(tmp_path / "external.onnx", load_external_data=False)
    places = {
        entry.value for tensor in proto.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    assert {data.name} == places
    onnx.checker.check_model(str(tmp_path / "external.onnx"), full_check=True)


@pytest.mark.parametrize("external", [False, True])
def test_write_model_makes_a_file_onnx_runtime_runs(tmp_path: Path, external: bool) -> None:
    """ONNX Runtime loads and runs models with internal and with external weights."""
    write_model(
        _model_with_initializers(_tensors_of_each_dtype((61, 111))[:1], _tensors_of_each_dtype((61, 111))[:1]),
        tmp_path / "model.onnx",
        external=external,
    )
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    output = session.run(None, {"x": np.array([1, -3], np.float32)})[0]
    assert [2, 0] == output.tolist()


def test_write_model_over_the_limit_keeps_weights_outside(tmp_path: Path) -> None:
    """The limit applies to the whole file, to the byte."""
    model = _model_with_initializers(_tensors_of_each_dtype((61, 111))[:1])
    write_model(model, tmp_path / "inline.onnx")
    size = (tmp_path / "inline.onnx").stat().st_size
    assert 1 == len(write_model(model, tmp_path / "a.onnx", inline_limit_bytes=size))
    assert 2 == len(write_model(model, tmp_path / "b.onnx", inline_limit_bytes=size - 1))
    with pytest.raises(WriteError, match=f"needs {size} bytes"):
        write_model(model, tmp_path / "c.onnx", external=False, inline_limit_bytes=size - 1)


@pytest.mark.parametrize("external", [False, True])
def test_write_model_leaves_the_model_unchanged(various: ir.Model, tmp_path: Path, external: bool) -> None:
    """Initializers keep their tensors, types and shapes, and their order."""

    def everything() -> list[tuple[str, Any, Any, Any]]:
        return [
            (name, id(value.const_value), value.type, value.shape) for name, value in various.graph.initializers.items()
        ]

    before = everything()
    write_model(various, tmp_path / "model.onnx", external=external)
    assert before == everything()


def test_write_model_embeds_data_of_another_file(various: ir.Model, tmp_path: Path) -> None:
    """A model loaded from external data is written whole, without its old data file."""
    _, data = write_model(various, tmp_path / "external.onnx", external=True)
    write_model(ir.load(tmp_path / "external.onnx"), tmp_path / "inline.onnx", external=False)
    expected = _values_in_file(tmp_path / "external.onnx")
    data.unlink()
    assert expected == _values_in_file(tmp_path / "inline.onnx")


class _Counted:
    """Count of the living tensors made on demand."""

    def __init__(self) -> None:
        self.alive = self.most = self.made = 0

    def tensor(self, name: str) -> ir.LazyTensor:
        def make() -> ir.TensorProtocol:
            return _CountedTensor(self, np.ones((64, 64), np.float32))

        return ir.LazyTensor(make, dtype=ir.DataType.FLOAT, shape=ir.Shape([64, 64]), name=name)


class _CountedTensor(ir.Tensor[Any]):
    def __init__(self, counted: _Counted, array: Any) -> None:
        super().__init__(array)
        self._counted = counted
        counted.made += 1
        counted.alive += 1
        counted.most = max(counted.most, counted.alive)

    def __del__(self) -> None:
        self._counted.alive -= 1


@pytest.mark.parametrize("external", [False, True])
def test_write_model_holds_one_tensor_at_a_time(tmp_path: Path, external: bool) -> None:
    """Tensors that are computed on demand are computed once each, and let go before the next."""
    counted = _Counted()
    model = _model_with_initializers([counted.tensor(f"weight {number}") for number in range(20)])
    write_model(model, tmp_path / "model.onnx", external=external)
    assert (20, 0) == (counted.made, counted.alive)
    assert counted.most <= 2


def test_write_model_to_a_missing_place_names_path_and_reason(tmp_path: Path) -> None:
    """An error of the operating system becomes a WriteError with the path."""
    with pytest.raises(WriteError, match=r"write .*model\.onnx"):
        write_model(_model_with_initializers([]), tmp_path / "missing" / "model.onnx")


def test_write_model_refuses_a_node_with_an_external_tensor(tmp_path: Path) -> None:
    """The file would depend on another file."""
    model = _model_with_initializers([])
    tensor = ir.ExternalTensor("elsewhere", 0, 4, ir.DataType.FLOAT, shape=ir.Shape([1]), name="t")
    model.graph.insert_before(model.graph[0], ir.node("Constant", [], attributes={"value": tensor}, name="/Constant"))
    with pytest.raises(WriteError, match="/Constant is in"):
        write_model(model, tmp_path / "model.onnx")


@pytest.mark.parametrize("external", [True, False])
@pytest.mark.parametrize("size", [2, 40, 5000])
def test_write_model_raises_the_error_of_a_computed_tensor(external: bool, size: int, tmp_path: Path) -> None:
    """The error reaches the caller unchanged for tensors of every size."""
    refusal = QuantizeError("no numbers")

    def refuse() -> ir.TensorProtocol:
        raise refusal

    model = _model_with_initializers([ir.LazyTensor(refuse, ir.DataType.FLOAT, ir.Shape([size]), name="lazy")])
    with pytest.raises(QuantizeError) as caught:
        write_model(model, tmp_path / "m.onnx", external=external)
    assert refusal is caught.value
    assert caught.value.__cause__ is None
