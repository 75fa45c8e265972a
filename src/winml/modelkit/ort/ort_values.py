"""Conversion of arrays to values of ONNX Runtime and back, including ``ml_dtypes.bfloat16``."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort

from winml.modelkit.arrays import Array, Arrays

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


def has_text(feeds: Arrays) -> bool:
    """Return True if an array contains text, which no OrtValue is made of."""
    return any(array.dtype.kind in "USO" for array in feeds.values())


def to_feed_objects(feeds: Arrays) -> dict[str, Any]:
    """Return arrays as ONNX Runtime takes them beside text: text unchanged, other arrays as OrtValues."""
    return {name: array if array.dtype.kind in "USO" else to_ort_value(array) for name, array in feeds.items()}


MAP_KEYS = ".keys"
"""End of the name of an array with the keys of maps."""


def object_arrays(outputs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Array]]:
    """Yield the arrays of outputs that are tensors, sequences or maps, by name.

    A sequence of tensors is one array per entry, ``name[0]``, ``name[1]``, …. Maps are an array of their values, in
    the order of the keys, and an array of the keys, ``name.keys``. An optional without an element is an empty array.

    Args:
        outputs: Names and values as ONNX Runtime returns them.
    """
    for name, value in outputs:
        is_maps = isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)
        if isinstance(value, dict) or is_maps:
            maps = value if is_maps else [value]
            keys = sorted({key for entry in maps for key in entry})
            rows = [[entry.get(key, np.nan) for key in keys] for entry in maps]
            values = np.asarray(rows if is_maps else rows[0])
            # Specified by ZipMap: its floats are float32; ONNX Runtime returns Python's.
            yield name, values.astype(np.float32) if values.dtype == np.float64 else values
            yield f"{name}{MAP_KEYS}", np.asarray(keys)
        elif isinstance(value, list):
            yield from object_arrays((f"{name}[{number}]", entry) for number, entry in enumerate(value))
        else:
            yield name, np.zeros(0, np.float32) if value is None else np.asarray(value)
