"""Integer weights, compared with those of ONNX Runtime's quantizer."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnxruntime.quantization.quant_utils import get_qmin_qmax_for_qType, quantize_data
from packaging.version import Version

from winml.modelkit.quantize.engines.integer_weights import (
    PIECE_ELEMENTS,
    IntegerRange,
    measure_scales,
    quantized_tensor,
)

INT8, UINT8 = ir.DataType.INT8, ir.DataType.UINT8


def integer_range(dtype: ir.DataType, *, symmetric: bool) -> IntegerRange:
    minimum, maximum = get_qmin_qmax_for_qType(dtype.value, symmetric=symmetric)
    return IntegerRange(dtype, int(minimum), int(maximum), symmetric)


def weight(dtype: str = "float32", shape: tuple[int, ...] = (6, 5)) -> np.ndarray:
    """Return values with a zero channel, a negative channel and a channel with an outlier, on every axis."""
    values = np.random.default_rng(0).standard_normal(shape)
    values[0], values[:, 1], values[2, 3] = 0.0, -np.abs(values[:, 1]), 40.0
    return values.astype(dtype)


@pytest.mark.skipif(
    Version(onnxruntime.__version__) < Version("1.31"), reason="earlier versions of ONNX Runtime round scales otherwise"
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("integer", [INT8, UINT8])
@pytest.mark.parametrize("axis", [None, 0, -1])
def test_integers_equal_onnxruntime(dtype: str, symmetric: bool, integer: ir.DataType, axis: int | None) -> None:
    """Scales, zero points and integers equal ONNX Runtime's result for each channel bit by bit."""
    values = weight(dtype)
    channels = [values] if axis is None else list(np.moveaxis(values, axis, 0))
    expected = [quantize_data(channel.flatten(), integer.value, symmetric) for channel in channels]

    scales = measure_scales(ir.tensor(values), axis, integer_range(integer, symmetric=symmetric))
    integers = quantized_tensor(ir.tensor(values), scales, "q").numpy()

    assert scales.scales.dtype == values.dtype
    assert scales.scales.reshape(-1).tolist() == [float(scale) for _, scale, _ in expected]
    assert scales.zero_points.reshape(-1).tolist() == [int(zero) for zero, _, _ in expected]
    actual = [integers] if axis is None else list(np.moveaxis(integers, axis, 0))
    assert [part.flatten().tolist() for part in actual] == [part.tolist() for _, _, part in expected]


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_integers_of_a_large_weight_do_not_depend_on_its_pieces(axis: int | None) -> None:
    """A weight processed in several pieces has the same integers as its rows alone."""
    values = weight(shape=(5, PIECE_ELEMENTS // 2))
    scales = measure_scales(ir.tensor(values), axis, integer_range(INT8, symmetric=True))
    scale = scales.scales if axis is None else np.expand_dims(scales.scales, 1 - axis)

    assert np.array_equal(quantized_tensor(ir.tensor(values), scales, "q").numpy(), np.rint(values / scale))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_measure_scales_of_a_non_finite_weight_names_the_weight(value: float) -> None:
    """NaN and infinity have no integer."""
    values = weight()
    values[1, 1] = value
    with pytest.raises(ValueError, match="weight w "):
        measure_scales(ir.tensor(values, name="w"), 0, integer_range(INT8, symmetric=True))


def test_measure_scales_of_a_missing_axis_is_refused() -> None:
    """A weight of two dimensions has no third."""
    with pytest.raises(ValueError, match="no axis 2"):
        measure_scales(ir.tensor(weight()), 2, integer_range(INT8, symmetric=True))
