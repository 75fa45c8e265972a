"""Text of a comparison: a difference only if one was measured."""

from __future__ import annotations

import pytest

from winml.modelkit.profile.statistics import Ratio
from winml.modelkit.profile.table import ratio_words


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (Ratio(1.01, 0.97, 1.05, 0.95, 30), "undecided: ratio 1.01 (0.97–1.05), not wholly below or above 0.98; "),
        (Ratio(1.0, 0.99, 1.01, 0.95, 30), "no difference found: ratio 1.00 (0.99–1.01)"),
        (Ratio(0.8, 0.75, 0.85, 0.95, 30), "a is faster than b: ratio 0.80 (0.75–0.85), so 1.25 times as fast"),
        (Ratio(1.5, 1.4, 1.6, 0.95, 30), "a is slower than b: ratio 1.50 (1.40–1.60)"),
        (Ratio(0.0045, 0.00441, 0.052, 0.95, 30), "a is faster than b: ratio 0.0045 (0.0044–0.052), so 222.22 times"),
        (Ratio(0.5, 0.45, 0.55, 0.95, 30, slowdown=2.3), "undecided: the machine seems busy: the median run took 2.3"),
        (Ratio(0.1, 0.05, 0.2, 0.95, 30, slowdown=2.3), "a is faster than b: ratio 0.10 (0.050–0.20), so 10.00 times"),
        (Ratio(0.5, None, None, 0.95, 3), "undecided: ratio 0.50 from 3 pairs, too few for an interval; more runs"),
    ],
)
def test_ratio_words_include_the_interval(ratio: Ratio, words: str) -> None:
    """A ratio is never written without its interval, and not at all if other load made it."""
    assert ratio_words(ratio, "a", "b").startswith(words)
