"""Sizes, counts and verifications in words."""

from __future__ import annotations

import numpy as np
import pytest

from winml.modelkit.compare.outputs import VerificationInfo, compare_outputs
from winml.modelkit.compare.words import verification_words
from winml.modelkit.words import count_words, shape_words, size_words

HIDDEN = "so a wrong graph would go unnoticed"
REMEDY = "use real weights or other inputs (--input-specs)"
NO_SIGNAL = f"no output of the model depends on its inputs, {HIDDEN}"


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_940, "999.9 kB"),
        (999_999, "1.0 MB"),
        (1_000_000, "1.0 MB"),
        (2_500_000_000, "2.50 GB"),
    ],
)
def test_size_words_use_the_largest_unit_above_1(size: int, words: str) -> None:
    """The units are decimal, as for disks."""
    assert words == size_words(size)


@pytest.mark.parametrize(("count", "words"), [(0, "0"), (999, "999"), (1000, "1.0 k"), (1_000_000, "1.0 M")])
def test_count_words_round_to_common_units(count: int, words: str) -> None:
    """The units are thousands, millions and billions."""
    assert words == count_words(count)


def test_shape_words_of_a_scalar_are_empty_brackets() -> None:
    """A scalar has empty brackets."""
    assert "float32[]" == shape_words("float32", ())


def compared(expected: list[float], actual: list[float], dtype: str = "float32", other: float = 9) -> VerificationInfo:
    """Compare one output of two draws."""
    second = np.array([other] * len(expected), dtype)
    return compare_outputs(
        [{"y": np.array(expected, dtype)}, {"y": second}], [{"y": np.array(actual, dtype)}, {"y": second}]
    )


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (None, "skipped: this file was not compared with the model"),
        (compared([1], [1]), "ONNX Runtime equals PyTorch (largest relative difference 0.0e+00, tolerance 1e-04)"),
        (
            compared([1], [1.5]),
            "not equal: output 'y', sample 1 (largest relative difference 5.0e-01, tolerance 1e-04)",
        ),
        (compared([1], [1], "int64"), "ONNX Runtime equals PyTorch (equal)"),
        (compared([4], [6], "int64"), "not equal: output 'y', sample 1 (largest difference 2, tolerance 0)"),
        (compared([1], [np.nan]), "not equal: output 'y', sample 1: NaN or infinity in different places"),
        (compared([9], [9]), f"not checked: {NO_SIGNAL}; {REMEDY}"),
        (compared([0], [0], other=0), f"not checked: the model returns only zeros, {HIDDEN}; {REMEDY}"),
        (
            compared([np.inf], [np.inf], other=np.nan),
            f"not checked: the model returns only NaN and infinities, {HIDDEN}; {REMEDY}",
        ),
        (
            compared([1e-30], [1e-30], other=0),
            f"not checked: the model returns only zeros and values below 1e-20, {HIDDEN}; {REMEDY}",
        ),
    ],
)
def test_verification_words_state_the_outcome(info: VerificationInfo | None, words: str) -> None:
    """A verification is skipped, equal, not equal with the position, or not checked: one sentence with its numbers."""
    assert words == verification_words(info)
