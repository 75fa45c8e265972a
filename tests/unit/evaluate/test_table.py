"""Console output of an evaluation."""

from __future__ import annotations

import math

import pytest

from winml.modelkit.evaluate.records import EvaluatedData, EvaluatedSide, Evaluation, Limit, MetricResult
from winml.modelkit.evaluate.table import evaluation_document
from winml.modelkit.profile.statistics import Summary
from winml.modelkit.report.markdown import render_markdown


def _evaluation(limits: tuple[Limit, ...], *, is_disturbed: bool = False) -> Evaluation:
    times = Summary(4.0, 0.1, 3.9, 4.0, 4.1, 4.2, 4.3, 4.4)
    metric = MetricResult("accuracy", 0.90, True, (0.85, 0.95), 0.92, (0.87, 0.96), (-0.04, 0.01))
    sides = [
        EvaluatedSide(name, "onnx", times, is_disturbed=is_disturbed, timed_samples=49) for name in ("a.onnx", "b.onnx")
    ]
    data = EvaluatedData("reviews.csv", "test", {}, 50, 50)
    return Evaluation("0", "1", "text-classification", "", data, 8, 0, sides[0], (metric,), sides[1], limits=limits)


def _limit_line(limit: Limit, *, is_disturbed: bool = False) -> str:
    result = _evaluation((limit,), is_disturbed=is_disturbed)
    return "\n".join((render_markdown(evaluation_document(result)), *result.time_notes()))


_DROP, _VALUE = (-0.01, 0.04), (0.85, 0.95)


@pytest.mark.parametrize(
    ("limit", "answer", "is_met"),
    [
        (Limit("max_drop", "accuracy", 0.03, 0.02, _DROP, 50), "undecided", True),
        (Limit("max_drop", "accuracy", 0.01, 0.02, _DROP, 50), "undecided", False),
        (Limit("max_drop", "accuracy", 0.05, 0.02, _DROP, 50), "yes", True),
        (Limit("max_drop", "accuracy", 0.05, 0.2, (0.1, 0.3), 50), "no", False),
        (Limit("min", "accuracy", 0.88, 0.90, _VALUE, 50), "undecided", True),
        (Limit("min", "accuracy", 0.80, 0.90, _VALUE, 50), "yes", True),
        (Limit("min", "accuracy", 0.96, 0.90, _VALUE, 50), "no", False),
        (Limit("max", "wer", 0.2, 0.1), "undecided", True),  # one sample has no interval
        (Limit("min", "spearman", 0.2, math.nan), "no", False),
    ],
)
def test_limit_inside_the_interval_is_undecided(limit: Limit, answer: str, is_met: bool) -> None:
    """The verdict uses the interval, the exit code the measured value."""
    assert (answer, is_met) == (limit.verdict.answer, limit.is_met)
    assert limit.words in _limit_line(limit)
    assert ("undecided" in limit.words) is (answer == "undecided")


@pytest.mark.parametrize(
    ("limit", "needs"),
    [
        (Limit("max_drop", "accuracy", 0.01, 0.0, (-0.06, 0.06), 50), "about 300 samples"),  # no sample differs
        (Limit("max_drop", "accuracy", 0.03, 0.02, (-0.02, 0.06), 50), "about 800 samples"),  # a fourth of the width
        (Limit("max_drop", "f1", 0.0, 0.0, (-0.06, 0.06), 50), "a limit outside of the interval"),
    ],
)
def test_undecided_limit_states_the_samples_that_decide_it(limit: Limit, needs: str) -> None:
    assert needs == limit.verdict.decided_by


def test_evaluation_is_no_if_one_limit_is_and_undecided_if_none_is_missed_for_certain() -> None:
    yes, undecided, no = (Limit("min", "accuracy", least, 0.90, _VALUE, 50) for least in (0.80, 0.88, 0.96))
    answers = [_evaluation(limits).verdict for limits in ((yes,), (yes, undecided), (undecided, no), ())]
    assert ["yes", "undecided", "no", None] == [verdict and verdict.answer for verdict in answers]


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_disturbed_time_is_hidden(is_disturbed: bool) -> None:
    told = _limit_line(Limit("min", "accuracy", 0.80, 0.90), is_disturbed=is_disturbed)
    assert is_disturbed == ("ms per sample" not in told)
    assert is_disturbed == ("seems busy" in told)
