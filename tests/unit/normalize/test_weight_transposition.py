"""Storage of weights in the orientation of their use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_ir import tensor_adapters

from graphs import answer, operators, parse, tags
from winml.modelkit.normalize.passes import WeightTranspositionPass
from winml.modelkit.onnx.files.stored_tensors import StoredTensor, StoredValues

TWICE = """
m (float[2,3] x) => (float[2,4] y, float[2,4] z)
<float[4,3] w = {0,0,0,0,0,0,0,0,0,0,0,0}>
{ a = Transpose <perm=[1,0]> (w)  b = Transpose (w)  y = MatMul (x, a)  z = MatMul (x, b) }
"""
"""w → Transpose → MatMul, twice, once with the permutation spelled out."""

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def _transpose_weights(model: ir.Model) -> bool:
    return WeightTranspositionPass()(model).modified


def test_transposition_of_a_weight_used_twice_becomes_one_initializer() -> None:
    """Both nodes are replaced by one transposed initializer; outputs and tags are equal."""
    model = parse(TWICE)
    before = answer(model, x=X)
    assert _transpose_weights(model)
    assert ["MatMul", "MatMul"] == operators(model)
    assert ["w.transposed"] == list(model.graph.initializers)
    assert [("/M/MatMul", "direct")] * 2 == tags(model)
    assert before == answer(model, x=X)
    assert not _transpose_weights(model)


def test_transposition_of_a_torch_weight_is_a_view() -> None:
    """The new initializer is a view of the same memory."""
    model = parse(TWICE)
    weight = torch.arange(12.0).view(4, 3)
    model.graph.initializers["w"].const_value = tensor_adapters.TorchTensor(weight, name="w")
    before = answer(model, x=X)
    assert _transpose_weights(model)
    tensor = model.graph.initializers["w.transposed"].const_value
    assert isinstance(tensor, tensor_adapters.TorchTensor)
    assert weight.data_ptr() == tensor.raw.data_ptr()
    assert before == answer(model, x=X)


def test_transposition_of_a_stored_weight_does_not_open_its_file(tmp_path: Path) -> None:
    """The weight is transposed while it is written; its file is not opened before."""
    model = parse(TWICE)
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    stored = StoredValues(tmp_path / "weights", 4, ir.DataType.FLOAT, values.shape)
    model.graph.initializers["w"].const_value = StoredTensor(stored, name="w")
    assert _transpose_weights(model)
    tensor = model.graph.initializers["w.transposed"].const_value
    assert isinstance(tensor, StoredTensor)
    stored.path.write_bytes(bytes(4) + values.tobytes())
    assert values.T.tolist() == tensor.numpy().tolist()


def test_transposition_of_a_lazy_weight_is_computed_on_read() -> None:
    """A tensor that is made on demand is not made by the pass."""
    reads = []

    def make() -> ir.TensorProtocol:
        reads.append(1)
        return ir.tensor(np.arange(12, dtype=np.float32).reshape(4, 3))

    model = parse(TWICE)
    model.graph.initializers["w"].const_value = ir.LazyTensor(make, dtype=ir.DataType.FLOAT, shape=ir.Shape([4, 3]))
    assert _transpose_weights(model)
    assert [] == reads
    tensor = model.graph.initializers["w.transposed"].const_value
    assert tensor is not None
    assert [0, 3, 6, 9] == tensor.numpy()[0].tolist()


@pytest.mark.parametrize(
    "body",
    [
        # Tied: something else reads the weight as it is.
        (
            "m (float[2,3] x, int64[1] i) => (float[2,4] y, float[1,3] e) <float[4,3] w = {0,0,0,0,0,0,0,0,0,0,0,0}>"
            "{ a = Transpose <perm=[1,0]> (w)  y = MatMul (x, a)  e = Gather (w, i) }"
        ),
        # Two different permutations.
        (
            "m (float[2,2] x) => (float[2,2] y, float[2,2] z) <float[2,2] w = {0,0,0,0}>"
            "{ a = Transpose <perm=[1,0]> (w)  b = Transpose <perm=[0,1]> (w)  y = MatMul (x, a)  z = MatMul (x, b) }"
        ),
        # The transposed weight is an output.
        (
            "m (float[2,3] x) => (float[3,4] a, float[2,4] y) <float[4,3] w = {0,0,0,0,0,0,0,0,0,0,0,0}>"
            "{ a = Transpose <perm=[1,0]> (w)  y = MatMul (x, a) }"
        ),
        # Not a weight.
        "m (float[2,3] x) => (float[3,2] y) { y = Transpose <perm=[1,0]> (x) }",
    ],
)
def test_transposition_does_not_fire(body: str) -> None:
    """Tied weights, two permutations, an output and an activation stay as they are."""
    model = parse(body)
    before = operators(model)
    assert not _transpose_weights(model)
    assert before == operators(model)
