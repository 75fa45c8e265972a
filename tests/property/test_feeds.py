"""Random input values and their specifications."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.feeds import make_feeds

_SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)
_LIMITS = {"int8": 127, "int16": 32767, "int32": 2**31 - 1, "int64": 2**40}


@st.composite
def _integer_specs(draw: st.DrawFn) -> InputTensorSpec:
    dtype = draw(st.sampled_from(sorted(_LIMITS)))
    bounds = st.integers(-_LIMITS[dtype], _LIMITS[dtype])
    low, high = sorted((draw(bounds), draw(bounds)))
    return InputTensorSpec(name="ids", shape=draw(_SHAPES), dtype=dtype, value_range=(low, high))


@st.composite
def _float_specs(draw: st.DrawFn) -> InputTensorSpec:
    dtype = draw(st.sampled_from(["float16", "bfloat16", "float32", "float64"]))
    bounds = st.floats(-60000, 60000, allow_nan=False)
    low, high = sorted((draw(bounds), draw(bounds)))
    # At least a few values of the narrowest dtype lie between the ends.
    high = max(high, low + max(abs(low), abs(high), 1.0) / 8)
    return InputTensorSpec(name="x", shape=draw(_SHAPES), dtype=dtype, value_range=(low, high))


@given(spec=st.one_of(_integer_specs(), _float_specs()), seed=st.integers(0, 2**32))
def test_feeds_values_have_shape_dtype_and_range(spec: InputTensorSpec, seed: int) -> None:
    """Every value is inside the range, both ends included, and the array has the specified shape and dtype."""
    values = make_feeds([spec], seed)[spec.name]
    assert spec.value_range is not None
    assert (spec.shape, spec.dtype) == (values.shape, str(values.dtype))
    wide = values.astype("float64")
    assert spec.value_range[0] <= wide.min()
    assert wide.max() <= spec.value_range[1]


@given(rows=st.integers(1, 5), length=st.integers(2, 40), seed=st.integers(0, 2**32), end=st.integers(0, 9))
def test_feeds_rows_end_at_their_mask(rows: int, length: int, seed: int, end: int) -> None:
    """The end token is at the last valid position of each row that has more than one, and only there."""
    specs = [
        InputTensorSpec(name="input_ids", shape=(rows, length), dtype="int64", value_range=(0, 9), last_value=end),
        InputTensorSpec(name="attention_mask", shape=(rows, length), dtype="int64"),
    ]
    feeds = make_feeds(specs, seed)
    valid = feeds["attention_mask"].sum(axis=-1)
    assert ((1 <= valid) & (valid < length)).all()
    ended = valid > 1
    assert np.array_equal(np.argmax(feeds["input_ids"] == end, axis=-1)[ended], (valid - 1)[ended])
    assert np.array_equal((feeds["input_ids"] == end).sum(axis=-1), ended.astype("int64"))


@given(
    rows=st.integers(1, 5), length=st.integers(2, 40), seed=st.integers(0, 2**32), parent=st.sampled_from(["", "a."])
)
def test_feeds_names_inside_structures_count_like_top_level_names(
    rows: int, length: int, seed: int, parent: str
) -> None:
    """Names of lengths, boxes, planes and padding masks are recognized by their last part."""
    specs = [
        InputTensorSpec(name=f"{parent}lengths", shape=(rows,), dtype="int64", value_range=(1, length)),
        InputTensorSpec(name=f"{parent}bbox", shape=(rows, length, 4), dtype="int64", value_range=(0, 99)),
        InputTensorSpec(name=f"{parent}pixel_mask", shape=(rows, length, length), dtype="int64"),
        InputTensorSpec(name=f"{parent}padding_mask", shape=(rows, length), dtype="bool"),
        InputTensorSpec(name=f"{parent}flags", shape=(rows, length), dtype="bool"),
    ]
    lengths, boxes, planes, hidden, flags = make_feeds(specs, seed).values()
    assert lengths[0] == length
    assert (np.diff(lengths) <= 0).all()
    assert (boxes[..., :2] <= boxes[..., 2:]).all()
    assert (planes == planes[:, :1]).all()
    assert not hidden[:, 0].any()
    assert hidden[:, -1].all()
    assert not flags.all(-1).any()
