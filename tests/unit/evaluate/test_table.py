"""Console output of an evaluation."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from winml.modelkit.evaluate.records import (
    ChangedSample,
    Confusion,
    EvaluatedData,
    EvaluatedSide,
    Evaluation,
    Limit,
    MetricResult,
)
from winml.modelkit.evaluate.table import evaluation_document
from winml.modelkit.profile.statistics import Summary
from winml.modelkit.report.html import render_html
from winml.modelkit.report.markdown import render_markdown
from winml.modelkit.report.terminal import print_document


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


def _printed(result: Evaluation) -> str:
    text = io.StringIO()
    print_document(evaluation_document(result), Console(file=text, width=200))
    return text.getvalue()


def test_confusion_of_few_classes_is_a_matrix_in_a_terminal() -> None:
    confusion = Confusion(("bad", "good"), 0, ((8, 2), (0, 10)), ((9, 1), (0, 10)))
    printed = _printed(replace(_evaluation(()), confusion=confusion))
    assert "8 (-1)" in printed
    assert "2 (+1)" in printed


def test_confusion_of_many_classes_is_a_matrix_on_a_page_and_pairs_in_a_terminal() -> None:
    names = tuple(f"class{number}" for number in range(10))
    rows = tuple(tuple(2 * (row == column) for column in range(11)) for row in range(11))
    wrong = (*rows[:3], (0, 7, *rows[3][2:]), *rows[4:])
    result = replace(_evaluation(()), confusion=Confusion(names, 4, wrong))
    printed, page = _printed(result), render_html(evaluation_document(result))
    assert ["class3", "class1", "7"] in [line.split() for line in printed.splitlines()]
    assert "4 others" not in printed
    assert "4 others" in page


def test_changed_samples_are_limited_in_a_terminal() -> None:
    changed = tuple(ChangedSample(number, "good", "good", "bad", "now wrong", "fine") for number in range(8))
    result = replace(_evaluation(()), changed=changed, differing=tuple(range(8)), agreement=0.84)
    printed, page = _printed(result), render_html(evaluation_document(result))
    assert (5, 8) == (printed.count("now wrong"), page.count("now wrong"))
    assert "3 more samples" in printed
