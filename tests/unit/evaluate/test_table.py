"""Console output of an evaluation."""

from __future__ import annotations

import pytest

from winml.modelkit.evaluate.records import EvaluatedData, EvaluatedSide, Evaluation, Limit, MetricResult
from winml.modelkit.evaluate.table import evaluation_document
from winml.modelkit.profile.statistics import Summary
from winml.modelkit.report.markdown import render_markdown


def _limit_line(limit: Limit, *, is_disturbed: bool = False) -> str:
    times = Summary(4.0, 0.1, 3.9, 4.0, 4.1, 4.2, 4.3, 4.4)
    metric = MetricResult("accuracy", 0.90, True, (0.85, 0.95), 0.92, (0.87, 0.96), (-0.04, 0.01))
    sides = [
        EvaluatedSide(name, "onnx", times, is_disturbed=is_disturbed, timed_samples=49) for name in ("a.onnx", "b.onnx")
    ]
    data = EvaluatedData("reviews.csv", "test", {}, 50, 50)
    result = Evaluation("0", "1", "text-classification", "", data, 8, 0, sides[0], (metric,), sides[1], limits=(limit,))
    return "\n".join((render_markdown(evaluation_document(result)), *result.time_notes()))


@pytest.mark.parametrize(
    ("limit", "is_resolved"),
    [
        (Limit("max_drop", "accuracy", 0.03, 0.02), False),  # the drop is between -0.01 and 0.04
        (Limit("max_drop", "accuracy", 0.05, 0.02), True),
        (Limit("min", "accuracy", 0.88, 0.90), False),
        (Limit("min", "accuracy", 0.80, 0.90), True),
    ],
)
def test_limit_inside_the_interval_is_not_resolved_by_the_samples(limit: Limit, is_resolved: bool) -> None:
    """The verdict uses the values; the text warns that other samples may decide differently."""
    told = _limit_line(limit)
    assert "met: accuracy" in told
    assert is_resolved == ("too few samples to be sure" not in told)


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_disturbed_time_is_hidden(is_disturbed: bool) -> None:
    told = _limit_line(Limit("min", "accuracy", 0.80, 0.90), is_disturbed=is_disturbed)
    assert is_disturbed == ("ms per sample" not in told)
    assert is_disturbed == ("seems busy" in told)
