"""The comparison of outputs with reference outputs."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from winml.modelkit.compare.fidelity import measure_fidelity
from winml.modelkit.compare.outputs import MINIMUM_SCALE, THRESHOLDS, Rounding, VerificationInfo, compare_outputs

Array = np.ndarray[Any, Any]


def compare(expected: Array, actual: Array, other: Array | None = None) -> VerificationInfo:
    """Compare one output; a second draw, equal on both sides, gives the reference its signal."""
    other = expected[..., ::-1] * np.asarray(3, expected.dtype) if other is None else other
    return compare_outputs([{"y": expected}, {"y": other}], [{"y": actual}, {"y": other}])


@pytest.mark.parametrize(
    ("dtype", "threshold"), [("float64", 1e-7), ("float32", 1e-4), ("float16", 1e-2), ("bfloat16", 5e-2)]
)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_compare_threshold_is_relative_to_the_largest_value(dtype: str, threshold: float, scale: float) -> None:
    """Half the threshold times the scale is accepted, twice is not, at any scale.

    Small values have no bound of their own.
    """
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    expected = (np.array([0.0, 0.5, -1.0]) * scale).astype(kind)
    assert threshold == THRESHOLDS[dtype]
    for share, is_equal in ((0.5, True), (2.0, False)):
        actual = expected.copy()
        actual[0] = share * threshold * scale
        info = compare(expected, actual)
        assert (is_equal, is_equal) == (info.comparisons[0].is_equal, info.is_verified)
        assert info.comparisons[0].relative_diff == pytest.approx(share * threshold, rel=0.02)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool"])
def test_compare_integers_must_be_equal(dtype: str) -> None:
    """A difference of one is refused, and the threshold is 0."""
    expected = np.array([0, 1, 1, 0]).astype(dtype)
    other = np.array([1, 0, 1, 1]).astype(dtype)
    assert compare(expected, expected, other).is_verified
    actual = expected.copy()
    actual[0] = 1
    info = compare(expected, actual, other)
    assert not info.is_verified
    assert 0.0 == info.worst.threshold


def test_compare_large_integers_that_differ_by_one_are_not_equal() -> None:
    """Integers beyond the precision of a float64 are still compared exactly."""
    expected = np.array([2**60, 2**60 + 1], dtype=np.int64)
    info = compare(expected, expected + np.array([1, 0]), other=np.array([1, 2], dtype=np.int64))
    assert not info.is_verified


@pytest.mark.parametrize(
    "actual",
    [
        [np.nan, 2.0, np.inf, -np.inf],
        [1.0, 2.0, np.inf, -np.inf],
        [1.0, np.nan, np.inf, np.inf],
        [1.0, np.nan, 3.0, -np.inf],
        [np.inf, np.nan, np.inf, -np.inf],
    ],
    ids=["NaN elsewhere", "NaN missing", "other sign", "infinity missing", "infinity too many"],
)
def test_compare_nan_and_infinity_must_be_in_the_same_places(actual: list[float]) -> None:
    """NaN and infinity are part of the output: same position, same sign."""
    expected = np.array([1.0, np.nan, np.inf, -np.inf], dtype=np.float32)
    assert compare(expected, expected.copy(), np.float32([3, 4, 5, 6])).is_verified
    info = compare(expected, np.array(actual, dtype=np.float32), np.array([3, 4, 5, 6], dtype=np.float32))
    assert not info.is_verified
    assert "NaN or infinity in different places" == info.worst.problem


def test_compare_nan_does_not_hide_a_difference_elsewhere() -> None:
    """Finite values beside a NaN are still compared."""
    expected = np.array([1.0, np.nan], dtype=np.float32)
    info = compare(expected, np.array([1.1, np.nan], dtype=np.float32), np.array([3, 4], dtype=np.float32))
    assert not info.is_verified
    assert info.worst.relative_diff == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        (np.ones((1, 2), np.float32), "PyTorch returns float32[2], ONNX Runtime float32[1, 2]"),
        (np.ones(2, np.float64), "PyTorch returns float32[2], ONNX Runtime float64[2]"),
    ],
)
def test_compare_shape_and_dtype_must_be_the_same(actual: Array, words: str) -> None:
    """Values that would be equal after a cast or a broadcast are different."""
    info = compare(np.ones(2, np.float32), actual)
    assert not info.is_verified
    assert words == info.worst.problem


def test_compare_zero_reference_accepts_only_zero() -> None:
    """A reference of zeros has no scale, so the output must be zeros."""
    zeros = np.zeros(3, np.float32)
    first = {"y": zeros, "signal": np.float32([1, 2])}
    second = {"y": zeros, "signal": np.float32([5, 2])}
    assert compare_outputs([first, second], [first, second]).is_verified
    info = compare_outputs([first, second], [{**first, "y": np.full(3, 1e-12, np.float32)}, second])
    assert not info.is_verified
    assert "y" == info.worst.name


def test_compare_equal_draws_are_no_signal() -> None:
    """A model with constant outputs would hide a wrong graph."""
    same = np.float32([1.0, 2.0])
    info = compare(same, same, other=same)
    assert all(item.is_equal for item in info.comparisons)
    assert (False, False) == (info.has_signal, info.is_verified)


def test_compare_signal_below_the_threshold_is_empty() -> None:
    """A change between the draws within the tolerance of the comparison proves nothing."""
    same = np.float32([1.0, 2.0])
    assert not compare(same, same, other=np.float32([1.0, 2.0 * (1 + 5e-5)])).has_signal
    assert compare(same, same, other=np.float32([1.0, 2.0 * (1 + 5e-4)])).has_signal


def test_compare_faded_reference_has_no_signal() -> None:
    """Values near zero are rounding errors and no reference, however much they change."""
    faded = np.float32([1.0, -2.0]) * np.float32(MINIMUM_SCALE) / 4
    assert not compare(faded, faded, other=-faded).has_signal


def test_compare_nan_everywhere_has_no_signal() -> None:
    """A reference with NaN alone proves nothing."""
    nothing = np.full(3, np.nan, np.float32)
    info = compare(nothing, nothing, other=nothing)
    assert (False, False) == (info.has_signal, info.is_verified)


def test_compare_signal_in_one_output_is_enough() -> None:
    """A constant output beside one that depends on the inputs is verified."""
    constant = np.float32([7.0])
    draws = [{"c": constant, "y": np.float32([1.0])}, {"c": constant, "y": np.float32([2.0])}]
    assert compare_outputs(draws, draws).is_verified


def test_compare_other_shape_in_the_second_draw_is_a_signal() -> None:
    """An output with a size that depends on the values depends on the inputs."""
    draws = [{"y": np.int64([1])}, {"y": np.int64([1, 1])}]
    assert compare_outputs(draws, draws).has_signal


def test_compare_second_draw_is_judged() -> None:
    """A graph that is right for the traced inputs only is refused, and the draw is named."""
    first, second = np.float32([1.0]), np.float32([2.0])
    info = compare_outputs([{"y": first}, {"y": second}], [{"y": first}, {"y": first}])
    assert not info.is_verified
    assert ("y", 2) == (info.worst.name, info.worst.draw)


def test_worst_output_exceeds_its_threshold_most() -> None:
    """A float16 difference below its threshold is less than a float32 difference above its own.

    A problem exceeds both.
    """
    half, single = np.float16([1.0]), np.float32([1.0])
    draw = {"half": half, "single": single}
    info = compare_outputs([draw], [{"half": np.float16([1.005]), "single": np.float32([1.001])}])
    assert "single" == info.worst.name
    info = compare_outputs([draw], [{"half": np.float16([[1.0]]), "single": np.float32([2.0])}])
    assert "half" == info.worst.name


def test_worst_of_verified_is_the_closest_to_its_threshold() -> None:
    """Equal outputs have a largest difference, too."""
    draw = {"a": np.float32([1.0]), "b": np.float32([1.0])}
    info = compare_outputs([draw], [{"a": np.float32([1.00001]), "b": np.float32([1.00002])}])
    assert "b" == info.worst.name


def test_as_record_is_json_without_infinities() -> None:
    """The record has numbers or null, never NaN or Infinity."""
    info = compare(np.float32([1.0, 2.0]), np.float32([1.0]))
    record = json.loads(json.dumps(info.as_record(), allow_nan=False))
    assert (False, True) == (record["is_verified"], record["has_signal"])
    assert [(None, False), (0.0, True)] == [(item["relative_diff"], item["is_equal"]) for item in record["outputs"]]
    assert ["problem" in item for item in record["outputs"]] == [True, False]


def test_compare_by_the_coarsest_dtype_inside_but_integers_exactly() -> None:
    """Half precision inside gives every float output the threshold of half precision, and the result says so."""
    draw = {"single": np.float32([1.0, 2.0]), "index": np.int64([1, 2])}
    other = {"single": np.float32([1.005, 2.0]), "index": np.int64([1, 2])}
    reference = [draw, {"single": np.float32([5.0, 2.0]), "index": np.int64([2, 2])}]
    assert not compare_outputs(reference, [other, reference[1]]).is_verified
    info = compare_outputs(reference, [other, reference[1]], rounding=Rounding(("float32", "float16", "int8")))
    assert info.is_verified
    assert [(1e-2, "float16"), (0.0, "")] == [(item.threshold, item.computed_in) for item in info.comparisons[:2]]
    shifted = {**other, "index": np.int64([1, 3])}
    assert not compare_outputs(reference, [shifted, reference[1]], rounding=Rounding(("float16",))).is_verified


def test_compare_finer_inner_dtype_has_no_effect() -> None:
    """float32 weights behind a float16 output do not change its threshold, nor the measure of signal."""
    reference = [{"y": np.float16([1.0])}, {"y": np.float16([3.0])}]
    info = compare_outputs(reference, reference, rounding=Rounding(("float32",)))
    assert (1e-2, "") == (info.worst.threshold, info.worst.computed_in)
    near = [{"y": np.float32([1.0])}, {"y": np.float32([1.001])}]
    assert compare_outputs(near, near).has_signal
    assert not compare_outputs(near, near, rounding=Rounding(("float16",))).has_signal


def _boxes_and_scores(seed: int) -> Array:
    """Return 40 rows with four columns of boxes in pixels and one of scores."""
    draws = np.random.default_rng(seed)
    return np.concatenate([draws.uniform(0, 2000, (40, 4)), draws.uniform(0, 1, (40, 1))], axis=1).astype(np.float32)


def test_wrong_column_is_detected_beside_larger_columns() -> None:
    """A wrong score of a tenth is small beside pixels, but is refused; rounding of the pixels is accepted."""
    reference = [{"boxes": _boxes_and_scores(0)}, {"boxes": _boxes_and_scores(1)}]
    rounding = np.random.default_rng(2).normal(0, 1e-3, (40, 5)).astype(np.float32)
    rounded = [{"boxes": outputs["boxes"] + rounding} for outputs in reference]
    assert compare_outputs(reference, rounded).is_verified
    wrong = [{"boxes": outputs["boxes"].copy()} for outputs in rounded]
    wrong[1]["boxes"][:, 4] += 0.1
    result = compare_outputs(reference, wrong)
    assert (False, 2) == (result.is_verified, result.worst.draw)
    assert result.worst.relative_diff < result.worst.threshold
    assert "index 4" in result.worst.problem


def test_constant_column_is_detected_if_the_reference_varies() -> None:
    """A constant beside values a million times as large is within the tolerance of each draw."""
    reference = [{"y": _boxes_and_scores(seed) * np.float32([1e3, 1e3, 1e3, 1e3, 1])} for seed in range(3)]
    frozen = [{"y": outputs["y"].copy()} for outputs in reference]
    for outputs in frozen:
        outputs["y"][:, 4] = reference[0]["y"][:, 4]
    result = compare_outputs(reference, frozen)
    assert not result.is_verified
    assert [True, False, False] == [item.is_equal for item in result.comparisons]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_compare_slice_of_small_values_is_judged_by_its_scale_along_any_axis(axis: int) -> None:
    """Two slices may have different units; rounding of the large slice is no reason to refuse the small one."""
    rng = np.random.default_rng(0)
    large, small = (rng.standard_normal((4, 4)).astype(np.float32) for _ in range(2))
    large *= 1e6
    expected = np.stack([large, small], axis)
    rounded = np.stack([np.nextafter(large, np.float32(np.inf)), small + np.float32(0.1)], axis)
    wrong = np.stack([np.nextafter(large, np.float32(np.inf)), small * 20], axis)
    assert compare_outputs([{"y": expected}], [{"y": rounded}]).comparisons[0].is_equal
    (comparison,) = compare_outputs([{"y": expected}], [{"y": wrong}]).comparisons
    assert not comparison.is_equal
    assert comparison.problem.startswith(f"index 1 of {'the last axis' if axis == 2 else f'axis {axis}'}")


def test_compare_slice_constant_since_the_first_draw_is_refused() -> None:
    """A constant slice beside large values is within the threshold of each draw."""
    large, small = np.full((2, 4), 1e9, np.float32), np.arange(8, dtype=np.float32).reshape(2, 4)
    reference = [{"y": np.stack([large * draw, small * draw], 1)} for draw in (1, 2)]
    rounded = np.nextafter(large, np.float32(np.inf))
    answers = [{"y": np.stack([rounded * draw, small], 1)} for draw in (1, 2)]
    comparisons = compare_outputs(reference, answers).comparisons
    assert [item.is_equal for item in comparisons] == [True, False]
    assert "samples 1 and 2" in comparisons[1].problem


@pytest.mark.parametrize(
    ("dtype", "constant"),
    [("float32", np.finfo(np.float32).min), ("float32", -1e9), ("float32", -1e6), ("float16", -65504)],
)
def test_scores_beside_a_large_constant_are_judged_by_their_own_scale(dtype: str, constant: float) -> None:
    """A wrong score is refused, and rounding is accepted, beside blocked actions; other inputs change the scores."""
    scores = np.random.default_rng(0).standard_normal((2, 3, 6)).astype(dtype)

    def blocked(values: Array) -> list[dict[str, Array]]:
        rows = np.concatenate([values, np.full((2, 3, 1), constant, dtype)], -1)
        return [{"y": sample} for sample in rows]

    rounded, wrong = np.nextafter(scores, np.array(np.inf, dtype)), scores.copy()
    wrong[..., 0] *= 3
    accepted = compare_outputs(blocked(scores), blocked(rounded))
    assert accepted.is_verified
    assert accepted.has_signal
    assert not any(item.is_equal for item in compare_outputs(blocked(scores), blocked(wrong)).comparisons)


def _near_zero(seed: int) -> Array:
    """Return probabilities up to 1e-4."""
    return np.random.default_rng(seed).uniform(0, 1e-4, (2, 50)).astype(np.float32)


def test_probability_near_zero_may_differ_by_units_of_1() -> None:
    """Other values may not differ so, nor a probability by more; the record has the threshold."""
    reference = [{"y": _near_zero(0)}, {"y": _near_zero(1)}]
    near, far = ([{"y": draw["y"] + np.float32(off)} for draw in reference] for off in (2e-7, 2e-6))
    probabilities = Rounding(probabilities=lambda: frozenset("y"))
    assert not compare_outputs(reference, near).is_verified
    info = compare_outputs(reference, near, rounding=probabilities)
    assert info.is_verified
    assert info.worst.threshold == pytest.approx(8 * 2**-23 / info.worst.scale)
    assert not compare_outputs(reference, far, rounding=probabilities).is_verified


def test_probability_changed_by_rounding_only_is_no_signal() -> None:
    """A change of the reference within the accepted difference proves nothing."""
    reference = [{"y": _near_zero(0) * np.float32(1e-3)}, {"y": _near_zero(1) * np.float32(1e-3)}]
    answers = [{"y": np.zeros_like(draw["y"])} for draw in reference]
    assert not compare_outputs(reference, answers, rounding=Rounding(probabilities=lambda: frozenset("y"))).has_signal


def test_equal_probabilities_keep_their_threshold() -> None:
    """A softmax over a large vocabulary still has a signal."""
    reference = [{"y": _near_zero(seed) * np.float32(1e-3)} for seed in (0, 1)]
    info = compare_outputs(reference, reference, rounding=Rounding(probabilities=lambda: frozenset("y")))
    assert (True, 1e-4) == (info.is_verified, info.worst.threshold)


def test_sequences_of_different_lengths_are_compared() -> None:
    """An element that a sample lacks is compared in the other samples."""
    short, long = {"y[0]": np.float32([1, 2])}, {"y[0]": np.float32([3, 4]), "y[1]": np.float32([5, 6])}
    for samples in ([short, long], [long, short]):
        assert compare_outputs(samples, samples).agrees
        assert measure_fidelity(samples, samples, 20.0).is_verified
