"""Values fed to a model: valid, and with an effect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from winml.modelkit.errors import UsageError
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.feeds import make_feeds


def _spec(name: str, shape: tuple[int | str, ...], dtype: str = "int64", **others: Any) -> InputTensorSpec:
    return InputTensorSpec(name=name, shape=shape, dtype=dtype, **others)


def test_feeds_depend_on_the_seed() -> None:
    """A draw depends on its seed."""
    specs = [_spec("ids", (3, 50), value_range=(0, 999)), _spec("pixels", (2, 9), "float32")]
    first, again, other = make_feeds(specs, 1), make_feeds(specs, 1), make_feeds(specs, 2)
    for name in ("ids", "pixels"):
        assert np.array_equal(first[name], again[name])
        assert not np.array_equal(first[name], other[name])


def test_feeds_known_seed_gives_known_values() -> None:
    """The draw is the same on every platform: the expected values were recorded on Linux."""
    specs = [_spec("ids", (6,), value_range=(0, 30521)), _spec("x", (3,), "float64", value_range=(0, 1))]
    feeds = make_feeds(specs, 0)
    assert [30301, 18094, 8098, 29252, 1821, 1443] == feeds["ids"].tolist()
    assert [0.80188127, 0.84514483, 0.95614584] == feeds["x"].round(8).tolist()


def test_feeds_input_is_independent_of_other_inputs() -> None:
    """An input's draw depends on its name and the seed only."""
    ids = _spec("ids", (40,), value_range=(0, 99))
    alone = make_feeds([ids], 3)["ids"]
    assert np.array_equal(alone, make_feeds([_spec("other", (7,), "float32"), ids], 3)["ids"])


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool"])
@pytest.mark.parametrize("length", [2, 3, 128])
def test_feeds_mask_hides_the_end_of_every_row(dtype: str, length: int) -> None:
    """Each row has ones, then zeros, with at least one value of each."""
    mask = make_feeds([_spec("attention_mask", (16, length), dtype, value_range=(0, 1))], 0)["attention_mask"]
    assert dtype == str(mask.dtype)
    rows = mask.astype(int)
    assert (np.diff(rows, axis=-1) <= 0).all()
    assert (rows[:, 0] == 1).all()
    assert (rows[:, -1] == 0).all()


def test_feeds_without_padding_differ_in_the_mask_only() -> None:
    """Only the mask changes."""
    specs = [_spec("input_ids", (2, 8), value_range=(0, 99)), _spec("attention_mask", (2, 8), value_range=(0, 1))]
    padded, whole = make_feeds(specs, 0), make_feeds(specs, 0, with_padding=False)
    assert (whole["attention_mask"] == 1).all()
    assert not (padded["attention_mask"] == 1).all()
    assert (whole["input_ids"] == padded["input_ids"]).all()


def test_feeds_mask_of_length_one_is_valid() -> None:
    """A row of one position cannot be masked."""
    assert [[1], [1]] == make_feeds([_spec("attention_mask", (2, 1))], 0)["attention_mask"].tolist()


@pytest.mark.parametrize(("past", "window"), [(6, 4), (2, 4), (0, 4), (6, None)])
def test_feeds_mask_over_a_cache_with_a_window_has_no_gaps(past: int, window: int | None) -> None:
    """The first tokens of a cache with a window are masked, so every token attends to itself.

    The last tokens of a cache without a window are masked.
    """
    slot = {"layer": 0, "kind": "key", "window": window}
    key = _spec("past_key_values.0.key", (3, 1, past or "past", 8), "float32", cache=slot)
    mask = make_feeds([key, _spec("attention_mask", (3, past + 3))], 0, sizes={"past": past})["attention_mask"]
    hidden = (mask == 0).sum(-1)
    if window is None:
        assert all((row[-count:] == 0).all() for row, count in zip(mask, hidden, strict=True))
        return
    assert (hidden.min() > 0) == (past > 0)
    assert hidden.max() <= past
    assert all((row[count:] == 1).all() for row, count in zip(mask, hidden, strict=True))


def test_feeds_pixel_mask_hides_trailing_columns() -> None:
    """All rows of one image are masked from the same column on."""
    mask = make_feeds([_spec("pixel_mask", (3, 5, 8))], 0)["pixel_mask"]
    assert (mask == mask[:, :1, :]).all()
    assert (mask[:, :, -1] == 0).all()


def test_feeds_last_value_is_at_the_end_of_each_valid_row_only() -> None:
    """A model that looks for the end token finds exactly one, at the end of the mask."""
    specs = [
        _spec("input_ids", (8, 20), value_range=(0, 5), last_value=2),
        _spec("attention_mask", (8, 20)),
        _spec("decoder_input_ids", (8, 6), value_range=(0, 5), last_value=5),
    ]
    feeds = make_feeds(specs, 4)
    ends = feeds["attention_mask"].sum(axis=-1) - 1
    assert np.argwhere(feeds["input_ids"] == 2).tolist() == [[row, end] for row, end in enumerate(ends)]
    assert np.argwhere(feeds["decoder_input_ids"] == 5).tolist() == [[row, 5] for row in range(8)]


