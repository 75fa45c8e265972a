"""Fidelity of the outputs of a quantized graph."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from winml.modelkit.compare.fidelity import (
    MOST_DB,
    FidelityInfo,
    FidelitySum,
    QualitySamples,
    SourceFidelity,
    measure_fidelity,
)
from winml.modelkit.compare.words import comparison_words, fidelity_words

Array = np.ndarray[Any, Any]
SIGNAL = np.linspace(-1, 1, 8, dtype=np.float32)


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        (SIGNAL[:4], "shape [4] instead of [8]"),
        (
            np.where(SIGNAL > 0.9, np.nan, SIGNAL),
            "NaN or infinity in different places: 1 of 8 values, first at [7]: nan instead of 1",
        ),
        (
            np.where(SIGNAL < 0, np.inf, SIGNAL),
            "NaN or infinity in different places: 4 of 8 values, first at [0]: inf instead of -1",
        ),
    ],
)
def test_incomparable_output_has_a_reason(actual: Array, words: str) -> None:
    """An output that cannot be compared fails any minimum, is the worst, and its record is valid JSON."""
    info = measure_fidelity([{"good": SIGNAL, "bad": SIGNAL}], [{"good": SIGNAL, "bad": actual}], -MOST_DB)
    assert ("bad", words, False) == (info.worst.name, info.worst.problem, info.is_verified)
    assert words in comparison_words(info)
    record = json.loads(json.dumps(info.as_record(), allow_nan=False))
    assert (None, words) == (record["outputs"][1]["relative_error"], record["outputs"][1]["problem"])


@pytest.mark.parametrize(("expected", "actual"), [(np.nan, np.inf), (np.inf, -np.inf), (-np.inf, np.nan)])
def test_non_finite_values_must_be_equal(expected: float, actual: float) -> None:
    """NaN differs from infinity, and minus infinity, a masked score, from infinity."""
    infos = [np.where(SIGNAL > 0.9, value, SIGNAL) for value in (expected, actual)]
    info = measure_fidelity([{"y": infos[0]}], [{"y": infos[1]}], 10.0)
    assert ("NaN or infinity in different places", False) == (info.worst.problem.partition(":")[0], info.is_verified)


def test_output_without_finite_values_is_no_evidence() -> None:
    """Equal NaN verify nothing in any draw; an output without elements is no problem."""
    draw = {"y": SIGNAL, "z": np.full(3, np.nan), "empty": np.zeros((2, 0))}
    info = measure_fidelity([draw], [draw], 10.0)
    assert ("z", "the reference returns only NaN", False) == (
        info.worst.name,
        info.worst.problem,
        info.is_verified,
    )
    assert ["", ""] == [output.problem for output in info.outputs if output.name != "z"]


def test_mask_inside_a_graph_may_be_infinite_everywhere() -> None:
    """Only an output needs finite values."""
    mask = np.full(3, -np.inf)
    total = FidelitySum("mask")
    total.add(mask, mask)
    same = total.of_value()
    assert ("", MOST_DB) == (same.problem, same.sqnr_db)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.bool_])
def test_symbols_are_equal_or_not(dtype: type[np.generic]) -> None:
    """A label off by one is as wrong as one off by a thousand: the share of equal labels counts."""
    expected = np.array([1, 0] * 50).astype(dtype)
    actual = expected.copy()
    actual[:5] = ~actual[:5] if dtype is np.bool_ else actual[:5] + 1
    output = measure_fidelity([{"y": expected}], [{"y": actual}], 9.0).worst
    assert (0.95, 0.95) == (output.equal_share, output.cosine)
    assert output.sqnr_db == pytest.approx(10.0)
    far = measure_fidelity([{"y": expected * 1000}], [{"y": expected * 1000 + 1}], 9.0)
    if dtype is not np.bool_:
        assert (0.0, False) == (far.worst.equal_share, far.is_verified)
        assert "0.0 %" in comparison_words(far)


def test_small_integers_are_amounts() -> None:
    """A pixel that is off by one has a small error."""
    image = np.arange(100, 200, dtype=np.uint8)
    info = measure_fidelity([{"y": image}], [{"y": image + np.uint8(1)}], 30.0)
    assert (None, True) == (info.worst.equal_share, info.is_verified)


def test_all_draws_are_added_up() -> None:
    """The power of all draws is added, so a draw without signal does not hide the noise of another draw."""
    draws = [{"y": SIGNAL}, {"y": np.zeros(3, np.float32)}]
    answers = [{"y": SIGNAL}, {"y": np.full(3, 0.1, np.float32)}]
    info = measure_fidelity(draws, answers, 10.0)
    power = float((SIGNAL.astype(float) ** 2).sum())
    assert info.worst.sqnr_db == pytest.approx(10 * np.log10(power / 0.03), abs=1e-4)
    assert 2 == info.draws


def test_error_of_a_single_number_is_measured_against_all_samples() -> None:
    """A sample near zero has no useful ratio of its own: the interval is of errors beside the mean signal."""
    values, error = [10.0, -8.0, 0.01, 9.0], 0.1
    draws = [{"logits": np.array([[value]], np.float32)} for value in values]
    answers = [{"logits": draw["logits"] + np.float32(error)} for draw in draws]
    info = measure_fidelity(draws, answers, 30.0, QualitySamples("processor", 4, 0))
    expected = 10 * np.log10(np.mean(np.square(values)) / error**2)
    assert info.worst.sqnr_db == pytest.approx(expected, abs=1e-3)
    assert info.worst.lower_db == pytest.approx(expected, abs=1e-3)
    assert info.is_verified
    # An output of several numbers has a ratio for each sample.
    pairs = [{"y": np.array([value, value], np.float32)} for value in values]
    answers = [{"y": draw["y"] + np.float32(error)} for draw in pairs]
    assert not measure_fidelity(pairs, answers, 30.0, QualitySamples("processor", 4, 0)).is_verified


@pytest.mark.parametrize("count", [2, 4, 16, 19])
def test_one_wrong_sample_of_few_is_the_lower_end(count: int) -> None:
    """The lower end is an observed one: between two samples, it would be above the SQNR of all samples together."""
    draws = [{"y": SIGNAL}] * count
    wrong = {"y": SIGNAL * np.float32(1 + 10 ** (-25 / 20))}
    info = measure_fidelity(draws, [wrong, *draws[1:]], 30.0, QualitySamples("processor", count, 0))
    assert info.worst.lower_db == pytest.approx(25, abs=1e-3)
    assert not info.is_verified


def test_lower_end_is_at_most_the_ratio_of_all_samples() -> None:
    """One wrong sample of 100 is outside the interval, but the limit does not apply to more than the whole ratio."""
    draws = [{"y": SIGNAL}] * 100
    info = measure_fidelity(draws, [{"y": 2 * SIGNAL}, *draws[1:]], 30.0, QualitySamples("processor", 100, 0))
    assert info.worst.lower_db == info.worst.sqnr_db == pytest.approx(20, abs=1e-3)


def test_worst_output_is_the_output_judged_by_limits() -> None:
    """The worst output has the lowest lower end of its interval, not the lowest ratio over all samples."""
    steady = [np.full(4, 1.0, np.float32)] * 4
    draws = [{"steady": value, "varied": value} for value in steady]
    errors = [(0.05, 0.03), (0.05, 0.03), (0.05, 0.03), (0.05, 0.085)]
    answers = [
        {"steady": draw["steady"] + np.float32(a), "varied": draw["varied"] + np.float32(b)}
        for draw, (a, b) in zip(draws, errors, strict=True)
    ]
    info = measure_fidelity(draws, answers, 20.0, QualitySamples("processor", 4, 0))
    assert info.outputs[0].sqnr_db < info.outputs[1].sqnr_db
    assert "varied" == info.worst.name
    assert info.quality is not None
    assert "varied" == info.quality["worst_output"]


def test_values_missing_on_both_sides_are_ignored() -> None:
    """A mask of minus infinity on both sides is no difference."""
    masked = np.array([1.0, -np.inf, np.nan, 2.0])
    info = measure_fidelity([{"y": masked}], [{"y": masked * 1.01}], 30.0)
    assert info.worst.sqnr_db == pytest.approx(40, abs=1e-6)
    assert info.is_verified


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.zeros(4, np.float32), "only zeros"),
        (np.full(4, np.nan, np.float32), "only NaN"),
        (np.array([0, -np.inf, 0]), "only zeros and infinities"),
        (np.zeros((0, 4)), "no value"),
    ],
)
def test_reference_without_signal_is_no_evidence(values: Array, words: str) -> None:
    """Equal zeros are no verification; the message names the constant values."""
    info = measure_fidelity([{"y": values}], [{"y": values}], 10.0)
    assert (False, False) == (info.has_signal, info.is_verified)
    assert f"not checked: the source returns {words}, so a wrong graph would go unnoticed" in comparison_words(info)
    assert info.as_record().get("answers_only") == (None if info.silent is None else list(info.silent))


def test_reference_that_never_changes_is_no_evidence() -> None:
    """Equal constants are not checked; a result that differs from them is refused all the same."""
    constant = np.full(4, 3, np.float32)
    info = measure_fidelity([{"y": constant}] * 2, [{"y": constant}] * 2, 10.0)
    assert (False, False, None) == (info.is_verified, info.is_refused, info.silent)
    assert "not checked" in comparison_words(info)
    assert measure_fidelity([{"y": constant}] * 2, [{"y": -constant}] * 2, 10.0).is_refused


@pytest.mark.parametrize(("actual", "is_verified"), [(["yes", "no"], True), (["yes", "yes"], False)])
def test_texts_are_equal_or_not(actual: list[str], is_verified: bool) -> None:
    """A label has no noise: its texts are equal or different."""
    expected = {"y": SIGNAL, "label": np.array(["yes", "no"])}
    info = measure_fidelity([expected], [{"y": SIGNAL, "label": np.array(actual)}], 10.0)
    assert is_verified == info.is_verified
    assert ("" if is_verified else "different texts") == info.worst.problem


def test_noise_without_signal_is_the_lowest_ratio() -> None:
    """A ratio of zero signal to noise has no logarithm."""
    info = measure_fidelity([{"y": np.zeros(2), "z": SIGNAL}], [{"y": np.ones(2), "z": SIGNAL}], 10.0)
    assert ("y", -MOST_DB, 0.0) == (info.worst.name, info.worst.sqnr_db, info.worst.cosine)


def test_missing_output_is_named() -> None:
    """A quantized graph has the outputs of its reference."""
    info = measure_fidelity([{"y": SIGNAL, "z": SIGNAL}], [{"y": SIGNAL}], 10.0)
    assert ("z", "is missing", False) == (info.worst.name, info.worst.problem, info.is_verified)


def test_sum_over_draws_equals_one_long_draw() -> None:
    """Draws of different lengths add up to the result of one long draw; a problem of one draw is one of the sum."""
    expected = np.float32([1, -2, 3, 4, 5])
    actual = np.float32([1, -2.5, 3, 4.25, 5])
    total = FidelitySum("y")
    for part in (slice(0, 2), slice(2, 5)):
        total.add(expected[part], actual[part])
    at_once = FidelitySum("y")
    at_once.add(expected, actual)
    found, whole = total.of_value(), at_once.of_value()
    assert whole == replace(found, spread=whole.spread, by_sample_db=whole.by_sample_db)
    assert found.spread is not None
    # 5 / 0.25 and 50 / 0.0625 in decibels.
    assert (13.01, 29.03) == (round(found.spread.min, 2), round(2 * found.spread.median - found.spread.min, 2))
    total.add(expected, actual[:2])
    total.add(expected, actual)
    assert "shape [2] instead of [5]" == total.of_output().problem


def test_compiled_file_is_judged_relative_to_its_quantized_source() -> None:
    """A compiled file may miss the minimum only if the quantized source does, and by at most 6 dB below the source.

    A ratio near 0 dB is never accepted.
    """
    generator = np.random.default_rng(0)
    expected = generator.standard_normal(4000)

    def fidelity_of(decibels: float) -> list[dict[str, Array]]:
        return [{"y": expected + 10 ** (-decibels / 20) * generator.standard_normal(4000)}]

    def judged(source: float, compiled: float, margin: float | None = 6.0) -> FidelityInfo:
        own = measure_fidelity([{"y": expected}], fidelity_of(source), 30.0)
        found = measure_fidelity([{"y": expected}], fidelity_of(compiled), 30.0)
        return replace(found, beside=SourceFidelity("float.onnx", "quantized.onnx", own.outputs, margin))

    assert judged(28.0, 24.7).is_near  # its own loss, and as much again
    assert not judged(28.0, 20.0).is_near
    assert not judged(60.0, 29.0).is_near  # the source reaches the minimum
    assert judged(60.0, 31.0).is_near
    assert not judged(28.0, 24.7, margin=None).is_near  # a minimum that was requested
    assert not judged(5.0, 0.1).is_near  # as an output of zeros
    words = fidelity_words(judged(28.0, 20.0))
    assert "against float.onnx; quantized.onnx reaches SQNR 28." in words
    record = judged(28.0, 24.7).as_record()
    assert ("quantized.onnx", 6.0) == (record["source"]["source"], record["source"]["margin_db"])


@pytest.mark.parametrize(
    ("name", "answer", "is_verified"),
    [
        ("logits", [0.2, 0.9], True),  # equal class, 6 dB
        ("logits", [1.0, 0.9], False),  # another class, 20 dB
        ("scores", [0.2, 0.9], False),
        ("scores", [1.0, 0.9], True),
    ],
)
def test_predictions_decide_on_scores_and_decibels_on_other_outputs(
    name: str, answer: list[float], is_verified: bool
) -> None:
    reference = [{name: np.array([[0.9 * scale, scale]], np.float32)} for scale in (1, 2, 3, 4)]
    answers = [{name: np.array([answer], np.float32) * scale} for scale in (1, 2, 3, 4)]
    samples = QualitySamples("processor", 4, 0)
    assert is_verified == measure_fidelity(reference, answers, 10.0, samples, least_agreement=0.85).is_verified
    by_decibels = measure_fidelity(reference, answers, 10.0, samples)
    assert by_decibels.is_verified is (by_decibels.worst.lower_db >= 10)


IDS, MASK = np.ones((2, 4), np.int64), np.array([[1, 1, 1, 1], [1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("shape", "inputs", "is_left_out"),
    [
        ((2, 4, 8), {"input_ids": IDS, "attention_mask": MASK}, True),
        ((2, 4, 8), {"input_features": np.ones((2, 4, 8)), "attention_mask": MASK}, True),
        ((2, 4, 8), {"input_ids": IDS, "attention_mask": np.pad(MASK, ((0, 0), (3, 0)))}, True),  # a cache of 3 tokens
        ((2, 4), {"input_ids": IDS, "attention_mask": MASK}, False),  # [batch, hidden], with 4 of each
        ((2, 4, 4, 8), {"input_ids": IDS, "attention_mask": MASK}, False),  # 4 heads
        ((2, 5, 8), {"input_ids": IDS, "attention_mask": MASK}, False),
        ((2, 4, 8), {"input_ids": np.ones((2, 7), np.int64), "attention_mask": np.pad(MASK, ((0, 0), (3, 0)))}, False),
        ((2, 4, 8), {"input_ids": IDS, "attention_mask": MASK - 1.0}, False),  # added to scores
        ((2, 4, 8), {"input_ids": IDS, "attention_mask": MASK * 0}, False),  # shows nothing
        ((2, 4, 8), {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS}, False),
        ((2, 4, 8), {"input_ids": IDS}, False),
    ],
)
def test_values_of_padding_do_not_count(shape: tuple[int, ...], inputs: dict[str, Array], is_left_out: bool) -> None:
    """An error at a hidden position is no error of an output with a vector for each token; elsewhere, it is."""
    expected = np.random.default_rng(0).standard_normal(shape)
    wrong, hidden = expected.copy(), expected.copy()
    wrong[1, 0], hidden[1, -1] = np.nan, np.nan
    outputs = [measure_fidelity([{"y": expected}], [{"y": y}], 10.0, inputs=[inputs]).worst for y in (wrong, hidden)]
    assert [True, not is_left_out] == [bool(output.problem) for output in outputs]


@pytest.mark.parametrize(("name", "kind"), [("start_logits", np.float32), ("end_logits", np.float32), ("y", np.int64)])
def test_numbers_of_padding_do_not_count(name: str, kind: type) -> None:
    """Outputs with one number for each token: scores of question answering, whose answer is no padding, and ids."""
    expected = np.arange(8, dtype=kind).reshape(2, 4)
    wrong, hidden = expected.copy(), expected.copy()
    wrong[1, :2], hidden[1, 2:] = wrong[1, 1::-1], 0
    inputs = [{"input_ids": IDS, "attention_mask": MASK}]
    outputs = [measure_fidelity([{name: expected}], [{name: y}], 10.0, inputs=inputs).worst for y in (wrong, hidden)]
    assert [True, False] == [output.sqnr_db < 100 for output in outputs]
    assert ([None, None] if name == "y" else [0.5, 1.0]) == [output.top1_agreement for output in outputs]


@pytest.mark.parametrize("lowest", [-np.inf, np.finfo(np.float32).min, np.finfo(np.float16).min], ids=str)
def test_masks_of_two_minimums_hide_alike(lowest: float) -> None:
    """A mask of integers has a minimum near the scores; one that is no lower than they are hides nothing."""
    scores = np.array([[-3.0, 2.0, lowest], [1.0, lowest, lowest]], np.float32)
    near, wrong = np.maximum(scores, -101.0), np.maximum(scores, -2.0)
    outputs = [measure_fidelity([{"y": scores}], [{"y": y}], 10.0).worst for y in (near, wrong)]
    are_hidden = lowest < np.finfo(np.float16).min
    assert [are_hidden, False] == [output.sqnr_db > 100 for output in outputs]
