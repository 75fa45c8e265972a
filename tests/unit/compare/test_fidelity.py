"""What is left of the answers of a graph that computes with fewer bits."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from winml.modelkit.compare.fidelity import MOST_DB, measure_fidelity
from winml.modelkit.compare.words import comparison_words

Array = np.ndarray[Any, Any]
SIGNAL = np.linspace(-1, 1, 8, dtype=np.float32)


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        (SIGNAL[:4], "shape [4] instead of [8]"),
        (np.where(SIGNAL > 0.9, np.nan, SIGNAL), "NaN or infinity in different places"),
        (np.where(SIGNAL > 0.9, np.inf, SIGNAL), "NaN or infinity in different places"),
    ],
)
def test_answer_that_cannot_be_compared_says_why(actual: Array, words: str) -> None:
    """It is never near enough, comes first, and is JSON all the same."""
    info = measure_fidelity([{"good": SIGNAL, "bad": SIGNAL}], [{"good": SIGNAL, "bad": actual}], -MOST_DB)
    assert ("bad", words, False) == (info.worst.name, info.worst.problem, info.is_verified)
    assert words in comparison_words(info)
    record = json.loads(json.dumps(info.as_record(), allow_nan=False))
    assert (None, words) == (record["outputs"][1]["relative_error"], record["outputs"][1]["problem"])


def test_all_draws_count_together() -> None:
    """A draw without signal does not hide the noise of one with; the power of both is added."""
    draws = [{"y": SIGNAL}, {"y": np.zeros(3, np.float32)}]
    answers = [{"y": SIGNAL}, {"y": np.full(3, 0.1, np.float32)}]
    info = measure_fidelity(draws, answers, 10.0)
    power = float((SIGNAL.astype(float) ** 2).sum())
    assert info.worst.sqnr_db == pytest.approx(10 * np.log10(power / 0.03), abs=1e-4)
    assert 2 == info.draws


def test_where_both_sides_have_no_value_the_others_count() -> None:
    """A mask of minus infinity is no difference."""
    masked = np.array([1.0, -np.inf, np.nan, 2.0])
    info = measure_fidelity([{"y": masked}], [{"y": masked * 1.01}], 30.0)
    assert info.worst.sqnr_db == pytest.approx(40, abs=1e-6)
    assert info.is_verified


@pytest.mark.parametrize("values", [np.zeros(4, np.float32), np.full(4, np.nan, np.float32), np.array(["a"])])
def test_reference_without_signal_proves_nothing(values: Array) -> None:
    """Equal zeros are no verification."""
    info = measure_fidelity([{"y": values}], [{"y": values}], 10.0)
    assert (False, False) == (info.has_signal, info.is_verified)
    assert comparison_words(info).startswith("inconclusive")


@pytest.mark.parametrize(("actual", "is_verified"), [(["yes", "no"], True), (["yes", "yes"], False)])
def test_texts_are_equal_or_not(actual: list[str], is_verified: bool) -> None:
    """A label beside the logits has no noise."""
    expected = {"y": SIGNAL, "label": np.array(["yes", "no"])}
    info = measure_fidelity([expected], [{"y": SIGNAL, "label": np.array(actual)}], 10.0)
    assert is_verified == info.is_verified
    assert ("" if is_verified else "other texts") == info.worst.problem


def test_noise_without_signal_is_the_lowest_ratio() -> None:
    """A ratio of nothing to something has no logarithm."""
    info = measure_fidelity([{"y": np.zeros(2), "z": SIGNAL}], [{"y": np.ones(2), "z": SIGNAL}], 10.0)
    assert ("y", -MOST_DB, 0.0) == (info.worst.name, info.worst.sqnr_db, info.worst.cosine)


def test_output_that_is_missing_is_named() -> None:
    """A graph of fewer bits has the outputs of its reference."""
    info = measure_fidelity([{"y": SIGNAL, "z": SIGNAL}], [{"y": SIGNAL}], 10.0)
    assert ("z", "is missing", False) == (info.worst.name, info.worst.problem, info.is_verified)
