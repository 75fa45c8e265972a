"""Conversion of arrays to values of ONNX Runtime and back, including ``ml_dtypes.bfloat16``."""

from __future__ import annotations

import ctypes
import math

import ml_dtypes
import numpy as np
import onnxruntime as ort

from winml.modelkit.arrays import Array

_ONNX_BFLOAT16 = 16
"""Specified: ``TensorProto.BFLOAT16``."""


def to_ort_value(array: Array) -> ort.OrtValue:
    """Convert an array to an OrtValue, including ``ml_dtypes.bfloat16``; the OrtValue may refer to the array."""
    # ONNX Runtime reads the buffer without strides, and accepts a scalar only as an array of rank 0.
    array = np.asarray(array, order="C")
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _ONNX_BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def to_array(value: ort.OrtValue) -> Array:
    """Return a value as an array; of ``bfloat16``, a copy."""
    if value.data_type() != "tensor(bfloat16)":
        array: Array = value.numpy()
        return array
    shape = value.shape()
    # Copied, since the memory is freed with the value.
    data = bytearray(ctypes.string_at(value.data_ptr(), math.prod(shape) * 2))
    return np.frombuffer(data, dtype=ml_dtypes.bfloat16).reshape(shape)