def test_feeds_first_values_begin_each_row_and_are_shown_by_the_mask() -> None:
    """Placeholder tokens come first, a grid keeps its values, and no mask hides either."""
    specs = [
        _spec("input_ids", (6, 9), value_range=(0, 5), first_values=((8, 6), (9, 1)), last_value=2),
        _spec("attention_mask", (6, 9)),
        _spec("grid_thw", (2, 3), value_range=(0, 4), first_values=((1, 1), (4, 2))),
        _spec("positions", (2, 2, 2), value_range=(0, 1), first_values=((0, 2), (1, 1), (0, 1))),
    ]
    feeds = make_feeds(specs, 0)
    assert [[8] * 6 + [9]] * 6 == feeds["input_ids"][:, :7].tolist()
    assert (feeds["input_ids"][:, 7:] <= 5).all()
    assert (feeds["attention_mask"][:, :8] == 1).all()
    assert [[1, 4, 4]] * 2 == feeds["grid_thw"].tolist()
    assert [[[0, 0], [1, 0]]] * 2 == feeds["positions"].tolist()


@pytest.mark.parametrize("value", [0, 1])
def test_feeds_mask_with_one_valid_value_is_all_that_value(value: int) -> None:
    """The mask hides nothing, or everything, in its own dtype."""
    mask = make_feeds([_spec("frames_mask", (2, 7), "bool", value_range=(value, value))], 0)["frames_mask"]
    assert ("bool", [[bool(value)] * 7] * 2) == (str(mask.dtype), mask.tolist())


def test_feeds_box_has_its_corners_in_order() -> None:
    """Models embed widths and heights, which are never negative."""
    boxes = make_feeds([_spec("bbox", (2, 30, 4), value_range=(0, 1023))], 0)["bbox"]
    assert (boxes[..., :2] <= boxes[..., 2:]).all()
    assert len(np.unique(boxes)) > 100


def test_feeds_floats_are_standard_normal_without_a_range() -> None:
    """Normalized inputs have such values."""
    values = make_feeds([_spec("pixel_values", (100, 100), "float32")], 0)["pixel_values"]
    assert "float32" == str(values.dtype)
    assert abs(float(values.mean())) < 0.05
    assert abs(float(values.std()) - 1) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_feeds_floats_have_their_dtype_and_stay_in_range(dtype: str) -> None:
    """Rounding to a narrow dtype stays inside the range."""
    values = make_feeds([_spec("x", (500,), dtype, value_range=(0.1, 0.3))], 0)["x"]
    assert dtype == str(values.dtype)
    assert 0.1 <= float(values.astype("float64").min())
    assert float(values.astype("float64").max()) <= 0.3


def test_feeds_dynamic_dimension_takes_its_size() -> None:
    """The size is looked up by the name of the dimension."""
    spec = _spec("x", ("batch", 3), "float32")
    assert (5, 3) == make_feeds([spec], 0, sizes={"batch": 5})["x"].shape
    with pytest.raises(UsageError, match="'batch'"):
        make_feeds([spec], 0)


@pytest.mark.parametrize(
    ("dtype", "value_range"), [("uint8", (0, 256)), ("int8", (-129, 0)), ("int64", (0.2, 0.8)), ("bool", (0, 2))]
)
def test_feeds_range_without_values_of_the_dtype_is_refused(dtype: str, value_range: tuple[float, float]) -> None:
    """A range that the dtype cannot hold is an error of the user."""
    with pytest.raises(UsageError, match="not a range"):
        make_feeds([_spec("x", (1,), dtype, value_range=value_range)], 0)


def test_feeds_scalar_and_single_value_range() -> None:
    """A scalar is an array without dimensions; a range of one value gives that value."""
    feeds = make_feeds([_spec("step", (), value_range=(7, 7)), _spec("temperature", (), "float32")], 0)
    assert 7 == feeds["step"]
    assert () == feeds["temperature"].shape


def test_feeds_only_token_of_a_row_differs_between_draws() -> None:
    """The only token of a row is not fixed to the end token, which would hide the model's behaviour."""
    spec = _spec("input_ids", (1, 1), value_range=(0, 1000), last_value=2)
    draws = {int(make_feeds([spec], seed)["input_ids"].item()) for seed in range(8)}
    assert len(draws) > 1


@pytest.mark.parametrize("length", [1, 2, 5])
def test_feeds_flags_of_a_dynamic_length_hide_no_row(length: int) -> None:
    """No row is all true, which would hide it in ``torch.nn``, and no row of several flags is all false."""
    spec = InputTensorSpec(name="pad", dtype="bool", shape=(64, "length"))
    flags = make_feeds([spec], seed=3, sizes={"length": length})["pad"]
    assert not flags.all(axis=-1).any()
    assert length == 1 or flags.any(axis=-1).all()


def test_feeds_offsets_rise_from_zero_within_the_row_of_indices() -> None:
    """``nn.EmbeddingBag`` needs such offsets, at any number of entries and bags."""
    specs = [
        InputTensorSpec(name="ids", dtype="int64", shape=("entries",), value_range=(0, 49)),
        InputTensorSpec(name="offsets", dtype="int64", shape=("bags",), value_range=(0, 7)),
    ]
    for entries, bags in ((12, 3), (1, 3), (200, 40)):
        offsets = make_feeds(specs, seed=1, sizes={"entries": entries, "bags": bags})["offsets"]
        assert 0 == offsets[0]
        assert (np.diff(offsets) >= 0).all()
        assert offsets.max() < entries
