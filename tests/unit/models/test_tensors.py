"""Conversion of tensors between numpy and torch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from winml.modelkit.models.tensors import to_numpy, to_torch
from winml.modelkit.onnx.specs import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_tensor_crosses_both_ways_unchanged(dtype: str, shape: tuple[int, ...]) -> None:
    """Every dtype we accept comes back with its values, shape and type."""
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    array = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape).astype(kind)
    tensor = to_torch(array)
    assert f"torch.{dtype}" == str(tensor.dtype)
    converted = to_numpy(tensor)
    assert (array.shape, array.dtype) == (converted.shape, converted.dtype)
    np.testing.assert_array_equal(array, converted)


def test_to_numpy_accepts_strided_and_differentiable_tensors() -> None:
    """Memory layout and recorded gradients have no effect."""
    tensor = torch.arange(6.0, requires_grad=True).reshape(2, 3).T
    np.testing.assert_array_equal([[0, 3], [1, 4], [2, 5]], to_numpy(tensor))
    half = tensor.to(torch.bfloat16)
    np.testing.assert_array_equal([[0, 3], [1, 4], [2, 5]], to_numpy(half).astype(np.float32))


def test_to_torch_takes_arrays_in_any_order() -> None:
    """A transposed array keeps its values."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    assert array.tolist() == to_torch(array).tolist()
    assert array.tolist() == to_torch(array.astype(ml_dtypes.bfloat16)).tolist()


def test_to_numpy_of_a_plain_tensor_shares_its_memory() -> None:
    """A large output is not copied to be compared."""
    tensor = torch.zeros(3)
    to_numpy(tensor)[0] = 5
    assert 5 == tensor[0]
